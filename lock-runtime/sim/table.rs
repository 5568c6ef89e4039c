//! Access of the simulators to a table: inspection, and ways to break its rules.

#[cfg(feature = "redis")]
use std::sync::atomic::AtomicU64;
use std::time::Duration;

#[cfg(feature = "redis")]
use super::Fences;
use super::{Hold, Instant, LockKey, LockKind, Mode, Table};
use crate::store::Token;

impl Table {
    /// Returns the instant until which the table keeps a lock for its holder, if it does.
    pub(crate) fn held_until(&self, hold: &Hold, now: Instant) -> Option<Instant> {
        let entry = self.entry(&hold.key, hold.mode.kind())?;
        let mut slots = entry.living(now).filter(|_| entry.is_held_in(hold.mode));
        let slot = slots.find(|slot| slot.is_held_by(hold.token))?;
        Some(slot.expires)
    }

    /// Returns the tokens of the holders, with their mode, and of the waiters.
    pub(crate) fn tokens(
        &self,
        key: &LockKey,
        kind: LockKind,
        now: Instant,
    ) -> impl Iterator<Item = (Token, Option<Mode>)> {
        self.entry(key, kind).into_iter().flat_map(move |entry| {
            let holders = entry.living(now).filter(|slot| !slot.kept);
            let holders = holders.map(|slot| (slot.token, Some(entry.mode)));
            let waiters = entry.queued(now).map(|place| (place.request.token, None));
            holders.chain(waiters)
        })
    }

    /// Returns whether there is a holder, a reservation or a waiter.
    #[cfg(feature = "redis")]
    pub(crate) fn is_taken(&self, key: &LockKey, kind: LockKind, now: Instant) -> bool {
        let entry = self.entry(key, kind);
        entry.is_some_and(|entry| entry.is_taken(now))
    }

    /// Switches rule 11 off: keeps the lock for `lease` from now, even if that shortens the
    /// lease.
    pub(crate) fn shorten(&mut self, hold: &Hold, lease: Duration, now: Instant) {
        if let Some(slot) = self.held(hold, now) {
            slot.expires = now + lease;
        }
    }
}

#[cfg(feature = "redis")]
impl Fences {
    /// Returns the counter of a store that restarts with the data of now.
    pub(crate) fn saved(&self) -> Self {
        let latest = self.latest().map_or(0, |latest| latest.number());
        Self {
            latest: AtomicU64::new(latest),
            epoch: self.epoch,
        }
    }
}
