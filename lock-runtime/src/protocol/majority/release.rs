//! The release of a lock at all servers that may know it.

use std::time::Duration;

use super::{
    CallPurpose, KnownAlias, MajorityCx, MajorityMutation, MajoritySession, PerServer, Reply,
    RequestId, ServerRequest, exchange::broadcast::Count, exchange::time_out::majority_timeout,
};
use crate::{
    shell::time::Instant,
    store::{Hold, Release, ReleaseReply, StoreError},
};

impl MajoritySession {
    pub(crate) fn release(&mut self, release: &Release, cx: &mut MajorityCx<'_>) -> RequestId {
        let hold = &release.hold;
        self.remove_expired(cx.now);
        let Some(round) = self.rounds.get_mut(&hold.token.stem()) else {
            return self.answered(Reply::Release(ReleaseReply::NotHeld));
        };
        round.closed = true;
        let aliases: PerServer<_> = round.all_known().collect();
        let lease = round.longest_lease;
        let keep_until = release.keep_for.map(|keep_for| cx.now + keep_for);
        let (timeout, coordinator) = (majority_timeout(round.lease), round.coordinator);
        let count = Count::Release(hold.clone());
        let calls = aliases.into_iter().map(|alias| {
            let hold = hold.alias(alias.token);
            let there = Release::new(hold.clone()).keep_for(release.keep_for);
            let purpose = CallPurpose::Release(alias, hold, lease, keep_until);
            (alias.server, ServerRequest::Release(there), purpose)
        });
        self.broadcast(count, timeout, coordinator, calls, cx)
    }

    /// Applies the reply to the release of one vote. If the server may still know the alias after
    /// that, ends it: the alias is in the queue, or a delayed acquire may still make it a holder,
    /// or the server has not executed the conversion of the writer yet.
    pub(super) fn released(
        &mut self,
        alias: &KnownAlias,
        hold: &Hold,
        (lease, keep_until): (Duration, Option<Instant>),
        reply: &Result<Reply, StoreError>,
        cx: &mut MajorityCx<'_>,
    ) {
        let is_released = matches!(reply, Ok(Reply::Release(ReleaseReply::Released)));
        let may_be_known = alias.may_be_queued || alias.was_writer || reply.is_err();
        // A server that has replied has nothing left to reserve.
        let keeps = reply.is_err() && !cx.breaks(MajorityMutation::AbandonsReserved);
        let keep_until = keep_until.filter(|_| keeps);
        if !is_released && may_be_known {
            self.end_alias(alias, hold, (lease, keep_until), cx);
        }
    }

    pub(super) fn finish_release(
        &mut self,
        hold: &Hold,
        decision: Result<bool, StoreError>,
        now: Instant,
    ) -> Result<Reply, StoreError> {
        let stem = hold.token.stem();
        let round = self.rounds.get(&stem);
        if round.is_some_and(|round| round.hold.mode == hold.mode) {
            // The aliases that a server may still know are ended, and no longer needed here.
            self.rounds.remove(&stem);
        } else {
            // After a conversion of unknown outcome, the caller releases the writer, which may
            // leave a reservation, and then the reader.
            self.remove_later(stem, now);
        }
        Ok(Reply::Release(match decision? {
            true => ReleaseReply::Released,
            false => ReleaseReply::NotHeld,
        }))
    }
}
