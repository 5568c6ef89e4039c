//! Rule 14: a release compares the token, and reports an unknown outcome as such.

use lock_runtime::{
    LockErrorKind, Loss,
    store::{NextHolder, Release, ReleaseReply},
};
use lock_tests::{Proxy, chain, proxy::DropReply, shared_server, unique};

use super::{HOUR, MODES, beside, both, fresh_hold, granted, inspect, warm_client};

// Rule 14, and failure 8 seen in other libraries.
#[tokio::test]
async fn a_release_compares_the_token() {
    for store in both().await {
        for mode in MODES {
            let holder = fresh_hold(mode);
            let stranger = beside(&holder.key, mode);
            granted(&*store, &holder, HOUR).await;
            for release in [
                Release::new(stranger.clone()),
                Release::new(stranger.clone()).keep_for(Some(HOUR)),
                Release::new(stranger.clone()).next(NextHolder::new(stranger.token, HOUR, 0)),
            ] {
                assert_eq!(
                    store.release(&release).await.unwrap(),
                    ReleaseReply::NotHeld,
                    "{mode:?} {store:?}"
                );
            }
            store.abandon(&stranger).await.unwrap();
            assert_eq!(
                inspect(&*store, &holder).await.holders.len(),
                1,
                "{mode:?} {store:?}"
            );
            assert_eq!(
                store.release(&Release::new(holder.clone())).await.unwrap(),
                ReleaseReply::Released
            );
            assert_eq!(
                store.release(&Release::new(holder)).await.unwrap(),
                ReleaseReply::NotHeld
            );
        }
    }
}

// Rule 14.
#[tokio::test]
async fn a_guard_whose_lock_was_taken_leaves_the_new_holder_alone() {
    let server = shared_server().await;
    let locks = warm_client(&server.url()).await;
    let name = unique("taken");
    let lock = format!("lock:{name}");
    let guard = locks.exclusive(name.as_str()).acquire().await.unwrap();
    server
        .command(&["SET", &lock, "somebody", "PX", "3600000"])
        .await;
    let error = guard.release().await.unwrap_err();
    assert_eq!(error.kind(), LockErrorKind::Lost(Loss::Taken));
    assert!(chain(&error).contains(&name), "{error}");
    locks.shutdown().await;
    assert_eq!(server.query::<String>(&["GET", &lock]).await, "somebody");
}

// Rule 14, and failure 3 seen in other libraries: a late retry that frees a newer lock.
#[tokio::test]
async fn release_without_a_reply_is_unknown_and_its_retry_harmless() {
    let server = shared_server().await;
    let proxy = Proxy::to(server).await;
    let (locks, others) = (
        warm_client(&proxy.url()).await,
        warm_client(&server.url()).await,
    );
    let name = unique("unknown");
    let guard = locks.exclusive(name.as_str()).acquire().await.unwrap();
    proxy.drop_reply(DropReply::next().to("EVALSHA"));
    let error = guard.release().await.unwrap_err();
    assert_eq!(error.kind(), LockErrorKind::ReleaseUnknown);
    assert!(chain(&error).contains(&name), "{error}");
    // The release was executed, so another client acquires the lock before the retry.
    let next = others
        .exclusive(name.as_str())
        .no_wait()
        .acquire()
        .await
        .unwrap();
    locks.shutdown().await;
    next.verify().await.unwrap();
    next.release().await.unwrap();
}

// Failure 3 seen in other libraries: a hold that counts twice. A repeated conversion counts once,
// too.
#[tokio::test]
async fn whatever_is_repeated_is_done_once() {
    for store in both().await {
        let writer = fresh_hold(lock_runtime::Mode::Exclusive);
        let reader = super::Hold::new(writer.key.clone(), lock_runtime::Mode::Shared, writer.token);
        granted(&*store, &writer, HOUR).await;
        granted(&*store, &writer, HOUR).await;
        for _ in 0..2 {
            store.convert(&writer).await.unwrap();
            assert_eq!(
                inspect(&*store, &writer).await.holders.len(),
                1,
                "{store:?}"
            );
        }
        assert_eq!(
            store.release(&Release::new(reader)).await.unwrap(),
            ReleaseReply::Released
        );
        assert!(super::is_free(&*store, &writer.key).await, "{store:?}");

        let kept = fresh_hold(lock_runtime::Mode::Shared);
        granted(&*store, &kept, HOUR).await;
        let release = Release::new(kept.clone()).keep_for(Some(HOUR));
        for _ in 0..2 {
            assert_eq!(
                store.release(&release).await.unwrap(),
                ReleaseReply::Released
            );
            store.abandon(&kept).await.unwrap();
            assert_eq!(
                inspect(&*store, &kept).await.holders.len(),
                1,
                "it is reserved: {store:?}"
            );
        }
    }
}
