//! Grants from the wait queue: how long they last, which waiters get them, and how they are sent.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use lock_runtime::{
    Mode,
    operator::Waiter,
    store::{Grant, Hold, Listener, PollReply, Store, StoreEvent},
    time::{Instant, sleep_until, timeout_at},
};
use tokio::{sync::mpsc, time::sleep};

use crate::{
    Lateness,
    subject::{IMPRECISE, Subject, beside, eventually, fresh_hold, in_time, promise, skipped},
};

const SKIPPED: &str = "a silent waiter is skipped, and served again when it polls";
const REMOVED: &str = "a waiter that is silent for long is removed";
const SHORT: &str = "a grant from the queue ends soon unless it is renewed";
/// The time by which a store may be late.
const LATE: Duration = Duration::from_millis(500);
/// The number of grants of which one must be sent.
const ROUNDS: u32 = 6;

/// Checks that a grant from the wait queue lasts for [`Grant::HANDOFF_LEASE`] at most, or for a
/// shorter lease that was requested, and ends by itself.
///
/// # Panics
/// If the store breaks this promise.
pub async fn grants_from_the_queue_are_short(make: &impl AsyncFn() -> Arc<dyn Store>) {
    let subject = &Subject::of(make).await;
    in_time(async {
        if !subject.queues().await {
            return;
        }
        let short = subject.at_least(Grant::HANDOFF_LEASE / 6);
        tokio::join!(
            granted_for(subject, subject.lease()),
            granted_for(subject, short),
        );
    })
    .await;
}

async fn granted_for(subject: &Subject, lease: Duration) {
    let longest = lease.min(subject.at_least(Grant::HANDOFF_LEASE));
    let holder = subject.held(Mode::Exclusive).await;
    let waiter = beside(&holder.key, Mode::Exclusive);
    subject.queue_for(&waiter, lease).await;
    subject.release(&holder).await;
    let (since, late) = (Instant::now(), Lateness::start());
    let promise = "a release grants the lock to the next waiter";
    let grant = subject.polled(promise, &waiter).await;
    promise!(
        SHORT,
        grant.ttl <= longest + IMPRECISE && late.allows(grant.ttl + LATE) > longest,
        "{:?} instead of {longest:?}",
        grant.ttl
    );
    // Polls do not extend it.
    while matches!(subject.poll(&waiter).await, PollReply::Granted(_)) {
        promise!(
            SHORT,
            since.elapsed() < late.allows(longest + LATE),
            "it lasts for {:?}",
            since.elapsed()
        );
        sleep(longest / 20).await;
    }
    subject.assert_unused(SHORT, &waiter).await;
}

/// Checks that a waiter that has been silent for [`Waiter::STALE_AFTER`] is skipped, that it keeps
/// its place if it polls again, and that it is removed after [`Waiter::TTL`].
///
/// This test takes as long as the store remembers a waiter: 10 s by the store's clock.
///
/// # Panics
/// If the store breaks this promise.
pub async fn a_silent_waiter_is_skipped_and_later_removed(make: &impl AsyncFn() -> Arc<dyn Store>) {
    let subject = &Subject::of(make).await;
    in_time(async {
        if subject.queues().await {
            tokio::join!(
                served_before_it_is_stale(subject),
                skipped_while_silent(subject),
                removed_when_silent_for_long(subject),
            );
        }
    })
    .await;
}

async fn served_before_it_is_stale(subject: &Subject) {
    let holder = subject.held(Mode::Exclusive).await;
    let [first, second] = subject.waiters(&holder.key, Mode::Exclusive).await;
    sleep(Waiter::STALE_AFTER / 2).await;
    subject.release(&holder).await;
    let promise = "a waiter is not skipped while it polls often enough";
    subject.polled(promise, &first).await;
    promise!(
        promise,
        subject.is_queued(&second).await,
        "the second waiter"
    );
}

/// Waits, while `live` polls as a client does.
async fn polling(subject: &Subject, live: &Hold, until: Instant) {
    while Instant::now() < until {
        let waits = subject.is_queued(live).await;
        promise!("a waiter that polls keeps its place", waits, "{live:?}");
        sleep_until(until.min(Instant::now() + Waiter::POLL_INTERVAL)).await;
    }
}

async fn skipped_while_silent(subject: &Subject) {
    let holder = subject.held(Mode::Exclusive).await;
    let [silent, live] = subject.waiters(&holder.key, Mode::Exclusive).await;
    polling(subject, &live, Instant::now() + Waiter::STALE_AFTER + LATE).await;
    subject.release(&holder).await;
    subject.polled(SKIPPED, &live).await;
    let waits = subject.is_queued(&silent).await;
    promise!(SKIPPED, waits, "it polls again, and waits no more");
    subject.release(&live).await;
    subject.polled(SKIPPED, &silent).await;
    subject.release(&silent).await;
    subject
        .assert_unused("nothing is left after the last release", &silent)
        .await;
}

async fn removed_when_silent_for_long(subject: &Subject) {
    let holder = fresh_hold(Mode::Exclusive);
    let lease = subject
        .at_least(2 * Waiter::TTL)
        .min(subject.limits.longest_lease);
    subject.granted(&holder, lease).await;
    let silent = subject.waiter(&holder.key, Mode::Exclusive).await;
    let since = Instant::now();
    // A store's clock may run slow.
    sleep(2 * Waiter::STALE_AFTER).await;
    subject.release(&holder).await;
    // With no other waiter, a newcomer need not wait.
    let newcomer = beside(&holder.key, Mode::Exclusive);
    subject.granted(&newcomer, lease).await;
    sleep_until(since + Waiter::TTL).await;
    // A poll would make the waiter new again.
    eventually(REMOVED, async || subject.waiting(&holder).await.is_empty()).await;
    let reply = subject.poll(&silent).await;
    promise!(
        REMOVED,
        reply == PollReply::Gone,
        "{reply:?} after {:?}",
        since.elapsed()
    );
    subject.release(&newcomer).await;
    subject.assert_unused(REMOVED, &newcomer).await;
}

/// Receives the grants that a store sends.
struct Receiver(mpsc::UnboundedSender<(Hold, Grant)>);

impl Listener for Receiver {
    fn on_event(&self, event: &StoreEvent) {
        if let StoreEvent::Granted { hold, grant, .. } = event {
            // The test may have ended.
            let _ = self.0.send((hold.clone(), *grant));
        }
    }
}

/// Checks that a store with [`push`](lock_runtime::store::Limits::push) sends the grants from its
/// wait queue to the connection of their waiters. One event of several is enough: any may be lost.
///
/// # Panics
/// If the store breaks this promise.
pub async fn grants_from_the_queue_are_pushed(make: &impl AsyncFn() -> Arc<dyn Store>) {
    let (holders, waiters) = (&Subject::of(make).await, &Subject::of(make).await);
    if !holders.limits.push {
        return skipped("pushed grants", "limits().push is false");
    }
    in_time(async {
        if holders.queues().await {
            pushed(holders, waiters).await;
        }
    })
    .await;
}

async fn pushed(holders: &Subject, waiters: &Subject) {
    let (sender, mut grants) = mpsc::unbounded_channel();
    let receiver = Arc::new(Receiver(sender));
    let weak: Weak<Receiver> = Arc::downgrade(&receiver);
    waiters.store.listen(weak);
    for round in 0..ROUNDS {
        let holder = holders.held(Mode::Exclusive).await;
        let waiter = waiters.waiter(&holder.key, Mode::Exclusive).await;
        // A store may subscribe to the events of a lock when a request is queued.
        sleep(Grant::HANDOFF_LEASE / 20 * round).await;
        holders.release(&holder).await;
        let until = Instant::now() + Grant::HANDOFF_LEASE / 6;
        while let Ok(Some((hold, pushed))) = timeout_at(until, grants.recv()).await {
            if hold == waiter {
                return is_of(waiters, &waiter, pushed).await;
            }
        }
    }
    promise!(
        "a store whose limits().push is true sends the grants from its queue",
        false,
        "no event followed any of {ROUNDS} releases with a waiter"
    );
}

/// Fails unless the event shows the grant of its waiter.
async fn is_of(subject: &Subject, waiter: &Hold, pushed: Grant) {
    let promise = "an event shows the grant of its waiter";
    let found = subject.polled(promise, waiter).await;
    let last = pushed.fence.number() + u64::from(pushed.reserved);
    promise!(
        promise,
        [pushed.fence.number(), last].contains(&found.fence.number())
            && pushed.ttl <= Grant::HANDOFF_LEASE,
        "{pushed:?} was sent, and {found:?} is held"
    );
}
