//! One holder at a time, as counted by a resource that checks fencing tokens: among tasks, among
//! processes, and while processes are killed and paused.
//!
//! The storms are short. This command makes them twenty times as long:
//! `LOCK_TESTS_STORM=20 cargo test -p lock-tests --test api exclusion`

use std::{sync::Arc, time::Duration};

use lock_runtime::LockClient;
use lock_tests::{
    FencedResource, RedisFencedResource, RedisServer, Worker,
    place::{LONG, in_time, times_as_long},
};
use tokio::{
    task::JoinSet,
    time::{sleep, timeout},
};

const WORKER: &str = env!("CARGO_BIN_EXE_lock-worker");
const RESOURCE: &str = "stock";

struct Storm {
    server: RedisServer,
    resource: RedisFencedResource,
    workers: Vec<Worker>,
}

impl Storm {
    async fn of(processes: usize, tasks: usize, rounds: usize, lease: Duration) -> Self {
        let server = RedisServer::start().await;
        let resource = RedisFencedResource::open(&server.url(), RESOURCE).await;
        let (url, tasks, rounds) = (
            server.url(),
            tasks.to_string(),
            (rounds * times_as_long()).to_string(),
        );
        let lease = lease.as_millis().to_string();
        let arguments = [
            "increment",
            "--url",
            &url,
            "--namespace",
            "lock",
            "--resource",
            RESOURCE,
            "--tasks",
            &tasks,
        ];
        let arguments = [&arguments[..], &["--rounds", &rounds, "--lease-ms", &lease]].concat();
        let mut workers: Vec<_> = (0..processes)
            .map(|_| Worker::spawn(WORKER, &arguments))
            .collect();
        for worker in &mut workers {
            assert_eq!(worker.line().await.as_deref(), Some("ready"));
        }
        for worker in &mut workers {
            worker.say("go").await;
        }
        Self {
            server,
            resource,
            workers,
        }
    }

    /// Total of the additions that the remaining workers report.
    async fn added(&mut self) -> u64 {
        let mut added = 0;
        for worker in &mut self.workers {
            added += worker
                .line()
                .await
                .expect("a worker has failed")
                .parse::<u64>()
                .unwrap();
        }
        for worker in &mut self.workers {
            assert!(worker.finish().await.success());
        }
        added
    }

    async fn wait_for(&self, value: u64) {
        while self.resource.read().await < value {
            sleep(Duration::from_millis(5)).await;
        }
    }
}

#[tokio::test]
async fn processes_never_meet_and_lose_no_update() {
    let mut storm = Storm::of(8, 50, 1, LONG).await;
    let added = storm.added().await;
    let report = storm.resource.report().await;
    assert!(report.is_clean() && report.peak == 1, "{report}");
    assert_eq!((added, report.value), (400 * times_as_long() as u64, added));
    assert!(storm.server.keys("lock:*").await.is_empty());
}

#[tokio::test]
async fn a_killed_and_a_paused_process_spoil_nothing() {
    let lease = Duration::from_millis(1500);
    let mut storm = Storm::of(4, 25, 3, lease).await;
    storm.wait_for(20).await;
    let mut killed = storm.workers.swap_remove(0);
    killed.kill().await;
    storm.resource.forget(killed.pid()).await;
    storm.wait_for(40).await;
    // It may be stopped in its critical section, and continues it when its lease is long over.
    storm.workers[0].stop();
    let value = storm.resource.read().await;
    storm.wait_for(value + 20).await;
    sleep(lease * 2).await;
    storm.workers[0].resume();
    let added = storm.added().await;
    let report = storm.resource.report().await;
    assert!(
        report.lost_updates == 0 && report.value == report.writes,
        "{report}"
    );
    assert!(report.value >= added, "{added} of {report}");
    // Only the paused process can have presented an old token, and only once.
    assert!(report.violations <= 1, "{report}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tasks_on_several_threads_never_meet() {
    in_time(async {
        let locks = LockClient::in_memory();
        let resource = Arc::new(FencedResource::new());
        let mut tasks = JoinSet::new();
        for _ in 0..50 {
            let (locks, resource) = (locks.clone(), resource.clone());
            tasks.spawn(async move {
                for round in 0..40 * times_as_long() {
                    if round % 3 == 0 {
                        let patience = Duration::from_micros(rand::random_range(0..2000));
                        let _ = timeout(patience, locks.exclusive("a").wait(LONG).acquire()).await;
                    }
                    let guard = locks.exclusive("a").wait(LONG).acquire().await.unwrap();
                    resource.increment(guard.fence()).await.unwrap();
                    if round % 2 == 0 {
                        guard.release().await.unwrap()
                    } else {
                        drop(guard)
                    }
                }
            });
        }
        tasks.join_all().await;
        let report = resource.report();
        assert!(report.is_clean() && report.peak == 1, "{report}");
        assert_eq!(report.value, 50 * 40 * times_as_long() as u64);
    })
    .await;
}
