//! The requests that a store supports, as far as a sequence depends on them.

use std::time::Duration;

use lock_runtime::{
    Mode,
    store::{AcquireReply, KeyRequest, Limits},
    time::Instant,
};

use crate::subject::{Subject, fresh_hold, skipped};

/// Leases are one to four times as long, so that they do not end by themselves.
const LONGEST_UNIT: Duration = Duration::from_secs(3600);
/// A sequence is over in much less than half of this time.
const SHORTEST_UNIT: Duration = Duration::from_secs(120);
/// A shorter lease would end while its step is executed, a longer one would delay the test.
const SHORT: [Duration; 2] = [Duration::from_millis(100), Duration::from_millis(300)];

/// The shape of the sequences.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    /// All leases are multiples of this time.
    pub(super) unit: Duration,
    /// Except for those that end before the next step, if there are any.
    pub(super) short: Option<Duration>,
    pub(super) permits: bool,
    /// Whether the sequences contain results. A quorum has none.
    pub(super) results: bool,
    pub(super) keys_at_once: usize,
    /// Whether the store has wait queues.
    pub(super) queues: bool,
    /// Whether the store replies `Late`.
    pub(super) has_clock: bool,
    /// Whether a request for several keys may have the token of an earlier request. No client makes
    /// such a request, and if it is refused, a store may release the keys that the token holds.
    pub(super) reuses_tokens: bool,
}

impl Shape {
    pub(super) async fn of(subject: &Subject, reuses_tokens: bool) -> Self {
        let limits = &subject.limits;
        Self {
            unit: unit(limits),
            short: short(limits),
            permits: limits.permits,
            results: limits.results,
            keys_at_once: limits.keys_at_once.map_or(usize::MAX, usize::from),
            queues: subject.queues().await,
            has_clock: has_clock(subject).await,
            reuses_tokens,
        }
    }
}

fn unit(limits: &Limits) -> Duration {
    let unit = LONGEST_UNIT.min(limits.longest_lease / 4);
    assert!(
        unit >= SHORTEST_UNIT.max(limits.shortest_lease),
        "the model test needs leases of {SHORTEST_UNIT:?} to 4 times as long, and the limits are {limits:?}"
    );
    unit
}

fn short(limits: &Limits) -> Option<Duration> {
    let [shortest, longest] = SHORT;
    let short = limits.shortest_lease.max(shortest);
    if short > longest {
        skipped(
            "leases that end within a sequence",
            "shortest_lease is too long",
        );
    }
    Some(short).filter(|short| *short <= longest)
}

/// A store without a clock can execute a request after its deadline, if it was not abandoned.
async fn has_clock(subject: &Subject) -> bool {
    let hold = fresh_hold(Mode::Exclusive);
    let past = Instant::now() - Duration::from_secs(5);
    let request = KeyRequest::new(hold.clone(), subject.lease(), past);
    let reply = subject.reply_to(&request).await;
    subject.abandon(&hold).await;
    match reply {
        AcquireReply::Late => true,
        AcquireReply::Granted(_) => {
            skipped(
                "late requests",
                "the store does not compare deadlines with a clock",
            );
            false
        }
        reply => panic!("a late request was answered {reply:?}"),
    }
}
