//! Rules 1 and 2: a token is used for one acquisition, and a grant says how long it lasts.

use std::{future::pending, sync::Arc};

use lock_runtime::{
    LockClient, LockErrorKind, Mode,
    store::{MemoryStore, NextHolder, Release, ReleaseReply, RenewReply, Renewal, Token},
};
use lock_tests::{
    FaultyStore,
    faulty_store::{Operation, Outcome},
    replies::Replies as _,
    shared_server,
};

use super::{
    AcquireReply, Duration, HOUR, Hold, Instant, acquire, both, fresh_hold, granted, inspect,
    is_free, key, lock_name, member, micros, redis_on,
};

/// The margin of a lease for clocks that run at different speeds.
fn drift(lease: Duration) -> Duration {
    lease / 100 + Duration::from_millis(2)
}

/// A store in this process that executes the first acquire request and passes its outcome through
/// `reply`.
fn first_reply<F: Future<Output = Outcome> + Send>(
    reply: impl Fn(Outcome) -> F + Clone + Send + Sync + 'static,
) -> Arc<FaultyStore> {
    FaultyStore::new(Arc::new(MemoryStore::new()), move |call| {
        let reply = reply.clone();
        async move {
            let outcome = call.execute().await;
            match call.operation {
                Operation::Acquire(_) if call.nth == 0 => reply(outcome).await,
                _ => outcome,
            }
        }
    })
}

/// The first reply arrives after `delay`.
fn delayed(delay: Duration) -> Arc<FaultyStore> {
    first_reply(move |outcome| async move {
        tokio::time::sleep(delay).await;
        outcome
    })
}

/// The first reply grants the lock for `ttl`.
fn granted_for(ttl: Duration) -> Arc<FaultyStore> {
    first_reply(move |mut outcome| async move {
        if let Ok(reply) = &mut outcome
            && let Some(AcquireReply::Granted(grant)) = reply.downcast_mut()
        {
            grant.ttl = ttl;
        }
        outcome
    })
}

// Rule 1.
#[tokio::test(start_paused = true)]
async fn a_retry_after_a_lost_answer_takes_a_fresh_token() {
    let store = first_reply(|_| pending());
    let locks = LockClient::with_store(store.clone());
    let since = Instant::now();
    let guard = locks.exclusive("k").lease(HOUR).acquire().await.unwrap();
    assert!(
        since.elapsed() < Duration::from_secs(5),
        "the lost grant is given up and not waited for"
    );

    let requests = store.requests();
    let lost = requests[0].hold.token;
    assert!(
        requests.len() > 1
            && requests[1..]
                .iter()
                .all(|request| request.hold.token != lost),
        "{requests:?}"
    );
    assert!(store.count(|o| matches!(o, Operation::Abandon(hold) if hold.token == lost)) > 0);
    guard.verify().await.unwrap();
}

// Rule 1.
#[tokio::test(start_paused = true)]
async fn an_answer_to_a_token_that_was_given_up_is_not_believed() {
    let store = delayed(Duration::from_secs(1));
    let locks = LockClient::with_store(store.clone());
    let error = locks
        .exclusive("k")
        .lease(HOUR)
        .no_wait()
        .acquire()
        .await
        .unwrap_err();
    assert_eq!(error.kind(), LockErrorKind::Unavailable);
    let other = LockClient::with_store(store.clone());
    let guard = other.exclusive("k").acquire().await.unwrap();
    locks.shutdown().await;
    guard.verify().await.unwrap();
}

// Rule 1.
#[tokio::test]
async fn a_lock_that_was_passed_on_no_longer_knows_its_old_token() {
    for store in both().await {
        let old = fresh_hold(Mode::Exclusive);
        let next_holder = Hold::new(old.key.clone(), old.mode, Token::random());
        granted(&*store, &old, HOUR).await;
        let release = Release::new(old.clone()).next(NextHolder::new(next_holder.token, HOUR, 0));
        let ReleaseReply::Passed(grant) = store.release(&release).await.unwrap() else {
            panic!("{store:?}")
        };

        assert_eq!(
            store
                .renew(&[Renewal::new(old.clone(), HOUR)])
                .await
                .all()
                .unwrap(),
            [RenewReply::Gone]
        );
        assert_eq!(
            store.release(&Release::new(old.clone())).await.unwrap(),
            ReleaseReply::NotHeld
        );
        store.abandon(&old).await.unwrap();
        let ReleaseReply::Passed(again) = store.release(&release).await.unwrap() else {
            panic!("{store:?}")
        };
        assert_eq!(
            grant.fence, again.fence,
            "a repeated release finds that it was executed"
        );
        assert!(!is_free(&*store, &next_holder.key).await);
        assert_eq!(
            store.release(&Release::new(next_holder)).await.unwrap(),
            ReleaseReply::Released
        );
    }
}

// Rule 2.
#[tokio::test(start_paused = true)]
async fn a_lock_is_valid_from_the_sending_of_its_request() {
    let (lease, delay) = (Duration::from_secs(30), Duration::from_millis(400));
    let locks = LockClient::with_store(delayed(delay));
    let guard = locks.exclusive("k").lease(lease).acquire().await.unwrap();
    assert_eq!(guard.validity(), lease - delay - drift(lease));
}

// Rule 2.
#[tokio::test(start_paused = true)]
async fn a_grant_with_little_left_is_valid_for_that_only() {
    let left = Duration::from_secs(2);
    let locks = LockClient::with_store(granted_for(left));
    let guard = locks
        .exclusive("k")
        .lease(HOUR)
        .no_renew()
        .acquire()
        .await
        .unwrap();
    assert_eq!(guard.validity(), left - drift(left));
}

// Rule 2: a reply that takes longer than the grant lasts is no grant.
#[tokio::test(start_paused = true)]
async fn a_grant_that_is_over_when_it_arrives_is_none() {
    let store = granted_for(Duration::from_millis(1));
    let locks = LockClient::with_store(store.clone());
    let error = locks
        .exclusive("k")
        .lease(HOUR)
        .no_wait()
        .acquire()
        .await
        .unwrap_err();
    assert_eq!(error.kind(), LockErrorKind::Unavailable);
    locks.shutdown().await;
    assert!(is_free(&*store, &key("k")).await);
}

// Rule 2.
#[tokio::test]
async fn a_repeated_acquire_gets_what_is_left_of_its_own_grant() {
    let server = shared_server().await;
    let store = redis_on(server).await;
    let minute = Duration::from_secs(60);
    for mode in super::MODES {
        let hold = fresh_hold(mode);
        let first = granted(&*store, &hold, HOUR).await;
        assert_eq!(first.ttl, HOUR);
        let name = lock_name(&hold);
        if mode != Mode::Exclusive {
            let expiry = micros(server).await / 1000 + 60_000;
            server
                .command(&["ZADD", &name, "XX", &expiry.to_string(), &member(&hold)])
                .await;
        }
        server.command(&["PEXPIRE", &name, "60000"]).await;
        let again = granted(&*store, &hold, HOUR).await;
        assert!(
            again.ttl <= minute && again.ttl > minute / 2,
            "{mode:?}: {again:?}"
        );
        assert!(again.fence == first.fence || mode != Mode::Exclusive && again.fence > first.fence);
        assert_eq!(
            inspect(&*store, &hold).await.holders.len(),
            1,
            "a repeated request counts once"
        );
        if mode == Mode::Exclusive {
            let other = super::beside(&hold.key, mode);
            assert!(matches!(
                acquire(&*store, &other, HOUR).await,
                AcquireReply::Busy { .. }
            ));
        }
    }
}
