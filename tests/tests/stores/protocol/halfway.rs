//! Rules 23 and 26: a script that stops half-way leaves no lock without a holder, and the client
//! warns of a server that evicts keys.

use std::time::Duration;

use lock_runtime::{
    LockClient, LockErrorKind, Mode,
    store::{
        ConvertReply, KeyPart, KeyRequest, NextHolder, Release, ReleaseReply, Renewal, Store as _,
        StoreErrorKind, Token,
    },
};
use lock_tests::{Captured, RedisServer, chain, replies::Replies as _, shared_server};
use tracing::Level;

use super::{
    HOUR, Hold, MODES, beside, fence_name, fresh_hold, granted, in_a_minute, inspect, is_free,
    lock_name, redis_on,
};

/// Makes the server refuse every write that needs memory, or none.
async fn full(server: &RedisServer, full: bool) {
    server
        .command(&["CONFIG", "SET", "maxmemory", if full { "1" } else { "0" }])
        .await;
}

// Rule 23.
#[tokio::test]
async fn a_server_out_of_memory_lets_go_of_locks() {
    let server = RedisServer::start().await;
    let store = redis_on(&server).await;
    for mode in MODES {
        for keep_for in [None, Some(HOUR)] {
            let hold = fresh_hold(mode);
            granted(&*store, &hold, HOUR).await;
            full(&server, true).await;
            // The renewal succeeds, too: a holder should not lose its lock.
            store
                .renew(&[Renewal::new(hold.clone(), 2 * HOUR)])
                .await
                .all()
                .unwrap();
            let released = store
                .release(&Release::new(hold.clone()).keep_for(keep_for))
                .await
                .unwrap();
            full(&server, false).await;
            assert_eq!(released, ReleaseReply::Released, "{mode:?} {keep_for:?}");
            let kept = inspect(&*store, &hold).await.holders;
            assert_eq!(
                kept.len(),
                usize::from(keep_for.is_some()),
                "{mode:?} {keep_for:?}"
            );
        }
    }
}

// Rule 23: `SET` before `DEL` would be refused, and the lock would stay.
#[tokio::test]
async fn a_server_out_of_memory_passes_locks_on() {
    let server = RedisServer::start().await;
    let store = redis_on(&server).await;
    let (writer, next_holder) = (fresh_hold(Mode::Exclusive), Token::random());
    granted(&*store, &writer, HOUR).await;
    full(&server, true).await;
    let passed = store
        .release(&Release::new(writer.clone()).next(NextHolder::new(next_holder, HOUR, 0)))
        .await
        .unwrap();
    assert!(matches!(passed, ReleaseReply::Passed(_)), "{passed:?}");
    let next_holder = Hold::new(writer.key.clone(), Mode::Exclusive, next_holder);
    let converted = store.convert(&next_holder).await.unwrap();
    assert!(
        matches!(converted, ConvertReply::Converted(_)),
        "{converted:?}"
    );
    let reader = Hold::new(writer.key, Mode::Shared, next_holder.token);
    assert_eq!(
        store.release(&Release::new(reader)).await.unwrap(),
        ReleaseReply::Released
    );
    assert!(is_free(&*store, &next_holder.key).await);
}

// Rule 23.
#[tokio::test]
async fn a_server_out_of_memory_grants_nothing_rather_than_a_half() {
    let server = RedisServer::start().await;
    let store = redis_on(&server).await;
    let locks = LockClient::with_store(store.clone());
    full(&server, true).await;
    for mode in MODES {
        let hold = fresh_hold(mode);
        let request = KeyRequest::new(hold.clone(), HOUR, in_a_minute());
        let error = store.acquire(&request).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Unavailable);
        assert!(chain(&error).contains("maxmemory"), "{error}");
        assert_eq!(
            server.query::<i64>(&["EXISTS", &lock_name(&hold)]).await,
            0,
            "{mode:?}"
        );
    }
    let wait = Duration::from_millis(300);
    let error = locks.exclusive("k").wait(wait).acquire().await.unwrap_err();
    assert_eq!(error.kind(), LockErrorKind::Unavailable);
    assert!(
        chain(&error).contains("lock k: ") && chain(&error).contains("maxmemory"),
        "{error}"
    );
    let waiting = tokio::spawn(locks.exclusive("k").wait(super::LONG).acquire());
    full(&server, false).await;
    waiting
        .await
        .unwrap()
        .expect("it works again")
        .release()
        .await
        .unwrap();
}

// Rule 23: the fence is checked before the lock is changed.
#[tokio::test]
async fn what_cannot_have_a_fencing_token_is_not_granted() {
    let server = shared_server().await;
    let store = redis_on(server).await;
    for mode in MODES {
        let hold = fresh_hold(mode);
        let fence = fence_name(&hold);
        server.command(&["LPUSH", &fence, "somebody's"]).await;
        let reply = super::acquire(&*store, &hold, HOUR).await;
        assert_eq!(
            reply,
            super::AcquireReply::ForeignKey(KeyPart::Fence),
            "{mode:?}"
        );
        let free = beside(&super::key(&lock_tests::unique("free")), Mode::Exclusive);
        if mode != super::TWO_PERMITS {
            let both =
                [&free, &hold].map(|hold| KeyRequest::new(hold.clone(), HOUR, in_a_minute()));
            store.acquire_all(&both).await.unwrap();
        }
        for hold in [&hold, &free] {
            assert_eq!(
                server.query::<i64>(&["EXISTS", &lock_name(hold)]).await,
                0,
                "{mode:?}"
            );
        }
        assert_eq!(
            server.query::<String>(&["LINDEX", &fence, "0"]).await,
            "somebody's"
        );
    }
}

// Rule 23: a lock is released even if its fencing token cannot be written.
#[tokio::test]
async fn a_counter_that_turned_foreign_does_not_keep_a_lock() {
    let server = shared_server().await;
    let store = redis_on(server).await;
    let writer = fresh_hold(Mode::Exclusive);
    granted(&*store, &writer, HOUR).await;
    server
        .command(&["SET", &fence_name(&writer), "somebody's"])
        .await;
    let release = Release::new(writer.clone()).next(NextHolder::new(Token::random(), HOUR, 0));
    assert_eq!(
        store.release(&release).await.unwrap(),
        ReleaseReply::Released
    );
    assert_eq!(
        server.query::<i64>(&["EXISTS", &lock_name(&writer)]).await,
        0
    );
    assert_eq!(
        server.query::<String>(&["GET", &fence_name(&writer)]).await,
        "somebody's"
    );
}

// Rule 26.
#[tokio::test]
async fn a_server_that_evicts_is_warned_of_once_on_connect() {
    let warnings = async |policy: &str| {
        let server = RedisServer::builder()
            .arg("--maxmemory-policy", policy)
            .start()
            .await;
        let traces = Captured::new();
        let _guard = traces.set_default();
        let locks = LockClient::connect(&server.url()).await.unwrap();
        locks
            .exclusive("k")
            .acquire()
            .await
            .unwrap()
            .release()
            .await
            .unwrap();
        locks.shutdown().await;
        let warnings: Vec<_> = traces
            .events()
            .into_iter()
            .filter(|event| event.level == Level::WARN)
            .collect();
        for warning in &warnings {
            assert_eq!(warning.field("policy"), Some(policy));
            assert!(
                warning.message.contains("maxmemory-policy to noeviction"),
                "{warning:?}"
            );
        }
        warnings.len()
    };
    assert_eq!(warnings("volatile-lru").await, 1);
    assert_eq!(warnings("allkeys-random").await, 1);
    assert_eq!(warnings("noeviction").await, 0);
}
