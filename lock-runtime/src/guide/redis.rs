//! A Redis server as the store.
//!
//! # Connecting
//!
//! `redis://[[user]:password@]host[:port][/db]`, or `rediss://` for TLS with the feature `rustls`. What a URL cannot
//! say, a ready `redis::Client` can: [`LockClientBuilder::redis_client`](crate::LockClientBuilder::redis_client).
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
//! - An authority or a client certificate of your own comes with the client: `redis::Client::build_with_tls`.
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
//! these names and is not of that form is somebody else's: it is left untouched, and the request is refused as `ForeignKey`.
//!
//! Other libraries that lock by `SET NX PX` exclude ours, and ours them, under the same key.
//!
//! # Settings of the server
//!
//! - `maxmemory-policy noeviction`: any other may evict a held lock.
//! - A user of its own with what locks need and nothing else; the README and every `Forbidden` error show the line. Each node of a cluster has users of
//!   its own; [`RedisStore::cluster_acl_line`](crate::store::redis::RedisStore::cluster_acl_line) has the line for them.
//! - No replica: it cannot write. A client that is given one is told so.
