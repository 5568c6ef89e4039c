//! Limits on the number of waiters: further requests are refused at once.

use std::{panic::resume_unwind, time::Duration};

use lock_runtime::{LockClient, LockError, LockErrorKind, LockRequest};
use lock_tests::{
    chain,
    place::{LONG, Place, begun, eventually, on_every_store},
};
use tokio::{
    task::JoinSet,
    time::{sleep, timeout},
};

on_every_store! {
    a_full_line_refuses_at_once,
    a_request_has_a_limit_of_its_own,
    a_limit_of_none_still_lets_one_ask,
    all_lines_together_have_a_limit,
    after_a_storm_the_limit_of_waiters_is_exact;
    with permits:
    each_family_has_a_line_of_its_own,
}

async fn a_full_line_refuses_at_once(place: Place) {
    let locks = place.client_of(LockClient::builder().max_waiters(3)).await;
    let guard = locks.exclusive("a").acquire().await.unwrap();
    // The head of the queue polls the store, and three wait behind it.
    let mut waiting = Vec::new();
    for _ in 0..4 {
        waiting.push(begun(locks.exclusive("a").wait(LONG).acquire()).await);
    }
    let start = tokio::time::Instant::now();
    let error = locks.exclusive("a").wait(LONG).acquire().await.unwrap_err();
    assert_eq!(error.kind(), LockErrorKind::Overloaded);
    assert_eq!(error.key().unwrap().as_str(), "a");
    assert!(start.elapsed() < LONG / 2, "{:?}", start.elapsed());
    locks
        .exclusive("b")
        .acquire()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
    // A place in the queue that becomes free can be taken.
    drop(waiting.pop());
    waiting.push(begun(locks.exclusive("a").wait(LONG).acquire()).await);
    guard.release().await.unwrap();
    for waiting in waiting {
        waiting.await.unwrap().release().await.unwrap();
    }
}

async fn a_request_has_a_limit_of_its_own(place: Place) {
    let locks = place.client_of(LockClient::builder().max_waiters(2)).await;
    let guard = locks.exclusive("a").acquire().await.unwrap();
    let request = || locks.exclusive("a").wait(LONG);
    let head = begun(request().max_waiters(1).acquire()).await;
    let first = begun(request().max_waiters(1).acquire()).await;
    overloaded(request().max_waiters(1)).await;
    // The limit of the client applies to requests with no limit and to those with a larger one.
    let second = begun(request().acquire()).await;
    overloaded(request().max_waiters(50)).await;
    drop(second);
    overloaded(request().max_waiters(1)).await;
    drop(begun(request().max_waiters(50).acquire()).await);
    guard.release().await.unwrap();
    for waiting in [head, first] {
        waiting.await.unwrap().release().await.unwrap();
    }
}

async fn a_limit_of_none_still_lets_one_ask(place: Place) {
    let locks = place.client().await;
    let request = || locks.exclusive("a").wait(LONG).max_waiters(0);
    let guard = request().acquire().await.expect("it is free");
    let head = begun(request().acquire()).await;
    overloaded(request()).await;
    // A request that does not wait takes no place.
    let error = request().no_wait().acquire().await.unwrap_err();
    assert_eq!(error.kind(), LockErrorKind::Contended);
    assert!(request().try_acquire().await.unwrap().is_none());
    guard.release().await.unwrap();
    head.await.unwrap().release().await.unwrap();
    request()
        .no_wait()
        .acquire()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
}

async fn all_lines_together_have_a_limit(place: Place) {
    let others = place.client().await;
    let locks = place
        .client_of(LockClient::builder().max_waiters_in_all(3))
        .await;
    let guards = [
        others.exclusive("a").acquire().await.unwrap(),
        others.exclusive("b").acquire().await.unwrap(),
    ];
    let request = |key: &'static str| locks.exclusive(key).wait(LONG);
    let mut waiting = Vec::new();
    for key in ["a", "a", "b"] {
        waiting.push(begun(request(key).acquire()).await);
    }
    // Also where the lock is free. Requests that do not wait, and shared ones that are granted at
    // once, need no place.
    for key in ["a", "b", "c"] {
        let error = overloaded(request(key)).await;
        assert_eq!(error.key().unwrap().as_str(), key);
        assert!(
            chain(&error).contains("`LockClientBuilder::max_waiters_in_all`"),
            "{error}"
        );
    }
    overloaded(locks.all(["c", "d"]).wait(LONG)).await;
    request("c")
        .no_wait()
        .acquire()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
    locks
        .shared("c")
        .acquire()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
    drop(waiting.pop());
    request("c")
        .acquire()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
    locks
        .all(["c", "d"])
        .wait(LONG)
        .acquire()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
    for guard in guards {
        guard.release().await.unwrap();
    }
    for waiting in waiting {
        waiting.await.unwrap().release().await.unwrap();
    }
}

async fn after_a_storm_the_limit_of_waiters_is_exact(place: Place) {
    const LIMIT: usize = 12;
    const KEYS: [&str; 3] = ["a", "b", "c"];
    let locks = place
        .client_of(LockClient::builder().max_waiters_in_all(LIMIT))
        .await;
    let mut tasks = JoinSet::new();
    for task in 0..30 {
        let locks = locks.clone();
        tasks.spawn(async move {
            for round in 0..10 {
                let patience = || Duration::from_micros(rand::random_range(0..5_000));
                let request = locks
                    .exclusive(KEYS[(task + round) % KEYS.len()])
                    .wait(patience());
                let (given_up, held) = (patience(), patience());
                let turn = async {
                    let guard = request.acquire().await;
                    sleep(held).await;
                    drop(guard);
                };
                if round == 9 && task % 3 == 0 {
                    // As a panic does, except for the message.
                    tokio::join!(turn, async {
                        sleep(given_up).await;
                        resume_unwind(Box::new("a panic beside a request"))
                    });
                } else {
                    let _ = timeout(given_up, turn).await;
                }
            }
        });
    }
    while let Some(ended) = tasks.join_next().await {
        assert!(ended.is_ok() || ended.is_err_and(|error| error.is_panic()));
    }

    let others = place.client().await;
    let mut guards = Vec::new();
    for key in KEYS {
        guards.push(others.exclusive(key).wait(LONG).acquire().await.unwrap());
    }
    let mut waiting = Vec::new();
    for number in 0..LIMIT {
        waiting.push(
            begun(
                locks
                    .exclusive(KEYS[number % KEYS.len()])
                    .wait(LONG)
                    .acquire(),
            )
            .await,
        );
    }
    overloaded(locks.exclusive("d").wait(LONG)).await;
    drop(waiting);
    for guard in guards {
        guard.release().await.unwrap();
    }
}

async fn each_family_has_a_line_of_its_own(place: Place) {
    let locks = place.client().await;
    let lock = || locks.exclusive("a").wait(LONG).max_waiters(0);
    let permit = || lock().permits(1.try_into().unwrap());
    let guards = [
        lock().acquire().await.unwrap(),
        permit().acquire().await.unwrap(),
    ];
    let head = begun(lock().acquire()).await;
    overloaded(lock()).await;
    let permit_head = tokio::spawn(permit().acquire());
    // The first attempt of a request for permits bypasses the local queue.
    eventually("it stands in line", async || {
        !locks
            .inspect("a")
            .permits()
            .await
            .unwrap()
            .waiters
            .is_empty()
    })
    .await;
    overloaded(permit()).await;
    for guard in guards {
        guard.release().await.unwrap();
    }
    head.await.unwrap().release().await.unwrap();
    permit_head.await.unwrap().unwrap().release().await.unwrap();
}

async fn overloaded(request: LockRequest) -> LockError {
    let error = request.acquire().await.expect_err("more wait than may");
    assert_eq!(error.kind(), LockErrorKind::Overloaded, "{error}");
    error
}
