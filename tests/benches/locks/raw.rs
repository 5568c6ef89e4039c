//! The store's own scripts, sent directly over a connection with the store's own settings.
//!
//! All use of the scripts' keys, arguments and replies in this bench is in this file.

use std::{
    sync::Mutex,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use futures_util::{StreamExt as _, stream::FuturesUnordered};
use lock_runtime::store::Token;
use redis::{AsyncConnectionConfig, Client, Cmd, Value, aio::MultiplexedConnection};

use crate::{
    contest::Round,
    subject::{LEASE, Subject},
    turns::{Call, repeat, together},
};

macro_rules! script {
    ($($part:literal)+) => {
        concat!($(include_str!(concat!("../../../lock-runtime/src/store/redis/script/lua/", $part, ".lua"))),+)
    };
}

pub(crate) const SCRIPTS: &str = "scripts";

/// A deadline that no request misses.
const DEADLINE: &str = "9000000000000000";

/// Channel for a grant from the wait queue.
const CHANNEL: &str = "lock:0123456789abcdef0123456789abcdef";

/// A client with the settings of the store's own; the peer gets the same.
pub(crate) fn client(url: &str) -> Client {
    let client = Client::open(format!("{url}?protocol=resp3")).expect("the fixture's URL is valid");
    let info = client.get_connection_info().clone();
    let tcp = info.tcp_settings().clone().set_nodelay(true);
    Client::open(info.set_tcp_settings(tcp)).expect("the fixture's URL is valid")
}

/// A connection, and the digests of the scripts that are sent over it.
#[derive(Clone)]
pub(crate) struct Raw {
    pub(crate) connection: MultiplexedConnection,
    acquire: String,
    release: String,
    pass: String,
    nothing: String,
}

impl Raw {
    pub(crate) async fn connect(client: &Client) -> Self {
        let config = AsyncConnectionConfig::new()
            .set_response_timeout(None)
            .set_pipeline_buffer_size(4096);
        let connection = client
            .get_multiplexed_async_connection_with_config(&config)
            .await;
        let mut connection = connection.expect("our own server answers");
        let mut load = async |text: &str| {
            redis::cmd("SCRIPT")
                .arg("LOAD")
                .arg(text)
                .query_async(&mut connection)
                .await
                .expect("the script is valid")
        };
        let acquire =
            load(script!("acquire_free" "clock" "fence" "holders" "standing" "line" "acquire"))
                .await;
        let release = load(
            script!("refusal" "done" "release" "clock" "fence" "holders" "standing" "line" "hand_over"),
        )
        .await;
        let pass = load(script!("clock" "fence" "holders" "standing" "line" "pass")).await;
        let nothing = load("return 0").await;
        Self {
            connection,
            acquire,
            release,
            pass,
            nothing,
        }
    }

    async fn send(&self, command: &Cmd) -> Value {
        command
            .query_async(&mut self.connection.clone())
            .await
            .expect("the script runs")
    }
}

fn call(digest: &str, names: &[String]) -> Cmd {
    let mut command = redis::cmd("EVALSHA");
    command.arg(digest).arg(names.len()).arg(names);
    command
}

fn expect_word(reply: &Value, word: &str) {
    let Value::Array(items) = reply else {
        panic!("{reply:?}")
    };
    assert!(
        matches!(items.first(), Some(Value::BulkString(first)) if first == word.as_bytes()),
        "{reply:?}"
    );
}

/// One lock, acquired and released by the same two scripts as in the store.
pub(crate) struct RawLock {
    raw: Raw,
    /// The lock, its fence and its queue.
    names: [String; 3],
}

impl RawLock {
    pub(crate) fn new(raw: &Raw, key: &str) -> Self {
        Self {
            raw: raw.clone(),
            names: [
                format!("lock:{key}"),
                format!("{{lock:{key}}}:f"),
                format!("{{lock:{key}}}:q"),
            ],
        }
    }
}

impl Subject for RawLock {
    type Guard = [u8; 32];

    async fn acquire(&self) -> [u8; 32] {
        let member = Token::random().to_hex();
        let mut command = call(&self.raw.acquire, &self.names);
        command
            .arg(DEADLINE)
            .arg(CHANNEL)
            .arg("exclusive")
            .arg(&member)
            .arg(LEASE.as_millis().to_string())
            .arg("0");
        expect_word(&self.raw.send(&command).await, "granted");
        member
    }

    async fn release(&self, member: [u8; 32]) {
        let mut command = call(&self.raw.release, &self.names);
        command.arg(&member).arg("0");
        expect_word(&self.raw.send(&command).await, "released");
    }
}

/// One lock on several servers: the scripts go to all servers at once, and the replies of a
/// majority are awaited.
pub(crate) struct RawMajority {
    servers: Vec<(Raw, String)>,
    /// The lock, its fence, its queue and the marker.
    names: [String; 4],
}

impl RawMajority {
    /// Takes each server with the content of its marker.
    pub(crate) fn new(servers: &[(Raw, String)], key: &str) -> Self {
        let names = [
            format!("lock:{key}"),
            format!("{{lock:{key}}}:f"),
            format!("{{lock:{key}}}:q"),
            MARKER.into(),
        ];
        Self {
            servers: servers.to_vec(),
            names,
        }
    }

    async fn await_majority(&self, calls: impl Iterator<Item = Cmd>, word: &str) {
        let calls = self.servers.iter().zip(calls).map(|((raw, _), command)| {
            let raw = raw.clone();
            async move { raw.send(&command).await }
        });
        let mut replies: FuturesUnordered<_> = calls.collect();
        for _ in 0..=self.servers.len() / 2 {
            expect_word(
                &replies.next().await.expect("a majority is not all of them"),
                word,
            );
        }
        // Commands dropped before they are written would not be sent.
        tokio::spawn(async move { while replies.next().await.is_some() {} });
    }
}

/// The marker of a server's data, in the default namespace.
pub(crate) const MARKER: &str = "f:lock:";

impl Subject for RawMajority {
    type Guard = [u8; 32];

    async fn acquire(&self) -> [u8; 32] {
        let member = Token::random().to_hex();
        let since = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .expect("it is after 1970");
        let (proposal, lease) = (since.as_micros().to_string(), LEASE.as_millis().to_string());
        let calls = self.servers.iter().map(|(raw, marker)| {
            let mut command = call(&raw.acquire, &self.names);
            command
                .arg(DEADLINE)
                .arg("")
                .arg("exclusive")
                .arg(&member)
                .arg(&lease)
                .arg("0")
                .arg(marker)
                .arg(&proposal);
            command
        });
        self.await_majority(calls, "granted").await;
        member
    }

    async fn release(&self, member: [u8; 32]) {
        let [names @ .., _] = &self.names;
        let calls = self.servers.iter().map(|(raw, _)| {
            let mut command = call(&raw.release, names);
            command.arg(&member).arg("0");
            command
        });
        self.await_majority(calls, "released").await;
    }
}

/// The fastest possible hand-off: one script releases the lock and acquires it again, with no
/// client to notify.
struct RawPass {
    lock: RawLock,
    member: Mutex<[u8; 32]>,
}

impl Call for RawPass {
    async fn call(&self) {
        let next = Token::random().to_hex();
        let member = std::mem::replace(
            &mut *self
                .member
                .lock()
                .expect("no task panics while it holds the mutex"),
            next,
        );
        let RawLock { raw, names } = &self.lock;
        let mut command = call(&raw.pass, names);
        command
            .arg(&member)
            .arg(&next)
            .arg(LEASE.as_millis().to_string())
            .arg("0")
            .arg(CHANNEL);
        expect_word(&raw.send(&command).await, "passed");
    }
}

/// Hands a lock from one client to itself; no other client may use `key`.
pub(crate) async fn hand_off(raw: &Raw, key: String, slice: Duration) -> Round {
    let lock = RawLock::new(raw, &key);
    let member = lock.acquire().await.into();
    together(slice, [RawPass { lock, member }], |pass, watch| {
        repeat(pass, 1, watch)
    })
    .await
}

/// Round trip of a script that does nothing.
pub(crate) struct RawTrip(pub(crate) Raw);

impl Call for RawTrip {
    async fn call(&self) {
        let Self(raw) = self;
        raw.send(&call(&raw.nothing, &[])).await;
    }
}
