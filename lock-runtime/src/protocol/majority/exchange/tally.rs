//! The combined replies of a majority to renewals, releases and queries. No I/O.

use std::{cmp::Reverse, time::Duration};

use super::super::{
    MajorityCx, MajorityMutation,
    exchange::count::{majority, nth_largest},
    round::PerServer,
};
use crate::{
    shell::time::Instant,
    store::{Holder, Inspection, RevokeReply, StoreError},
};

/// The replies of one exchange to the renewal of one lock.
#[derive(Debug, Default)]
pub(crate) struct Renewed {
    /// The stem of the lock's token.
    pub(crate) stem: u128,
    servers: usize,
    until: PerServer<Instant>,
    /// The servers that do not hold the lock.
    pub(crate) gone: usize,
    /// The errors of servers that failed to renew this lock alone.
    pub(crate) errors: Vec<(usize, StoreError)>,
}

/// The combined result of the replies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Held {
    Until(Instant),
    /// So few servers can still hold the lock that they are no majority.
    Gone,
    /// More replies are needed.
    Open,
}

impl Renewed {
    pub(crate) fn new(servers: usize, stem: u128) -> Self {
        Self {
            stem,
            servers,
            ..Self::default()
        }
    }

    /// Counts a server that holds the lock for at least `ttl` from `sent` on.
    pub(crate) fn renewed(&mut self, sent: Instant, ttl: Duration) {
        self.until.push(sent + ttl);
    }

    /// The result so far. The lock is held for as long as a majority of the servers holds it,
    /// according to their replies in this exchange alone (rule 29).
    pub(crate) fn held(&self, cx: &MajorityCx<'_>) -> Held {
        let majority =
            majority(self.servers) - usize::from(cx.breaks(MajorityMutation::RenewsByHalf));
        match nth_largest(self.until.iter().copied(), majority) {
            Some(until) => Held::Until(until),
            None if self.gone > self.servers - majority => Held::Gone,
            None => Held::Open,
        }
    }
}

/// A yes-or-no decision by majority.
#[derive(Debug)]
pub(crate) struct Ballot {
    servers: usize,
    yes: usize,
    no: usize,
}

impl Ballot {
    /// Servers that are not asked count as a no.
    pub(crate) fn new(servers: usize, asked: usize) -> Self {
        Self {
            servers,
            yes: 0,
            no: servers - asked,
        }
    }

    /// Counts a vote. Returns whether the decision is made.
    pub(crate) fn count(&mut self, yes: bool) -> bool {
        self.yes += usize::from(yes);
        self.no += usize::from(!yes);
        self.decided().is_some()
    }

    /// The decision, or `None` while it is open.
    pub(crate) fn decided(&self) -> Option<bool> {
        let majority = majority(self.servers);
        if self.yes >= majority {
            return Some(true);
        }
        (self.no > self.servers - majority).then_some(false)
    }
}

/// Combines the replies to an inspection. A holder counts if a majority of the servers reports it,
/// for as long as a majority does. The wait queue is the longest of all.
pub(crate) fn inspected(servers: usize, seen: Vec<Inspection>) -> Inspection {
    let majority = majority(servers);
    let fence = seen.iter().filter_map(|one| one.fence).max();
    let (holders, waiters): (Vec<_>, Vec<_>) = seen
        .into_iter()
        .map(|one| (one.holders, one.waiters))
        .unzip();
    let waiters = waiters.into_iter().max_by_key(Vec::len);
    let waiters = waiters.unwrap_or_default();
    let end = |holder: &Holder| holder.ttl.unwrap_or(Duration::MAX);
    // A server may have two aliases of one reader.
    let once = |mut of_server: Vec<Holder>| {
        of_server.sort_by_key(|holder| (holder.id, Reverse(end(holder))));
        of_server.dedup_by_key(|holder| holder.id);
        of_server
    };
    let mut all: Vec<_> = holders.into_iter().flat_map(once).collect();
    // The votes for one holder follow each other, the one that ends last in front.
    all.sort_by_key(|holder| (holder.id, Reverse(end(holder))));
    let votes = all.chunk_by(|one, next| one.id == next.id);
    let held = votes.filter_map(|votes| votes.get(majority - 1).cloned());
    let mut holders: Vec<_> = held.collect();
    holders.sort_by_key(end);
    Inspection {
        holders,
        waiters,
        fence,
        ..Inspection::default()
    }
}

/// Combines the replies to a revocation. `None` if too few servers have replied.
pub(crate) fn revoked(servers: usize, replies: &[RevokeReply]) -> Option<RevokeReply> {
    let text = |reply| replies.iter().filter(|one| **one == reply).count();
    let (revoked, free) = (text(RevokeReply::Revoked), text(RevokeReply::NotHeld));
    let changed = text(RevokeReply::Changed);
    let refusals = [RevokeReply::ForeignKey, RevokeReply::Endless];
    match revoked + free + changed >= majority(servers) {
        // Another holder has the lock, and at most a few stray votes were released.
        true if changed >= majority(servers) => Some(RevokeReply::Changed),
        true if revoked > 0 => Some(RevokeReply::Revoked),
        true if changed > 0 => Some(RevokeReply::Changed),
        true => Some(RevokeReply::NotHeld),
        false => refusals.into_iter().find(|reply| text(*reply) > 0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        request::key::LockKey,
        request::spec::Mode,
        store::{HolderId, Identity, Token},
    };

    #[test]
    fn a_lock_is_held_for_as_long_as_a_majority_holds_it() {
        let now = Instant::now();
        let mut fraction = || 0.5;
        let cx = MajorityCx::new(now, 1, &mut fraction);
        let mut renewed = Renewed::new(5, 0);
        for seconds in [30, 10, 20] {
            assert_eq!(renewed.held(&cx), Held::Open);
            renewed.renewed(now, Duration::from_secs(seconds));
        }
        let until = |seconds| Held::Until(now + Duration::from_secs(seconds));
        assert_eq!(renewed.held(&cx), until(10));
        renewed.renewed(now, Duration::from_secs(25));
        assert_eq!(renewed.held(&cx), until(20));
    }

    #[test]
    fn a_lock_is_gone_when_no_majority_can_hold_it() {
        let mut fraction = || 0.5;
        let cx = MajorityCx::new(Instant::now(), 1, &mut fraction);
        let mut renewed = Renewed::new(5, 0);
        renewed.gone = 2;
        renewed.renewed(Instant::now(), Duration::from_secs(1));
        assert_eq!(renewed.held(&cx), Held::Open);
        renewed.gone = 3;
        assert_eq!(renewed.held(&cx), Held::Gone);
    }

    #[test]
    fn a_holder_counts_if_a_majority_has_it() {
        let key = LockKey::new("k").unwrap();
        let tokens = [Token::random(), Token::random()];
        let holder = |(who, seconds): (usize, u64)| {
            let id = HolderId::of(&key, tokens[who], false);
            let client = Identity::unnamed(tokens[who].client());
            Holder::new(id, Mode::Shared, Some(Duration::from_secs(seconds)), client)
        };
        let seen = |holders: &[(usize, u64)]| Inspection {
            holders: holders.iter().copied().map(holder).collect(),
            ..Inspection::default()
        };
        let combined = inspected(3, vec![seen(&[(0, 5), (1, 9)]), seen(&[(1, 8)]), seen(&[])]);
        assert_eq!(combined.holders, [holder((1, 8))]);
        let both = inspected(3, vec![seen(&[(0, 5), (1, 9)]), seen(&[(1, 8), (0, 20)])]);
        assert_eq!(both.holders, [holder((0, 5)), holder((1, 8))]);
        // Votes for different holders do not add up.
        for alone in [
            vec![seen(&[(0, 5)]), seen(&[])],
            vec![seen(&[(0, 5)]), seen(&[(1, 5)])],
        ] {
            assert_eq!(inspected(3, alone).holders, []);
        }
    }

    #[test]
    fn a_revocation_of_one_holder_needs_that_holder_at_a_majority() {
        use RevokeReply::{Changed, NotHeld, Revoked};
        for (replies, outcome) in [
            (vec![Revoked, Revoked, NotHeld], Some(Revoked)),
            (vec![Revoked, NotHeld], Some(Revoked)),
            (vec![Revoked, Revoked, Changed], Some(Revoked)),
            (vec![Revoked, Changed, Changed], Some(Changed)),
            (vec![NotHeld, Changed], Some(Changed)),
            (vec![NotHeld, NotHeld], Some(NotHeld)),
            (vec![Revoked], None),
        ] {
            assert_eq!(revoked(3, &replies), outcome, "{replies:?}");
        }
    }
}
