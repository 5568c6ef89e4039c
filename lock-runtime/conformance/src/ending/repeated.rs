//! Calls that are repeated, or that carry the token of another acquisition.

use std::sync::Arc;

use lock_runtime::{
    Mode,
    store::{
        AcquireAllReply, AcquireReply, ConvertReply, Hold, NextHolder, Release, ReleaseReply,
        Store, Token,
    },
};

use crate::subject::{IMPRECISE, Subject, beside, fresh_hold, in_time, promise, request};

const ONCE: &str = "a call that is repeated does no more than the first one";

/// Checks that a call executed twice does no more than executed once: its reply may have been lost.
///
/// # Panics
/// If the store breaks this promise.
pub async fn repeated_calls_do_nothing_more(make: &impl AsyncFn() -> Arc<dyn Store>) {
    let subject = &Subject::of(make).await;
    in_time(async {
        for mode in subject.modes() {
            acquired_and_released_twice(subject, mode).await;
            reserved_twice(subject, mode).await;
        }
        converted_twice(subject).await;
        passed_twice(subject).await;
    })
    .await;
}

async fn holders(subject: &Subject, hold: &Hold) -> usize {
    subject.inspect(hold).await.holders.len()
}

async fn acquired_and_released_twice(subject: &Subject, mode: Mode) {
    let hold = fresh_hold(mode);
    let first = subject.granted(&hold, subject.lease()).await;
    let reply = subject
        .acquire(
            &hold,
            2 * subject.lease().min(subject.limits.longest_lease / 2),
        )
        .await;
    let AcquireReply::Granted(again) = reply else {
        panic!("{ONCE}: the holder repeats its acquire, and is answered {reply:?}")
    };
    let same = again.fence == first.fence || mode != Mode::Exclusive && again.fence > first.fence;
    promise!(
        ONCE,
        same && again.ttl <= first.ttl + IMPRECISE,
        "{mode:?}: {again:?} after {first:?}"
    );
    let count = holders(subject, &hold).await;
    promise!(
        ONCE,
        count == 1,
        "{mode:?}: {count} holders after a repeated acquire"
    );
    for expected in [ReleaseReply::Released, ReleaseReply::NotHeld] {
        let reply = subject.release(&hold).await;
        promise!(
            ONCE,
            reply == expected,
            "{mode:?}: {reply:?} instead of {expected:?}"
        );
        subject.assert_unused(ONCE, &hold).await;
    }
    for _ in 0..2 {
        subject.abandon(&hold).await;
    }
    subject.assert_unused(ONCE, &hold).await;
}

async fn reserved_twice(subject: &Subject, mode: Mode) {
    let promise = "a released lock stays reserved for its min_hold";
    let kept = subject.held(mode).await;
    let release = Release::new(kept.clone()).keep_for(Some(subject.lease()));
    for _ in 0..2 {
        let reply = subject.release_as(release.clone()).await;
        promise!(
            promise,
            reply == ReleaseReply::Released,
            "{mode:?}: {reply:?}"
        );
        subject.abandon(&kept).await;
        let found = subject.inspect(&kept).await.holders;
        let reserved = matches!(&found[..], [holder] if holder.is_reservation);
        promise!(promise, reserved, "{mode:?}: {found:?}");
    }
    let writer = beside(&kept.key, Mode::Exclusive);
    if mode.kind() == writer.mode.kind() {
        let reply = subject.acquire(&writer, subject.lease()).await;
        let busy = matches!(reply, AcquireReply::Busy { .. });
        promise!(promise, busy, "{mode:?}: {reply:?}");
    }
}

async fn converted_twice(subject: &Subject) {
    let writer = subject.held(Mode::Exclusive).await;
    let reader = Hold::new(writer.key.clone(), Mode::Shared, writer.token);
    for _ in 0..2 {
        let reply = subject.store.convert(&writer).await.expect("a conversion");
        let converted = matches!(reply, ConvertReply::Converted(_));
        promise!(ONCE, converted, "a repeated conversion: {reply:?}");
        let count = holders(subject, &writer).await;
        promise!(ONCE, count == 1, "{count} holders after a conversion");
    }
    let reply = subject.release(&reader).await;
    promise!(
        ONCE,
        reply == ReleaseReply::Released,
        "the reader: {reply:?}"
    );
    subject.assert_unused(ONCE, &writer).await;
    let reply = subject.store.convert(&writer).await.expect("a conversion");
    promise!(
        ONCE,
        reply == ConvertReply::NotHeld,
        "after the release: {reply:?}"
    );
}

async fn passed_twice(subject: &Subject) {
    let holder = subject.held(Mode::Exclusive).await;
    let next = NextHolder::new(Token::random(), subject.lease(), 0);
    let release = Release::new(holder.clone()).next(next);
    let mut fences = Vec::new();
    for _ in 0..2 {
        match subject.release_as(release.clone()).await {
            ReleaseReply::Passed(grant) => fences.push(grant.fence),
            reply => panic!("{ONCE}: the next holder takes the lock, and the reply is {reply:?}"),
        }
    }
    promise!(
        ONCE,
        fences[0] == fences[1],
        "two fencing tokens for one holder: {fences:?}"
    );
    let count = holders(subject, &holder).await;
    promise!(ONCE, count == 1, "{count} holders after a repeated release");
}

/// Checks that only the token of a holder releases its lock.
///
/// # Panics
/// If the store breaks this promise.
pub async fn only_the_holder_releases_its_lock(make: &impl AsyncFn() -> Arc<dyn Store>) {
    let subjects = [Subject::of(make).await, Subject::of(make).await];
    let modes = subjects[0].modes();
    in_time(async {
        for mode in modes {
            only_the_holder(&subjects, mode).await;
        }
    })
    .await;
}

async fn only_the_holder([one, other]: &[Subject; 2], mode: Mode) {
    let promise = "only the token of a holder releases its lock";
    let holder = one.held(mode).await;
    let stranger = beside(&holder.key, mode);
    for release in [
        Release::new(stranger.clone()),
        Release::new(stranger.clone()).keep_for(Some(other.lease())),
        Release::new(stranger.clone()).next(NextHolder::new(stranger.token, other.lease(), 0)),
    ] {
        let reply = other.release_as(release).await;
        promise!(
            promise,
            reply == ReleaseReply::NotHeld,
            "{mode:?}: {reply:?}"
        );
    }
    other.abandon(&stranger).await;
    let reply = other.store.convert(&stranger).await.expect("a conversion");
    promise!(
        promise,
        reply == ConvertReply::NotHeld,
        "{mode:?}: {reply:?}"
    );
    let count = holders(one, &holder).await;
    promise!(promise, count == 1, "{mode:?}: {count} holders");
    // The token alone is enough, over any connection.
    let reply = other.release(&holder).await;
    promise!(
        promise,
        reply == ReleaseReply::Released,
        "{mode:?}: {reply:?}"
    );
    one.assert_unused(promise, &holder).await;
}

/// Checks that of several keys all are acquired or none, and that no request for several keys
/// overtakes a waiter.
// Rule 18.
///
/// # Panics
/// If the store breaks this promise.
pub async fn several_keys_are_acquired_together(make: &impl AsyncFn() -> Arc<dyn Store>) {
    let subject = &Subject::of(make).await;
    in_time(async {
        let keys = subject
            .limits
            .keys_at_once
            .map_or(3, |most| most.get().min(3));
        all_or_none(subject, keys).await;
        if keys > 1 && subject.queues().await {
            none_from_its_waiters(subject).await;
        }
    })
    .await;
}

async fn all_or_none(subject: &Subject, keys: usize) {
    let promise = "of several keys all are acquired or none";
    let mut holds: Vec<_> = (0..keys).map(|_| fresh_hold(Mode::Exclusive)).collect();
    holds.sort_by(|one, other| one.key.cmp(&other.key));
    let requests: Vec<_> = holds
        .iter()
        .map(|hold| request(hold, subject.lease()))
        .collect();
    for taken in &holds {
        let other = beside(&taken.key, Mode::Shared);
        subject.granted(&other, subject.lease()).await;
        let reply = subject
            .store
            .acquire_all(&requests)
            .await
            .expect("an acquire");
        let at = holds.iter().position(|hold| hold == taken);
        let refused = matches!(
            reply,
            AcquireAllReply::Refused { index, reply: AcquireReply::Busy { .. } } if Some(index) == at
        );
        promise!(promise, refused, "key {at:?} of {keys} is held: {reply:?}");
        for hold in holds.iter().filter(|hold| *hold != taken) {
            subject.assert_unused(promise, hold).await;
        }
        subject.release(&other).await;
    }
    let mut first: Option<Vec<_>> = None;
    for _ in 0..2 {
        let reply = subject
            .store
            .acquire_all(&requests)
            .await
            .expect("an acquire");
        let AcquireAllReply::Granted(grants) = reply else {
            panic!("{promise}: all are free, and the reply is {reply:?}")
        };
        let fences: Vec<_> = grants.iter().map(|grant| grant.fence).collect();
        promise!(
            ONCE,
            *first.get_or_insert(fences.clone()) == fences,
            "{fences:?} after {first:?}"
        );
    }
    for hold in &holds {
        promise!(
            promise,
            holders(subject, hold).await == 1,
            "{} has no holder",
            hold.key
        );
        subject.release(hold).await;
        subject.assert_unused(promise, hold).await;
    }
}

async fn none_from_its_waiters(subject: &Subject) {
    let promise = "a request for several keys overtakes no waiter";
    let mut holds = [(); 2].map(|()| fresh_hold(Mode::Exclusive));
    holds.sort_by(|one, other| one.key.cmp(&other.key));
    let [free, wanted] = &holds;
    let holder = beside(&wanted.key, Mode::Shared);
    subject.granted(&holder, subject.lease()).await;
    let waiter = subject.waiter(&wanted.key, Mode::Exclusive).await;
    let reader = beside(&wanted.key, Mode::Shared);
    let requests = [free, &reader].map(|hold| request(hold, subject.lease()).queued());
    let reply = subject
        .store
        .acquire_all(&requests)
        .await
        .expect("an acquire");
    let refused = matches!(
        reply,
        AcquireAllReply::Refused {
            index: 1,
            reply: AcquireReply::Busy { .. }
        }
    );
    promise!(
        promise,
        refused,
        "a reader behind a waiting writer: {reply:?}"
    );
    subject.assert_unused(promise, free).await;
    let waiting = subject.waiting(&holder).await;
    promise!(
        promise,
        waiting.len() == 1,
        "a request for several keys waits: {waiting:?}"
    );
    subject.release(&holder).await;
    subject.polled(promise, &waiter).await;
}
