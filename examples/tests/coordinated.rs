//! `flash-sale` on etcd and ZooKeeper.

mod story;

// A module, as `tests/run.sh` skips those of this name where no server is asked for.
mod stores {
    use crate::story::{EXACT, mistakes, oversells, sale};

    #[test]
    fn a_sale_of_four_processes_sells_exactly_its_stock() {
        for store in ["etcd", "zookeeper"] {
            let line = sale(&["--store", store, "--processes", "4"]);
            assert!(line.starts_with(EXACT), "{store}: {line}");
        }
    }

    #[test]
    fn a_sale_without_a_lock_oversells() {
        oversells(&["--store", "etcd", "--processes", "4"]);
    }

    #[test]
    fn a_mistake_in_the_options_is_one_line() {
        mistakes(&[
            (&["--etcd", "nonsense"], "etcd://"),
            (&["--zookeeper", "etcd://127.0.0.1/"], "zookeeper://"),
            (&["--etcd", "etcd://127.0.0.1:1"], "127.0.0.1:1"),
            (
                &["--etcd", "etcd://a", "--zookeeper", "zookeeper://a"],
                "cannot be used with",
            ),
            (
                &["--store", "memory", "--etcd", "etcd://127.0.0.1"],
                "--etcd URL cannot be used with --store memory",
            ),
        ]);
    }
}
