//! The server's part: memory, access rules, foreign data, slots, and connections.

use lock_runtime::{
    Mode,
    store::{
        AcquireReply, Hold, KeyPart, KeyRequest, PollReply, ReleaseReply, Store as _,
        StoreErrorKind, StoreEvent,
    },
};
use lock_tests::{Captured, Proxy, RedisServer, replies::poll, shared_server};
use tracing::Level;

use super::{
    Client, HOUR, MODES, TWO_PERMITS, beside, conflicting, eventually, fresh_hold, granted,
    in_a_minute, key, lock_name, only_the_counter_is_left, queue_name,
};

// Rule 23.
#[tokio::test]
async fn release_hands_off_on_a_server_out_of_memory() {
    let server = RedisServer::start().await;
    let client = Client::of(&server).await;
    let full = async |full: bool| {
        server
            .command(&["CONFIG", "SET", "maxmemory", if full { "1" } else { "0" }])
            .await;
    };
    for mode in MODES {
        let wanted = conflicting(mode);
        let holder = client.held(mode).await;
        client.fill(&holder).await;
        let [first, second, third] = client.waiters(&holder.key, wanted).await;
        full(true).await;
        assert_eq!(
            client.release(&holder).await,
            ReleaseReply::Released,
            "{mode:?}"
        );
        client.pushed(&first).await;
        client.abandon(&first).await;
        client.pushed(&second).await;
        assert!(client.is_queued(&third).await, "its entry is kept");
        if mode == Mode::Exclusive {
            let next = beside(&holder.key, Mode::Exclusive);
            let reply = client.release_to(&second, next.token).await;
            assert!(matches!(reply, ReleaseReply::Queued { .. }), "{reply:?}");
            client.pushed(&third).await;
            // As after a lease expiry: a poll finds the lock free.
            server.command(&["DEL", &lock_name(&holder)]).await;
            assert!(client.is_held(&next).await);
        }
        let newcomer = KeyRequest::new(fresh_hold(wanted), HOUR, in_a_minute()).queued();
        client
            .store
            .acquire(&newcomer)
            .await
            .expect_err("nothing new");
        full(false).await;
        server.command(&["FLUSHALL"]).await;
    }
}

// Rule 21.
#[tokio::test]
async fn acquire_leaves_foreign_data_in_the_queue_key_unchanged() {
    let server = shared_server().await;
    let client = Client::of(server).await;
    for data in [
        &["SET", "", "foreign"][..],
        &["RPUSH", "", "ann", "bob"],
        &["ZADD", "", "1", "ann"],
        &["HSET", "", "ann", "1"],
        &["HSET", "", "ends", "of the world"],
    ] {
        for mode in [Mode::Exclusive, TWO_PERMITS] {
            let holder = client.held(mode).await;
            client.fill(&holder).await;
            let queue = queue_name(&holder);
            let command: Vec<_> = data
                .iter()
                .map(|word| if word.is_empty() { &queue } else { *word })
                .collect();
            server.command(&command).await;
            let before: Vec<u8> = server.query(&["DUMP", &queue]).await;
            let waiter = beside(&holder.key, mode);
            assert_eq!(
                client.queue(&waiter).await,
                AcquireReply::ForeignKey(KeyPart::Queue),
                "{data:?}"
            );
            match poll(&*client.store, &waiter).await {
                Ok(reply) => assert_eq!(reply, PollReply::Gone, "{data:?}"),
                Err(error) => assert_eq!(error.kind(), StoreErrorKind::ForeignKey, "{data:?}"),
            }
            client.abandon(&waiter).await;
            // The foreign data prevents no release.
            let reply = client.release(&holder).await;
            assert_eq!(reply, ReleaseReply::Released, "{data:?} {mode:?}");
            assert_eq!(
                holders(server, &holder).await,
                u64::from(mode == TWO_PERMITS),
                "{data:?} {mode:?}"
            );
            client.revoke(&holder).await;
            let after: Vec<u8> = server.query(&["DUMP", &queue]).await;
            assert_eq!(before, after, "{data:?}");
            assert_eq!(server.query::<i64>(&["PTTL", &queue]).await, -1, "{data:?}");
        }
    }
}

/// The number of holders of a lock that the store cannot inspect.
async fn holders(server: &RedisServer, hold: &Hold) -> u64 {
    match hold.mode {
        Mode::Exclusive => server.query(&["EXISTS", &lock_name(hold)]).await,
        _ => server.query(&["ZCARD", &lock_name(hold)]).await,
    }
}

// Rule 22.
#[tokio::test]
async fn acquire_keeps_the_queue_in_the_slot_of_its_lock() {
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
    let client = Client::of(&server).await;
    for name in ["{tag}:a b", "x{tag}y", "plain"] {
        for mode in [Mode::Exclusive, TWO_PERMITS] {
            let holder = beside(&key(name), mode);
            granted(&*client.store, &holder, HOUR).await;
            client.fill(&holder).await;
            let waiter = client.waiter(&holder.key, mode).await;
            let queues = async || server.query::<i64>(&["EXISTS", &queue_name(&holder)]).await;
            assert_eq!(queues().await, 1);
            let slot =
                async |name: String| server.query::<i64>(&["CLUSTER", "KEYSLOT", &name]).await;
            assert_eq!(
                slot(queue_name(&holder)).await,
                slot(lock_name(&holder)).await
            );
            client.release(&holder).await;
            client.pushed(&waiter).await;
            assert_eq!(queues().await, 0);
            client.revoke(&holder).await;
        }
    }
}

// Rule 23.
#[tokio::test]
async fn poll_finds_the_grant_of_a_user_without_notifications() {
    for forbidden in ["resetchannels", "-subscribe", "-publish"] {
        let server = RedisServer::builder()
            .user("ann", "hunter2", "~* &* +@all")
            .user("bob", "b", "")
            .start()
            .await;
        let rules = [
            "ACL", "SETUSER", "bob", "on", ">b", "~*", "&*", "+@all", forbidden,
        ];
        server.command(&rules).await;
        let traces = Captured::new();
        let _guard = traces.set_default();
        let client = Client::at(&server.url_as("bob", "b")).await;
        let mut holder = client.held(Mode::Exclusive).await;
        let waiters: [_; 2] = client.waiters(&holder.key, Mode::Exclusive).await;
        for waiter in waiters {
            assert_eq!(
                client.release(&holder).await,
                ReleaseReply::Released,
                "{forbidden}"
            );
            assert!(client.is_held(&waiter).await, "{forbidden}");
            holder = waiter;
        }
        assert!(client.events_so_far().await.is_empty());
        client.release(&holder).await;
        only_the_counter_is_left(&server, &holder).await;
        let warnings: Vec<_> = traces
            .events()
            .into_iter()
            .filter(|event| event.level == Level::WARN)
            .collect();
        assert_eq!(
            warnings.len(),
            usize::from(forbidden != "-publish"),
            "{forbidden}: {warnings:?}"
        );
        for warning in warnings {
            assert!(format!("{warning:?}").contains("&lock:*"), "{warning:?}");
        }
    }
}

#[tokio::test]
async fn release_notifies_a_client_that_has_reconnected() {
    let server = RedisServer::start().await;
    let proxy = Proxy::to(&server).await;
    let [there, client] = [Client::of(&server).await, Client::at(&proxy.url()).await];
    for _ in 0..3 {
        let holder = there.held(Mode::Exclusive).await;
        let waiter = client.waiter(&holder.key, Mode::Exclusive).await;
        proxy.cut();
        assert!(matches!(client.event().await, StoreEvent::Disconnected));
        eventually("it is back", async || {
            poll(&*client.store, &waiter).await.is_ok()
        })
        .await;
        there.release(&holder).await;
        client.pushed_after_a_reconnect(&waiter).await;
    }
}

// The connection manager is replaced after the server refuses a connection with an error reply.
#[tokio::test]
async fn release_notifies_a_client_that_was_refused_before() {
    let server = RedisServer::start().await;
    let [there, client] = [Client::of(&server).await, Client::of(&server).await];
    let holder = there.held(Mode::Exclusive).await;
    let waiter = client.waiter(&holder.key, Mode::Exclusive).await;
    let mut admin = server.connection().await.unwrap();
    let admin = &mut admin;
    let mut command = async |words: &[&str]| {
        redis::cmd(words[0])
            .arg(&words[1..])
            .query_async::<redis::Value>(admin)
            .await
            .unwrap();
    };
    command(&["CONFIG", "SET", "requirepass", "another"]).await;
    command(&["CLIENT", "KILL", "TYPE", "pubsub"]).await;
    eventually("it is refused", async || {
        poll(&*client.store, &waiter).await.is_err()
    })
    .await;
    command(&["CONFIG", "SET", "requirepass", ""]).await;
    let back = async || {
        poll(&*client.store, &waiter).await.is_ok() && poll(&*there.store, &holder).await.is_ok()
    };
    eventually("it is back", back).await;
    there.release(&holder).await;
    client.pushed_after_a_reconnect(&waiter).await;
}

#[tokio::test]
async fn release_notifies_a_client_whose_first_runtime_has_ended() {
    let server = shared_server().await;
    let (url, there) = (server.url(), Client::of(server).await);
    let client = std::thread::spawn(move || {
        tokio::runtime::Runtime::new()
            .unwrap()
            .block_on(Client::at(&url))
    });
    let client = client.join().unwrap();
    let holder = there.held(Mode::Exclusive).await;
    let waiter = beside(&holder.key, Mode::Exclusive);
    let request = KeyRequest::new(waiter.clone(), HOUR, in_a_minute()).queued();
    eventually("it is back", async || {
        client.store.acquire(&request).await.is_ok()
    })
    .await;
    there.release(&holder).await;
    client.pushed_after_a_reconnect(&waiter).await;
}
