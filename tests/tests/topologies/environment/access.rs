//! A server with users: the documented line allows all that a lock needs, and no more.

use lock_runtime::{
    LockClient, LockError, LockErrorKind, LockKey, Mode,
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
            let (first, second, next_holder, waiter) = (hold(), hold(), hold(), hold());
            for acquired in [&first, &first, &second] {
                told(store.acquire(&request(acquired)).await.map(drop));
            }
            told(poll(store, &first).await.map(drop));
            for asked in [&waiter, &waiter, &second] {
                told(store.acquire(&request(asked).queued()).await.map(drop));
            }
            told(poll(store, &waiter).await.map(drop));
            told(store.abandon(&waiter).await);
            let renewal = Renewal::new(first.clone(), 2 * HOUR);
            told(store.renew(&[renewal]).await.all().map(drop));
            told(store.inspect(&key, mode.kind()).await.map(drop));
            let release = || Release::new(first.clone());
            let passed_on = release().next(NextHolder::new(next_holder.token, HOUR, 0));
            told(store.release(&passed_on).await.map(drop));
            told(store.convert(&next_holder).await.map(drop));
            let converted = Hold::new(key.clone(), Mode::Shared, next_holder.token);
            told(store.abandon(&converted).await);
            told(store.acquire_all(&[request(&first)]).await.map(drop));
            let kept = release().keep_for(Some(HOUR));
            told(store.release(&kept).await.map(drop));
            let revoked = store.revoke(&key, mode.kind(), RevokeScope::Leased);
            told(revoked.await.map(drop));
        }
    }
    errors
}

/// A server with a user that has these rights.
async fn server_with(rights: &str) -> RedisServer {
    let builder = RedisServer::builder().user("ann", PASSWORD, rights);
    builder.start().await
}

/// The URL of the server as that user.
fn url(server: &RedisServer) -> String {
    server.url_as("ann", PASSWORD)
}

async fn store_as_ann(server: &RedisServer, namespace: &str) -> Result<RedisStore, LockError> {
    RedisStore::connect(&url(server), namespace).await
}

#[test]
fn the_page_of_rights_shows_the_line() {
    let page = include_str!("../../../../docs/redis-rights.md");
    let line = RedisStore::acl_line("lock");
    assert!(page.contains(&format!("\n{line}\n")), "{line}");
}

#[tokio::test]
async fn a_user_of_the_documented_line_can_do_everything() {
    for namespace in ["lock", "a*b", "my app", "[x]?y^\\", "täg"] {
        let server = server_with("").await;
        let line = RedisStore::acl_line(namespace);
        allow(&server, "ann", &rules(&line)).await;
        let store = store_as_ann(&server, namespace).await.unwrap();
        let errors = everything(&store).await;
        assert!(errors.is_empty(), "{namespace}: {errors:?}");
        let log: Vec<redis::Value> = server.query(&["ACL", "LOG"]).await;
        assert!(log.is_empty(), "{namespace}: a command was denied: {log:?}");
    }
}

#[tokio::test]
async fn a_user_of_one_namespace_has_no_other() {
    let server = server_with("").await;
    allow(&server, "ann", &rules(&RedisStore::acl_line("a*"))).await;
    for namespace in ["ab", "b", "a"] {
        let builder = LockClient::builder().namespace(namespace);
        let locks = builder.connect(&url(&server)).await.unwrap();
        // The request does not wait, as the error is permanent.
        let request = locks.exclusive("k").wait(HOUR);
        let error = within(Duration::ZERO, request.acquire()).await.unwrap_err();
        let words = ["lock k: ", &RedisStore::acl_line(namespace)];
        assert_says(&error, LockErrorKind::Forbidden, &words);
    }
    assert_eq!(server.keys("*").await, [""; 0]);
}

#[tokio::test]
async fn every_missing_permission_is_an_error_with_the_whole_rule() {
    let server = server_with("").await;
    let line = RedisStore::acl_line("lock");
    let rules = rules(&line);
    for missing in &rules {
        let mut others = vec!["reset", "on", ">hunter2"];
        others.extend(rules.iter().filter(|rule| *rule != missing));
        allow(&server, "ann", &others).await;
        server.command(&["FLUSHALL"]).await;
        server.command(&["SCRIPT", "FLUSH"]).await;
        let traces = Captured::new();
        let _guard = traces.set_default();
        let errors = match store_as_ann(&server, "lock").await {
            Ok(store) => everything(&store).await,
            Err(error) => {
                assert_says(&error, LockErrorKind::Forbidden, &[&line]);
                continue;
            }
        };
        for error in &errors {
            let kind = error.kind();
            assert_eq!(
                kind,
                StoreErrorKind::Forbidden,
                "without {missing}: {error}"
            );
            assert!(chain(&error).contains(&line), "without {missing}: {error}");
        }
        match *missing {
            "+info" => {
                assert!(errors.is_empty(), "{errors:?}");
                let mut said = traces.events().into_iter();
                assert!(said.any(|event| event.message.contains("forbids INFO")));
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
            let left: i64 = server.query(&["PTTL", &key]).await;
            assert!(left >= 0, "without {missing}: {key}");
        }
    }
}

#[tokio::test]
async fn a_refused_reader_leaves_the_set_of_the_others_as_it_was() {
    let server = server_with("~* &* +@all").await;
    let (others, ann) = (
        RedisStore::connect(&server.url(), "lock").await.unwrap(),
        store_as_ann(&server, "lock").await.unwrap(),
    );
    let minute = Duration::from_secs(60);
    for mode in [Mode::Shared, Mode::Permits(permits(3))] {
        let key = LockKey::new("k").unwrap();
        let hold = || Hold::new(key.clone(), mode, Token::random());
        let request =
            |hold: &Hold, lease| KeyRequest::new(hold.clone(), lease, Instant::now() + HOUR);
        let holders = async || {
            let found = others.inspect(&key, mode.kind()).await;
            found.unwrap().holders.len()
        };
        let (mine, hers, refused) = (hold(), hold(), hold());
        others.acquire(&request(&mine, minute)).await.unwrap();
        ann.acquire(&request(&hers, minute * 2)).await.unwrap();
        allow(&server, "ann", &["-zadd"]).await;
        for lease in [minute / 2, HOUR] {
            ann.acquire(&request(&refused, lease)).await.unwrap_err();
            let renewal = Renewal::new(hers.clone(), lease + 2 * minute);
            ann.renew(&[renewal]).await.all().unwrap_err();
            assert_eq!(holders().await, 2, "{mode:?}");
        }
        let kept = Release::new(hers).keep_for(Some(minute));
        ann.release(&kept).await.unwrap_err();
        assert_eq!(holders().await, 1, "{mode:?}: it is given back");
        others.release(&Release::new(mine)).await.unwrap();
        assert_eq!(holders().await, 0, "{mode:?}");
        allow(&server, "ann", &["+zadd"]).await;
    }
}

#[tokio::test]
async fn a_right_that_ends_while_a_lock_is_held_is_an_error_too() {
    let server = server_with("~* &* +@all").await;
    let locks = LockClient::connect(&url(&server)).await.unwrap();
    let guard = locks.exclusive("k").acquire().await.unwrap();
    allow(&server, "ann", &["-get", "-evalsha"]).await;
    let line = RedisStore::acl_line("lock");
    let now = Duration::ZERO;
    let one = locks.exclusive("l").wait(HOUR).acquire();
    let all = locks.all(["l", "m"]).no_wait().acquire();
    let (inspect, revoke) = (locks.inspect("l"), locks.revoke("l"));
    for (call, outcome) in [
        ("one", within(now, one).await.map(drop)),
        ("all", within(now, all).await.map(drop)),
        (
            "inspect",
            within(now, inspect.into_future()).await.map(drop),
        ),
        ("revoke", within(now, revoke.into_future()).await.map(drop)),
    ] {
        println!("{call}");
        let error = outcome.expect_err(call);
        assert_says(&error, LockErrorKind::Forbidden, &["lock l: ", &line]);
    }
    let error = guard.verify().await.unwrap_err();
    assert_says(&error, LockErrorKind::Forbidden, &["lock k: ", &line]);
    allow(&server, "ann", &["+get", "+evalsha"]).await;
    guard.verify().await.expect("it is still held");
    guard.release().await.unwrap();
}

#[tokio::test]
async fn another_database_needs_to_be_selected() {
    let server = server_with("").await;
    let line = RedisStore::acl_line("lock");
    allow(&server, "ann", &rules(&line)).await;
    let url = format!("{}/3", url(&server));
    let error = LockClient::connect(&url).await.unwrap_err();
    assert_says(&error, LockErrorKind::Forbidden, &[&line, "+select"]);
    allow(&server, "ann", &["+select"]).await;
    let locks = LockClient::connect(&url).await.unwrap();
    let guard = locks.exclusive("k").acquire().await.unwrap();
    guard.release().await.unwrap();
}
