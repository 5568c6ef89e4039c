//! The renewal of locks, with one call to each server for all of them.

use std::time::Duration;

use super::{
    CallPurpose, MajorityCx, MajorityMutation, MajoritySession, PerServer, RequestId, Round,
    ServerAnswer, ServerRequest,
    acquire::ExchangeTerms,
    exchange::broadcast::Count,
    exchange::tally::{Held, Renewed},
    exchange::time_out::majority_timeout,
};
use crate::{
    request::spec::LockSpec,
    shell::time::Instant,
    store::{RenewReply, Renewal, StoreError, Token},
};

/// Counts the replies of a server to the renewals of a batch, sent at `sent`.
pub(super) fn count(
    tallies: &mut [Renewed],
    sent: Instant,
    server: usize,
    batch: &[(usize, Token)],
    replies: Vec<Result<RenewReply, StoreError>>,
) {
    for ((number, _), reply) in batch.iter().zip(replies) {
        let tally = &mut tallies[*number];
        match reply {
            Ok(RenewReply::Renewed { ttl }) => tally.renewed(sent, ttl),
            Ok(RenewReply::Gone) => tally.gone += 1,
            Err(error) => tally.errors.push((server, error)),
        }
    }
}

impl MajoritySession {
    pub(crate) fn renew(&mut self, renewals: &[Renewal], cx: &mut MajorityCx<'_>) -> RequestId {
        let (sent, servers) = (cx.now, self.servers.len());
        let mut tallies = Vec::with_capacity(renewals.len());
        let mut batches: Vec<(Vec<_>, Vec<_>)> = vec![Default::default(); servers];
        let mut shortest = LockSpec::MAX_LEASE;
        for (number, renewal) in renewals.iter().enumerate() {
            let Renewal { hold, lease, .. } = renewal;
            let mut tally = Renewed::new(servers, hold.token.stem());
            let mut known = PerServer::new();
            if let Some(round) = self.rounds.get_mut(&hold.token.stem()) {
                shortest = shortest.min(round.lease);
                if cx.breaks(MajorityMutation::AddsUpRenewals) {
                    let earlier = round.expiries();
                    earlier.for_each(|until| tally.renewed(until, Duration::ZERO));
                }
                if !lease.is_zero() {
                    round.longest_lease = round.longest_lease.max(*lease);
                }
                known.extend(round.known());
                for (server, token) in &known {
                    let renewal = round.renewal(*server, hold.alias(*token), *lease);
                    batches[*server].0.push((number, *token));
                    batches[*server].1.push(renewal);
                }
            }
            tally.gone = servers - known.len();
            tallies.push(tally);
            if !lease.is_zero() {
                self.heal(hold.token, cx);
            }
        }
        let batches = batches.into_iter().enumerate();
        let calls = batches.filter(|(_, (aliases, _))| !aliases.is_empty());
        let calls = calls.map(|(server, (aliases, renewals))| {
            let purpose = CallPurpose::Renewal(aliases, sent);
            (server, ServerRequest::Renew(renewals), purpose)
        });
        let count = Count::Renewals(tallies);
        self.broadcast(count, majority_timeout(shortest), None, calls, cx)
    }

    /// Requests the missing votes of a held lock. They count from the next renewal on.
    fn heal(&mut self, token: Token, cx: &mut MajorityCx<'_>) {
        let stem = token.stem();
        let Some(round) = self.rounds.get_mut(&stem) else {
            return;
        };
        let terms = ExchangeTerms::of(round, cx.now);
        let calls = round.heal(terms.deadline);
        // No request waits for these replies.
        let sends = self.sends(0, stem, &terms, calls, cx);
        cx.out.background.extend(sends);
    }

    /// Applies the replies of a server to the acquisitions of a batch. A reply about an alias that
    /// was abandoned in the meantime does not count, as the server may free it (rule 1).
    pub(super) fn renewed(
        &mut self,
        server: usize,
        batch: &[(usize, Token)],
        replies: &mut [Result<RenewReply, StoreError>],
        sent: Instant,
        cx: &mut MajorityCx<'_>,
    ) {
        for (&(_, token), reply) in batch.iter().zip(replies) {
            let Ok(reply) = reply else {
                continue;
            };
            let believes = cx.breaks(MajorityMutation::BelievesTheAbandoned);
            let is_used = |round: &&mut Round| {
                believes || round.known().any(|known| known == (server, token))
            };
            if let Some(round) = self.rounds.get_mut(&token.stem()).filter(is_used) {
                let exchange = round.exchange;
                if let RenewReply::Renewed { ttl } = reply {
                    *ttl = round.counted(server, *ttl);
                }
                if !round.extends(server, cx.now) {
                    *reply = RenewReply::Gone;
                }
                round.replied(
                    server,
                    token,
                    exchange,
                    ServerAnswer::Renew(*reply),
                    sent,
                    cx,
                );
                self.abandon_unused(token.stem(), cx);
            } else {
                *reply = RenewReply::Gone;
            }
        }
    }

    pub(super) fn all_renewed(
        &mut self,
        tallies: Vec<Renewed>,
        sent: Instant,
        failed: &[(usize, StoreError)],
        cx: &MajorityCx<'_>,
    ) -> Vec<Result<RenewReply, StoreError>> {
        let reply = |mut tally: Renewed| match tally.held(cx) {
            Held::Until(until) => {
                if let Some(round) = self.rounds.get_mut(&tally.stem) {
                    round.valid_until = Some(until);
                }
                Ok(RenewReply::Renewed {
                    ttl: until.saturating_duration_since(sent),
                })
            }
            Held::Gone => Ok(RenewReply::Gone),
            Held::Open => {
                tally.errors.extend(failed.iter().cloned());
                Err(self.unanswered(&tally.errors))
            }
        };
        tallies.into_iter().map(reply).collect()
    }
}
