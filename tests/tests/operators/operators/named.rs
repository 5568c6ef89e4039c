//! The names of clients, as holders, as waiters and in errors.

use std::{num::NonZeroU32, sync::Arc, time::Duration};

use lock_runtime::store::{AcquireReply, Hold, KeyRequest, MemoryStore};
use lock_runtime::{
    LockClient, LockErrorKind, LockKey, Mode, RedisOptions,
    operator::Identity,
    store::{Instant, Token},
};
use lock_tests::{
    FaultyStore, RedisServer,
    faulty_store::Operation,
    place::{LONG, Place, begun, eventually, in_time, in_vain, on_every_store, redlock_url},
    shared_server, unique,
};
use tokio::time::{sleep, timeout};

on_every_store! {
    holders_and_waiters_are_shown_with_the_names_of_their_clients,
    a_request_that_times_out_names_the_holder,
    a_client_without_a_name_is_shown_as_such,
    a_client_that_is_shut_down_has_its_name_while_it_holds_a_lock,
    ; with permits:
    each_reader_and_each_permit_shows_for_how_long_it_is_held,
}

async fn named(place: &Place, name: &str) -> LockClient {
    place.client_of(LockClient::builder().identity(name)).await
}

async fn holders_and_waiters_are_shown_with_the_names_of_their_clients(place: Place) {
    let (one, other) = (
        named(&place, "orders-1").await,
        named(&place, "orders-2").await,
    );
    let operator = place.client().await;
    let guard = one.exclusive("a").acquire().await.unwrap();
    let mut waiting = begun(other.exclusive("a").wait(LONG).acquire()).await;
    let mut shown = async || {
        // The waiter makes its calls when it is polled.
        let _ = futures_util::poll!(&mut waiting);
        let seen = operator.inspect("a").await.unwrap();
        let holders: Vec<_> = seen
            .holders
            .iter()
            .map(|it| it.client.to_string())
            .collect();
        let waiters: Vec<_> = seen
            .waiters
            .iter()
            .map(|it| it.client.to_string())
            .collect();
        (holders, waiters)
    };
    let until = Instant::now() + LONG;
    loop {
        let (holders, waiters) = shown().await;
        if holders == ["orders-1"] && waiters == ["orders-2"] {
            break;
        }
        assert!(Instant::now() < until, "{holders:?} {waiters:?}");
        sleep(Duration::from_millis(10)).await;
    }

    // The time is that of the store, whose clock a majority of paused stores does not share.
    if !matches!(place, Place::Majority(_)) {
        sleep(Duration::from_millis(50)).await;
        let held_for = operator.inspect("a").await.unwrap().holders[0].held_for;
        let held_for = held_for.expect("a writer");
        assert!(
            held_for >= Duration::from_millis(50) && held_for < LONG,
            "{held_for:?}"
        );
    }
    guard.release().await.unwrap();
    let guard = waiting.await.unwrap();
    let seen = one.inspect("a").await.unwrap();
    assert_eq!(seen.holders[0].client.name(), Some("orders-2"));
    guard.release().await.unwrap();
}

async fn a_client_that_is_shut_down_has_its_name_while_it_holds_a_lock(place: Place) {
    let (one, operator) = (named(&place, "orders-1").await, place.client().await);
    let guard = one.exclusive("a").acquire().await.unwrap();
    let is_named = async |operator: &LockClient| {
        let seen = operator.inspect("a").await.unwrap();
        seen.holders[0].client.name() == Some("orders-1")
    };
    eventually("it has its name", async || is_named(&operator).await).await;
    one.shutdown().await;
    guard.verify().await.unwrap();
    drop(one);
    sleep(Duration::from_millis(100)).await;
    // Another one has not seen the name before.
    assert!(is_named(&place.client().await).await);
    guard.release().await.unwrap();
}

async fn a_request_that_times_out_names_the_holder(place: Place) {
    let (one, other) = (
        named(&place, "orders-1").await,
        named(&place, "orders-2").await,
    );
    let guard = one.exclusive("a").acquire().await.unwrap();
    eventually("the store knows the name", async || {
        let seen = other.inspect("a").await.unwrap();
        seen.holders[0].client.name() == Some("orders-1")
    })
    .await;
    let error = in_vain(other.exclusive("a")).await;
    assert_eq!(error.kind(), LockErrorKind::WaitTimeout);
    let text = error.to_string();
    assert!(text.contains("; held by orders-1"), "{text}");
    guard.release().await.unwrap();
}

async fn a_client_without_a_name_is_shown_as_such(place: Place) {
    let nameless = place
        .client_of(LockClient::builder().without_identity())
        .await;
    let operator = place.client().await;
    let guard = nameless.exclusive("a").acquire().await.unwrap();
    sleep(Duration::from_millis(50)).await;
    let seen = operator.inspect("a").await.unwrap();
    let Identity::Client { name: None, .. } = seen.holders[0].client else {
        panic!("{seen:?}");
    };
    assert_eq!(seen.holders[0].client.to_string(), "an unnamed client");
    guard.release().await.unwrap();

    // As that of a client of a version without names.
    let store = place.store().await;
    let hold = Hold::new(LockKey::new("b").unwrap(), Mode::Exclusive, Token::random());
    let request = KeyRequest::new(hold, Duration::from_secs(20), Instant::now() + LONG);
    let granted = store.acquire(&request).await.unwrap();
    assert!(matches!(granted, AcquireReply::Granted(_)), "{granted:?}");
    let seen = operator.inspect("b").await.unwrap();
    assert_eq!(seen.holders[0].client.name(), None, "{seen:?}");
}

async fn each_reader_and_each_permit_shows_for_how_long_it_is_held(place: Place) {
    let (locks, three) = (place.client().await, NonZeroU32::new(3).unwrap());
    let reader = || locks.shared("a").acquire();
    let permit = || locks.permits("a", three).acquire();
    let first = (reader().await.unwrap(), permit().await.unwrap());
    sleep(Duration::from_millis(1500)).await;
    let second = (reader().await.unwrap(), permit().await.unwrap());
    if matches!(place, Place::Redis { .. }) {
        // Redis has no times of these grants until the client records them, as it does every five
        // minutes.
        let [read, counted] = [locks.inspect("a").await, locks.inspect("a").permits().await];
        let holders = [read.unwrap().holders, counted.unwrap().holders].concat();
        assert!(holders.iter().all(|it| it.held_for.is_none()));
        let Identity::Client { id, .. } = holders[0].client else {
            panic!("{holders:?}");
        };
        // The holders of a lock come in the order in which they expire.
        let ages = [1500, 0, 1500, 0].map(Duration::from_millis);
        let grants: Vec<_> = holders.iter().map(|it| it.id).zip(ages).collect();
        let store = place.store().await;
        let introduced = store.introduce(id, "reader", &grants, Identity::TTL);
        introduced.await.unwrap();
    }
    for seen in [locks.inspect("a").await, locks.inspect("a").permits().await] {
        let holders = seen.unwrap().holders;
        let mut held_for: Vec<_> = holders.iter().map(|it| it.held_for).collect();
        held_for.sort_unstable();
        let [Some(short), Some(long)] = held_for[..] else {
            panic!("{holders:?}");
        };
        assert!(long >= Duration::from_secs(1) && long < LONG, "{long:?}");
        assert!(long - short >= Duration::from_secs(1), "{short:?} {long:?}");
    }
    drop((first, second));
}

#[tokio::test]
async fn the_default_name_has_program_host_and_process() {
    let locks = LockClient::in_memory();
    let guard = locks.exclusive("a").acquire().await.unwrap();
    let seen = locks.inspect("a").await.unwrap();
    let name = seen.holders[0].client.name().expect("a name").to_owned();
    let end = format!(":{}", std::process::id());
    assert!(
        name.starts_with("operators") && name.contains('@') && name.ends_with(&end),
        "{name}"
    );
    guard.release().await.unwrap();
}

#[test]
fn a_name_that_is_empty_or_too_long_is_refused() {
    for name in ["", &"x".repeat(129)] {
        let error = LockClient::builder()
            .identity(name)
            .build_in_memory()
            .unwrap_err();
        assert_eq!(error.kind(), LockErrorKind::InvalidSpec);
        assert!(error.to_string().contains("identity"), "{error}");
    }
    LockClient::builder()
        .identity("x".repeat(128))
        .build_in_memory()
        .unwrap();
}

/// Any client of the server may write any name.
#[tokio::test]
async fn a_name_of_any_origin_has_no_control_characters() {
    in_time(async {
        let (server, place) = (shared_server().await, Place::redis().await);
        let own = named(&place, "a\r\nb\u{1b}[2J\u{202e}c").await;
        let guard = own.exclusive("a").acquire().await.unwrap();
        let seen = own.inspect("a").await.unwrap();
        let escaped = "a\\u{d}\\u{a}b\\u{1b}[2J\\u{202e}c";
        assert_eq!(seen.holders[0].client.name(), Some(escaped));

        let pattern = format!("f:{}:client:*", place.namespace());
        eventually("the store has the name", async || {
            server.keys(&pattern).await.len() == 1
        })
        .await;
        let key = server.keys(&pattern).await.remove(0);
        assert_eq!(server.query::<String>(&["GET", &key]).await, escaped);
        let ttl: i64 = server.query(&["TTL", &key]).await;
        assert!(ttl > 600 && ttl <= 900, "{ttl}");

        let hostile = format!("<script>\u{7}\u{202e}{}", "x".repeat(1 << 20));
        server.command(&["SET", &key, &hostile]).await;
        let seen = place.client().await.inspect("a").await.unwrap();
        let name = seen.holders[0].client.name().unwrap().to_owned();
        assert!(name.starts_with("<script>\\u{7}\\u{202e}xxx"), "{name}");
        assert!(name.len() <= 128, "{}", name.len());
        // Data of another type is no name.
        server.command(&["DEL", &key]).await;
        server.command(&["RPUSH", &key, "x"]).await;
        let seen = place.client().await.inspect("a").await.unwrap();
        assert_eq!(seen.holders[0].client.name(), None);
        guard.release().await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn a_server_that_lost_its_data_learns_the_names_again() {
    in_time(async {
        let server = RedisServer::start().await;
        let place = Place::at(server.url());
        let (one, operator) = (named(&place, "orders-1").await, place.client().await);
        let shown = async || {
            let Ok(_guard) = one.exclusive(unique("k")).acquire().await else {
                return false;
            };
            let fresh = place.client().await;
            let seen = fresh.inspect(_guard.key().clone()).await;
            seen.is_ok_and(|seen| {
                seen.holders
                    .iter()
                    .any(|it| it.client.name() == Some("orders-1"))
            })
        };
        eventually("the name is known", shown).await;
        server.restart_empty().await;
        eventually("the name is known again", shown).await;
        drop(operator);
    })
    .await;
}

#[tokio::test]
async fn locks_are_inspected_without_names_by_a_client_that_may_not_read_them() {
    in_time(async {
        let server = RedisServer::start().await;
        let place = Place::at(server.url());
        let one = named(&place, "orders-1").await;
        let guard = one.exclusive("a").acquire().await.unwrap();
        eventually("the store knows the name", async || {
            let seen = place.client().await.inspect("a").await.unwrap();
            seen.holders[0].client.name() == Some("orders-1")
        })
        .await;

        let ns = place.namespace();
        let patterns = ["~*:a", "~*:a}:f", "~*:a}:q"];
        let user = ["ACL", "SETUSER", "ann", "on", ">hunter2", "&*", "+@all"];
        server.command(&[&user[..], &patterns].concat()).await;
        let url = server.url_as("ann", "hunter2");
        let ann = LockClient::builder().namespace(ns).connect(&url).await;
        let ann = ann.unwrap();
        let seen = ann.inspect("a").await.unwrap();
        assert_eq!(seen.holders[0].client.name(), None);
        let soon = Duration::from_millis(1);
        let refused = ann.exclusive("a").wait(soon).acquire();
        let refused = refused.await.unwrap_err();
        let text = refused.to_string();
        assert!(text.contains("; held by an unnamed client for"), "{text}");
        guard.release().await.unwrap();
    })
    .await;
}

/// The error that would name the holder may be dropped while it waits for the name.
#[tokio::test]
async fn a_store_that_does_not_describe_the_holder_is_let_go() {
    in_time(async {
        let store = FaultyStore::new(Arc::new(MemoryStore::new()), |call| async move {
            match call.operation {
                Operation::Inspect(..) => std::future::pending().await,
                _ => call.execute().await,
            }
        });
        let locks = LockClient::with_store(store.clone());
        let guard = locks.exclusive("a").acquire().await.unwrap();
        let soon = Duration::from_millis(1);
        let refused = locks.exclusive("a").wait(soon).acquire();
        let refused = timeout(20 * soon, refused).await;
        assert!(refused.is_err(), "{refused:?}");
        guard.release().await.unwrap();
        drop(locks);
        eventually("the store is dropped", async || {
            Arc::strong_count(&store) == 1
        })
        .await;
    })
    .await;
}

/// A server of a majority that loses its data gets the names again, also while no lock is held.
#[tokio::test]
async fn servers_of_a_majority_that_lost_their_data_learn_the_names_again() {
    in_time(async {
        let servers = RedisServer::builder().start_all(3).await;
        let urls: Vec<_> = servers.iter().map(RedisServer::url).collect();
        let namespace = unique("ns");
        let lease = Duration::from_secs(1);
        let options = RedisOptions::new().longest_lease(lease);
        let builder = LockClient::builder().namespace(&namespace).redis(options);
        let locks = builder.connect(&redlock_url(&urls)).await.unwrap();
        let request = locks.exclusive("a").lease(lease).wait(LONG);
        request.acquire().await.unwrap().release().await.unwrap();
        let pattern = format!("f:{namespace}:client:*");
        let named = async |server: &RedisServer| server.keys(&pattern).await.len() == 1;
        for server in &servers {
            eventually("the server has the name", async || named(server).await).await;
        }
        for server in &servers {
            server.restart_empty().await;
            eventually("the server has the name again", async || {
                named(server).await
            })
            .await;
        }
    })
    .await;
}
