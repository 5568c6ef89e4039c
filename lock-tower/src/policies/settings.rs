//! The settings of a table in a policy file, and the policy that the tables of a route result in.

use std::{mem, time::Duration};

use http::StatusCode;
#[cfg(feature = "once")]
use lock_runtime::LockClient;
use lock_runtime::{ErrorClass, LockSpec};

use super::mistake::Mistakes;
#[cfg(feature = "once")]
use crate::policy::OnceTerms;
use crate::policy::{ENDLESS, HoldUntil, Policy};

/// The rows of the table of refusals.
pub(super) const ROWS: [(&str, ErrorClass); 6] = [
    ("busy", ErrorClass::Busy),
    ("overloaded", ErrorClass::Overloaded),
    ("unavailable", ErrorClass::Unavailable),
    ("lost", ErrorClass::Lost),
    ("bad_request", ErrorClass::BadRequest),
    ("internal", ErrorClass::Internal),
];

/// A value in the text. `at` is its offset, in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Said<T> {
    pub(super) at: usize,
    pub(super) value: T,
}

/// The settings of `[defaults]`, a group or a route.
#[derive(Clone, Debug, Default)]
pub(super) struct Settings<'t> {
    pub(super) key: Option<Said<&'t str>>,
    /// A field for the key, or for its absence, was malformed and has been reported.
    pub(super) mistaken_key: bool,
    pub(super) global: Option<bool>,
    /// A spec of the mode alone.
    pub(super) mode: Option<LockSpec>,
    /// The other options of the lock.
    pub(super) options: LockSpec,
    /// The offsets of `min_hold`, and of `max_hold` or its removal.
    pub(super) min_hold: Option<usize>,
    pub(super) max_hold: Option<usize>,
    pub(super) hold_until: Option<Said<HoldUntil>>,
    pub(super) retry_after: Option<Duration>,
    pub(super) fail_open: Option<bool>,
    pub(super) statuses: Vec<(ErrorClass, StatusCode)>,
    #[cfg(feature = "once")]
    pub(super) once: Option<Said<OnceTerms>>,
}

impl<'t> Settings<'t> {
    /// Fills unset settings from `other`.
    pub(super) fn or(mut self, other: &Self) -> Self {
        let own = |class| self.statuses.iter().any(|(said, _)| *said == class);
        let inherited: Vec<_> = other
            .statuses
            .iter()
            .filter(|(class, _)| !own(*class))
            .copied()
            .collect();
        self.statuses.extend(inherited);
        Self {
            key: self.key.or(other.key),
            mistaken_key: self.mistaken_key || other.mistaken_key,
            global: self.global.or(other.global),
            mode: self.mode.or_else(|| other.mode.clone()),
            options: self.options.or(&other.options),
            min_hold: self.min_hold.or(other.min_hold),
            max_hold: self.max_hold.or(other.max_hold),
            hold_until: self.hold_until.or(other.hold_until),
            retry_after: self.retry_after.or(other.retry_after),
            fail_open: self.fail_open.or(other.fail_open),
            statuses: self.statuses,
            #[cfg(feature = "once")]
            once: self.once.or(other.once),
        }
    }

    /// Sets an option of the lock.
    pub(super) fn set(&mut self, set: impl FnOnce(LockSpec) -> LockSpec) {
        self.options = set(mem::take(&mut self.options));
    }

    /// Builds the policy with the given name. Settings that contradict each other are a mistake.
    pub(super) fn policy(&self, name: &str, mistakes: &mut Mistakes<'_>) -> Policy {
        let spec = self.mode.clone().unwrap_or_default().or(&self.options);
        // Single settings have been validated where they are parsed.
        if let (Some(min_hold), Some(max_hold), Err(error)) =
            (self.min_hold, self.max_hold, spec.check())
        {
            mistakes.add(min_hold.max(max_hold), error.to_string());
        }
        let is_unlimited = spec.is_unlimited();
        let mut policy = Policy::new(name.to_owned()).with_spec(spec);
        if let Some(hold_until) = self.hold_until {
            policy = policy.hold_until(hold_until.value);
            if is_unlimited && policy.is_held_for_the_body() {
                let at = self
                    .max_hold
                    .map_or(hold_until.at, |at| at.max(hold_until.at));
                mistakes.add(at, ENDLESS);
            }
        }
        if let Some(retry_after) = self.retry_after {
            policy = policy.retry_after(retry_after);
        }
        if self.fail_open == Some(true) {
            policy = policy.fail_open();
        }
        #[cfg(feature = "once")]
        if let Some(once) = self.once {
            self.check_once(once, mistakes);
            policy = policy.served_once(once.value);
        }
        // In the order of the table, so that policies with the same settings are equal.
        let said = |row| self.statuses.iter().find(|(class, _)| *class == row);
        let statuses = ROWS.into_iter().filter_map(|(_, row)| said(row));
        statuses.fold(policy, |policy, (class, status)| {
            policy.status(*class, *status)
        })
    }

    /// Adds a mistake for each setting that has no meaning with `once`.
    #[cfg(feature = "once")]
    fn check_once(&self, once: Said<OnceTerms>, mistakes: &mut Mistakes<'_>) {
        if self.hold_until.is_some() {
            mistakes.add(
                once.at,
                "`once` stores the response: leave `hold_until` out",
            );
        }
        if self.fail_open == Some(true) {
            let message = "`once` needs the store: leave `fail_open` out";
            mistakes.add(once.at, message);
        }
        let spec = self.mode.clone().unwrap_or_default().or(&self.options);
        // The rules are those of each request.
        let request = LockClient::in_memory().once("key").spec(spec);
        if let Err(error) = request.keep(once.value.keep).check() {
            mistakes.add(once.at, error.to_string());
        }
    }
}
