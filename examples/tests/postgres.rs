//! `flash-sale` on PostgreSQL.

mod story;

// A module, as `tests/run.sh` skips those of this name where PostgreSQL is not asked for.
mod stores {
    use lock_tests::{postgres, shared_postgres};

    use crate::story::{EXACT, mistakes, oversells, sale};

    #[test]
    fn a_sale_of_four_processes_on_a_server_of_its_own_sells_exactly_its_stock() {
        let line = sale(&["--store", "postgres", "--processes", "4"]);
        assert!(line.starts_with(EXACT), "{line}");
    }

    #[tokio::test]
    async fn a_sale_leaves_nothing_in_the_database() {
        let url = shared_postgres().await.new_database().await;
        let line = sale(&["--postgres", &url, "--processes", "4"]);
        assert!(line.starts_with(EXACT), "{line}");

        let client = postgres::connect(&url).await;
        let left = "select name from lock_runtime.record \
             union all select tablename from pg_tables where schemaname = 'public'";
        let left = client.query(left, &[]).await.expect("both are there");
        let left: Vec<String> = left.iter().map(|row| row.get(0)).collect();
        assert!(left.is_empty(), "{left:?}");
    }

    #[test]
    fn a_sale_without_a_lock_oversells() {
        oversells(&["--store", "postgres", "--processes", "4"]);
    }

    #[test]
    fn a_mistake_in_the_options_is_one_line() {
        mistakes(&[
            (&["--postgres", "nonsense"], "postgres://"),
            (&["--postgres", "redis://127.0.0.1/"], "postgres://"),
            (
                &["--postgres", "postgres://127.0.0.1:1/shop"],
                "127.0.0.1:1",
            ),
            (
                &["--store", "redis", "--postgres", "postgres://127.0.0.1/"],
                "--redis <URL>",
            ),
            (
                &["--store", "memory", "--postgres", "postgres://127.0.0.1/"],
                "--postgres URL cannot be used with --store memory",
            ),
        ]);
    }
}
