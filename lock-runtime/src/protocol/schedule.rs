//! The times at which background work is due.

use crate::shell::time::Instant;
use std::{cmp::Reverse, collections::BinaryHeap};

/// A heap of due times. An entry counts only if its owner still has that due time, so that an
/// owner whose time has changed need not search for its old entry.
#[derive(Clone)]
pub(crate) struct Schedule<K> {
    heap: BinaryHeap<Reverse<(Instant, K)>>,
    /// The driver checks the schedule at this instant, or has been notified. `None` if it will not.
    checked_at: Option<Instant>,
}

impl<K: Ord> Default for Schedule<K> {
    fn default() -> Self {
        Self {
            heap: BinaryHeap::new(),
            checked_at: None,
        }
    }
}

impl<K: Ord + Copy> Schedule<K> {
    /// Adds an entry. Returns whether the driver must be notified. `owners` is the largest number
    /// of entries that can count; `counts` decides which of them do when the heap has grown.
    pub(crate) fn add(
        &mut self,
        at: Instant,
        key: K,
        owners: usize,
        counts: impl Fn(Instant, K) -> bool,
    ) -> bool {
        if self.heap.len() >= 2 * owners + 64 {
            self.heap.retain(|Reverse((at, key))| counts(*at, *key));
        }
        self.heap.push(Reverse((at, key)));
        let is_early = self.checked_at.is_none_or(|checked_at| at < checked_at);
        if is_early {
            self.checked_at = Some(at);
        }
        is_early
    }

    /// Returns whether an entry is due.
    pub(crate) fn is_due(&self, now: Instant) -> bool {
        self.first().is_some_and(|at| at <= now)
    }

    /// Returns when the first entry is due.
    pub(crate) fn first(&self) -> Option<Instant> {
        self.heap.peek().map(|Reverse((at, _))| *at)
    }

    /// Removes the first entry that is due by `until`.
    pub(crate) fn pop(&mut self, until: Instant) -> Option<(Instant, K)> {
        let Reverse((at, _)) = self.heap.peek()?;
        if *at > until {
            return None;
        }
        self.heap.pop().map(|Reverse(entry)| entry)
    }

    /// Returns when the first entry is due. The driver checks the schedule then.
    pub(crate) fn check_at(&mut self) -> Option<Instant> {
        self.checked_at = self.first();
        self.checked_at
    }

    /// Returns the number of entries, with those that no longer count.
    pub(crate) fn len(&self) -> usize {
        self.heap.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.heap.is_empty()
    }

    /// Records that the driver has ended.
    pub(crate) fn unchecked(&mut self) {
        self.checked_at = None;
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, time::Duration};

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_driver_is_notified_of_a_time_before_its_next_check_only() {
        let (now, second) = (Instant::now(), Duration::from_secs(1));
        let mut schedule = Schedule::default();
        let add = |schedule: &mut Schedule<u8>, seconds: u32| {
            // With few entries, none of them is looked at: that would take longer with each owner.
            let counts = |_, _| panic!("it has few entries");
            schedule.add(now + seconds * second, 0, 1, counts)
        };
        assert!(add(&mut schedule, 5), "it does not check at all");
        assert!(!add(&mut schedule, 5));
        assert!(!add(&mut schedule, 6));
        assert!(add(&mut schedule, 4));
        assert!(schedule.is_due(now + 4 * second));
        assert!(!schedule.is_due(now + 3 * second));
        assert_eq!(schedule.len(), 4);
        schedule.unchecked();
        assert!(add(&mut schedule, 7), "the driver has ended");
    }

    #[test]
    fn an_owner_whose_time_changes_often_leaves_few_entries() {
        let (mut at, mut schedule) = (Instant::now(), Schedule::default());
        for _ in 0..1_000 {
            at += Duration::from_millis(1);
            schedule.add(at, 0, 1, |entry, _| entry == at);
            assert!(schedule.len() <= 66);
        }
        let mut left = std::iter::from_fn(|| schedule.pop(at));
        assert_eq!(left.by_ref().last(), Some((at, 0)));
    }

    proptest! {
        /// Owners get and lose due times in any order. Each is found at its due time, the driver is
        /// notified in time, and entries that no longer count do not accumulate.
        #[test]
        fn every_owner_is_found_at_its_due_time(steps in proptest::collection::vec((0..8_usize, 0..50_u64, 0..6_u8), 1..2_000)) {
            let mut now = Instant::now();
            let mut schedule = Schedule::default();
            let mut owners: BTreeMap<usize, Instant> = BTreeMap::new();
            // The driver checks at this instant. At first it is not active.
            let mut checks_at: Option<Instant> = None;
            for (owner, millis, step) in steps {
                let at = now + Duration::from_millis(millis * 30);
                match step {
                    0 => drop(owners.remove(&owner)),
                    1 => {
                        now += Duration::from_millis(millis);
                        let mut found: Vec<Instant> = Vec::new();
                        while let Some((at, owner)) = schedule.pop(now) {
                            prop_assert!(at <= now);
                            if owners.get(&owner) == Some(&at) {
                                owners.remove(&owner);
                                found.push(at);
                            }
                        }
                        prop_assert!(found.is_sorted());
                        prop_assert!(owners.values().all(|due| *due > now));
                        checks_at = schedule.check_at();
                    }
                    2 => {
                        schedule.unchecked();
                        checks_at = None;
                    }
                    _ => {
                        owners.insert(owner, at);
                        let counts = |at, owner| owners.get(&owner) == Some(&at);
                        if schedule.add(at, owner, owners.len(), counts) {
                            checks_at = Some(at);
                        }
                        prop_assert!(checks_at.is_some_and(|checks_at| checks_at <= at));
                        prop_assert!(schedule.heap.len() <= 2 * owners.len() + 64);
                    }
                }
                for (owner, due) in &owners {
                    let is_planned = schedule.heap.iter().any(|Reverse(it)| *it == (*due, *owner));
                    prop_assert!(is_planned, "the entry of a due time was removed");
                }
                prop_assert_eq!(schedule.is_empty(), schedule.heap.is_empty());
            }
        }
    }
}
