//! Several keys in one request: in one order everywhere, all or none.

use std::time::Duration;

use lock_runtime::{
    LockErrorKind, LockKey, Loss, Mode,
    store::{Hold, Instant, KeyRequest, PollReply, Token},
};
use tokio::task::JoinSet;

use lock_tests::place::{LONG, Place, all_free, begun, eventually, in_vain, on_every_store};

on_every_store! {
    keys_are_sorted_and_taken_once,
    opposite_orders_never_deadlock,
    without_waiting_it_is_all_or_none,
    a_request_that_waited_in_vain_leaves_no_key,
    what_is_held_is_renewed_while_the_rest_is_waited_for,
    a_lost_key_is_a_lost_guard,
    a_key_that_is_lost_while_the_rest_is_waited_for_is_no_grant,
    poll_of_a_batch_replies_to_each_hold,
}

async fn keys_are_sorted_and_taken_once(place: Place) {
    let locks = place.client().await;
    for request in [
        locks.all(["b", "a", "c", "b", "a"]),
        locks.all(["b", "a", "c", "b"]).no_wait(),
    ] {
        let guard = request.acquire().await.unwrap();
        let keys: Vec<&str> = guard.fences().map(|(key, _)| key.as_str()).collect();
        assert_eq!(keys, ["a", "b", "c"]);
        assert_eq!(guard.key(), &LockKey::new("a").unwrap());
        assert!(!guard.validity().is_zero());
        guard.verify().await.unwrap();
        guard.extend(Duration::from_secs(60)).await.unwrap();
        guard.release().await.unwrap();
        for key in ["a", "b", "c"] {
            assert!(locks.inspect(key).await.unwrap().holders.is_empty());
        }
    }
    // The same key counts once.
    let keys = |number: usize| (0..1002).map(move |key| (key % number).to_string());
    let guard = locks.all(keys(1000)).acquire().await.unwrap();
    // ZooKeeper may need more than the 500 ms of a call to release 1,000 keys.
    match guard.release().await {
        Err(error)
            if matches!(place, Place::ZooKeeper { .. })
                && error.kind() == LockErrorKind::ReleaseUnknown => {}
        released => released.unwrap(),
    }
    for number in [0, 1001] {
        let keys = (0..number).map(|key| key.to_string());
        let refused = locks.all(keys).acquire().await.unwrap_err();
        assert_eq!(refused.kind(), LockErrorKind::InvalidKey, "{refused}");
    }
}

async fn opposite_orders_never_deadlock(place: Place) {
    let clients = [place.client().await, place.client().await];
    let mut tasks = JoinSet::new();
    for task in 0..8 {
        let locks = clients[task % 2].clone();
        let keys = if task % 4 < 2 { ["a", "b"] } else { ["b", "a"] };
        tasks.spawn(async move {
            for _ in 0..5 {
                locks
                    .all(keys)
                    .wait(LONG)
                    .acquire()
                    .await
                    .unwrap()
                    .release()
                    .await
                    .unwrap();
            }
        });
    }
    tasks.join_all().await;
}

async fn without_waiting_it_is_all_or_none(place: Place) {
    let (locks, others) = (place.client().await, place.client().await);
    for held in ["a", "b", "c"] {
        let guard = locks.exclusive(held).acquire().await.unwrap();
        for client in [&locks, &others] {
            assert!(
                client
                    .all(["c", "b", "a"])
                    .try_acquire()
                    .await
                    .unwrap()
                    .is_none()
            );
            let error = client
                .all(["c", "b", "a"])
                .no_wait()
                .acquire()
                .await
                .unwrap_err();
            assert_eq!(error.kind(), LockErrorKind::Contended);
            assert_eq!(
                error.key().unwrap().as_str(),
                held,
                "the key that was not to be had"
            );
        }
        for key in ["a", "b", "c"].into_iter().filter(|key| *key != held) {
            assert!(
                locks.inspect(key).await.unwrap().holders.is_empty(),
                "{key} was left"
            );
        }
        guard.release().await.unwrap();
    }
    others
        .all(["c", "b", "a"])
        .try_acquire()
        .await
        .unwrap()
        .expect("all are free")
        .release()
        .await
        .unwrap();
}

async fn a_request_that_waited_in_vain_leaves_no_key(place: Place) {
    let (locks, others) = (place.client().await, place.client().await);
    let guard = locks.exclusive("c").acquire().await.unwrap();
    for client in [&locks, &others] {
        let error = in_vain(client.all(["a", "b", "c"])).await;
        assert_eq!(error.kind(), LockErrorKind::WaitTimeout);
        assert_eq!(error.key().unwrap().as_str(), "c");
        all_free(&locks, &["a", "b"]).await;
    }
    guard.verify().await.unwrap();
    guard.release().await.unwrap();
}

async fn what_is_held_is_renewed_while_the_rest_is_waited_for(place: Place) {
    let (locks, others) = (place.client().await, place.client().await);
    let lease = Duration::from_secs(2);
    let blocker = others.exclusive("b").acquire().await.unwrap();
    let waiting =
        tokio::spawn(begun(locks.all(["a", "b"]).lease(lease).wait(LONG).acquire()).await);
    tokio::time::sleep(lease * 2).await;
    assert!(
        others.exclusive("a").try_acquire().await.unwrap().is_none(),
        "it is held by the one who waits"
    );
    blocker.release().await.unwrap();
    let guard = waiting.await.unwrap().unwrap();
    guard.verify().await.unwrap();
    guard.release().await.unwrap();
}

async fn a_lost_key_is_a_lost_guard(place: Place) {
    let (locks, others) = (place.client().await, place.client().await);
    for lost in ["a", "b", "c"] {
        let guard = locks.all(["a", "b", "c"]).acquire().await.unwrap();
        locks.revoke(lost).await.unwrap();
        let error = guard.lost().await;
        assert_eq!(error.key().unwrap().as_str(), lost);
        assert!(guard.is_lost() && guard.validity().is_zero());
        for refused in [
            guard.verify().await,
            guard.extend(LONG).await,
            guard.release().await,
        ] {
            assert_eq!(refused.unwrap_err().key().unwrap().as_str(), lost);
        }
        let all = others.all(["a", "b", "c"]).try_acquire().await.unwrap();
        let all = all.expect("the others were given back");
        all.release().await.unwrap();
    }
}

async fn a_key_that_is_lost_while_the_rest_is_waited_for_is_no_grant(place: Place) {
    let (locks, others) = (place.client().await, place.client().await);
    let blocker = others.exclusive("b").acquire().await.unwrap();
    let waiting = tokio::spawn(locks.all(["a", "b"]).wait(LONG).acquire());
    let waits = || async { !others.inspect("b").await.unwrap().waiters.is_empty() };
    eventually("it holds the first and waits for the last", waits).await;
    locks.revoke("a").await.unwrap();
    blocker.release().await.unwrap();
    let error = waiting.await.unwrap().map(drop).unwrap_err();
    assert_eq!(error.kind(), LockErrorKind::Lost(Loss::Revoked));
    assert_eq!(error.key().unwrap().as_str(), "a");
    all_free(&others, &["a", "b"]).await;
}

async fn poll_of_a_batch_replies_to_each_hold(place: Place) {
    let store = place.store().await;
    let acquire = async |hold: &Hold| {
        let until = Instant::now() + LONG;
        let request = KeyRequest::new(hold.clone(), LONG, until).queued();
        store.acquire(&request).await.unwrap();
    };
    let mut holds = Vec::new();
    for number in 0..9 {
        let key = LockKey::new(format!("k{number}")).unwrap();
        let [first, second] =
            [(); 2].map(|()| Hold::new(key.clone(), Mode::Exclusive, Token::random()));
        acquire(&first).await;
        if number % 3 == 1 {
            acquire(&second).await;
        }
        holds.push(if number % 3 == 0 { first } else { second });
    }
    let replies = store.poll(&holds).await;
    assert_eq!(replies.len(), holds.len());
    for (number, reply) in replies.into_iter().enumerate() {
        let is_right = match reply.unwrap() {
            PollReply::Granted(_) => number % 3 == 0,
            PollReply::Queued { .. } => number % 3 == 1,
            PollReply::Gone => number % 3 == 2,
            _ => false,
        };
        assert!(is_right, "{number}");
    }
}
