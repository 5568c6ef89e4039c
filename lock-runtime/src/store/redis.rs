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
//! - The fencing token is kept for a day after each grant. The wait queue is deleted when it is
//!   empty, or expires 10 s after the last request of a waiter.
//! - A lock that is released before its `min_hold` is reserved under the name `<token>.kept`.
//!
//! Every operation is a single script, so it is atomic, and safe to repeat. Foreign data under
//! these keys is left untouched, and the operation reports it.
//!
//! # Notifications
//!
//! The script that releases a lock also hands it off to the first waiter. That waiter is notified
//! on the channel of its store, `<namespace>:<random>`. If the lock is reserved instead
//! (`min_hold`), the waiter is notified there of the end of the reservation. Revoked holders are
//! announced to every store on `<namespace>:revoked`. Each connection subscribes to these two
//! channels, whatever the number of locks. Polls make up for lost messages.
//!
//! In a cluster, a message that is published on one node is forwarded to all others. Grants
//! are therefore sent by the node that serves the lock's slot, on a sharded channel of that
//! slot, `<namespace>:<random>:{number}` (`SPUBLISH`). A store subscribes to it only while one
//! of its requests waits in the slot. Sharded channels need Redis 7.0; with older versions
//! waiters only poll.
//!
//! # Cluster
//!
//! All keys of a lock are in one slot, and each call is sent to the node that serves it. While a
//! slot migrates, the keys of a lock may be split between two nodes. Operations that need all of
//! them then fail with [`Unavailable`](StoreErrorKind::Unavailable). Renewal and release need a
//! single key, and continue to work.
//!
//! Several locks in one slot are acquired in one step. Locks in different slots are acquired one
//! after another, in an order that is the same for all clients, and are released at once if one of
//! them is refused.
//!
//! # Access rules
//!
//! On a server with users, [`RedisStore::acl_line`] returns the rule that locks need, and
//! [`RedisStore::cluster_acl_line`] the rule for the nodes of a cluster.

mod acl;
pub(crate) mod clock;
mod cluster;
mod connection;
mod error;
mod handshake;
mod link;
mod names;
mod on_drop;
mod pushes;
pub(crate) mod quarantine;
pub(crate) mod redlock;
mod replicas;
mod reply;
mod scripts;
mod sentinel;
mod sentinel_url;
mod servers;
mod settings;
mod several;
mod target;
mod url;

use std::{
    fmt,
    future::ready,
    sync::{Arc, Weak},
    time::Duration,
};

use futures_util::future::{BoxFuture, join_all};
use tokio::time::Instant;

use self::{
    acl::AclLine,
    cluster::Cluster,
    connection::{Connection, Errand, Repeat},
    names::{Names, lock_name, marker_name},
    pushes::Pushes,
    replicas::Replicas,
    reply::{Reply, foreign_part, unexpected},
    scripts::{Call, Script},
    servers::{Answer, Freed, Servers},
    target::Target,
};
use super::{
    AcquireAllReply, AcquireReply, ConvertReply, Grant, Hold, IfBusy, Inspection, KeyPart,
    KeyRequest, Limits, Listener, NextHolder, PollReply, QuorumMember, RaiseReply, Release,
    ReleaseReply, RenewReply, Renewal, RevokeReply, RevokeScope, Store, StoreError, StoreErrorKind,
};
use crate::{
    error::LockError,
    fence::FencingToken,
    key::LockKey,
    runtime,
    spec::{LockKind, Mode},
};

pub(crate) use self::names::check_namespace;
pub use self::settings::RedisOptions;

/// The time limit of [`RedisStore::connect`]: two attempts of a second each, the pause between
/// them, and the checks.
const CONNECT: Duration = Duration::from_millis(2500);

/// A lock store on a Redis server or a Redis Cluster, version 6.0 or later.
///
/// All calls to a server or node share one connection, which is re-established when it is lost.
/// Calls in flight then fail with [`Unavailable`](StoreErrorKind::Unavailable) and an unknown
/// outcome, and every [`Listener`] receives [`Disconnected`](super::StoreEvent::Disconnected). A
/// call waits for its reply as long as the connection is up, so run it under a time-out. A dropped
/// call may still be executed; follow it with [`abandon`](Store::abandon).
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
    ///   `rustls`) or `unix:///path` names a server.
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
    pub async fn connect(url: &str, namespace: &str) -> Result<Self, LockError> {
        Self::connect_with(url, namespace, RedisOptions::default()).await
    }

    /// Connects as [`connect`](Self::connect) does, with `options` for what a URL cannot express,
    /// such as certificates.
    ///
    /// # Errors
    /// The errors of [`connect`](Self::connect), and `InvalidSpec` for invalid options.
    pub async fn connect_with(
        url: &str,
        namespace: &str,
        options: RedisOptions,
    ) -> Result<Self, LockError> {
        check_namespace(namespace)?;
        options.check()?;
        let url = &*url::with_lower_scheme(url);
        match url::topology(url) {
            Some("sentinel") => {
                let (sentinels, options) = sentinel_url::open(url, options)?;
                Self::open(Target::Primary(Arc::new(sentinels)), namespace, &options).await
            }
            Some("cluster") => {
                Self::open_cluster(url::cluster(url, &options)?, namespace, &options).await
            }
            _ => {
                let server = url::SERVER.client(url, &options)?;
                Self::open(Target::Server(Arc::new(server)), namespace, &options).await
            }
        }
    }

    /// Connects to the primary that the Sentinels at `urls` monitor. `primary` is a URL with the
    /// name of the primary in place of the host.
    pub(crate) async fn by_sentinels(
        primary: &str,
        urls: &[String],
        namespace: &str,
        settings: &RedisOptions,
    ) -> Result<Self, LockError> {
        check_namespace(namespace)?;
        let sentinels =
            sentinel_url::open_each(primary, urls.iter().map(String::as_str), settings)?;
        Self::open(Target::Primary(Arc::new(sentinels)), namespace, settings).await
    }

    /// Connects to the Redis Cluster that any of the `seeds` belongs to. The seeds are URLs of
    /// nodes, `redis://[[user]:password@]host[:port]` or `rediss://..`.
    ///
    /// The credentials and TLS settings of the first seed are used for the other nodes.
    ///
    /// # Errors
    /// The errors of [`connect`](Self::connect).
    pub async fn cluster(
        seeds: impl IntoIterator<Item = impl AsRef<str>>,
        namespace: &str,
    ) -> Result<Self, LockError> {
        check_namespace(namespace)?;
        let settings = RedisOptions::default();
        Self::open_cluster(url::nodes(seeds, &settings)?, namespace, &settings).await
    }

    pub(crate) async fn cluster_with(
        seeds: impl IntoIterator<Item = impl AsRef<str>>,
        namespace: &str,
        settings: &RedisOptions,
    ) -> Result<Self, LockError> {
        check_namespace(namespace)?;
        Self::open_cluster(url::nodes(seeds, settings)?, namespace, settings).await
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

    async fn open_cluster(
        seeds: Vec<redis::ConnectionInfo>,
        namespace: &str,
        settings: &RedisOptions,
    ) -> Result<Self, LockError> {
        settings.refuse_replicas("a cluster does not support waiting for replicas")?;
        let addresses: Vec<_> = seeds.iter().map(|seed| seed.addr().to_string()).collect();
        let servers = async {
            Ok((
                Servers::Cluster(Cluster::open(seeds, namespace).await?),
                None,
            ))
        };
        Self::over(servers, &addresses.join(","), namespace).await
    }

    async fn open(
        target: Target,
        namespace: &str,
        settings: &RedisOptions,
    ) -> Result<Self, LockError> {
        let place = target.to_string();
        let acl = AclLine::new(namespace, target.settings().db())
            .waiting(settings.min_replicas.is_some());
        let servers = async {
            let pushes = Pushes::new(namespace).inviting(settings.min_replicas.is_some());
            let connection = Connection::open(target, pushes, acl).await?;
            let replicas = match settings.min_replicas {
                Some(min_replicas) => Some(Replicas::open(&connection, min_replicas).await?),
                None => None,
            };
            Ok((Servers::One(Box::new(connection)), replicas))
        };
        Self::over(servers, &place, namespace).await
    }

    /// Creates the store once `servers` are connected. `place` names them in the error.
    async fn over(
        servers: impl Future<Output = Result<(Servers, Option<Arc<Replicas>>), StoreError>>,
        place: &str,
        namespace: &str,
    ) -> Result<Self, LockError> {
        runtime::check()?;
        let connected = tokio::time::timeout(CONNECT, servers).await;
        match connected.unwrap_or_else(|_| Err(StoreError::timed_out(CONNECT))) {
            Ok((servers, replicas)) => Ok(Self {
                servers,
                replicas,
                namespace: namespace.to_owned(),
            }),
            Err(error) => {
                let message = format!("cannot keep locks at {place}");
                Err(LockError::new(error.kind().into(), message).with_source(Some(error)))
            }
        }
    }

    /// Begins a call that needs only the key of the lock.
    fn on_lock(&self, script: &'static Script, key: &LockKey, kind: LockKind) -> Call {
        Call::new(script, 1).arg(lock_name(&self.namespace, key, kind))
    }

    /// Begins a call that may grant the lock, and needs its fence and its queue as well.
    fn on_all(&self, script: &'static Script, key: &LockKey, kind: LockKind) -> Call {
        Call::new(script, 3).names(Names::new(&self.namespace, key, kind))
    }

    async fn run(&self, call: Call) -> Result<Reply, StoreError> {
        let errand = Errand::Call(&call, Repeat::Once);
        self.servers.run(errand).await?.reply()
    }

    /// The error for a reply that the operation does not expect: foreign data, or a
    /// malformed reply.
    fn foreign(&self, key: &LockKey, kind: LockKind, reply: &Reply) -> StoreError {
        match foreign_part(reply.word()) {
            Some(part) => StoreError::foreign(self.name_of(key, kind, part).as_deref(), part),
            None => unexpected(),
        }
    }

    /// Waits until the required number of replicas have the grants.
    async fn settle<'a>(
        &self,
        grants: impl IntoIterator<Item = &'a Hold>,
    ) -> Result<(), StoreError> {
        match &self.replicas {
            Some(replicas) => replicas.have(&self.namespace, grants).await,
            None => Ok(()),
        }
    }

    /// Acquires all locks or none. A single request may enter the wait queue.
    async fn try_acquire(
        &self,
        requests: &[KeyRequest],
        if_busy: IfBusy,
        proposal: Option<FencingToken>,
    ) -> Result<Acquired, StoreError> {
        let Some(deadline) = requests.iter().map(|request| request.deadline).min() else {
            return Ok(Acquired::All(AcquireAllReply::Granted(Vec::new())));
        };
        let hold = &requests[0].hold;
        let place = self.servers.place(hold);
        let channel = match if_busy {
            IfBusy::Queue => self.servers.channel(place),
            IfBusy::Refuse => "".into(),
        };
        let write = |deadline: u64| {
            // Known once the first connection is established.
            let marker = self.servers.marker();
            let mut call = Call::new(
                &scripts::ACQUIRE,
                3 * requests.len() + usize::from(marker.is_some()),
            );
            for KeyRequest { hold, .. } in requests {
                call = call.names(Names::new(&self.namespace, &hold.key, hold.mode.kind()));
            }
            if marker.is_some() {
                call = call.arg(marker_name(&self.namespace));
            }
            call = call.arg(deadline.to_string()).arg(channel.as_bytes());
            for KeyRequest {
                hold,
                lease,
                reserved,
                reader_group,
                ..
            } in requests
            {
                call = call.hold(hold).millis(*lease);
                // Only writers reserve tokens: the reserved tokens of readers would not increase
                // in the order of their grants.
                call = match (hold.mode, reader_group) {
                    (Mode::Exclusive, _) => call.number(*reserved),
                    (Mode::Shared, Some(reader_group)) => call.token(*reader_group),
                    (Mode::Shared, None) => call.arg(""),
                    (Mode::Permits(_), _) => call.number(0),
                };
            }
            let Some(marker) = marker else { return call };
            // Without a proposal the server's clock determines the token.
            call.arg(marker)
                .arg(proposal.map_or(0, FencingToken::number).to_string())
        };
        // Not repeated under the same token: the first request may be executed after the lock was
        // released again, and the lock would then have no owner (rule 1).
        let errand = Errand::By {
            deadline,
            write: &write,
            slot: place,
        };
        let mut answer = self.servers.run(errand).await?;
        let mut reply = answer.reply()?;
        let _server_time = reply.count()?;
        let reply = match reply.word() {
            "granted" => requests
                .iter()
                .map(|_| reply.grant())
                .collect::<Result<_, _>>()
                .map(AcquireAllReply::Granted)?,
            "queued" => {
                let (counter, holder_ttl) = reply.place()?;
                self.servers.waits(hold, &answer);
                return Ok(Acquired::Queued(AcquireReply::Queued {
                    counter,
                    holder_ttl,
                }));
            }
            "refused" => {
                let index = reply
                    .count()?
                    .checked_sub(1)
                    .and_then(|index| usize::try_from(index).ok());
                let index = index
                    .filter(|index| *index < requests.len())
                    .ok_or_else(unexpected)?;
                let reply = match reply.text()?.as_str() {
                    "busy" => AcquireReply::Busy {
                        holder_ttl: reply.known_ttl()?,
                        has_waiters: reply.number()? == 1,
                    },
                    "mismatch" => AcquireReply::ModeMismatch,
                    word => AcquireReply::ForeignKey(foreign_part(word).ok_or_else(unexpected)?),
                };
                AcquireAllReply::Refused { index, reply }
            }
            "strange" => return Err(self.lost_its_data()),
            "late" => AcquireAllReply::Refused {
                index: 0,
                reply: AcquireReply::Late,
            },
            _ => return Err(unexpected()),
        };
        Ok(Acquired::All(reply))
    }

    /// Acquires, and tries again if the server rejects the request as late although its deadline
    /// has not passed here: the server's clock has jumped, and the first reply has corrected our
    /// estimate of it.
    async fn acquire_in_time(
        &self,
        requests: &[KeyRequest],
        if_busy: IfBusy,
        proposal: Option<FencingToken>,
    ) -> Result<Acquired, StoreError> {
        let reply = self.try_acquire(requests, if_busy, proposal).await?;
        let late = matches!(
            reply,
            Acquired::All(AcquireAllReply::Refused {
                reply: AcquireReply::Late,
                ..
            })
        );
        let now = Instant::now();
        if late && requests.iter().all(|request| request.deadline > now) {
            return self.try_acquire(requests, if_busy, proposal).await;
        }
        Ok(reply)
    }

    /// Acquires all keys with one script.
    async fn acquire_each(&self, requests: &[KeyRequest]) -> Result<AcquireAllReply, StoreError> {
        match self.acquire_in_time(requests, IfBusy::Refuse, None).await? {
            Acquired::All(reply) => {
                if matches!(reply, AcquireAllReply::Granted(_)) {
                    self.settle(requests.iter().map(|request| &request.hold))
                        .await?;
                }
                Ok(reply)
            }
            Acquired::Queued(_) => Err(unexpected()),
        }
    }

    async fn acquire_one(
        &self,
        request: &KeyRequest,
        proposal: Option<FencingToken>,
    ) -> Result<AcquireReply, StoreError> {
        match self
            .acquire_in_time(std::slice::from_ref(request), request.if_busy, proposal)
            .await?
        {
            Acquired::All(AcquireAllReply::Granted(grants)) => {
                self.settle([&request.hold]).await?;
                grants
                    .first()
                    .copied()
                    .map(AcquireReply::Granted)
                    .ok_or_else(unexpected)
            }
            Acquired::All(AcquireAllReply::Refused { reply, .. }) | Acquired::Queued(reply) => {
                Ok(reply)
            }
        }
    }

    async fn poll_all(&self, holds: &[Hold]) -> Vec<Result<PollReply, StoreError>> {
        let call = |index| {
            let hold: &Hold = &holds[index];
            self.on_all(&scripts::POLL, &hold.key, hold.mode.kind())
                .hold(hold)
        };
        let answers = self.servers.call_each(holds.len(), &call).await;
        let polled = async |(hold, answer): (&Hold, Result<_, _>)| self.polled(hold, answer?).await;
        join_all(holds.iter().zip(answers).map(polled)).await
    }

    async fn polled(&self, hold: &Hold, mut answer: Answer) -> Result<PollReply, StoreError> {
        let mut reply = answer.reply()?;
        match reply.word() {
            "granted" => {
                self.servers.leaves(hold);
                let grant = reply.grant()?;
                self.settle([hold]).await?;
                Ok(PollReply::Granted(grant))
            }
            "queued" => {
                let (counter, holder_ttl) = reply.place()?;
                self.servers.waits(hold, &answer);
                Ok(PollReply::Queued {
                    counter,
                    holder_ttl,
                })
            }
            "gone" => {
                self.servers.leaves(hold);
                Ok(PollReply::Gone)
            }
            _ => Err(self.foreign(&hold.key, hold.mode.kind(), &reply)),
        }
    }

    fn renewal(&self, Renewal { hold, lease }: &Renewal) -> Call {
        let kind = hold.mode.kind();
        match hold.mode {
            Mode::Exclusive => self
                .on_lock(&scripts::RENEW, &hold.key, kind)
                .token(hold.token),
            Mode::Shared | Mode::Permits(_) => self
                .on_lock(&scripts::RENEW_SHARE, &hold.key, kind)
                .hold(hold),
        }
        .millis(*lease)
    }

    async fn renew_all(&self, renewals: &[Renewal]) -> Vec<Result<RenewReply, StoreError>> {
        let answers = self
            .servers
            .call_each(renewals.len(), &|index| self.renewal(&renewals[index]))
            .await;
        answers
            .into_iter()
            .map(|answer| renewed(answer?.value))
            .collect()
    }

    async fn release_one(
        &self,
        Release {
            hold,
            keep_for,
            next,
        }: &Release,
    ) -> Result<ReleaseReply, StoreError> {
        let call = match (hold.mode, next) {
            // The lock does not become free, so there is no reservation.
            (Mode::Exclusive, Some(next)) => self
                .on_all(&scripts::PASS, &hold.key, LockKind::Lock)
                .token(hold.token)
                .token(next.token)
                .millis(next.lease)
                .number(next.reserved)
                .arg(self.servers.channel(self.servers.place(hold)).as_bytes()),
            (mode, _) => {
                let script = if mode == Mode::Exclusive {
                    &scripts::RELEASE
                } else {
                    &scripts::RELEASE_SHARE
                };
                let call = self.on_all(script, &hold.key, mode.kind());
                call.member(mode, hold.token)
                    .millis(keep_for.unwrap_or_default())
            }
        };
        self.servers.leaves(hold);
        // Not repeated: `not_held` would not show whether the first call was executed (rule 14).
        let alone = || self.free_alone(hold, *keep_for);
        let mut answer = match self.servers.free(&call, alone, Repeat::Never).await? {
            Freed::Wholly(answer) | Freed::LockAlone(answer) => answer,
            Freed::HalfWay => return Ok(ReleaseReply::Released),
        };
        let mut reply = answer.reply()?;
        match reply.word() {
            "released" => Ok(ReleaseReply::Released),
            "handed_over" => {
                // The message to the next holder follows this reply, and may be for this process.
                // Yield, so that it is handled first.
                tokio::task::yield_now().await;
                Ok(ReleaseReply::Released)
            }
            "passed" => {
                let grant = reply.grant()?;
                self.passed(hold, *next, grant).await
            }
            "queued" => {
                let (counter, holder_ttl) = reply.place()?;
                if let Some(next) = next {
                    self.servers
                        .waits(&Hold::new(hold.key.clone(), hold.mode, next.token), &answer);
                }
                Ok(ReleaseReply::Queued {
                    counter,
                    holder_ttl,
                })
            }
            "not_held" => Ok(ReleaseReply::NotHeld),
            _ => Err(self.foreign(&hold.key, hold.mode.kind(), &reply)),
        }
    }

    /// Handles a release that granted the lock to the next token.
    async fn passed(
        &self,
        hold: &Hold,
        next: Option<NextHolder>,
        grant: Grant,
    ) -> Result<ReleaseReply, StoreError> {
        let Some(next) = next else {
            return Err(unexpected());
        };
        let heir = Hold::new(hold.key.clone(), Mode::Exclusive, next.token);
        match self.settle([&heir]).await {
            Ok(()) => Ok(ReleaseReply::Passed(grant)),
            Err(error) => {
                // The release has succeeded in any case, and the next holder makes a new request.
                tracing::debug!(key = %heir.key, %error, "the lock was released, but the next holder did not get it");
                self.abandon_one(&heir).await?;
                Ok(ReleaseReply::Released)
            }
        }
    }

    /// A call that releases a lock by its own key alone, while its slot migrates.
    fn free_alone(&self, hold: &Hold, keep_for: Option<Duration>) -> Call {
        let call = self.on_lock(&scripts::FREE, &hold.key, hold.mode.kind());
        call.hold(hold).millis(keep_for.unwrap_or_default())
    }

    async fn convert_one(&self, hold: &Hold) -> Result<ConvertReply, StoreError> {
        if hold.mode.kind() != LockKind::Lock {
            return Ok(ConvertReply::NotHeld);
        }
        let call = self
            .on_all(&scripts::CONVERT, &hold.key, LockKind::Lock)
            .token(hold.token);
        let mut reply = self.run(call).await?;
        match reply.word() {
            "converted" => {
                let grant = reply.grant()?;
                self.settle([&Hold::new(hold.key.clone(), Mode::Shared, hold.token)])
                    .await?;
                Ok(ConvertReply::Converted(grant))
            }
            "not_held" => Ok(ConvertReply::NotHeld),
            _ => Err(self.foreign(&hold.key, LockKind::Lock, &reply)),
        }
    }

    async fn abandon_one(&self, hold: &Hold) -> Result<(), StoreError> {
        let call = self
            .on_all(&scripts::ABANDON, &hold.key, hold.mode.kind())
            .hold(hold);
        self.servers.leaves(hold);
        let freed = self
            .servers
            .free(&call, || self.free_alone(hold, None), Repeat::Once)
            .await?;
        match freed {
            Freed::Wholly(mut answer) => match answer.reply()?.word() {
                "released" | "not_held" => Ok(()),
                _ => Err(unexpected()),
            },
            // The token holds nothing any more, but may still be queued. The caller has to
            // repeat the call.
            Freed::LockAlone(_) | Freed::HalfWay => Err(StoreError::new(
                StoreErrorKind::Unavailable,
                "the lock is being moved to another node of the cluster, and its queue entry cannot be removed yet",
            )),
        }
    }

    async fn raise_one(
        &self,
        key: &LockKey,
        kind: LockKind,
        fence: FencingToken,
    ) -> Result<RaiseReply, StoreError> {
        let name = Names::new(&self.namespace, key, kind).fence;
        let number = fence.to_string();
        let call = match self.servers.marker() {
            Some(marker) => {
                let keys = Call::new(&scripts::RAISE, 2)
                    .arg(name)
                    .arg(marker_name(&self.namespace));
                keys.arg(number).arg(marker)
            }
            None => Call::new(&scripts::RAISE, 1).arg(name).arg(number),
        };
        let mut reply = self.run(call).await?;
        match reply.word() {
            "raised" => Ok(RaiseReply::Raised),
            "not_raised" => Ok(RaiseReply::NotRaised {
                latest: reply.counter()?.ok_or_else(unexpected)?,
            }),
            "strange" => Err(self.lost_its_data()),
            _ => Err(self.foreign(key, kind, &reply)),
        }
    }

    /// The error for a server of a quorum whose data is no longer that of the handshake.
    fn lost_its_data(&self) -> StoreError {
        self.servers.greet_again();
        quarantine::lost_its_data()
    }

    async fn inspect_one(&self, key: &LockKey, kind: LockKind) -> Result<Inspection, StoreError> {
        let call = self.on_all(&scripts::INSPECT, key, kind).kind(kind);
        let mut reply = self.run(call).await?;
        match reply.word() {
            "holders" => {
                let (fence, count) = (reply.counter()?, reply.count()?);
                Ok(Inspection {
                    holders: reply.holders(count)?,
                    waiters: reply.waiters()?,
                    fence,
                })
            }
            _ => Err(self.foreign(key, kind, &reply)),
        }
    }

    async fn revoke_one(
        &self,
        key: &LockKey,
        kind: LockKind,
        scope: RevokeScope,
    ) -> Result<RevokeReply, StoreError> {
        let scope = match scope {
            RevokeScope::Leased => "leased",
            RevokeScope::AlsoEndless => "endless",
        };
        let call = self
            .on_all(&scripts::REVOKE, key, kind)
            .kind(kind)
            .arg(scope);
        let call = call.arg(self.servers.pushes().revoked());
        match self.run(call).await?.word() {
            "revoked" => Ok(RevokeReply::Revoked),
            "not_held" => Ok(RevokeReply::NotHeld),
            "endless" => Ok(RevokeReply::Endless),
            "foreign" => Ok(RevokeReply::ForeignKey),
            _ => Err(unexpected()),
        }
    }
}

/// The reply to several requests, or to a single one that was queued.
enum Acquired {
    All(AcquireAllReply),
    Queued(AcquireReply),
}

fn renewed(value: redis::Value) -> Result<RenewReply, StoreError> {
    match value {
        redis::Value::Int(-1) => Ok(RenewReply::Gone),
        redis::Value::Int(ttl) => match u64::try_from(ttl) {
            Ok(ttl) => Ok(RenewReply::Renewed {
                ttl: Duration::from_millis(ttl),
            }),
            Err(_) => Err(unexpected()),
        },
        _ => Err(unexpected()),
    }
}

impl Store for RedisStore {
    fn acquire<'a>(
        &'a self,
        request: &'a KeyRequest,
    ) -> BoxFuture<'a, Result<AcquireReply, StoreError>> {
        Box::pin(self.acquire_one(request, None))
    }

    fn acquire_all<'a>(
        &'a self,
        requests: &'a [KeyRequest],
    ) -> BoxFuture<'a, Result<AcquireAllReply, StoreError>> {
        Box::pin(self.acquire_several(requests))
    }

    fn poll<'a>(&'a self, holds: &'a [Hold]) -> BoxFuture<'a, Vec<Result<PollReply, StoreError>>> {
        Box::pin(self.poll_all(holds))
    }

    fn renew<'a>(
        &'a self,
        renewals: &'a [Renewal],
    ) -> BoxFuture<'a, Vec<Result<RenewReply, StoreError>>> {
        Box::pin(self.renew_all(renewals))
    }

    fn release<'a>(
        &'a self,
        release: &'a Release,
    ) -> BoxFuture<'a, Result<ReleaseReply, StoreError>> {
        Box::pin(self.release_one(release))
    }

    fn convert<'a>(&'a self, hold: &'a Hold) -> BoxFuture<'a, Result<ConvertReply, StoreError>> {
        Box::pin(self.convert_one(hold))
    }

    fn abandon<'a>(&'a self, hold: &'a Hold) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(self.abandon_one(hold))
    }

    fn inspect<'a>(
        &'a self,
        key: &'a LockKey,
        kind: LockKind,
    ) -> BoxFuture<'a, Result<Inspection, StoreError>> {
        Box::pin(self.inspect_one(key, kind))
    }

    fn revoke<'a>(
        &'a self,
        key: &'a LockKey,
        kind: LockKind,
        scope: RevokeScope,
    ) -> BoxFuture<'a, Result<RevokeReply, StoreError>> {
        Box::pin(self.revoke_one(key, kind, scope))
    }

    fn name_of(&self, key: &LockKey, kind: LockKind, part: KeyPart) -> Option<String> {
        Some(Names::new(&self.namespace, key, kind).into_part(part))
    }

    fn server_of(&self, key: &LockKey, kind: LockKind) -> u64 {
        self.servers
            .server_of(&lock_name(&self.namespace, key, kind))
    }

    fn limits(&self) -> Limits {
        Limits::new()
    }

    fn listen(&self, listener: Weak<dyn Listener>) {
        self.servers.pushes().listeners().add(listener);
    }

    fn settled(&self) -> BoxFuture<'_, ()> {
        Box::pin(ready(()))
    }
}

impl QuorumMember for RedisStore {
    fn acquire_proposed<'a>(
        &'a self,
        request: &'a KeyRequest,
        proposal: FencingToken,
    ) -> BoxFuture<'a, Result<AcquireReply, StoreError>> {
        Box::pin(self.acquire_one(request, Some(proposal)))
    }

    fn raise<'a>(
        &'a self,
        key: &'a LockKey,
        kind: LockKind,
        fence: FencingToken,
    ) -> BoxFuture<'a, Result<RaiseReply, StoreError>> {
        Box::pin(self.raise_one(key, kind, fence))
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
