//! One connection to the server, from the first attempt to its end.

use std::{
    any::Any,
    io,
    panic::{AssertUnwindSafe, resume_unwind},
    sync::{
        Arc, Mutex, Once, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use futures_util::{
    FutureExt as _,
    future::{BoxFuture, Shared},
};
use redis::{
    AsyncConnectionConfig, Client, ConnectionAddr, ErrorKind, PushInfo, PushKind, RedisError,
    aio::MultiplexedConnection,
};
use tokio::{
    task::AbortHandle,
    time::{sleep, timeout},
};

use super::{
    acl::AclLine,
    clock::ServerClock,
    error,
    handshake::{Greeting, Kind},
    pushes::Pushes,
};
use crate::{
    store::{StoreError, StoreErrorKind, StoreEvent},
    sync::lock,
};

/// How long one attempt may take; there are two before a call is told.
const ATTEMPT: Duration = Duration::from_secs(1);
/// Between the two.
const PAUSE: Duration = Duration::from_millis(100);
/// A connection on which nothing was answered for so long, though something was asked, is given up.
const SILENCE: Duration = Duration::from_secs(2);
/// How many calls may be on their way to the socket: enough that it is the server that is waited for, not the channel.
const BUFFERED_CALLS: usize = 4096;

pub(super) const NO_PROVIDER: &str = "TLS could not be set up; install a crypto provider at the start of `main`: \
                                      `rustls::crypto::ring::default_provider().install_default()`";

/// What a connection is made with.
#[derive(Clone)]
pub(super) struct Dial {
    pub(super) client: Client,
    pub(super) pushes: Arc<Pushes>,
    pub(super) acl: AclLine,
    kind: Kind,
    /// Set with the first connection that stands.
    clock: Arc<OnceLock<ServerClock>>,
    /// What is worth a warning once, whatever the number of connections.
    warned: Arc<Warned>,
}

struct Warned {
    no_pushes: Once,
    no_info: Once,
}

/// A connection that is being made, stands, or is over. It is not made again: whoever finds it over dials anew.
pub(super) struct Link {
    connected: Shared<BoxFuture<'static, Result<MultiplexedConnection, StoreError>>>,
    attempt: AbortHandle,
    life: Arc<Life>,
    /// Since when no call was answered that was sent; `None` after an answer.
    silent_since: Mutex<Option<Instant>>,
}

/// Whether a connection stands, known to the task that reads from it as well.
struct Life {
    /// It stood once, so its end is news.
    stood: AtomicBool,
    over: AtomicBool,
    pushes: Arc<Pushes>,
}

impl Life {
    fn end(&self) {
        if !self.over.swap(true, Ordering::AcqRel) && self.stood.load(Ordering::Acquire) {
            self.pushes.listeners().tell(&StoreEvent::Disconnected);
        }
    }
}

impl Dial {
    pub(super) fn new(client: Client, pushes: Arc<Pushes>, acl: AclLine) -> Self {
        Self {
            client,
            pushes,
            acl,
            kind: Kind::Primary,
            clock: Arc::default(),
            warned: Arc::new(Warned { no_pushes: Once::new(), no_info: Once::new() }),
        }
    }

    /// The same to a node of a cluster, which has a clock of its own.
    pub(super) fn to_node(&self, client: Client) -> Self {
        Self { client, kind: Kind::Node, clock: Arc::default(), ..self.clone() }
    }

    /// Says once that those who wait are not told.
    pub(super) fn warn_of_silence(&self, error: &StoreError) {
        self.warned.no_pushes.call_once(|| {
            tracing::warn!(%error, "the server does not tell who is granted a lock: those who wait only ask once a second");
        });
    }

    /// The server's clock, once a connection has stood.
    pub(super) fn clock(&self) -> Option<&ServerClock> {
        self.clock.get()
    }

    /// Begins to connect, in a task of its own: whoever waits for it may stop waiting.
    pub(super) fn dial(&self) -> Link {
        let life =
            Arc::new(Life { stood: AtomicBool::new(false), over: AtomicBool::new(false), pushes: self.pushes.clone() });
        // Only the result is shared: the attempt belongs to the runtime it was begun on, and may end with it.
        let connecting = tokio::spawn(self.clone().connect(life.clone()));
        let attempt = connecting.abort_handle();
        let acl = self.acl.clone();
        let connected = connecting.map(move |connected| {
            connected.unwrap_or_else(|ended| match ended.try_into_panic() {
                Ok(panic) => resume_unwind(panic),
                Err(_) => Err(error::disconnected(
                    &io::Error::other("the runtime on which it was connecting has ended").into(),
                    &acl,
                )),
            })
        });
        Link { connected: connected.boxed().shared(), attempt, life, silent_since: Mutex::default() }
    }

    async fn connect(self, life: Arc<Life>) -> Result<MultiplexedConnection, StoreError> {
        let connecting = async {
            match self.attempt(&life).await {
                Err(Unconnected::Broken(cause)) if cause.is_io_error() => {
                    sleep(PAUSE).await;
                    self.attempt(&life).await
                }
                result => result,
            }
        };
        // rustls panics where the application has chosen no crypto provider; a caller deserves an error that says so.
        let connected = AssertUnwindSafe(connecting).catch_unwind().await.unwrap_or_else(|panic| {
            if !is_missing_provider(panic.as_ref()) {
                resume_unwind(panic);
            }
            Err(RedisError::from((ErrorKind::InvalidClientConfig, NO_PROVIDER)).into())
        });
        connected.map_err(|unconnected| {
            life.end();
            match unconnected {
                Unconnected::Refused(error) => error,
                Unconnected::Broken(cause) if self.clock.get().is_some() => error::disconnected(&cause, &self.acl),
                // Nothing has ever answered here: it may be the wrong place.
                Unconnected::Broken(cause) => {
                    let tls = matches!(self.client.get_connection_info().addr(), ConnectionAddr::TcpTls { .. });
                    error::unconnected(&cause, tls, &self.acl)
                }
            }
        })
    }

    async fn attempt(&self, life: &Arc<Life>) -> Result<MultiplexedConnection, Unconnected> {
        let reader = life.clone();
        let stood = Arc::new(AtomicBool::new(false));
        let stands = stood.clone();
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(ATTEMPT))
            .set_response_timeout(None)
            .set_pipeline_buffer_size(BUFFERED_CALLS)
            .set_push_sender(move |push: PushInfo| {
                match push.kind {
                    // The end of an attempt that failed is not that of the next one.
                    PushKind::Disconnection if stands.load(Ordering::Acquire) => reader.end(),
                    PushKind::Disconnection => {}
                    _ => reader.pushes.take(&push),
                }
                Ok::<_, redis::aio::SendError>(())
            });
        let mut connection = self.client.get_multiplexed_async_connection_with_config(&config).await?;
        let channels = self.pushes.channels();
        let subscribed = timeout(ATTEMPT, connection.subscribe(&channels)).await;
        match subscribed.unwrap_or_else(|_| Err(silence())) {
            Ok(()) => {}
            // A refusal in words stands as long as the connection does. Locks do without, but are handed over more slowly.
            Err(cause) if cause.code().is_some() || cause.clone().into_server_errors().is_some() => {
                self.warn_of_silence(&error::disconnected(&cause, &self.acl));
            }
            Err(cause) => return Err(cause.into()),
        }
        let greeting = timeout(ATTEMPT, Greeting::exchange(&mut connection)).await;
        self.accept(greeting.unwrap_or_else(|_| Err(silence()))?)?;
        stood.store(true, Ordering::Release);
        life.stood.store(true, Ordering::Release);
        Ok(connection)
    }

    /// Is it a server that can keep locks?
    fn accept(&self, greeting: Greeting) -> Result<(), Unconnected> {
        match greeting.info(&self.acl) {
            Ok(info) => info.check(self.kind)?,
            Err(error) if error.kind() == StoreErrorKind::Forbidden => self.warned.no_info.call_once(|| {
                tracing::warn!(
                    "the server forbids INFO: whether it is a primary that does not evict locks was not checked"
                );
            }),
            Err(error) => return Err(error.into()),
        }
        let micros = greeting.micros(&self.acl)?;
        let clock = self.clock.get_or_init(|| ServerClock::new(micros, greeting.received));
        clock.observe(micros, greeting.sent, greeting.received);
        Ok(())
    }
}

/// Why an attempt has failed.
enum Unconnected {
    Broken(RedisError),
    /// There is a connection, but not to a server that can keep locks.
    Refused(StoreError),
}

impl From<RedisError> for Unconnected {
    fn from(cause: RedisError) -> Self {
        Self::Broken(cause)
    }
}

impl From<StoreError> for Unconnected {
    fn from(error: StoreError) -> Self {
        Self::Refused(error)
    }
}

fn silence() -> RedisError {
    io::Error::from(io::ErrorKind::TimedOut).into()
}

impl Drop for Link {
    /// Nobody waits for the attempt any more, so it closes what it has opened.
    fn drop(&mut self) {
        self.attempt.abort();
    }
}

/// Whether rustls has panicked for want of a crypto provider. It has no question to ask before: what is compiled in
/// decides too.
fn is_missing_provider(panic: &(dyn Any + Send)) -> bool {
    let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
    text.is_some_and(|text| text.contains("CryptoProvider"))
}

impl Link {
    /// The connection, once it stands.
    pub(super) async fn connected(&self) -> Result<MultiplexedConnection, StoreError> {
        self.connected.clone().await
    }

    pub(super) fn is_over(&self) -> bool {
        self.life.over.load(Ordering::Acquire)
    }

    /// It was made, and is not known to be over.
    pub(super) fn stands(&self) -> bool {
        self.life.stood.load(Ordering::Acquire) && !self.is_over()
    }

    /// It has turned out to be useless. What it would have told is lost.
    pub(super) fn end(&self) {
        self.life.end();
    }

    /// A call is about to be sent.
    pub(super) fn unanswered(&self) -> Unanswered<'_> {
        lock(&self.silent_since).get_or_insert_with(Instant::now);
        Unanswered { link: self, answered: false }
    }
}

/// A call without an answer yet. Dropped so, after a long silence, it gives the connection up: TCP may be alive, and
/// nobody at the other end.
pub(super) struct Unanswered<'a> {
    link: &'a Link,
    answered: bool,
}

impl Unanswered<'_> {
    pub(super) fn answered(mut self) {
        *lock(&self.link.silent_since) = None;
        self.answered = true;
    }
}

impl Drop for Unanswered<'_> {
    fn drop(&mut self) {
        if !self.answered && lock(&self.link.silent_since).is_some_and(|since| since.elapsed() >= SILENCE) {
            self.link.end();
        }
    }
}
