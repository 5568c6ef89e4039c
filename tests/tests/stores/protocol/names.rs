//! Rules 21 and 22: a script checks the type first, and all keys of a lock are declared and lie in
//! one slot.

use lock_runtime::{
    LockErrorKind, LockKey, LockKind, Mode,
    store::{
        AcquireReply, KeyPart, NextHolder, Release, ReleaseReply, RenewReply, Renewal, RevokeReply,
        RevokeScope, Store,
    },
};
use lock_tests::{
    RedisServer, chain,
    replies::{Replies as _, poll},
    shared_server,
};

use super::{
    HOUR, Hold, MODES, acquire, beside, eventually, fresh_hold, granted, inspect, lock_name,
    monitor::{Monitor, words},
    queued, redis_on,
};

/// Makes every call that changes something, on a key that is free before and after.
async fn live(store: &dyn Store, key: &LockKey) {
    for mode in MODES {
        let hold = beside(key, mode);
        granted(store, &hold, HOUR).await;
        let waiter = beside(key, Mode::Exclusive);
        if mode.kind() == waiter.mode.kind() {
            queued(store, &waiter, HOUR).await;
            poll(store, &waiter).await.unwrap();
            store.abandon(&waiter).await.unwrap();
        }
        assert!(matches!(
            store
                .renew(&[Renewal::new(hold.clone(), 2 * HOUR)])
                .await
                .all()
                .unwrap()[0],
            RenewReply::Renewed { .. }
        ));
        poll(store, &hold).await.unwrap();
        assert_eq!(inspect(store, &hold).await.holders.len(), 1);
        let next_holder = beside(key, mode);
        let reply = store
            .release(&Release::new(hold.clone()).next(NextHolder::new(next_holder.token, HOUR, 0)))
            .await
            .unwrap();
        if mode == Mode::Exclusive {
            assert!(matches!(reply, ReleaseReply::Passed(_)));
            store.convert(&next_holder).await.unwrap();
            store
                .abandon(&Hold::new(key.clone(), Mode::Shared, next_holder.token))
                .await
                .unwrap();
        }
        granted(store, &beside(key, mode), HOUR).await;
        let revoked = store
            .revoke(key, mode.kind(), RevokeScope::Leased)
            .await
            .unwrap();
        assert_eq!(revoked, RevokeReply::Revoked);
    }
}

const NAMES: [&str; 8] = [
    "order:42", "{a}", "x{a}y", "x{a}{b}", "a{b", "{{a}", "a{b}}", "f:x",
];

// Rule 22, and failure 12 seen in other libraries.
#[tokio::test]
async fn the_keys_of_a_lock_lie_in_one_slot_of_a_cluster() {
    let server = RedisServer::builder()
        .args(["--cluster-enabled", "yes"])
        .start()
        .await;
    server
        .command(&["CLUSTER", "ADDSLOTSRANGE", "0", "16383"])
        .await;
    let is_up = async || {
        server
            .query::<String>(&["CLUSTER", "INFO"])
            .await
            .contains("cluster_state:ok")
    };
    eventually("the cluster is up", is_up).await;
    let apart = ["MSET", "a", "1", "b", "2"];
    let error = server
        .try_command(&apart)
        .await
        .expect_err("it is a cluster");
    assert!(
        chain(&error).contains("CrossSlot") || chain(&error).contains("CROSSSLOT"),
        "{error}"
    );
    let store = redis_on(&server).await;
    for name in NAMES {
        live(&*store, &super::key(name)).await;
    }
    // A name is refused if no side key could share its slot.
    for name in ["x}y", "x{}y", "{}", "}"] {
        assert_eq!(
            LockKey::new(name).unwrap_err().kind(),
            LockErrorKind::InvalidKey,
            "{name}"
        );
    }
}

// Rule 22.
#[tokio::test]
async fn every_key_that_a_script_touches_is_declared() {
    let server = RedisServer::start().await;
    let store = redis_on(&server).await;
    let monitor = Monitor::of(&server).await;
    for name in NAMES {
        live(&*store, &super::key(name)).await;
    }
    let mut declared: Vec<String> = Vec::new();
    let mut touched = 0;
    for line in monitor.lines_so_far(&server).await {
        let words = words(&line);
        match words[0] {
            "EVALSHA" | "EVAL" => {
                let keys: usize = words[2].parse().unwrap();
                declared = words[3..3 + keys]
                    .iter()
                    .map(|key| (*key).to_owned())
                    .collect();
                if declared.len() == 1 {
                    continue;
                }
                assert_eq!(declared.len(), 3, "a lock, its fence and its queue: {line}");
            }
            "TIME" | "PUBLISH" | "SUBSCRIBE" => {}
            _ => {
                assert!(line.contains("lua]"), "{line}");
                touched += 1;
                assert!(
                    declared.iter().any(|key| key == words[1]),
                    "{declared:?}: {line}"
                );
            }
        }
    }
    assert!(touched > 100);
}

// Rule 22: permits are an object of their own, and side keys are not locks.
#[tokio::test]
async fn locks_of_different_names_never_meet() {
    let store = redis_on(shared_server().await).await;
    let name = lock_tests::unique("x");
    let names = [
        name.clone(),
        format!("{{{name}}}"),
        format!("{{{name}}}:f"),
        format!("f:{name}"),
        format!("q:{name}"),
    ];
    let mut holds = Vec::new();
    for name in &names {
        for mode in [Mode::Exclusive, super::TWO_PERMITS] {
            holds.push(beside(&super::key(name), mode));
        }
    }
    for hold in &holds {
        granted(&*store, hold, HOUR).await;
    }
    for hold in &holds {
        assert_eq!(inspect(&*store, hold).await.holders.len(), 1, "{hold:?}");
        assert_eq!(
            store.release(&Release::new(hold.clone())).await.unwrap(),
            ReleaseReply::Released,
            "{hold:?}"
        );
    }
}

// Rule 21: a sorted set without an expiry belongs to another application.
#[tokio::test]
async fn a_leaderboard_under_a_locks_name_stays_whole() {
    let server = shared_server().await;
    let store = redis_on(server).await;
    for mode in MODES {
        let hold = fresh_hold(mode);
        let name = lock_name(&hold);
        server
            .command(&["ZADD", &name, "1", "ann", "2", "bob"])
            .await;
        assert_eq!(
            acquire(&*store, &hold, HOUR).await,
            AcquireReply::ForeignKey(KeyPart::Lock)
        );
        let revoked = store
            .revoke(&hold.key, mode.kind(), RevokeScope::AlsoEndless)
            .await
            .unwrap();
        assert_eq!(revoked, RevokeReply::ForeignKey);
        assert_eq!(
            server
                .query::<Vec<String>>(&["ZRANGE", &name, "0", "-1"])
                .await,
            ["ann", "bob"]
        );
        // A set whose expiry is not that of its longest member is not a lock either.
        server.command(&["PEXPIRE", &name, "3600000"]).await;
        assert_eq!(
            acquire(&*store, &hold, HOUR).await,
            AcquireReply::ForeignKey(KeyPart::Lock)
        );
        assert_eq!(server.query::<i64>(&["ZCARD", &name]).await, 2);
    }
}

// Rule 21.
#[tokio::test]
async fn revoke_takes_a_lock_without_expiry_only_on_request() {
    let server = shared_server().await;
    let store = redis_on(server).await;
    let hold = fresh_hold(Mode::Exclusive);
    server
        .command(&["SET", &lock_name(&hold), "somebody"])
        .await;
    for mode in [Mode::Exclusive, Mode::Shared] {
        let reply = acquire(&*store, &beside(&hold.key, mode), HOUR).await;
        assert_eq!(
            reply,
            AcquireReply::Busy {
                holder_ttl: None,
                has_waiters: false
            }
        );
    }
    let revoke = async |scope| {
        store
            .revoke(&hold.key, LockKind::Lock, scope)
            .await
            .unwrap()
    };
    assert_eq!(revoke(RevokeScope::Leased).await, RevokeReply::Endless);
    assert_eq!(
        server.query::<String>(&["GET", &lock_name(&hold)]).await,
        "somebody"
    );
    assert_eq!(revoke(RevokeScope::AlsoEndless).await, RevokeReply::Revoked);
    granted(&*store, &hold, HOUR).await;
}
