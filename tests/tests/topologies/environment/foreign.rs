//! Data of another application under the names that a lock needs: reported as such, and unchanged
//! to the last byte.

use std::sync::Arc;

use lock_runtime::{
    FencingToken, LockClient, LockError, LockErrorKind, LockKey, LockKind, Mode,
    operator::Revocation,
    store::{
        AcquireAllReply, AcquireReply, ConvertReply, Hold, Instant, KeyPart, KeyRequest,
        NextHolder, PollReply, QuorumMember as _, Release, ReleaseReply, RenewReply, Renewal,
        RevokeReply, RevokeScope, Store, StoreError, StoreErrorKind, Token, redis::RedisStore,
    },
};
use lock_tests::{
    RedisServer, chain,
    replies::{Replies as _, poll},
    shared_server, unique,
};

use super::{Duration, HOUR, assert_says, permits, within};

/// Commands that create data of every type. The empty argument stands for the name of the key.
const DATA: [(&str, &[&str]); 11] = [
    ("text", &["SET", "", "somebody's"]),
    ("bits", &["SETBIT", "", "77", "1"]),
    ("hyperloglog", &["PFADD", "", "ann", "bob"]),
    ("list", &["RPUSH", "", "ann", "bob"]),
    ("set", &["SADD", "", "ann", "bob"]),
    ("hash", &["HSET", "", "ann", "1", "bob", "2"]),
    ("sorted set", &["ZADD", "", "1", "ann", "2", "bob"]),
    (
        "sorted set with times",
        &["ZADD", "", "1700000000000", "ann", "99999999999999", "bob"],
    ),
    ("sorted set with one member", &["ZADD", "", "0", "ann"]),
    ("places", &["GEOADD", "", "13.4", "52.5", "Berlin"]),
    ("stream", &["XADD", "", "1-1", "who", "ann"]),
];

async fn make(server: &RedisServer, command: &[&str], name: &str) -> Vec<u8> {
    let command: Vec<_> = command
        .iter()
        .map(|word| if word.is_empty() { name } else { word })
        .collect();
    server.command(&command).await;
    dump(server, name).await
}

async fn dump(server: &RedisServer, name: &str) -> Vec<u8> {
    server.query(&["DUMP", name]).await
}

async fn store() -> (&'static RedisServer, Arc<RedisStore>) {
    let server = shared_server().await;
    (
        server,
        Arc::new(RedisStore::connect(&server.url(), "lock").await.unwrap()),
    )
}

fn modes() -> [Mode; 3] {
    [Mode::Exclusive, Mode::Shared, Mode::Permits(permits(2))]
}

fn foreign<T: std::fmt::Debug>(reply: Result<T, StoreError>) -> bool {
    matches!(reply, Err(error) if error.kind() == StoreErrorKind::ForeignKey)
}

/// Makes every call that could touch data under the names of `hold`. None of them is granted.
async fn try_everything(store: &dyn Store, hold: &Hold) {
    let Hold { key, mode, .. } = hold;
    let request = KeyRequest::new(hold.clone(), HOUR, Instant::now() + HOUR);
    let reply = store.acquire(&request).await.unwrap();
    assert!(
        !matches!(
            reply,
            AcquireReply::Granted(_) | AcquireReply::Queued { .. } | AcquireReply::Late
        ),
        "{reply:?}"
    );
    if mode.kind() == LockKind::Lock {
        let reply = store
            .acquire_all(std::slice::from_ref(&request))
            .await
            .unwrap();
        assert!(
            matches!(reply, AcquireAllReply::Refused { index: 0, .. }),
            "{reply:?}"
        );
    }
    let reply = poll(store, hold).await;
    assert!(
        matches!(reply, Ok(PollReply::Gone)) || foreign(reply.clone()),
        "{reply:?}"
    );
    for lease in [Duration::ZERO, HOUR] {
        assert_eq!(
            store
                .renew(&[Renewal::new(hold.clone(), lease)])
                .await
                .all()
                .unwrap(),
            [RenewReply::Gone]
        );
    }
    for release in [
        Release::new(hold.clone()),
        Release::new(hold.clone()).keep_for(Some(HOUR)),
        Release::new(hold.clone()).next(NextHolder::new(Token::random(), HOUR, 0)),
    ] {
        let reply = store.release(&release).await;
        assert!(
            matches!(reply, Ok(ReleaseReply::NotHeld)) || foreign(reply.clone()),
            "{reply:?}"
        );
    }
    let reply = store.convert(hold).await;
    assert!(
        matches!(reply, Ok(ConvertReply::NotHeld)) || foreign(reply.clone()),
        "{reply:?}"
    );
    store.abandon(hold).await.unwrap();
    let _ = store.inspect(key, mode.kind()).await;
    let reply = store
        .revoke(key, mode.kind(), RevokeScope::Leased)
        .await
        .unwrap();
    assert_ne!(reply, RevokeReply::Revoked);
}

#[tokio::test]
async fn data_under_a_locks_name_stay_as_they_are() {
    let (server, store) = store().await;
    for (what, command) in DATA {
        for mode in modes() {
            let key = LockKey::new(unique("foreign")).unwrap();
            let prefix = if mode.kind() == LockKind::Permits {
                "lock:permits:"
            } else {
                "lock:"
            };
            let name = format!("{prefix}{key}");
            let before = make(server, command, &name).await;
            try_everything(&*store, &Hold::new(key.clone(), mode, Token::random())).await;
            assert_eq!(dump(server, &name).await, before, "{what} {mode:?}");
            assert_eq!(
                server.query::<i64>(&["PTTL", &name]).await,
                -1,
                "{what} {mode:?}"
            );
            // Data with an expiry are foreign as well, except for a STRING, which is a lock of
            // another library.
            server.command(&["PEXPIRE", &name, "3600000"]).await;
            if server.query::<String>(&["TYPE", &name]).await != "string" {
                try_everything(&*store, &Hold::new(key.clone(), mode, Token::random())).await;
            }
            assert_eq!(dump(server, &name).await, before, "{what} {mode:?}");
            assert!(
                server.keys(&format!("*{key}*")).await.len() == 1,
                "and nothing was put beside it"
            );
        }
    }
}

#[tokio::test]
async fn data_under_the_name_of_a_fence_stay_as_they_are() {
    let (server, store) = store().await;
    for (what, command) in DATA {
        for mode in modes() {
            for tagged in [false, true] {
                let name = unique("foreign");
                let name = if tagged { format!("{{{name}}}") } else { name };
                let key = LockKey::new(name).unwrap();
                let prefix = if mode.kind() == LockKind::Permits {
                    "lock:permits:"
                } else {
                    "lock:"
                };
                let lock = format!("{prefix}{key}");
                let fence = if tagged {
                    format!("f:{lock}")
                } else {
                    format!("{{{lock}}}:f")
                };
                let before = make(server, command, &fence).await;
                try_everything(&*store, &Hold::new(key, mode, Token::random())).await;
                assert_eq!(dump(server, &fence).await, before, "{what} {mode:?}");
                assert_eq!(
                    server.query::<i64>(&["PTTL", &fence]).await,
                    -1,
                    "{what} {mode:?}"
                );
                assert_eq!(
                    server.query::<i64>(&["EXISTS", &lock]).await,
                    0,
                    "{what} {mode:?}"
                );
            }
        }
    }
}

#[tokio::test]
async fn release_frees_a_lock_despite_foreign_data_in_its_fence_key() {
    let (server, store) = store().await;
    for mode in modes() {
        let hold = Hold::new(
            LockKey::new(unique("foreign")).unwrap(),
            mode,
            Token::random(),
        );
        let request = KeyRequest::new(hold.clone(), HOUR, Instant::now() + HOUR);
        assert!(matches!(
            store.acquire(&request).await.unwrap(),
            AcquireReply::Granted(_)
        ));
        let prefix = if mode.kind() == LockKind::Permits {
            "lock:permits:"
        } else {
            "lock:"
        };
        let fence = format!("{{{prefix}{}}}:f", hold.key);
        server.command(&["DEL", &fence]).await;
        let before = make(server, &["HSET", "", "ann", "1"], &fence).await;
        assert_eq!(
            store.acquire(&request).await.unwrap(),
            AcquireReply::ForeignKey(KeyPart::Fence)
        );
        assert!(foreign(poll(&*store, &hold).await));
        if mode == Mode::Exclusive {
            assert!(foreign(store.convert(&hold).await));
        }
        assert!(matches!(
            store
                .renew(&[Renewal::new(hold.clone(), HOUR)])
                .await
                .all()
                .unwrap()[0],
            RenewReply::Renewed { .. }
        ));
        assert_eq!(
            store.release(&Release::new(hold.clone())).await.unwrap(),
            ReleaseReply::Released
        );
        assert_eq!(
            server
                .query::<i64>(&["EXISTS", &format!("{prefix}{}", hold.key)])
                .await,
            0
        );
        assert_eq!(dump(server, &fence).await, before);
    }
}

#[tokio::test]
async fn foreign_data_under_the_name_of_a_lock_is_an_error_with_key_and_remedy() {
    let server = shared_server().await;
    let locks = LockClient::connect(&server.url()).await.unwrap();
    let name = unique("foreign");
    let words = ["lock foreign-", &name, "untouched"];
    for name in [format!("lock:{name}"), format!("lock:permits:{name}")] {
        make(server, DATA[5].1, &name).await;
    }
    let request = || locks.exclusive(name.as_str()).wait(HOUR);
    for refused in [
        within(Duration::ZERO, request().acquire())
            .await
            .unwrap_err(),
        within(Duration::ZERO, request().shared().acquire())
            .await
            .unwrap_err(),
        within(Duration::ZERO, request().permits(permits(2)).acquire())
            .await
            .unwrap_err(),
        within(
            Duration::ZERO,
            locks.all([name.as_str()]).no_wait().acquire(),
        )
        .await
        .unwrap_err(),
        within(
            Duration::ZERO,
            locks.all([name.as_str(), "fine"]).no_wait().acquire(),
        )
        .await
        .unwrap_err(),
    ] {
        assert_says(&refused, LockErrorKind::ForeignKey, &words);
        assert!(
            chain(&refused).contains("another name or namespace"),
            "{refused}"
        );
    }
    for inspected in [
        locks.inspect(name.as_str()).await.unwrap_err(),
        locks.inspect(name.as_str()).permits().await.unwrap_err(),
    ] {
        assert_says(&inspected, LockErrorKind::ForeignKey, &words);
    }
    for refused in [
        locks
            .revoke(name.as_str())
            .also_endless()
            .await
            .unwrap_err(),
        locks.revoke(name.as_str()).permits().await.unwrap_err(),
    ] {
        assert_says(&refused, LockErrorKind::ForeignKey, &words);
    }
}

/// Asserts that the error names the key in the store, and the part of a lock that belongs there.
#[track_caller]
fn assert_names(error: &LockError, key: &str, kept: &str) {
    assert_says(
        error,
        LockErrorKind::ForeignKey,
        &[
            &format!("the key {key}, "),
            kept,
            "untouched",
            "another name",
        ],
    );
}

/// Asserts the same of an error of the store.
#[track_caller]
fn assert_store_names<T: std::fmt::Debug>(reply: Result<T, StoreError>, key: &str, kept: &str) {
    let error = reply.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::ForeignKey, "{error}");
    assert!(
        chain(&error).contains(&format!("the key {key}, ")) && chain(&error).contains(kept),
        "{error}"
    );
}

/// The keys of a lock, each with the part of the lock that belongs there.
fn keys_of(lock: &str, tagged: bool) -> [(String, &'static str); 3] {
    let beside = |side| {
        if tagged {
            format!("{side}:{lock}")
        } else {
            format!("{{{lock}}}:{side}")
        }
    };
    [
        (lock.to_owned(), "its holder"),
        (beside("f"), "its latest fencing token"),
        (beside("q"), "its wait queue"),
    ]
}

#[tokio::test]
async fn a_request_names_the_key_that_is_foreign() {
    let server = shared_server().await;
    let locks = LockClient::connect(&server.url()).await.unwrap();
    for tagged in [false, true] {
        for (part, of_permits) in (0..3).flat_map(|part| [(part, false), (part, true)]) {
            let name = if tagged {
                format!("{{{}}}", unique("foreign"))
            } else {
                unique("foreign")
            };
            let name = name.as_str();
            let prefix = if of_permits { "lock:permits:" } else { "lock:" };
            let (key, kept) = &keys_of(&format!("{prefix}{name}"), tagged)[part];
            make(server, DATA[3].1, key).await;
            let (requests, inspected, revoked) = if of_permits {
                let requests = vec![locks.permits(name, permits(2))];
                (
                    requests,
                    locks.inspect(name).permits().await,
                    locks.revoke(name).permits().await,
                )
            } else {
                let all = || locks.all([name.to_owned(), unique("fine")]);
                let requests = vec![
                    locks.exclusive(name),
                    locks.shared(name),
                    all(),
                    all().no_wait(),
                ];
                (
                    requests,
                    locks.inspect(name).await,
                    locks.revoke(name).also_endless().await,
                )
            };
            for request in requests {
                assert_names(&request.acquire().await.unwrap_err(), key, kept);
            }
            assert_names(&inspected.unwrap_err(), key, kept);
            // A foreign fence or queue does not prevent a revocation.
            match part {
                0 => assert_names(&revoked.unwrap_err(), key, kept),
                _ => assert_eq!(revoked.unwrap(), Revocation::NotHeld),
            }
        }
    }
}

#[tokio::test]
async fn a_waiter_and_a_holder_get_the_key_that_has_become_foreign() {
    let server = shared_server().await;
    let (locks, store) = (
        LockClient::connect(&server.url()).await.unwrap(),
        store().await.1,
    );
    for part in 0..3 {
        let name = unique("foreign");
        let (key, kept) = &keys_of(&format!("lock:{name}"), false)[part];
        let _guard = locks.exclusive(name.as_str()).acquire().await.unwrap();
        let waiting = tokio::spawn(
            store_client(server)
                .await
                .exclusive(name.as_str())
                .wait(HOUR)
                .acquire(),
        );
        lock_tests::place::eventually("it is in the wait queue", async || {
            locks.inspect(name.as_str()).await.unwrap().waiters.len() == 1
        })
        .await;
        server.command(&["DEL", key]).await;
        let before = make(server, DATA[3].1, key).await;
        let error = within(Duration::from_secs(2), waiting)
            .await
            .unwrap()
            .unwrap_err();
        assert_names(&error, key, kept);
        assert_eq!(dump(server, key).await, before);
    }
    // A fence that has become foreign is also reported by a downgrade, a repeated release,
    // `convert` and, on a server of a quorum, `raise`.
    let name = unique("foreign");
    let (key, kept) = &keys_of(&format!("lock:{name}"), false)[1];
    let hold = Hold::new(
        LockKey::new(name.as_str()).unwrap(),
        Mode::Exclusive,
        Token::random(),
    );
    let request = KeyRequest::new(hold.clone(), HOUR, Instant::now() + HOUR);
    assert!(matches!(
        store.acquire(&request).await.unwrap(),
        AcquireReply::Granted(_)
    ));
    let next_holder = Hold::new(hold.key.clone(), Mode::Exclusive, Token::random());
    let passing = Release::new(hold.clone()).next(NextHolder::new(next_holder.token, HOUR, 0));
    assert!(matches!(
        store.release(&passing).await.unwrap(),
        ReleaseReply::Passed(_)
    ));
    let guard = locks.exclusive(unique("foreign")).acquire().await.unwrap();
    let fence = format!("{{lock:{}}}:f", guard.key());
    for key in [key, &fence] {
        server.command(&["DEL", key]).await;
        make(server, DATA[3].1, key).await;
    }
    assert_names(&guard.downgrade().await.unwrap_err(), &fence, kept);
    // A repeated release looks up the grant of the hold to which the lock was handed off.
    assert_store_names(store.release(&passing).await, key, kept);
    assert_store_names(store.convert(&next_holder).await, key, kept);
    assert_store_names(
        store
            .raise(&hold.key, LockKind::Lock, FencingToken::new(7).unwrap())
            .await,
        key,
        kept,
    );
}

async fn store_client(server: &RedisServer) -> LockClient {
    LockClient::connect(&server.url()).await.unwrap()
}
