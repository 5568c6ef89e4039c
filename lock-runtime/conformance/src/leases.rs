//! Leases: they end by themselves, and renewals make them longer only.

use std::{sync::Arc, time::Duration};

use futures_util::future::join_all;
use lock_runtime::{
    Mode,
    store::{AcquireReply, Hold, PollReply, ReleaseReply, RenewReply, Renewal, Store},
    time::{Instant, sleep_until},
};
use tokio::time::sleep;

use super::subject::{IMPRECISE, Subject, beside, conflicting, fresh_hold, in_time, promise};

/// A lease that a test waits for, if the store supports it.
const SHORT: Duration = Duration::from_millis(400);
/// The longest time by which a lease may end late.
const LATE: Duration = Duration::from_millis(1500);

/// Checks that a lock is held for its lease and becomes free at its end, without a further call.
///
/// # Panics
/// If the store breaks this promise.
pub async fn leases_end_by_themselves(make: &impl AsyncFn() -> Arc<dyn Store>) {
    let (one, other) = (&Subject::of(make).await, &Subject::of(make).await);
    in_time(join_all(
        (one.modes().into_iter()).map(|mode| lease_ends(one, other, mode)),
    ))
    .await;
}

async fn lease_ends(one: &Subject, other: &Subject, mode: Mode) {
    let promise = "a lease ends by itself, and not before its time";
    let lease = one.at_least(SHORT);
    let hold = fresh_hold(mode);
    let since = Instant::now();
    let first = one.granted(&hold, lease).await;
    promise!(
        promise,
        first.ttl <= lease,
        "{mode:?}: a grant for {lease:?} lasts for {:?}",
        first.ttl
    );
    // The second permit stays free.
    let next = match mode {
        Mode::Permits(_) => {
            let second = beside(&hold.key, mode);
            one.granted(&second, one.lease()).await;
            beside(&hold.key, mode)
        }
        mode => beside(&hold.key, conflicting(mode)),
    };
    while since.elapsed() < lease * 3 / 4 {
        let reply = other.acquire(&next, one.lease()).await;
        // The reply may have taken its time.
        let early = since.elapsed() < lease;
        let is_busy = matches!(reply, AcquireReply::Busy { .. });
        promise!(
            promise,
            is_busy || !early,
            "{mode:?}: {reply:?} before the end of {lease:?}"
        );
        sleep(lease / 8).await;
    }
    sleep_until(since + lease + LATE).await;
    let reply = other.acquire(&next, one.lease()).await;
    let granted = matches!(reply, AcquireReply::Granted(grant) if grant.fence > first.fence);
    promise!(
        promise,
        granted,
        "{mode:?}: {reply:?} {LATE:?} after the end of {lease:?}"
    );
}

/// Checks that a renewal makes a lease longer or leaves it as it is, and that the replies of a
/// batch are in the order of its renewals.
///
/// # Panics
/// If the store breaks this promise.
pub async fn renewals_never_shorten_a_lease(make: &impl AsyncFn() -> Arc<dyn Store>) {
    let subject = &Subject::of(make).await;
    in_time(async {
        let modes = subject.modes();
        join_all(modes.iter().map(|mode| renewed(subject, *mode))).await;
        renewed_together(subject).await;
    })
    .await;
}

async fn renewed(subject: &Subject, mode: Mode) {
    let promise = "a renewal makes a lease longer, never shorter";
    let (short, long) = (subject.at_least(SHORT), subject.lease());
    let (lasting, extended) = (fresh_hold(mode), fresh_hold(mode));
    subject.granted(&lasting, long).await;
    subject.granted(&extended, short).await;
    for (hold, lease) in [
        (&lasting, short),
        (&lasting, Duration::ZERO),
        (&extended, long),
    ] {
        let reply = subject.renew(hold, lease).await;
        let kept = matches!(reply, RenewReply::Renewed { ttl } if ttl > long / 2 && ttl <= long + IMPRECISE);
        promise!(
            promise,
            kept || long <= 2 * short,
            "{mode:?}: a renewal for {lease:?} of a lease of {long:?} was answered {reply:?}"
        );
    }
    sleep(short + LATE / 3).await;
    for hold in [&lasting, &extended] {
        let left = subject
            .inspect(hold)
            .await
            .holders
            .first()
            .map(|holder| holder.ttl);
        promise!(
            promise,
            left.is_some(),
            "{mode:?}: a lease of {long:?} ended after {short:?}"
        );
        let reply = subject.release(hold).await;
        promise!(
            promise,
            reply == ReleaseReply::Released,
            "{mode:?}: {reply:?}"
        );
    }
}

async fn renewed_together(subject: &Subject) {
    let held = [
        subject.held(Mode::Exclusive).await,
        subject.held(Mode::Shared).await,
    ];
    let gone = fresh_hold(Mode::Exclusive);
    let renewal = |hold: &Hold| Renewal::new(hold.clone(), subject.lease());
    let batch = [&held[0], &gone, &held[1]].map(renewal);
    let replies = subject.store.renew(&batch).await;
    let in_order = matches!(
        replies[..],
        [
            Ok(RenewReply::Renewed { .. }),
            Ok(RenewReply::Gone),
            Ok(RenewReply::Renewed { .. })
        ]
    );
    promise!(
        "the replies of a batch are in the order of its renewals",
        in_order,
        "held, not held, held: {replies:?}"
    );
}

/// Checks that a lease that has ended, or that never began, is not revived: `Gone` is the reply to
/// each further renewal, also when the lock is free.
///
/// # Panics
/// If the store breaks this promise.
pub async fn an_ended_lease_is_gone_for_good(make: &impl AsyncFn() -> Arc<dyn Store>) {
    let subject = &Subject::of(make).await;
    in_time(join_all(
        (subject.modes().into_iter()).map(|mode| gone(subject, mode)),
    ))
    .await;
}

async fn gone(subject: &Subject, mode: Mode) {
    let promise = "a lease that has ended is gone for good";
    let [ended, released, never] = [(); 3].map(|()| fresh_hold(mode));
    subject.granted(&ended, subject.at_least(SHORT)).await;
    subject.granted(&released, subject.lease()).await;
    subject.release(&released).await;
    subject.ended("a lease ends by itself", &ended, 0).await;
    for round in ["free", "held by another", "free again"] {
        for hold in [&ended, &released, &never] {
            let reply = subject.renew(hold, subject.lease()).await;
            promise!(
                promise,
                reply == RenewReply::Gone,
                "{mode:?}: a renewal, while the lock is {round}, was answered {reply:?}"
            );
            let reply = subject.poll(hold).await;
            promise!(
                promise,
                reply == PollReply::Gone,
                "{mode:?}: a poll, while the lock is {round}, was answered {reply:?}"
            );
            let next = beside(&hold.key, conflicting(mode));
            match round {
                "free" => _ = subject.granted(&next, subject.at_least(SHORT)).await,
                "held by another" => subject.ended("a lease ends by itself", &next, 0).await,
                _ => subject.assert_unused(promise, hold).await,
            }
        }
    }
}
