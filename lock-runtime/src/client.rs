//! How a user gets in: [`LockClient`] and its builder.

use std::{
    fmt,
    num::NonZeroU32,
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
    error::{LockError, Loss},
    gate::Gates,
    key::IntoLockKey,
    request::LockRequest,
    spec::{DEFAULT_LEASE, Family, LockSpec, call_timeout},
    store::{Inspection, Listener, MemoryStore, RevokeReply, RevokeScope, Store, StoreError, StoreEvent},
};

/// So many requests may wait for one key in this process.
const MAX_WAITERS: usize = 10_000;
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
                    core.driver.clean_up(&core, CleanUp::abandon(hold.clone(), grant.ttl, None));
                }
            }
            StoreEvent::Kept { key, family, ttl } => core.gates.kept(key, *family, *ttl),
            StoreEvent::Revoked { token } => {
                let holdings = core.driver.holdings();
                if let Some(holding) = holdings.iter().find(|holding| holding.hold().token == *token) {
                    holding.lose(Loss::Revoked);
                }
            }
            StoreEvent::Disconnected => {
                let holdings = core.driver.holdings();
                holdings.iter().for_each(|holding| holding.hurry(CHECK_WITHIN.mul_f64(rand::random())));
                core.gates.ask_soon();
            }
        }
    }
}

/// Where locks come from. Clones share everything; one client per process and store is enough.
///
/// It is used within a tokio runtime that has its timers enabled (`enable_all`, as `#[tokio::main]` does). Renewal runs as a task
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
    /// `memory:` · `redis://[user[:password]@]host[:port][/db]` · `redis+cluster://[user[:password]@]host[:port][,host[:port]...]` for a
    /// Redis Cluster, which any of its nodes will do for · `rediss://` and `rediss+cluster://` likewise, over TLS (feature `rustls`)
    ///
    /// # Errors
    /// `InvalidUrl`, `Unavailable`, `Unauthenticated`, `Forbidden`, `NotRedis`, `ReadOnly`; within 3 s.
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
        LockRequest::all(self.core.clone(), keys, LockSpec::exclusive())
    }

    /// A lock as `spec` says.
    pub fn request(&self, key: impl IntoLockKey, spec: LockSpec) -> LockRequest {
        LockRequest::one(self.core.clone(), key, spec)
    }

    /// Who holds the lock and who stands in line for it, as the store sees it now.
    ///
    /// # Errors
    /// `InvalidKey`, `ForeignKey`, `Unavailable`, and what the server may object to.
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

    async fn inspect_family(&self, key: impl IntoLockKey, family: Family) -> Result<Inspection, LockError> {
        let key = key.into_lock_key()?;
        self.bounded(self.core.store.inspect(&key, family)).await.map_err(|error| error.with_key(&key))
    }

    /// Takes the lock away from whoever holds it, who is told at once (or finds out at its next renewal, if the message is lost), and
    /// hands it to the next in line.
    ///
    /// For operators: whoever held it may still be at work. A lock without an expiry, which this library never makes, is left
    /// alone unless `scope` says otherwise.
    ///
    /// # Errors
    /// `InvalidKey`, `Unavailable`, and what the server may object to.
    ///
    /// # Cancellation
    /// Dropping the future leaves open whether it was revoked.
    pub async fn revoke(&self, key: impl IntoLockKey, scope: RevokeScope) -> Result<RevokeReply, LockError> {
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
        self.revoke_family(key, Family::Permits, RevokeScope::Leased).await
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
        let reply =
            self.bounded(self.core.store.revoke(&key, family, scope)).await.map_err(|error| error.with_key(&key))?;
        if reply == RevokeReply::Revoked {
            held_here.iter().for_each(|holding| holding.lose(Loss::Revoked));
            self.core.gates.released(&key, family);
        }
        Ok(reply)
    }

    async fn bounded<T>(&self, call: impl Future<Output = Result<T, StoreError>>) -> Result<T, LockError> {
        within(call_timeout(DEFAULT_LEASE), call).await.map_err(LockError::from_store)
    }

    /// Refuses new requests, sends those that wait home as `ShuttingDown`, and waits until everything that was dropped has
    /// been given back, for 3 s at most. Guards in hand stay valid and are renewed until they are released.
    ///
    /// Call it at the end of `main`: what is dropped after that outlives the process until its lease ends.
    ///
    /// # Cancellation
    /// Dropping the future leaves the client shut down.
    pub async fn shutdown(&self) {
        self.core.gates.close();
        // Those who wait leave their places in line to be given up.
        let _ = timeout(LEAVING, self.core.gates.emptied()).await;
        if timeout(SHUTDOWN, self.core.driver.drained(&self.core)).await.is_err() {
            tracing::warn!("shut down before everything was given back; the leases end by themselves");
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
        expect(dead_code, reason = "only stores outside of this process have names to keep apart")
    )]
    namespace: String,
    defaults: LockSpec,
    max_waiters: usize,
}

impl Default for LockClientBuilder {
    fn default() -> Self {
        Self { namespace: "lock".into(), defaults: LockSpec::exclusive(), max_waiters: MAX_WAITERS }
    }
}

impl LockClientBuilder {
    /// The beginning of every name on a server, `lock` by default: 1 to 64 bytes without `:`, braces or control characters, and
    /// neither `f` nor `q`. A store in this process, or of your own, has no use for it.
    pub fn namespace(self, namespace: impl Into<String>) -> Self {
        Self { namespace: namespace.into(), ..self }
    }

    /// What holds where a request does not say otherwise. The mode of `defaults` says nothing.
    pub fn defaults(self, defaults: LockSpec) -> Self {
        Self { defaults, ..self }
    }

    /// How many requests may wait for one key in this process, 10,000 by default; more are `Overloaded` at once.
    ///
    /// Each costs about the memory of its future. Set it to what can be served within the wait: those beyond would time out anyway.
    pub fn max_waiters(self, max_waiters: usize) -> Self {
        Self { max_waiters, ..self }
    }

    /// Connects to the store that `url` names. See [`LockClient::connect`].
    ///
    /// # Errors
    /// As [`LockClient::connect`], and `InvalidSpec` for a bad namespace.
    ///
    /// # Cancellation
    /// Dropping the future closes the connection.
    pub async fn connect(self, url: &str) -> Result<LockClient, LockError> {
        if url == "memory:" {
            return self.in_memory();
        }
        #[cfg(feature = "redis")]
        return self.check()?.over(crate::store::redis::RedisStore::connect(url, &self.namespace).await?);
        #[cfg(not(feature = "redis"))]
        Err(LockError::new(
            crate::LockErrorKind::InvalidUrl,
            "only \"memory:\" is compiled in; enable the feature `redis` for \"redis://host:6379/0\"",
        ))
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
        self.check()?.over(crate::store::redis::RedisStore::from_client(client, &self.namespace).await?)
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
    pub async fn cluster(self, seeds: impl IntoIterator<Item = impl AsRef<str>>) -> Result<LockClient, LockError> {
        self.check()?.over(crate::store::redis::RedisStore::cluster(seeds, &self.namespace).await?)
    }

    /// Uses a new store in this process.
    ///
    /// # Errors
    /// `InvalidSpec` for defaults that cannot be meant.
    pub fn in_memory(self) -> Result<LockClient, LockError> {
        self.check()?.over(MemoryStore::new())
    }

    /// Uses a store of your own.
    pub fn with_store(self, store: Arc<dyn Store>) -> LockClient {
        let Self { defaults, max_waiters, .. } = self;
        let gates = Gates::new(max_waiters);
        let core = Arc::new_cyclic(|core: &Weak<Core>| {
            let ear = Arc::new(Ear(core.clone()));
            let listener: Weak<Ear> = Arc::downgrade(&ear);
            store.listen(listener);
            Core { store, gates, driver: Driver::default(), defaults, ids: AtomicU64::new(0), _ear: ear }
        });
        LockClient { _clones: Arc::new(Clones(core.clone())), core }
    }

    /// Defaults that cannot be meant are better found at the start than at the first request.
    fn check(&self) -> Result<&Self, LockError> {
        self.defaults.terms(&LockSpec::exclusive()).map(|_| self)
    }

    fn over(&self, store: impl Store) -> Result<LockClient, LockError> {
        Ok(self.clone().with_store(Arc::new(store)))
    }
}
