//! The establishment of a connection to a server that can keep locks.

use std::{
    any::Any,
    io,
    panic::{AssertUnwindSafe, resume_unwind},
    sync::{
        Arc, Mutex, Once, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use futures_util::FutureExt as _;
use redis::{
    AsyncConnectionConfig, Cmd, PushInfo, PushKind, RedisError, RedisResult,
    aio::MultiplexedConnection,
};
use tokio::time::{sleep, timeout};

use super::{
    super::{
        clock::ServerClock,
        error,
        operator::acl::AclLine,
        script::{
            self, Call,
            names::{marker_name, settings_name},
            reply::unexpected,
        },
        settings::RedisOptions,
        topology::{quarantine::Tenure, runs::Runs, target::Target},
    },
    endpoint::{Endpoint, is_tls},
    handshake::{Greeting, Info, Kind},
    link::{Connected, Life},
    pushes::Pushes,
};
use crate::{
    guard::fence::FencingToken,
    observe::log,
    shell::{sync::lock, time::Instant},
    store::{StoreError, StoreErrorKind, Token},
};

/// The time limit of one attempt. A call fails after two of them.
const ATTEMPT: Duration = Duration::from_secs(1);
/// The pause between the two attempts.
const PAUSE: Duration = Duration::from_millis(100);
/// The number of calls that may be on their way to the socket: enough that calls wait for the
/// server, and not for the channel.
const BUFFERED_CALLS: usize = 4096;

/// The parameters of connections to a server, and how one is established.
#[derive(Clone)]
pub(crate) struct Connector {
    pub(crate) target: Target,
    pub(crate) pushes: Arc<Pushes>,
    pub(crate) acl: AclLine,
    /// Set for a server of a quorum.
    membership: Option<Membership>,
    pub(crate) kind: Kind,
    /// The server's clock. Set by the first established connection.
    pub(crate) clock: Arc<OnceLock<ServerClock>>,
    /// The server sends no messages to the connections.
    is_silent: Arc<AtomicBool>,
    /// Limits the warning about a missing right to one, whatever the number of connections.
    no_info: Arc<Once>,
    /// A server has accepted the client before.
    accepted: Arc<AtomicBool>,
    /// Whether the connection receives push messages and reports its end.
    pub(crate) listens: bool,
    /// The time without an answer after which requests are refused.
    pub(crate) unavailable_after: Option<Duration>,
    /// The time for which a fencing token is kept after its grant.
    pub(crate) fences_kept_for: Duration,
}

/// The state of a server that votes with others.
#[derive(Clone)]
struct Membership {
    longest_lease: Duration,
    /// Those that all clients of the namespace have to share.
    settings: String,
    /// Reads the marker of the server's data.
    question: Cmd,
    latest: Arc<Mutex<Option<Arc<Tenure>>>>,
    runs: Runs,
}

impl Connector {
    pub(crate) fn new(target: Target, pushes: Pushes, acl: AclLine) -> Self {
        Self {
            target,
            pushes: Arc::new(pushes),
            acl,
            membership: None,
            kind: Kind::Primary,
            clock: Arc::default(),
            is_silent: Arc::default(),
            no_info: Arc::new(Once::new()),
            accepted: Arc::default(),
            listens: true,
            unavailable_after: None,
            fences_kept_for: FencingToken::KEPT_FOR,
        }
    }

    /// The same parameters for a connection whose requests are refused once the server has not
    /// answered for this long.
    pub(crate) fn with(self, settings: &RedisOptions) -> Self {
        Self {
            unavailable_after: settings.unavailable_after,
            fences_kept_for: settings.fences_kept_for.unwrap_or(FencingToken::KEPT_FOR),
            ..self
        }
    }

    /// The same parameters for a connection that receives no push messages.
    pub(crate) fn deaf(mut self) -> Self {
        self.listens = false;
        if let Some(membership) = &mut self.membership {
            // A marker that another connection has read may be newer than the tenure of this one,
            // and a server in quarantine would vote. With a clock of its own, a call waits for the
            // connection, which reads the marker.
            let latest = lock(&membership.latest).clone();
            membership.latest = Arc::new(Mutex::new(latest));
            self.clock = Arc::default();
        }
        self
    }

    /// The same parameters for a server that votes with others. It does not vote for
    /// `longest_lease` if it may have forgotten a lock. It is server number `place.0` of `place.1`
    /// in the list of this client.
    pub(crate) fn member(
        mut self,
        longest_lease: Duration,
        place: (usize, usize),
        runs: &Runs,
    ) -> Self {
        let namespace = &self.pushes.namespace;
        let (millis, (number, count)) = (longest_lease.as_millis(), place);
        let settings = format!("{millis} ms, server {number} of {count}");
        let marker = Call::new(&script::MARKER, 2)
            .arg(marker_name(namespace))
            .arg(settings_name(namespace));
        let marker = marker.token(Token::random()).arg(&settings);
        self.membership = Some(Membership {
            longest_lease,
            settings,
            question: marker.by_text(FencingToken::KEPT_FOR),
            latest: Arc::default(),
            runs: runs.clone(),
        });
        self
    }

    /// Whether the server votes with others.
    pub(crate) fn is_member(&self) -> bool {
        self.membership.is_some()
    }

    /// The latest tenure of a server of a quorum.
    pub(crate) fn tenure(&self) -> Option<Arc<Tenure>> {
        lock(&self.membership.as_ref()?.latest).clone()
    }

    /// The label of the server in metrics, without passwords.
    #[cfg(feature = "metrics")]
    pub(super) fn server_label(&self) -> metrics::SharedString {
        self.target.to_string().into()
    }

    /// The same parameters for a node of a cluster, which has a clock of its own.
    pub(crate) fn to_node(&self, node: Endpoint) -> Self {
        Self {
            target: Target::Server(Arc::new(node)),
            kind: Kind::Node,
            clock: Arc::default(),
            ..self.clone()
        }
    }

    /// Returns whether a connection gets no messages.
    pub(crate) fn is_silent(&self) -> bool {
        self.is_silent.load(Ordering::Relaxed)
    }

    /// Warns that waiters are not notified, once until they are again.
    pub(crate) fn warn_of_silence(&self, error: &StoreError) {
        if !self.is_silent.swap(true, Ordering::Relaxed) {
            tracing::warn!(%error, "the server sends no messages about grants: waiters only poll");
        }
    }

    pub(super) async fn connect(self, life: Arc<Life>) -> Result<Connected, StoreError> {
        // In an outage, the probes follow each other at their own pace.
        let owner = life.owner.upgrade();
        let is_first = owner.is_none_or(|owner| !owner.has_failed());
        let connecting = async {
            match self.attempt(&life).await {
                Err(failed) if is_first && self.is_worth_another(&failed) => {
                    sleep(PAUSE).await;
                    self.attempt(&life).await
                }
                result => result,
            }
        };
        // rustls panics if the application has not chosen a crypto provider. Return an error with
        // that cause instead.
        let connected = AssertUnwindSafe(connecting).catch_unwind().await;
        let connected = connected.unwrap_or_else(|panic| {
            if !is_missing_provider(panic.as_ref()) {
                life.end();
                resume_unwind(panic);
            }
            Err(error::unavailable(error::NO_PROVIDER).into())
        });
        connected.map_err(|unconnected| {
            let error = match unconnected {
                Unconnected::Refused(error) | Unconnected::Unready(error) => error,
                Unconnected::Broken(cause) if self.is_known() => {
                    error::disconnected(&cause, &self.acl)
                }
                // No connection has succeeded so far: the address may be wrong.
                Unconnected::Broken(cause) => {
                    error::unconnected(&cause, is_tls(self.target.info().addr()), &self.acl)
                }
            };
            let error = self.excused(error);
            if let Some(owner) = life.owner.upgrade() {
                owner.failed(life.number, &error);
            }
            life.end();
            error
        })
    }

    /// Returns whether the server has been reached before, by the keeper or not.
    fn is_known(&self) -> bool {
        let has_voted = self.is_member() && self.accepted.load(Ordering::Acquire);
        has_voted || self.clock.get().is_some()
    }

    /// Returns the error of a server, which may accept the client again if it has done so before:
    /// its password is being replaced.
    pub(super) fn excused(&self, error: StoreError) -> StoreError {
        let is_refused = error.kind() == StoreErrorKind::Unauthenticated;
        error.passing(is_refused && self.accepted.load(Ordering::Acquire))
    }

    fn is_worth_another(&self, failed: &Unconnected) -> bool {
        match failed {
            Unconnected::Broken(cause) => cause.is_io_error() || error::is_broken(cause),
            // The Sentinels may be about to name another primary.
            Unconnected::Refused(error) => self.target.moves() && error.is_transient(),
            Unconnected::Unready(_) => true,
        }
    }

    async fn attempt(&self, life: &Arc<Life>) -> Result<Connected, Unconnected> {
        let (reader, clock) = (life.clone(), self.clock.clone());
        let stood = Arc::new(AtomicBool::new(false));
        let stands = stood.clone();
        let take = move |push: PushInfo| {
            match push.kind {
                // The end of a failed attempt is not that of the next one.
                PushKind::Disconnection if stands.load(Ordering::Acquire) => reader.end(),
                PushKind::Disconnection => {}
                _ => {
                    let pushes = reader.pushes.iter();
                    pushes.for_each(|pushes| pushes.take(&push, clock.get()));
                }
            }
            Ok::<_, redis::aio::SendError>(())
        };
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(None)
            .set_response_timeout(None)
            .set_pipeline_buffer_size(BUFFERED_CALLS);
        let sends_messages = self.target.sends_messages();
        let config = match sends_messages {
            true => config.set_push_sender(take),
            false => config,
        };
        let (server, named) = self.target.server().await?;
        let door = timeout(2 * ATTEMPT, server.door()).await;
        let door = door.unwrap_or_else(|_| Err(StoreError::timed_out(2 * ATTEMPT)));
        let (door, login) = door.map_err(Unconnected::Unready)?;
        let (mut connection, driver) = in_time(door.open(&config)).await?;
        match self.listens {
            true if sends_messages => self.subscribe(&mut connection).await?,
            true => self.warn_of_silence(&error::without_messages()),
            false => {}
        }
        let membership = self.membership.as_ref();
        let marker = membership.map(|membership| &membership.question);
        let greeting = Greeting::exchange(&mut connection, &self.pushes.namespace, marker);
        let tenure = self.accept(&in_time(greeting).await?)?;
        self.accepted.store(true, Ordering::Release);
        stood.store(true, Ordering::Release);
        life.stood.store(true, Ordering::Release);
        if let Some(owner) = life.owner.upgrade() {
            // A caller that waits for it keeps an attempt going that has been given up.
            if !life.over.load(Ordering::Acquire) {
                owner.established(life.number, named.as_ref().map(|(_, named)| named));
            }
            if life.over.load(Ordering::Acquire) {
                owner.ended(life.number, true, Instant::now());
            }
        }
        // The connection ends once its server is no longer the primary. Connections without
        // subscriptions watch as well: a hanging primary that was replaced would otherwise delay
        // their calls until they time out.
        if let Some((sentinels, named)) = named {
            let life_of = Arc::downgrade(life);
            let switched = move || life_of.upgrade().into_iter().for_each(|life| life.end());
            // Only one attempt establishes the connection, so this is not set yet.
            let _ = life.watch.set(sentinels.watch(named, switched));
        }
        let authentication = login.map(|login| Arc::new(login.keep(&connection)));
        Ok(Connected {
            connection,
            tenure,
            _authentication: authentication,
            _driver: Arc::new(driver),
        })
    }

    async fn subscribe(&self, connection: &mut MultiplexedConnection) -> Result<(), RedisError> {
        let channels = self.pushes.channels();
        match in_time(connection.subscribe(&channels)).await {
            // An explicit refusal holds as long as the connection. Locks work without the
            // messages, but hand-offs are slower.
            Err(cause)
                if cause.code().is_some() || cause.clone().into_server_errors().is_some() =>
            {
                self.warn_of_silence(&error::disconnected(&cause, &self.acl));
                Ok(())
            }
            // In a cluster, others decide: the sharded subscriptions.
            Ok(()) if self.kind == Kind::Primary => {
                self.is_silent.store(false, Ordering::Relaxed);
                Ok(())
            }
            result => result,
        }
    }

    /// Checks that the server can store locks, and returns its tenure.
    fn accept(&self, greeting: &Greeting) -> Result<Option<Arc<Tenure>>, StoreError> {
        let info = greeting.info(&self.acl);
        match &info {
            Ok(info) => info.check(self.kind)?,
            Err(error) if error.kind() == StoreErrorKind::Forbidden && self.membership.is_none() => {
                self.no_info.call_once(|| {
                    tracing::warn!(
                        "the server forbids INFO: its version, role and eviction policy were not checked"
                    );
                })
            }
            Err(error) => return Err(error.clone()),
        }
        greeting.check_format(&self.pushes.namespace, &self.acl)?;
        let micros = greeting.micros(&self.acl)?;
        // Set the tenure before the clock: an acquire waits for the clock, and then
        // needs the tenure.
        let tenure = self.tenure_by(greeting, info)?;
        let first = || ServerClock::new(micros, greeting.received);
        let clock = self.clock.get_or_init(first);
        clock.observe(micros, greeting.sent, greeting.received);
        Ok(tenure)
    }

    /// The tenure of a server of a quorum, with the instant from which it votes.
    fn tenure_by(
        &self,
        greeting: &Greeting,
        info: Result<Info, StoreError>,
    ) -> Result<Option<Arc<Tenure>>, StoreError> {
        let Some(membership) = &self.membership else {
            return Ok(None);
        };
        let (marker, with_data, settings) = greeting.marker(&self.acl)?;
        let info = info?;
        let uptime = info.uptime().ok_or_else(unexpected)?;
        let (seen, longest_lease) = (greeting.received, membership.longest_lease);
        let mut tenure = Tenure::new(longest_lease, uptime, with_data, marker, seen);
        tenure.run_id = info.field("run_id").map(str::to_owned);
        if let Some(run_id) = &tenure.run_id {
            membership.runs.register(&self.target.to_string(), run_id)?;
        }
        // A server under two names has the settings of one of them, which gets its vote.
        if settings != membership.settings {
            membership.runs.leave(&self.target.to_string());
            let (namespace, ours) = (&self.pushes.namespace, &membership.settings);
            return Err(error::other_settings(namespace, &settings, ours));
        }
        match &*lock(&membership.latest) {
            Some(before) if before.is_of_the_same(&tenure) => tenure.continues(before),
            // The change was observed here, so the full quarantine applies whatever the
            // server's clock shows.
            Some(_) => tenure.not_before(seen + longest_lease),
            None => {}
        }
        if let Some(left) = tenure.keeps_away(greeting.received) {
            let server = self.target.to_string();
            let message = "the server may have forgotten a lock, and does not vote yet";
            log::summarise(message, "quarantine", Some(&server), |left_out| {
                tracing::warn!(server, ?left, left_out, "{message}");
            });
        }
        let tenure = Arc::new(tenure);
        *lock(&membership.latest) = Some(tenure.clone());
        Ok(Some(tenure))
    }
}

/// The cause of a failed attempt.
enum Unconnected {
    Broken(RedisError),
    /// There is no primary, or the server cannot store locks.
    Refused(StoreError),
    /// There are no credentials or no certificates.
    Unready(StoreError),
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

/// Ends an exchange that takes too long with an error of the connection.
pub(crate) async fn in_time<T>(exchange: impl Future<Output = RedisResult<T>>) -> RedisResult<T> {
    let timed_out = |_| Err(io::Error::from(io::ErrorKind::TimedOut).into());
    timeout(ATTEMPT, exchange).await.unwrap_or_else(timed_out)
}

/// Whether rustls panicked because it has no crypto provider. This cannot be checked in advance,
/// as the enabled features matter too.
fn is_missing_provider(panic: &(dyn Any + Send)) -> bool {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    text.is_some_and(|text| text.contains("CryptoProvider"))
}
