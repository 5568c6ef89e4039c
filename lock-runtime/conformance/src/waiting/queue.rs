//! The wait queue of a store: its order, and the calls that advance it.

use std::{sync::Arc, time::Duration};

use futures_util::future::join_all;
use lock_runtime::{
    Mode,
    store::{
        AcquireAllReply, AcquireReply, Hold, NextHolder, PollReply, Release, ReleaseReply,
        RenewReply, RevokeReply, RevokeScope, Store, Token,
    },
};

use crate::subject::{
    Subject, TWO_PERMITS, beside, conflicting, fresh_hold, in_time, promise, request,
};

const IN_ORDER: &str = "waiters are served in order of arrival";
const ADVANCED: &str = "a call that frees a lock grants it to the next waiter in the same step";

/// Checks that waiters are granted a lock in order of arrival, over two connections: one after the
/// other, readers together, and a reader behind a waiting writer.
///
/// # Panics
/// If the store breaks this promise.
pub async fn waiters_are_served_in_order(make: &impl AsyncFn() -> Arc<dyn Store>) {
    let subjects = &[Subject::of(make).await, Subject::of(make).await];
    in_time(async {
        if !subjects[0].queues().await {
            return;
        }
        for mode in subjects[0].modes() {
            one_after_the_other(subjects, conflicting(mode)).await;
        }
        readers_together(&subjects[0]).await;
        readers_behind_a_writer(&subjects[1]).await;
        repeated_requests_keep_their_entries(&subjects[0]).await;
        polls_never_queue(&subjects[0]).await;
    })
    .await;
}

async fn one_after_the_other(subjects: &[Subject; 2], mode: Mode) {
    let one = &subjects[0];
    let holder = one.held(mode).await;
    if mode == TWO_PERMITS {
        one.granted(&beside(&holder.key, mode), one.lease()).await;
    }
    let (mut last, mut waiters) = (holder, Vec::new());
    for number in 0..6 {
        waiters.push(subjects[number % 2].waiter(&last.key, mode).await);
    }
    promise!(
        "an inspection shows all waiters",
        one.waiting(&last).await == [mode; 6],
        "{:?}",
        one.inspect(&last).await
    );
    let mut fence = None;
    for (number, waiter) in waiters.iter().enumerate() {
        let subject = &subjects[number % 2];
        let reply = one.release(&last).await;
        promise!(IN_ORDER, reply == ReleaseReply::Released, "{reply:?}");
        for later in &waiters[number + 1..] {
            let waits = one.is_queued(later).await;
            promise!(
                IN_ORDER,
                waits,
                "{mode:?}: waiter {number} of 6 was overtaken"
            );
        }
        let grant = subject.polled(IN_ORDER, waiter).await;
        promise!(
            "fencing tokens of a key are unique and increase",
            Some(grant.fence) > fence,
            "{:?} was granted after {fence:?}",
            grant.fence
        );
        fence = Some(grant.fence);
        let reply = subject.renew(waiter, subject.lease()).await;
        let renewed = matches!(reply, RenewReply::Renewed { .. });
        promise!(
            "a grant from the queue can be renewed",
            renewed,
            "{reply:?}"
        );
        last = waiter.clone();
    }
    one.release(&last).await;
    if mode == Mode::Exclusive {
        one.assert_unused("nothing is left after the last release", &last)
            .await;
    }
}

async fn readers_together(subject: &Subject) {
    let writer = subject.held(Mode::Exclusive).await;
    let [first, second] = subject.waiters(&writer.key, Mode::Shared).await;
    let next_writer = subject.waiter(&writer.key, Mode::Exclusive).await;
    let third = subject.waiter(&writer.key, Mode::Shared).await;
    subject.release(&writer).await;
    for reader in [&first, &second] {
        subject
            .polled(
                "readers at the front of the queue are admitted together",
                reader,
            )
            .await;
    }
    let waiting = subject.waiting(&writer).await;
    promise!(
        IN_ORDER,
        waiting == [Mode::Exclusive, Mode::Shared],
        "a writer and a reader behind it wait: {waiting:?}"
    );
    subject.release(&first).await;
    for waiter in [&next_writer, &third] {
        let waits = subject.is_queued(waiter).await;
        promise!(IN_ORDER, waits, "{waiter:?} while a reader holds the lock");
    }
    subject.release(&second).await;
    subject.polled(IN_ORDER, &next_writer).await;
    promise!(
        IN_ORDER,
        subject.is_queued(&third).await,
        "a reader beside a writer"
    );
    subject.release(&next_writer).await;
    subject.polled(IN_ORDER, &third).await;
    subject.release(&third).await;
    subject
        .assert_unused("nothing is left after the last release", &third)
        .await;
}

async fn readers_behind_a_writer(subject: &Subject) {
    let reader = subject.held(Mode::Shared).await;
    let writer = subject.waiter(&reader.key, Mode::Exclusive).await;
    let late = subject.waiter(&reader.key, Mode::Shared).await;
    let reply = subject
        .acquire(&beside(&reader.key, Mode::Shared), subject.lease())
        .await;
    let busy = matches!(
        reply,
        AcquireReply::Busy {
            has_waiters: true,
            ..
        }
    );
    promise!(IN_ORDER, busy, "a reader while a writer waits: {reply:?}");
    subject.release(&reader).await;
    subject.polled(IN_ORDER, &writer).await;
    subject.release(&writer).await;
    subject.polled(IN_ORDER, &late).await;
}

async fn repeated_requests_keep_their_entries(subject: &Subject) {
    let holder = subject.held(Mode::Exclusive).await;
    let [first, second] = subject.waiters(&holder.key, Mode::Exclusive).await;
    let reply = subject.queue_for(&first, subject.lease()).await;
    let queued = matches!(reply, AcquireReply::Queued { .. });
    let waiting = subject.waiting(&holder).await.len();
    promise!(
        "a repeated request keeps its queue entry",
        queued && waiting == 2,
        "{reply:?}, and {waiting} instead of 2 entries"
    );
    subject.release(&holder).await;
    subject.polled(IN_ORDER, &first).await;
    let reply = subject.queue_for(&first, subject.lease()).await;
    let granted = matches!(reply, AcquireReply::Granted(_));
    promise!(
        "a repeated request finds its own grant",
        granted,
        "{reply:?}"
    );
    promise!(IN_ORDER, subject.is_queued(&second).await, "two holders");
    subject.release(&first).await;
    subject.polled(IN_ORDER, &second).await;
}

async fn polls_never_queue(subject: &Subject) {
    let promise = "a poll never queues a request, and never acquires a lock";
    for mode in subject.modes() {
        let hold = fresh_hold(mode);
        let reply = subject.poll(&hold).await;
        promise!(promise, reply == PollReply::Gone, "{mode:?}: {reply:?}");
        subject.assert_unused(promise, &hold).await;
    }
    let holder = subject.held(Mode::Exclusive).await;
    let stranger = beside(&holder.key, Mode::Exclusive);
    let reply = subject.poll(&stranger).await;
    let waiting = subject.waiting(&holder).await;
    promise!(
        promise,
        reply == PollReply::Gone && waiting.is_empty(),
        "{reply:?}, and these wait: {waiting:?}"
    );
}

/// A call that frees a lock, or that finds it free.
#[derive(Clone, Copy, Debug)]
enum Frees {
    Release,
    ReleaseToNext,
    Abandon,
    Revoke,
    Convert,
    AcquireAfterTheLease,
    AcquireAllAfterTheLease,
    PollAfterTheLease,
}

/// Checks that each call that frees a lock, or finds it free after a lease has ended, grants it to
/// the next waiter in the same step.
///
/// # Panics
/// If the store breaks this promise.
pub async fn a_freed_lock_goes_to_the_next_waiter(make: &impl AsyncFn() -> Arc<dyn Store>) {
    use Frees::{
        Abandon, AcquireAfterTheLease, AcquireAllAfterTheLease, Convert, PollAfterTheLease,
        Release, ReleaseToNext, Revoke,
    };
    let subject = &Subject::of(make).await;
    in_time(async {
        if !subject.queues().await {
            return;
        }
        let ways = [
            Release,
            ReleaseToNext,
            Abandon,
            Revoke,
            Convert,
            AcquireAfterTheLease,
            AcquireAllAfterTheLease,
            PollAfterTheLease,
        ];
        join_all(ways.map(|way| freed(subject, way))).await;
    })
    .await;
}

async fn freed(subject: &Subject, way: Frees) {
    let holder = fresh_hold(Mode::Exclusive);
    let ends = matches!(
        way,
        Frees::AcquireAfterTheLease | Frees::AcquireAllAfterTheLease | Frees::PollAfterTheLease
    );
    // Long enough for two requests of waiters.
    let lease = if ends {
        subject.at_least(Duration::from_secs(1))
    } else {
        subject.lease()
    };
    subject.granted(&holder, lease).await;
    let mode = if matches!(way, Frees::Convert) {
        Mode::Shared
    } else {
        Mode::Exclusive
    };
    let [first, second] = subject.waiters(&holder.key, mode).await;
    if ends {
        subject.ended("a lease ends by itself", &holder, 0).await;
    }
    free(subject, way, &holder, &second).await;
    // An inspection advances no queue.
    let found = subject.inspect(&holder).await;
    let (holders, waiters) = match way {
        Frees::Convert => (3, 0),
        Frees::ReleaseToNext => (1, 2),
        _ => (1, 1),
    };
    promise!(
        ADVANCED,
        (found.holders.len(), found.waiters.len()) == (holders, waiters),
        "{way:?}: {holders} holders and {waiters} waiters were expected: {found:?}"
    );
    subject.polled(ADVANCED, &first).await;
    if !matches!(way, Frees::Convert) {
        promise!(
            ADVANCED,
            subject.is_queued(&second).await,
            "{way:?}: the second waiter"
        );
    }
}

async fn free(subject: &Subject, way: Frees, holder: &Hold, second: &Hold) {
    let newcomer = beside(&holder.key, Mode::Exclusive);
    match way {
        Frees::Release => _ = subject.release(holder).await,
        Frees::ReleaseToNext => {
            let next = NextHolder::new(Token::random(), subject.lease(), 0);
            let reply = subject
                .release_as(Release::new(holder.clone()).next(next))
                .await;
            let queued = matches!(reply, ReleaseReply::Queued { .. });
            promise!("a next holder waits behind the queue", queued, "{reply:?}");
        }
        Frees::Abandon => subject.abandon(holder).await,
        Frees::Revoke => {
            let kind = holder.mode.kind();
            let reply = subject
                .store
                .revoke(&holder.key, kind, RevokeScope::Leased)
                .await;
            let reply = reply.expect("a revocation");
            promise!(
                "a revocation takes the lock away",
                reply == RevokeReply::Revoked,
                "{reply:?}"
            );
        }
        Frees::Convert => _ = subject.store.convert(holder).await.expect("a conversion"),
        Frees::AcquireAfterTheLease => {
            let reply = subject.acquire(&newcomer, subject.lease()).await;
            let busy = matches!(reply, AcquireReply::Busy { .. });
            promise!(IN_ORDER, busy, "a newcomer while two wait: {reply:?}");
        }
        Frees::AcquireAllAfterTheLease => {
            let requests = [request(&newcomer, subject.lease())];
            let reply = subject
                .store
                .acquire_all(&requests)
                .await
                .expect("an acquire");
            let busy = AcquireReply::Busy {
                holder_ttl: None,
                has_waiters: true,
            };
            let refused = matches!(&reply, AcquireAllReply::Refused { index: 0, reply }
                if std::mem::discriminant(reply) == std::mem::discriminant(&busy));
            promise!(IN_ORDER, refused, "a newcomer while two wait: {reply:?}");
        }
        Frees::PollAfterTheLease => _ = subject.is_queued(second).await,
    }
}
