//! The connection to one server: made again when it is lost, and shared by all calls.
//!
//! It subscribes to what the server tells unasked, once for each connection: the first call on a connection takes the
//! subscription along, in front of itself. The client's own resubscription is not used: it forgets a subscription that
//! failed, and knows none for a connection that was made anew by [`Connection::replace`].
//!
//! Nothing here waits longer than a connection attempt takes, and nothing is sent a second time but the text of a
//! script in place of an unknown digest. Timeouts of calls are the caller's.

use std::{
    future::Future,
    sync::{
        Arc, Mutex, Once, PoisonError, RwLock, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use futures_util::future::join;
use redis::{
    Client, Cmd, ConnectionAddr, Pipeline, ProtocolVersion, PushInfo, PushKind, RedisError, RedisResult,
    ServerErrorKind, Value,
    aio::{ConnectionLike, ConnectionManager, ConnectionManagerConfig},
};

use super::{acl::AclLine, error, handshake, pushes::Pushes, scripts::Call};
use crate::{
    store::{StoreError, StoreErrorKind, StoreEvent},
    sync::lock,
};

/// How long one attempt may take; there are two before a call is told.
const ATTEMPT: Duration = Duration::from_secs(1);
/// Between the two. The manager's own default grows to several seconds, during which calls would wait.
const PAUSE: Duration = Duration::from_millis(100);
/// A connection on which nothing was answered for so long, though something was asked, is given up.
const SILENCE: Duration = Duration::from_secs(2);
/// How many calls may be on their way to the socket: enough that it is the server that is waited for, not the channel.
const BUFFERED_CALLS: usize = 4096;

pub(super) struct Connection {
    client: Client,
    // Not tokio's: it is held for a clone only, never across an await.
    manager: RwLock<Numbered>,
    pushes: Arc<Pushes>,
    acl: AclLine,
    warned: Once,
}

/// A manager, and which one it is.
#[derive(Clone)]
struct Numbered {
    number: u64,
    manager: ConnectionManager,
    /// Since when no call was answered that was sent; `None` after an answer.
    silent_since: Arc<Mutex<Option<Instant>>>,
    subscribed: Weak<Subscribed>,
}

/// Whether the subscription was sent on the current connection of a manager. It is sent again after whatever may have ended
/// that connection: once too often does no harm.
///
/// It belongs to the manager's push sender, which ends with the runtime that the manager was made on. What is left then
/// connects again, and hears nothing.
#[derive(Default)]
struct Subscribed(AtomicBool);

impl Numbered {
    fn new(number: u64, manager: ConnectionManager, subscribed: Weak<Subscribed>) -> Self {
        Self { number, manager, silent_since: Arc::default(), subscribed }
    }

    fn is_deaf(&self) -> bool {
        self.subscribed.strong_count() == 0
    }

    /// Whether this call is the one that takes the subscription along.
    fn must_subscribe(&self) -> bool {
        let Some(subscribed) = self.subscribed.upgrade() else { return false };
        // Looked at first: all calls but one only read.
        !subscribed.0.load(Ordering::Acquire) && !subscribed.0.swap(true, Ordering::AcqRel)
    }

    fn must_subscribe_again(&self) {
        if let Some(subscribed) = self.subscribed.upgrade() {
            subscribed.0.store(false, Ordering::Release);
        }
    }
}

/// A subscription under way. Dropped so, it is left to the next call.
struct Subscribing<'a> {
    numbered: &'a Numbered,
    settled: bool,
}

impl Drop for Subscribing<'_> {
    fn drop(&mut self) {
        if !self.settled {
            self.numbered.must_subscribe_again();
        }
    }
}

/// A call without an answer yet. Dropped so, after a long silence, it gives the connection up: TCP may be alive, and
/// nobody at the other end.
struct Unanswered<'a> {
    connection: &'a Connection,
    number: u64,
    silent_since: Arc<Mutex<Option<Instant>>>,
    answered: bool,
}

impl Unanswered<'_> {
    fn answered(mut self) {
        *lock(&self.silent_since) = None;
        self.answered = true;
    }
}

impl Drop for Unanswered<'_> {
    fn drop(&mut self) {
        if !self.answered && lock(&self.silent_since).is_some_and(|since| since.elapsed() >= SILENCE) {
            self.connection.replace(self.number);
        }
    }
}

impl Connection {
    pub(super) async fn open(client: Client, namespace: &str) -> Result<Self, StoreError> {
        let acl = AclLine::new(namespace, client.get_connection_info().redis_settings().db());
        let pushes = Arc::new(Pushes::new(namespace));
        let (config, subscribed) = config(&pushes);
        match ConnectionManager::new_with_config(client.clone(), config).await {
            Ok(manager) => {
                let manager = RwLock::new(Numbered::new(0, manager, subscribed));
                Ok(Self { client, manager, pushes, acl, warned: Once::new() })
            }
            Err(cause) => {
                let tls = matches!(client.get_connection_info().addr(), ConnectionAddr::TcpTls { .. });
                let error = error::unconnected(&cause, tls, &acl);
                if error.kind() == StoreErrorKind::NotRedis
                    && let Some(version) = old_version(&client).await
                {
                    return Err(error::too_old(Some(&version)));
                }
                Err(error)
            }
        }
    }

    /// What the server tells on this connection.
    pub(super) fn pushes(&self) -> &Pushes {
        &self.pushes
    }

    /// Where the server is; never with a password.
    pub(super) fn address(&self) -> String {
        self.client.get_connection_info().addr().to_string()
    }

    /// Sends one command.
    pub(super) async fn command(&self, command: &Cmd) -> Result<Value, StoreError> {
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
        let values = match self.send_all(&pipeline).await {
            Err(failed) if failed.broken => self.send_all(&pipeline).await,
            result => result,
        };
        let mut values = values?;

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
        let numbered = self.manager();
        let call = self.unanswered(&numbered);
        let mut manager = numbered.manager.clone();
        let result = self.exchange(&numbered, manager.req_packed_command(command)).await;
        call.answered();
        result.map_err(|cause| self.failed(&numbered, &cause))
    }

    async fn send_all(&self, pipeline: &Pipeline) -> Result<Vec<Value>, Failed> {
        let numbered = self.manager();
        let call = self.unanswered(&numbered);
        let mut manager = numbered.manager.clone();
        let result = self.exchange(&numbered, manager.req_packed_commands(pipeline, 0, pipeline.len())).await;
        call.answered();
        result.map_err(|cause| self.failed(&numbered, &cause))
    }

    /// Sends a call, the subscription in front of it if it is the first on its connection.
    async fn exchange<T>(&self, numbered: &Numbered, call: impl Future<Output = RedisResult<T>>) -> RedisResult<T> {
        if !numbered.must_subscribe() {
            return call.await;
        }
        // Polled in this order, so the server executes them in this order; and neither waits for the other.
        join(Box::pin(self.subscribe(numbered)), call).await.1
    }

    async fn subscribe(&self, numbered: &Numbered) {
        let mut subscribing = Subscribing { numbered, settled: false };
        let channels = [self.pushes.own(), self.pushes.revoked()];
        let Err(cause) = numbered.manager.clone().subscribe(&channels).await else {
            subscribing.settled = true;
            return;
        };
        // A refusal in words stands as long as the connection does. Locks do without, but are handed over more slowly.
        if cause.code().is_some() || cause.clone().into_server_errors().is_some() {
            subscribing.settled = true;
            let error = error::disconnected(&cause, &self.acl);
            self.warned.call_once(|| {
                tracing::warn!(%error, "the server does not tell who is granted a lock: those who wait only ask once a second");
            });
        }
    }

    fn unanswered(&self, numbered: &Numbered) -> Unanswered<'_> {
        let silent_since = Arc::clone(&numbered.silent_since);
        lock(&silent_since).get_or_insert_with(Instant::now);
        Unanswered { connection: self, number: numbered.number, silent_since, answered: false }
    }

    fn settle(&self, value: Value) -> Result<Value, StoreError> {
        match value {
            Value::ServerError(error) => Err(error::refused(&error, &self.acl)),
            value => Ok(value),
        }
    }

    fn manager(&self) -> Numbered {
        let current = || self.manager.read().unwrap_or_else(PoisonError::into_inner).clone();
        let numbered = current();
        if !numbered.is_deaf() {
            return numbered;
        }
        self.replace(numbered.number);
        current()
    }

    /// Classifies an error of the connection itself.
    ///
    /// The manager connects again after an I/O error only: a server that refused the connection in words (too many
    /// clients, say) would be given up for ever. So the manager is then replaced.
    fn failed(&self, numbered: &Numbered, cause: &RedisError) -> Failed {
        if cause.is_io_error() {
            // Where it connects again without telling of the end of a connection, it gives this error.
            numbered.must_subscribe_again();
        } else {
            self.replace(numbered.number);
        }
        Failed { error: error::disconnected(cause, &self.acl), broken: cause.is_connection_dropped() }
    }

    /// Replaces manager `number` by one that connects, and subscribes, on the next call. The first of the calls that find it
    /// useless does it for all.
    fn replace(&self, number: u64) {
        let mut current = self.manager.write().unwrap_or_else(PoisonError::into_inner);
        let (config, subscribed) = config(&self.pushes);
        if current.number == number
            && let Ok(manager) = ConnectionManager::new_lazy_with_config(self.client.clone(), config)
        {
            *current = Numbered::new(number + 1, manager, subscribed);
            drop(current);
            // What the old one would have told is lost.
            self.pushes.listeners().tell(&StoreEvent::Disconnected);
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

fn is_unknown_script(value: &Value) -> bool {
    matches!(value, Value::ServerError(error) if error.kind() == Some(ServerErrorKind::NoScript))
}

fn config(pushes: &Arc<Pushes>) -> (ConnectionManagerConfig, Weak<Subscribed>) {
    let (pushes, subscribed) = (Arc::clone(pushes), Arc::<Subscribed>::default());
    let weak = Arc::downgrade(&subscribed);
    let config = ConnectionManagerConfig::new()
        .set_number_of_retries(1)
        .set_min_delay(PAUSE)
        .set_max_delay(PAUSE)
        .set_connection_timeout(Some(ATTEMPT))
        .set_response_timeout(None)
        .set_pipeline_buffer_size(BUFFERED_CALLS)
        .set_push_sender(move |push: PushInfo| {
            if push.kind == PushKind::Disconnection {
                // Before anybody is told, who may call at once.
                subscribed.0.store(false, Ordering::Release);
            }
            pushes.take(&push);
            Ok::<_, redis::aio::SendError>(())
        });
    (config, weak)
}

/// The version of a server that does not know RESP3, asked in RESP2.
async fn old_version(client: &Client) -> Option<String> {
    let info = client.get_connection_info().clone();
    let redis = info.redis_settings().clone().set_protocol(ProtocolVersion::RESP2);
    let client = Client::open(info.set_redis_settings(redis)).ok()?;
    let mut connection = client.get_multiplexed_async_connection().await.ok()?;
    let info: String = redis::cmd("INFO").query_async(&mut connection).await.ok()?;
    handshake::version(&info).map(str::to_owned)
}
