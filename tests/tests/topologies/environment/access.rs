//! A server with users: the documented line allows all that a lock needs, and no more.

use lock_runtime::{
    LockClient, LockErrorKind, LockKey, Mode,
    store::{
        Hold, Instant, KeyRequest, NextHolder, Release, Renewal, RevokeScope, Store, StoreError,
        StoreErrorKind, Token, redis::RedisStore,
    },
};
use lock_tests::{
    Captured, RedisServer,
    access::{allow, rules},
    chain,
    replies::{Replies as _, poll},
};

use super::{Duration, HOUR, assert_says, permits, within};

const PASSWORD: &str = "hunter2";

/// Makes every call in every mode, on both kinds of names. Returns the errors.
pub(crate) async fn everything(store: &dyn Store) -> Vec<StoreError> {
    let mut errors = Vec::new();
    let mut told = |outcome: Result<(), StoreError>| errors.extend(outcome.err());
    for name in ["plain", "{tagged}:k"] {
        for mode in [Mode::Exclusive, Mode::Shared, Mode::Permits(permits(1))] {
            let key = LockKey::new(name).unwrap();
            let hold = || Hold::new(key.clone(), mode, Token::random());
            let request = |hold: &Hold| KeyRequest::new(hold.clone(), HOUR, Instant::now() + HOUR);
            let (first, second, heir, waiter) = (hold(), hold(), hold(), hold());
            for acquired in [&first, &first, &second] {
                told(store.acquire(&request(acquired)).await.map(drop));
            }
            told(poll(store, &first).await.map(drop));
            for asked in [&waiter, &waiter, &second] {
                told(store.acquire(&request(asked).queued()).await.map(drop));
            }
            told(poll(store, &waiter).await.map(drop));
            told(store.abandon(&waiter).await);
            told(
                store
                    .renew(&[Renewal::new(first.clone(), 2 * HOUR)])
                    .await
                    .all()
                    .map(drop),
            );
            told(store.inspect(&key, mode.kind()).await.map(drop));
            told(
                store
                    .release(
                        &Release::new(first.clone()).next(NextHolder::new(heir.token, HOUR, 0)),
                    )
                    .await
                    .map(drop),
            );
            told(store.convert(&heir).await.map(drop));
            told(
                store
                    .abandon(&Hold::new(key.clone(), Mode::Shared, heir.token))
                    .await,
            );
            told(store.acquire_all(&[request(&first)]).await.map(drop));
            told(
                store
                    .release(&Release::new(first.clone()).keep_for(Some(HOUR)))
                    .await
                    .map(drop),
            );
            told(
                store
                    .revoke(&key, mode.kind(), RevokeScope::Leased)
                    .await
                    .map(drop),
            );
        }
    }
    errors
}

async fn store_as(
    server: &RedisServer,
    namespace: &str,
) -> Result<RedisStore, lock_runtime::LockError> {
    RedisStore::connect(&server.url_as("ann", PASSWORD), namespace).await
}

#[test]
fn the_page_of_rights_shows_the_line() {
    let page = include_str!("../../../../docs/redis-rights.md");
    assert!(
        page.contains(&format!("\n{}\n", RedisStore::acl_line("lock"))),
        "{}",
        RedisStore::acl_line("lock")
    );
}

#[tokio::test]
async fn a_user_of_the_documented_line_can_do_everything() {
    for namespace in ["lock", "a*b", "my app", "[x]?y^\\", "täg"] {
        let server = RedisServer::builder()
            .user("ann", PASSWORD, "")
            .start()
            .await;
        let line = RedisStore::acl_line(namespace);
        allow(&server, "ann", &rules(&line)).await;
        let store = store_as(&server, namespace).await.unwrap();
        let errors = everything(&store).await;
        assert!(errors.is_empty(), "{namespace}: {errors:?}");
        let log: Vec<redis::Value> = server.query(&["ACL", "LOG"]).await;
        assert!(
            log.is_empty(),
            "no command of the user was ever denied: {log:?}"
        );
    }
}

#[tokio::test]
async fn a_user_of_one_namespace_has_no_other() {
    let server = RedisServer::builder()
        .user("ann", PASSWORD, "")
        .start()
        .await;
    allow(&server, "ann", &rules(&RedisStore::acl_line("a*"))).await;
    for namespace in ["ab", "b", "a"] {
        let locks = LockClient::builder()
            .namespace(namespace)
            .connect(&server.url_as("ann", PASSWORD))
            .await
            .unwrap();
        // The request does not wait, as the error is permanent.
        let error = within(Duration::ZERO, locks.exclusive("k").wait(HOUR).acquire())
            .await
            .unwrap_err();
        assert_says(
            &error,
            LockErrorKind::Forbidden,
            &["lock k: ", &RedisStore::acl_line(namespace)],
        );
    }
    assert_eq!(server.keys("*").await, [""; 0]);
}

#[tokio::test]
async fn every_missing_permission_is_told_with_the_whole_line() {
    let server = RedisServer::builder()
        .user("ann", PASSWORD, "")
        .start()
        .await;
    let line = RedisStore::acl_line("lock");
    let rules = rules(&line);
    for missing in &rules {
        let mut others: Vec<_> = rules
            .iter()
            .filter(|rule| *rule != missing)
            .copied()
            .collect();
        let reset = ["reset", "on", ">hunter2"];
        others.splice(0..0, reset);
        allow(&server, "ann", &others).await;
        server.command(&["FLUSHALL"]).await;
        server.command(&["SCRIPT", "FLUSH"]).await;
        let traces = Captured::new();
        let _guard = traces.set_default();
        let errors = match store_as(&server, "lock").await {
            Ok(store) => everything(&store).await,
            Err(error) => {
                assert_says(&error, LockErrorKind::Forbidden, &[&line]);
                continue;
            }
        };
        for error in &errors {
            assert_eq!(
                error.kind(),
                StoreErrorKind::Forbidden,
                "without {missing}: {error}"
            );
            assert!(chain(&error).contains(&line), "without {missing}: {error}");
        }
        match *missing {
            "+info" => {
                assert!(errors.is_empty(), "{errors:?}");
                assert!(
                    traces
                        .events()
                        .iter()
                        .any(|event| event.message.contains("forbids INFO"))
                );
            }
            // It forbids other channels.
            "resetchannels" => assert!(errors.is_empty(), "{errors:?}"),
            // Without push messages, polls find the grants. Without the others, no call is sent
            // together with others.
            "&lock:*" | "+publish" | "+subscribe" | "+exists" | "+mget" => {
                assert!(errors.is_empty(), "without {missing}: {errors:?}")
            }
            _ => assert!(!errors.is_empty(), "{missing} is not needed"),
        }
        // A script that is refused half-way leaves no key without an expiry.
        for key in server.keys("*").await {
            assert!(
                server.query::<i64>(&["PTTL", &key]).await >= 0,
                "without {missing}: {key}"
            );
        }
    }
}

#[tokio::test]
async fn a_refused_reader_leaves_the_set_of_the_others_as_it_was() {
    let server = RedisServer::builder()
        .user("ann", PASSWORD, "~* &* +@all")
        .start()
        .await;
    let (others, ann) = (
        RedisStore::connect(&server.url(), "lock").await.unwrap(),
        store_as(&server, "lock").await.unwrap(),
    );
    let minute = Duration::from_secs(60);
    for mode in [Mode::Shared, Mode::Permits(permits(3))] {
        let key = LockKey::new("k").unwrap();
        let hold = || Hold::new(key.clone(), mode, Token::random());
        let request =
            |hold: &Hold, lease| KeyRequest::new(hold.clone(), lease, Instant::now() + HOUR);
        let (mine, hers, refused) = (hold(), hold(), hold());
        others.acquire(&request(&mine, minute)).await.unwrap();
        ann.acquire(&request(&hers, minute * 2)).await.unwrap();
        allow(&server, "ann", &["-zadd"]).await;
        for lease in [minute / 2, HOUR] {
            ann.acquire(&request(&refused, lease)).await.unwrap_err();
            ann.renew(&[Renewal::new(hers.clone(), lease + 2 * minute)])
                .await
                .all()
                .unwrap_err();
            assert_eq!(
                others
                    .inspect(&key, mode.kind())
                    .await
                    .unwrap()
                    .holders
                    .len(),
                2,
                "{mode:?}"
            );
        }
        ann.release(&Release::new(hers).keep_for(Some(minute)))
            .await
            .unwrap_err();
        assert_eq!(
            others
                .inspect(&key, mode.kind())
                .await
                .unwrap()
                .holders
                .len(),
            1,
            "{mode:?}: it is given back"
        );
        others.release(&Release::new(mine)).await.unwrap();
        assert!(
            others
                .inspect(&key, mode.kind())
                .await
                .unwrap()
                .holders
                .is_empty()
        );
        allow(&server, "ann", &["+zadd"]).await;
    }
}

#[tokio::test]
async fn what_is_forbidden_while_a_lock_is_held_is_told_too() {
    let server = RedisServer::builder()
        .user("ann", PASSWORD, "~* &* +@all")
        .start()
        .await;
    let locks = LockClient::connect(&server.url_as("ann", PASSWORD))
        .await
        .unwrap();
    let guard = locks.exclusive("k").acquire().await.unwrap();
    allow(&server, "ann", &["-get", "-evalsha"]).await;
    let line = RedisStore::acl_line("lock");
    for error in [
        within(Duration::ZERO, locks.exclusive("l").wait(HOUR).acquire())
            .await
            .unwrap_err(),
        within(Duration::ZERO, locks.all(["l", "m"]).no_wait().acquire())
            .await
            .unwrap_err(),
        within(Duration::ZERO, locks.inspect("l").into_future())
            .await
            .unwrap_err(),
        within(Duration::ZERO, locks.revoke("l").into_future())
            .await
            .unwrap_err(),
    ] {
        assert_says(&error, LockErrorKind::Forbidden, &["lock l: ", &line]);
    }
    assert_says(
        &guard.verify().await.unwrap_err(),
        LockErrorKind::Forbidden,
        &["lock k: ", &line],
    );
    allow(&server, "ann", &["+get", "+evalsha"]).await;
    guard.verify().await.expect("it is still held");
    guard.release().await.unwrap();
}

#[tokio::test]
async fn another_database_needs_to_be_selected() {
    let server = RedisServer::builder()
        .user("ann", PASSWORD, "")
        .start()
        .await;
    let line = RedisStore::acl_line("lock");
    allow(&server, "ann", &rules(&line)).await;
    let url = format!("{}/3", server.url_as("ann", PASSWORD));
    let error = LockClient::connect(&url).await.unwrap_err();
    assert_says(&error, LockErrorKind::Forbidden, &[&line, "+select"]);
    allow(&server, "ann", &["+select"]).await;
    let locks = LockClient::connect(&url).await.unwrap();
    locks
        .exclusive("k")
        .acquire()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
}
