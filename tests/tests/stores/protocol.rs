//! The rules of the protocol, each with a test that fails without it. The numbers in the comments
//! are those of the rules in `docs/PROTOCOL.md` or, where stated, those of a list of failures seen
//! in other libraries.

use std::{num::NonZeroU32, sync::Arc, time::Duration};

use lock_runtime::{
    LockClient, LockKey, LockKind, Mode,
    operator::Inspection,
    store::{
        AcquireReply, Grant, Hold, Instant, KeyRequest, MemoryStore, Store, Token,
        redis::RedisStore,
    },
};
use lock_tests::{RedisServer, shared_server, unique};

mod crashed;
mod fences;
mod halfway;
mod holding;
mod late;
mod monitor;
mod names;
pub(crate) mod queue;
mod released;
mod set_back;
mod several;
mod tokens;
mod validity;

const HOUR: Duration = Duration::from_secs(3600);
/// Longer than any step takes on a slow machine.
const LONG: Duration = Duration::from_secs(20);

const MODES: [Mode; 3] = [Mode::Exclusive, Mode::Shared, TWO_PERMITS];
const TWO_PERMITS: Mode = Mode::Permits(NonZeroU32::new(2).unwrap());

fn key(name: &str) -> LockKey {
    LockKey::new(name).unwrap()
}

/// An acquisition of a key that no other test uses.
fn fresh_hold(mode: Mode) -> Hold {
    beside(&key(&unique("k")), mode)
}

/// Another acquisition of the same key.
fn beside(key: &LockKey, mode: Mode) -> Hold {
    Hold::new(key.clone(), mode, Token::random())
}

fn in_a_minute() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

async fn redis_on(server: &RedisServer) -> Arc<RedisStore> {
    Arc::new(RedisStore::connect(&server.url(), "lock").await.unwrap())
}

/// A store of each kind. The promises of a store hold for both.
async fn both() -> [Arc<dyn Store>; 2] {
    [
        Arc::new(MemoryStore::new()),
        redis_on(shared_server().await).await,
    ]
}

async fn acquire(store: &dyn Store, hold: &Hold, lease: Duration) -> AcquireReply {
    store
        .acquire(&KeyRequest::new(hold.clone(), lease, in_a_minute()))
        .await
        .unwrap()
}

async fn granted(store: &dyn Store, hold: &Hold, lease: Duration) -> Grant {
    match acquire(store, hold, lease).await {
        AcquireReply::Granted(grant) => grant,
        reply => panic!("{reply:?}"),
    }
}

async fn queued(store: &dyn Store, hold: &Hold, lease: Duration) {
    let reply = store
        .acquire(&KeyRequest::new(hold.clone(), lease, in_a_minute()).queued())
        .await
        .unwrap();
    assert!(matches!(reply, AcquireReply::Queued { .. }), "{reply:?}");
}

async fn inspect(store: &dyn Store, hold: &Hold) -> Inspection {
    store.inspect(&hold.key, hold.mode.kind()).await.unwrap()
}

async fn is_free(store: &dyn Store, key: &LockKey) -> bool {
    store
        .inspect(key, LockKind::Lock)
        .await
        .unwrap()
        .holders
        .is_empty()
}

/// The name of the key with the holders of the lock.
fn lock_name(hold: &Hold) -> String {
    match hold.mode.kind() {
        LockKind::Permits => format!("lock:permits:{}", hold.key),
        _ => format!("lock:{}", hold.key),
    }
}

/// The name of the key with the latest fencing token.
fn fence_name(hold: &Hold) -> String {
    match hold.key.hash_tag() {
        Some(_) => format!("f:{}", lock_name(hold)),
        None => format!("{{{}}}:f", lock_name(hold)),
    }
}

/// The member of a set that stands for a holder.
fn member(hold: &Hold) -> String {
    let token = String::from_utf8(hold.token.to_hex().to_vec()).unwrap();
    match hold.mode {
        Mode::Permits(permits) => format!("{permits}:{token}"),
        _ => token,
    }
}

/// The server's time, in microseconds.
async fn micros(server: &RedisServer) -> u64 {
    let (seconds, micros): (u64, u64) = server.query(&["TIME"]).await;
    seconds * 1_000_000 + micros
}

/// Polls for an event without a notification.
async fn eventually(what: &str, mut happened: impl AsyncFnMut() -> bool) {
    let until = Instant::now() + LONG;
    while !happened().await {
        assert!(Instant::now() < until, "in vain: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// A client whose scripts are loaded on the server, so that each further call is one command.
async fn warm_client(url: &str) -> LockClient {
    let locks = LockClient::connect(url).await.unwrap();
    let name = unique("warm");
    locks
        .exclusive(name.as_str())
        .acquire()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
    locks
        .all([name.as_str()])
        .no_wait()
        .acquire()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
    locks
}
