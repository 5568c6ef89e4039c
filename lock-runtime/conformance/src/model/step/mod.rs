//! One step of a sequence.

mod shown;

use std::time::Duration;

pub(super) use self::shown::Shown;
use lock_runtime::{
    LockKey, LockKind,
    store::{Hold, NextHolder, RevokeScope},
};

/// One request to a store.
#[derive(Clone)]
pub(super) enum Step {
    Acquire {
        hold: Hold,
        lease: Duration,
        late: bool,
        queue: bool,
        reserved: u32,
    },
    AcquireAll {
        holds: Vec<Hold>,
        lease: Duration,
    },
    Poll(Hold),
    Renew(Vec<(Hold, Duration)>),
    Release {
        hold: Hold,
        keep_for: Option<Duration>,
        next: Option<NextHolder>,
    },
    /// A release that leaves a result.
    Complete {
        hold: Hold,
        keep_for: Duration,
        result: Vec<u8>,
    },
    /// A look at the result.
    Look(LockKey),
    /// A look, and the removal of the result that it has found.
    Forget(LockKey),
    Convert(Hold),
    Abandon(Hold),
    Inspect(LockKey, LockKind),
    Revoke(LockKey, LockKind, RevokeScope),
}

impl Step {
    /// Whether the step may create a hold that ends by itself before the next step.
    pub(super) fn is_short(&self, short: Duration) -> bool {
        match self {
            Self::Acquire { lease, .. } => *lease == short,
            Self::Release { keep_for, .. } => *keep_for == Some(short),
            Self::Complete { keep_for, .. } => *keep_for == short,
            _ => false,
        }
    }

    /// The acquisition that the reply is about.
    pub(super) fn hold(&self) -> Option<&Hold> {
        match self {
            Self::Acquire { hold, .. }
            | Self::Release { hold, .. }
            | Self::Complete { hold, .. }
            | Self::Poll(hold)
            | Self::Convert(hold)
            | Self::Abandon(hold) => Some(hold),
            _ => None,
        }
    }

    /// The acquisitions of a request for several keys.
    pub(super) fn holds(&self) -> &[Hold] {
        match self {
            Self::AcquireAll { holds, .. } => holds,
            _ => &[],
        }
    }
}
