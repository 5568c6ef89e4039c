//! Processes take turns while the leader of a cluster is killed every three seconds.
//! `LOCK_TESTS_STORM=70` makes it ten minutes.

use std::time::Duration;

use futures_util::future::{join, join_all};
use lock_runtime::LockClient;
use lock_tests::{
    EtcdCluster, FencedResource, ZooKeeperEnsemble,
    place::{LONG, in_time, times_as_long},
    unique,
};
use tokio::time::{Instant, sleep};

const ROUND: Duration = Duration::from_secs(3);
/// The processes, and the tasks of each.
const CLIENTS: usize = 3;
const TASKS: usize = 4;

/// Kills the leader in each round. Returns the longest time without a turn.
async fn take_turns(
    url: &str,
    rounds: u32,
    kill: impl AsyncFn(),
    restart: impl AsyncFn(),
) -> Duration {
    let namespace = unique("ns");
    let clients = join_all((0..CLIENTS).map(async |_| {
        let builder = LockClient::builder().namespace(&namespace);
        builder.connect(url).await.unwrap()
    }))
    .await;
    let rounds = rounds * u32::try_from(times_as_long()).unwrap();
    let resource = FencedResource::new();
    let begun = Instant::now();
    let is_over = || Instant::now() >= begun + ROUND * (rounds + 1);
    let latest = std::sync::Mutex::new((begun, Duration::ZERO));
    let turn = async |locks: &LockClient| {
        let request = locks.exclusive("k").lease(ROUND).wait(LONG);
        let Ok(guard) = request.acquire().await else {
            return;
        };
        // The lock may have been lost by now.
        if !guard.is_lost() && resource.increment(guard.fence()).await.is_ok() {
            let mut latest = latest.lock().unwrap();
            latest.1 = latest.1.max(latest.0.elapsed());
            latest.0 = Instant::now();
        }
        drop(guard.release().await);
    };
    let tasks = clients.iter().cycle().take(CLIENTS * TASKS);
    let tasks = tasks.map(async |locks| {
        while !is_over() {
            turn(locks).await;
        }
    });
    let kills = async {
        for round in 1..=rounds {
            tokio::time::sleep_until(begun + ROUND * round).await;
            kill().await;
            sleep(ROUND / 3).await;
            restart().await;
        }
    };
    join(join_all(tasks), kills).await;
    let report = resource.report();
    assert!(report.is_clean(), "{report}");
    assert!(report.value > u64::from(rounds) * 10, "{report}");
    latest.into_inner().unwrap().1
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn turns_are_taken_beside_elections_of_etcd() {
    in_time(async {
        let cluster = EtcdCluster::builder().members(3).start().await;
        let killed = std::cell::Cell::new(0);
        let kill = async || {
            killed.set(cluster.leader().await);
            cluster.kill(killed.get());
        };
        let restart = async || cluster.begin_restart(killed.get());
        let longest = take_turns(&cluster.url(), 3, kill, restart).await;
        println!("etcd: at most {longest:?} without a turn");
        assert!(longest < ROUND, "{longest:?}");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn turns_are_taken_beside_elections_of_zookeeper() {
    in_time(async {
        let ensemble = ZooKeeperEnsemble::builder().servers(3).start().await;
        let killed = std::cell::Cell::new(0);
        let kill = async || {
            killed.set(ensemble.leader().await);
            ensemble.kill(killed.get());
        };
        let restart = async || ensemble.begin_restart(killed.get());
        let longest = take_turns(&ensemble.url(), 1, kill, restart).await;
        println!("ZooKeeper: at most {longest:?} without a turn");
        assert!(longest < ROUND * 3, "{longest:?}");
    })
    .await;
}
