//! 12 of the failures seen elsewhere: a server that has forgotten the scripts.

use std::time::Duration;

use lock_runtime::{
    LockClient, LockKey, Mode,
    store::{
        Hold, Instant, KeyRequest, NextHolder, PollReply, Release, RenewReply, Renewal,
        RevokeScope, Store as _, Token, redis::RedisStore,
    },
};
use lock_tests::{
    Captured, Proxy, RedisServer,
    proxy::Direction,
    replies::{Replies as _, poll},
};
use tracing::Level;

use super::HOUR;

#[tokio::test]
async fn every_call_survives_a_server_that_forgot_its_scripts() {
    let server = RedisServer::start().await;
    let store = RedisStore::connect(&server.url(), "lock").await.unwrap();
    let flush = async || server.command(&["SCRIPT", "FLUSH"]).await;
    let key = LockKey::new("k").unwrap();
    for round in 0..3 {
        let hold = Hold::new(key.clone(), Mode::Exclusive, Token::random());
        let next = Token::random();
        let next_holder = Hold::new(key.clone(), Mode::Exclusive, next);
        let reader = Hold::new(key.clone(), Mode::Shared, next);
        let request = KeyRequest::new(hold.clone(), HOUR, Instant::now() + HOUR);
        flush().await;
        store.acquire(&request).await.unwrap();
        flush().await;
        store
            .acquire_all(std::slice::from_ref(&request))
            .await
            .unwrap();
        flush().await;
        poll(&store, &hold).await.unwrap();
        flush().await;
        assert!(matches!(
            store
                .renew(&[Renewal::new(hold.clone(), HOUR)])
                .await
                .all()
                .unwrap()[0],
            RenewReply::Renewed { .. }
        ));
        flush().await;
        store
            .release(&Release::new(hold.clone()).next(NextHolder::new(next, HOUR, 0)))
            .await
            .unwrap();
        flush().await;
        store.convert(&next_holder).await.unwrap();
        flush().await;
        assert_eq!(
            store
                .inspect(&key, Mode::Shared.kind())
                .await
                .unwrap()
                .holders
                .len(),
            1,
            "{round}"
        );
        flush().await;
        if round == 0 {
            store
                .revoke(&key, Mode::Shared.kind(), RevokeScope::Leased)
                .await
                .unwrap();
        } else {
            store.abandon(&reader).await.unwrap();
        }
        assert_eq!(server.keys("lock:*").await, [""; 0]);
    }
}

#[tokio::test]
async fn renew_survives_a_server_that_forgot_its_scripts() {
    let server = RedisServer::start().await;
    let store = RedisStore::connect(&server.url(), "lock").await.unwrap();
    let hold = |number: usize| {
        let mode = if number.is_multiple_of(2) {
            Mode::Exclusive
        } else {
            Mode::Shared
        };
        Hold::new(
            LockKey::new(format!("k{number}")).unwrap(),
            mode,
            Token::random(),
        )
    };
    let holds: Vec<_> = (0..250).map(hold).collect();
    for hold in holds.iter().step_by(3) {
        store
            .acquire(&KeyRequest::new(hold.clone(), HOUR, Instant::now() + HOUR))
            .await
            .unwrap();
    }
    let renewals: Vec<_> = holds
        .iter()
        .map(|hold| Renewal::new(hold.clone(), 2 * HOUR))
        .collect();
    for _ in 0..2 {
        server.command(&["SCRIPT", "FLUSH"]).await;
        let replies = store.renew(&renewals).await.all().unwrap();
        assert_eq!(replies.len(), holds.len());
        for (number, reply) in replies.iter().enumerate() {
            assert_eq!(
                matches!(reply, RenewReply::Renewed { .. }),
                number % 3 == 0,
                "{number}: {reply:?}"
            );
        }
    }
}

#[tokio::test]
async fn renew_with_forgotten_scripts_costs_a_batch_one_round_trip() {
    let server = RedisServer::start().await;
    let proxy = Proxy::to(&server).await;
    let store = RedisStore::connect(&proxy.url(), "lock").await.unwrap();
    let hold = || Hold::new(LockKey::new("k").unwrap(), Mode::Exclusive, Token::random());
    let renewals: Vec<_> = std::iter::repeat_with(|| Renewal::new(hold(), HOUR))
        .take(100)
        .collect();
    let on_the_way = Duration::from_millis(50);
    proxy.delay(Direction::ToServer, on_the_way);
    let since = Instant::now();
    assert_eq!(
        store.renew(&renewals).await.all().unwrap(),
        [RenewReply::Gone; 100]
    );
    assert!(since.elapsed() < 50 * on_the_way, "{:?}", since.elapsed());
}

/// After the first batch, which teaches the server the script.
#[tokio::test]
async fn poll_of_a_batch_takes_one_round_trip() {
    let server = RedisServer::start().await;
    let proxy = Proxy::to(&server).await;
    let store = RedisStore::connect(&proxy.url(), "lock").await.unwrap();
    let hold = |_| Hold::new(LockKey::new("k").unwrap(), Mode::Exclusive, Token::random());
    let holds: Vec<_> = (0..100).map(hold).collect();
    let on_the_way = Duration::from_millis(50);
    proxy.delay(Direction::ToServer, on_the_way);
    store.poll(&holds).await.all().unwrap();
    let since = Instant::now();
    assert_eq!(
        store.poll(&holds).await.all().unwrap(),
        vec![PollReply::Gone; 100]
    );
    // As many round trips as polls would take 5 s.
    assert!(since.elapsed() < 10 * on_the_way, "{:?}", since.elapsed());
}

#[tokio::test]
async fn a_lock_is_kept_while_scripts_are_forgotten_over_and_over() {
    let server = RedisServer::start().await;
    let traces = Captured::new();
    let _guard = traces.set_default();
    let locks = LockClient::connect(&server.url()).await.unwrap();
    let guard = locks
        .exclusive("k")
        .lease(Duration::from_secs(2))
        .acquire()
        .await
        .unwrap();
    let until = Instant::now() + Duration::from_secs(3);
    while Instant::now() < until {
        server.command(&["SCRIPT", "FLUSH"]).await;
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    guard.release().await.expect("it was renewed all the time");
    let warnings: Vec<_> = traces
        .events()
        .into_iter()
        .filter(|event| event.level <= Level::WARN)
        .collect();
    assert_eq!(warnings, []);
}

#[tokio::test]
async fn a_restarted_server_learns_the_scripts_again() {
    let server = RedisServer::start().await;
    let locks = LockClient::connect(&server.url()).await.unwrap();
    for _ in 0..2 {
        locks
            .shared("k")
            .acquire()
            .await
            .unwrap()
            .release()
            .await
            .unwrap();
        server.restart_empty().await;
        locks
            .shared("k")
            .wait(super::SLACK)
            .acquire()
            .await
            .unwrap()
            .release()
            .await
            .unwrap();
    }
}
