//! The time-outs of calls to the servers.

use std::time::Duration;

use super::super::{MajorityCx, MajorityMutation, MajoritySession};
use crate::request::spec::call_timeout;

/// The time in which a majority must reply: 90 % of the caller's time-out, so that the caller gets
/// an error that names the servers that did not reply.
pub(in crate::protocol::majority) fn majority_timeout(lease: Duration) -> Duration {
    call_timeout(lease) * 9 / 10
}

impl MajoritySession {
    /// The time in which one server must reply to an acquire: min(lease/20, 200 ms). It is longer
    /// if all servers are slow; otherwise no request would ever get its replies.
    pub(in crate::protocol::majority) fn server_timeout(
        &self,
        lease: Duration,
        cx: &MajorityCx<'_>,
    ) -> Duration {
        let shortest = (lease / 20).min(Duration::from_millis(200));
        if cx.breaks(MajorityMutation::FixedTimeOuts) {
            return shortest;
        }
        (self.round_trip * 10).clamp(shortest, call_timeout(lease) * 2 / 3)
    }

    /// Records the time in which a majority has replied, or in which it did not.
    pub(in crate::protocol::majority) fn measured(&mut self, took: Duration) {
        self.round_trip = (self.round_trip * 7 + took) / 8;
    }
}
