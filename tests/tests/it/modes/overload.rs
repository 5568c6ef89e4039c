//! More wait than may: the others are refused at once.

use lock_runtime::{LockClient, LockError, LockErrorKind, LockRequest};

use crate::place::{LONG, Place, begun, on_every_store};

on_every_store! {
    a_full_line_refuses_at_once,
    a_request_has_a_limit_of_its_own,
    a_limit_of_none_still_lets_one_ask;
    with permits:
    each_family_has_a_line_of_its_own,
}

async fn a_full_line_refuses_at_once(place: Place) {
    let locks = place.client_of(LockClient::builder().max_waiters(3)).await;
    let guard = locks.exclusive("a").acquire().await.unwrap();
    // The one in front asks the store, and three wait behind it.
    let mut waiting = Vec::new();
    for _ in 0..4 {
        waiting.push(begun(locks.exclusive("a").wait(LONG).acquire()).await);
    }
    let start = tokio::time::Instant::now();
    let error = locks.exclusive("a").wait(LONG).acquire().await.unwrap_err();
    assert_eq!(error.kind(), LockErrorKind::Overloaded);
    assert_eq!(error.key().unwrap().as_str(), "a");
    assert!(start.elapsed() < LONG / 2, "{:?}", start.elapsed());
    locks.exclusive("b").acquire().await.unwrap().release().await.unwrap();
    // A place that is given up can be taken.
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
    // The client's limit is for whoever says nothing, and for whoever says more.
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
    // Whoever does not wait is in nobody's way.
    let error = request().no_wait().acquire().await.unwrap_err();
    assert_eq!(error.kind(), LockErrorKind::Contended);
    assert!(request().try_acquire().await.unwrap().is_none());
    guard.release().await.unwrap();
    head.await.unwrap().release().await.unwrap();
    request().no_wait().acquire().await.unwrap().release().await.unwrap();
}

async fn each_family_has_a_line_of_its_own(place: Place) {
    let locks = place.client().await;
    let lock = || locks.exclusive("a").wait(LONG).max_waiters(0);
    let permit = || lock().permits(1.try_into().unwrap());
    let guards = [lock().acquire().await.unwrap(), permit().acquire().await.unwrap()];
    let head = begun(lock().acquire()).await;
    overloaded(lock()).await;
    let permit_head = begun(permit().acquire()).await;
    overloaded(permit()).await;
    for guard in guards {
        guard.release().await.unwrap();
    }
    head.await.unwrap().release().await.unwrap();
    permit_head.await.unwrap().release().await.unwrap();
}

async fn overloaded(request: LockRequest) -> LockError {
    let error = request.acquire().await.expect_err("more wait than may");
    assert_eq!(error.kind(), LockErrorKind::Overloaded, "{error}");
    error
}
