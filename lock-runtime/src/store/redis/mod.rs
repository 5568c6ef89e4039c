//! A lock store on a Redis server or a Redis Cluster.
//!
//! # Data model
//!
//! | mode | key | type and value |
//! |---|---|---|
//! | exclusive | `<namespace>:<name>` | STRING: the token |
//! | shared | `<namespace>:<name>` | ZSET: token → expiry by the server's clock, in ms |
//! | permits(n) | `<namespace>:permits:<name>` | ZSET: `n:token` → expiry |
//! | any | `{<lock>}:f` or `f:<lock>` | STRING: the latest fencing token |
//! | any | `{<lock>}:q` or `q:<lock>` | HASH: the waiters, in order |
//! | | `f:<namespace>:format` | STRING: the version of the format; absent for version 1 |
//!
//! - An exclusive lock expires with its lease, and is compatible with every client that uses
//!   `SET key token NX PX`. A set expires with its longest holder.
//! - `<lock>` is the key of the same lock in the rows above. The forms `f:<lock>` and `q:<lock>`
//!   are used if the name of the lock has a hash tag.
//! - The fencing token is kept for a day, or `keep_fences_for`, after each grant. The wait queue is
//!   deleted when it is empty, or expires 10 s after the last request of a waiter.
//! - A lock that is released before its `min_hold` is reserved under the name `<token>.kept`.
//!
//! Every operation is a single script, so it is atomic, and safe to repeat. Foreign data under
//! these keys is left untouched, and the operation reports it.
//!
//! # Notifications
//!
//! The script that releases a lock also hands it off to the first waiter. That waiter is notified
//! on the channel of its store, `<namespace>:<client>`. If the lock is reserved instead
//! (`min_hold`), the waiter is notified there of the end of the reservation. A client that may
//! retain a lock (`retain`) is notified there of a waiter for it. Revoked holders are announced to
//! every store on `<namespace>:revoked`. Each connection subscribes to these two channels, whatever
//! the number of locks. Polls make up for lost messages.
//!
//! In a cluster, a message that is published on one node is forwarded to all others. Grants
//! are therefore sent by the node that serves the lock's slot, on a sharded channel of that
//! slot, `<namespace>:<client>:{number}` (`SPUBLISH`). A store subscribes to it only while one
//! of its requests waits in the slot. Sharded channels need Redis 7.0; with older versions
//! waiters only poll.
//!
//! # Cluster
//!
//! All keys of a lock are in one slot, and each call is sent to the node that serves it. While a
//! slot migrates, the keys of a lock may be split between two nodes. Operations that need all of
//! them then fail with [`Unavailable`](super::StoreErrorKind::Unavailable). Renewal and release
//! need a single key, and continue to work.
//!
//! Several locks in one slot are acquired in one step. Locks in different slots are acquired one
//! after another, in an order that is the same for all clients, and are released at once if one of
//! them is refused.
//!
//! # Access rules
//!
//! On a server with users, [`RedisStore::acl_line`] returns the rule that locks need, and
//! [`RedisStore::cluster_acl_line`] the rule for the nodes of a cluster.

pub(crate) mod clock;
pub(crate) mod connection;
mod error;
#[cfg(test)]
#[path = "../../../fuzz/redis.rs"]
mod fuzz;
mod operator;
mod script;
pub(crate) mod settings;
pub(crate) mod topology;
mod url;

use std::{fmt, sync::Arc, time::Duration};

use futures_util::future::BoxFuture;

use self::{
    connection::{Connection, connector::Connector, endpoint::Endpoint, pushes::Pushes},
    operator::acl::AclLine,
    topology::{cluster::Cluster, replicas::Replicas, servers::Servers, target::Target},
};
use super::{
    QuorumMember,
    namespace::check_namespace,
    remote::{Connecting, cannot_keep_locks, connect_within, outage},
};
use crate::{error::LockError, shell::runtime, shell::sync};

pub(crate) use self::settings::RedisOptions;

/// The time limit of [`RedisStore::connect`]: two attempts of a second each, the pause between
/// them, and the checks.
const CONNECT: Duration = Duration::from_millis(2500);

/// A lock store on a Redis server or a Redis Cluster, version 6.0 or later.
///
/// All calls to a server or node share one connection, which is re-established when it is lost.
/// Calls in flight then fail with [`Unavailable`](super::StoreErrorKind::Unavailable) and an
/// unknown outcome.
///
/// If the server's access rules forbid the channels, the store works without them: the next poll
/// finds a grant from the wait queue, and the next renewal finds a revocation.
///
/// # Panics
/// Calls must be made within a Tokio runtime that has timers and I/O enabled, and panic elsewhere.
pub struct RedisStore {
    servers: Servers,
    /// Set if a grant is of use only once replicas have it.
    replicas: Option<Arc<Replicas>>,
    namespace: String,
}

impl RedisStore {
    /// Connects to the server, the primary or the cluster that a URL names.
    ///
    /// - `redis://[[user]:password@]host[:port][/db]`, `rediss://..` (TLS; with the feature
    ///   `redis-rustls`) or `unix:///path` names a server.
    /// - `redis+sentinel://..` names the primary that its Sentinels monitor.
    /// - `redis+cluster://..` names a cluster.
    ///
    /// `valkey` and `valkeys` mean the same as `redis` and `rediss`, and `redis+unix` as `unix`.
    ///
    /// [`LockClient::connect`](crate::LockClient::connect) describes the URLs. The [module
    /// documentation](self) lists the keys. Two namespaces never share a lock.
    ///
    /// Connecting takes at most 2.5 s. Dropping the future closes the connections it has opened.
    ///
    /// # Errors
    /// - `InvalidUrl`: the URL does not name a Redis server, names a database that the server does
    ///   not have, or needs a feature that is not compiled in.
    /// - `NoRuntime`: the call is made outside of a Tokio runtime, or in one without timers.
    /// - `InvalidSpec`: the namespace is empty, longer than 64 bytes, contains `:`, a brace or a
    ///   control character, or is `f` or `q`.
    /// - `Unavailable`: no server answers, or it cannot serve requests now.
    /// - `Unauthenticated`, `Forbidden`: the server requires another user; the message
    ///   names the remedy.
    /// - `ReadOnly`: the server is a replica.
    /// - `WrongServer`: the server is not Redis, is a Sentinel, or is older than 6.0.
    /// - `IncompatibleFormat`: the keys of the namespace have the format of another version of this
    ///   library.
    #[doc(hidden)]
    pub async fn connect(url: &str, namespace: &str) -> Result<Self, LockError> {
        Self::connect_with(url, namespace, RedisOptions::default()).await
    }

    /// Connects as [`connect`](Self::connect) does, with `options` for what a URL cannot express,
    /// such as certificates.
    ///
    /// # Errors
    /// The errors of [`connect`](Self::connect), and `InvalidSpec` for invalid options.
    #[doc(hidden)]
    pub async fn connect_with(
        url: &str,
        namespace: &str,
        options: RedisOptions,
    ) -> Result<Self, LockError> {
        let store = Self::open(url, namespace, &options)?;
        store.ready().await?;
        Ok(store)
    }

    /// Connects in the background. Until a server answers, calls fail with its error.
    ///
    /// # Errors
    /// Those of [`connect_with`](Self::connect_with) that need no server.
    pub(crate) fn open(
        url: &str,
        namespace: &str,
        options: &RedisOptions,
    ) -> Result<Self, LockError> {
        check_namespace(namespace)?;
        options.check()?;
        let url = &*url::with_lower_scheme(url);
        match url::topology(url) {
            Some("sentinel") => {
                let (sentinels, options) = url::sentinel::open(url, options.clone())?;
                Self::of_one(Target::Primary(Arc::new(sentinels)), namespace, &options)
            }
            Some("cluster") => Self::of_cluster(url::cluster(url, options)?, namespace, options),
            _ => {
                let server = url::SERVER.endpoint(url, options)?;
                Self::of_one(Target::Server(Arc::new(server)), namespace, options)
            }
        }
    }

    /// Connects to the servers of a quorum, at least three, for tests of a single one of them. They
    /// do not vote for `longest_lease` after a restart or without their data.
    ///
    /// # Errors
    /// The errors of [`LockClient::connect`](crate::LockClient::connect).
    #[doc(hidden)]
    pub async fn members(
        urls: &[&str],
        namespace: &str,
        longest_lease: Duration,
    ) -> Result<Vec<(String, Arc<dyn QuorumMember>)>, LockError> {
        let options = RedisOptions::new().longest_lease(longest_lease);
        let url = format!("redlock:{}", urls.join(","));
        let members = topology::redlock::open(&url, namespace, &options)?;
        members.ready().await?;
        Ok(members.each())
    }

    /// Returns the `ACL SETUSER` line with the minimal rights for a user of `namespace`.
    ///
    /// A database other than 0 also needs `+select`, and `min_replicas` needs `+wait`. Redis 6.0
    /// has no rules for channels: leave out the word that begins with `&`.
    ///
    /// ```
    /// use lock_runtime::store::redis::RedisStore;
    /// let line = RedisStore::acl_line("lock");
    /// assert!(line.starts_with("ACL SETUSER <user> on ><password> ~lock:* ~{lock:*}:f "));
    /// ```
    pub fn acl_line(namespace: &str) -> String {
        AclLine::new(namespace, 0).to_string()
    }

    /// Returns the `ACL SETUSER` line for the nodes of a cluster, each of which has its own users.
    ///
    /// ```
    /// use lock_runtime::store::redis::RedisStore;
    /// let line = RedisStore::cluster_acl_line("lock");
    /// assert!(line.ends_with(" +cluster|slots +asking +ssubscribe +sunsubscribe +spublish"));
    /// ```
    pub fn cluster_acl_line(namespace: &str) -> String {
        AclLine::of_cluster(namespace).to_string()
    }

    /// Creates the store of a cluster that is still to be found.
    fn of_cluster(
        seeds: Vec<Endpoint>,
        namespace: &str,
        settings: &RedisOptions,
    ) -> Result<Self, LockError> {
        settings.refuse_replicas("a cluster does not support waiting for replicas")?;
        runtime::check()?;
        let addresses: Vec<_> = seeds.iter().map(Endpoint::to_string).collect();
        let cluster = Cluster::new(seeds, namespace, settings)
            .map_err(|error| cannot_keep_locks(&format!("at {}", addresses.join(",")), error))?;
        Ok(Self {
            servers: Servers::Cluster(cluster),
            replicas: None,
            namespace: namespace.to_owned(),
        })
    }

    /// Creates the store of a server or a primary, and starts to connect to it.
    fn of_one(target: Target, namespace: &str, settings: &RedisOptions) -> Result<Self, LockError> {
        runtime::check()?;
        let acl = AclLine::new(namespace, target.info().redis_settings().db())
            .waiting(settings.min_replicas.is_some());
        let pushes = Pushes::new(namespace).confirming(settings.confirms());
        let connector = Connector::new(target, pushes, acl).with(settings);
        let connection = Connection::begin(connector);
        let required = settings.min_replicas;
        Ok(Self {
            replicas: required.map(|required| Replicas::new(&connection, required)),
            servers: Servers::One(connection),
            namespace: namespace.to_owned(),
        })
    }
}

impl Connecting for RedisStore {
    fn ready(&self) -> BoxFuture<'_, Result<(), LockError>> {
        let connect = async {
            match &self.servers {
                Servers::One(connection) => connection.ready().await?,
                Servers::Cluster(cluster) => cluster.find().await?,
                #[cfg(all(test, feature = "records"))]
                Servers::Simulated(_) => {}
            }
            match &self.replicas {
                Some(replicas) => replicas.check().await,
                None => Ok(()),
            }
        };
        let place = format!("at {}", self.servers.address());
        Box::pin(connect_within(CONNECT, place, connect))
    }

    fn begin(&self) {
        // A server is connected to as soon as it is opened.
        if let Servers::Cluster(cluster) = &self.servers {
            cluster.refresh_soon();
        }
    }
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore")
            .field("address", &self.servers.address())
            .field("namespace", &self.namespace)
            .finish_non_exhaustive()
    }
}
