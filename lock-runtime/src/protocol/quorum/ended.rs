//! The acquisitions that have ended recently. A release may still name them as its heir.

use std::collections::{HashSet, VecDeque};

use foldhash::fast::RandomState;

/// The number of acquisitions to remember.
const MANY: usize = 1_024;

/// The stems of the tokens of the latest acquisitions that have ended.
#[derive(Debug, Default)]
pub(super) struct Ended {
    stems: HashSet<u128, RandomState>,
    order: VecDeque<u128>,
}

impl Ended {
    pub(super) fn insert(&mut self, stem: u128) {
        if self.stems.insert(stem) {
            if self.order.len() == MANY
                && let Some(oldest) = self.order.pop_front()
            {
                self.stems.remove(&oldest);
            }
            self.order.push_back(stem);
        }
    }

    pub(super) fn contains(&self, stem: u128) -> bool {
        self.stems.contains(&stem)
    }
}
