//! The history of a lock on real servers, judged by stateright's tester of linearizability.
//!
//! The tester tries all orders, so it judges a few holds at a time: those with consecutive fencing
//! tokens, and the earlier ones that may not have ended before. `tests/judge` judges whole
//! histories with another checker.

use std::collections::BTreeMap;

use serde::Deserialize;
use stateright::semantics::{ConsistencyTester as _, LinearizabilityTester, SequentialSpec};

/// The permits of a key in a storm.
const PERMITS: usize = 2;
/// The holds that begin in a part.
const PART: usize = 24;

/// The mode of a hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[expect(missing_docs, reason = "named as in a storm")]
pub enum Mode {
    Exclusive,
    Shared,
    Downgraded,
    Permit,
}

/// An operation of a history, a line of the file.
#[derive(Clone, Debug, Deserialize)]
pub struct Operation {
    /// The key of the lock.
    pub key: String,
    /// The number of the hold.
    pub hold: usize,
    /// Its mode.
    pub mode: Mode,
    /// Its fencing token when it begins; `None` when it ends.
    pub fence: Option<u64>,
    /// The time before which the lock has not changed.
    pub call: u64,
    /// The time after which it has changed.
    pub returned: u64,
}

/// A hold of a part: when it begins, if it does so in the part, and when it ends.
#[derive(Clone, Copy, Debug)]
struct Hold {
    mode: Mode,
    fence: u64,
    begins: (u64, u64),
    ends: (u64, u64),
}

impl Hold {
    /// It was given up, and may have ended at any time since it was asked for. So it holds the lock
    /// for a moment: any order that is right for a longer time is right for this one.
    fn is_given_up(&self) -> bool {
        self.ends.0 == self.begins.0
    }
}

/// A lock: the fencing token of the latest hold, and the holds.
#[derive(Clone, Debug, Default)]
struct Lock {
    fence: u64,
    holds: BTreeMap<u64, Mode>,
}

#[derive(Clone, Copy, Debug)]
enum Op {
    Begin(Mode, u64),
    /// Begins and ends.
    Pass(Mode, u64),
    End(u64),
}

impl SequentialSpec for Lock {
    type Op = Op;
    type Ret = bool;

    fn invoke(&mut self, op: &Op) -> bool {
        match *op {
            Op::Begin(mode, fence) | Op::Pass(mode, fence) => {
                let admits = match mode {
                    Mode::Exclusive => self.holds.is_empty(),
                    Mode::Permit => self.holds.len() < PERMITS,
                    Mode::Shared | Mode::Downgraded => {
                        !self.holds.values().any(|hold| *hold == Mode::Exclusive)
                    }
                };
                if !admits || fence <= self.fence {
                    return false;
                }
                self.fence = fence;
                if matches!(op, Op::Begin(..)) {
                    self.holds.insert(fence, mode);
                }
                true
            }
            Op::End(fence) => self.holds.remove(&fence).is_some(),
        }
    }
}

/// Returns how many parts the operations of one lock have, and the first fencing token of each that
/// is not linearizable.
pub fn judge(operations: &[Operation]) -> (usize, Vec<u64>) {
    let mut holds: BTreeMap<usize, Hold> = BTreeMap::new();
    for operation in operations {
        let hold = holds.entry(operation.hold).or_insert(Hold {
            mode: operation.mode,
            fence: 0,
            begins: (0, 0),
            ends: (u64::MAX, u64::MAX),
        });
        let time = (operation.call, operation.returned);
        match operation.fence {
            Some(fence) => (hold.fence, hold.begins) = (fence, time),
            None => hold.ends = time,
        }
    }
    let mut holds: Vec<_> = holds.into_values().collect();
    holds.sort_by_key(|hold| hold.fence);
    let parts = holds.len().div_ceil(PART);
    let is_wrong = |first: &usize| !is_linearizable(&holds, *first);
    let wrong = (0..holds.len()).step_by(PART).filter(is_wrong);
    (parts, wrong.map(|first| holds[first].fence).collect())
}

fn is_linearizable(holds: &[Hold], first: usize) -> bool {
    let (before, from) = holds.split_at(first);
    let part = &from[..from.len().min(PART)];
    let begin = part.iter().map(|hold| hold.begins.0).min().unwrap_or(0);
    // Some of them may have ended before others began. Their ends are calls of this part.
    let is_left = |hold: &&Hold| hold.ends.1 > begin && !hold.is_given_up();
    let left: Vec<_> = before.iter().filter(is_left).collect();
    let lock = Lock {
        fence: before.last().map_or(0, |hold| hold.fence),
        holds: left.iter().map(|hold| (hold.fence, hold.mode)).collect(),
    };
    let begins = part.iter().map(|hold| match hold.is_given_up() {
        true => (hold.begins, Op::Pass(hold.mode, hold.fence), hold.fence),
        false => (hold.begins, Op::Begin(hold.mode, hold.fence), hold.fence),
    });
    let ends = part.iter().filter(|hold| !hold.is_given_up()).chain(left);
    let ends = ends.map(|hold| {
        let (call, returned) = hold.ends;
        // A thread has one call at a time.
        (
            (call.max(hold.begins.1 + 1), returned.max(hold.begins.1 + 2)),
            Op::End(hold.fence),
            hold.fence,
        )
    });
    // At the same time, calls come first: they are concurrent then.
    let mut events = Vec::new();
    for ((call, returned), op, thread) in begins.chain(ends) {
        events.push((call, false, thread, Some(op)));
        events.push((returned, true, thread, None));
    }
    events.sort_by_key(|(time, is_return, ..)| (*time, *is_return));
    let mut tester = LinearizabilityTester::new(lock);
    for (_, _, thread, op) in events {
        let known = match op {
            Some(op) => tester.on_invoke(thread, op),
            None => tester.on_return(thread, true),
        };
        known.expect("each thread calls and returns in turn");
    }
    tester.is_consistent()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hold(hold: usize, mode: Mode, fence: u64, times: [u64; 4]) -> [Operation; 2] {
        let operation = |fence, call, returned| Operation {
            key: "a".to_owned(),
            hold,
            mode,
            fence,
            call,
            returned,
        };
        let [asked, granted, left, gone] = times;
        [
            operation(Some(fence), asked, granted),
            operation(None, left, gone),
        ]
    }

    fn is_right(holds: &[[Operation; 2]]) -> bool {
        judge(&holds.concat()).1.is_empty()
    }

    #[test]
    fn holders_exclude_each_other_in_the_order_of_their_tokens() {
        use Mode::{Exclusive, Permit, Shared};
        let first = hold(0, Exclusive, 5, [0, 10, 20, 21]);
        assert!(is_right(&[
            first.clone(),
            hold(1, Exclusive, 6, [5, 30, 40, 41])
        ]));
        // It was asked for before the first one, and granted after it.
        assert!(is_right(&[
            first.clone(),
            hold(1, Shared, 6, [0, 22, 40, 41])
        ]));
        assert!(!is_right(&[
            first.clone(),
            hold(1, Shared, 6, [5, 15, 40, 41])
        ]));
        assert!(!is_right(&[
            first.clone(),
            hold(1, Exclusive, 4, [25, 30, 40, 41])
        ]));
        // The first one was given up.
        let given_up = hold(0, Exclusive, 5, [0, 50, 0, 51]);
        let next = |fence, times| hold(1, Exclusive, fence, times);
        assert!(is_right(&[given_up.clone(), next(6, [10, 40, 60, 61])]));
        assert!(!is_right(&[given_up, next(4, [55, 58, 60, 61])]));
        let permit = |number, fence| hold(number, Permit, fence, [0, 10, 20, 21]);
        assert!(is_right(&[permit(0, 1), permit(1, 2)]));
        assert!(!is_right(&[permit(0, 1), permit(1, 2), permit(2, 3)]));
    }

    #[test]
    fn a_hold_that_begins_in_one_part_counts_in_the_next() {
        let mut holds: Vec<_> = (0..PART as u64)
            .map(|it| hold(it as usize, Mode::Shared, it + 1, [it, it + 1, 1000, 1001]))
            .collect();
        let fence = PART as u64 + 1;
        holds.push(hold(PART, Mode::Exclusive, fence, [500, 1100, 1200, 1201]));
        assert!(is_right(&holds));
        holds[PART] = hold(PART, Mode::Exclusive, fence, [500, 900, 1200, 1201]);
        assert!(!is_right(&holds));
        for given_up in &mut holds[..PART] {
            given_up[1].call = given_up[0].call;
        }
        assert!(is_right(&holds));
    }
}
