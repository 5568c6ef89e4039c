//! The history of each lock as calls and returns, for checkers of linearizability.

#[cfg(feature = "serde")]
use serde::{Deserialize, Serialize};

use super::{Chronicle, Nanos, meets};
use crate::storm::Kind;

/// A call that has changed a lock.
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(Serialize, Deserialize))]
pub struct Operation {
    /// The key of the lock.
    pub key: String,
    /// The hold that begins or ends, a number of its own.
    pub hold: usize,
    /// The mode of the hold.
    pub mode: Kind,
    /// The fencing token of a hold that begins; `None` if it ends.
    pub fence: Option<u64>,
    /// The time before which the lock has not changed.
    pub call: Nanos,
    /// The time after which it has changed.
    pub returned: Nanos,
}

impl Chronicle {
    /// All calls that have changed a lock. A hold begins between the request and its answer. It may
    /// end from the time on at which its holder does not rely on it any more: its claim has ended,
    /// it was revoked, or the only store has lost its data.
    pub fn operations(&self) -> Vec<Operation> {
        let mut operations = Vec::new();
        let mut holds = 0..;
        for (lock, requests) in self.by_lock() {
            for request in requests {
                let (Some(claim), Some(place)) = (
                    request.claim(),
                    request.ask.keys.iter().position(|key| *key == lock.0),
                ) else {
                    continue;
                };
                let revoked = self.until_revoked(&lock, request.asked, claim.clone());
                let end = revoked.map_or(request.asked, |until| until.end);
                let lost = self
                    .faults
                    .iter()
                    .filter(|it| it.loses && meets(&it.time, &(request.asked..claim.end)));
                let end = lost.map(|loss| loss.time.start).fold(end, Nanos::min);
                let end = end.max(request.asked);
                let begins = Operation {
                    key: lock.0.clone(),
                    hold: holds.next().expect("it has no end"),
                    mode: request.ask.kind,
                    fence: Some(request.fences[place]),
                    call: request.asked,
                    returned: claim.start,
                };
                operations.push(Operation {
                    fence: None,
                    call: end,
                    // As soon as it may end, since nothing needs it to last.
                    returned: end.max(claim.start) + 1,
                    ..begins.clone()
                });
                operations.push(begins);
            }
        }
        operations
    }
}
