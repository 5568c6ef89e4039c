//! The options of a lock: plain data, shared by the macro, the layer and configuration.
//!
//! A [`LockSpec`] holds only the options that were set. The unset ones are filled from the
//! client's defaults when the lock is acquired, and the result is validated as a whole into
//! [`Terms`].

use std::{num::NonZeroU32, time::Duration};

use crate::{
    error::{LockError, LockErrorKind},
    gate::Wish,
};

/// The shortest lease.
pub const MIN_LEASE: Duration = Duration::from_millis(100);
/// The longest lease.
pub const MAX_LEASE: Duration = Duration::from_secs(24 * 60 * 60);
/// The longest `max_hold`, so that its end can be represented as an `Instant`.
const LONGEST_HOLD: Duration = Duration::from_secs(365 * 24 * 60 * 60);
/// The default lease: long enough to survive a slow network, short enough to end soon after a
/// crash.
pub const DEFAULT_LEASE: Duration = Duration::from_secs(30);
/// The default time for which a request waits.
pub const DEFAULT_WAIT: Duration = Duration::from_secs(10);

/// How a lock is shared among its holders.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Mode {
    /// One holder. The writer of a read/write lock is the same.
    #[default]
    Exclusive,
    /// Many readers, no writer.
    Shared,
    /// At most this many holders. Permits are independent of locks: `permits` and `exclusive` of
    /// the same name do not exclude each other.
    Permits(NonZeroU32),
}

impl Mode {
    /// Returns the kind of locks that the mode belongs to.
    pub fn kind(self) -> LockKind {
        match self {
            Self::Exclusive | Self::Shared => LockKind::Lock,
            Self::Permits(_) => LockKind::Permits,
        }
    }
}

/// The two independent kinds of locks that share a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum LockKind {
    /// Exclusive and shared locks, which exclude each other.
    Lock,
    /// Permits.
    Permits,
}

/// How long a request waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Wait {
    /// Does not wait: fails with `Contended` if the lock is not free.
    No,
    /// Waits for at most this long, then fails with `WaitTimeout`.
    AtMost(Duration),
}

/// The options of a lock. Unset options come from the client's defaults.
///
/// The setters are `const`, so that a spec can be a constant. They do not validate: an invalid
/// spec, such as one with a lease under 100 ms, fails with `InvalidSpec` when the lock is
/// acquired or when [`check`](Self::check) is called.
///
/// ```
/// use std::time::Duration;
/// use lock_runtime::LockSpec;
/// const CHECKOUT: LockSpec = LockSpec::exclusive()
///     .lease(Duration::from_secs(10))
///     .wait(Duration::from_secs(2));
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

    /// Creates a spec for an exclusive lock: one holder.
    pub const fn exclusive() -> Self {
        Self::new(Mode::Exclusive)
    }

    /// Creates a spec for a shared lock: many readers, no writer.
    pub const fn shared() -> Self {
        Self::new(Mode::Shared)
    }

    /// Creates a spec for one of `permits` permits: at most `permits` holders.
    pub const fn permits(permits: NonZeroU32) -> Self {
        Self::new(Mode::Permits(permits))
    }

    /// Sets how long the store keeps the lock without a renewal, 100 ms to 24 h; 30 s by default.
    ///
    /// The lease determines *how fast a crash is noticed, not how long the lock may be held*: a
    /// live holder renews it every third of its length. A short lease frees a dead holder's lock
    /// sooner, and is lost sooner when the store is unreachable.
    #[must_use]
    pub const fn lease(mut self, lease: Duration) -> Self {
        self.lease = Some(lease);
        self
    }

    /// Sets how long to wait for the lock; 10 s by default.
    #[must_use]
    pub const fn wait(mut self, wait: Duration) -> Self {
        self.wait = Some(Wait::AtMost(wait));
        self
    }

    /// Limits the wait to `limit`. A shorter wait is left unchanged.
    ///
    /// ```
    /// use std::time::Duration;
    /// use lock_runtime::LockSpec;
    /// let (one, two) = (Duration::from_secs(1), Duration::from_secs(2));
    /// let spec = LockSpec::exclusive;
    /// assert_eq!(spec().wait(two).wait_at_most(one), spec().wait(one));
    /// assert_eq!(spec().wait(one).wait_at_most(two), spec().wait(one));
    /// assert_eq!(spec().no_wait().wait_at_most(one), spec().no_wait());
    /// ```
    #[must_use]
    pub fn wait_at_most(self, limit: Duration) -> Self {
        match self.wait.unwrap_or(Wait::AtMost(DEFAULT_WAIT)) {
            Wait::AtMost(wait) if limit < wait => self.wait(limit),
            _ => self,
        }
    }

    /// Disables waiting: the request fails with `Contended` if the lock is not free.
    #[must_use]
    pub const fn no_wait(mut self) -> Self {
        self.wait = Some(Wait::No);
        self
    }

    /// Disables renewal: the lock ends with its lease, regardless of its holder (Redisson's
    /// `leaseTime`).
    #[must_use]
    pub const fn no_renew(mut self) -> Self {
        self.renew = Some(false);
        self
    }

    /// Enables renewal if the client's defaults disable it.
    #[must_use]
    pub const fn renew(mut self) -> Self {
        self.renew = Some(true);
        self
    }

    /// Makes the lock re-entrant: code within a scope that holds the lock can enter it again,
    /// without a round trip.
    #[must_use]
    pub const fn reentrant(mut self) -> Self {
        self.reentrant = Some(true);
        self
    }

    /// Disables re-entry if the client's defaults enable it: within a scope that holds the lock,
    /// the request fails with `WouldDeadlock`.
    #[must_use]
    pub const fn no_reentrant(mut self) -> Self {
        self.reentrant = Some(false);
        self
    }

    /// Keeps the lock for at least `min_hold` after the grant, even if it is released earlier;
    /// 24 h at most.
    ///
    /// This is for jobs that are triggered on every replica: a replica whose clock is late must
    /// still find the lock held (ShedLock's `lockAtLeastFor`).
    #[must_use]
    pub const fn min_hold(mut self, min_hold: Duration) -> Self {
        self.min_hold = Some(min_hold);
        self
    }

    /// Gives other processes a turn between any two holders of this process.
    ///
    /// Without strict order, a released lock is handed off to a waiter in the same process
    /// without a call to the store, 32 times or for 50 ms in a row. Only then does it go to the
    /// next process in the queue. This is many times faster if one process has many waiters. With
    /// strict order, every release goes through the store, and processes take strict turns.
    #[must_use]
    pub const fn strict_order(mut self) -> Self {
        self.strict_order = Some(true);
        self
    }

    /// Allows local hand-offs if the client's defaults require strict order.
    #[must_use]
    pub const fn no_strict_order(mut self) -> Self {
        self.strict_order = Some(false);
        self
    }

    /// Ends renewal `max_hold` after the grant. The lock is then lost with `MaxHold`, so that a
    /// holder that hangs does not hold it forever (ShedLock's `lockAtMostFor`).
    #[must_use]
    pub const fn max_hold(mut self, max_hold: Duration) -> Self {
        self.max_hold = Some(max_hold);
        self
    }

    /// Limits the requests that wait for the key in this process behind the head of the queue.
    /// Further requests fail with `Overloaded` at once.
    ///
    /// For each request, the smaller of this limit and the client's limit
    /// ([`LockClientBuilder::max_waiters`](crate::LockClientBuilder::max_waiters)) applies. A
    /// request that does not wait does not enter the queue, so this limit never refuses it.
    #[must_use]
    pub const fn max_waiters(mut self, max_waiters: usize) -> Self {
        self.max_waiters = Some(max_waiters);
        self
    }

    /// Fills unset options from `other`. The mode of `other` is ignored.
    ///
    /// ```
    /// use std::time::Duration;
    /// use lock_runtime::LockSpec;
    /// let ours = LockSpec::shared().wait(Duration::from_secs(2));
    /// let theirs = LockSpec::shared().no_renew();
    /// let filled = LockSpec::exclusive().no_wait().reentrant().or(&ours).or(&theirs);
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

    /// Returns the mode.
    pub const fn mode(&self) -> Mode {
        self.mode
    }

    /// Validates the spec without acquiring a lock, for example after reading it from a file.
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
    /// `InvalidSpec` if the spec is invalid with any defaults. A spec that passes may still
    /// conflict with the defaults of a client: a `min_hold` that is longer than the default
    /// `max_hold` is reported when the lock is acquired.
    pub fn check(&self) -> Result<(), LockError> {
        self.terms(&Self::new(self.mode)).map(drop)
    }

    pub(crate) fn with_mode(self, mode: Mode) -> Self {
        Self { mode, ..self }
    }

    /// Fills unset options from `defaults`, whose mode is ignored, and validates the result.
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

/// A complete and valid spec.
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
    /// Applies in addition to the client's own limit.
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

    /// Returns the requirements of a request in the wait queue. Only a writer that renews accepts
    /// a local hand-off (PROTOCOL 20).
    pub(crate) fn wish(&self) -> Wish {
        let passing = self.mode == Mode::Exclusive && self.renew && !self.strict_order;
        Wish {
            mode: self.mode,
            lease: self.lease,
            passing,
        }
    }

    /// Returns the time-out of a call to the store: min(lease/6, 500 ms), so that three
    /// attempts fit between two renewals.
    pub(crate) fn call_timeout(&self) -> Duration {
        call_timeout(self.lease)
    }
}

/// Returns the time-out of a call to the store for a lease of this length.
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
        assert!(patient.check().is_ok(), "valid with other defaults");
        assert!(
            patient.terms(&defaults.max_hold(seconds(1))).is_err(),
            "invalid with these defaults"
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
