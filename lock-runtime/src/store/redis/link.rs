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
    AsyncConnectionConfig, Client, Cmd, ErrorKind, PushInfo, PushKind, RedisError,
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
    handshake::{Greeting, Info, Kind},
    names::marker_name,
    pushes::Pushes,
    quarantine::Tenure,
    reply::unexpected,
    scripts::{self, Call},
    sentinel::Named,
    target::Target,
};
use crate::{
    store::{StoreError, StoreErrorKind, StoreEvent, Token},
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
    pub(super) target: Target,
    pub(super) pushes: Arc<Pushes>,
    pub(super) acl: AclLine,
    /// Of a server among several.
    membership: Option<Membership>,
    pub(super) kind: Kind,
    /// Set with the first connection that stands.
    clock: Arc<OnceLock<ServerClock>>,
    /// What is worth a warning once, whatever the number of connections.
    warned: Arc<Warned>,
    /// Whether it listens to what the server tells, and its end is told.
    listens: bool,
}

/// What is to be known of a server that votes with others.
#[derive(Clone)]
struct Membership {
    longest_lease: Duration,
    /// Asks for the marker of its data.
    question: Cmd,
    latest: Arc<Mutex<Option<Arc<Tenure>>>>,
}

struct Warned {
    no_pushes: Once,
    no_info: Once,
}

/// A connection that is being made, stands, or is over. It is not made again: whoever finds it over dials anew.
pub(super) struct Link {
    connected: Shared<BoxFuture<'static, Result<Connected, StoreError>>>,
    attempt: AbortHandle,
    life: Arc<Life>,
    /// Since when no call was answered that was sent; `None` after an answer.
    silent_since: Mutex<Option<Instant>>,
}

/// A connection that stands, and the server at its other end.
#[derive(Clone)]
pub(super) struct Connected {
    pub(super) connection: MultiplexedConnection,
    /// Of a server among several.
    pub(super) tenure: Option<Arc<Tenure>>,
}

/// Whether a connection stands, known to the task that reads from it as well.
struct Life {
    /// It stood once, so its end is news.
    stood: AtomicBool,
    over: AtomicBool,
    /// Who is told of its end.
    pushes: Option<Arc<Pushes>>,
    /// Where the server may be another one in a moment: what ends it then.
    watch: OnceLock<AbortHandle>,
}

impl Life {
    fn end(&self) {
        if self.over.swap(true, Ordering::AcqRel) {
            return;
        }
        self.watch.get().into_iter().for_each(AbortHandle::abort);
        if self.stood.load(Ordering::Acquire)
            && let Some(pushes) = &self.pushes
        {
            pushes.listeners().tell(&StoreEvent::Disconnected);
        }
    }
}

impl Drop for Life {
    fn drop(&mut self) {
        self.watch.get().into_iter().for_each(AbortHandle::abort);
    }
}

impl Dial {
    pub(super) fn new(target: Target, pushes: Arc<Pushes>, acl: AclLine) -> Self {
        Self {
            target,
            pushes,
            acl,
            membership: None,
            kind: Kind::Primary,
            clock: Arc::default(),
            warned: Arc::new(Warned {
                no_pushes: Once::new(),
                no_info: Once::new(),
            }),
            listens: true,
        }
    }

    /// To the same place, for connections that listen to nothing.
    pub(super) fn deaf(&self) -> Self {
        Self {
            listens: false,
            ..self.clone()
        }
    }

    /// The same for a server that votes with others. It keeps away for `longest_lease` where it may have forgotten a lock.
    pub(super) fn member(self, namespace: &str, longest_lease: Duration) -> Self {
        let question = Call::new(&scripts::MARKER, 1)
            .arg(marker_name(namespace))
            .token(Token::random())
            .into_text();
        Self {
            membership: Some(Membership {
                longest_lease,
                question,
                latest: Arc::default(),
            }),
            ..self
        }
    }

    /// What was seen last of a server among several.
    pub(super) fn tenure(&self) -> Option<Arc<Tenure>> {
        lock(&self.membership.as_ref()?.latest).clone()
    }

    /// The same to a node of a cluster, which has a clock of its own.
    pub(super) fn to_node(&self, client: Client) -> Self {
        let target = Target::Server(Arc::new(client));
        Self {
            target,
            kind: Kind::Node,
            clock: Arc::default(),
            ..self.clone()
        }
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
        let pushes = self.listens.then(|| self.pushes.clone());
        let life = Arc::new(Life {
            stood: AtomicBool::new(false),
            over: AtomicBool::new(false),
            pushes,
            watch: OnceLock::new(),
        });
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
        Link {
            connected: connected.boxed().shared(),
            attempt,
            life,
            silent_since: Mutex::default(),
        }
    }

    async fn connect(self, life: Arc<Life>) -> Result<Connected, StoreError> {
        let connecting = async {
            match self.attempt(&life).await {
                Err(failed) if self.is_worth_another(&failed) => {
                    sleep(PAUSE).await;
                    self.attempt(&life).await
                }
                result => result,
            }
        };
        // rustls panics where the application has chosen no crypto provider; a caller deserves an error that says so.
        let connected = AssertUnwindSafe(connecting)
            .catch_unwind()
            .await
            .unwrap_or_else(|panic| {
                if !is_missing_provider(panic.as_ref()) {
                    resume_unwind(panic);
                }
                Err(RedisError::from((ErrorKind::InvalidClientConfig, NO_PROVIDER)).into())
            });
        connected.map_err(|unconnected| {
            life.end();
            match unconnected {
                Unconnected::Refused(error) => error,
                Unconnected::Broken(cause) if self.clock.get().is_some() => {
                    error::disconnected(&cause, &self.acl)
                }
                // Nothing has ever answered here: it may be the wrong place.
                Unconnected::Broken(cause) => {
                    error::unconnected(&cause, self.target.is_tls(), &self.acl)
                }
            }
        })
    }

    fn is_worth_another(&self, failed: &Unconnected) -> bool {
        match failed {
            Unconnected::Broken(cause) => cause.is_io_error(),
            // The Sentinels may be about to name another one.
            Unconnected::Refused(error) => self.target.moves() && error.is_transient(),
        }
    }

    async fn attempt(&self, life: &Arc<Life>) -> Result<Connected, Unconnected> {
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
                    _ => reader.pushes.iter().for_each(|pushes| pushes.take(&push)),
                }
                Ok::<_, redis::aio::SendError>(())
            });
        let (server, named) = self.target.server().await?;
        let mut connection = server
            .get_multiplexed_async_connection_with_config(&config)
            .await?;
        if self.listens {
            self.subscribe(&mut connection).await?;
        }
        let marker = self
            .membership
            .as_ref()
            .map(|membership| &membership.question);
        let greeting = Greeting::exchange(&mut connection, self.pushes.namespace(), marker);
        let greeting = timeout(ATTEMPT, greeting).await;
        let tenure = self.accept(&greeting.unwrap_or_else(|_| Err(silence()))?)?;
        stood.store(true, Ordering::Release);
        life.stood.store(true, Ordering::Release);
        // Also where nothing is heard: a primary that hangs, and was replaced, would hold its calls up until they time out.
        self.watch(named, life);
        Ok(Connected { connection, tenure })
    }

    /// Ends the connection once its server is not the primary any more.
    fn watch(&self, named: Option<Named>, life: &Arc<Life>) {
        let listener = Arc::downgrade(life);
        let switched = move || listener.upgrade().into_iter().for_each(|life| life.end());
        if let Some(watch) = self.target.watch(named, switched) {
            // An attempt stands once at most.
            let _ = life.watch.set(watch);
        }
    }

    async fn subscribe(&self, connection: &mut MultiplexedConnection) -> Result<(), RedisError> {
        let channels = self.pushes.channels();
        let subscribed = timeout(ATTEMPT, connection.subscribe(&channels)).await;
        match subscribed.unwrap_or_else(|_| Err(silence())) {
            // A refusal in words stands as long as the connection does. Locks do without, but are handed over more slowly.
            Err(cause)
                if cause.code().is_some() || cause.clone().into_server_errors().is_some() =>
            {
                self.warn_of_silence(&error::disconnected(&cause, &self.acl));
                Ok(())
            }
            result => result,
        }
    }

    /// Is it a server that can keep locks?
    fn accept(&self, greeting: &Greeting) -> Result<Option<Arc<Tenure>>, Unconnected> {
        let info = greeting.info(&self.acl);
        match &info {
            Ok(info) => info.check(self.kind)?,
            Err(error) if error.kind() == StoreErrorKind::Forbidden && self.membership.is_none() => {
                self.warned.no_info.call_once(|| {
                    tracing::warn!(
                        "the server forbids INFO: whether it is a primary that does not evict locks was not checked"
                    );
                })
            }
            Err(error) => return Err(error.clone().into()),
        }
        greeting.check_format(self.pushes.namespace(), &self.acl)?;
        let micros = greeting.micros(&self.acl)?;
        // What it is like is known before its time, which acquires wait for.
        let tenure = self.tenure_by(greeting, info)?;
        let clock = self
            .clock
            .get_or_init(|| ServerClock::new(micros, greeting.received));
        clock.observe(micros, greeting.sent, greeting.received);
        Ok(tenure)
    }

    /// From when on a server among several votes.
    fn tenure_by(
        &self,
        greeting: &Greeting,
        info: Result<Info, StoreError>,
    ) -> Result<Option<Arc<Tenure>>, Unconnected> {
        let Some(membership) = &self.membership else {
            return Ok(None);
        };
        let (marker, with_data) = greeting.marker(&self.acl)?;
        let info = info?;
        let uptime = info.uptime().ok_or_else(unexpected)?;
        let tenure = Tenure::new(
            membership.longest_lease,
            uptime,
            with_data,
            marker,
            greeting.sent,
        );
        let tenure = tenure.with_run_id(info.run_id());
        let tenure = match &*lock(&membership.latest) {
            // Whatever its clock says: this one has seen it change.
            Some(before) if !before.is_of_the_same(&tenure) => {
                tenure.not_before(greeting.sent + membership.longest_lease)
            }
            _ => tenure,
        };
        if let Some(left) = tenure.keeps_away(greeting.received) {
            let server = &self.target;
            tracing::warn!(%server, ?left, "the server may have forgotten a lock, and does not vote yet");
        }
        let tenure = Arc::new(tenure);
        *lock(&membership.latest) = Some(tenure.clone());
        Ok(Some(tenure))
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
    let text = panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied());
    text.is_some_and(|text| text.contains("CryptoProvider"))
}

impl Link {
    /// The connection, once it stands.
    pub(super) async fn connected(&self) -> Result<Connected, StoreError> {
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
        Unanswered {
            link: self,
            answered: false,
        }
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
        if !self.answered
            && lock(&self.link.silent_since).is_some_and(|since| since.elapsed() >= SILENCE)
        {
            self.link.end();
        }
    }
}
