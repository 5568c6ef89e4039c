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

/// How many renewals are sent at once: enough that the round trip is shared, few enough that other calls get their turn.
pub(super) const BATCH: usize = 100;

pub(super) struct Connection {
    dial: Dial,
    // Not tokio's: it is held for a clone only, never across an await.
    link: RwLock<Arc<Link>>,
}

impl Connection {
    pub(super) async fn open(
        target: Target,
        pushes: Pushes,
        acl: AclLine,
    ) -> Result<Self, StoreError> {
        let connection = Self::begin(Dial::new(target, Arc::new(pushes), acl));
        connection.ready().await?;
        Ok(connection)
    }

    /// Begins to connect, within a runtime. The first call waits for it.
    pub(super) fn begin(dial: Dial) -> Self {
        let link = RwLock::new(Arc::new(dial.dial()));
        Self { dial, link }
    }

    /// Waits for the first connection.
    pub(super) async fn ready(&self) -> Result<(), StoreError> {
        let Err(error) = self.link().connected().await else {
            return Ok(());
        };
        if error.kind() == StoreErrorKind::NotRedis
            && let Ok((server, _)) = self.dial.target.server().await
            && let Some(info) = without_resp3(&server).await
        {
            info.check(self.dial.kind)?;
        }
        Err(error)
    }

    /// Another connection to the same place, which listens to nothing.
    pub(super) fn beside(&self) -> Self {
        Self::begin(self.dial.deaf())
    }

    /// A connection to a server that votes with others, which begins to be made.
    pub(super) fn member(client: Client, namespace: &str, longest_lease: Duration) -> Self {
        let acl = AclLine::new(
            namespace,
            client.get_connection_info().redis_settings().db(),
        );
        let target = Target::Server(Arc::new(client));
        Self::begin(
            Dial::new(target, Arc::new(Pushes::new(namespace)), acl)
                .member(namespace, longest_lease),
        )
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

    /// Does a connection stand, as far as is known?
    pub(super) fn stands(&self) -> bool {
        self.link
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .stands()
    }

    /// What the connection is made with.
    pub(super) fn dial(&self) -> &Dial {
        &self.dial
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
    pub(super) async fn call(&self, call: &Call) -> Result<Value, StoreError> {
        self.call_as(call, Repeat::Once).await
    }

    /// Runs one script. One that must not be repeated is one whose answer would mean something else the second time, or that would do
    /// harm the first time if it were executed late.
    pub(super) async fn call_as(&self, call: &Call, repeat: Repeat) -> Result<Value, StoreError> {
        self.settle(self.answer(None, call, repeat).await?)
    }

    /// Runs, without repeating it, a script that is told a deadline in the server's time and says that time behind its first word.
    pub(super) async fn call_by(
        &self,
        deadline: Instant,
        write: Writer<'_>,
    ) -> Result<Value, StoreError> {
        self.settle(self.answer_by(None, deadline, write).await?)
    }

    /// As [`call_as`](Self::call_as), with the command `first` right ahead of the script's wherever that is sent. An answer that is an error of the server is an answer.
    pub(super) async fn answer(
        &self,
        first: Option<&Cmd>,
        call: &Call,
        repeat: Repeat,
    ) -> Result<Value, Failed> {
        let votes = !call.is_harmless();
        let (script, by_digest) = call.parts();
        let value = match self.send_behind(first, by_digest, votes).await {
            Err(failed) if failed.broken && repeat == Repeat::Once => self
                .send_behind(first, by_digest, votes)
                .await
                .map_err(Failed::repeated),
            result => result,
        };
        let value = value?;
        if is_unknown_script(&value) {
            self.send_behind(first, &script.by_text(by_digest), votes)
                .await
        } else {
            Ok(value)
        }
    }

    /// As [`call_by`](Self::call_by), with `first` and for an answer as in [`answer`](Self::answer).
    pub(super) async fn answer_by(
        &self,
        first: Option<&Cmd>,
        deadline: Instant,
        write: Writer<'_>,
    ) -> Result<Value, Failed> {
        let clock = self.clock().await.map_err(Failed::unsent)?;
        let sent = Instant::now();
        let value = self
            .answer(first, &write(clock.server_micros(deadline)), Repeat::Never)
            .await?;
        if let Value::Array(words) = &value
            && let Some(Value::Int(micros)) = words.get(1)
            && let Ok(micros) = u64::try_from(*micros)
        {
            clock.observe(micros, sent, Instant::now());
        }
        Ok(value)
    }

    /// Sends a question that may be asked again. An error of the server is an answer.
    pub(super) async fn ask(&self, command: &Cmd) -> Result<Value, StoreError> {
        Ok(self.send(command, false).await?)
    }

    /// Runs so many scripts in few round trips, and tells of each how it went. Repeated as [`call`](Self::call).
    pub(super) async fn call_all(
        &self,
        count: usize,
        write: &(dyn Fn(usize) -> Call + Sync),
    ) -> Vec<Result<Value, StoreError>> {
        let mut results = Vec::with_capacity(count);
        while results.len() < count {
            let batch = results.len()..count.min(results.len() + BATCH);
            match self.answer_each(batch.clone().map(write)).await {
                Ok(values) => results.extend(values.into_iter().map(|value| self.settle(value))),
                Err(error) => results.extend(batch.map(|_| Err(error.clone()))),
            }
        }
        results
    }

    /// Runs scripts in one round trip. An error of the server is an answer. Repeated as [`call`](Self::call).
    pub(super) async fn answer_each(
        &self,
        calls: impl ExactSizeIterator<Item = Call>,
    ) -> Result<Vec<Value>, StoreError> {
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
        for ((script, by_digest), value) in
            scripts.into_iter().zip(pipeline.cmd_iter()).zip(&values)
        {
            if is_unknown_script(value) {
                again.add_command(script.by_text(by_digest));
            }
        }
        if !again.is_empty() {
            let repeated = self.send_all(&again, votes).await?;
            let unknown = values.iter_mut().filter(|value| is_unknown_script(value));
            unknown
                .zip(repeated)
                .for_each(|(value, repeated)| *value = repeated);
        }
        Ok(values)
    }

    async fn send_behind(
        &self,
        first: Option<&Cmd>,
        command: &Cmd,
        votes: bool,
    ) -> Result<Value, Failed> {
        let Some(first) = first else {
            return self.send(command, votes).await;
        };
        let mut pipeline = Pipeline::with_capacity(2);
        pipeline
            .add_command(first.clone())
            .add_command(command.clone());
        let mut values = self.send_all(&pipeline, votes).await?;
        values.pop().ok_or_else(|| Failed {
            error: unexpected(),
            sent: true,
            broken: false,
        })
    }

    async fn send(&self, command: &Cmd, votes: bool) -> Result<Value, Failed> {
        let send = async |connection: &mut MultiplexedConnection| {
            connection.req_packed_command(command).await
        };
        self.exchange(votes, send, error::is_of_a_replica).await
    }

    /// Once more if the connection breaks.
    pub(super) async fn send_all_again(
        &self,
        pipeline: &Pipeline,
        votes: bool,
    ) -> Result<Vec<Value>, StoreError> {
        let values = match self.send_all(pipeline, votes).await {
            Err(failed) if failed.broken => self
                .send_all(pipeline, votes)
                .await
                .map_err(Failed::repeated),
            result => result,
        };
        Ok(values?)
    }

    async fn send_all(&self, pipeline: &Pipeline, votes: bool) -> Result<Vec<Value>, Failed> {
        let send = async |connection: &mut MultiplexedConnection| {
            connection
                .req_packed_commands(pipeline, 0, pipeline.len())
                .await
        };
        self.exchange(votes, send, |values| {
            values.iter().any(error::is_of_a_replica)
        })
        .await
    }

    /// Nobody is told on the word of a server that may have forgotten a lock; `votes` says that somebody would be.
    async fn exchange<T>(
        &self,
        votes: bool,
        call: impl AsyncFnOnce(&mut MultiplexedConnection) -> Result<T, RedisError>,
        is_of_a_replica: impl FnOnce(&T) -> bool,
    ) -> Result<T, Failed> {
        let link = self.link();
        let connected = link.connected().await.map_err(|error| {
            link.end();
            Failed::unsent(error)
        })?;
        if let Some(tenure) = connected.tenure.filter(|_| votes) {
            // It is the server at the other end of this very connection that is meant.
            tenure.check(Instant::now()).map_err(Failed::unsent)?;
        }
        let mut connection = connected.connection;
        let unanswered = link.unanswered();
        let result = call(&mut connection).await;
        unanswered.answered();
        // What the old primary did last may be unknown to the new one.
        if self.dial.target.moves() && link.is_over() && result.is_ok() {
            let message = "another server has become the primary meanwhile";
            let error = StoreError::new(StoreErrorKind::Unavailable, message);
            return Err(Failed {
                error,
                sent: true,
                broken: true,
            });
        }
        // It was the primary when the connection was made. The next call connects to whichever is now.
        if result.as_ref().is_ok_and(is_of_a_replica) {
            link.end();
        }
        result.map_err(|cause| {
            link.end();
            let error = error::disconnected(&cause, &self.dial.acl);
            Failed {
                error,
                sent: true,
                broken: cause.is_connection_dropped(),
            }
        })
    }

    /// The current connection, or a new one that is being made.
    fn link(&self) -> Arc<Link> {
        let link = self
            .link
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
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

    /// An answer that is an error of the server becomes ours.
    pub(super) fn settle(&self, value: Value) -> Result<Value, StoreError> {
        match value {
            Value::ServerError(error) => Err(error::refused(&error, &self.dial.acl)),
            value => Ok(value),
        }
    }
}

/// Writes a call for a deadline in the server's time, in microseconds since 1970.
pub(super) type Writer<'a> = &'a (dyn Fn(u64) -> Call + Sync);

/// May a call be sent again where the connection broke?
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Repeat {
    Once,
    Never,
}

/// A call that has no reply.
pub(super) struct Failed {
    pub(super) error: StoreError,
    /// It may have been executed.
    pub(super) sent: bool,
    /// There was a connection, and it is no more.
    broken: bool,
}

impl Failed {
    fn unsent(error: StoreError) -> Self {
        Self {
            error: error.with_unsent(true),
            sent: false,
            broken: false,
        }
    }

    /// The call was sent before.
    fn repeated(self) -> Self {
        Self {
            error: self.error.with_unsent(false),
            sent: true,
            ..self
        }
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
    let redis = info
        .redis_settings()
        .clone()
        .set_protocol(ProtocolVersion::RESP2);
    let client = Client::open(info.set_redis_settings(redis)).ok()?;
    let mut connection = client.get_multiplexed_async_connection().await.ok()?;
    redis::cmd("INFO")
        .query_async(&mut connection)
        .await
        .ok()
        .map(Info::new)
}
