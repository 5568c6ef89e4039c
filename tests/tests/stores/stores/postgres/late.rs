//! Waiters that no message reaches: behind an open transaction with `guard`, and behind a pooler.

use std::time::Duration;

use lock_runtime::LockClient;
use lock_tests::{
    PgBouncer,
    place::{LONG, Stopwatch, begun, in_time},
    shared_postgres,
};
use tokio::time::{Instant, sleep};

use super::{client_of_new_database, held, waiters};

/// Polls that follow each other after a second would take half of that on average.
const SOON: Duration = Duration::from_millis(250);

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

#[tokio::test]
async fn a_waiter_is_served_soon_after_the_commit_of_a_transaction_with_guard() {
    in_time(async {
        let (url, locks, transaction) = client_of_new_database().await;
        let other = LockClient::connect(&url).await.unwrap();
        let mut times = Vec::new();
        for _ in 0..9 {
            let guard = held(&locks, "a").await;
            let call = format!(
                "begin; select lock_runtime.guard('lock:a', {})",
                guard.fence()
            );
            transaction.batch_execute(&call).await.unwrap();
            let waiting = tokio::spawn(begun(other.exclusive("a").wait(LONG).acquire()).await);
            waiters(&locks, "a", 1).await;
            guard.release().await.unwrap();
            sleep(Duration::from_millis(700)).await;
            assert!(!waiting.is_finished(), "the transaction is open");
            let committed = Stopwatch::start();
            transaction.batch_execute("commit").await.unwrap();
            let next = waiting.await.unwrap().unwrap();
            times.push(committed.elapsed());
            next.release().await.unwrap();
        }
        let median = median(times);
        assert!(median < SOON, "{median:?}");
    })
    .await;
}

#[tokio::test]
async fn a_short_wait_behind_a_pooler_is_short() {
    in_time(async {
        let server = shared_postgres().await;
        let url = server.new_database().await;
        let (_, database) = url.rsplit_once('/').unwrap();
        let pooler = PgBouncer::to(server).await;
        let url = pooler.url_of(database);
        let (locks, other) = (
            LockClient::connect(&url).await.unwrap(),
            LockClient::connect(&url).await.unwrap(),
        );
        let mut times = Vec::new();
        for _ in 0..9 {
            let guard = held(&locks, "a").await;
            let waiting = tokio::spawn(begun(other.exclusive("a").wait(LONG).acquire()).await);
            waiters(&locks, "a", 1).await;
            let released = Instant::now();
            guard.release().await.unwrap();
            waiting.await.unwrap().unwrap().release().await.unwrap();
            times.push(released.elapsed());
        }
        let median = median(times);
        assert!(median < SOON, "{median:?}");
    })
    .await;
}
