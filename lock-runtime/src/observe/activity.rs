//! [`Activity`]: the contention and the losses of a client, for operators.

use std::{
    collections::{HashMap, VecDeque},
    sync::Mutex,
    time::Duration,
};

use crate::{
    error::{LockError, LockErrorKind, Loss},
    guard::fence::FencingToken,
    observe::watch::Grant,
    request::key::LockKey,
    request::name::RequestName,
    shell::sync::lock,
    shell::time::Instant,
};

/// The most names that are counted apart. Requests with other names count as `other`.
const MAX_NAMES: usize = 256;
/// The number of losses that are kept.
const MAX_LOSSES: usize = 64;

/// The contention and the losses of a client, returned by
/// [`LockClient::activity`](crate::LockClient::activity).
///
/// With the feature `serde` it is serialized, with times in ms.
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Activity {
    /// The age of the client, for which the numbers count.
    #[cfg_attr(
        feature = "serde",
        serde(rename = "age_ms", serialize_with = "crate::observe::fields::millis")
    )]
    pub age: Duration,
    /// The names of requests that had to wait, failed or lost a lock, most contended first.
    pub names: Vec<NameActivity>,
    /// The latest losses, at most 64, newest first.
    pub losses: Vec<LostLock>,
}

/// The contention and the losses of all requests with one name.
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct NameActivity {
    /// The [name](crate::LockRequest::name) of the requests; `unnamed` for those without one, and
    /// `other` for those beyond the first 256 names.
    pub name: RequestName,
    /// The number of requests that were granted a contended lock.
    pub contended: u64,
    /// The number of requests that gave up or were refused because of contention: `Contended`,
    /// `WaitTimeout`, `Overloaded`.
    pub refused: u64,
    /// The number of requests that failed in another way.
    pub failed: u64,
    /// The number of locks that were lost.
    pub lost: u64,
    /// The key of the latest of all of these. `None` for a request without a valid key.
    pub latest_key: Option<LockKey>,
    /// The time since then.
    #[cfg_attr(
        feature = "serde",
        serde(
            rename = "latest_ms",
            serialize_with = "crate::observe::fields::millis"
        )
    )]
    pub latest: Duration,
}

/// A lock that was lost.
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct LostLock {
    /// The time since the loss.
    #[cfg_attr(
        feature = "serde",
        serde(rename = "ago_ms", serialize_with = "crate::observe::fields::millis")
    )]
    pub ago: Duration,
    /// The key of the lock.
    pub key: LockKey,
    /// The name of its request.
    pub name: Option<RequestName>,
    /// The fencing token of the grant.
    pub fence: FencingToken,
    /// The cause.
    pub loss: Loss,
}

/// The numbers of a client. Nothing is recorded for locks that are granted at the first attempt.
#[derive(Debug, Default)]
pub(crate) struct Recorded(Mutex<Numbers>);

#[derive(Debug, Default)]
struct Numbers {
    names: HashMap<RequestName, Tally>,
    losses: VecDeque<Lost>,
}

#[derive(Debug)]
struct Tally {
    contended: u64,
    refused: u64,
    failed: u64,
    lost: u64,
    latest_key: Option<LockKey>,
    latest: Instant,
}

#[derive(Debug)]
struct Lost {
    at: Instant,
    key: LockKey,
    name: Option<RequestName>,
    fence: FencingToken,
    loss: Loss,
}

impl Recorded {
    pub(crate) fn ended(
        &self,
        name: Option<&RequestName>,
        key: Option<&LockKey>,
        outcome: Result<Grant, &LockError>,
    ) {
        if outcome.is_ok_and(|grant| !grant.was_contended) {
            return;
        }
        lock(&self.0).count(name, key, |tally| match outcome {
            Ok(_) => &mut tally.contended,
            Err(error) => match error.kind() {
                LockErrorKind::Contended
                | LockErrorKind::WaitTimeout
                | LockErrorKind::Overloaded => &mut tally.refused,
                _ => &mut tally.failed,
            },
        });
    }

    pub(crate) fn lost(
        &self,
        name: Option<&RequestName>,
        key: &LockKey,
        fence: FencingToken,
        loss: Loss,
    ) {
        let mut numbers = lock(&self.0);
        let at = numbers.count(name, Some(key), |tally| &mut tally.lost);
        numbers.losses.truncate(MAX_LOSSES - 1);
        numbers.losses.push_front(Lost {
            at,
            key: key.clone(),
            name: name.cloned(),
            fence,
            loss,
        });
    }

    pub(crate) fn since(&self, epoch: Instant) -> Activity {
        let now = Instant::now();
        let numbers = lock(&self.0);
        let names = numbers.names.iter().map(|(name, tally)| NameActivity {
            name: name.clone(),
            contended: tally.contended,
            refused: tally.refused,
            failed: tally.failed,
            lost: tally.lost,
            latest_key: tally.latest_key.clone(),
            latest: now.saturating_duration_since(tally.latest),
        });
        let losses = numbers.losses.iter().map(|lost| LostLock {
            ago: now.saturating_duration_since(lost.at),
            key: lost.key.clone(),
            name: lost.name.clone(),
            fence: lost.fence,
            loss: lost.loss,
        });
        let (mut names, losses): (Vec<_>, _) = (names.collect(), losses.collect());
        drop(numbers);
        names.sort_by(|a, b| {
            let most = |it: &NameActivity| it.contended + it.refused;
            most(b)
                .cmp(&most(a))
                .then_with(|| a.name.as_str().cmp(b.name.as_str()))
        });
        Activity {
            age: now.saturating_duration_since(epoch),
            names,
            losses,
        }
    }
}

impl Numbers {
    /// Adds one to a number of the name. Returns the time.
    fn count(
        &mut self,
        name: Option<&RequestName>,
        key: Option<&LockKey>,
        number: impl FnOnce(&mut Tally) -> &mut u64,
    ) -> Instant {
        let name = name.map_or("unnamed", RequestName::as_str);
        let now = Instant::now();
        let latest = (key.cloned(), now);
        if let Some(tally) = self.names.get_mut(name) {
            *number(tally) += 1;
            (tally.latest_key, tally.latest) = latest;
            return now;
        }
        let is_full = self.names.len() >= MAX_NAMES;
        let name = if is_full { "other" } else { name };
        let new = || Tally {
            contended: 0,
            refused: 0,
            failed: 0,
            lost: 0,
            latest_key: None,
            latest: now,
        };
        let tally = self.names.entry(RequestName::from(name.to_owned()));
        let tally = tally.or_insert_with(new);
        *number(tally) += 1;
        (tally.latest_key, tally.latest) = latest;
        now
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::LockClient;

    #[tokio::test(start_paused = true)]
    async fn contention_and_losses_are_counted_by_name() {
        let locks = LockClient::in_memory();
        let request = |name: &'static str| locks.exclusive("order:1").name(name);
        let guard = request("pay").acquire().await.unwrap();
        assert!(locks.activity().names.is_empty());

        request("pay").no_wait().acquire().await.unwrap_err();
        let waits = tokio::spawn(request("ship").acquire());
        tokio::time::sleep(Duration::from_secs(1)).await;
        locks.revoke("order:1").await.unwrap();
        waits.await.unwrap().unwrap().release().await.unwrap();
        tokio::time::sleep(Duration::from_secs(2)).await;

        let seen = locks.activity();
        assert_eq!(seen.age, Duration::from_secs(3));
        let of = |name: &str| {
            let of_name = seen
                .names
                .iter()
                .find(|it| it.name.as_str() == name)
                .unwrap();
            (
                of_name.contended,
                of_name.refused,
                of_name.failed,
                of_name.lost,
            )
        };
        assert_eq!((of("pay"), of("ship")), ((0, 1, 0, 1), (1, 0, 0, 0)));
        let [lost] = &seen.losses[..] else {
            panic!("{seen:?}")
        };
        assert_eq!((lost.fence, lost.loss), (guard.fence(), Loss::Revoked));
        assert_eq!(lost.ago, Duration::from_secs(2));
        drop(guard);
    }

    #[tokio::test]
    async fn names_and_losses_are_bounded() {
        let locks = LockClient::in_memory();
        for index in 0..MAX_NAMES + 9 {
            let key = format!("k{index}");
            let _guard = locks.exclusive(&*key).acquire().await.unwrap();
            let again = locks.exclusive(&*key).name(key.clone()).no_wait();
            again.acquire().await.unwrap_err();
            locks.revoke(&*key).await.unwrap();
        }
        let seen = locks.activity();
        assert_eq!(seen.losses.len(), MAX_LOSSES);
        assert!(seen.names.len() <= MAX_NAMES + 1, "{}", seen.names.len());
        let other = seen
            .names
            .iter()
            .find(|it| it.name.as_str() == "other")
            .unwrap();
        assert!(other.refused >= 9, "{other:?}");
    }
}
