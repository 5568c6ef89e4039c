//! The connection to one server: made again when it is lost, and shared by all calls.
//!
//! It subscribes to what the server tells unasked as a part of being made, so it hears whatever is told after the first call
//! on it. The client library's own reconnecting manager is not used: what is pushed would take a detour there through a task
//! that ends with the runtime on which the client was made, and a subscription that failed is forgotten.
//!
//! Nothing here waits longer than a connection attempt takes, and nothing is sent a second time but the text of a
//! script in place of an unknown digest. Timeouts of calls are the caller's.

use std::{
    sync::{Arc, PoisonError, RwLock},
    time::Duration,
};

use redis::{
    Client, Cmd, Pipeline, ProtocolVersion, RedisError, ServerErrorKind, Value,
    aio::{ConnectionLike as _, MultiplexedConnection},
};

use tokio::time::Instant;

use super::{
    acl::AclLine,
    clock::ServerClock,
    error,
    handshake::Info,
    link::{Dial, Link},
    pushes::Pushes,
    reply::unexpected,
    scripts::Call,
    target::Target,
};
use crate::store::{StoreError, StoreErrorKind};

pub(super) struct Connection {
    dial: Dial,
    // Not tokio's: it is held for a clone only, never across an await.
    link: RwLock<Arc<Link>>,
}

impl Connection {
    pub(super) async fn open(target: Target, pushes: Pushes, acl: AclLine) -> Result<Self, StoreError> {
        let dial = Dial::new(target, Arc::new(pushes), acl);
        let link = dial.dial();
        let Err(error) = link.connected().await else {
            return Ok(Self { dial, link: RwLock::new(Arc::new(link)) });
        };
        if error.kind() == StoreErrorKind::NotRedis
            && let Ok((server, _)) = dial.target.server().await
            && let Some(info) = without_resp3(&server).await
        {
            info.check()?;
        }
        Err(error)
    }

    /// Another connection to the same place, which listens to nothing.
    pub(super) fn beside(&self) -> Self {
        let dial = self.dial.deaf();
        let link = RwLock::new(Arc::new(dial.dial()));
        Self { dial, link }
    }

    /// A connection to a server that votes with others, which begins to be made.
    pub(super) fn member(client: Client, namespace: &str, longest_lease: Duration) -> Self {
        let acl = AclLine::new(namespace, client.get_connection_info().redis_settings().db());
        let target = Target::Server(Arc::new(client));
        let dial = Dial::new(target, Arc::new(Pushes::new(namespace)), acl).member(namespace, longest_lease);
        let link = RwLock::new(Arc::new(dial.dial()));
        Self { dial, link }
    }

    /// Waits until the connection stands that is there, or being made.
    pub(super) async fn stands(&self) -> Result<(), StoreError> {
        self.link().connected().await.map(drop)
    }

    /// What the marker of the server's data said last, of a server among several.
    pub(super) fn marker(&self) -> Option<String> {
        self.dial.tenure().map(|tenure| tenure.marker.clone())
    }

    /// What a server among several calls its present life.
    pub(super) fn run_id(&self) -> Option<String> {
        self.dial.tenure()?.run_id.clone()
    }

    /// The server is not what it was: the next call greets it anew.
    pub(super) fn greet_again(&self) {
        self.link().end();
    }

    /// What the server tells on this connection.
    pub(super) fn pushes(&self) -> &Pushes {
        &self.dial.pushes
    }

    /// The server's clock, for which a first connection is made where there was none.
    pub(super) async fn clock(&self) -> Result<&ServerClock, StoreError> {
        if self.dial.clock().is_none() {
            let link = self.link();
            link.connected().await.map_err(|error| {
                link.end();
                error.with_unsent(true)
            })?;
        }
        // A connection that stands has read it.
        self.dial.clock().ok_or_else(unexpected)
    }

    /// Where the server is; never with a password.
    pub(super) fn address(&self) -> String {
        self.dial.target.to_string()
    }

    /// Runs one script. If the connection breaks, it is run once more on the next one: what is under the same token does no
    /// more twice than once.
    pub(super) async fn call(&self, call: Call) -> Result<Value, StoreError> {
        self.run(call, Repeat::Once).await
    }

    /// Runs one script that must not be repeated: its answer would mean something else the second time, or the first would do harm
    /// if it were executed late.
    pub(super) async fn call_once(&self, call: Call) -> Result<Value, StoreError> {
        self.run(call, Repeat::Never).await
    }

    async fn run(&self, call: Call, repeat: Repeat) -> Result<Value, StoreError> {
        let votes = !call.is_harmless();
        let (script, by_digest) = call.into_parts();
        let value = match self.send(&by_digest, votes).await {
            Err(failed) if failed.broken && repeat == Repeat::Once => {
                self.send(&by_digest, votes).await.map_err(Failed::repeated)
            }
            result => result,
        };
        let value = value?;
        if is_unknown_script(&value) {
            self.settle(self.send(&script.by_text(&by_digest), votes).await?)
        } else {
            self.settle(value)
        }
    }

    /// Runs scripts in one round trip, and tells of each how it went. Repeated as [`call`](Self::call).
    pub(super) async fn call_each(
        &self,
        calls: impl ExactSizeIterator<Item = Call>,
    ) -> Result<Vec<Result<Value, StoreError>>, StoreError> {
        let mut pipeline = Pipeline::with_capacity(calls.len());
        let mut scripts = Vec::with_capacity(calls.len());
        let mut votes = false;
        for call in calls {
            votes |= !call.is_harmless();
            let (script, by_digest) = call.into_parts();
            pipeline.add_command(by_digest);
            scripts.push(script);
        }
        let mut values = self.send_all_again(&pipeline, votes).await?;

        // In one round trip as well: the caller's time is that of one.
        let mut again = Pipeline::new();
        for ((script, by_digest), value) in scripts.into_iter().zip(pipeline.cmd_iter()).zip(&values) {
            if is_unknown_script(value) {
                again.add_command(script.by_text(by_digest));
            }
        }
        if !again.is_empty() {
            let repeated = self.send_all(&again, votes).await?;
            let unknown = values.iter_mut().filter(|value| is_unknown_script(value));
            unknown.zip(repeated).for_each(|(value, repeated)| *value = repeated);
        }
        Ok(values.into_iter().map(|value| self.settle(value)).collect())
    }

    async fn send(&self, command: &Cmd, votes: bool) -> Result<Value, Failed> {
        let send = async |connection: &mut MultiplexedConnection| connection.req_packed_command(command).await;
        self.exchange(votes, send, error::is_of_a_replica).await
    }

    /// Once more if the connection breaks.
    pub(super) async fn send_all_again(&self, pipeline: &Pipeline, votes: bool) -> Result<Vec<Value>, StoreError> {
        let values = match self.send_all(pipeline, votes).await {
            Err(failed) if failed.broken => self.send_all(pipeline, votes).await.map_err(Failed::repeated),
            result => result,
        };
        Ok(values?)
    }

    async fn send_all(&self, pipeline: &Pipeline, votes: bool) -> Result<Vec<Value>, Failed> {
        let send = async |connection: &mut MultiplexedConnection| {
            connection.req_packed_commands(pipeline, 0, pipeline.len()).await
        };
        self.exchange(votes, send, |values| values.iter().any(error::is_of_a_replica)).await
    }

    /// Nobody is told on the word of a server that may have forgotten a lock; `votes` says that somebody would be.
    async fn exchange<T>(
        &self,
        votes: bool,
        call: impl AsyncFnOnce(&mut MultiplexedConnection) -> Result<T, RedisError>,
        is_of_a_replica: impl FnOnce(&T) -> bool,
    ) -> Result<T, Failed> {
        let link = self.link();
        let failed = |error, broken| {
            link.end();
            Failed { error, broken }
        };
        let connected = link.connected().await.map_err(|error| failed(error.with_unsent(true), false))?;
        if let Some(tenure) = connected.tenure.filter(|_| votes) {
            // It is the server at the other end of this very connection that is meant.
            tenure.check(Instant::now()).map_err(|error| Failed { error, broken: false })?;
        }
        let mut connection = connected.connection;
        let unanswered = link.unanswered();
        let result = call(&mut connection).await;
        unanswered.answered();
        // What the old primary did last may be unknown to the new one.
        if self.dial.target.moves() && link.is_over() && result.is_ok() {
            let message = "another server has become the primary meanwhile";
            return Err(Failed { error: StoreError::new(StoreErrorKind::Unavailable, message), broken: true });
        }
        // It was the primary when the connection was made. The next call connects to whichever is now.
        if result.as_ref().is_ok_and(is_of_a_replica) {
            link.end();
        }
        result.map_err(|cause| failed(error::disconnected(&cause, &self.dial.acl), cause.is_connection_dropped()))
    }

    /// The current connection, or a new one that is being made.
    fn link(&self) -> Arc<Link> {
        let link = self.link.read().unwrap_or_else(PoisonError::into_inner).clone();
        if !link.is_over() {
            return link;
        }
        let mut current = self.link.write().unwrap_or_else(PoisonError::into_inner);
        // The first of the calls that find it over dials for all.
        if current.is_over() {
            *current = Arc::new(self.dial.dial());
        }
        current.clone()
    }

    pub(super) fn settle(&self, value: Value) -> Result<Value, StoreError> {
        match value {
            Value::ServerError(error) => Err(error::refused(&error, &self.dial.acl)),
            value => Ok(value),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Repeat {
    Once,
    Never,
}

/// A call that has no reply.
struct Failed {
    error: StoreError,
    /// There was a connection, and it is no more.
    broken: bool,
}

impl Failed {
    /// The call was sent before.
    fn repeated(self) -> Self {
        Self { error: self.error.with_unsent(false), ..self }
    }
}

impl From<Failed> for StoreError {
    fn from(failed: Failed) -> Self {
        failed.error
    }
}

pub(super) fn is_unknown_script(value: &Value) -> bool {
    matches!(value, Value::ServerError(error) if error.kind() == Some(ServerErrorKind::NoScript))
}

/// What a server says of itself that may not know RESP3.
async fn without_resp3(client: &Client) -> Option<Info> {
    let info = client.get_connection_info().clone();
    let redis = info.redis_settings().clone().set_protocol(ProtocolVersion::RESP2);
    let client = Client::open(info.set_redis_settings(redis)).ok()?;
    let mut connection = client.get_multiplexed_async_connection().await.ok()?;
    redis::cmd("INFO").query_async(&mut connection).await.ok().map(Info::new)
}
