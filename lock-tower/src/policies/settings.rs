//! The settings of a table in a policy file, and the policy that the tables of a route result in.

use std::{num::NonZeroU32, sync::Arc, time::Duration};

use http::StatusCode;
use lock_runtime::{LockSpec, web::ErrorClass};

use super::{mistake::Mistakes, read::ROWS};
use crate::{policy::Policy, protocol::HoldUntil};

/// A value in the text. `at` is its offset, in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Said<T> {
    pub(super) at: usize,
    pub(super) value: T,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Sharing {
    Exclusive,
    Shared,
    Permits(NonZeroU32),
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Waiting {
    No,
    AtMost(Duration),
}

/// The settings of `[defaults]`, a group or a route. Two fields for the same setting, such as
/// `wait` and `no_wait`, share one place here, so that a route can override its group with
/// either.
#[derive(Clone, Debug, Default)]
pub(super) struct Settings<'t> {
    pub(super) key: Option<Said<&'t str>>,
    /// A field for the key, or for its absence, was malformed and has been reported.
    pub(super) mistaken_key: bool,
    pub(super) global: Option<bool>,
    pub(super) sharing: Option<Sharing>,
    pub(super) lease: Option<Duration>,
    pub(super) waiting: Option<Waiting>,
    pub(super) renew: Option<bool>,
    pub(super) reentrant: Option<bool>,
    pub(super) strict_order: Option<bool>,
    pub(super) min_hold: Option<Said<Duration>>,
    pub(super) max_hold: Option<Said<Duration>>,
    pub(super) max_waiters: Option<usize>,
    pub(super) hold_until: Option<HoldUntil>,
    pub(super) retry_after: Option<Duration>,
    pub(super) fail_open: Option<bool>,
    pub(super) statuses: Vec<(ErrorClass, StatusCode)>,
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
            sharing: self.sharing.or(other.sharing),
            lease: self.lease.or(other.lease),
            waiting: self.waiting.or(other.waiting),
            renew: self.renew.or(other.renew),
            reentrant: self.reentrant.or(other.reentrant),
            strict_order: self.strict_order.or(other.strict_order),
            min_hold: self.min_hold.or(other.min_hold),
            max_hold: self.max_hold.or(other.max_hold),
            max_waiters: self.max_waiters.or(other.max_waiters),
            hold_until: self.hold_until.or(other.hold_until),
            retry_after: self.retry_after.or(other.retry_after),
            fail_open: self.fail_open.or(other.fail_open),
            statuses: self.statuses,
        }
    }

    /// Builds the policy with the given name. Settings that contradict each other are a mistake.
    pub(super) fn policy(&self, name: &str, mistakes: &mut Mistakes<'_>) -> Policy {
        let spec = self.spec();
        // Single settings have been validated where they are parsed.
        if let (Some(min_hold), Some(max_hold), Err(error)) =
            (self.min_hold, self.max_hold, spec.check())
        {
            mistakes.add(min_hold.at.max(max_hold.at), error.to_string());
        }
        let mut policy = Policy::new(Arc::from(name)).spec(spec);
        if let Some(hold_until) = self.hold_until {
            policy = policy.hold_until(hold_until);
        }
        if let Some(retry_after) = self.retry_after {
            policy = policy.retry_after(retry_after);
        }
        if self.fail_open == Some(true) {
            policy = policy.fail_open();
        }
        // In the order of the table, so that policies with the same settings are equal.
        let said = |row| self.statuses.iter().find(|(class, _)| *class == row);
        let statuses = ROWS.into_iter().filter_map(|(_, row)| said(row));
        statuses.fold(policy, |policy, (class, status)| {
            policy.status(*class, *status)
        })
    }

    fn spec(&self) -> LockSpec {
        let spec = match self.sharing {
            None | Some(Sharing::Exclusive) => LockSpec::exclusive(),
            Some(Sharing::Shared) => LockSpec::shared(),
            Some(Sharing::Permits(permits)) => LockSpec::permits(permits),
        };
        fn with<T>(
            spec: LockSpec,
            said: Option<T>,
            set: impl FnOnce(LockSpec, T) -> LockSpec,
        ) -> LockSpec {
            match said {
                Some(said) => set(spec, said),
                None => spec,
            }
        }
        let spec = with(spec, self.lease, LockSpec::lease);
        let spec = with(spec, self.waiting, |spec, waiting| match waiting {
            Waiting::No => spec.no_wait(),
            Waiting::AtMost(wait) => spec.wait(wait),
        });
        let spec = with(spec, self.renew, |spec, yes| {
            if yes { spec.renew() } else { spec.no_renew() }
        });
        let spec = with(spec, self.reentrant, |spec, yes| {
            if yes {
                spec.reentrant()
            } else {
                spec.no_reentrant()
            }
        });
        let spec = with(spec, self.strict_order, |spec, yes| {
            if yes {
                spec.strict_order()
            } else {
                spec.no_strict_order()
            }
        });
        let spec = with(spec, self.min_hold, |spec, said| spec.min_hold(said.value));
        let spec = with(spec, self.max_hold, |spec, said| spec.max_hold(said.value));
        with(spec, self.max_waiters, LockSpec::max_waiters)
    }
}
