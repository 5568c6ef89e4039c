//! The options of a lock: plain data, shared by the macro, the layer and configuration.
//!
//! A [`LockSpec`] holds only the options that were set. The unset ones are filled from the
//! client's defaults when the lock is acquired, and the result is validated as a whole into
//! [`Terms`].

#[cfg(feature = "serde")]
mod fields;

use std::{num::NonZeroU32, time::Duration};

use crate::{
    error::{LockError, LockErrorKind},
    observe::text::{self, Short},
};

/// The longest `max_hold`, so that its end can be represented as an `Instant`.
const LONGEST_HOLD: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// How a lock is shared among its holders.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Mode {
    /// One holder, such as the writer of a read/write lock.
    #[default]
    Exclusive,
    /// Many holders, the readers of a read/write lock.
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

    /// Returns the name: `exclusive`, `shared` or `permits`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Exclusive => "exclusive",
            Self::Shared => "shared",
            Self::Permits(_) => "permits",
        }
    }
}

/// The two independent kinds of locks that share a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "lowercase")
)]
#[non_exhaustive]
pub enum LockKind {
    /// Exclusive and shared locks, which exclude each other.
    Lock,
    /// Permits.
    Permits,
}

/// The treatment of a body that runs under a lock, when the lock is lost.
///
/// It applies to [`LockRequest::run`](crate::LockRequest::run), the methods `run` and
/// [`while_held`](crate::LockGuard::while_held) of a guard, the attribute, and the layers of
/// lock-tower. The owner of a guard watches [`lost`](crate::HeldLock::lost) instead.
///
/// A loss cannot stop a body that does not reach an await point. If it has ended by then, its work
/// may overlap with that of the next holder. With `Cancel` and `Error` its output is therefore no
/// success: the result is `Lost`, and the message says that the body has ended. An error that the
/// body itself returns is kept by the attribute and by the layers. With each setting a warning
/// names the request, the key, the fencing token, the loss, and the time between the loss and the
/// end of the body.
///
/// The loss counts if the local clock shows it when the body ends, or if the store replies to the
/// release that the lock was no longer held. A release without a reply is no loss. A body does not
/// begin after the loss.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "lowercase")
)]
#[non_exhaustive]
pub enum OnLost {
    /// Drops the body at its current await point; the result is `Lost`.
    #[default]
    Cancel,
    /// Runs the body to its end; the result is `Lost`. For work that must not be interrupted, and
    /// whose caller has to know.
    Error,
    /// Runs the body to its end, and returns its output. For work that is worse half-done than done
    /// twice, and whose writes carry the fencing token.
    Ignore,
}

impl OnLost {
    /// Returns the name: `cancel`, `error` or `ignore`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Cancel => "cancel",
            Self::Error => "error",
            Self::Ignore => "ignore",
        }
    }

    /// Returns the error in place of the output of a body that has ended, if `error` is the loss of
    /// its lock. `is_failure` means that the output is an error of its own, which is kept.
    #[doc(hidden)]
    pub fn replaces_output(self, error: LockError, is_failure: bool) -> Option<LockError> {
        let is_loss = matches!(error.kind(), LockErrorKind::Lost(_));
        (is_loss && !is_failure && self != Self::Ignore).then(|| error.with_hint(Some(HAD_ENDED)))
    }
}

const HAD_ENDED: &str = "the body has ended nevertheless, perhaps beside another holder, and its output was dropped; check its effects, \
                         or set `on_lost`";

/// How long a request waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Wait {
    /// Does not wait: fails with `Contended` if the lock is not free.
    No,
    /// Waits for at most this long, then fails with `WaitTimeout`.
    AtMost(Duration),
}

/// How long a lock is held at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum MaxHold {
    /// For as long as it is renewed.
    No,
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
///
/// With the feature `serde`, a spec is serialized with the names of its options. Durations are
/// text, modes are `"exclusive"` and `"shared"`, and options that can be enabled and disabled are
/// `true` or `false`. Deserialization refuses unknown names and specs that do not pass
/// [`check`](Self::check). The tables of lock-tower's policy files have the same form:
///
/// ```toml
/// mode = "shared" # or permits = 3
/// lease = "10s"
/// wait = "1m 30s" # or no_wait = true
/// renew = false
/// reentrant = true
/// min_hold = "500ms"
/// max_hold = "1h" # or no_max_hold = true
/// strict_order = true
/// retain = "50ms"
/// max_waiters = 100
/// on_lost = "cancel" # or "error" or "ignore"
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(try_from = "fields::Fields", into = "fields::Fields")
)]
pub struct LockSpec {
    mode: Mode,
    lease: Option<Duration>,
    wait: Option<Wait>,
    renew: Option<bool>,
    strict_order: Option<bool>,
    reentrant: Option<bool>,
    min_hold: Option<Duration>,
    max_hold: Option<MaxHold>,
    retain: Option<Duration>,
    max_waiters: Option<usize>,
    on_lost: Option<OnLost>,
}

macro_rules! constructors_and_setters {
    (
        options {
            $(
                $(#[$doc:meta])*
                $option:ident($($arg:ident: $of:ty)?) { $field:ident: $value:expr }
            )*
        }
        modes {
            $( $mode:ident($($count:ident: $of_count:ty)?) { $text:literal, $variant:expr } )*
        }
    ) => {
        $(
            #[doc = concat!("Creates a spec for ", $text)]
            pub const fn $mode($($count: $of_count)?) -> Self {
                Self::new($variant)
            }
        )*
        $(
            $(#[$doc])*
            #[must_use]
            pub const fn $option(mut self $(, $arg: $of)?) -> Self {
                self.$field = Some($value);
                self
            }
        )*
    };
}

impl LockSpec {
    /// The shortest lease.
    pub const MIN_LEASE: Duration = Duration::from_millis(100);
    /// The longest lease.
    pub const MAX_LEASE: Duration = Duration::from_secs(24 * 60 * 60);
    /// The default lease: long enough to survive a slow network, short enough to end soon after a
    /// crash.
    pub const DEFAULT_LEASE: Duration = Duration::from_secs(30);
    /// The default time for which a request waits.
    pub const DEFAULT_WAIT: Duration = Duration::from_secs(10);

    crate::__lock_options!(constructors_and_setters);

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
            retain: None,
            max_waiters: None,
            on_lost: None,
        }
    }

    /// Limits the wait to `limit`. A shorter wait is left unchanged.
    ///
    /// A wait that is not set counts as 10 s here, whatever the client's defaults. If they may be
    /// shorter, set the wait first.
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
        match self.wait.unwrap_or(Wait::AtMost(LockSpec::DEFAULT_WAIT)) {
            Wait::AtMost(wait) if limit < wait => self.wait(limit),
            _ => self,
        }
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
            retain: self.retain.or(other.retain),
            max_waiters: self.max_waiters.or(other.max_waiters),
            on_lost: self.on_lost.or(other.on_lost),
        }
    }

    /// Sets a `max_hold` if none is set and none was removed: `max_hold`, or the lease or the
    /// `min_hold` if that is longer, as these say that the lock may be held for that long.
    #[doc(hidden)]
    #[must_use]
    pub fn or_max_hold(self, max_hold: Duration) -> Self {
        let (lease, min_hold) = (self.lease, self.min_hold);
        let max_hold = [lease, min_hold]
            .into_iter()
            .flatten()
            .fold(max_hold, Duration::max);
        self.or(&Self::exclusive().max_hold(max_hold))
    }

    /// Returns whether a `max_hold` was removed.
    #[doc(hidden)]
    pub fn is_unlimited(&self) -> bool {
        self.max_hold == Some(MaxHold::No)
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

    /// Fills unset options from `defaults`, whose mode is ignored, and validates the result.
    pub(crate) fn terms(&self, defaults: &LockSpec) -> Result<Terms, LockError> {
        let filled = self.clone().or(defaults);
        let terms = Terms {
            mode: filled.mode,
            lease: filled.lease.unwrap_or(LockSpec::DEFAULT_LEASE),
            wait: filled.wait.unwrap_or(Wait::AtMost(LockSpec::DEFAULT_WAIT)),
            renew: filled.renew.unwrap_or(true),
            strict_order: filled.strict_order.unwrap_or(false),
            reentrant: filled.reentrant.unwrap_or(false),
            min_hold: filled.min_hold,
            max_hold: match filled.max_hold {
                Some(MaxHold::AtMost(max_hold)) => Some(max_hold),
                Some(MaxHold::No) | None => None,
            },
            retain: filled.retain.filter(|retain| !retain.is_zero()),
            max_waiters: filled.max_waiters.unwrap_or(usize::MAX),
            on_lost: filled.on_lost.unwrap_or_default(),
        };
        match terms.complaint() {
            None => Ok(terms),
            Some((settings, complaint)) => Err(LockError::of_settings(settings, complaint)),
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
    /// Not zero.
    pub(crate) retain: Option<Duration>,
    /// Applies in addition to the client's own limit.
    pub(crate) max_waiters: usize,
    pub(crate) on_lost: OnLost,
}

impl Terms {
    /// Terms without any option.
    #[cfg(test)]
    pub(crate) const fn plain(mode: Mode, lease: Duration, wait: Wait) -> Self {
        Self {
            mode,
            lease,
            wait,
            renew: true,
            strict_order: false,
            reentrant: false,
            min_hold: None,
            max_hold: None,
            retain: None,
            max_waiters: usize::MAX,
            on_lost: OnLost::Cancel,
        }
    }

    /// Returns the options that are invalid, and why.
    fn complaint(&self) -> Option<(&'static [&'static str], String)> {
        let (lease, min_hold, max_hold) = (self.lease, self.min_hold, self.max_hold);
        let wait = match self.wait {
            Wait::No => None,
            Wait::AtMost(wait) => Some(wait),
        };
        if !(LockSpec::MIN_LEASE..=LockSpec::MAX_LEASE).contains(&lease) {
            let lease = Short(lease);
            let message = format!("a lease of {lease} is out of range; give 100 ms to 24 h");
            return Some((&["lease"], message));
        }
        let a_year = "365 days, or leave it out (in a layer: `no_max_hold`) for no limit";
        for (option, length, longest, remedy) in [
            (&["wait"], wait, LockSpec::MAX_LEASE, "24 h"),
            (&["min_hold"], min_hold, LockSpec::MAX_LEASE, "24 h"),
            (&["retain"], self.retain, LockSpec::MAX_LEASE, "24 h"),
            (&["max_hold"], max_hold, LONGEST_HOLD, a_year),
        ] {
            if let Some(length) = length.filter(|length| *length > longest) {
                let [name] = option;
                let length = Short(length);
                let message = format!("a {name} of {length} is too long; give at most {remedy}");
                return Some((option, message));
            }
        }
        match (min_hold, max_hold) {
            (_, Some(Duration::ZERO)) => {
                let message = "a max_hold of zero holds nothing; leave it out (in a layer: `no_max_hold`) for no limit";
                Some((&["max_hold"], message.into()))
            }
            (Some(min_hold), Some(max_hold)) if min_hold > max_hold => {
                let (min_hold, max_hold) = (Short(min_hold), Short(max_hold));
                let message = format!(
                    "a min_hold of {min_hold} is longer than the max_hold of {max_hold}; swap them"
                );
                Some((&["min_hold", "max_hold"], message))
            }
            _ => None,
        }
    }

    /// Returns the time-out of a call to the store: min(lease/6, 500 ms), so that three
    /// attempts fit between two renewals.
    pub(crate) fn call_timeout(&self) -> Duration {
        call_timeout(self.lease)
    }

    /// Returns the time-out of a call that acquires this number of keys one after the other: that
    /// of a call for each of them, but at most half of the lease. The lease of the first key counts
    /// from the beginning, and has to be renewed after the end.
    pub(crate) fn patience(&self, keys: usize) -> Duration {
        let keys = u32::try_from(keys).unwrap_or(u32::MAX);
        self.call_timeout().saturating_mul(keys).min(self.lease / 2)
    }
}

/// Parses a duration such as `1m 30s`, and returns the complaint about another text.
pub(crate) fn parse_duration(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text).map_err(|error| {
        let message =
            format!("{text:?} is not a duration ({error}): write \"2s\", \"500ms\" or the like");
        text::message(message).into_owned()
    })
}

/// Returns the time-out of a call to the store for a lease of this length.
pub(crate) fn call_timeout(lease: Duration) -> Duration {
    (lease / 6).min(Duration::from_millis(500))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_spec_that_cannot_be_meant_is_refused() {
        let (open, milli) = (LockSpec::exclusive, Duration::from_millis(1));
        for (spec, word) in [
            (open().lease(milli * 99), "lease"),
            (open().lease(LockSpec::MAX_LEASE + milli), "lease"),
            (open().wait(SECOND * 90_000), "wait"),
            (open().min_hold(SECOND * 90_000), "min_hold"),
            (open().retain(SECOND * 90_000), "retain"),
            (open().max_hold(Duration::ZERO), "max_hold"),
            (open().max_hold(Duration::MAX), "max_hold"),
            (open().lease(Duration::MAX), "lease"),
            (open().wait(Duration::MAX), "wait"),
            (open().min_hold(Duration::MAX), "min_hold"),
            (open().min_hold(SECOND * 2).max_hold(SECOND), "max_hold"),
        ] {
            for error in [spec.terms(&open()).unwrap_err(), spec.check().unwrap_err()] {
                assert_eq!(error.kind(), LockErrorKind::InvalidSpec);
                assert!(error.to_string().contains(word), "{error}");
            }
        }
        for lease in [LockSpec::MIN_LEASE, LockSpec::MAX_LEASE] {
            assert!(open().lease(lease).terms(&open()).is_ok());
        }
        let patient = LockSpec::shared().min_hold(SECOND * 2);
        assert!(patient.check().is_ok(), "valid with other defaults");
        let is_refused = patient.terms(&open().max_hold(SECOND)).is_err();
        assert!(is_refused, "invalid with these defaults");
    }

    #[test]
    fn durations_in_messages_are_short() {
        for (spec, message) in [
            (
                LockSpec::exclusive().lease(Duration::ZERO),
                "a lease of 0s is out of range; give 100 ms to 24 h",
            ),
            (
                LockSpec::exclusive().wait(Duration::from_secs(10_800_000)),
                "a wait of 3000h is too long; give at most 24 h",
            ),
        ] {
            assert_eq!(spec.check().unwrap_err().to_string(), message);
        }
    }

    #[test]
    fn what_is_left_open_comes_from_the_defaults() {
        let defaults = LockSpec::shared().lease(SECOND * 5).no_wait().reentrant();
        let terms = LockSpec::exclusive().wait(SECOND).terms(&defaults).unwrap();
        assert_eq!(terms.mode, Mode::Exclusive);
        assert_eq!(terms.lease, SECOND * 5);
        assert_eq!(terms.wait, Wait::AtMost(SECOND));
        assert!(terms.reentrant && terms.renew);
    }

    #[test]
    fn what_the_defaults_switch_on_can_be_switched_off() {
        let open = LockSpec::exclusive;
        let on = open().reentrant().strict_order().max_waiters(7);
        let off = open().no_reentrant().no_strict_order().max_waiters(9);
        for (spec, defaults, expected) in [
            (open(), &on, (true, true, 7)),
            (off, &on, (false, false, 9)),
            (open(), &open(), (false, false, usize::MAX)),
        ] {
            let terms = spec.terms(defaults).unwrap();
            let found = (terms.reentrant, terms.strict_order, terms.max_waiters);
            assert_eq!(found, expected);
        }
    }
}
