//! Replies that contain remaining leases.

use std::time::Duration;

use crate::store::{
    AcquireAllReply, AcquireReply, ConvertReply, Grant, Inspection, PollReply, ReleaseReply,
    RenewReply, RevokeReply,
};

/// The time that has passed between the decision on a step and its execution, within two bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Passed {
    pub(crate) at_least: Duration,
    pub(crate) at_most: Duration,
}

impl Passed {
    /// Returns the time that a lease of another holder certainly is shorter.
    pub(crate) fn for_others(self) -> Self {
        Self {
            at_most: self.at_least,
            ..self
        }
    }
}

/// A reply that was computed before the database executed the step.
pub(crate) trait Outcome: Send + 'static {
    /// Shortens all remaining leases by the time between: those of the caller by the upper bound,
    /// and those that it waits for by the lower one, as it would ask too early.
    fn shorten(&mut self, by: Passed);
}

impl Outcome for Duration {
    fn shorten(&mut self, by: Passed) {
        *self = self.saturating_sub(by.at_most);
    }
}

impl Outcome for Grant {
    fn shorten(&mut self, by: Passed) {
        self.ttl.shorten(by);
    }
}

impl<T: Outcome> Outcome for Option<T> {
    fn shorten(&mut self, by: Passed) {
        self.iter_mut().for_each(|inner| inner.shorten(by));
    }
}

impl<T: Outcome> Outcome for Vec<T> {
    fn shorten(&mut self, by: Passed) {
        self.iter_mut().for_each(|inner| inner.shorten(by));
    }
}

impl Outcome for () {
    fn shorten(&mut self, _by: Passed) {}
}

impl Outcome for RevokeReply {
    fn shorten(&mut self, _by: Passed) {}
}

impl Outcome for AcquireReply {
    fn shorten(&mut self, by: Passed) {
        match self {
            Self::Granted(grant) => grant.shorten(by),
            Self::Queued { holder_ttl, .. }
            | Self::Busy { holder_ttl, .. }
            | Self::Retained { holder_ttl } => {
                holder_ttl.shorten(by.for_others());
            }
            Self::Late | Self::ForeignKey(_) | Self::ModeMismatch | Self::Done(_) => {}
        }
    }
}

impl Outcome for AcquireAllReply {
    fn shorten(&mut self, by: Passed) {
        match self {
            Self::Granted(grants) => grants.shorten(by),
            Self::Refused { reply, .. } => reply.shorten(by),
        }
    }
}

impl Outcome for PollReply {
    fn shorten(&mut self, by: Passed) {
        match self {
            Self::Granted(grant) => grant.shorten(by),
            Self::Queued { holder_ttl, .. } => holder_ttl.shorten(by.for_others()),
            Self::Gone | Self::Done(_) => {}
        }
    }
}

impl Outcome for ReleaseReply {
    fn shorten(&mut self, by: Passed) {
        match self {
            Self::Passed(grant) => grant.shorten(by),
            Self::Queued { holder_ttl, .. } => holder_ttl.shorten(by.for_others()),
            Self::Released | Self::NotHeld => {}
        }
    }
}

impl Outcome for ConvertReply {
    fn shorten(&mut self, by: Passed) {
        match self {
            Self::Converted(grant) => grant.shorten(by),
            Self::NotHeld => {}
        }
    }
}

impl Outcome for RenewReply {
    fn shorten(&mut self, by: Passed) {
        match self {
            Self::Renewed { ttl } => ttl.shorten(by),
            Self::Gone => {}
        }
    }
}

impl Outcome for Inspection {
    fn shorten(&mut self, by: Passed) {
        for holder in &mut self.holders {
            holder.ttl.shorten(by);
        }
    }
}
