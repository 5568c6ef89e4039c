//! Redis as the store.
//!
//! # Connecting
//!
//! | Deployment | URL |
//! |---|---|
//! | one server | `redis://[[user]:password@]host[:port][/db]` |
//! | a primary and its replicas | `redis+sentinel://..`, see [below](#sentinel) |
//! | a cluster | `redis+cluster://..`, see [below](#cluster) |
//! | several independent servers | `redlock:..`, see [`majority`](super::majority) |
//!
//! `rediss` in place of `redis` connects over TLS and needs the feature `rustls`. `valkey` and
//! `valkeys` mean the same as `redis` and `rediss`. `unix:///path` (or `redis+unix://`) is a server
//! on a socket. The case of a scheme does not matter.
//! [`RedisOptions`](crate::RedisOptions) has the settings that a URL does not have.
//!
//! ```no_run
//! # use lock_runtime::LockClient;
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), lock_runtime::LockError> {
//! let locks = LockClient::builder()
//!     .namespace("shop")
//!     .connect("redis://locker:secret@127.0.0.1:6379/0")
//!     .await?;
//! # Ok(()) }
//! ```
//!
//! Redis 6.0 or later is required. All calls of a client share one RESP3 connection, which is
//! re-established in the background when it breaks (see [Outages](#outages)). Push messages about
//! locks that were handed off to the client arrive on the same connection. The client subscribes to
//! one channel of its own and to one of the namespace, but to none per lock.
//!
//! `?protocol=resp2` at the end of the URL is for a server or proxy that refuses `HELLO 3`. RESP2
//! has no messages on such a connection, so waiters only poll, a revoked holder notices at its next
//! renewal, and the end of the connection is noticed at the next call, which waits for another one.
//! The client warns of it once. Exclusion, leases and fencing tokens do not depend on messages, but
//! a proxy must send all calls to one server. For a cluster or several servers it is refused: a
//! proxy would hide a restart of its server.
//!
//! # Sentinel
//!
//! `redis+sentinel://[[user]:password@]host[:26379][,host...]/<name of the primary>[/db]`
//!
//! - `rediss+sentinel://` uses TLS to the Sentinels and to the primary.
//! - User and password are those of the primary. The parameters
//!   `?sentinel_user=..&sentinel_password=..` give those of the Sentinels.
//! - Percent-encode special characters.
//! - If the two differ in more than the credentials,
//!   [`LockClientBuilder::connect_sentinel`](crate::LockClientBuilder::connect_sentinel) takes a
//!   URL for each.
//!
//! ```no_run
//! # use lock_runtime::LockClient;
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), lock_runtime::LockError> {
//! let url = "redis+sentinel://:secret@10.0.0.1,10.0.0.2,10.0.0.3/mymaster?min_replicas=1";
//! let locks = LockClient::connect(url).await?;
//! # Ok(()) }
//! ```
//!
//! Name all Sentinels. For each new connection the client asks all of them at the same time, and
//! uses the latest configuration among the replies of a majority. So a Sentinel that hangs, or
//! that was cut off and names an old primary, has no effect. If fewer than a majority reply, the
//! latest configuration among the replies counts.
//!
//! While connected, the client listens to the Sentinels, on one connection to each, and switches
//! as soon as one of them announces a new primary. If the Sentinels have users, theirs needs
//! `+sentinel|master +sentinel|get-master-addr-by-name +subscribe &+switch-master`.
//!
//! During a failover, requests that do not wait fail as `Unavailable` or `ReadOnly`, and waiting
//! requests keep waiting. Leases are renewed at the new primary within 200 ms of the connection
//! to it.
//!
//! ## What a failover may lose
//!
//! Redis replicates to its replicas after it has replied. Writes that the promoted replica had
//! not received are lost:
//!
//! | Lost write | Effect |
//! |---|---|
//! | a grant in the last moment | **two holders**, see below |
//! | a renewal | the lock may end sooner |
//! | a release | the lock ends with its lease |
//!
//! After a lost grant the first holder relies on its lock until its next renewal, at most a third
//! of the lease later. A broken connection brings the renewal forward. The holder is then
//! notified of the loss.
//!
//! If the old primary is cut off together with some of its clients, these clients keep their
//! locks for as long as it answers. Fencing tokens keep increasing over a failover, because they
//! are at least the server's clock.
//!
//! ## Waiting for replicas
//!
//! [`min_replicas`](crate::RedisOptions::min_replicas) counts a grant only when the given
//! number of replicas has it (`WAIT`). In the URL of Sentinels it is
//! `?min_replicas=1&replica_timeout=50ms`. The option works with a single server as well.
//!
//! - With too few replicas the request is refused as `Unavailable`, or keeps waiting, and the
//!   grant is given up.
//! - All grants of a client share one additional connection. One `WAIT` serves all grants that
//!   have arrived in the meantime.
//! - The user needs `+wait`.
//! - After a failover no grant counts until the new primary has its replicas. The Sentinels
//!   attach the remaining ones when they announce the new primary, about a second after the
//!   promotion. Requests are granted again within milliseconds of that.
//!
//! This narrows the gap, but it **does not make Redis consistent** (see the documentation of
//! [`WAIT`], [Jepsen] on Redis and Sentinel, and [Kleppmann] on locks):
//!
//! - The Sentinels choose one of the replicas. If `min_replicas` is less than the number of
//!   replicas, they may promote one without the grant.
//! - A replica that has the grant may lose it when it restarts.
//! - Renewals are not waited for.
//!
//! `min-replicas-to-write` and `min-replicas-max-lag` on the server limit the time for which a
//! primary that was cut off continues. Where two holders would do harm, let the resource check
//! the [fencing token](crate::FencingToken), or use [several independent
//! servers](super::majority).
//!
//! [`WAIT`]: https://redis.io/docs/latest/commands/wait/
//! [Jepsen]: https://aphyr.com/posts/283-jepsen-redis
//! [Kleppmann]: https://martin.kleppmann.com/2016/02/08/how-to-do-distributed-locking.html
//!
//! # Cluster
//!
//! `redis+cluster://[[user]:password@]host[:port][,host[:port]...]`, or `rediss+cluster://` for
//! TLS. The builder method is
//! [`LockClientBuilder::connect_cluster`](crate::LockClientBuilder::connect_cluster).
//!
//! List some nodes. One that answers is sufficient, and it may be a replica: it names the other
//! nodes, and the client connects to them as the same user. A cluster has no numbered databases.
//!
//! ```no_run
//! # use lock_runtime::LockClient;
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), lock_runtime::LockError> {
//! let url = "redis+cluster://locker:secret@10.0.0.1,10.0.0.2,10.0.0.3";
//! let locks = LockClient::connect(url).await?;
//! # Ok(()) }
//! ```
//!
//! - **A dead or silent node** makes the locks that it keeps `Unavailable`, and no others. The
//!   client finds its replica within a quarter of a second after it has taken over. A waiting
//!   request continues there.
//! - **A failover may lose locks**, because replication lags behind. The new primary may grant
//!   again a lock that the old one granted in its last moments. The first holder notices at its
//!   next renewal. Its fencing token is the smaller one: let the resource check it. Manual
//!   failovers (`CLUSTER FAILOVER`) and moved slots lose nothing.
//! - **A slot that is being moved** keeps its locks: they are renewed and released in the
//!   meantime. New requests are `Unavailable` until the slot has arrived, and waiting ones are
//!   served then. A downgrade may lose its lock during the move.
//! - **Several keys without waiting** cost one round trip for each slot. Keys with the same hash
//!   tag, such as `{order:7}:stock` and `{order:7}:payment`, share a slot, a round trip and a
//!   node.
//! - **Waiters are notified** on a channel of the lock's slot, only by the node that keeps it.
//!   This needs Redis 7.0. With older versions, waiting requests only poll, once a second. For
//!   each node with waiters the client opens a second connection, and closes it when there are
//!   none left.
//!
//! # Outages
//!
//! A server that does not answer is probed in the background, one attempt at a time. The pause
//! between two attempts is 100 ms to 200 ms, up to 500 ms if the server refuses a password in place
//! of one that it has accepted before, and up to 2 s if it refuses the client for another reason.
//! Meanwhile:
//!
//! | | |
//! |---|---|
//! | a request that does not wait | fails at once, once an attempt to connect has failed |
//! | a waiting request | waits for the server until its wait is over, or as below |
//! | a held lock | is renewed until its validity ends; is lost then |
//! | a release | is repeated until the server has confirmed it, or the lease has ended |
//!
//! A connection on which calls have been sent for two seconds, or for `unavailable_after` if that
//! is shorter, without any answer is given up, too.
//! A single lost reply, or a connection that is re-established at once, refuses nothing.
//!
//! A wait may outlast a failover, so waiting requests wait by default. Where callers should not
//! hang for their whole wait, set
//! [`unavailable_after`](crate::LockClientBuilder::unavailable_after). When a server has not
//! answered for this long, requests for its keys are refused at once with `Unavailable`, also those
//! that already wait (a circuit breaker). The error has the time since the last answer, and the
//! cause.
//!
//! ```no_run
//! # use std::time::Duration;
//! # use lock_runtime::LockClient;
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), lock_runtime::LockError> {
//! let locks = LockClient::builder()
//!     .unavailable_after(Duration::from_secs(1))
//!     .connect_lazy("redis://127.0.0.1:6379/0")?;
//! # Ok(()) }
//! ```
//!
//! - A server that falls silent while the connection stays open is noticed when calls time out,
//!   half a second after the setting at the latest under load.
//! - In a cluster, one dead node refuses its own keys only. With several independent servers,
//!   requests are refused once a majority is impossible.
//! - Set it longer than a failover takes if waiting requests should outlast one.
//! - The server is probed up to ten times a second at first, and then at intervals of up to an
//!   eighth of the outage, so that the clients of a fleet do not keep it from coming back. Requests
//!   are served again that much later, and 2 s at most.
//! - If the network swallows packets, the first attempt after the outage may be one that began
//!   during it; requests are then served up to two seconds later.
//!
//! [`connect_lazy`](crate::LockClientBuilder::connect_lazy) creates the client while the store is
//! away, so that a service can start. The URL and the settings are checked at once. Until the store
//! answers, a request fails as in any other outage. What connecting would have refused, such as a
//! wrong password or a namespace of another format, is the error of each request. With several
//! independent servers, two addresses of the same one are found when both are connected; the second
//! one then has no vote.
//!
//! The log has a line when a connection is made, lost (`connection lost`) and restored, with the
//! duration of the outage. Lines that an outage would repeat for each request or lock are
//! summarised: the first is written at once, then one for ten seconds and cause. Its field
//! `left_out` is the number of lines that it stands for in addition to itself.
//!
//! # Credentials that change
//!
//! A password that is replaced, a token that ends or a renewed certificate does not end a client.
//!
//! These are asked for, or read, at each attempt to connect:
//!
//! - the user and the password of the function that
//!   [`credentials`](crate::RedisOptions::credentials) takes, and for the Sentinels of that of
//!   [`sentinel_credentials`](crate::RedisOptions::sentinel_credentials),
//! - the passwords in the files `LOCK_PASSWORD_FILE` and `LOCK_SENTINEL_PASSWORD_FILE`,
//! - the certificates in the files of
//!   [`root_certificate_file`](crate::RedisOptions::root_certificate_file) and
//!   [`client_certificate_files`](crate::RedisOptions::client_certificate_files), and of the
//!   variables `LOCK_ROOT_CERTIFICATE`, `LOCK_CLIENT_CERTIFICATE` and `LOCK_CLIENT_KEY`.
//!
//! The URL, and certificates that are passed as texts, stay as they are.
//!
//! A token of a cloud's IAM is such a password. `token` stands for the call of its SDK, which keeps
//! a token until it ends.
//!
//! ```no_run
//! # use std::time::Duration;
//! # async fn token() -> Result<String, std::io::Error> { Ok(String::new()) }
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), lock_runtime::LockError> {
//! use lock_runtime::{Credentials, LockClient, RedisOptions};
//!
//! let options = RedisOptions::new().credentials(async || {
//!     let token = token().await?;
//!     Ok(Credentials::new("app", token).valid_for(Duration::from_secs(12 * 3600)))
//! });
//! let builder = LockClient::builder().redis(options);
//! let locks = builder.connect("rediss://cache.example:6379").await?;
//! # Ok(()) }
//! ```
//!
//! - [`valid_for`](crate::Credentials::valid_for) is the time for which the server accepts a
//!   *connection*: 12 hours on ElastiCache and MemoryDB, the lifetime of the token on Azure. After
//!   about three quarters of it, the client authenticates its connections again (`AUTH`), between
//!   two calls. No call fails or waits for that.
//! - If there are no new credentials then, or if the server refuses them, the connection keeps its
//!   earlier ones, a warning is logged, and the client tries again each second.
//! - When a server that has accepted the client refuses its password, the new one may arrive a
//!   moment later. Requests that wait go on waiting, held locks are renewed until their validity
//!   ends, and releases are repeated. A request that does not wait is refused as `Unauthenticated`
//!   at once.
//!   [`connect`](crate::LockClient::connect) never waits for another password.
//! - An attempt to connect waits for the application for a second. Its error is that of the
//!   attempt, `Unavailable`.
//! - All servers of a client get the credentials of the same function. Those of independent servers
//!   with different users leave the user to the URLs:
//!   [`Credentials::password`](crate::Credentials::password).
//!
//! # TLS
//!
//! - The application installs the crypto provider at the start of `main`:
//!   `rustls::crypto::ring::default_provider().install_default()`. If it does not, and rustls
//!   cannot determine the provider, connecting fails with an error that contains this line. (With
//!   `panic = "abort"` rustls ends the process instead.)
//! - `rediss://` trusts the certificates of the system, or those in the file `SSL_CERT_FILE`
//!   instead.
//! - [`RedisOptions::root_certificate`](crate::RedisOptions::root_certificate) sets a private
//!   certificate authority, or pins the server's own certificate where no chain can verify it (a
//!   self-signed one, or one for another name).
//!   [`client_certificate`](crate::RedisOptions::client_certificate) sets a client certificate.
//!   Those that are renewed belong in [files](#credentials-that-change).
//!
//! # Data layout
//!
//! | Use | Key | Value |
//! |---|---|---|
//! | exclusive, `write` | `<namespace>:<name>` | STRING: the token, expiring with its lease |
//! | `read` | `<namespace>:<name>` | ZSET: the token and expiry (server clock) of each reader |
//! | `permits` | `<namespace>:permits:<name>` | ZSET: the same for each holder of a permit |
//! | fencing | `{<namespace>:<name>}:f` | STRING: the latest fencing token, for a day |
//! | waiting | `{<namespace>:<name>}:q` | HASH: the wait queue |
//! | format | `f:<namespace>:format` | STRING: the version of this layout; absent for version 1 |
//! | settings | `f:<namespace>:settings` | STRING, with several servers: settings of all clients |
//!
//! | names | `f:<namespace>:client:<id>` | STRING: the name of a client |
//! | grants | `f:<namespace>:grants:<id>` | HASH: since when a client reads and holds permits |
//!
//! The wait queue is deleted with its last waiter, or 10 s after the last poll. The name of a
//! client and the times of its grants are deleted when it is shut down, or 15 minutes after its
//! last sign of life.
//!
//! # Memory
//!
//! A held lock takes some 250 bytes, and each process that waits for it 200. A released lock leaves
//! its fencing token: 150 bytes, and up to 740 for a long key, for a day. With *n* new keys per
//! second that is 13 to 64 MB × *n*: a lock for each of 1,000 requests per second fills 13 GB, and
//! a server that is full refuses all locks.
//! [`keep_fences_for`](crate::LockClientBuilder::keep_fences_for) sets a shorter time. With five
//! minutes the same service fills 45 MB. The tokens increase without the record, as the server's
//! clock determines them; the record protects against a clock that falls back by less than its
//! life. While a lock is held for longer than that, `inspect` does not know since when.
//!
//! A name with a hash tag of its own, such as `{orders}:42`, keeps it. Its fencing key is
//! `f:<namespace>:{orders}:42`, its wait queue `q:<namespace>:{orders}:42`.
//!
//! Each new connection reads the format, in a cluster those to the node that owns the key. A
//! client refuses a namespace of another format as `IncompatibleFormat`.
//!
//! Data of another form under these names is foreign data. It is left untouched, and the request
//! is refused as `ForeignKey`. The error names the key.
//!
//! The record of an exclusive lock is that of `SET key token NX PX lease`. Other libraries that
//! lock with `SET NX PX` under the same key exclude these locks, and are excluded by them.
//!
//! # Settings of the server
//!
//! - Set `maxmemory-policy noeviction`. Any other policy may evict a held lock.
//! - Create a user with only the permissions that locks need. Each `Forbidden` error shows
//!   the ACL line. In a cluster each node has its own users, and
//!   [`RedisStore::cluster_acl_line`](crate::store::redis::RedisStore::cluster_acl_line) returns
//!   the line for them.
//! - Do not connect to a replica. It cannot write, and connecting to it fails with an error that
//!   names the cause.
//! - When a primary becomes a replica, the client drops the connection at the first refusal, and
//!   resolves the address again, through the Sentinels or by its host name.
//! - [`LockClient::health`](crate::LockClient::health) checks these settings, and others: clocks,
//!   replicas, memory, persistence, access rules, and the slots of a cluster.
