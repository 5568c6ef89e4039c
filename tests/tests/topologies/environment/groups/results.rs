//! Releases with results, in groups.

use std::{slice, sync::Arc, time::Duration};

use futures_util::future::join_all;
use lock_runtime::{
    FencingToken, LockKind, Mode,
    store::{
        AcquireReply, Done, Hold, Instant, KeyRequest, PollReply, Release, ReleaseReply,
        Store as _, StoreError, StoreErrorKind, Token, redis::RedisStore,
    },
};

use lock_tests::RedisServer;

use super::{ALONE, HOUR, acquire, fence_of, one_server, requests, scripts_run};

/// A server that knows the script.
async fn knowing_server() -> (RedisServer, RedisStore) {
    let (server, store) = one_server().await;
    for reply in record(&store, &requests("known"), |_| 1).await {
        assert_eq!(reply.unwrap(), ReleaseReply::Released);
    }
    scripts_run(&server).await;
    (server, store)
}

/// Acquires the locks, and records a result of the given length under each.
async fn record(
    store: &RedisStore,
    requests: &[KeyRequest],
    length: impl Fn(usize) -> usize,
) -> Vec<Result<ReleaseReply, StoreError>> {
    let granted = acquire(store, requests).await;
    let release = |(number, granted)| {
        let result = result_of(number, length(number));
        released_with(&requests[number], fence_of(granted), &result)
    };
    let releases: Vec<_> = granted.iter().enumerate().map(release).collect();
    join_all(releases.iter().map(|release| store.release(release))).await
}

fn released_with(request: &KeyRequest, fence: FencingToken, result: &[u8]) -> Release {
    let release = Release::new(request.hold.clone()).keep_for(Some(HOUR));
    release.result(Some((fence, Arc::from(result))))
}

fn result_of(number: usize, length: usize) -> Vec<u8> {
    vec![u8::try_from(number).unwrap(); length]
}

async fn done(store: &RedisStore, request: &KeyRequest) -> Done {
    let done = store.done(&request.hold.key).await.unwrap();
    done.expect("a result was recorded")
}

#[tokio::test]
async fn results_that_come_together_share_a_call() {
    let (server, store) = knowing_server().await;
    // With one of no bytes.
    let (locks, length) = (requests("k"), |number: usize| (number % 7) * 100);
    for reply in record(&store, &locks, length).await {
        assert_eq!(reply.unwrap(), ReleaseReply::Released);
    }
    assert_eq!(scripts_run(&server).await, 2 * (ALONE as u64 + 1));
    let mut releases = Vec::new();
    for (number, request) in locks.iter().enumerate() {
        let Done { value, fence, .. } = done(&store, request).await;
        assert_eq!(value, result_of(number, length(number)));
        releases.push(released_with(request, fence, b"another"));
    }
    scripts_run(&server).await;
    // A record that is repeated has succeeded, and changes nothing.
    for reply in join_all(releases.iter().map(|release| store.release(release))).await {
        assert_eq!(reply.unwrap(), ReleaseReply::Released);
    }
    assert_eq!(scripts_run(&server).await, ALONE as u64 + 1);
    // Requests for locks that are done share a call as well.
    let again = requests("k");
    for (number, reply) in acquire(&store, &again).await.into_iter().enumerate() {
        let Ok(AcquireReply::Done(done)) = reply else {
            panic!("{reply:?}");
        };
        assert_eq!(done.value, result_of(number, length(number)));
    }
    assert_eq!(scripts_run(&server).await, ALONE as u64 + 1);
    // Other holders record nothing.
    let fence = done(&store, &locks[0]).await.fence;
    let release = |request| released_with(request, fence, b"another");
    let releases: Vec<_> = again.iter().map(release).collect();
    for reply in join_all(releases.iter().map(|release| store.release(release))).await {
        assert_eq!(reply.unwrap(), ReleaseReply::NotHeld);
    }
    assert_eq!(done(&store, &locks[7]).await.value, b"");
}

#[tokio::test]
async fn a_long_result_is_recorded_by_its_own_call() {
    let (server, store) = knowing_server().await;
    let long = ALONE + 5;
    let locks = requests("k");
    let length = |number| if number == long { 60_000 } else { 1_024 };
    for reply in record(&store, &locks, length).await {
        assert_eq!(reply.unwrap(), ReleaseReply::Released);
    }
    assert_eq!(scripts_run(&server).await, 2 * (ALONE as u64 + 1) + 1);
    assert_eq!(done(&store, &locks[long]).await.value.len(), 60_000);
}

/// A waiter learns of the result, and its neighbours in the group are not affected.
#[tokio::test]
async fn a_result_with_waiters_is_recorded_by_its_own_call() {
    let (server, store) = knowing_server().await;
    let locks = requests("k");
    let granted = acquire(&store, &locks).await;
    let position = ALONE + 9;
    let waiter = Hold::new(
        locks[position].hold.key.clone(),
        Mode::Exclusive,
        Token::random(),
    );
    let waits = KeyRequest::new(waiter.clone(), HOUR, Instant::now() + HOUR).queued();
    let queued = store.acquire(&waits).await;
    assert!(matches!(queued, Ok(AcquireReply::Queued { .. })));
    scripts_run(&server).await;
    let release = |(request, granted)| released_with(request, fence_of(granted), b"result");
    let releases: Vec<_> = locks.iter().zip(&granted).map(release).collect();
    for reply in join_all(releases.iter().map(|release| store.release(release))).await {
        assert_eq!(reply.unwrap(), ReleaseReply::Released);
    }
    assert_eq!(scripts_run(&server).await, ALONE as u64 + 2);
    assert_eq!(done(&store, &locks[position]).await.value, b"result");
    let polled = store.poll(slice::from_ref(&waiter)).await;
    assert!(matches!(polled[..], [Ok(PollReply::Done(_))]), "{polled:?}");
    let seen = store.inspect(&waiter.key, LockKind::Lock).await.unwrap();
    assert_eq!(seen.waiters.len(), 0);
}

#[tokio::test]
async fn results_without_memory_are_refused_and_the_locks_stay_held() {
    let (server, store) = knowing_server().await;
    let locks = requests("k");
    let granted = acquire(&store, &locks).await;
    server.command(&["CONFIG", "SET", "maxmemory", "1"]).await;
    let release = |(request, granted)| released_with(request, fence_of(granted), b"result");
    let releases: Vec<_> = locks.iter().zip(&granted).map(release).collect();
    for reply in join_all(releases.iter().map(|release| store.release(release))).await {
        let error = reply.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error}");
    }
    for request in &locks {
        assert!(store.done(&request.hold.key).await.unwrap().is_none());
    }
    server.command(&["CONFIG", "SET", "maxmemory", "0"]).await;
    for (request, granted) in locks.iter().zip(&granted) {
        let held = store.acquire(request).await;
        assert_eq!(fence_of(&held), fence_of(granted));
    }
    for reply in join_all(releases.iter().map(|release| store.release(release))).await {
        assert_eq!(reply.unwrap(), ReleaseReply::Released);
    }
}

/// Also if the lock is done.
#[tokio::test]
async fn a_late_request_for_a_result_is_late() {
    let (_server, store) = knowing_server().await;
    let mut locks = requests("k");
    for reply in record(&store, &locks, |_| 9).await {
        assert_eq!(reply.unwrap(), ReleaseReply::Released);
    }
    let late = [0, ALONE + 7];
    for number in late {
        locks[number].deadline = Instant::now() - Duration::from_secs(5);
    }
    for (number, reply) in acquire(&store, &locks).await.into_iter().enumerate() {
        let reply = reply.unwrap();
        match late.contains(&number) {
            true => assert!(matches!(reply, AcquireReply::Late), "{number}: {reply:?}"),
            false => assert!(
                matches!(reply, AcquireReply::Done(_)),
                "{number}: {reply:?}"
            ),
        }
    }
}
