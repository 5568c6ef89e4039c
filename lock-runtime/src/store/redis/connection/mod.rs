//! The connection to one server, shared by all calls and re-established when it is lost.
//!
//! It subscribes to the push messages while it is being established, so it receives every message
//! that is sent after its first call. The reconnecting manager of the client library is not used:
//! it would route push messages through a task that ends with the runtime on which the client was
//! created, and it forgets a subscription that failed.
//!
//! Apart from the reply itself, a call waits at most for a connection attempt. It is sent again
//! only as [`Repeat`] permits, or with the text of the script if the server does not know the
//! digest. Time-outs of calls are left to the caller.

pub(super) mod connector;
pub(super) mod endpoint;
pub(super) mod handshake;
pub(super) mod link;
pub(super) mod login;
#[cfg(feature = "metrics")]
pub(super) mod metered;
#[cfg(not(feature = "metrics"))]
#[path = "unmetered.rs"]
pub(super) mod metered;
mod probe;
pub(super) mod pushes;

use std::sync::{
    Arc, Mutex, OnceLock, Weak,
    atomic::{AtomicU64, Ordering},
};

use redis::{
    AsyncConnectionConfig, Cmd, Pipeline, RedisError, ServerErrorKind, Value,
    aio::{ConnectionLike as _, MultiplexedConnection},
};

use self::{
    connector::{Connector, in_time},
    endpoint::{Door, Endpoint},
    handshake::{Info, Kind},
    link::Link,
    metered::Metered,
    pushes::Pushes,
};
use super::{
    clock::ServerClock,
    error,
    operator::acl::AclLine,
    outage::{InOutage, Outage},
    script::{
        Call,
        groups::{self, Groups, Turn},
        reply::unexpected,
    },
    settings::RedisOptions,
    topology::{cluster::slots::Slot, quarantine, runs::Runs, target::Target},
};
use crate::{
    shell::keeper,
    shell::sync::lock,
    shell::time::Instant,
    store::{StoreError, StoreErrorKind},
};

/// The number of renewals in one batch: enough to share a round trip, but few enough not to delay
/// other calls.
pub(crate) const BATCH: usize = 96;

pub(crate) struct Connection {
    this: Weak<Self>,
    pub(crate) connector: Connector,
    // A std mutex: it is held for a clone only, never across an await. `None` before the first
    // attempt.
    link: Mutex<Option<Arc<Link>>>,
    /// The number of attempts to connect.
    attempts: AtomicU64,
    outage: Outage,
    /// The latest turn of the task that probes the server, if there is one.
    probing: Mutex<Option<Instant>>,
    pub(crate) groups: Groups,
    /// The connection of the keeper to the same server.
    of_keeper: OnceLock<Arc<Self>>,
}

impl Connection {
    /// Starts to connect, within a runtime. The first call waits for the connection.
    pub(crate) fn begin(connector: Connector) -> Arc<Self> {
        let connection = Arc::new_cyclic(|connection| Self {
            this: connection.clone(),
            link: Mutex::default(),
            attempts: AtomicU64::new(0),
            outage: Outage::new(connector.unavailable_after, Instant::now()),
            probing: Mutex::default(),
            connector,
            groups: Groups::new(connection),
            of_keeper: OnceLock::new(),
        });
        // Only now, as the attempt notifies the connection.
        connection.link();
        connection.probe();
        connection
    }

    /// The connection for calls of this thread: the keeper has its own, which receives no messages.
    pub(crate) fn here(&self) -> &Self {
        match keeper::is_here() {
            true => (self.of_keeper).get_or_init(|| Self::begin(self.connector.clone().deaf())),
            false => self,
        }
    }

    /// Waits for the first connection.
    pub(crate) async fn ready(&self) -> Result<(), StoreError> {
        let Err(error) = self.link().connected().await else {
            return Ok(());
        };
        if error.kind() == StoreErrorKind::WrongServer
            && let Ok((server, _)) = self.connector.target.server().await
            && let Ok((door, _)) = server.door().await
            && let Some(info) = without_resp3(door).await
        {
            info.check(self.connector.kind)?;
        }
        Err(error)
    }

    /// Starts to connect to the server number `place.0` of `place.1` that vote together. They share
    /// the `pushes`' channels.
    pub(crate) fn member(
        server: Endpoint,
        pushes: Pushes,
        place: (usize, usize),
        runs: &Runs,
        settings: &RedisOptions,
    ) -> Arc<Self> {
        let db = server.info.redis_settings().db();
        let target = Target::Server(Arc::new(server));
        let acl = AclLine::new(&pushes.namespace, db);
        let longest_lease = settings.longest_lease_or_default();
        let connector = Connector::new(target, pushes, acl).member(longest_lease, place, runs);
        Self::begin(connector.with(settings))
    }

    /// Ends the connection because the server has changed. The next call repeats the handshake.
    pub(crate) fn greet_again(&self) {
        let link = lock(&self.link).clone();
        link.into_iter().for_each(|link| link.end());
    }

    /// Returns whether the connection was established and is not known to be over.
    pub(crate) fn stands(&self) -> bool {
        lock(&self.link).as_ref().is_some_and(|link| link.stands())
    }

    /// The number of attempts to connect. It changes before another server can answer.
    pub(crate) fn attempts(&self) -> u64 {
        self.attempts.load(Ordering::Acquire)
    }

    /// The server's clock. Waits for the first connection if there was none.
    pub(crate) async fn clock(&self) -> Result<&ServerClock, StoreError> {
        if self.connector.clock.get().is_none() {
            self.link().connected().await?;
        }
        // An established connection has set the clock.
        self.connector.clock.get().ok_or_else(unexpected)
    }

    /// Runs a script, and sends the command `first`, if there is one, right before it each time. An
    /// error reply of the server is returned as a value.
    pub(crate) async fn answer(
        &self,
        first: Option<&Cmd>,
        errand: Errand<'_>,
    ) -> Result<Value, Failed> {
        let (deadline, write) = match errand {
            Errand::Call(call, repeat) => return self.commit(first, call, repeat).await,
            Errand::By {
                deadline,
                write,
                in_outage,
                ..
            } => {
                self.admits(in_outage)?;
                (deadline, write)
            }
        };
        let clock = self.clock().await?;
        let sent = Instant::now();
        let call = write(clock.server_micros(deadline));
        let value = self.commit(first, &call, Repeat::Never).await?;
        if let Value::Array(words) = &value
            && let Some(Value::Int(micros)) = words.get(1)
            && let Ok(micros) = u64::try_from(*micros)
        {
            clock.observe(micros, sent, Instant::exactly_now());
        }
        Ok(value)
    }

    /// Runs a script, if possible together with others.
    async fn commit(
        &self,
        first: Option<&Cmd>,
        call: &Call,
        repeat: Repeat,
    ) -> Result<Value, Failed> {
        let _alone = match first {
            None if self.stands() => match self.groups.enter(call).await {
                Turn::Over(Err(failed)) if failed.broken && repeat == Repeat::Once => {
                    let again = Box::pin(self.send_script(first, call, Repeat::Never)).await;
                    return again.map_err(Failed::repeated);
                }
                Turn::Over(result) => return result,
                Turn::Alone(alone) => alone,
            },
            _ => None,
        };
        // Boxed, as a call that was sent with others does not need this part of the future.
        Box::pin(self.send_script(first, call, repeat)).await
    }

    pub(crate) async fn send_script(
        &self,
        first: Option<&Cmd>,
        call: &Call,
        repeat: Repeat,
    ) -> Result<Value, Failed> {
        let metered = Metered::begin(self, call);
        let result = self.send_unmetered(first, call, repeat).await;
        metered.ended(result.as_ref().map(std::iter::once));
        result
    }

    async fn send_unmetered(
        &self,
        first: Option<&Cmd>,
        call: &Call,
        repeat: Repeat,
    ) -> Result<Value, Failed> {
        let command = call.command(self.connector.fences_kept_for);
        let votes = !call.script.is_harmless();
        let value = match self.send_behind(first, &command, votes).await {
            Err(failed) if failed.broken && repeat == Repeat::Once => {
                let again = self.send_behind(first, &command, votes).await;
                again.map_err(Failed::repeated)?
            }
            result => result?,
        };
        if !is_unknown_script(&value) {
            return Ok(value);
        }
        self.send_behind(first, &call.by_text(self.connector.fences_kept_for), votes)
            .await
    }

    /// Sends a command that is safe to repeat.
    pub(crate) async fn ask(&self, command: &Cmd) -> Result<Value, StoreError> {
        self.settle(self.send(command, false).await?)
    }

    /// Runs `count` scripts in few round trips, and returns a result for each. Repeats them once if
    /// the connection breaks.
    pub(crate) async fn call_all(
        &self,
        count: usize,
        write: &(dyn Fn(usize) -> Call + Sync),
    ) -> Vec<Result<Value, StoreError>> {
        let answer = |value| self.settle(value);
        let mut results = Vec::with_capacity(count);
        while results.len() < count {
            let batch = results.len()..count.min(results.len() + BATCH);
            match groups::answer_all(self, batch.clone().map(write).collect()).await {
                Ok(values) => {
                    results.extend(values.into_iter().map(|value| value.and_then(answer)))
                }
                Err(error) => results.extend(batch.map(|_| Err(error.clone()))),
            }
        }
        results
    }

    /// Returns whether a script can be executed for several locks. In a cluster, their keys would
    /// have to be in one slot.
    pub(crate) fn has_groups(&self) -> bool {
        self.connector.kind == Kind::Primary
    }

    /// Runs scripts in one round trip. An error reply of the server is returned as a value.
    pub(crate) async fn answer_once(&self, calls: &[Call]) -> Result<Vec<Value>, Failed> {
        let Some(first) = calls.first() else {
            return Ok(Vec::new());
        };
        let metered = Metered::begin(self, first);
        let result = self.answer_each_unmetered(calls, Repeat::Never).await;
        metered.ended(result.as_ref());
        result
    }

    /// Runs scripts in one round trip, and repeats them once if the connection breaks. An error
    /// reply of the server is returned as a value.
    pub(crate) async fn answer_each(&self, calls: Vec<Call>) -> Result<Vec<Value>, StoreError> {
        // The calls of a batch are of one kind, apart from groups and single ones.
        let Some(first) = calls.first() else {
            return Ok(Vec::new());
        };
        let metered = Metered::begin(self, first);
        let result = self.answer_each_unmetered(&calls, Repeat::Once).await;
        metered.ended(result.as_ref());
        Ok(result?)
    }

    async fn answer_each_unmetered(
        &self,
        calls: &[Call],
        repeat: Repeat,
    ) -> Result<Vec<Value>, Failed> {
        let mut pipeline = Pipeline::with_capacity(calls.len());
        for call in calls {
            pipeline.add_command(call.command(self.connector.fences_kept_for));
        }
        let votes = calls.iter().any(|call| !call.script.is_harmless());
        let mut values = match repeat {
            Repeat::Once => self.send_all_again(&pipeline, votes).await?,
            Repeat::Never => self.send_all(&pipeline, votes).await?,
        };

        // Unknown scripts share a round trip too, as the caller's time limit is that of
        // a single call.
        let mut again = Pipeline::new();
        let mut unknown = Vec::new();
        for (call, value) in calls.iter().zip(&mut values) {
            if is_unknown_script(value) {
                again.add_command(call.by_text(self.connector.fences_kept_for));
                unknown.push(value);
            }
        }
        if !unknown.is_empty() {
            // The others were executed.
            let repeated = self.send_all(&again, votes).await;
            let repeated = repeated.map_err(Failed::repeated)?;
            for (value, repeated) in unknown.into_iter().zip(repeated) {
                *value = repeated;
            }
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
        let mut both = Pipeline::with_capacity(2);
        both.add_command(first.clone()).add_command(command.clone());
        let last = self.send_all(&both, votes).await?.pop();
        Ok(last.ok_or_else(unexpected)?)
    }

    async fn send(&self, command: &Cmd, votes: bool) -> Result<Value, Failed> {
        let send = async |connection: &mut MultiplexedConnection| {
            connection.req_packed_command(command).await
        };
        self.exchange(votes, send, error::ends_connection).await
    }

    /// Sends the pipeline, and retries once if the connection breaks.
    pub(crate) async fn send_all_again(
        &self,
        pipeline: &Pipeline,
        votes: bool,
    ) -> Result<Vec<Value>, StoreError> {
        Ok(match self.send_all(pipeline, votes).await {
            Err(failed) if failed.broken => {
                let again = self.send_all(pipeline, votes).await;
                again.map_err(Failed::repeated)?
            }
            result => result?,
        })
    }

    async fn send_all(&self, pipeline: &Pipeline, votes: bool) -> Result<Vec<Value>, Failed> {
        let count = pipeline.len();
        let send = async |connection: &mut MultiplexedConnection| {
            connection.req_packed_commands(pipeline, 0, count).await
        };
        let ends = |values: &Vec<_>| values.iter().any(error::ends_connection);
        self.exchange(votes, send, ends).await
    }

    /// Sends a call on the current connection. `votes` is set for calls that can grant or confirm
    /// a lock: a quarantined server must not answer them.
    async fn exchange<T>(
        &self,
        votes: bool,
        call: impl AsyncFnOnce(&mut MultiplexedConnection) -> Result<T, RedisError>,
        ends_connection: impl FnOnce(&T) -> bool,
    ) -> Result<T, Failed> {
        let link = self.link();
        let mut connected = link.connected().await?;
        if let Some(tenure) = connected.tenure.filter(|_| votes) {
            // This is the tenure of the server at the other end of this very connection. The call
            // carries the marker of the latest one.
            let unsent = |error| Failed::new(error, false);
            tenure.check(Instant::now()).map_err(unsent)?;
            let latest = self.connector.tenure();
            if latest.is_some_and(|latest| !latest.is_of_the_same(&tenure)) {
                link.end();
                return Err(unsent(quarantine::has_changed()));
            }
        }
        let unanswered = link.unanswered();
        let result = call(&mut connected.connection).await;
        link.answered();
        unanswered.disarm();
        // The new primary may lack the latest writes of the old one.
        if self.connector.target.moves() && link.is_over() && result.is_ok() {
            let error = error::unavailable("another server has become the primary meanwhile");
            return Err(Failed::new(error, true));
        }
        // The server was the primary when the connection was established, or accepted its
        // credentials. The next call connects again.
        if result.as_ref().is_ok_and(ends_connection) {
            link.end();
        }
        result.map_err(|cause| {
            link.end();
            let error = error::disconnected(&cause, &self.connector.acl);
            Failed::new(error, error::is_broken(&cause))
        })
    }

    /// The current connection, or a new one that is being established. In a long outage, calls
    /// share the error of an attempt that has failed.
    fn link(&self) -> Arc<Link> {
        let latest = lock(&self.link).clone();
        match latest.filter(|link| link.has_failed()) {
            Some(failed) if self.outage.shared_error(Instant::now()).is_some() => failed,
            _ => self.attempt(),
        }
    }

    /// The current connection, or a new one that is being established.
    fn attempt(&self) -> Arc<Link> {
        let mut current = lock(&self.link);
        match &*current {
            Some(link) if !link.is_over() && !link.has_stalled() => link.clone(),
            // The first call that finds the connection over begins one for all.
            _ => {
                let number = self.attempts.fetch_add(1, Ordering::AcqRel) + 1;
                current
                    .insert(Arc::new(Link::begin(&self.connector, &self.this, number)))
                    .clone()
            }
        }
    }

    /// Converts an error reply of the server into a [`StoreError`].
    pub(crate) fn settle(&self, value: Value) -> Result<Value, StoreError> {
        match value {
            Value::ServerError(error) => {
                let error = error::refused(&error, &self.connector.acl);
                Err(self.connector.excused(error))
            }
            value => Ok(value),
        }
    }
}

/// A script to run.
#[derive(Clone, Copy)]
pub(crate) enum Errand<'a> {
    Call(&'a Call, Repeat),
    /// A script that takes a deadline in the server's time, and returns that time as the second
    /// word of its reply. It is written for the clock of the server that executes it, and never
    /// repeated: the function writes it for that deadline in microseconds since 1970. In a cluster
    /// its keys are in the slot.
    By {
        deadline: Instant,
        write: &'a (dyn Fn(u64) -> Call + Sync),
        slot: Slot,
        in_outage: InOutage,
    },
}

/// Whether a call may be sent again after the connection broke.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Repeat {
    /// A second execution under the same token has no further effect.
    Once,
    /// Its reply would have another meaning the second time, or a late execution of the first call
    /// would do harm.
    Never,
}

/// A call without a reply.
#[derive(Clone)]
pub(crate) struct Failed {
    pub(crate) error: StoreError,
    /// The connection was established and has broken.
    broken: bool,
    /// The server does not answer, and the call was refused without being sent.
    pub(crate) refused: bool,
}

impl Failed {
    fn new(error: StoreError, broken: bool) -> Self {
        Self {
            error,
            broken,
            refused: false,
        }
    }

    fn refused(error: StoreError) -> Self {
        Self {
            refused: true,
            ..Self::new(error, false)
        }
    }

    /// Records that an earlier attempt was sent.
    fn repeated(mut self) -> Self {
        self.error = self.error.with_unsent(false);
        self
    }
}

impl From<StoreError> for Failed {
    fn from(error: StoreError) -> Self {
        Self::new(error, false)
    }
}

impl From<Failed> for StoreError {
    fn from(failed: Failed) -> Self {
        failed.error
    }
}

pub(crate) fn is_unknown_script(value: &Value) -> bool {
    matches!(value, Value::ServerError(error) if error.kind() == Some(ServerErrorKind::NoScript))
}

/// The reply to `INFO` of a server that may not support RESP3.
async fn without_resp3(door: Door) -> Option<Info> {
    let config = AsyncConnectionConfig::new();
    let opening = door.over_resp2()?;
    let (mut connection, _driver) = in_time(opening.open(&config)).await.ok()?;
    let info = redis::cmd("INFO").query_async(&mut connection).await;
    info.ok().map(Info)
}
