//! Rule 14: a release compares the token, and reports an unknown outcome as such.

use lock_runtime::{LockErrorKind, Loss};
use lock_tests::{Proxy, chain, proxy::DropReply, shared_server, unique};

use super::warm_client;

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
