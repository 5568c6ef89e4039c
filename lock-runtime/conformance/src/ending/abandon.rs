//! Requests that were given up.

use std::{sync::Arc, time::Duration};

use futures_util::future::join_all;
use lock_runtime::{
    Mode,
    store::{AcquireReply, ConvertReply, Hold, KeyRequest, Release, Renewal, Store},
    time::{Instant, sleep_until},
};
use tokio::time::{sleep, timeout};

use super::cancellation::cancelled;
use crate::subject::{Subject, beside, conflicting, fresh_hold, in_time, promise};

const PROMISE: &str =
    "a request has no effect after its deadline and an abandonment that followed it";
/// The time from a request to its deadline.
const DEADLINE: Duration = Duration::from_millis(150);
/// The time after an abandonment in which a delayed request would be noticed.
const WATCHED: Duration = Duration::from_millis(400);
/// The largest number of polls after which a call is dropped.
const POLLS: usize = 4;
/// Milliseconds after which a call is dropped. A store may make its calls in tasks, whose progress
/// its futures do not show by polls.
const PAUSES: [u64; 4] = [1, 5, 20, 50];

/// The moment at which a call is dropped.
#[derive(Clone, Copy, Debug)]
enum Moment {
    Polls(usize),
    After(Duration),
}

impl Moment {
    fn all() -> impl Iterator<Item = Self> + Clone {
        let pauses = PAUSES.map(Duration::from_millis).into_iter();
        (0..=POLLS).map(Self::Polls).chain(pauses.map(Self::After))
    }

    /// Returns the output of a call that is ready before.
    async fn cancel<F: Future>(self, call: F) -> Option<F::Output> {
        match self {
            Self::Polls(polls) => cancelled(polls, call).await,
            Self::After(pause) => timeout(pause, call).await.ok(),
        }
    }
}

/// Checks that a request whose future was dropped, at any time, has no effect any more once its
/// deadline has passed and its token was abandoned. A request that arrives later has none
/// either.
///
/// # Panics
/// If the store breaks this promise.
pub async fn abandoned_requests_have_no_effect(make: &impl AsyncFn() -> Arc<dyn Store>) {
    let subject = &Subject::of(make).await;
    let queues = subject.queues().await;
    let mut cases = Vec::new();
    for mode in subject.modes() {
        for moment in Moment::all() {
            cases.push((mode, moment, false));
            if queues {
                cases.push((mode, moment, true));
            }
        }
    }
    in_time(join_all(cases.into_iter().map(|(mode, moment, waits)| {
        abandoned(subject, mode, moment, waits)
    })))
    .await;
}

async fn abandoned(subject: &Subject, mode: Mode, moment: Moment, waits: bool) {
    let hold = fresh_hold(mode);
    let holder = beside(&hold.key, Mode::Exclusive);
    let holder = if mode == Mode::Exclusive || mode == Mode::Shared {
        holder
    } else {
        beside(&hold.key, mode)
    };
    let second = beside(&hold.key, holder.mode);
    if waits {
        subject.granted(&holder, subject.lease()).await;
        if matches!(mode, Mode::Permits(_)) {
            subject.granted(&second, subject.lease()).await;
        }
    }
    let deadline = Instant::now() + DEADLINE;
    let request = KeyRequest::new(hold.clone(), subject.lease(), deadline).queued();
    drop(moment.cancel(subject.store.acquire(&request)).await);
    sleep_until(deadline + Duration::from_millis(1)).await;
    subject.abandon(&hold).await;
    if waits {
        for hold in [&holder, &second] {
            subject.abandon(hold).await;
        }
    }
    let case = format!("{mode:?}, dropped at {moment:?}, waits: {waits}");
    let unused = async || {
        let found = subject.inspect(&hold).await;
        let unused = found.holders.is_empty() && found.waiters.is_empty();
        promise!(PROMISE, unused, "{case}: {found:?}");
    };
    let watched = Instant::now();
    while watched.elapsed() < WATCHED {
        unused().await;
        sleep(WATCHED / 20).await;
    }
    let reply = subject.reply_to(&request).await;
    let refused = !matches!(
        reply,
        AcquireReply::Granted(_) | AcquireReply::Queued { .. }
    );
    promise!(
        PROMISE,
        refused,
        "{case}: the request, repeated, was answered {reply:?}"
    );
    unused().await;
    let next = beside(&hold.key, conflicting(mode));
    subject.granted(&next, subject.lease()).await;
    subject.release(&next).await;
}

/// A call about a lock that is held.
#[derive(Clone, Copy, Debug)]
enum Call {
    Release,
    ReleaseOwned,
    Convert,
    Renew,
    Poll,
    Abandon,
    Inspect,
}

/// Checks that any call about a held lock can be dropped at any time: the lock can still be given
/// up, and then nothing is left.
///
/// # Panics
/// If the store breaks this promise.
pub async fn dropped_calls_can_be_abandoned(make: &impl AsyncFn() -> Arc<dyn Store>) {
    use Call::{Abandon, Convert, Inspect, Poll, Release, ReleaseOwned, Renew};
    let subject = &Subject::of(make).await;
    let calls = [
        Release,
        ReleaseOwned,
        Convert,
        Renew,
        Poll,
        Abandon,
        Inspect,
    ];
    let cases = calls
        .into_iter()
        .flat_map(|call| Moment::all().map(move |moment| (call, moment)));
    in_time(join_all(
        cases.map(|(call, moment)| given_up(subject, call, moment)),
    ))
    .await;
}

async fn given_up(subject: &Subject, call: Call, moment: Moment) {
    let promise = "a call can be dropped at any time, and its lock be given up";
    let hold = subject.held(Mode::Exclusive).await;
    let reader = Hold::new(hold.key.clone(), Mode::Shared, hold.token);
    let store = &subject.store;
    match call {
        Call::Release => drop(
            moment
                .cancel(store.release(&Release::new(hold.clone())))
                .await,
        ),
        Call::ReleaseOwned => {
            let release = store.clone().release_owned(Release::new(hold.clone()));
            drop(moment.cancel(release).await);
        }
        Call::Convert => {
            let reply = moment.cancel(store.convert(&hold)).await;
            // A conversion that is executed later changes no other lock.
            let converted = matches!(reply, None | Some(Ok(ConvertReply::Converted(_))));
            promise!(promise, converted, "{call:?}: {reply:?}");
        }
        Call::Renew => {
            let renewals = [Renewal::new(hold.clone(), subject.lease())];
            drop(moment.cancel(store.renew(&renewals)).await);
        }
        Call::Poll => drop(moment.cancel(store.poll(std::slice::from_ref(&hold))).await),
        Call::Abandon => drop(moment.cancel(store.abandon(&hold)).await),
        Call::Inspect => drop(
            moment
                .cancel(store.inspect(&hold.key, hold.mode.kind()))
                .await,
        ),
    }
    // Whether the conversion was executed is not known.
    for hold in [&hold, &reader] {
        subject.abandon(hold).await;
    }
    subject.assert_unused(promise, &hold).await;
    let next = beside(&hold.key, Mode::Exclusive);
    subject.granted(&next, subject.lease()).await;
    subject.release(&next).await;
}
