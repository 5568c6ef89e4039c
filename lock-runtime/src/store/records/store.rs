//! The operations of a [`RecordStore`].

use std::{any::Any, sync::Weak, time::Duration};

use futures_util::future::BoxFuture;

use super::{
    Record, RecordName,
    adapter::RecordStore,
    step::{
        attempt::Attempt,
        body::Body,
        evaluation::{Lock, Writes},
    },
};
use crate::{
    observe::health::{self, Health},
    request::{key::LockKey, spec::LockKind},
    shell::time::Instant,
    store::{
        AcquireAllReply, AcquireReply, ClientId, ConvertReply, Cursor, Done, Hold, HolderId,
        Inspection, KeyPart, KeyRequest, Limits, Listener, Page, PollReply, Release, ReleaseReply,
        RenewReply, Renewal, Replied, Replies, RevokeReply, RevokeScope, Store,
        remote::outage::InOutage,
        table::{Step, Table},
    },
};

impl Store for RecordStore {
    fn acquire<'a>(&'a self, request: &'a KeyRequest) -> Replied<'a, AcquireReply> {
        Box::pin(self.0.clone().execute(self.0.acquire(request)))
    }

    fn acquire_all<'a>(&'a self, requests: &'a [KeyRequest]) -> Replied<'a, AcquireAllReply> {
        Box::pin(self.0.clone().execute(self.0.acquire_all(requests)))
    }

    fn poll<'a>(&'a self, holds: &'a [Hold]) -> Replies<'a, PollReply> {
        let poll = |hold: &Hold, table: &mut Table, step: &mut Step<'_>| table.poll(hold, step);
        let manner = (false, InOutage::Wait);
        Box::pin(
            self.0
                .clone()
                .each(holds.to_vec(), |hold| hold, manner, poll),
        )
    }

    fn renew<'a>(&'a self, renewals: &'a [Renewal]) -> Replies<'a, RenewReply> {
        let renew = |renewal: &Renewal, table: &mut Table, step: &mut Step<'_>| {
            table.renew(renewal, step.now, step.begins)
        };
        let manner = (true, InOutage::Try);
        Box::pin(
            self.0
                .clone()
                .each(renewals.to_vec(), Renewal::hold, manner, renew),
        )
    }

    fn release<'a>(&'a self, release: &'a Release) -> Replied<'a, ReleaseReply> {
        let next = release.next.map(|next| next.token);
        let Hold { key, mode, .. } = &release.hold;
        let (kind, mut owned, began) = (mode.kind(), release.clone(), Instant::now());
        let keep_for = owned.keep_for;
        let attempt = self.0.on(key, kind, move |table, step| {
            // A conflict repeats the step, and does not prolong the reservation.
            owned.keep_for = keep_for.map(|time| time.saturating_sub(began.elapsed()));
            table.release(&owned, step)
        });
        Box::pin(self.0.clone().execute(attempt.caller(next)))
    }

    fn convert<'a>(&'a self, hold: &'a Hold) -> Replied<'a, ConvertReply> {
        let (kind, owned) = (hold.mode.kind(), hold.clone());
        let attempt = self.0.on(&hold.key, kind, move |table, step| {
            table.convert(&owned, step)
        });
        Box::pin(self.0.clone().execute(attempt))
    }

    fn abandon<'a>(&'a self, hold: &'a Hold) -> Replied<'a, ()> {
        let (kind, owned) = (hold.mode.kind(), hold.clone());
        let attempt = self.0.on(&hold.key, kind, move |table, step| {
            table.abandon(&owned, step)
        });
        Box::pin(self.0.clone().execute(attempt.writes(Writes::Always)))
    }

    fn inspect<'a>(&'a self, key: &'a LockKey, kind: LockKind) -> Replied<'a, Inspection> {
        let owned = key.clone();
        let rule = move |table: &mut Table, step: &mut Step<'_>| {
            let mut inspection = table.inspect(&owned, kind, step);
            inspection.fence = step.latest_fence();
            inspection
        };
        let attempt = Attempt::new(vec![Lock::new(key, kind)], rule);
        Box::pin(self.0.clone().execute(attempt))
    }

    fn done<'a>(&'a self, key: &'a LockKey) -> Replied<'a, Option<Done>> {
        Box::pin(async move {
            let name = RecordName::of_lock(key, LockKind::Lock);
            let records = self.0.read(std::slice::from_ref(&name)).await?;
            let Some(record) = records.into_iter().next().flatten() else {
                return Ok(None);
            };
            let now = self.0.now().map(|now| now.reached);
            Ok(Body::read(&name, &record.body)?.done(key, now.unwrap_or_default()))
        })
    }

    fn blockers<'a>(&'a self, key: &'a LockKey, kind: LockKind) -> Replied<'a, Vec<String>> {
        let name = RecordName::of_lock(key, kind);
        Box::pin(async move { self.0.records.blockers(&name).await })
    }

    fn revoke<'a>(
        &'a self,
        key: &'a LockKey,
        kind: LockKind,
        scope: RevokeScope,
    ) -> Replied<'a, RevokeReply> {
        let owned = key.clone();
        let rule =
            move |table: &mut Table, step: &mut Step<'_>| table.revoke(&owned, kind, scope, step);
        let attempt = self.0.on(key, kind, rule).writes(Writes::Durably);
        Box::pin(self.0.clone().execute(attempt))
    }

    fn introduce<'a>(
        &'a self,
        client: ClientId,
        name: &'a str,
        grants: &'a [(HolderId, Duration)],
        keep_for: Duration,
    ) -> Replied<'a, ()> {
        // The records of the locks have the times of grants.
        let _ = grants;
        Box::pin(self.0.introduce(client, name, keep_for))
    }

    fn names_of<'a>(&'a self, clients: &'a [ClientId]) -> Replied<'a, Vec<Option<String>>> {
        Box::pin(async move {
            let names: Vec<_> = clients
                .iter()
                .map(|id| RecordName::of_client(*id))
                .collect();
            let records = self.0.read(&names).await?.into_iter();
            let text = |record: Record| String::from_utf8(record.body).ok();
            Ok(records.map(|record| record.and_then(text)).collect())
        })
    }

    fn list<'a>(&'a self, prefix: &'a str, cursor: Option<Cursor>) -> Replied<'a, Page> {
        Box::pin(self.0.list(prefix, cursor))
    }

    fn name_of(&self, key: &LockKey, kind: LockKind, part: KeyPart) -> Option<String> {
        self.0
            .records
            .place_of(&RecordName::of_lock(key, kind), part)
    }

    fn as_any(&self) -> Option<&dyn Any> {
        Some(self)
    }

    fn guarded_name(&self, key: &LockKey, kind: LockKind) -> Option<String> {
        let name = RecordName::of_lock(key, kind);
        self.0.records.guarded_name(&name)
    }

    fn server_of(&self, _key: &LockKey, _kind: LockKind) -> u64 {
        0
    }

    fn limits(&self) -> Limits {
        let limits = self.0.records.limits();
        limits.results(true).retains(limits.push)
    }

    fn sends_events(&self) -> bool {
        self.0.records.sends_messages()
    }

    fn serves_any_runtime(&self) -> bool {
        self.0.records.serves_any_runtime()
    }

    fn listen(&self, listener: Weak<dyn Listener>) {
        self.0.listeners.add(listener);
    }

    fn settled(&self) -> BoxFuture<'_, ()> {
        Box::pin(std::future::ready(()))
    }

    fn health(&self) -> BoxFuture<'_, Health> {
        self.0
            .records
            .health()
            .unwrap_or_else(|| Box::pin(health::by_inspection(self)))
    }
}
