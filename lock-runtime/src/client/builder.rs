//! [`LockClientBuilder`]: the settings of a client, and its connection to a store.

use std::{sync::Arc, time::Duration};

use super::LockClient;
#[cfg(feature = "records")]
use super::scheme::Schemes;
#[cfg(feature = "etcd")]
use crate::store::etcd::EtcdOptions;
#[cfg(feature = "postgres")]
use crate::store::postgres::PostgresOptions;
#[cfg(feature = "redis")]
use crate::store::redis::RedisOptions;
#[cfg(feature = "records")]
use crate::store::{RecordStore, StoreError};
use crate::{
    error::{LockError, LockErrorKind},
    guard::fence::FencingToken,
    protocol::WaiterLimits,
    request::spec::LockSpec,
    store::{Identity, Store, default_name, presentable},
};

/// The shortest time without an answer that counts as an outage: longer than a slow round trip.
const SHORTEST_OUTAGE: Duration = Duration::from_millis(100);

/// The shortest life of a fencing token: longer than clocks of servers usually differ, and than a
/// call may be late.
const SHORTEST_LIFE: Duration = Duration::from_secs(60);

const DEFAULT_NAMESPACE: &str = "lock";

/// A builder for a [`LockClient`].
///
/// The methods that begin with `connect` or `build` create the client.
#[must_use = "a builder does nothing until it makes a client"]
#[derive(Clone, Debug)]
pub struct LockClientBuilder {
    pub(super) namespace: String,
    pub(super) defaults: LockSpec,
    pub(super) waiters: WaiterLimits,
    identity: Identification,
    pub(super) unavailable_after: Option<Duration>,
    pub(super) confirm_grants: bool,
    pub(super) fences_kept_for: Option<Duration>,
    #[cfg(feature = "redis")]
    pub(super) redis: RedisOptions,
    #[cfg(feature = "postgres")]
    pub(super) postgres: PostgresOptions,
    #[cfg(feature = "etcd")]
    pub(super) etcd: EtcdOptions,
    #[cfg(feature = "records")]
    pub(super) schemes: Schemes,
    /// The variable that names a file of passwords.
    #[cfg(feature = "records")]
    pub(super) password_file: Option<&'static str>,
}

/// The name of a client.
#[derive(Clone, Debug)]
enum Identification {
    Default,
    Given(String),
    None,
}

impl Default for LockClientBuilder {
    fn default() -> Self {
        Self {
            namespace: DEFAULT_NAMESPACE.into(),
            defaults: LockSpec::exclusive(),
            waiters: WaiterLimits {
                per_key: 10_000,
                in_all: 100_000,
            },
            identity: Identification::Default,
            unavailable_after: None,
            confirm_grants: false,
            fences_kept_for: None,
            #[cfg(feature = "redis")]
            redis: RedisOptions::new(),
            #[cfg(feature = "postgres")]
            postgres: PostgresOptions::new(),
            #[cfg(feature = "etcd")]
            etcd: EtcdOptions::new(),
            #[cfg(feature = "records")]
            schemes: Schemes::default(),
            #[cfg(feature = "records")]
            password_file: None,
        }
    }
}

impl LockClientBuilder {
    /// Sets the prefix of all names on a server, `lock` by default.
    ///
    /// It has 1 to 64 bytes without `:`, braces or control characters, and is neither `f` nor
    /// `q`. An in-memory store is that of one client, and ignores it.
    /// [`build_with_records`](Self::build_with_records) refuses it: the records have their own.
    pub fn namespace(mut self, namespace: impl Into<String>) -> Self {
        self.namespace = namespace.into();
        self
    }

    /// Sets the name under which [`inspect`](LockClient::inspect), [`list`](LockClient::list) and
    /// errors of other clients show this client as a holder or waiter. The default is
    /// `<program>@<host>:<process>`, such as `orders@web-3:4711`.
    ///
    /// It has at most 128 bytes. Control characters are escaped. Every client of the store can read
    /// it. The store keeps it once for the whole client, so it does not make a lock dearer.
    pub fn identity(mut self, identity: impl Into<String>) -> Self {
        self.identity = Identification::Given(identity.into());
        self
    }

    /// Gives the client no name. It is then shown as an unnamed client, with the random identifier
    /// that its tokens begin with.
    pub fn without_identity(mut self) -> Self {
        self.identity = Identification::None;
        self
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
    pub fn max_waiters(mut self, max_waiters: usize) -> Self {
        self.waiters.per_key = max_waiters;
        self
    }

    /// Limits the requests that wait in this process for all keys together, 100,000 by default.
    ///
    /// Requests beyond the limit fail with `Overloaded` at once, even if their lock is free.
    ///
    /// A request that can wait counts from the time it enters the queue of its lock until it is
    /// answered, so requests that are being granted count as well. Reads and permits that are
    /// granted at their first attempt do not count, nor do requests that do not wait. A request
    /// for several keys is in one queue at a time.
    pub fn max_waiters_in_all(mut self, max_waiters_in_all: usize) -> Self {
        self.waiters.in_all = max_waiters_in_all;
        self
    }

    /// Refuses requests at once with `Unavailable` when the server of their keys has not answered
    /// for this long, 100 ms to a day. Off by default: a wait may outlast a failover.
    ///
    /// The client probes the server in the meantime, and serves requests again as soon as it
    /// answers: up to ten times a second at first, then at intervals of up to an eighth of the
    /// outage, and of 2 s at most. Requests that already wait are refused as well. Only the keys of
    /// that server are affected: those of one node of a cluster, or all keys of several independent
    /// servers once a majority does not answer. Locks that are held are still renewed and released.
    ///
    /// Requests that do not wait never wait for an outage to end, with or without this setting. See
    /// the guide's [page on Redis](crate::guide::redis#outages). An in-memory store always answers.
    /// [`build_with_records`](Self::build_with_records) refuses the setting, which is that of the
    /// store: [`RecordStore::unavailable_after`](crate::store::RecordStore::unavailable_after).
    pub fn unavailable_after(mut self, unavailable_after: Duration) -> Self {
        self.unavailable_after = Some(unavailable_after);
        #[cfg(feature = "redis")]
        {
            self.redis.unavailable_after = self.unavailable_after;
        }
        self
    }

    /// Asks the store about each grant that a message announces, before the guard is returned. Off
    /// by default: the message counts, and the first renewal, sent within 100 ms, confirms it.
    ///
    /// Set it in all clients of the namespace, where programs that are not trusted with the locks
    /// may publish on the channels of the namespace, and read its keys or messages (Redis: a user
    /// with `PUBLISH` and its channels; PostgreSQL: every role that may connect to the database,
    /// while clients of earlier versions use it, whose messages show the tokens of waiters). A
    /// forged message then costs a poll, and cannot make a waiter enter beside the holder until
    /// that renewal is answered, 3 s at most. Forged messages that a token was revoked still end a
    /// hold or the place of a waiter. It adds a round trip to each hand-off between processes. With
    /// or without it, a message with a fencing token more than 61 s ahead of the store's clock is
    /// no grant. The in-memory store sends no messages.
    /// [`build_with_records`](Self::build_with_records) refuses the setting, which is that of the
    /// store: [`RecordStore::confirm_grants`](crate::store::RecordStore::confirm_grants).
    pub fn confirm_grants(mut self) -> Self {
        self.confirm_grants = true;
        #[cfg(feature = "redis")]
        {
            self.redis.confirm_grants = true;
        }
        self
    }

    /// Sets for how long the store keeps the latest fencing token of a lock after its last use: a
    /// minute to a day (with several servers, from five minutes), a day by default.
    ///
    /// This record is all that a released lock leaves, and each key has its own: some 150 to 740
    /// bytes in Redis and up to 1.5 KB in PostgreSQL, by the length of the key. A route whose
    /// callers choose the keys leaves as many as they choose. With 1,000 new keys per second, a day
    /// keeps 13 to 64 GB, and five minutes keep 45 to 220 MB.
    ///
    /// Fencing tokens increase without the record, as a token is at least the time of the store's
    /// clock in microseconds. The record is for a clock that is set back, and for another server
    /// that takes over with an earlier one: tokens increase as long as the clock falls back by less
    /// than this time. Clients with different settings can share a store: the one that has used a
    /// lock last decides.
    ///
    /// PostgreSQL deletes records that have ended once an hour. The in-memory store keeps no record
    /// of a released lock. [`build_with_records`](Self::build_with_records) refuses the setting,
    /// which is that of the store:
    /// [`RecordStore::keep_fences_for`](crate::store::RecordStore::keep_fences_for).
    pub fn keep_fences_for(mut self, time: Duration) -> Self {
        self.fences_kept_for = Some(time);
        #[cfg(feature = "redis")]
        {
            self.redis.fences_kept_for = self.fences_kept_for;
        }
        self
    }

    /// Sets the options for connections to Redis. Each option names the stores that it applies to.
    #[cfg(feature = "redis")]
    pub fn redis(mut self, redis: RedisOptions) -> Self {
        self.redis = redis;
        self.redis.unavailable_after = self.unavailable_after;
        self.redis.confirm_grants = self.confirm_grants;
        self.redis.fences_kept_for = self.fences_kept_for;
        self
    }

    /// Sets the options for connections to PostgreSQL.
    #[cfg(feature = "postgres")]
    pub fn postgres(self, postgres: PostgresOptions) -> Self {
        Self { postgres, ..self }
    }

    /// Sets the options for connections to etcd.
    #[cfg(feature = "etcd")]
    pub fn etcd(self, etcd: EtcdOptions) -> Self {
        Self { etcd, ..self }
    }

    /// Adds a scheme of URLs, for a database of your own: [`connect`](Self::connect) and
    /// [`connect_lazy`](Self::connect_lazy) then open a URL that begins with `<name>:`, such as
    /// that of [`from_env`](Self::from_env). It replaces a scheme of this library with that name.
    /// A name has letters, digits, `+`, `-` and `.`, and begins with a letter.
    ///
    /// `open` gets the URL and the namespace, makes no call, and refuses a URL with `InvalidUrl`.
    /// It checks the namespace if that becomes part of a path, as it may be `..` or contain `/`.
    /// `connect` reads the clock of the database, for at most five seconds. Settings that the
    /// builder has been given replace those of the store. `LOCK_PASSWORD_FILE` is refused.
    ///
    /// With the records in files of the [guide](crate::guide::stores):
    ///
    /// ```
    /// # #[cfg(feature = "records")]
    /// # mod files { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/guide/stores/files.rs")); }
    /// # #[cfg(feature = "records")] {
    /// # use files::FileRecords;
    /// use lock_runtime::{
    ///     LockClient,
    ///     store::{RecordStore, StoreError, StoreErrorKind},
    /// };
    ///
    /// fn open(url: &str, namespace: &str) -> Result<RecordStore, StoreError> {
    ///     match (url.strip_prefix("files:///"), namespace) {
    ///         (Some(path), "orders" | "payments") => {
    ///             let records = FileRecords::new(format!("/{path}/{namespace}"));
    ///             Ok(RecordStore::new(records))
    ///         }
    ///         _ => {
    ///             let message = "locks of orders and payments are at files:///<directory>";
    ///             Err(StoreError::new(StoreErrorKind::InvalidUrl, message))
    ///         }
    ///     }
    /// }
    ///
    /// let builder = LockClient::builder().scheme("files", open);
    /// # }
    /// ```
    #[cfg(feature = "records")]
    pub fn scheme(
        mut self,
        name: impl Into<String>,
        open: impl Fn(&str, &str) -> Result<RecordStore, StoreError> + Send + Sync + 'static,
    ) -> Self {
        self.schemes.add(name.into(), Arc::new(open));
        self
    }

    /// Connects to the store at `url`. See [`LockClient::connect`].
    ///
    /// # Errors
    /// Same as [`LockClient::connect`], and `InvalidSpec` for invalid settings, such as the
    /// namespace.
    ///
    /// # Cancellation
    /// Dropping the future closes the connection.
    pub async fn connect(mut self, url: &str) -> Result<LockClient, LockError> {
        let opened = self.open(url)?;
        opened.servers.ready().await?;
        Ok(self.build(opened.store))
    }

    /// Connects to the store at `url` in the background, so that a service can start while the
    /// store is away.
    ///
    /// The URL and the settings are checked now, and the server once it answers. Until then
    /// requests fail with `Unavailable` after their wait, or at once if they do not wait. A
    /// permanent error, such as a wrong password, is the error of each request. Once the server
    /// answers, requests succeed without a new client.
    ///
    /// ```
    /// # use lock_runtime::{LockClient, LockErrorKind};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), lock_runtime::LockError> {
    /// # #[cfg(feature = "redis")] {
    /// // No server listens on this port.
    /// let locks = LockClient::builder().connect_lazy("redis://127.0.0.1:1")?;
    /// let error = locks.exclusive("order:42").no_wait().acquire().await.unwrap_err();
    /// assert_eq!(error.kind(), LockErrorKind::Unavailable);
    /// # }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `InvalidUrl`; `InvalidSpec` for invalid settings; `NoRuntime` outside of a Tokio runtime.
    pub fn connect_lazy(mut self, url: &str) -> Result<LockClient, LockError> {
        let opened = self.open(url)?;
        opened.servers.begin();
        Ok(self.build(opened.store))
    }

    /// Creates a client of a new in-memory store.
    ///
    /// # Errors
    /// `InvalidSpec` for invalid settings, such as the defaults.
    pub fn build_in_memory(self) -> Result<LockClient, LockError> {
        self.check()?;
        let opened = self.open_in_memory()?;
        Ok(self.build(opened.store))
    }

    /// Creates a client of a database of your own.
    ///
    /// ```
    /// # #[cfg(feature = "records")]
    /// # mod files { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/guide/stores/files.rs")); }
    /// # #[cfg(feature = "records")]
    /// # fn build() -> Result<(), lock_runtime::LockError> {
    /// # use files::FileRecords;
    /// use lock_runtime::{LockClient, store::RecordStore};
    ///
    /// let store = RecordStore::new(FileRecords::new("/var/lib/locks"));
    /// let locks = LockClient::builder().identity("orders").build_with_records(store)?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `InvalidSpec` for invalid settings, and for those of a server, which the store would not
    /// honour: the namespace, `unavailable_after`, `confirm_grants`, `keep_fences_for` and
    /// replicas.
    #[cfg(feature = "records")]
    pub fn build_with_records(self, store: RecordStore) -> Result<LockClient, LockError> {
        self.build_with_store(Arc::new(store))
    }

    /// Same as [`build_with_records`](Self::build_with_records), for any store.
    #[doc(hidden)]
    pub fn build_with_store(self, store: Arc<dyn Store>) -> Result<LockClient, LockError> {
        self.check()?;
        let set = [
            (self.namespace != DEFAULT_NAMESPACE, "namespace"),
            (self.unavailable_after.is_some(), "unavailable_after"),
            (self.confirm_grants, "confirm_grants"),
            (self.fences_kept_for.is_some(), "keep_fences_for"),
        ];
        if let Some((_, option)) = set.iter().find(|(is_set, _)| *is_set) {
            let message = format!(
                "`{option}`: the client does not pass it on to a custom store; leave it out here, and \
                 set it where the store is created"
            );
            return Err(LockError::new(LockErrorKind::InvalidSpec, message));
        }
        self.refuse_replicas("the client does not pass it on to a custom store")?;
        Ok(self.build(store))
    }

    /// Creates a client of a store that has been given the settings, or has no use for them.
    pub(super) fn build(self, store: Arc<dyn Store>) -> LockClient {
        let name = match self.identity {
            Identification::Default => Some(default_name()),
            Identification::Given(name) => Some(name),
            Identification::None => None,
        };
        let name = name.map(|name| presentable(&name));
        LockClient::over(store, self.defaults, self.waiters, name)
    }

    /// Reports bad settings when the client is created rather than at the first request.
    pub(super) fn check(&self) -> Result<(), LockError> {
        self.defaults.check()?;
        if let Identification::Given(name) = &self.identity
            && !(1..=Identity::MAX_BYTES).contains(&name.len())
        {
            let message = format!(
                "an identity of {} bytes; give 1 to {}, or call `without_identity`",
                name.len(),
                Identity::MAX_BYTES
            );
            return Err(LockError::of_settings(&["identity"], message));
        }
        let limits = SHORTEST_OUTAGE..=LockSpec::MAX_LEASE;
        if self
            .unavailable_after
            .is_some_and(|after| !limits.contains(&after))
        {
            let message = "`unavailable_after`: it must be from 100 ms to a day; a shorter time would refuse requests \
                           while a server is only slow";
            return Err(LockError::of_settings(&["unavailable_after"], message));
        }
        let lives = SHORTEST_LIFE..=FencingToken::KEPT_FOR;
        if self
            .fences_kept_for
            .is_some_and(|time| !lives.contains(&time))
        {
            let message = "`keep_fences_for`: it must be from a minute to a day";
            return Err(LockError::of_settings(&["keep_fences_for"], message));
        }
        #[cfg(feature = "redis")]
        self.redis.check()?;
        #[cfg(feature = "records")]
        self.schemes.check()?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Independent of the features that are compiled in.
    #[tokio::test]
    async fn a_store_in_this_process_needs_no_feature() {
        for url in ["memory:", "memory://", "memory", "Memory:"] {
            let locks = LockClient::connect(url).await.expect(url);
            let guard = locks.exclusive("k").acquire().await.unwrap();
            guard.release().await.unwrap();
        }
        for url in ["memory:orders", "memory://orders", "mem:", "memories"] {
            let error = LockClient::connect(url).await.unwrap_err();
            assert_eq!(error.kind(), LockErrorKind::InvalidUrl, "{error}");
            for word in ["memory:", "redis://"] {
                assert!(error.to_string().contains(word), "{url:?}: {error}");
            }
        }
    }
}
