//! How a user gets in: [`LockClient`] and its builder.

use std::{
    fmt,
    num::NonZeroU32,
    panic::Location,
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::time::timeout;

use crate::{
    call::within,
    driver::{CleanUp, Driver},
    error::{LockError, LockErrorKind, Loss},
    gate::{Baton, Gates},
    key::{IntoLockKey, LockKey},
    request::LockRequest,
    runtime,
    spec::{DEFAULT_LEASE, Family, LockSpec, call_timeout},
    store::{
        Inspection, KeyPart, Listener, MemoryStore, Release, RevokeReply, RevokeScope, Store,
        StoreError, StoreEvent,
    },
};

/// So many requests may wait for one key in this process.
const MAX_WAITERS: usize = 10_000;
/// So many may for all keys together.
const MAX_WAITERS_IN_ALL: usize = 100_000;
/// How long `shutdown` waits for what is still to be given back: two call timeouts and a straggler's deadline.
const SHUTDOWN: Duration = Duration::from_secs(3);

/// After a broken connection every lease is asked for within this time.
pub(crate) const CHECK_WITHIN: Duration = Duration::from_millis(200);

/// How long `shutdown` waits for those who wait in line to go home: none of them needs longer whose future is polled.
const LEAVING: Duration = Duration::from_millis(500);

/// What a client, its requests and its guards share.
pub(crate) struct Core {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) gates: Gates,
    pub(crate) driver: Driver,
    pub(crate) defaults: LockSpec,
    ids: AtomicU64,
    /// Kept for the store, which tells it of events.
    _ear: Arc<Ear>,
}

impl Core {
    /// A number that tells leases and listeners of this client apart.
    pub(crate) fn next_id(&self) -> u64 {
        self.ids.fetch_add(1, Ordering::Relaxed)
    }

    /// The error where other data lie in the place of a key of the lock.
    pub(crate) fn foreign(&self, key: &LockKey, family: Family, part: KeyPart) -> LockError {
        let name = self.store.name_of(key, family, part);
        LockError::from_store(StoreError::foreign(name.as_deref(), part)).with_key(key)
    }
}

/// What a client hears from its store. It does not keep the client.
struct Ear(Weak<Core>);

impl Listener for Ear {
    fn tell(&self, event: &StoreEvent) {
        let Some(core) = self.0.upgrade() else { return };
        match event {
            StoreEvent::Granted { hold, grant } => {
                // Nobody waits under that token any more: it is held by now, as a reply told, or was given up, and the store may
                // have heard of that before it came to grant.
                if !core.gates.pushed(hold, *grant) && core.driver.is_given_up(hold.token) {
                    core.driver
                        .clean_up(&core, CleanUp::abandon(hold.clone(), grant.ttl, None));
                }
            }
            StoreEvent::Kept { key, family, ttl } => core.gates.kept(key, *family, *ttl),
            StoreEvent::Revoked { token } => {
                let holdings = core.driver.holdings();
                if let Some(holding) = holdings
                    .iter()
                    .find(|holding| holding.hold().token == *token)
                {
                    holding.lose(Loss::Revoked);
                }
            }
            StoreEvent::Disconnected => {
                // First, so that no lock is handed off meanwhile.
                for Baton { hold, lease, .. } in core.gates.store_lost() {
                    core.driver
                        .clean_up(&core, CleanUp::release(Release::new(hold), lease.length()));
                }
                let holdings = core.driver.holdings();
                holdings
                    .iter()
                    .for_each(|holding| holding.hurry(CHECK_WITHIN.mul_f64(rand::random())));
            }
        }
    }
}

/// Where locks come from. Clones share everything; one client per process and store is enough.
///
/// It is used within a Tokio runtime that has its timers enabled (`enable_all`, as `#[tokio::main]` does); elsewhere its calls
/// are refused as `NoRuntime`. Renewal runs as a task
/// there: on a runtime of one thread, code that blocks for a lease loses its locks. A client, its requests, its guards and
/// their views keep the connection open.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), lock_runtime::LockError> {
/// use lock_runtime::LockClient;
///
/// let locks = LockClient::in_memory();
/// let guard = locks.exclusive("order:42").acquire().await?;
/// println!("mine, with fencing token {}", guard.fence());
/// guard.release().await?;
/// locks.shutdown().await;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct LockClient {
    core: Arc<Core>,
    /// The last clone tells the driver to end.
    _clones: Arc<Clones>,
}

struct Clones(Arc<Core>);

impl Drop for Clones {
    fn drop(&mut self) {
        self.0.driver.orphan();
    }
}

impl LockClient {
    /// A client of a new store in this process: locks among tasks, for development, tests and single processes.
    pub fn in_memory() -> Self {
        Self::with_store(Arc::new(MemoryStore::new()))
    }

    /// Connects to the store that `url` names, with all defaults; [`builder`](Self::builder) can do more.
    ///
    /// | URL | for |
    /// |---|---|
    /// | `memory:`, `memory://` or `memory` | a new store in this process |
    /// | `redis://[[user]:password@]host[:port][/db]` | one Redis server; or `unix:///path` |
    /// | `redis+sentinel://[[user]:password@]host[:26379][,host...]/name[/db]` | the primary that the Sentinels call so; `?sentinel_user=..&sentinel_password=..&min_replicas=1&replica_timeout=50ms` where they are needed |
    /// | `redis+cluster://[[user]:password@]host[:port][,host...]` | a Redis Cluster, which any of its nodes will do for |
    /// | `redlock:redis://..,redis://..,redis://..` | several independent servers, of which a majority has to agree |
    ///
    /// `rediss` instead of `redis` is over TLS (feature `rustls`).
    ///
    /// # Errors
    /// - `InvalidUrl`: the URL names no store, or a database that the server does not have, or needs a feature that is not
    ///   compiled in.
    /// - `NoRuntime`: the call is made outside of a Tokio runtime, or in one without timers. `memory:` needs none.
    /// - `Unavailable`, `Unauthenticated`, `Forbidden`, `NotRedis`, `ReadOnly`, within 3 s: what is wrong with the server.
    ///
    /// # Cancellation
    /// Dropping the future closes the connection.
    pub async fn connect(url: &str) -> Result<Self, LockError> {
        Self::builder().connect(url).await
    }

    /// A client with other than the default settings.
    pub fn builder() -> LockClientBuilder {
        LockClientBuilder::default()
    }

    /// A client of a store of your own.
    pub fn with_store(store: Arc<dyn Store>) -> Self {
        Self::builder().with_store(store)
    }

    /// A lock with one holder. A writer among [`read`](Self::read)ers is the same.
    pub fn exclusive(&self, key: impl IntoLockKey) -> LockRequest {
        self.request(key, LockSpec::exclusive())
    }

    /// The same as [`exclusive`](Self::exclusive), for read/write locks.
    pub fn write(&self, key: impl IntoLockKey) -> LockRequest {
        self.exclusive(key)
    }

    /// An exclusive lock that a flow of work can enter again. See [`LockSpec::reentrant`].
    pub fn reentrant(&self, key: impl IntoLockKey) -> LockRequest {
        self.exclusive(key).reentrant()
    }

    /// A share of a read/write lock: many readers, no writer.
    pub fn read(&self, key: impl IntoLockKey) -> LockRequest {
        self.request(key, LockSpec::shared())
    }

    /// One of `permits`. The number is part of the lock: asking with another one while somebody holds it is `ModeMismatch`.
    pub fn permits(&self, key: impl IntoLockKey, permits: NonZeroU32) -> LockRequest {
        self.request(key, LockSpec::permits(permits))
    }

    /// Several keys at once, each exclusive. They are taken in one order everywhere, so two requests cannot wait for each
    /// other; without waiting they are taken all or none.
    pub fn all(&self, keys: impl IntoIterator<Item = impl IntoLockKey>) -> LockRequest {
        self.request_all(keys, LockSpec::exclusive())
    }

    /// A lock as `spec` says.
    pub fn request(&self, key: impl IntoLockKey, spec: LockSpec) -> LockRequest {
        LockRequest::one(self.core.clone(), key, spec)
    }

    /// Several keys at once, each as `spec` says; see [`all`](Self::all).
    pub fn request_all(
        &self,
        keys: impl IntoIterator<Item = impl IntoLockKey>,
        spec: LockSpec,
    ) -> LockRequest {
        LockRequest::all(self.core.clone(), keys, spec)
    }

    /// Who holds the lock and who stands in line for it, as the store sees it now.
    ///
    /// # Errors
    /// `InvalidKey`, `ForeignKey`, `NoRuntime`, `Unavailable`, and what the server may object to.
    ///
    /// # Cancellation
    /// Dropping the future has no effect.
    pub async fn inspect(&self, key: impl IntoLockKey) -> Result<Inspection, LockError> {
        self.inspect_family(key, Family::Lock).await
    }

    /// Who holds the permits of that name and who stands in line for one, as the store sees it now.
    ///
    /// # Errors
    /// As [`inspect`](Self::inspect).
    ///
    /// # Cancellation
    /// Dropping the future has no effect.
    pub async fn inspect_permits(&self, key: impl IntoLockKey) -> Result<Inspection, LockError> {
        self.inspect_family(key, Family::Permits).await
    }

    async fn inspect_family(
        &self,
        key: impl IntoLockKey,
        family: Family,
    ) -> Result<Inspection, LockError> {
        let key = key.into_lock_key()?;
        self.bounded(self.core.store.inspect(&key, family))
            .await
            .map_err(|error| error.with_key(&key))
    }

    /// Takes the lock away from whoever holds it, who is told at once (or finds out at its next renewal, if the message is lost), and
    /// hands it to the next in line.
    ///
    /// For operators: whoever held it may still be at work. A lock without an expiry, which this library never makes, is left
    /// alone unless `scope` says otherwise.
    ///
    /// # Errors
    /// `InvalidKey`, `ForeignKey`, `NoRuntime`, `Unavailable`, and what the server may object to.
    ///
    /// # Cancellation
    /// Dropping the future leaves open whether it was revoked.
    pub async fn revoke(
        &self,
        key: impl IntoLockKey,
        scope: RevokeScope,
    ) -> Result<RevokeReply, LockError> {
        self.revoke_family(key, Family::Lock, scope).await
    }

    /// Takes the permits of that name away from all who hold one. See [`revoke`](Self::revoke).
    ///
    /// # Errors
    /// As `revoke`.
    ///
    /// # Cancellation
    /// As `revoke`.
    pub async fn revoke_permits(&self, key: impl IntoLockKey) -> Result<RevokeReply, LockError> {
        self.revoke_family(key, Family::Permits, RevokeScope::Leased)
            .await
    }

    async fn revoke_family(
        &self,
        key: impl IntoLockKey,
        family: Family,
        scope: RevokeScope,
    ) -> Result<RevokeReply, LockError> {
        let key = key.into_lock_key()?;
        let held_here: Vec<_> = self
            .core
            .driver
            .holdings()
            .into_iter()
            .filter(|holding| holding.hold().key == key && holding.hold().mode.family() == family)
            .collect();
        let reply = self
            .bounded(self.core.store.revoke(&key, family, scope))
            .await
            .map_err(|error| error.with_key(&key))?;
        match reply {
            RevokeReply::Revoked => {
                held_here
                    .iter()
                    .for_each(|holding| holding.lose(Loss::Revoked));
                self.core.gates.released(&key, family);
            }
            RevokeReply::ForeignKey => return Err(self.core.foreign(&key, family, KeyPart::Lock)),
            RevokeReply::NotHeld | RevokeReply::Endless => {}
        }
        Ok(reply)
    }

    async fn bounded<T>(
        &self,
        call: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, LockError> {
        runtime::check()?;
        within(call_timeout(DEFAULT_LEASE), call)
            .await
            .map_err(LockError::from_store)
    }

    /// Refuses new requests, sends those that wait home as `ShuttingDown`, and waits until everything that was dropped has
    /// been given back, for 3 s at most. Guards in hand stay valid and are renewed until they are released.
    ///
    /// Call it at the end of `main`: what is dropped after that outlives the process until its lease ends.
    ///
    /// # Cancellation
    /// Dropping the future leaves the client shut down.
    ///
    /// # Panics
    /// When the future is polled first outside of a Tokio runtime, or in one without timers. The message names the line that
    /// called `shutdown`; the client is shut down by then.
    #[track_caller]
    pub fn shutdown(&self) -> impl Future<Output = ()> + Send {
        let caller = Location::caller();
        async move {
            self.core.gates.close();
            #[expect(
                clippy::panic,
                reason = "there is no error to return, and what was dropped is still to be given back"
            )]
            if let Err(error) = runtime::check() {
                panic!("`LockClient::shutdown`, called at {caller}: {error}");
            }
            // Those who wait leave their places in line to be given up.
            let _ = timeout(LEAVING, self.core.gates.emptied()).await;
            let given_back = async {
                self.core.driver.drained(&self.core).await;
                self.core.store.settled().await;
            };
            if timeout(SHUTDOWN, given_back).await.is_err() {
                tracing::warn!(
                    "shut down before everything was given back; the leases end by themselves"
                );
            }
        }
    }
}

impl fmt::Debug for LockClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockClient")
            .field("store", &self.core.store)
            .field("defaults", &self.core.defaults)
            .finish_non_exhaustive()
    }
}

/// Settings of a client. The last call is the one that makes it: [`connect`](Self::connect), [`in_memory`](Self::in_memory), ...
#[must_use = "a builder does nothing until it makes a client"]
#[derive(Clone, Debug)]
pub struct LockClientBuilder {
    #[cfg_attr(
        not(feature = "redis"),
        expect(
            dead_code,
            reason = "only stores outside of this process have names to keep apart"
        )
    )]
    namespace: String,
    defaults: LockSpec,
    max_waiters: usize,
    max_waiters_in_all: usize,
    #[cfg(feature = "redis")]
    settings: crate::store::redis::Settings,
    longest_lease: Duration,
}

impl Default for LockClientBuilder {
    fn default() -> Self {
        Self {
            namespace: "lock".into(),
            defaults: LockSpec::exclusive(),
            max_waiters: MAX_WAITERS,
            max_waiters_in_all: MAX_WAITERS_IN_ALL,
            #[cfg(feature = "redis")]
            settings: crate::store::redis::Settings::default(),
            longest_lease: DEFAULT_LEASE,
        }
    }
}

impl LockClientBuilder {
    /// The beginning of every name on a server, `lock` by default: 1 to 64 bytes without `:`, braces or control characters, and
    /// neither `f` nor `q`. A store in this process, or of your own, has no use for it.
    pub fn namespace(self, namespace: impl Into<String>) -> Self {
        Self {
            namespace: namespace.into(),
            ..self
        }
    }

    /// What holds where a request does not say otherwise. The mode of `defaults` says nothing.
    pub fn defaults(self, defaults: LockSpec) -> Self {
        Self { defaults, ..self }
    }

    /// How many requests may wait for one key in this process behind the one whose turn is next, 10,000 by default; more are
    /// `Overloaded` at once. [`LockSpec::max_waiters`] can say less for some.
    ///
    /// Each costs about the memory of its future. Set it to what can be served within the wait: those beyond would time out anyway.
    pub fn max_waiters(self, max_waiters: usize) -> Self {
        Self {
            max_waiters,
            ..self
        }
    }

    /// How many requests may wait in this process for all keys together, 100,000 by default; more are `Overloaded` at once, also
    /// where the lock is free.
    ///
    /// Those count that wait, and those that are just being granted: whoever is ready to wait stands in the line of its lock
    /// until it is answered. Readers and permits that are let in at their first question do not, nor does what
    /// does not wait. A request for several keys stands in one line at a time.
    pub fn max_waiters_in_all(self, max_waiters_in_all: usize) -> Self {
        Self {
            max_waiters_in_all,
            ..self
        }
    }

    /// Tells of a grant only when `replicas` replicas have it, and waits for them for at most `timeout`, 1 ms to 400 ms. The URL
    /// of Sentinels may say the same (`?min_replicas=1&replica_timeout=50ms`), and comes first.
    ///
    /// Without it the promotion of a replica that lags behind loses grants, and a lock may then have two holders until the
    /// first one finds out, at its next renewal. With it each grant costs a round trip more, and where fewer replicas answer
    /// in time no lock is granted: the request is `Unavailable`, or goes on waiting. Renewals are not waited for. It
    /// narrows the gap and does not close it, as the guide's [page on Redis](crate::guide::redis#what-a-failover-may-lose) says.
    ///
    /// For one server, or the one that Sentinels name; the user needs `+wait`.
    #[cfg(feature = "redis")]
    pub fn min_replicas(mut self, replicas: NonZeroU32, timeout: Duration) -> Self {
        self.settings.min_replicas = Some(crate::store::redis::MinReplicas {
            count: replicas,
            timeout,
        });
        self
    }

    /// Trusts the authorities of these certificates (PEM), instead of those that the system trusts, wherever the URL says TLS
    /// (`rediss://`).
    #[cfg(feature = "rustls")]
    pub fn root_certificate(mut self, pem: impl Into<Vec<u8>>) -> Self {
        self.settings.root_certificate = Some(pem.into());
        self
    }

    /// Shows this certificate, with its private key (both PEM), to a server that asks for one, wherever the URL says TLS.
    #[cfg(feature = "rustls")]
    pub fn client_certificate(
        mut self,
        certificate: impl Into<Vec<u8>>,
        key: impl Into<Vec<u8>>,
    ) -> Self {
        let (certificate, key) = (certificate.into(), key.into());
        self.settings.client_certificate =
            Some(crate::store::redis::ClientCertificate { certificate, key });
        self
    }

    /// The longest lease that may be asked for over several servers ([`redlock`](Self::redlock)), 30 s by default. The same for all
    /// clients.
    ///
    /// A lease that is left open is no longer than this. It is also how long a server keeps away after a restart, or when it is
    /// used in a namespace for the first time: it may have forgotten a lock. Longer, and that takes longer. Other stores have no
    /// use for it.
    pub fn longest_lease(self, longest_lease: Duration) -> Self {
        Self {
            longest_lease,
            ..self
        }
    }

    /// Connects to the store that `url` names. See [`LockClient::connect`].
    ///
    /// # Errors
    /// As [`LockClient::connect`], and `InvalidSpec` for a bad namespace.
    ///
    /// # Cancellation
    /// Dropping the future closes the connection.
    pub async fn connect(self, url: &str) -> Result<LockClient, LockError> {
        match url.strip_prefix("memory") {
            Some("" | ":" | "://") => return self.in_memory(),
            Some(rest) if rest.starts_with(':') => {
                let message = "a store in this process has no address: its URL is \"memory:\" and nothing else; \
                               that of a Redis server is redis://user:password@host:6379/0";
                return Err(LockError::new(LockErrorKind::InvalidUrl, message));
            }
            _ => {}
        }
        #[cfg(feature = "redis")]
        if let Some(urls) = crate::store::redis::redlock::urls_of(url)? {
            return self.redlock(urls).await;
        }
        #[cfg(feature = "redis")]
        return {
            self.check()?;
            let connecting = crate::store::redis::RedisStore::connect_with(
                url,
                &self.namespace,
                self.settings.clone(),
            );
            self.over(connecting.await?)
        };
        #[cfg(not(feature = "redis"))]
        Err(LockError::new(
            LockErrorKind::InvalidUrl,
            "only \"memory:\" is compiled in; enable the feature `redis` for \"redis://host:6379/0\"",
        ))
    }

    /// Connects to whichever server the Sentinels name as the primary, now and after each failover.
    ///
    /// The host of `primary` is the name by which they know it, and its credentials and database are for that server:
    /// `redis://app:secret@mymaster/0`. `sentinels` are their own addresses, with credentials of their own:
    /// `redis://:secret@10.0.0.1:26379`. Each may be `rediss://`. [`LockClient::connect`] takes the same in one URL.
    ///
    /// # Errors
    /// As [`LockClient::connect`].
    ///
    /// # Cancellation
    /// Dropping the future closes the connection.
    #[cfg(feature = "redis")]
    pub async fn sentinel(
        self,
        primary: &str,
        sentinels: impl IntoIterator<Item = impl AsRef<str>>,
    ) -> Result<LockClient, LockError> {
        self.check()?;
        // Collected first: the future need not be as sendable as what it is given.
        let sentinels: Vec<_> = sentinels
            .into_iter()
            .map(|url| url.as_ref().to_owned())
            .collect();
        let (namespace, settings) = (&self.namespace, &self.settings);
        let store =
            crate::store::redis::RedisStore::by_sentinels(primary, &sentinels, namespace, settings)
                .await?;
        self.over(store)
    }

    /// Connects to several independent Redis servers, of which a majority has to agree: an odd number, at least three, in the
    /// same order for all clients. A server that does not answer now is waited for later.
    ///
    /// See [`QuorumStore`](crate::store::QuorumStore) for what that gives.
    ///
    /// # Errors
    /// As [`LockClient::connect`]; `InvalidSpec` for another number of servers; `Unavailable` if too few answer, with what each
    /// of them said.
    ///
    /// # Cancellation
    /// Dropping the future closes the connections.
    #[cfg(feature = "redis")]
    pub async fn redlock(
        mut self,
        urls: impl IntoIterator<Item = impl AsRef<str>>,
    ) -> Result<LockClient, LockError> {
        self.check()?;
        self.settings
            .refuse_replicas("several servers that vote are no replicas of each other")?;
        let open = LockSpec::exclusive().lease(self.longest_lease.min(DEFAULT_LEASE));
        self.defaults = self.defaults.or(&open);
        // Better found at the start than at the first request.
        let lease = self.defaults.terms(&LockSpec::exclusive())?.lease;
        if lease > self.longest_lease {
            let message = format!(
                "the default lease of {lease:?} is longer than the `longest_lease` of {:?}; set one of them",
                self.longest_lease
            );
            return Err(LockError::new(LockErrorKind::InvalidSpec, message));
        }
        let urls: Vec<_> = urls.into_iter().collect();
        let urls: Vec<_> = urls.iter().map(AsRef::as_ref).collect();
        self.over(
            crate::store::redis::redlock::connect(
                &urls,
                &self.namespace,
                self.longest_lease,
                &self.settings,
            )
            .await?,
        )
    }

    /// Uses a ready `redis::Client`: its address, credentials and TLS settings. Connections are made anew, over RESP3.
    ///
    /// # Errors
    /// As [`LockClient::connect`].
    ///
    /// # Cancellation
    /// Dropping the future closes the connection.
    #[cfg(feature = "redis")]
    pub async fn redis_client(self, client: redis::Client) -> Result<LockClient, LockError> {
        self.check()?;
        let settings = self.settings.clone();
        self.over(
            crate::store::redis::RedisStore::from_client_with(client, &self.namespace, settings)
                .await?,
        )
    }

    /// Uses the Redis Cluster that the `seeds` belong to: URLs of some of its nodes, `redis://[user[:password]@]host[:port]` or
    /// `rediss://..`. One that answers is enough; the others are found by it, and spoken to as the first seed.
    ///
    /// ```no_run
    /// # use lock_runtime::LockClient;
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), lock_runtime::LockError> {
    /// let locks = LockClient::builder().cluster(["redis://10.0.0.1:6379", "redis://10.0.0.2:6379"]).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`LockClient::connect`].
    ///
    /// # Cancellation
    /// Dropping the future closes the connections.
    #[cfg(feature = "redis")]
    pub async fn cluster(
        self,
        seeds: impl IntoIterator<Item = impl AsRef<str>>,
    ) -> Result<LockClient, LockError> {
        self.check()?;
        self.over(
            crate::store::redis::RedisStore::cluster_with(seeds, &self.namespace, &self.settings)
                .await?,
        )
    }

    /// Uses a new store in this process.
    ///
    /// # Errors
    /// `InvalidSpec` for defaults that cannot be meant.
    pub fn in_memory(self) -> Result<LockClient, LockError> {
        self.check()?;
        #[cfg(feature = "redis")]
        self.settings
            .refuse_replicas("a store in this process has none")?;
        self.over(MemoryStore::new())
    }

    /// Uses a store of your own, for which the settings of connections mean nothing.
    pub fn with_store(self, store: Arc<dyn Store>) -> LockClient {
        let Self {
            defaults,
            max_waiters,
            max_waiters_in_all,
            ..
        } = self;
        let gates = Gates::new(max_waiters, max_waiters_in_all);
        let core = Arc::new_cyclic(|core: &Weak<Core>| {
            let ear = Arc::new(Ear(core.clone()));
            let listener: Weak<Ear> = Arc::downgrade(&ear);
            store.listen(listener);
            Core {
                store,
                gates,
                driver: Driver::default(),
                defaults,
                ids: AtomicU64::new(0),
                _ear: ear,
            }
        });
        LockClient {
            _clones: Arc::new(Clones(core.clone())),
            core,
        }
    }

    /// Defaults that cannot be meant are better found at the start than at the first request.
    fn check(&self) -> Result<(), LockError> {
        self.defaults.check()?;
        LockSpec::exclusive().lease(self.longest_lease).check()?;
        #[cfg(feature = "redis")]
        self.settings.check()?;
        Ok(())
    }

    fn over(&self, store: impl Store) -> Result<LockClient, LockError> {
        Ok(self.clone().with_store(Arc::new(store)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whatever is compiled in.
    #[tokio::test]
    async fn a_store_in_this_process_needs_no_feature() {
        for url in ["memory:", "memory://", "memory"] {
            let locks = LockClient::connect(url)
                .await
                .unwrap_or_else(|error| panic!("{url:?}: {error}"));
            locks
                .exclusive("k")
                .acquire()
                .await
                .unwrap()
                .release()
                .await
                .unwrap();
        }
        for url in [
            "memory:orders",
            "memory://orders",
            "mem:",
            "memories",
            "Memory:",
        ] {
            let error = LockClient::connect(url).await.unwrap_err();
            assert_eq!(error.kind(), LockErrorKind::InvalidUrl, "{error}");
            for word in ["memory:", "redis://"] {
                assert!(error.to_string().contains(word), "{url:?}: {error}");
            }
        }
    }

    #[cfg(all(feature = "redis", not(feature = "rustls")))]
    #[tokio::test]
    async fn a_url_for_tls_is_right_and_names_the_missing_feature() {
        let mut errors = Vec::new();
        for url in [
            "rediss://:hunter2@127.0.0.1:6379/0",
            "valkeys://127.0.0.1",
            "rediss+sentinel://127.0.0.1/mymaster",
            "rediss+cluster://127.0.0.1",
            "redlock:rediss://10.0.0.1,rediss://10.0.0.2,rediss://10.0.0.3",
        ] {
            errors.push(LockClient::connect(url).await.unwrap_err());
        }
        let builder = LockClient::builder;
        errors.push(
            builder()
                .sentinel("rediss://mymaster", ["redis://10.0.0.1"])
                .await
                .unwrap_err(),
        );
        errors.push(
            builder()
                .sentinel("redis://mymaster", ["rediss://10.0.0.1"])
                .await
                .unwrap_err(),
        );
        errors.push(builder().cluster(["rediss://10.0.0.1"]).await.unwrap_err());
        errors.push(
            builder()
                .redlock(["rediss://10.0.0.1", "redis://b", "redis://c"])
                .await
                .unwrap_err(),
        );
        for error in errors {
            assert_eq!(error.kind(), LockErrorKind::InvalidUrl);
            let message = "the URL asks for TLS, which is not compiled in; enable the feature `rustls` of lock-runtime";
            assert_eq!(error.to_string(), message);
        }
    }
}
