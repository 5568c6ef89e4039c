//! [`LockClientBuilder`]: the settings of a client, and its connection to a store.

use std::sync::Arc;

use super::LockClient;
use crate::{
    error::{LockError, LockErrorKind},
    protocol::WaiterLimits,
    spec::LockSpec,
    store::{MemoryStore, Store},
};
#[cfg(feature = "redis")]
use crate::{
    spec::DEFAULT_LEASE,
    store::redis::{RedisOptions, RedisStore, redlock},
};

/// A builder for a [`LockClient`].
///
/// The methods that begin with `connect` or `build` create the client.
#[must_use = "a builder does nothing until it makes a client"]
#[derive(Clone, Debug)]
pub struct LockClientBuilder {
    namespace: String,
    defaults: LockSpec,
    waiters: WaiterLimits,
    #[cfg(feature = "redis")]
    redis: RedisOptions,
}

impl Default for LockClientBuilder {
    fn default() -> Self {
        Self {
            namespace: "lock".into(),
            defaults: LockSpec::exclusive(),
            waiters: WaiterLimits {
                per_key: 10_000,
                in_all: 100_000,
            },
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
    pub fn namespace(mut self, namespace: impl Into<String>) -> Self {
        self.namespace = namespace.into();
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
        return match redlock::urls_of(url)? {
            Some(urls) => self.connect_redlock(urls).await,
            None => {
                self.check()?;
                let options = self.redis.clone();
                let store = RedisStore::connect_with(url, &self.namespace, options).await?;
                self.over(store)
            }
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
        let urls = sentinels.into_iter().map(|url| url.as_ref().to_owned());
        let sentinels: Vec<_> = urls.collect();
        let (namespace, options) = (&self.namespace, &self.redis);
        let store = RedisStore::by_sentinels(primary, &sentinels, namespace, options).await?;
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
        let (namespace, options) = (&self.namespace, &self.redis);
        let store = redlock::connect(&urls, namespace, longest_lease, options).await?;
        self.over(store)
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
        let store = RedisStore::cluster_with(seeds, &self.namespace, &self.redis).await?;
        self.over(store)
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
        LockClient::over(store, self.defaults, self.waiters)
    }

    /// Reports bad settings when the client is created rather than at the first request.
    fn check(&self) -> Result<(), LockError> {
        self.defaults.check()?;
        #[cfg(feature = "redis")]
        self.redis.check()?;
        Ok(())
    }

    fn over(self, store: impl Store) -> Result<LockClient, LockError> {
        Ok(self.build_with_store(Arc::new(store)))
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

    #[cfg(all(feature = "redis", not(feature = "rustls")))]
    #[tokio::test]
    async fn a_url_for_tls_is_right_and_names_the_missing_feature() {
        let mut refused = Vec::new();
        for url in [
            "rediss://:hunter2@127.0.0.1:6379/0",
            "valkeys://127.0.0.1",
            "rediss+sentinel://127.0.0.1/mymaster",
            "rediss+cluster://127.0.0.1",
            "redlock:rediss://10.0.0.1,rediss://10.0.0.2,rediss://10.0.0.3",
        ] {
            refused.push(LockClient::connect(url).await);
        }
        let builder = LockClient::builder;
        for (primary, sentinel) in [
            ("rediss://mymaster", "redis://10.0.0.1"),
            ("redis://mymaster", "rediss://10.0.0.1"),
        ] {
            refused.push(builder().connect_sentinel(primary, [sentinel]).await);
        }
        refused.push(builder().connect_cluster(["rediss://10.0.0.1"]).await);
        let servers = ["rediss://10.0.0.1", "redis://b", "redis://c"];
        refused.push(builder().connect_redlock(servers).await);
        for refused in refused {
            let error = refused.unwrap_err();
            assert_eq!(error.kind(), LockErrorKind::InvalidUrl);
            let message = "the URL asks for TLS, which is not compiled in; enable the feature `rustls` of lock-runtime";
            assert_eq!(error.to_string(), message);
        }
    }
}
