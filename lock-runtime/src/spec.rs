//! What is asked of a lock: plain data, shared by the macro, the layer and configuration.
//!
//! A [`LockSpec`] holds only what was said; what was left open is filled from the client's defaults when the lock is
//! acquired, and then checked as a whole into [`Terms`].

use std::{num::NonZeroU32, time::Duration};

use crate::{
    error::{LockError, LockErrorKind},
    gate::Wish,
};

/// The shortest lease.
pub const MIN_LEASE: Duration = Duration::from_millis(100);
/// The longest lease.
pub const MAX_LEASE: Duration = Duration::from_secs(24 * 60 * 60);
/// An `Instant` has an end.
const LONGEST_HOLD: Duration = Duration::from_secs(365 * 24 * 60 * 60);
/// The lease where none is given: long enough that a slow minute of the network is no loss, short enough that a crash is over soon.
pub const DEFAULT_LEASE: Duration = Duration::from_secs(30);
/// How long a request waits where nothing else is said.
pub const DEFAULT_WAIT: Duration = Duration::from_secs(10);

/// Who may hold a key together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Mode {
    /// One holder. The writer of a read/write lock is the same.
    #[default]
    Exclusive,
    /// Many readers, no writer.
    Shared,
    /// At most so many holders. Permits are an object of their own: `permits` and `exclusive` of one name do not exclude each other.
    Permits(NonZeroU32),
}

impl Mode {
    /// Which of the two objects of a name this mode locks.
    pub fn family(self) -> Family {
        match self {
            Self::Exclusive | Self::Shared => Family::Lock,
            Self::Permits(_) => Family::Permits,
        }
    }
}

/// The two objects that one name stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Family {
    /// Exclusive and shared locks, which exclude each other.
    Lock,
    /// Permits.
    Permits,
}

/// How long a request is ready to wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Wait {
    /// Not at all: a lock that is not free is `Contended`.
    No,
    /// At most so long, then `WaitTimeout`.
    AtMost(Duration),
}

/// What is asked of a lock; every part that is not said comes from the client's defaults.
///
/// All setters are `const`, so that a spec can be a constant. They check nothing: a spec that cannot be meant (a lease under
/// 100 ms, say) is `InvalidSpec` when the lock is acquired, or when [`check`](Self::check) is asked.
///
/// ```
/// use std::time::Duration;
/// use lock_runtime::LockSpec;
/// const CHECKOUT: LockSpec = LockSpec::exclusive().lease(Duration::from_secs(10)).wait(Duration::from_secs(2));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct LockSpec {
    mode: Mode,
    lease: Option<Duration>,
    wait: Option<Wait>,
    renew: Option<bool>,
    strict_order: Option<bool>,
    reentrant: Option<bool>,
    min_hold: Option<Duration>,
    max_hold: Option<Duration>,
    max_waiters: Option<usize>,
}

impl LockSpec {
    const fn new(mode: Mode) -> Self {
        Self {
            mode,
            lease: None,
            wait: None,
            renew: None,
            strict_order: None,
            reentrant: None,
            min_hold: None,
            max_hold: None,
            max_waiters: None,
        }
    }

    /// One holder.
    pub const fn exclusive() -> Self {
        Self::new(Mode::Exclusive)
    }

    /// Many readers, no writer.
    pub const fn shared() -> Self {
        Self::new(Mode::Shared)
    }

    /// At most `permits` holders.
    pub const fn permits(permits: NonZeroU32) -> Self {
        Self::new(Mode::Permits(permits))
    }

    /// How long the store keeps the lock without a renewal, 100 ms to 24 h; 30 s by default.
    ///
    /// It is *how fast a crash is noticed, not how long you may hold*: a living holder renews every third of it. A short
    /// lease frees a dead holder's lock sooner and is lost sooner when the store is out of reach.
    #[must_use]
    pub const fn lease(mut self, lease: Duration) -> Self {
        self.lease = Some(lease);
        self
    }

    /// How long to wait for the lock; 10 s by default.
    #[must_use]
    pub const fn wait(mut self, wait: Duration) -> Self {
        self.wait = Some(Wait::AtMost(wait));
        self
    }

    /// Waits no longer than `limit`, and no longer than it would anyway.
    ///
    /// ```
    /// use std::time::Duration;
    /// use lock_runtime::LockSpec;
    /// let (one, two) = (Duration::from_secs(1), Duration::from_secs(2));
    /// assert_eq!(LockSpec::exclusive().wait(two).wait_at_most(one), LockSpec::exclusive().wait(one));
    /// assert_eq!(LockSpec::exclusive().wait(one).wait_at_most(two), LockSpec::exclusive().wait(one));
    /// assert_eq!(LockSpec::exclusive().no_wait().wait_at_most(one), LockSpec::exclusive().no_wait());
    /// ```
    #[must_use]
    pub fn wait_at_most(self, limit: Duration) -> Self {
        match self.wait.unwrap_or(Wait::AtMost(DEFAULT_WAIT)) {
            Wait::AtMost(wait) if limit < wait => self.wait(limit),
            _ => self,
        }
    }

    /// Does not wait: a lock that is not free is `Contended`.
    #[must_use]
    pub const fn no_wait(mut self) -> Self {
        self.wait = Some(Wait::No);
        self
    }

    /// Does not renew: the lock ends with its lease, whatever its holder does. (Redisson's `leaseTime`.)
    #[must_use]
    pub const fn no_renew(mut self) -> Self {
        self.renew = Some(false);
        self
    }

    /// Renews, where the client's defaults say otherwise.
    #[must_use]
    pub const fn renew(mut self) -> Self {
        self.renew = Some(true);
        self
    }

    /// Lets a flow of work that holds the lock in an enclosing scope enter it again, without a round trip.
    #[must_use]
    pub const fn reentrant(mut self) -> Self {
        self.reentrant = Some(true);
        self
    }

    /// Is not re-entrant, where the client's defaults say otherwise: within a scope that holds the lock it is `WouldDeadlock`.
    #[must_use]
    pub const fn no_reentrant(mut self) -> Self {
        self.reentrant = Some(false);
        self
    }

    /// Keeps the lock at least so long after it was granted, also when it is released earlier; 24 h at most.
    ///
    /// For jobs that fire on every replica: a replica whose clock is late must find the lock still held. (ShedLock's
    /// `lockAtLeastFor`.)
    #[must_use]
    pub const fn min_hold(mut self, min_hold: Duration) -> Self {
        self.min_hold = Some(min_hold);
        self
    }

    /// Lets other processes in between any two holders of this one.
    ///
    /// Without it a lock is passed on to whoever waits for it in the same process with no word to the store, 32 times or for
    /// 50 ms in a row, and only then goes to the next process in line: that is many times faster where one process has
    /// many waiters. With it every release goes through the store, and processes take strict turns.
    #[must_use]
    pub const fn strict_order(mut self) -> Self {
        self.strict_order = Some(true);
        self
    }

    /// Passes the lock on in this process, where the client's defaults say otherwise.
    #[must_use]
    pub const fn no_strict_order(mut self) -> Self {
        self.strict_order = Some(false);
        self
    }

    /// Ends renewal so long after the grant: the lock is then lost as `MaxHold`, so that a hung holder does not hold for ever.
    /// (ShedLock's `lockAtMostFor`.)
    #[must_use]
    pub const fn max_hold(mut self, max_hold: Duration) -> Self {
        self.max_hold = Some(max_hold);
        self
    }

    /// How many requests may wait for the key in this process, behind the one whose turn is next; more are `Overloaded` at once.
    /// The smaller of this and the client's own limit ([`LockClientBuilder::max_waiters`](crate::LockClientBuilder::max_waiters))
    /// holds, for each request by itself.
    ///
    /// A request that does not wait stands in no line, and is not refused for it.
    #[must_use]
    pub const fn max_waiters(mut self, max_waiters: usize) -> Self {
        self.max_waiters = Some(max_waiters);
        self
    }

    /// Fills what this spec leaves open from `other`, whose mode says nothing.
    ///
    /// ```
    /// use std::time::Duration;
    /// use lock_runtime::LockSpec;
    /// let ours = LockSpec::shared().wait(Duration::from_secs(2));
    /// let filled = LockSpec::exclusive().no_wait().reentrant().or(&ours).or(&LockSpec::shared().no_renew());
    /// assert_eq!(filled, LockSpec::exclusive().no_wait().reentrant().no_renew());
    /// ```
    #[must_use]
    pub fn or(self, other: &LockSpec) -> Self {
        Self {
            mode: self.mode,
            lease: self.lease.or(other.lease),
            wait: self.wait.or(other.wait),
            renew: self.renew.or(other.renew),
            strict_order: self.strict_order.or(other.strict_order),
            reentrant: self.reentrant.or(other.reentrant),
            min_hold: self.min_hold.or(other.min_hold),
            max_hold: self.max_hold.or(other.max_hold),
            max_waiters: self.max_waiters.or(other.max_waiters),
        }
    }

    /// The mode.
    pub const fn mode(&self) -> Mode {
        self.mode
    }

    /// Finds out before any lock is asked for whether this can be meant; for specs that are read from a file, say.
    ///
    /// ```
    /// use std::time::Duration;
    /// use lock_runtime::{LockErrorKind, LockSpec};
    /// let error = LockSpec::exclusive().lease(Duration::from_millis(5)).check().unwrap_err();
    /// assert_eq!(error.kind(), LockErrorKind::InvalidSpec);
    /// assert!(LockSpec::exclusive().check().is_ok());
    /// ```
    ///
    /// # Errors
    /// `InvalidSpec` for what cannot be meant whatever a client's defaults are. A spec that passes may still contradict them: a
    /// `min_hold` that is longer than the default `max_hold` shows when the lock is acquired.
    pub fn check(&self) -> Result<(), LockError> {
        self.terms(&Self::new(self.mode)).map(drop)
    }

    pub(crate) fn with_mode(self, mode: Mode) -> Self {
        Self { mode, ..self }
    }

    /// Fills what is open from `defaults` (whose mode says nothing) and checks the whole.
    pub(crate) fn terms(&self, defaults: &LockSpec) -> Result<Terms, LockError> {
        let filled = self.clone().or(defaults);
        let terms = Terms {
            mode: filled.mode,
            lease: filled.lease.unwrap_or(DEFAULT_LEASE),
            wait: filled.wait.unwrap_or(Wait::AtMost(DEFAULT_WAIT)),
            renew: filled.renew.unwrap_or(true),
            strict_order: filled.strict_order.unwrap_or(false),
            reentrant: filled.reentrant.unwrap_or(false),
            min_hold: filled.min_hold,
            max_hold: filled.max_hold,
            max_waiters: filled.max_waiters.unwrap_or(usize::MAX),
        };
        match terms.complaint() {
            None => Ok(terms),
            Some(complaint) => Err(LockError::new(LockErrorKind::InvalidSpec, complaint)),
        }
    }
}

/// A spec with nothing left open, checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Terms {
    pub(crate) mode: Mode,
    pub(crate) lease: Duration,
    pub(crate) wait: Wait,
    pub(crate) renew: bool,
    pub(crate) strict_order: bool,
    pub(crate) reentrant: bool,
    pub(crate) min_hold: Option<Duration>,
    pub(crate) max_hold: Option<Duration>,
    /// Beside the client's own limit.
    pub(crate) max_waiters: usize,
}

impl Terms {
    fn complaint(&self) -> Option<String> {
        let Self {
            lease,
            wait,
            min_hold,
            max_hold,
            ..
        } = *self;
        if !(MIN_LEASE..=MAX_LEASE).contains(&lease) {
            return Some(format!(
                "a lease of {lease:?} is out of range; give 100 ms to 24 h"
            ));
        }
        if let Wait::AtMost(wait) = wait
            && wait > MAX_LEASE
        {
            return Some(format!("a wait of {wait:?} is too long; give at most 24 h"));
        }
        if let Some(min_hold) = min_hold
            && min_hold > MAX_LEASE
        {
            return Some(format!(
                "a min_hold of {min_hold:?} is too long; give at most 24 h"
            ));
        }
        match (min_hold, max_hold) {
            (_, Some(max_hold)) if max_hold > LONGEST_HOLD => Some(format!(
                "a max_hold of {max_hold:?} is too long; give at most 365 days, or leave it out for no limit"
            )),
            (_, Some(max_hold)) if max_hold.is_zero() => {
                Some("a max_hold of zero holds nothing; leave it out for no limit".into())
            }
            (Some(min_hold), Some(max_hold)) if min_hold > max_hold => Some(format!(
                "a min_hold of {min_hold:?} is longer than the max_hold of {max_hold:?}; swap them"
            )),
            _ => None,
        }
    }

    /// What a request with these terms wants of the line it stands in. Only a writer that renews may be passed a lock (PROTOCOL 20).
    pub(crate) fn wish(&self) -> Wish {
        let passing = self.mode == Mode::Exclusive && self.renew && !self.strict_order;
        Wish {
            mode: self.mode,
            lease: self.lease,
            passing,
        }
    }

    /// How long one call to the store may take: min(lease/6, 500 ms), so that three tries fit between two renewals.
    pub(crate) fn call_timeout(&self) -> Duration {
        call_timeout(self.lease)
    }
}

/// How long one call to the store may take for a lease of this length.
pub(crate) fn call_timeout(lease: Duration) -> Duration {
    (lease / 6).min(Duration::from_millis(500))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spec_that_cannot_be_meant_is_refused() {
        let defaults = LockSpec::exclusive();
        let seconds = Duration::from_secs;
        for (spec, word) in [
            (
                LockSpec::exclusive().lease(Duration::from_millis(99)),
                "lease",
            ),
            (
                LockSpec::exclusive().lease(MAX_LEASE + Duration::from_millis(1)),
                "lease",
            ),
            (LockSpec::exclusive().wait(seconds(90_000)), "wait"),
            (LockSpec::exclusive().min_hold(seconds(90_000)), "min_hold"),
            (LockSpec::exclusive().max_hold(Duration::ZERO), "max_hold"),
            (LockSpec::exclusive().max_hold(Duration::MAX), "max_hold"),
            (LockSpec::exclusive().lease(Duration::MAX), "lease"),
            (LockSpec::exclusive().wait(Duration::MAX), "wait"),
            (LockSpec::exclusive().min_hold(Duration::MAX), "min_hold"),
            (
                LockSpec::exclusive()
                    .min_hold(seconds(2))
                    .max_hold(seconds(1)),
                "max_hold",
            ),
        ] {
            for error in [
                spec.terms(&defaults).unwrap_err(),
                spec.check().unwrap_err(),
            ] {
                assert_eq!(error.kind(), LockErrorKind::InvalidSpec);
                assert!(error.to_string().contains(word), "{error}");
            }
        }
        assert!(
            LockSpec::exclusive()
                .lease(MIN_LEASE)
                .terms(&defaults)
                .is_ok()
        );
        assert!(
            LockSpec::exclusive()
                .lease(MAX_LEASE)
                .terms(&defaults)
                .is_ok()
        );
        let patient = LockSpec::shared().min_hold(seconds(2));
        assert!(patient.check().is_ok(), "it may be meant");
        assert!(
            patient.terms(&defaults.max_hold(seconds(1))).is_err(),
            "but not with these defaults"
        );
    }

    #[test]
    fn what_is_left_open_comes_from_the_defaults() {
        let defaults = LockSpec::shared()
            .lease(Duration::from_secs(5))
            .no_wait()
            .reentrant();
        let terms = LockSpec::exclusive()
            .wait(Duration::from_secs(1))
            .terms(&defaults)
            .unwrap();
        assert_eq!(terms.mode, Mode::Exclusive);
        assert_eq!(terms.lease, Duration::from_secs(5));
        assert_eq!(terms.wait, Wait::AtMost(Duration::from_secs(1)));
        assert!(terms.reentrant && terms.renew);
    }

    #[test]
    fn what_the_defaults_switch_on_can_be_switched_off() {
        let defaults = LockSpec::exclusive()
            .reentrant()
            .strict_order()
            .max_waiters(7);
        let terms = |spec: LockSpec| spec.terms(&defaults).unwrap();
        let open = terms(LockSpec::exclusive());
        assert_eq!(
            (open.reentrant, open.strict_order, open.max_waiters),
            (true, true, 7)
        );
        let off = terms(
            LockSpec::exclusive()
                .no_reentrant()
                .no_strict_order()
                .max_waiters(9),
        );
        assert_eq!(
            (off.reentrant, off.strict_order, off.max_waiters),
            (false, false, 9)
        );
        assert_eq!(
            LockSpec::exclusive()
                .terms(&LockSpec::exclusive())
                .unwrap()
                .max_waiters,
            usize::MAX
        );
    }
}
