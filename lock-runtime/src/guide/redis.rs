//! A Redis server as the store.
//!
//! # Connecting
//!
//! `redis://[[user]:password@]host[:port][/db]`, or `rediss://` for TLS with the feature `rustls`; `redis+sentinel://` for a
//! primary and its replicas ([below](#sentinel)). What a URL cannot say, a ready `redis::Client` can: [`LockClientBuilder::redis_client`](crate::LockClientBuilder::redis_client).
//!
//! ```no_run
//! # use lock_runtime::LockClient;
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), lock_runtime::LockError> {
//! let locks = LockClient::builder().namespace("shop").connect("redis://locker:secret@127.0.0.1:6379/0").await?;
//! # Ok(()) }
//! ```
//!
//! All calls of a client share one connection over RESP3, which is made again when it breaks. On it the client hears of locks that
//! were handed over to it: it subscribes to one channel of its own and one of the namespace, and to none per lock. Redis 6.0 or
//! later.
//!
//! # Sentinel
//!
//! `redis+sentinel://[[user]:password@]host[:26379][,host...]/<name of the primary>[/db]`, `rediss+sentinel://` for TLS to the Sentinels
//! and to the primary. User and password are the primary's; those of the Sentinels are parameters:
//! `?sentinel_user=..&sentinel_password=..`. Percent-encode special characters. Where the two differ in more than that,
//! [`LockClientBuilder::sentinel`](crate::LockClientBuilder::sentinel) takes a URL for each.
//!
//! ```no_run
//! # use lock_runtime::LockClient;
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), lock_runtime::LockError> {
//! let locks = LockClient::connect("redis+sentinel://:secret@10.0.0.1,10.0.0.2,10.0.0.3/mymaster?min_replicas=1").await?;
//! # Ok(()) }
//! ```
//!
//! Name all Sentinels. Each time a connection is made they are all asked at once, and among the answers of a majority the
//! latest configuration counts: one that hangs, or was cut off and names an old primary, changes nothing. (Where fewer answer, the
//! latest among those that do.) While the
//! connection stands the client listens to them (a connection to each), and moves as soon as one tells of a new primary. A
//! user on the Sentinels needs `+sentinel|master +sentinel|get-master-addr-by-name +subscribe &+switch-master`.
//!
//! During a failover requests are `Unavailable` or `ReadOnly`, those that wait go on waiting, and leases are renewed at the new
//! primary within 200 ms of the connection to it.
//!
//! ## What a failover may lose
//!
//! Redis copies to its replicas after it has answered. What the promoted replica did not have yet is lost: a lock that was
//! granted in the last moment, a renewal (then the lock may end sooner), a release (then it ends with its lease). A lost
//! grant means **two holders**: the first believes in its lock until its next renewal, which is a third of the lease away at
//! most and is hurried as soon as the connection breaks; then it is told that the lock is lost. Where the old primary is cut off
//! together with some of its clients, those hold on to it for as long as it answers. Fencing tokens go on increasing over a
//! failover, as they are no smaller than the server's clock.
//!
//! [`min_replicas`](crate::LockClientBuilder::min_replicas) (`?min_replicas=1&replica_timeout=50ms`, or the builder, for a single server as
//! well) tells of a grant only when so many replicas have it (`WAIT`); with too few the request is `Unavailable`, or goes on
//! waiting, and the grant is given up. All grants of a client share one more connection, on which one wait serves all that have
//! come meanwhile. The user needs `+wait`.
//!
//! After a failover no grant counts until the new primary has its replicas: the Sentinels attach the remaining ones when they name
//! it, about a second after they have promoted it. Requests are granted again within milliseconds of that.
//!
//! It narrows the gap and **does not make Redis consistent**
//! ([the documentation of `WAIT`](https://redis.io/docs/latest/commands/wait/),
//! [Jepsen on Redis and Sentinel](https://aphyr.com/posts/283-jepsen-redis),
//! [Kleppmann on locks](https://martin.kleppmann.com/2016/02/08/how-to-do-distributed-locking.html)): Sentinels choose among the
//! replicas, and with fewer than all of them waited for they may promote one that does not have the grant; a replica that has
//! it may lose it when it starts again; renewals are not waited for. `min-replicas-to-write` and `min-replicas-max-lag` on the server end the
//! time for which a primary that was cut off goes on. Where two holders would do harm, let the resource check the
//! [fencing token](crate::FencingToken), or use a quorum of independent servers.
//!
//! # A cluster
//!
//! `redis+cluster://[[user]:password@]host[:port][,host[:port]...]`, or `rediss+cluster://`; or
//! [`LockClientBuilder::cluster`](crate::LockClientBuilder::cluster) with the URLs of some nodes. One that answers is enough, a replica
//! too: it names the others, which are spoken to as the same user. A cluster has no numbered databases.
//!
//! ```no_run
//! # use lock_runtime::LockClient;
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), lock_runtime::LockError> {
//! let locks = LockClient::connect("redis+cluster://locker:secret@10.0.0.1,10.0.0.2,10.0.0.3").await?;
//! # Ok(()) }
//! ```
//!
//! - **A dead or silent node** fails the locks that it keeps, with `Unavailable`, and no others. Its replica is found within a quarter of a
//!   second after it has taken over; a request that waits goes on there.
//! - **A failover may lose locks.** Replication lags behind: what the dead primary had granted in its last moments, the new one may
//!   not know, and grant again. The first holder notices at its next renewal, and its fencing token is the smaller one: check it where the
//!   lock protects something. Manual failovers (`CLUSTER FAILOVER`) and moved slots lose nothing.
//! - **A slot that is being moved** keeps its locks: they are renewed and given back all the while. New ones are `Unavailable` until the slot
//!   has arrived; requests that wait are served then. A downgrade may lose its lock meanwhile.
//! - **Several keys without waiting** cost a round trip for each slot. Keys with the same hash tag, `{order:7}:stock` and `{order:7}:payment`,
//!   share a slot, a round trip and a node.
//! - **Who waits is told** on a channel of the lock's slot, by its node alone (Redis 7.0; before, waiting requests only ask once a
//!   second). Each node that somebody waits at is listened to on a second connection, which is closed when nobody does any more.
//!
//! # TLS
//!
//! - The application installs the crypto provider at the start of `main`:
//!   `rustls::crypto::ring::default_provider().install_default()`. Where it doesn't and rustls cannot tell which one is
//!   meant, connecting is refused with this line (with `panic = "abort"` rustls ends the process instead).
//! - `rediss://` trusts what the system trusts, or the file in `SSL_CERT_FILE` instead.
//! - An authority of your own is named by [`LockClientBuilder::root_certificate`](crate::LockClientBuilder::root_certificate), a certificate
//!   of the client by [`client_certificate`](crate::LockClientBuilder::client_certificate).
//!
//! # What lies there
//!
//! | | key | value |
//! |---|---|---|
//! | exclusive, `write` | `<namespace>:<name>` | STRING: the token, as `SET key token NX PX lease` would write it |
//! | `read` | `<namespace>:<name>` | ZSET: each reader's token and when it expires by the server's clock |
//! | `permits` | `<namespace>:permits:<name>` | ZSET: the same for holders of a permit |
//! | fencing | `{<namespace>:<name>}:f` | STRING: the latest fencing token, for a day |
//! | waiting | `{<namespace>:<name>}:q` | HASH: who stands in line; gone with the last of them, or 10 s after their last word |
//!
//! A name with a hash tag of its own, `{orders}:42`, keeps it, and its fence is `f:<namespace>:{orders}:42`, its line `q:<namespace>:{orders}:42`. What lies under
//! these names and is not of that form is somebody else's: it is left untouched, and the request is refused as `ForeignKey`,
//! which names the key.
//!
//! Other libraries that lock by `SET NX PX` exclude ours, and ours them, under the same key.
//!
//! # Settings of the server
//!
//! - `maxmemory-policy noeviction`: any other may evict a held lock.
//! - A user of its own with what locks need and nothing else; the README and every `Forbidden` error show the line. Each node of a cluster has users of
//!   its own; [`RedisStore::cluster_acl_line`](crate::store::redis::RedisStore::cluster_acl_line) has the line for them.
//! - No replica: it cannot write. A client that is given one is told so. A primary that becomes a replica is left with its
//!   first refusal: the address is resolved anew, by the Sentinels or by its name.
