//! The limits of a store.

use std::{num::NonZeroUsize, time::Duration};

use crate::{
    error::LockError,
    observe::text::Short,
    request::spec::{LockKind, LockSpec, Terms, Wait},
};

/// The requests that a store supports. A [`LockClient`](crate::LockClient) refuses all others as
/// `InvalidSpec`, before it waits or calls the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// The shortest lease: 100 ms by default, the shortest of any [`LockSpec`](crate::LockSpec).
    pub shortest_lease: Duration,
    /// The longest lease: 24 h by default, the longest of any [`LockSpec`](crate::LockSpec). A
    /// `min_hold` cannot be longer either.
    pub longest_lease: Duration,
    /// The largest number of keys that one call acquires. `None`, the default, for no limit.
    /// Permits do not count: they are acquired one by one.
    pub keys_at_once: Option<NonZeroUsize>,
    /// Whether a call acquires several keys one after the other; `false` by default. If so, the
    /// caller waits for as long as a call for each key may take, and at most for half of the lease.
    /// The store limits the time of each key.
    #[doc(hidden)]
    pub in_turn: bool,
    /// Whether the store grants permits; `true` by default.
    #[doc(hidden)]
    pub permits: bool,
    /// Whether the store keeps results ([`LockClient::once`](crate::LockClient::once)); `false` by
    /// default.
    #[doc(hidden)]
    pub results: bool,
    /// Whether the store tells a client that retains a lock of the waiters of other clients
    /// ([`LockSpec::retain`]); `false` by default.
    #[doc(hidden)]
    pub retains: bool,
    /// Whether the store sends messages; `true` by default. Without them, waiters find their grants
    /// by polling, and poll sooner at first, and holders notice a revocation at their next renewal.
    pub push: bool,
}

impl Default for Limits {
    fn default() -> Self {
        Self::new()
    }
}

impl Limits {
    /// Creates the limits of a store that grants every valid lease, any number of keys at once, and
    /// permits, and sends messages.
    pub const fn new() -> Self {
        Self {
            shortest_lease: LockSpec::MIN_LEASE,
            longest_lease: LockSpec::MAX_LEASE,
            keys_at_once: None,
            in_turn: false,
            permits: true,
            results: false,
            retains: false,
            push: true,
        }
    }

    /// Sets the shortest lease.
    #[must_use]
    pub const fn shortest_lease(mut self, shortest_lease: Duration) -> Self {
        self.shortest_lease = shortest_lease;
        self
    }

    /// Sets the longest lease.
    #[must_use]
    pub const fn longest_lease(mut self, longest_lease: Duration) -> Self {
        self.longest_lease = longest_lease;
        self
    }

    /// Sets the largest number of keys in one call.
    #[must_use]
    pub const fn keys_at_once(mut self, keys_at_once: NonZeroUsize) -> Self {
        self.keys_at_once = Some(keys_at_once);
        self
    }

    /// Sets whether the store acquires several keys one after the other.
    #[doc(hidden)]
    #[must_use]
    pub const fn in_turn(self, in_turn: bool) -> Self {
        Self { in_turn, ..self }
    }

    /// Sets whether the store grants permits.
    #[doc(hidden)]
    #[must_use]
    pub const fn permits(self, permits: bool) -> Self {
        Self { permits, ..self }
    }

    /// Sets whether the store keeps results.
    #[doc(hidden)]
    #[must_use]
    pub const fn results(self, results: bool) -> Self {
        Self { results, ..self }
    }

    /// Sets whether the store sends [`StoreEvent::Wanted`](super::StoreEvent::Wanted).
    #[doc(hidden)]
    #[must_use]
    pub const fn retains(self, retains: bool) -> Self {
        Self { retains, ..self }
    }

    /// Sets whether the store sends events.
    #[must_use]
    pub const fn push(self, push: bool) -> Self {
        Self { push, ..self }
    }

    /// Checks a request for this number of keys.
    ///
    /// # Errors
    /// `InvalidSpec`, with the remedy.
    pub(crate) fn check(&self, terms: &Terms, keys: usize) -> Result<(), LockError> {
        let kind = terms.mode.kind();
        self.check_kind(kind)?;
        // A request that waits acquires its keys one by one, and so does one for permits.
        if let Some(most) = self.keys_at_once
            && keys > most.get()
            && terms.wait == Wait::No
            && kind == LockKind::Lock
        {
            return refused(
                &[],
                format!(
                    "{keys} keys are more than the {most} that the store acquires at once; \
                 name fewer keys, or let the request wait"
                ),
            );
        }
        if terms.retain.is_some() && !self.retains {
            return refused(
                &["retain"],
                "the store sends no message to a client that retains a lock while another one waits, and a majority \
                 of servers sends none; leave `retain` out, or use one server"
                    .into(),
            );
        }
        // A reservation for the rest of a `min_hold` is stored like a lease.
        if let Some(min_hold) = terms.min_hold {
            self.check_longest(&["min_hold"], min_hold)?;
        }
        self.check_lease(terms.lease)
    }

    /// Checks the lease of a request or of an extension.
    ///
    /// # Errors
    /// `InvalidSpec`, with the remedy.
    pub(crate) fn check_lease(&self, lease: Duration) -> Result<(), LockError> {
        if lease < self.shortest_lease {
            let (lease, shortest) = (Short(lease), Short(self.shortest_lease));
            return refused(
                &["lease"],
                format!(
                    "a lease of {lease} is shorter than {shortest}, the shortest of the store; use a longer lease"
                ),
            );
        }
        self.check_longest(&["lease"], lease)
    }

    /// Checks that the store supports locks of this kind.
    ///
    /// # Errors
    /// `InvalidSpec`, with the remedy.
    pub(super) fn check_kind(&self, kind: LockKind) -> Result<(), LockError> {
        if kind == LockKind::Permits && !self.permits {
            return refused(
                &[],
                "the store does not support permits, as a majority of servers cannot count them; \
                 use one server for permits"
                    .into(),
            );
        }
        Ok(())
    }

    /// Checks the time of an option that the store keeps as a lease.
    ///
    /// # Errors
    /// `InvalidSpec`, with the remedy.
    pub(super) fn check_longest(
        &self,
        option: &'static [&'static str; 1],
        time: Duration,
    ) -> Result<(), LockError> {
        if time > self.longest_lease {
            let [name] = option;
            let (time, longest) = (Short(time), Short(self.longest_lease));
            return refused(
                option,
                format!(
                    "a {name} of {time} is longer than {longest}, the longest lease of the store; \
                 use a shorter {name} or, over several servers, set a longer `longest_lease` on all clients"
                ),
            );
        }
        Ok(())
    }
}

fn refused(settings: &'static [&'static str], message: String) -> Result<(), LockError> {
    Err(LockError::of_settings(settings, message))
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use super::*;
    use crate::{LockSpec, error::LockErrorKind};

    fn check(limits: Limits, spec: LockSpec, keys: usize) -> Result<(), String> {
        let terms = spec.terms(&LockSpec::exclusive()).unwrap();
        let checked = limits.check(&terms, keys);
        checked.map_err(|error| {
            assert_eq!(error.kind(), LockErrorKind::InvalidSpec);
            error.to_string()
        })
    }

    #[test]
    fn min_hold_is_at_most_the_longest_lease_of_the_store() {
        let limits = Limits::new().longest_lease(Duration::from_secs(60));
        let held = |seconds| LockSpec::exclusive().min_hold(Duration::from_secs(seconds));
        assert_eq!(check(limits, held(60), 1), Ok(()));
        let message = "a min_hold of 61s is longer than 1m, the longest lease of the store; use a shorter min_hold or, \
                       over several servers, set a longer `longest_lease` on all clients";
        assert_eq!(check(limits, held(61), 1), Err(message.into()));
        assert_eq!(check(Limits::new(), held(61), 1), Ok(()));
    }

    #[test]
    fn keys_at_once_does_not_limit_permits_and_requests_that_wait() {
        let limits = Limits::new().keys_at_once(NonZeroUsize::MIN);
        let refused = check(limits, LockSpec::exclusive().no_wait(), 2).unwrap_err();
        assert!(refused.contains("2 keys are more than the 1 "), "{refused}");
        let permits = LockSpec::permits(NonZeroU32::MIN).no_wait();
        for spec in [LockSpec::exclusive(), permits] {
            assert_eq!(check(limits, spec, 2), Ok(()));
        }
    }
}
