//! [`LockClient`], the entry point of the crate. Its settings are in `builder.rs`.

pub(crate) mod ambient;
pub(crate) mod clients;
#[cfg(any(feature = "redis", feature = "postgres", feature = "etcd"))]
pub(crate) mod credentials;

mod builder;
mod from_env;
mod health;
mod list;
mod open;
mod operate;
mod scheme;

use std::{
    fmt,
    num::NonZeroU32,
    panic::Location,
    sync::{Arc, Weak},
    time::Duration,
};

use tokio::time::timeout;

pub use self::{
    builder::LockClientBuilder,
    from_env::EnvVariable,
    list::{ListPage, ListedLock, LockList, LockPage},
    operate::{Inspect, Revocation, Revoke},
};
use crate::{
    error::LockError,
    observe::activity::Activity,
    protocol::{Session, WaiterLimits},
    request::LockRequest,
    request::key::IntoLockKey,
    request::spec::LockSpec,
    shell::core::Core,
    shell::driver,
    shell::runtime,
    store::{Listener, MemoryStore, Store, StoreEvent},
};

/// How long `shutdown` waits for pending releases: two call time-outs and the deadline of a
/// delayed request.
const SHUTDOWN: Duration = Duration::from_secs(3);

/// How long `shutdown` waits for waiters to leave their queues. A waiter whose future is polled
/// needs less time.
const LEAVING: Duration = Duration::from_millis(500);

/// The time after which a client repeats its name to a store that may have lost it.
const NAMES_LOST: Duration = Duration::from_millis(500);

/// Passes the events of the store to the session. It does not keep the client alive.
struct EventListener(Weak<Core>);

impl Listener for EventListener {
    fn on_event(&self, event: &StoreEvent) {
        if let Some(core) = self.0.upgrade() {
            // Each store of the namespace hears of all revocations, and other programs may be able
            // to announce any number of them.
            if matches!(event, StoreEvent::Revoked { token } if token.client() != core.id) {
                return;
            }
            // The names may be lost as well. The locks come first. A majority does not report
            // disconnections of single servers.
            let names_lost = matches!(event, StoreEvent::Disconnected | StoreEvent::Reconnected);
            core.visit(|state, cx| {
                if names_lost {
                    state.introduce_by(cx.now + NAMES_LOST);
                }
                state.session.event(event, cx);
            });
            if names_lost {
                core.work.notify_one();
            }
        }
    }
}

/// A client for acquiring locks.
///
/// Clones share all state. One client per process and store is enough.
///
/// Use the client within a Tokio runtime that has timers enabled (`enable_all`, as
/// `#[tokio::main]` does); elsewhere its calls return `NoRuntime`. A task on that runtime renews
/// the leases; while code blocks the runtime, a thread of the library does.
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
    pub(crate) core: Arc<Core>,
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

    /// Returns the defaults for options that a request leaves unset.
    #[doc(hidden)]
    pub fn defaults(&self) -> &LockSpec {
        &self.core.defaults
    }

    /// Connects to the store at `url` with default settings.
    ///
    /// Use [`builder`](Self::builder) to change the settings. The form of the URL selects the
    /// store:
    ///
    /// - `memory:`, `memory://` or `memory`: a new store in this process.
    /// - `redis://[[user]:password@]host[:port][/db]` or `unix:///path`: one Redis server.
    /// - `redis+sentinel://[[user]:password@]host[:26379][,host...]/name[/db]`: the primary that
    ///   the Sentinels know as `name`. Optional parameters: `sentinel_user`, `sentinel_password`,
    ///   `sentinel_tls` (`true` or `false`), `min_replicas=1`, `replica_timeout=50ms`.
    /// - `redis+cluster://[[user]:password@]host[:port][,host...]`: a Redis Cluster, found
    ///   through any of its nodes.
    /// - `redlock:redis://..,redis://..,redis://..`: several independent servers, of which a
    ///   majority has to agree.
    /// - `postgres://[user[:password]@]host[:port]/database`: a PostgreSQL database (feature
    ///   `postgres`).
    /// - `etcd://[user:password@]host[:2379][,host...]`: an etcd cluster (feature `etcd`), with TLS
    ///   `etcds://` (feature `etcd-rustls`).
    /// - `zookeeper://[user:password@]host[:2181][,host...][/path]`: a ZooKeeper ensemble (feature
    ///   `zookeeper`).
    ///
    /// With `rediss` instead of `redis` the connection uses TLS (feature `redis-rustls`). `valkey`
    /// and `valkeys` stand for `redis` and `rediss`; the case of a scheme does not matter.
    ///
    /// # Errors
    /// - `InvalidUrl` if the URL names no store, names a database that the server does not have,
    ///   or needs a feature that is not compiled in.
    /// - `NoRuntime` outside a Tokio runtime, or in one without timers. `memory:` needs no
    ///   runtime.
    /// - `Unavailable`, `Unauthenticated`, `Forbidden`, `WrongServer`, `ReadOnly` or `Full`, within
    ///   5 s, if the server cannot be reached or cannot be used.
    /// - `IncompatibleFormat` if a version of this library with another format of its keys uses the
    ///   namespace.
    ///
    /// # Cancellation
    /// Dropping the future closes the connection.
    pub async fn connect(url: &str) -> Result<Self, LockError> {
        Self::builder().connect(url).await
    }

    /// Connects to the store at `url` in the background, with the default settings. See
    /// [`LockClientBuilder::connect_lazy`].
    ///
    /// # Errors
    /// Same as [`LockClientBuilder::connect_lazy`].
    pub fn connect_lazy(url: &str) -> Result<Self, LockError> {
        Self::builder().connect_lazy(url)
    }

    /// Returns a builder for a client with custom settings.
    pub fn builder() -> LockClientBuilder {
        LockClientBuilder::default()
    }

    /// Creates a client of a database of your own, with the default settings. See
    /// [`LockClientBuilder::build_with_records`].
    #[cfg(feature = "records")]
    pub fn with_records(store: crate::store::RecordStore) -> Self {
        Self::with_store(Arc::new(store))
    }

    /// Creates a client of any store.
    #[doc(hidden)]
    pub fn with_store(store: Arc<dyn Store>) -> Self {
        Self::builder().build(store)
    }

    fn over(
        store: Arc<dyn Store>,
        defaults: LockSpec,
        waiters: WaiterLimits,
        own_name: Option<Arc<str>>,
    ) -> Self {
        let core = Arc::new_cyclic(|core: &Weak<Core>| {
            let listener: Arc<dyn Listener> = Arc::new(EventListener(core.clone()));
            store.listen(Arc::downgrade(&listener));
            Core::new(store, defaults, waiters, own_name, listener)
        });
        Self {
            _clones: Arc::new(Clones(core.clone())),
            core,
        }
    }

    /// Creates a request for an exclusive lock, which has one holder: also the write lock among
    /// [`shared`](Self::shared) ones.
    pub fn exclusive(&self, key: impl IntoLockKey) -> LockRequest {
        self.request(key, LockSpec::exclusive())
    }

    /// Creates a request for a re-entrant exclusive lock. See [`LockSpec::reentrant`].
    pub fn reentrant(&self, key: impl IntoLockKey) -> LockRequest {
        self.exclusive(key).reentrant()
    }

    /// Creates a request for a shared lock: many holders, none of them exclusive, as the readers of
    /// a read/write lock.
    pub fn shared(&self, key: impl IntoLockKey) -> LockRequest {
        self.request(key, LockSpec::shared())
    }

    /// Creates a request for one of `permits` permits.
    ///
    /// The number is best a constant of the program, which the compiler checks for zero:
    ///
    /// ```
    /// use std::num::NonZeroU32;
    ///
    /// use lock_runtime::{LockClient, LockError};
    ///
    /// const SENDERS: NonZeroU32 = NonZeroU32::new(3).unwrap();
    ///
    /// async fn send(locks: &LockClient) -> Result<(), LockError> {
    ///     let permit = locks.permits("mailer", SENDERS).acquire().await?;
    ///     permit.release().await
    /// }
    /// ```
    ///
    /// Requests with different numbers may share a key, as those of two versions of a program do
    /// during a deployment: each counts all holders against its own number, in the order of the
    /// wait queue. So there are never more holders than the largest number in use.
    pub fn permits(&self, key: impl IntoLockKey, permits: NonZeroU32) -> LockRequest {
        self.request(key, LockSpec::permits(permits))
    }

    /// Creates a request for several keys at once, at most 1,000, each of them exclusive.
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

    /// Returns the holders and the waiters of the lock, as the store sees them now, or those of the
    /// [`permits`](Inspect::permits) of this name.
    ///
    /// It takes two seconds at most, and the names of clients 500 ms more. In Redis a long wait
    /// queue is read in pages, each within 500 ms.
    ///
    /// # Errors
    /// `InvalidKey`, `ForeignKey`, `NoRuntime`, `Unavailable`, or a refusal of the server, such
    /// as `Forbidden`.
    ///
    /// # Cancellation
    /// Dropping the future has no effect.
    pub fn inspect(&self, key: impl IntoLockKey) -> Inspect {
        Inspect::new(self.clone(), key)
    }

    /// Takes the lock away from its holders and hands it off to the next waiter. [`Revoke`] can
    /// take it from a single holder, or revoke permits.
    ///
    /// The holders are notified at once. If that message is lost, they notice the loss at their
    /// next renewal.
    ///
    /// This is meant for operators: the former holders may still be at work. It takes 500 ms at
    /// most.
    ///
    /// # Errors
    /// `InvalidKey`, `ForeignKey`, `NoRuntime`, `Unavailable`, or a refusal of the server, such
    /// as `Forbidden`.
    ///
    /// # Cancellation
    /// If the future is dropped, the lock may or may not have been revoked.
    pub fn revoke(&self, key: impl IntoLockKey) -> Revoke {
        Revoke::new(self.clone(), key)
    }

    /// Returns the contention and the losses of this client since it was created, by the names of
    /// its requests.
    ///
    /// It keeps at most 256 names (the others count as `other`) and 64 losses, with or without the
    /// feature `metrics`. Locks that are granted at the first attempt are not counted.
    pub fn activity(&self) -> Activity {
        self.core.activity.since(self.core.epoch)
    }

    /// Lists the locks that are held, and the permits, whose names begin with `prefix`, with their
    /// holders and waiters; all locks of the namespace for an empty prefix.
    ///
    /// The list takes no snapshot: a lock that is held from the beginning to the end is in it,
    /// others may be. A lock is in it once (among the last million of locks). The store is read
    /// page by page as the stream is polled, so that no other call waits for the list. Of several
    /// servers, a majority is read, one after the other. In a cluster a lock may be missing whose
    /// slot moves twice meanwhile. On Redis the user needs the command `SCAN` in addition to the
    /// rights for locks.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), lock_runtime::LockError> {
    /// # use lock_runtime::LockClient;
    /// let locks = LockClient::builder().identity("orders@web-3").build_in_memory()?;
    /// let guard = locks.exclusive("order:42").acquire().await?;
    ///
    /// let mut list = locks.list("order:");
    /// while let Some(lock) = list.next().await {
    ///     let lock = lock?;
    ///     for holder in &lock.state.holders {
    ///         println!("{} is held by {} for {:?}", lock.key, holder.client, holder.held_for);
    /// #       assert_eq!(holder.client.to_string(), "orders@web-3");
    ///     }
    /// }
    /// guard.release().await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// Each item may be an error, see [`LockList::next`]: `Forbidden`, `Unavailable`, `NoRuntime`,
    /// and `InvalidSpec` for a custom store that cannot list its locks.
    ///
    /// # Cancellation
    /// Dropping the stream has no effect on the locks.
    pub fn list(&self, prefix: impl Into<String>) -> LockList {
        LockList::new(self.clone(), prefix.into())
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
                driver::dismiss(&self.core).await;
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
