//! Tasks of one client hand one key on Redis to each other. The limit is that of the hand-off.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures_util::poll;
use lock_runtime::LockClient;
use lock_tests::redis_server::RedisServer;
use tokio::{
    sync::watch,
    task::{JoinSet, yield_now},
    time::sleep,
};

use crate::{
    handoff, heap,
    raw::{self, Raw},
    report::Row,
    subject::{Ours, Rslock, Subject},
};

/// The last number is the default limit of waiters.
const TASKS: [usize; 2] = [100, 10_000];
/// Longer than the first attempt of each waiter takes.
const SETTLED: Duration = Duration::from_millis(500);

pub(crate) async fn measure(slice: Duration) -> Vec<Row> {
    let server = RedisServer::start().await;
    let client = raw::client(&server.url());
    let locks = LockClient::connect(&server.url())
        .await
        .expect("our own server answers");
    let raw = Raw::connect(&client).await;
    let manager = Rslock::manager(&client);
    let mut rows = Vec::new();
    for tasks in TASKS {
        let bytes_per_waiter = bytes_per_waiter(server.url(), tasks).await;
        let (ours, peers) = (vec![locks.clone(); tasks], vec![manager.clone(); tasks]);
        let mut measured = handoff::on_one_key("hot", slice, &server, &raw, &ours, &peers).await;
        measured[0].bytes_per_waiter = Some(bytes_per_waiter);
        rows.append(&mut measured);
    }
    locks.shutdown().await;
    rows
}

/// Heap use of the future of an acquire while it waits, with all state that the client keeps for
/// it. The tasks exist before, so their own memory does not count.
async fn bytes_per_waiter(url: String, tasks: usize) -> f64 {
    eprintln!("hot, {tasks} clients, bytes per waiter");
    let prepare = async move || {
        let locks = LockClient::connect(&url)
            .await
            .expect("our own server answers");
        // The lock is not released at the end, so no other measurement uses this key.
        let key = format!("waiters:{tasks}");
        let holder = Ours::new(&locks, key.clone());
        let guard = holder.acquire().await;
        let waiting = Arc::new(AtomicUsize::new(0));
        let (start, started) = watch::channel(false);
        let mut waiters = JoinSet::new();
        for _ in 0..tasks {
            let (mut started, waiting) = (started.clone(), waiting.clone());
            let request = locks.exclusive(&key).wait(Duration::from_secs(60));
            waiters.spawn(async move {
                let _ = started.wait_for(|&started| started).await;
                let mut acquire = request.acquire();
                assert!(poll!(&mut acquire).is_pending(), "the lock must be held");
                waiting.fetch_add(1, Ordering::Relaxed);
                acquire.await
            });
        }
        (start, waiting, waiters, guard)
    };
    let wait = async move |(start, waiting, ..): &mut (
        watch::Sender<bool>,
        Arc<AtomicUsize>,
        JoinSet<_>,
        _,
    )| {
        start.send_replace(true);
        while waiting.load(Ordering::Relaxed) < tasks {
            yield_now().await;
        }
        sleep(SETTLED).await;
    };
    heap::growth(prepare, wait).await / tasks as f64
}
