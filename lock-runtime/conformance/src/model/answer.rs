//! Replies in a form that two stores have in common.

use std::time::Duration;

use lock_runtime::{
    Mode,
    store::{Hold, RevokeReply},
};

use super::step::Step;

/// Remaining time of a lease, to the nearest unit: leases are several units or end at once, and a
/// sequence takes less than half a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Units(pub(super) u128);

impl Units {
    pub(super) fn of(ttl: Duration, unit: Duration) -> Self {
        Self((ttl + unit / 2).as_nanos() / unit.as_nanos())
    }
}

/// A grant. The fencing tokens of two stores differ, but both stores agree whether the token of a
/// writer is larger than all earlier ones of its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Granted {
    pub(super) fresh: bool,
    pub(super) ttl: Units,
    pub(super) reserved: u32,
}

/// A reply, without the parts that are specific to one store.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) enum Answer {
    #[default]
    Done,
    Granted(Granted),
    AllGranted(Vec<Granted>),
    Refused(usize, Box<Answer>),
    Busy(Option<Units>),
    Queued(Option<Units>),
    Late,
    /// The lock is done.
    IsDone(Vec<u8>),
    /// A result, and whether it has the fencing token under which it was recorded.
    Result(Vec<u8>, bool),
    NoResult,
    ForeignKey,
    ModeMismatch,
    Gone,
    Renewals(Vec<Option<Units>>),
    Released,
    Passed(Granted),
    NotHeld,
    Converted(Granted),
    Inspected {
        /// Each with its lease, and whether it is a result.
        holders: Vec<(Mode, Option<Units>, bool)>,
        waiters: Vec<(Mode, Units)>,
    },
    Revocation(RevokeReply),
    Failed(String),
    /// The store was not available. The call may have been executed.
    Unanswered,
}

impl Answer {
    /// Returns whether a store may reply `found` where the in-memory store replies `self`.
    ///
    /// The contract leaves open whether a store reserves fencing tokens, whether it knows the
    /// remaining lease of a holder, and whether the token of a reader or of a permit is a new one
    /// when its request is repeated.
    pub(super) fn allows(&self, found: &Self, step: &Step) -> bool {
        let one = |expected: &Granted, found: &Granted, mode: Mode| {
            expected.ttl == found.ttl
                && [0, expected.reserved].contains(&found.reserved)
                && (expected.fresh == found.fresh || mode != Mode::Exclusive)
        };
        let ttl =
            |expected: &Option<Units>, found: &Option<Units>| found.is_none() || expected == found;
        let mode = step.hold().map_or(Mode::Exclusive, |hold| hold.mode);
        match (self, found) {
            (Self::Granted(expected), Self::Granted(found))
            | (Self::Passed(expected), Self::Passed(found)) => one(expected, found, mode),
            (Self::Converted(expected), Self::Converted(found)) => {
                one(expected, found, Mode::Shared)
            }
            (Self::AllGranted(expected), Self::AllGranted(found)) => {
                let holds: &[Hold] = step.holds();
                expected.len() == found.len()
                    && (expected.iter().zip(found).zip(holds))
                        .all(|((expected, found), hold)| one(expected, found, hold.mode))
            }
            (Self::Busy(expected), Self::Busy(found))
            | (Self::Queued(expected), Self::Queued(found)) => ttl(expected, found),
            (Self::Refused(expected, why), Self::Refused(found, reply)) => {
                expected == found && why.allows(reply, step)
            }
            _ => self == found,
        }
    }
}
