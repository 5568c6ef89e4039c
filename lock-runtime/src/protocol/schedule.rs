//! The times at which background work is due.

use std::{cmp::Reverse, collections::BinaryHeap};

use tokio::time::Instant;

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
        self.checked_at = self.heap.peek().map(|Reverse((at, _))| *at);
        self.checked_at
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.heap.is_empty()
    }

    /// Records that the driver has ended.
    pub(crate) fn unchecked(&mut self) {
        self.checked_at = None;
    }
}
