//! Aliases that are no longer used: abandoned until their servers have confirmed it.

use std::time::Duration;

use super::{
    CallPurpose, InProgress, KnownAlias, MajorityCx, MajorityMutation, MajoritySession, Reply,
    RequestId, Send, ServerRequest,
};
use crate::{
    protocol::{self, Afterwards, Ending, Latest, PendingEnd, SHORTEST_CALL},
    request::spec::{Mode, call_timeout},
    shell::time::Instant,
    store::{Hold, StoreError},
};

/// The time-out of the first call that releases an alias.
pub(super) fn ending_timeout(lease: Duration) -> Duration {
    call_timeout(lease).max(SHORTEST_CALL)
}

impl MajoritySession {
    /// Abandons all aliases of an acquisition. Waits for the first call to each server.
    pub(crate) fn abandon(&mut self, hold: &Hold, cx: &mut MajorityCx<'_>) -> RequestId {
        let until = self.abandon_round(hold, cx);
        self.begin(InProgress::Over(Ok(Reply::Abandoned), until))
    }

    /// Abandons all aliases of an acquisition. Returns until when the first calls are awaited.
    pub(super) fn abandon_round(
        &mut self,
        hold: &Hold,
        cx: &mut MajorityCx<'_>,
    ) -> Option<Instant> {
        let stem = hold.token.stem();
        let round = self.rounds.get_mut(&stem)?;
        round.abandon_all();
        let lease = round.longest_lease;
        self.abandon_unused(stem, cx);
        self.rounds.remove(&stem);
        Some(cx.now + self.server_timeout(lease, cx))
    }

    /// Abandons the aliases that an acquisition no longer uses.
    pub(super) fn abandon_unused(&mut self, stem: u128, cx: &mut MajorityCx<'_>) {
        let Some(round) = self.rounds.get_mut(&stem) else {
            return;
        };
        let aliases = round.take_abandoned();
        if !aliases.is_empty() {
            let (hold, lease) = (round.hold.clone(), round.longest_lease);
            (aliases.iter()).for_each(|alias| self.end_alias(alias, &hold, (lease, None), cx));
        }
    }

    /// Ends an alias of an acquisition like `hold`, which ends within `lease` in any case. A vote
    /// that is to stay reserved until a given time is released, again until its server has
    /// confirmed it, and only then abandoned: that has no effect on the reservation.
    pub(super) fn end_alias(
        &mut self,
        alias: &KnownAlias,
        hold: &Hold,
        (lease, keep_until): (Duration, Option<Instant>),
        cx: &mut MajorityCx<'_>,
    ) {
        let once = cx.breaks(MajorityMutation::AbandonsOnce);
        let straggler_until = alias.straggler_until.filter(|_| !once);
        let now = cx.now;
        let keep_until = keep_until.filter(|until| *until > now);
        // The endings of one hold.
        let endings = |hold: Hold| {
            let release = keep_until.map(|_| Ending::Release(hold.clone(), keep_until, None));
            let release = release.map(|ending| Afterwards::new(ending, lease));
            let abandonment = Afterwards {
                straggler_until,
                ..Afterwards::new(Ending::Abandon(hold), lease)
            };
            release.into_iter().chain([abandonment])
        };
        let mut begin = |endings: &mut dyn Iterator<Item = Afterwards>| {
            let Some(first) = endings.next() else { return };
            let until = first.straggler_until;
            let pending = PendingEnd::new(first.ending, lease, until, now);
            let pending = pending.then(endings);
            let id = self.begin(InProgress::End(alias.server, pending));
            cx.out.ends.push(id);
        };
        let hold = hold.alias(alias.token);
        if alias.was_writer && hold.mode == Mode::Shared {
            // Until the writer is gone, a delayed conversion may make a reader of it. So the reader
            // is given up once more after that.
            let mut both = endings(hold.as_writer()).chain(endings(hold.clone()));
            begin(&mut both);
        }
        begin(&mut endings(hold));
    }

    pub(super) fn step_end(
        id: RequestId,
        server: usize,
        mut pending: PendingEnd,
        cx: &mut MajorityCx<'_>,
    ) -> (InProgress, Option<Instant>) {
        if pending.due().is_some_and(|due| due <= cx.now) {
            let call = pending.call(cx.now);
            let request = match call.request {
                protocol::Request::Release(release) => ServerRequest::Release(*release),
                _ => ServerRequest::Abandon(pending.hold().clone()),
            };
            let timeout = Some(call.timeout);
            let send = Send::new(id, server, request, timeout, CallPurpose::End);
            cx.out.sends.push(send);
        }
        let due = pending.due();
        (InProgress::End(server, pending), due)
    }

    /// Applies the reply to a call that ends an alias.
    pub(super) fn end_replied(
        &mut self,
        id: RequestId,
        reply: Result<Reply, StoreError>,
        cx: &mut MajorityCx<'_>,
    ) {
        let Some(InProgress::End(server, pending)) = self.requests.get_mut(&id) else {
            return;
        };
        let jitter = cx.fraction();
        let latest = pending.replied(reply, jitter, cx.now);
        if pending.due().is_some() {
            return;
        }
        let hold = pending.hold().clone();
        let over = match latest {
            Latest::GaveUp(error) => Reply::NotAbandoned(*server, hold, error),
            Latest::Confirmed | Latest::Unconfirmed => Reply::Abandoned,
        };
        self.requests.insert(id, InProgress::Over(Ok(over), None));
    }
}
