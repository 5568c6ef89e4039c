//! The connection to one server: made again when it is lost, and shared by all calls.
//!
//! It subscribes to what the server tells unasked as a part of being made, so it hears whatever is told after the first call
//! on it. The client library's own reconnecting manager is not used: what is pushed would take a detour there through a task
//! that ends with the runtime on which the client was made, and a subscription that failed is forgotten.
//!
//! Nothing here waits longer than a connection attempt takes, and nothing is sent a second time but the text of a
//! script in place of an unknown digest. Timeouts of calls are the caller's.

use std::sync::{Arc, PoisonError, RwLock};

use redis::{
    Client, Cmd, Pipeline, ProtocolVersion, RedisError, ServerErrorKind, Value,
    aio::{ConnectionLike as _, MultiplexedConnection},
};

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

    /// What the server tells on this connection.
    pub(super) fn pushes(&self) -> &Pushes {
        &self.dial.pushes
    }

    /// The server's clock, for which a first connection is made where there was none.
    pub(super) async fn clock(&self) -> Result<&ServerClock, StoreError> {
        if self.dial.clock().is_none() {
            let link = self.link();
            link.connected().await.inspect_err(|_| link.end())?;
        }
        // A connection that stands has read it.
        self.dial.clock().ok_or_else(unexpected)
    }

    /// Where the server is; never with a password.
    pub(super) fn address(&self) -> String {
        self.dial.target.to_string()
    }

    async fn command(&self, command: &Cmd) -> Result<Value, StoreError> {
        self.settle(self.send(command).await?)
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
        let (script, by_digest) = call.into_parts();
        let value = match self.send(&by_digest).await {
            Err(failed) if failed.broken && repeat == Repeat::Once => self.send(&by_digest).await,
            result => result,
        };
        let value = value?;
        if is_unknown_script(&value) { self.command(&script.by_text(&by_digest)).await } else { self.settle(value) }
    }

    /// Runs scripts in one round trip, and tells of each how it went. Repeated as [`call`](Self::call).
    pub(super) async fn call_each(
        &self,
        calls: impl ExactSizeIterator<Item = Call>,
    ) -> Result<Vec<Result<Value, StoreError>>, StoreError> {
        let mut pipeline = Pipeline::with_capacity(calls.len());
        let mut scripts = Vec::with_capacity(calls.len());
        for call in calls {
            let (script, by_digest) = call.into_parts();
            pipeline.add_command(by_digest);
            scripts.push(script);
        }
        let mut values = self.send_all_again(&pipeline).await?;

        // In one round trip as well: the caller's time is that of one.
        let mut again = Pipeline::new();
        for ((script, by_digest), value) in scripts.into_iter().zip(pipeline.cmd_iter()).zip(&values) {
            if is_unknown_script(value) {
                again.add_command(script.by_text(by_digest));
            }
        }
        if !again.is_empty() {
            let repeated = self.send_all(&again).await?;
            let unknown = values.iter_mut().filter(|value| is_unknown_script(value));
            unknown.zip(repeated).for_each(|(value, repeated)| *value = repeated);
        }
        Ok(values.into_iter().map(|value| self.settle(value)).collect())
    }

    async fn send(&self, command: &Cmd) -> Result<Value, Failed> {
        self.exchange(async |connection| connection.req_packed_command(command).await, error::is_of_a_replica).await
    }

    /// Once more if the connection breaks.
    pub(super) async fn send_all_again(&self, pipeline: &Pipeline) -> Result<Vec<Value>, StoreError> {
        let values = match self.send_all(pipeline).await {
            Err(failed) if failed.broken => self.send_all(pipeline).await,
            result => result,
        };
        Ok(values?)
    }

    async fn send_all(&self, pipeline: &Pipeline) -> Result<Vec<Value>, Failed> {
        let send = async |connection: &mut MultiplexedConnection| {
            connection.req_packed_commands(pipeline, 0, pipeline.len()).await
        };
        self.exchange(send, |values| values.iter().any(error::is_of_a_replica)).await
    }

    async fn exchange<T>(
        &self,
        call: impl AsyncFnOnce(&mut MultiplexedConnection) -> Result<T, RedisError>,
        is_of_a_replica: impl FnOnce(&T) -> bool,
    ) -> Result<T, Failed> {
        let link = self.link();
        let failed = |error, broken| {
            link.end();
            Failed { error, broken }
        };
        let mut connection = link.connected().await.map_err(|error| failed(error, false))?;
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

    /// The current connection is of no use any more.
    pub(super) fn end(&self) {
        self.link().end();
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
