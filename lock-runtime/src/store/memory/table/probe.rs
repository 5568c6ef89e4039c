//! What tests look at in a table, and how they break it.

#[cfg(feature = "redis")]
use super::{AtomicU64, Fences};
use super::{Duration, Entry, FORGOTTEN, Family, Hold, Instant, LockKey, Mode, Table, Token};

impl Table {
    fn entry(&self, key: &LockKey, family: Family) -> Option<&Entry> {
        match family {
            Family::Lock => self.locks.get(key),
            Family::Permits => self.permits.get(key),
        }
    }

    /// Until when the table keeps a lock for its holder; none if it does not.
    pub(crate) fn held_until(&self, hold: &Hold, now: Instant) -> Option<Instant> {
        let entry = self
            .entry(&hold.key, hold.mode.family())
            .filter(|entry| entry.mode == hold.mode)?;
        entry
            .slots
            .iter()
            .find(|slot| slot.is_held_by(hold.token) && slot.expires > now)
            .map(|slot| slot.expires)
    }

    /// Everybody whom the table knows: those that hold a lock, and those that stand in line for it.
    pub(crate) fn tokens(
        &self,
        key: &LockKey,
        family: Family,
        now: Instant,
    ) -> impl Iterator<Item = (Token, Option<Mode>)> {
        self.entry(key, family).into_iter().flat_map(move |entry| {
            let holders = entry
                .slots
                .iter()
                .filter(move |slot| !slot.kept && slot.expires > now);
            let waiters = entry
                .line
                .iter()
                .filter(move |place| now < place.seen + FORGOTTEN);
            holders
                .map(|slot| (slot.token, Some(entry.mode)))
                .chain(waiters.map(|place| (place.token, None)))
        })
    }

    /// PROTOCOL 11 switched off: the lock is kept for `lease` from now, and not for longer.
    pub(crate) fn shorten(&mut self, hold: &Hold, lease: Duration, now: Instant) {
        if let Some(slot) = self.held(hold, now) {
            slot.expires = now + lease;
        }
    }
}

#[cfg(feature = "redis")]
impl Fences {
    /// Those of a store that has given out none, and whose clock showed so many microseconds since 1970 at `began`.
    pub(crate) fn since(began: Instant, micros: u64) -> Self {
        Self {
            latest: AtomicU64::new(0),
            epoch: (began, micros),
        }
    }

    /// What a store finds after a restart that has the data of now.
    pub(crate) fn saved(&self) -> Self {
        let latest = self.latest().map_or(0, |latest| latest.number());
        Self {
            latest: AtomicU64::new(latest),
            epoch: self.epoch,
        }
    }
}
