//! Replies that contain remaining leases.

use std::time::Duration;

use crate::store::{
    AcquireAllReply, AcquireReply, ConvertReply, Grant, Inspection, PollReply, ReleaseReply,
    RenewReply, RevokeReply,
};

/// A reply that was computed before the database executed the step.
pub(crate) trait Outcome: Send + 'static {
    /// Shortens all remaining leases by the time between.
    fn shorten(&mut self, by: Duration);
}

impl Outcome for Duration {
    fn shorten(&mut self, by: Duration) {
        *self = self.saturating_sub(by);
    }
}

impl Outcome for Grant {
    fn shorten(&mut self, by: Duration) {
        self.ttl.shorten(by);
    }
}

impl<T: Outcome> Outcome for Option<T> {
    fn shorten(&mut self, by: Duration) {
        self.iter_mut().for_each(|inner| inner.shorten(by));
    }
}

impl<T: Outcome> Outcome for Vec<T> {
    fn shorten(&mut self, by: Duration) {
        self.iter_mut().for_each(|inner| inner.shorten(by));
    }
}

impl Outcome for () {
    fn shorten(&mut self, _by: Duration) {}
}

impl Outcome for RevokeReply {
    fn shorten(&mut self, _by: Duration) {}
}

impl Outcome for AcquireReply {
    fn shorten(&mut self, by: Duration) {
        match self {
            Self::Granted(grant) => grant.shorten(by),
            Self::Queued { holder_ttl, .. } | Self::Busy { holder_ttl, .. } => {
                holder_ttl.shorten(by);
            }
            Self::Late | Self::ForeignKey(_) | Self::ModeMismatch => {}
        }
    }
}

impl Outcome for AcquireAllReply {
    fn shorten(&mut self, by: Duration) {
        match self {
            Self::Granted(grants) => grants.shorten(by),
            Self::Refused { reply, .. } => reply.shorten(by),
        }
    }
}

impl Outcome for PollReply {
    fn shorten(&mut self, by: Duration) {
        match self {
            Self::Granted(grant) => grant.shorten(by),
            Self::Queued { holder_ttl, .. } => holder_ttl.shorten(by),
            Self::Gone => {}
        }
    }
}

impl Outcome for ReleaseReply {
    fn shorten(&mut self, by: Duration) {
        match self {
            Self::Passed(grant) => grant.shorten(by),
            Self::Queued { holder_ttl, .. } => holder_ttl.shorten(by),
            Self::Released | Self::NotHeld => {}
        }
    }
}

impl Outcome for ConvertReply {
    fn shorten(&mut self, by: Duration) {
        match self {
            Self::Converted(grant) => grant.shorten(by),
            Self::NotHeld => {}
        }
    }
}

impl Outcome for RenewReply {
    fn shorten(&mut self, by: Duration) {
        match self {
            Self::Renewed { ttl } => ttl.shorten(by),
            Self::Gone => {}
        }
    }
}

impl Outcome for Inspection {
    fn shorten(&mut self, by: Duration) {
        for holder in &mut self.holders {
            holder.ttl.shorten(by);
        }
    }
}
