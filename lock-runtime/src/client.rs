//! [`LockClient`], the entry point of the crate, and its builder.

use std::{
    fmt,
    num::NonZeroU32,
    panic::Location,
    sync::{Arc, Weak},
    time::Duration,
};

use tokio::time::timeout;

#[cfg(feature = "redis")]
use crate::store::redis::RedisOptions;
use crate::{
    call::within,
    core::Core,
    driver,
    error::{LockError, LockErrorKind},
    key::IntoLockKey,
    protocol::{Session, WaiterLimits},
    request::LockRequest,
    runtime,
    spec::{DEFAULT_LEASE, LockKind, LockSpec, call_timeout},
    store::{
        Inspection, KeyPart, Listener, MemoryStore, RevokeReply, RevokeScope, Store, StoreError,
        StoreEvent,
    },
};

/// Default limit on the requests that wait for one key in this process.
const MAX_WAITERS: usize = 10_000;
/// Default limit on the requests that wait for all keys together in this process.
const MAX_WAITERS_IN_ALL: usize = 100_000;
/// How long `shutdown` waits for pending releases: two call time-outs and the deadline of a
/// delayed request.
const SHUTDOWN: Duration = Duration::from_secs(3);

/// How long `shutdown` waits for waiters to leave their queues. A waiter whose future is polled
/// needs less time.
const LEAVING: Duration = Duration::from_millis(500);

/// Passes the events of the store to the session. It does not keep the client alive.
struct EventListener(Weak<Core>);

impl Listener for EventListener {
    fn on_event(&self, event: &StoreEvent) {
        if let Some(core) = self.0.upgrade() {
            core.visit(|state, cx| state.session.event(event, cx));
        }
    }
}

/// A client for acquiring locks.
///
/// Clones share all state. One client per process and store is enough.
///
/// Use the client within a Tokio runtime that has timers enabled (`enable_all`, as
/// `#[tokio::main]` does); elsewhere its calls return `NoRuntime`. A task on that runtime renews
/// the leases: on a single-threaded runtime, code that blocks for the length of a lease loses its
/// locks.
///
/// The client, its requests, its guards and their views keep the connection open.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), lock_runtime::LockError> {
/// use lock_runtime::LockClient;
///
/// let locks = LockClient::in_memory();
/// let guard = locks.exclusive("order:42").acquire().await?;
/// println!("acquired with fencing token {}", guard.fence());
/// guard.release().await?;
/// locks.shutdown().await;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct LockClient {
    core: Arc<Core>,
    /// Lets the driver stop when the last clone is dropped.
    _clones: Arc<Clones>,
}

struct Clones(Arc<Core>);

impl Drop for Clones {
    fn drop(&mut self) {
        driver::orphan(&self.0);
    }
}

impl LockClient {
    /// Creates a client of a new in-memory store.
    ///
    /// It locks among the tasks of this process: for development, tests and applications that run
    /// as a single process.
    pub fn in_memory() -> Self {
        Self::with_store(Arc::new(MemoryStore::new()))
    }

    /// Connects to the store at `url` with default settings.
    ///
    /// Use [`builder`](Self::builder) to change the settings. The form of the URL selects the
    /// store:
    ///
    /// - `memory:`, `memory://` or `memory`: a new store in this process.
    /// - `redis://[[user]:password@]host[:port][/db]` or `unix:///path`: one Redis server.
    /// - `redis+sentinel://[[user]:password@]host[:26379][,host...]/name[/db]`: the primary that
    ///   the Sentinels know as `name`. Optional parameters:
    ///   `?sentinel_user=..&sentinel_password=..&min_replicas=1&replica_timeout=50ms`.
    /// - `redis+cluster://[[user]:password@]host[:port][,host...]`: a Redis Cluster, found
    ///   through any of its nodes.
    /// - `redlock:redis://..,redis://..,redis://..`: several independent servers, of which a
    ///   majority has to agree.
    ///
    /// With `rediss` instead of `redis` the connection uses TLS (feature `rustls`). `valkey` and
    /// `valkeys` stand for `redis` and `rediss`; the case of a scheme does not matter.
    ///
    /// # Errors
    /// - `InvalidUrl` if the URL names no store, names a database that the server does not have,
    ///   or needs a feature that is not compiled in.
    /// - `NoRuntime` outside a Tokio runtime, or in one without timers. `memory:` needs no
    ///   runtime.
    /// - `Unavailable`, `Unauthenticated`, `Forbidden`, `WrongServer` or `ReadOnly`, within 3 s, if
    ///   the server cannot be reached or cannot be used.
    /// - `IncompatibleFormat` if a version of this library with another format of its keys uses the
    ///   namespace.
    ///
    /// # Cancellation
    /// Dropping the future closes the connection.
    pub async fn connect(url: &str) -> Result<Self, LockError> {
        Self::builder().connect(url).await
    }

    /// Returns a builder for a client with custom settings.
    pub fn builder() -> LockClientBuilder {
        LockClientBuilder::default()
    }

    /// Creates a client of a custom [`Store`].
    pub fn with_store(store: Arc<dyn Store>) -> Self {
        Self::builder().build_with_store(store)
    }

    /// Creates a request for an exclusive lock, which has one holder.
    ///
    /// The write lock among [`read`](Self::read) locks is the same.
    pub fn exclusive(&self, key: impl IntoLockKey) -> LockRequest {
        self.request(key, LockSpec::exclusive())
    }

    /// Same as [`exclusive`](Self::exclusive), for read/write locks.
    pub fn write(&self, key: impl IntoLockKey) -> LockRequest {
        self.exclusive(key)
    }

    /// Creates a request for a re-entrant exclusive lock. See [`LockSpec::reentrant`].
    pub fn reentrant(&self, key: impl IntoLockKey) -> LockRequest {
        self.exclusive(key).reentrant()
    }

    /// Creates a request for a shared lock: many readers, no writer.
    pub fn read(&self, key: impl IntoLockKey) -> LockRequest {
        self.request(key, LockSpec::read())
    }

    /// Same as [`read`](Self::read).
    pub fn shared(&self, key: impl IntoLockKey) -> LockRequest {
        self.read(key)
    }

    /// Creates a request for one of `permits` permits.
    ///
    /// The number is part of the lock: while a permit is held, a request with another
    /// number fails with `ModeMismatch`.
    pub fn permits(&self, key: impl IntoLockKey, permits: NonZeroU32) -> LockRequest {
        self.request(key, LockSpec::permits(permits))
    }

    /// Creates a request for several keys at once, each of them exclusive.
    ///
    /// The keys are acquired in the same order everywhere, so two requests cannot deadlock. A
    /// request that does not wait acquires all keys or none.
    pub fn all(&self, keys: impl IntoIterator<Item = impl IntoLockKey>) -> LockRequest {
        self.request_all(keys, LockSpec::exclusive())
    }

    /// Creates a request for a lock with the options of `spec`.
    pub fn request(&self, key: impl IntoLockKey, spec: LockSpec) -> LockRequest {
        LockRequest::one(self.core.clone(), key, spec)
    }

    /// Creates a request for several keys at once with the options of `spec`. See
    /// [`all`](Self::all).
    pub fn request_all(
        &self,
        keys: impl IntoIterator<Item = impl IntoLockKey>,
        spec: LockSpec,
    ) -> LockRequest {
        LockRequest::all(self.core.clone(), keys, spec)
    }

    /// Returns the holders and the waiters of the lock, as the store sees them now.
    ///
    /// # Errors
    /// `InvalidKey`, `ForeignKey`, `NoRuntime`, `Unavailable`, or a refusal of the server, such
    /// as `Forbidden`.
    ///
    /// # Cancellation
    /// Dropping the future has no effect.
    pub async fn inspect(&self, key: impl IntoLockKey) -> Result<Inspection, LockError> {
        self.inspect_kind(key, LockKind::Lock).await
    }

    /// Returns the holders and the waiters of the permits of this name, as the store sees them
    /// now.
    ///
    /// # Errors
    /// Same as [`inspect`](Self::inspect).
    ///
    /// # Cancellation
    /// Dropping the future has no effect.
    pub async fn inspect_permits(&self, key: impl IntoLockKey) -> Result<Inspection, LockError> {
        self.inspect_kind(key, LockKind::Permits).await
    }

    async fn inspect_kind(
        &self,
        key: impl IntoLockKey,
        kind: LockKind,
    ) -> Result<Inspection, LockError> {
        let key = key.into_lock_key()?;
        self.bounded(self.core.store.inspect(&key, kind))
            .await
            .map_err(|error| error.with_key(&key))
    }

    /// Takes the lock away from its holders and hands it off to the next waiter.
    ///
    /// The holders are notified at once. If that message is lost, they notice the loss at their
    /// next renewal.
    ///
    /// This is meant for operators: the former holders may still be at work. A lock without an
    /// expiry, which this library never creates, is left untouched unless `scope` includes it.
    ///
    /// # Errors
    /// `InvalidKey`, `ForeignKey`, `NoRuntime`, `Unavailable`, or a refusal of the server, such
    /// as `Forbidden`.
    ///
    /// # Cancellation
    /// If the future is dropped, the lock may or may not have been revoked.
    pub async fn revoke(
        &self,
        key: impl IntoLockKey,
        scope: RevokeScope,
    ) -> Result<RevokeReply, LockError> {
        self.revoke_kind(key, LockKind::Lock, scope).await
    }

    /// Takes the permits of this name away from all of their holders. See
    /// [`revoke`](Self::revoke).
    ///
    /// # Errors
    /// Same as [`revoke`](Self::revoke).
    ///
    /// # Cancellation
    /// Same as [`revoke`](Self::revoke).
    pub async fn revoke_permits(&self, key: impl IntoLockKey) -> Result<RevokeReply, LockError> {
        self.revoke_kind(key, LockKind::Permits, RevokeScope::Leased)
            .await
    }

    async fn revoke_kind(
        &self,
        key: impl IntoLockKey,
        kind: LockKind,
        scope: RevokeScope,
    ) -> Result<RevokeReply, LockError> {
        let key = key.into_lock_key()?;
        let holders = self
            .core
            .with_state(|state| state.session.holders_of(kind, &key));
        let reply = self
            .bounded(self.core.store.revoke(&key, kind, scope))
            .await
            .map_err(|error| error.with_key(&key))?;
        match reply {
            RevokeReply::Revoked => self
                .core
                .visit(|state, cx| state.session.revoked(kind, &key, &holders, cx)),
            RevokeReply::ForeignKey => return Err(self.core.foreign(&key, kind, KeyPart::Lock)),
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

    /// Shuts the client down.
    ///
    /// New requests are refused, and waiting requests end with `ShuttingDown`. The future then
    /// waits, for at most 3 s, until everything that was dropped has been released. Guards that
    /// still exist stay valid and are renewed until they are released.
    ///
    /// Call it at the end of `main`: a guard that is dropped later leaves its lock held until the
    /// lease expires.
    ///
    /// # Cancellation
    /// Dropping the future leaves the client shut down.
    ///
    /// # Panics
    /// If the future is first polled outside a Tokio runtime, or in one without timers. The
    /// message names the line that called `shutdown`. The client is shut down by then.
    #[track_caller]
    pub fn shutdown(&self) -> impl Future<Output = ()> + Send {
        let caller = Location::caller();
        async move {
            self.core.visit(|state, cx| state.session.close(cx));
            #[expect(
                clippy::panic,
                reason = "there is no error to return, and dropped guards still have to be released"
            )]
            if let Err(error) = runtime::check() {
                panic!("`LockClient::shutdown`, called at {caller}: {error}");
            }
            let given_back = async {
                // First the waiters leave their queues, so that their queue entries are abandoned
                // below.
                let _ = timeout(LEAVING, self.core.until(Session::is_empty)).await;
                self.core.until(Session::is_drained).await;
                self.core.store.settled().await;
            };
            if timeout(SHUTDOWN, given_back).await.is_err() {
                tracing::warn!(
                    "shut down before every lock was released; the remaining leases expire on their own"
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

/// A builder for a [`LockClient`].
///
/// The methods that begin with `connect` or `build` create the client.
#[must_use = "a builder does nothing until it makes a client"]
#[derive(Clone, Debug)]
pub struct LockClientBuilder {
    #[cfg_attr(
        not(feature = "redis"),
        expect(
            dead_code,
            reason = "only a store outside of this process uses the namespace"
        )
    )]
    namespace: String,
    defaults: LockSpec,
    max_waiters: usize,
    max_waiters_in_all: usize,
    #[cfg(feature = "redis")]
    redis: RedisOptions,
}

impl Default for LockClientBuilder {
    fn default() -> Self {
        Self {
            namespace: "lock".into(),
            defaults: LockSpec::exclusive(),
            max_waiters: MAX_WAITERS,
            max_waiters_in_all: MAX_WAITERS_IN_ALL,
            #[cfg(feature = "redis")]
            redis: RedisOptions::new(),
        }
    }
}

impl LockClientBuilder {
    /// Sets the prefix of all names on a server, `lock` by default.
    ///
    /// It has 1 to 64 bytes without `:`, braces or control characters, and is neither `f` nor
    /// `q`. In-memory and custom stores ignore it.
    pub fn namespace(self, namespace: impl Into<String>) -> Self {
        Self {
            namespace: namespace.into(),
            ..self
        }
    }

    /// Sets the defaults for options that a request leaves unset.
    ///
    /// The mode of `defaults` is ignored.
    pub fn defaults(self, defaults: LockSpec) -> Self {
        Self { defaults, ..self }
    }

    /// Limits the requests that wait for one key in this process, 10,000 by default.
    ///
    /// The request at the head of the queue does not count. Requests beyond the limit fail with
    /// `Overloaded` at once. [`LockSpec::max_waiters`] can lower the limit for single requests.
    ///
    /// Each waiting request costs about the memory of its future. Set the limit to the number of
    /// requests that can be served within the wait: those beyond it would time out anyway.
    pub fn max_waiters(self, max_waiters: usize) -> Self {
        Self {
            max_waiters,
            ..self
        }
    }

    /// Limits the requests that wait in this process for all keys together, 100,000 by default.
    ///
    /// Requests beyond the limit fail with `Overloaded` at once, even if their lock is free.
    ///
    /// A request that can wait counts from the time it enters the queue of its lock until it is
    /// answered, so requests that are being granted count as well. Reads and permits that are
    /// granted at their first attempt do not count, nor do requests that do not wait. A request
    /// for several keys is in one queue at a time.
    pub fn max_waiters_in_all(self, max_waiters_in_all: usize) -> Self {
        Self {
            max_waiters_in_all,
            ..self
        }
    }

    /// Sets the options for connections to Redis. Each option names the stores that it applies to.
    #[cfg(feature = "redis")]
    pub fn redis(self, redis: RedisOptions) -> Self {
        Self { redis, ..self }
    }

    /// Connects to the store at `url`. See [`LockClient::connect`].
    ///
    /// # Errors
    /// Same as [`LockClient::connect`], and `InvalidSpec` for invalid settings, such as the
    /// namespace.
    ///
    /// # Cancellation
    /// Dropping the future closes the connection.
    pub async fn connect(self, url: &str) -> Result<LockClient, LockError> {
        let (scheme, rest) = url.split_at(url.find(':').unwrap_or(url.len()));
        match Some(rest).filter(|_| scheme.eq_ignore_ascii_case("memory")) {
            Some("" | ":" | "://") => return self.build_in_memory(),
            Some(rest) if rest.starts_with(':') => {
                let message = "a store in this process has no address: its URL is \"memory:\" and nothing else; \
                               that of a Redis server is redis://user:password@host:6379/0";
                return Err(LockError::new(LockErrorKind::InvalidUrl, message));
            }
            _ => {}
        }
        #[cfg(feature = "redis")]
        if let Some(urls) = crate::store::redis::redlock::urls_of(url)? {
            return self.connect_redlock(urls).await;
        }
        #[cfg(feature = "redis")]
        return {
            self.check()?;
            let connecting = crate::store::redis::RedisStore::connect_with(
                url,
                &self.namespace,
                self.redis.clone(),
            );
            self.over(connecting.await?)
        };
        #[cfg(not(feature = "redis"))]
        Err(LockError::new(
            LockErrorKind::InvalidUrl,
            "only \"memory:\" is compiled in; enable the feature `redis` for \"redis://host:6379/0\"",
        ))
    }

    /// Connects to the primary that the Sentinels name, now and after each failover.
    ///
    /// The host of `primary` is the name under which the Sentinels monitor the primary. Its
    /// credentials and its database are for the primary: `redis://app:secret@mymaster/0`.
    /// `sentinels` are the addresses of the Sentinels, with their own credentials:
    /// `redis://:secret@10.0.0.1:26379`. Each URL may be `rediss://`. [`LockClient::connect`]
    /// takes the same in one URL.
    ///
    /// # Errors
    /// Same as [`LockClient::connect`].
    ///
    /// # Cancellation
    /// Dropping the future closes the connection.
    #[cfg(feature = "redis")]
    pub async fn connect_sentinel(
        self,
        primary: &str,
        sentinels: impl IntoIterator<Item = impl AsRef<str>>,
    ) -> Result<LockClient, LockError> {
        self.check()?;
        // Collected first, so that the future is `Send` even if the iterator is not.
        let sentinels: Vec<_> = sentinels
            .into_iter()
            .map(|url| url.as_ref().to_owned())
            .collect();
        let (namespace, options) = (&self.namespace, &self.redis);
        let store =
            crate::store::redis::RedisStore::by_sentinels(primary, &sentinels, namespace, options)
                .await?;
        self.over(store)
    }

    /// Connects to several independent Redis servers, of which a majority has to agree.
    ///
    /// Give an odd number of servers, at least three, in the same order for all clients. A server
    /// that does not answer now is connected to later. See
    /// [`QuorumStore`](crate::store::QuorumStore) for the guarantees.
    ///
    /// # Errors
    /// Same as [`LockClient::connect`]; `InvalidSpec` for any other number of servers;
    /// `Unavailable` if too few servers answer, with the error of each.
    ///
    /// # Cancellation
    /// Dropping the future closes the connections.
    #[cfg(feature = "redis")]
    pub async fn connect_redlock(
        mut self,
        urls: impl IntoIterator<Item = impl AsRef<str>>,
    ) -> Result<LockClient, LockError> {
        self.check()?;
        self.redis
            .refuse_replicas("servers of a quorum are not replicas of each other")?;
        let longest_lease = self.redis.longest_lease_or_default();
        let open = LockSpec::exclusive().lease(longest_lease.min(DEFAULT_LEASE));
        self.defaults = self.defaults.or(&open);
        // Report a bad default now rather than at the first request.
        let lease = self.defaults.terms(&LockSpec::exclusive())?.lease;
        if lease > longest_lease {
            let message = format!(
                "the default lease of {lease:?} is longer than the `longest_lease` of {longest_lease:?}; set one of them"
            );
            return Err(LockError::new(LockErrorKind::InvalidSpec, message));
        }
        let urls: Vec<_> = urls.into_iter().collect();
        let urls: Vec<_> = urls.iter().map(AsRef::as_ref).collect();
        self.over(
            crate::store::redis::redlock::connect(
                &urls,
                &self.namespace,
                longest_lease,
                &self.redis,
            )
            .await?,
        )
    }

    /// Connects to the Redis Cluster that the `seeds` belong to.
    ///
    /// The seeds are URLs of some of its nodes, `redis://[user[:password]@]host[:port]` or
    /// `rediss://..`. One node that answers is enough to find the others, which are contacted
    /// with the credentials and TLS settings of the first seed.
    ///
    /// ```no_run
    /// # use lock_runtime::LockClient;
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), lock_runtime::LockError> {
    /// let locks = LockClient::builder()
    ///     .connect_cluster(["redis://10.0.0.1:6379", "redis://10.0.0.2:6379"])
    ///     .await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// Same as [`LockClient::connect`].
    ///
    /// # Cancellation
    /// Dropping the future closes the connections.
    #[cfg(feature = "redis")]
    pub async fn connect_cluster(
        self,
        seeds: impl IntoIterator<Item = impl AsRef<str>>,
    ) -> Result<LockClient, LockError> {
        self.check()?;
        self.over(
            crate::store::redis::RedisStore::cluster_with(seeds, &self.namespace, &self.redis)
                .await?,
        )
    }

    /// Creates a client of a new in-memory store.
    ///
    /// # Errors
    /// `InvalidSpec` for invalid settings, such as the defaults.
    pub fn build_in_memory(self) -> Result<LockClient, LockError> {
        self.check()?;
        #[cfg(feature = "redis")]
        self.redis
            .refuse_replicas("a store in this process has none")?;
        self.over(MemoryStore::new())
    }

    /// Creates a client of a custom [`Store`]. The namespace and the options for Redis are ignored.
    pub fn build_with_store(self, store: Arc<dyn Store>) -> LockClient {
        let Self {
            defaults,
            max_waiters,
            max_waiters_in_all,
            ..
        } = self;
        let waiters = WaiterLimits {
            per_key: max_waiters,
            in_all: max_waiters_in_all,
        };
        let core = Arc::new_cyclic(|core: &Weak<Core>| {
            let listener: Arc<dyn Listener> = Arc::new(EventListener(core.clone()));
            store.listen(Arc::downgrade(&listener));
            Core::new(store, defaults, waiters, listener)
        });
        LockClient {
            _clones: Arc::new(Clones(core.clone())),
            core,
        }
    }

    /// Reports bad settings when the client is created rather than at the first request.
    fn check(&self) -> Result<(), LockError> {
        self.defaults.check()?;
        #[cfg(feature = "redis")]
        self.redis.check()?;
        Ok(())
    }

    fn over(&self, store: impl Store) -> Result<LockClient, LockError> {
        Ok(self.clone().build_with_store(Arc::new(store)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Independent of the features that are compiled in.
    #[tokio::test]
    async fn a_store_in_this_process_needs_no_feature() {
        for url in ["memory:", "memory://", "memory", "Memory:"] {
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
        for url in ["memory:orders", "memory://orders", "mem:", "memories"] {
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
                .connect_sentinel("rediss://mymaster", ["redis://10.0.0.1"])
                .await
                .unwrap_err(),
        );
        errors.push(
            builder()
                .connect_sentinel("redis://mymaster", ["rediss://10.0.0.1"])
                .await
                .unwrap_err(),
        );
        errors.push(
            builder()
                .connect_cluster(["rediss://10.0.0.1"])
                .await
                .unwrap_err(),
        );
        errors.push(
            builder()
                .connect_redlock(["rediss://10.0.0.1", "redis://b", "redis://c"])
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
