//! The return value of a locked function that does not get its lock: `on_busy` and `map_err`. The
//! body does not run.

use std::{cell::Cell, time::Duration};

use lock_runtime::{LockClient, LockError, LockErrorKind, LockSpec, distributed_lock};
use tokio::time::Instant;

use super::with_client;

#[distributed_lock(key = "a", global, no_wait, on_busy = skip)]
async fn skipped(runs: &Cell<u32>) -> Result<Option<u32>, LockError> {
    runs.set(runs.get() + 1);
    Ok(Some(runs.get()))
}

#[distributed_lock(key = "a", global, wait = "250ms", on_busy = skip, map_err = unexpected)]
async fn skipped_after_a_wait(runs: &Cell<u32>) {
    runs.set(runs.get() + 1);
}

#[distributed_lock(key = "a", global, no_wait, on_busy = skip, map_err = nothing)]
async fn skipped_option() -> Option<&'static str> {
    Some("done")
}

#[distributed_lock(key = "a:{id}", no_wait, on_busy = Ok(busy(id, name)?))]
async fn answered(
    id: u64,
    name: String,
) -> Result<String, Box<dyn std::error::Error + Send + Sync>> {
    let moved = name;
    Ok(format!("{id} is {moved}"))
}

fn busy(id: u64, name: String) -> Result<String, std::fmt::Error> {
    if name.is_empty() {
        Err(std::fmt::Error)
    } else {
        Ok(format!("{id} is {name}'s"))
    }
}

#[distributed_lock(key = "a", global, no_wait, on_busy = return later().await)]
async fn answered_by_a_return() -> Result<u8, LockError> {
    Ok(1)
}

async fn later() -> Result<u8, LockError> {
    tokio::task::yield_now().await;
    Ok(2)
}

#[distributed_lock(key = "a", global, no_wait, map_err = |error| error.code())]
async fn mapped_by_a_closure() -> &'static str {
    "done"
}

struct Jobs;

impl Jobs {
    #[distributed_lock(key = "a", global, no_wait, map_err = Self::failed)]
    async fn mapped_by_a_method(&self) -> impl std::fmt::Display + use<> {
        String::from("done")
    }

    fn failed(error: LockError) -> String {
        error.code().to_owned()
    }
}

fn unexpected(error: LockError) {
    panic!("{error}");
}

fn nothing(error: LockError) -> Option<&'static str> {
    assert_eq!(error.kind(), LockErrorKind::WouldDeadlock);
    None
}

#[tokio::test(start_paused = true)]
async fn a_busy_lock_is_skipped_and_the_body_does_not_run() {
    with_client(async |locks| {
        let runs = Cell::new(0);
        assert_eq!(skipped(&runs).await.unwrap(), Some(1));
        skipped_after_a_wait(&runs).await;
        assert_eq!(skipped_option().await, Some("done"));
        assert_eq!(runs.get(), 2);

        let guard = locks.exclusive("a").acquire().await.unwrap();
        assert_eq!(skipped(&runs).await.unwrap(), None);
        let start = Instant::now();
        skipped_after_a_wait(&runs).await;
        assert!(
            start.elapsed() >= Duration::from_millis(250),
            "the call did not wait"
        );
        assert_eq!(skipped_option().await, None);
        assert_eq!(runs.get(), 2);
        guard.release().await.unwrap();
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn only_a_lock_that_others_hold_is_skipped() {
    with_client(async |locks| {
        let runs = Cell::new(0);
        let own = locks
            .exclusive("a")
            .run(async |_| skipped(&runs).await)
            .await
            .unwrap();
        assert_eq!(own.unwrap_err().kind(), LockErrorKind::WouldDeadlock);
        assert_eq!(
            locks
                .exclusive("a")
                .run(async |_| skipped_option().await)
                .await
                .unwrap(),
            None
        );
        locks.shutdown().await;
        assert_eq!(
            skipped(&runs).await.unwrap_err().kind(),
            LockErrorKind::ShuttingDown
        );
        assert_eq!(runs.get(), 0);
    })
    .await;
    assert_eq!(
        skipped(&Cell::new(0)).await.unwrap_err().kind(),
        LockErrorKind::NoClient
    );
}

#[tokio::test(start_paused = true)]
async fn a_busy_lock_is_answered_with_what_is_written() {
    with_client(async |locks| {
        assert_eq!(answered(7, "Ann".into()).await.unwrap(), "7 is Ann");
        assert_eq!(answered_by_a_return().await.unwrap(), 1);
        let _guards = locks.all(["a", "a:7"]).acquire().await.unwrap();
        assert_eq!(answered(7, "Ann".into()).await.unwrap(), "7 is Ann's");
        assert!(
            answered(7, String::new())
                .await
                .unwrap_err()
                .is::<std::fmt::Error>()
        );
        assert_eq!(answered_by_a_return().await.unwrap(), 2);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn an_error_is_what_the_function_makes_of_it() {
    with_client(async |locks: &LockClient| {
        assert_eq!(mapped_by_a_closure().await, "done");
        assert_eq!(Jobs.mapped_by_a_method().await.to_string(), "done");
        let request = locks.request("a", LockSpec::exclusive().lease(Duration::from_secs(1)));
        let _guard = request.acquire().await.unwrap();
        assert_eq!(mapped_by_a_closure().await, "contended");
        assert_eq!(Jobs.mapped_by_a_method().await.to_string(), "contended");
    })
    .await;
    assert_eq!(mapped_by_a_closure().await, "no_client");
}
