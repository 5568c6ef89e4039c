//! The operations of a store: the call of a script for each, and the meaning of its reply.

use std::{
    future::ready,
    sync::{Arc, Weak},
    time::Duration,
};

use futures_util::future::{BoxFuture, join_all};
use redis::Value;

use super::{
    super::{
        RedisStore,
        connection::{Errand, Repeat},
        error::unavailable,
        outage::InOutage,
        script,
        topology::{
            quarantine,
            servers::{Freed, ScriptReply, Servers},
        },
    },
    Call, Field, Script,
    names::{Names, lock_name, marker_name},
    reply::{Reply, foreign_part, unexpected},
};
use crate::{
    guard::fence::FencingToken,
    observe::health::Health,
    request::{
        key::LockKey,
        spec::{LockKind, LockSpec, Mode, call_timeout},
    },
    shell::call::within,
    store::{
        AcquireAllReply, AcquireReply, ClientId, ConvertReply, Cursor, Done, Grant, Hold, Holder,
        HolderId, Inspection, KeyPart, KeyRequest, Limits, Listener, Page, PollReply, QuorumMember,
        RaiseReply, Release, ReleaseReply, RenewReply, Renewal, Replied, Replies, RevokeReply,
        RevokeScope, Store, StoreError,
    },
};

impl Store for RedisStore {
    fn acquire<'a>(&'a self, request: &'a KeyRequest) -> Replied<'a, AcquireReply> {
        Box::pin(self.acquire_one(request))
    }

    fn acquire_all<'a>(&'a self, requests: &'a [KeyRequest]) -> Replied<'a, AcquireAllReply> {
        Box::pin(self.acquire_several(requests))
    }

    fn poll<'a>(&'a self, holds: &'a [Hold]) -> Replies<'a, PollReply> {
        Box::pin(async move {
            let call = |hold| self.on_hold(&script::POLL, hold).hold(hold);
            let each = |index: usize| call(&holds[index]);
            let in_outage = self.servers.in_outage(true);
            let answers = self.servers.call_each(holds.len(), &each, in_outage).await;
            let polled =
                async |(hold, answer): (&Hold, Result<_, _>)| self.polled(hold, answer?).await;
            join_all(holds.iter().zip(answers).map(polled)).await
        })
    }

    fn renew<'a>(&'a self, renewals: &'a [Renewal]) -> Replies<'a, RenewReply> {
        Box::pin(async move {
            let call = |index| self.renewal(&renewals[index]);
            let servers = &self.servers;
            let answers = servers
                .call_each(renewals.len(), &call, InOutage::Try)
                .await;
            let answers = answers.into_iter();
            answers.map(|answer| answer.and_then(renewed)).collect()
        })
    }

    fn release<'a>(&'a self, release: &'a Release) -> Replied<'a, ReleaseReply> {
        Box::pin(self.release_one(release))
    }

    fn release_owned(self: Arc<Self>, release: Release) -> Replied<'static, ReleaseReply> {
        Box::pin(async move { self.release_one(&release).await })
    }

    fn convert<'a>(&'a self, hold: &'a Hold) -> Replied<'a, ConvertReply> {
        Box::pin(async move {
            if hold.mode.kind() != LockKind::Lock {
                return Ok(ConvertReply::NotHeld);
            }
            let call = self.on_hold(&script::CONVERT, hold).token(hold.token);
            let mut reply = self.run(call).await?;
            match reply.word() {
                "converted" => {
                    let grant = reply.grant()?;
                    let shared = Hold::new(hold.key.clone(), Mode::Shared, hold.token);
                    self.settle([&shared]).await?;
                    Ok(ConvertReply::Converted(grant))
                }
                "not_held" => Ok(ConvertReply::NotHeld),
                _ => Err(self.foreign(&hold.key, LockKind::Lock, &reply)),
            }
        })
    }

    fn abandon<'a>(&'a self, hold: &'a Hold) -> Replied<'a, ()> {
        Box::pin(self.abandon_one(hold))
    }

    fn inspect<'a>(&'a self, key: &'a LockKey, kind: LockKind) -> Replied<'a, Inspection> {
        Box::pin(self.inspected(key, kind, "all"))
    }

    fn holders<'a>(&'a self, key: &'a LockKey, kind: LockKind) -> Replied<'a, Vec<Holder>> {
        Box::pin(async move { Ok(self.inspected(key, kind, "holders").await?.holders) })
    }

    fn done<'a>(&'a self, key: &'a LockKey) -> Replied<'a, Option<Done>> {
        Box::pin(async move {
            let call = self.on_lock(&script::RESULT, key, LockKind::Lock);
            let mut reply = self.run(call).await?;
            if reply.word() != "done" {
                return Ok(None);
            }
            reply.done(key).map(Some)
        })
    }

    fn revoke<'a>(
        &'a self,
        key: &'a LockKey,
        kind: LockKind,
        scope: RevokeScope,
    ) -> Replied<'a, RevokeReply> {
        Box::pin(async move {
            let (scope, holder) = match scope {
                RevokeScope::Leased => ("leased", None),
                RevokeScope::AlsoEndless => ("endless", None),
                RevokeScope::Holder(id) => ("holder", Some(id)),
            };
            let call = self.on_all(&script::REVOKE, key, kind).kind(kind);
            let call = call.arg(scope).arg(&self.servers.pushes().revoked);
            let call = match holder {
                Some(id) => call.arg(key.as_str()).arg(id.to_string()),
                None => call,
            };
            // Not repeated: the second execution might find the next holder.
            let errand = Errand::Call(&call, Repeat::Never);
            match self.servers.run(errand).await?.reply()?.word() {
                "revoked" => Ok(RevokeReply::Revoked),
                "not_held" => Ok(RevokeReply::NotHeld),
                "changed" => Ok(RevokeReply::Changed),
                "endless" => Ok(RevokeReply::Endless),
                "foreign" => Ok(RevokeReply::ForeignKey),
                _ => Err(unexpected()),
            }
        })
    }

    fn introduce<'a>(
        &'a self,
        client: ClientId,
        name: &'a str,
        grants: &'a [(HolderId, Duration)],
        keep_for: Duration,
    ) -> Replied<'a, ()> {
        Box::pin(self.introduce_client(client, name, grants, keep_for))
    }

    fn names_of<'a>(&'a self, clients: &'a [ClientId]) -> Replied<'a, Vec<Option<String>>> {
        Box::pin(self.client_names(clients))
    }

    fn list<'a>(&'a self, prefix: &'a str, cursor: Option<Cursor>) -> Replied<'a, Page> {
        Box::pin(self.page(prefix, cursor))
    }

    fn name_of(&self, key: &LockKey, kind: LockKind, part: KeyPart) -> Option<String> {
        Some(Names::new(&self.namespace, key, kind).of(part).concat())
    }

    fn server_of(&self, key: &LockKey, kind: LockKind) -> u64 {
        let lock = lock_name(&self.namespace, key, kind);
        self.servers.server_of(&lock)
    }

    fn client(&self) -> Option<ClientId> {
        Some(self.servers.pushes().client)
    }

    fn limits(&self) -> Limits {
        let sends_messages = match &self.servers {
            Servers::One(connection) => connection.connector.target.sends_messages(),
            Servers::Cluster(_) => true,
            #[cfg(all(test, feature = "records"))]
            Servers::Simulated(_) => true,
        };
        // The slots of a cluster are asked one after the other.
        Limits::new()
            .in_turn(self.servers.has_slots())
            .results(true)
            .retains(sends_messages)
            .push(sends_messages)
    }

    fn sends_events(&self) -> bool {
        match &self.servers {
            Servers::One(connection) => !connection.connector.is_silent(),
            Servers::Cluster(cluster) => !cluster.connector.is_silent(),
            #[cfg(all(test, feature = "records"))]
            Servers::Simulated(_) => true,
        }
    }

    fn serves_any_runtime(&self) -> bool {
        true
    }

    fn listen(&self, listener: Weak<dyn Listener>) {
        self.servers.pushes().listeners.add(listener);
    }

    fn settled(&self) -> BoxFuture<'_, ()> {
        Box::pin(ready(()))
    }

    fn health(&self) -> BoxFuture<'_, Health> {
        Box::pin(self.examine())
    }
}

impl QuorumMember for RedisStore {
    fn raise<'a>(
        &'a self,
        key: &'a LockKey,
        kind: LockKind,
        fence: FencingToken,
    ) -> Replied<'a, RaiseReply> {
        Box::pin(async move {
            // The connection of this thread may be a new one, which reads the marker first.
            self.servers.greeted().await?;
            let marker = self.servers.marker();
            let call = Call::new(&script::RAISE, 1 + usize::from(marker.is_some()))
                .name(&Names::new(&self.namespace, key, kind), KeyPart::Fence);
            let (name, number) = (marker_name(&self.namespace), fence.to_string());
            let call = match marker {
                Some(marker) => call.arg(name).arg(number).arg(marker),
                None => call.arg(number),
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
        })
    }
}

impl RedisStore {
    /// Begins a call that needs only the key of the lock.
    fn on_lock(&self, script: &'static Script, key: &LockKey, kind: LockKind) -> Call {
        Call::new(script, 1).arg(lock_name(&self.namespace, key, kind))
    }

    /// Begins a call that may grant the lock, and needs its fence and its queue as well.
    fn on_all(&self, script: &'static Script, key: &LockKey, kind: LockKind) -> Call {
        Call::new(script, 3).names(&Names::new(&self.namespace, key, kind))
    }

    fn on_hold(&self, script: &'static Script, hold: &Hold) -> Call {
        self.on_all(script, &hold.key, hold.mode.kind())
    }

    pub(crate) async fn run(&self, call: Call) -> Result<Reply, StoreError> {
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
    pub(crate) async fn settle<'a>(
        &self,
        grants: impl IntoIterator<Item = &'a Hold>,
    ) -> Result<(), StoreError> {
        match &self.replicas {
            Some(replicas) => replicas.have(grants).await,
            None => Ok(()),
        }
    }

    /// Inspects a lock, page by page, each within the time of a call. `part` is `all`, or `holders`
    /// without the wait queue.
    async fn inspected(
        &self,
        key: &LockKey,
        kind: LockKind,
        part: &str,
    ) -> Result<Inspection, StoreError> {
        let (mut state, mut part, is_whole) = (Inspection::default(), part, part == "all");
        let (mut skipped, mut from) = (0, 0);
        loop {
            let call = self.on_all(&script::INSPECT, key, kind).kind(kind);
            let call = call.arg(key.as_str()).arg(part);
            let call = call.number(skipped).number(from);
            let mut reply = within(call_timeout(LockSpec::DEFAULT_LEASE), self.run(call)).await?;
            if reply.word() != "holders" {
                return Err(self.foreign(key, kind, &reply));
            }
            let (fence, count) = (reply.counter()?, reply.count()?);
            let (holder, place) = (reply.count()?, reply.count()?);
            state.fence = fence;
            state.holders.extend(reply.holders(count)?);
            state.waiters.extend(reply.waiters()?);
            match (holder, place) {
                (0, 0) => {
                    if is_whole {
                        self.add_ages(&mut state.holders).await;
                    }
                    return Ok(state);
                }
                (0, place) => (part, from) = ("waiters", place),
                (holder, _) => skipped = holder,
            }
        }
    }

    async fn polled(&self, hold: &Hold, mut answer: ScriptReply) -> Result<PollReply, StoreError> {
        let mut reply = answer.reply()?;
        match reply.word() {
            "granted" => {
                self.servers.leaves(hold);
                let grant = reply.grant()?;
                self.settle([hold]).await?;
                Ok(PollReply::Granted(grant))
            }
            "queued" => {
                self.servers.waits(hold, &answer);
                Ok(PollReply::Queued {
                    counter: reply.counter()?,
                    holder_ttl: reply.known_ttl()?,
                })
            }
            "gone" => {
                self.servers.leaves(hold);
                Ok(PollReply::Gone)
            }
            "done" => {
                self.servers.leaves(hold);
                Ok(PollReply::Done(Arc::new(reply.done(&hold.key)?)))
            }
            _ => Err(self.foreign(&hold.key, hold.mode.kind(), &reply)),
        }
    }

    fn renewal(&self, renewal: &Renewal) -> Call {
        let Renewal {
            hold,
            lease,
            at_most,
        } = renewal;
        let call = |script| self.on_lock(script, &hold.key, hold.mode.kind());
        let call = match hold.mode {
            Mode::Exclusive => {
                let call = call(&script::RENEW).mark(Field::Member);
                call.token(hold.token)
            }
            Mode::Shared | Mode::Permits(_) => call(&script::RENEW_SHARE).hold(hold),
        };
        let call = call.mark(Field::Lease).millis(*lease);
        match at_most {
            Some(at_most) => call.mark(Field::AtMost).millis(*at_most),
            None => call,
        }
    }

    /// A call that releases a lock, and reserves it if `keep_for` is not zero.
    fn plain_release(&self, release: &Release) -> Call {
        let hold = &release.hold;
        let script: &'static Script = match hold.mode {
            Mode::Exclusive => &script::RELEASE,
            Mode::Shared | Mode::Permits(_) => &script::RELEASE_SHARE,
        };
        let call = self
            .on_hold(script, hold)
            .mark(Field::Member)
            .member(hold.mode, hold.token)
            .mark(Field::Keep);
        kept(call, release)
    }

    async fn release_one(&self, release: &Release) -> Result<ReleaseReply, StoreError> {
        let Release { hold, next, .. } = release;
        let call = match (hold.mode, next) {
            // The lock does not become free, so there is no reservation.
            (Mode::Exclusive, Some(next)) => self
                .on_hold(&script::PASS, hold)
                .token(hold.token)
                .token(next.token)
                .millis(next.lease)
                .number(next.reserved.into())
                .arg(self.servers.channel(self.servers.place(hold)).as_bytes()),
            _ => self.plain_release(release),
        };
        self.servers.leaves(hold);
        // Not repeated: `not_held` would not show whether the first call was executed
        // (rule 14).
        let alone = || self.free_alone(release);
        let mut answer = match self.servers.free(&call, alone, Repeat::Never).await? {
            Freed::Wholly(answer) | Freed::LockAlone(answer) => answer,
            Freed::HalfWay => return Ok(ReleaseReply::Released),
        };
        let mut reply = answer.reply()?;
        let next_holder = || Some(Hold::new(hold.key.clone(), hold.mode, next.as_ref()?.token));
        match reply.word() {
            "released" => Ok(ReleaseReply::Released),
            "handed_over" => {
                // The message to the next holder follows this reply, and may be for this
                // process. Yield, so that it is handled first.
                tokio::task::yield_now().await;
                Ok(ReleaseReply::Released)
            }
            "passed" => {
                let next_holder = next_holder().ok_or_else(unexpected)?;
                Box::pin(self.passed(next_holder, reply.grant()?)).await
            }
            "queued" => {
                if let Some(next_holder) = next_holder() {
                    self.servers.waits(&next_holder, &answer);
                }
                Ok(ReleaseReply::Queued {
                    counter: reply.counter()?,
                    holder_ttl: reply.known_ttl()?,
                })
            }
            "not_held" => Ok(ReleaseReply::NotHeld),
            _ => Err(self.foreign(&hold.key, hold.mode.kind(), &reply)),
        }
    }

    /// Handles a release that granted the lock to the next token.
    async fn passed(&self, next_holder: Hold, grant: Grant) -> Result<ReleaseReply, StoreError> {
        let Err(error) = self.settle([&next_holder]).await else {
            return Ok(ReleaseReply::Passed(grant));
        };
        // The release has succeeded in any case, and the next holder makes a new request.
        tracing::debug!(key = %next_holder.key.shown(), %error, "the lock was released, but the next holder did not get it");
        self.abandon_one(&next_holder).await?;
        Ok(ReleaseReply::Released)
    }

    /// A call that releases a lock by its own key alone, while its slot migrates.
    fn free_alone(&self, release: &Release) -> Call {
        let hold = &release.hold;
        let call = self.on_lock(&script::FREE, &hold.key, hold.mode.kind());
        kept(call.hold(hold), release)
    }

    pub(super) async fn abandon_one(&self, hold: &Hold) -> Result<(), StoreError> {
        let call = self.on_hold(&script::ABANDON, hold).hold(hold);
        self.servers.leaves(hold);
        let alone = || self.free_alone(&Release::new(hold.clone()));
        let freed = self.servers.free(&call, alone, Repeat::Once).await?;
        let Freed::Wholly(mut answer) = freed else {
            // The token holds nothing any more, but may still be queued. The caller has to
            // repeat the call.
            return Err(unavailable(
                "the lock is being moved to another node of the cluster, and its queue entry cannot be removed yet",
            ));
        };
        match answer.reply()?.word() {
            "released" | "not_held" => Ok(()),
            _ => Err(unexpected()),
        }
    }

    /// The error for a server of a quorum whose data is no longer that of the handshake.
    pub(crate) fn lost_its_data(&self) -> StoreError {
        self.servers.greet_again();
        quarantine::lost_its_data()
    }
}

/// The time of a reservation by the server's clock, which shows whole milliseconds: one more than
/// it shows when the reservation begins may have passed.
fn reservation(keep_for: Option<Duration>) -> Duration {
    let keep_for = keep_for.filter(|keep_for| !keep_for.is_zero());
    keep_for.map_or(Duration::ZERO, |keep_for| {
        keep_for + Duration::from_millis(1)
    })
}

/// Adds the reservation of a release, and the result of the work under the lock.
fn kept(call: Call, release: &Release) -> Call {
    let keep_for = reservation(release.keep_for);
    let call = call.millis(keep_for);
    match &release.result {
        Some((fence, result)) if !keep_for.is_zero() => {
            let call = call.mark(Field::Fence).number(fence.number());
            call.mark(Field::Result).arg(result)
        }
        _ => call,
    }
}

fn renewed(answer: ScriptReply) -> Result<RenewReply, StoreError> {
    match answer.value {
        Value::Int(-1) => Ok(RenewReply::Gone),
        Value::Int(ttl @ 0..) => {
            let ttl = Duration::from_millis(ttl.unsigned_abs());
            Ok(RenewReply::Renewed { ttl })
        }
        _ => Err(unexpected()),
    }
}
