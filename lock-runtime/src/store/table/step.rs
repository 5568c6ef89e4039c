//! A step of a table, and the fencing tokens that it issues.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::{SystemTime, UNIX_EPOCH},
};

use crate::{
    guard::fence::FencingToken,
    request::spec::Mode,
    shell::time::Instant,
    store::{MAX_PROPOSAL_SKEW, RaiseReply, StoreEvent, Token},
};

/// The latest fencing token of all keys.
#[derive(Debug)]
pub(crate) struct Fences {
    pub(super) latest: AtomicU64,
    /// The time of creation, by the clock of the steps and in microseconds since 1970.
    pub(super) epoch: (Instant, u64),
}

impl Default for Fences {
    fn default() -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let micros = since.map_or(0, |since| since.as_micros() as u64);
        Self {
            latest: AtomicU64::new(0),
            epoch: (Instant::now(), micros),
        }
    }
}

impl Fences {
    /// The number from which on nothing is granted. No step issues as many tokens as are left.
    const END: u64 = FencingToken::LAST.number() - (1 << 48);

    /// Returns whether the tokens are used up: the next grants might get the same number.
    fn is_exhausted(&self, now: Instant) -> bool {
        let latest = self.latest.load(Ordering::Relaxed);
        latest.max(self.micros(now)) >= Self::END
    }

    /// The time in microseconds since 1970.
    pub(super) fn micros(&self, now: Instant) -> u64 {
        let (began, micros) = self.epoch;
        micros.saturating_add(now.saturating_duration_since(began).as_micros() as u64)
    }

    /// Creates the counter of a store whose clock showed `micros` microseconds since 1970 at
    /// `began`.
    #[cfg(feature = "records")]
    pub(crate) fn since(began: Instant, micros: u64) -> Self {
        Self {
            latest: AtomicU64::new(0),
            epoch: (began, micros),
        }
    }

    /// Returns the next token at the time of `step`, and reserves this number of tokens after it.
    pub(super) fn next(&self, reserved: u32, step: &Step<'_>) -> FencingToken {
        let micros = self.micros(step.now);
        let farthest = micros.saturating_add(MAX_PROPOSAL_SKEW.as_micros() as u64);
        let proposed = step.proposal.map(|fence| fence.number().min(farthest));
        let micros = proposed.unwrap_or(micros);
        // A step begins before the end.
        let next = |latest| FencingToken::next(FencingToken::new(latest), micros);
        let next = |latest| next(latest).unwrap_or(FencingToken::LAST);
        let last = |latest| Some(next(latest).later(reserved).number());
        let relaxed = Ordering::Relaxed;
        let (Ok(latest) | Err(latest)) = self.latest.fetch_update(relaxed, relaxed, last);
        next(latest)
    }

    /// Makes the next token larger than `fence`.
    pub(crate) fn raise(&self, fence: FencingToken) -> RaiseReply {
        let latest = FencingToken::new(self.latest.fetch_max(fence.number(), Ordering::Relaxed));
        match latest.filter(|latest| *latest >= fence) {
            Some(latest) => RaiseReply::NotRaised { latest },
            None => RaiseReply::Raised,
        }
    }

    pub(crate) fn latest(&self) -> Option<FencingToken> {
        FencingToken::new(self.latest.load(Ordering::Relaxed))
    }
}

/// One step: its time, and the events that it causes.
pub(crate) struct Step<'a> {
    /// The time, by which leases end.
    pub(crate) now: Instant,
    /// The same or a later time, at which leases begin. It is later if the clock of the step is
    /// known less precisely, and the remaining leases in its reply are shortened for that.
    pub(crate) begins: Instant,
    /// The same or a later time, at which reservations and the silence of waiters begin, as they
    /// must not end early. It is later if the clock of the step is known within bounds.
    pub(in crate::store) latest: Instant,
    pub(super) fences: &'a Fences,
    /// The fencing token that a grant should have, if possible.
    pub(super) proposal: Option<FencingToken>,
    /// The caller. The reply contains its grant, so it needs no event.
    pub(in crate::store) caller: Option<Token>,
    /// The mode in which the caller requests or polls.
    pub(super) asks: Option<Mode>,
    /// To be sent when no mutex is locked any more.
    pub(crate) events: Vec<StoreEvent>,
    /// A holder was released, or was granted a lease that ends before the next waiter polls. The
    /// next waiter is to be notified of the time at which the lock may be free.
    pub(super) frees: bool,
    /// The step grants no lock: requests are refused or queued, and waiters stay in the queue.
    pub(in crate::store) grants_nothing: bool,
    /// No fencing token is left, so it grants none and refuses requests.
    pub(super) is_exhausted: bool,
    /// Switches rule 15 off: this step grants nothing from the wait queue.
    #[cfg(test)]
    pub(crate) lets_nobody_in: bool,
}

impl<'a> Step<'a> {
    pub(crate) fn new(now: Instant, fences: &'a Fences, caller: Option<Token>) -> Self {
        let is_exhausted = fences.is_exhausted(now);
        Self {
            now,
            begins: now,
            latest: now,
            fences,
            proposal: None,
            caller,
            asks: None,
            events: Vec::new(),
            frees: false,
            grants_nothing: is_exhausted,
            is_exhausted,
            #[cfg(test)]
            lets_nobody_in: false,
        }
    }
}

impl Step<'_> {
    /// Returns whether a transaction of the user keeps locks from being granted.
    pub(super) fn is_guarded(&self) -> bool {
        self.grants_nothing && !self.is_exhausted
    }
}

#[cfg(feature = "records")]
impl Step<'_> {
    /// Returns the latest fencing token.
    pub(in crate::store) fn latest_fence(&self) -> Option<FencingToken> {
        self.fences.latest()
    }
}
