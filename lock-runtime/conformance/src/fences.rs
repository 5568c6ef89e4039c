//! Fencing tokens: each grant of a key has a larger one.

use std::sync::Arc;

use lock_runtime::{
    FencingToken, Mode,
    store::{
        AcquireReply, ConvertReply, Grant, Hold, NextHolder, Release, ReleaseReply, Store, Token,
    },
};

use super::subject::{Subject, beside, fresh_hold, in_time, promise, request};

const PROMISE: &str = "fencing tokens of a key are unique and increase";

/// Checks that every grant of a key has a larger fencing token than all earlier ones, in each way
/// in which a lock can be granted, and over several connections.
///
/// # Panics
/// If the store breaks this promise.
pub async fn fencing_tokens_increase(make: &impl AsyncFn() -> Arc<dyn Store>) {
    let subjects = [Subject::of(make).await, Subject::of(make).await];
    in_time(async {
        for mode in subjects[0].modes() {
            acquired_in_turn(&subjects, mode).await;
        }
        granted_in_each_way(&subjects[0]).await;
    })
    .await;
}

/// The latest token of a key.
#[derive(Default)]
struct Latest(u64);

impl Latest {
    fn add(&mut self, grant: Grant) {
        let Self(latest) = *self;
        let (fence, reserved) = (grant.fence.number(), grant.reserved);
        promise!(
            PROMISE,
            fence > latest,
            "{fence} was granted after {latest}"
        );
        self.0 = fence + u64::from(reserved);
    }
}

async fn acquired_in_turn(subjects: &[Subject; 2], mode: Mode) {
    let mut latest = Latest::default();
    let first = fresh_hold(mode);
    for round in 0..10 {
        let subject = &subjects[round % 2];
        let hold = beside(&first.key, mode);
        latest.add(subject.granted(&hold, subject.lease()).await);
        if round % 3 == 0 {
            subject.abandon(&hold).await;
        } else {
            subject.release(&hold).await;
        }
    }
    // Holders at the same time, of those modes that admit them.
    if mode != Mode::Exclusive {
        for subject in subjects {
            let hold = beside(&first.key, mode);
            latest.add(subject.granted(&hold, subject.lease()).await);
        }
    }
}

async fn granted_in_each_way(subject: &Subject) {
    let mut latest = Latest::default();
    let lease = subject.lease();
    let holder = fresh_hold(Mode::Exclusive);
    let reply = subject.reply_to(&request(&holder, lease).reserved(3)).await;
    let AcquireReply::Granted(grant) = reply else {
        panic!("a free lock was answered {reply:?}")
    };
    promise!(
        "a store reserves as many fencing tokens as requested, or none",
        [0, 3].contains(&grant.reserved),
        "3 were requested: {grant:?}"
    );
    latest.add(grant);

    let next = Hold::new(holder.key.clone(), Mode::Exclusive, Token::random());
    let release = Release::new(holder).next(NextHolder::new(next.token, lease, 0));
    match subject.release_as(release).await {
        ReleaseReply::Passed(grant) => latest.add(grant),
        reply => panic!("no other request waits, and the reply is {reply:?}"),
    }
    match subject.store.convert(&next).await.expect("a conversion") {
        ConvertReply::Converted(grant) => latest.add(grant),
        reply => panic!("a writer was not converted: {reply:?}"),
    }
    let shown = subject.inspect(&next).await.fence;
    promise!(
        "an inspection shows the latest fencing token of a held lock",
        shown.map(FencingToken::number) == Some(latest.0),
        "{shown:?} instead of {}",
        latest.0
    );
    let reader = beside(&next.key, Mode::Shared);
    latest.add(subject.granted(&reader, lease).await);
    for hold in [
        &reader,
        &Hold::new(next.key.clone(), Mode::Shared, next.token),
    ] {
        subject.release(hold).await;
    }
    let writer = beside(&next.key, Mode::Exclusive);
    let all = [request(&writer, lease)];
    match subject.store.acquire_all(&all).await.expect("an acquire") {
        lock_runtime::store::AcquireAllReply::Granted(grants) if grants.len() == 1 => {
            latest.add(grants[0])
        }
        reply => panic!("a free lock was answered {reply:?}"),
    }
    if !subject.queues().await {
        return;
    }
    let waiter = subject.waiter(&writer.key, Mode::Exclusive).await;
    subject.release(&writer).await;
    latest.add(
        subject
            .polled("a release grants the lock to the next waiter", &waiter)
            .await,
    );
    subject.release(&waiter).await;
}
