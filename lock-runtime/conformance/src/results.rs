//! The results that a store keeps for locks that are done.

use std::{sync::Arc, time::Duration};

use lock_runtime::{
    FencingToken, LockClient, LockErrorKind, Mode,
    operator::Holder,
    store::{
        AcquireAllReply, AcquireReply, Done, Grant, Hold, PollReply, Release, ReleaseReply,
        RenewReply, RevokeReply, RevokeScope, Store,
    },
};

use super::{
    intercepted::{Fate, Intercepted},
    subject::{
        LONG, Subject, beside, eventually, fresh_hold, in_time, promise, request, skipped, unique,
    },
};

const KEPT: &str = "a lock that is done keeps its result, and is granted to no request meanwhile";
const BY_HOLDER: &str = "only the holder of a lock leaves a result";
/// Longer than a test.
const KEEP: Duration = Duration::from_secs(600);

/// Checks that a release with a result leaves the lock done: the store returns the result, and
/// refuses all requests, those of waiters included, until the result is forgotten or its time has
/// ended. A token that does not hold the lock leaves none. A store without results is not checked.
///
/// # Panics
/// If the store breaks this promise.
pub async fn results_are_kept(make: &impl AsyncFn() -> Arc<dyn Store>) {
    let subject = &Subject::of(make).await;
    if !subject.limits.results {
        return skipped("results", "limits().results is false");
    }
    in_time(async {
        requests_are_refused(subject).await;
        waiters_are_refused(subject).await;
        results_have_any_content(subject).await;
        others_leave_none(subject).await;
        results_end(subject).await;
        lost_replies_do_no_harm(subject).await;
    })
    .await;
}

impl Subject {
    /// Returns a release that leaves this result.
    fn completing(hold: &Hold, fence: FencingToken, result: &[u8], keep: Duration) -> Release {
        let release = Release::new(hold.clone()).keep_for(Some(keep));
        release.result(Some((fence, result.into())))
    }

    async fn done(&self, hold: &Hold) -> Option<Done> {
        self.store
            .done(&hold.key)
            .await
            .expect("a look at a result")
    }

    async fn completed(&self, hold: &Hold, result: &[u8], keep: Duration) -> Grant {
        let grant = self.granted(hold, self.lease()).await;
        let release = Self::completing(hold, grant.fence, result, keep);
        let reply = self.release_as(release).await;
        promise!(KEPT, reply == ReleaseReply::Released, "{reply:?}");
        grant
    }
}

// Rule 43.
async fn requests_are_refused(subject: &Subject) {
    let hold = fresh_hold(Mode::Exclusive);
    promise!(KEPT, subject.done(&hold).await.is_none(), "a fresh lock");
    let grant = subject.granted(&hold, subject.lease()).await;
    promise!(
        KEPT,
        subject.done(&hold).await.is_none(),
        "a lock that is held"
    );
    let release = Subject::completing(&hold, grant.fence, b"one", KEEP);
    // Its reply may be lost. A later one with another result changes nothing.
    for again in [&b"one"[..], b"one", b"two"] {
        let release = Subject::completing(&hold, grant.fence, again, KEEP);
        let reply = subject.release_as(release).await;
        promise!(KEPT, reply == ReleaseReply::Released, "{reply:?}");
        subject.abandon(&hold).await;
        let done = subject.done(&hold).await;
        let is_kept = |done: &Done| done.value == b"one" && done.fence == grant.fence;
        promise!(KEPT, done.as_ref().is_some_and(is_kept), "{done:?}");
    }
    drop(release);
    let kept = subject.done(&hold).await;
    for mode in [Mode::Exclusive, Mode::Shared] {
        let other = beside(&hold.key, mode);
        for reply in [
            subject.acquire(&other, subject.lease()).await,
            subject.queue_for(&other, subject.lease()).await,
        ] {
            let is_kept =
                matches!(&reply, AcquireReply::Done(done) if Some(&**done) == kept.as_ref());
            promise!(KEPT, is_kept, "{mode:?}: {reply:?}");
        }
        let polled = subject.poll(&other).await;
        let is_kept = matches!(&polled, PollReply::Done(done) if Some(&**done) == kept.as_ref());
        promise!(KEPT, is_kept, "{mode:?}: {polled:?}");
    }
    let mut requests = [hold.clone(), fresh_hold(Mode::Exclusive)]
        .map(|it| request(&beside(&it.key, it.mode), subject.lease()));
    requests.sort_by(|one, other| one.hold.key.cmp(&other.hold.key));
    let place = requests.iter().position(|it| it.hold.key == hold.key);
    let reply = subject.store.acquire_all(&requests).await.expect("a reply");
    let refused = matches!(reply, AcquireAllReply::Refused { index, reply: AcquireReply::Done(_) } if Some(index) == place);
    promise!(KEPT, refused, "{reply:?}");
    let renewed = subject.renew(&hold, subject.lease()).await;
    promise!(KEPT, renewed == RenewReply::Gone, "{renewed:?}");
    let found = subject.inspect(&hold).await;
    let reserved = matches!(
        &found.holders[..],
        [Holder {
            is_reservation: true,
            is_done: true,
            ..
        }]
    );
    promise!(KEPT, reserved && found.waiters.is_empty(), "{found:?}");

    // A reservation alone is no result.
    let reserved = subject.held(Mode::Exclusive).await;
    let release = Release::new(reserved.clone()).keep_for(Some(KEEP));
    subject.release_as(release).await;
    promise!(
        KEPT,
        subject.done(&reserved).await.is_none(),
        "a reservation"
    );
    let other = beside(&reserved.key, Mode::Exclusive);
    let reply = subject.acquire(&other, subject.lease()).await;
    promise!(
        KEPT,
        matches!(reply, AcquireReply::Busy { .. }),
        "{reply:?}"
    );
}

/// Each waiter is refused in its turn, also behind one that polls no more.
async fn waiters_are_refused(subject: &Subject) {
    if !subject.queues().await {
        return;
    }
    let hold = fresh_hold(Mode::Exclusive);
    let grant = subject.granted(&hold, subject.lease()).await;
    let waiters: [Hold; 3] = subject.waiters(&hold.key, Mode::Exclusive).await;
    let release = Subject::completing(&hold, grant.fence, b"done", KEEP);
    let reply = subject.release_as(release).await;
    promise!(KEPT, reply == ReleaseReply::Released, "{reply:?}");
    for waiter in [&waiters[2], &waiters[0], &waiters[1]] {
        let reply = subject.poll(waiter).await;
        let is_kept = matches!(&reply, PollReply::Done(done) if done.value == b"done");
        promise!(KEPT, is_kept, "{reply:?}");
    }
    let waiting = subject.waiting(&hold).await;
    promise!(KEPT, waiting.is_empty(), "{waiting:?}");
}

async fn results_have_any_content(subject: &Subject) {
    let bytes: Vec<u8> = (0..=255).collect();
    for result in [&[][..], b" 1 2 .kept ", &bytes, &vec![b'x'; 64 * 1024]] {
        let hold = fresh_hold(Mode::Exclusive);
        subject.completed(&hold, result, KEEP).await;
        let done = subject.done(&hold).await;
        let found = done.map(|done| done.value);
        let length = found.as_ref().map(Vec::len);
        promise!(
            KEPT,
            found.as_deref() == Some(result),
            "a result of {} bytes has become one of {length:?}",
            result.len()
        );
    }
}

async fn others_leave_none(subject: &Subject) {
    let hold = fresh_hold(Mode::Exclusive);
    let grant = subject.granted(&hold, subject.lease()).await;
    let other = beside(&hold.key, Mode::Exclusive);
    let fence = grant.fence;
    let reply = subject.release_as(Subject::completing(&other, fence, b"x", KEEP));
    promise!(
        BY_HOLDER,
        reply.await == ReleaseReply::NotHeld,
        "another token"
    );
    // It was released, and another one holds the lock, or none.
    subject.release(&hold).await;
    let late = || subject.release_as(Subject::completing(&hold, fence, b"x", KEEP));
    promise!(
        BY_HOLDER,
        late().await == ReleaseReply::NotHeld,
        "a free lock"
    );
    subject.granted(&other, subject.lease()).await;
    promise!(
        BY_HOLDER,
        late().await == ReleaseReply::NotHeld,
        "the next holder's"
    );
    promise!(
        BY_HOLDER,
        subject.done(&hold).await.is_none(),
        "a result is there"
    );
    let renewed = subject.renew(&other, subject.lease()).await;
    let holds = matches!(renewed, RenewReply::Renewed { .. });
    promise!(BY_HOLDER, holds, "the next holder: {renewed:?}");
}

async fn results_end(subject: &Subject) {
    // By their time.
    let hold = fresh_hold(Mode::Exclusive);
    let keep = subject.at_least(Duration::from_millis(300));
    let grant = subject.completed(&hold, b"short", keep).await;
    eventually("a result ends", async || {
        subject.done(&hold).await.is_none()
    })
    .await;
    let next = beside(&hold.key, Mode::Exclusive);
    eventually("a lock is free after its result", async || {
        let reply = subject.acquire(&next, subject.lease()).await;
        matches!(reply, AcquireReply::Granted(next) if next.fence > grant.fence)
    })
    .await;
    // By an operator.
    let hold = fresh_hold(Mode::Exclusive);
    subject.completed(&hold, b"forgotten", KEEP).await;
    let id = subject.done(&hold).await.expect("a result").id;
    let forget = async || {
        let scope = RevokeScope::Holder(id);
        let reply = subject.store.revoke(&hold.key, hold.mode.kind(), scope);
        reply.await.expect("a revocation")
    };
    let reply = forget().await;
    promise!(KEPT, reply == RevokeReply::Revoked, "{reply:?}");
    promise!(
        KEPT,
        subject.done(&hold).await.is_none(),
        "after it was forgotten"
    );
    let next = beside(&hold.key, Mode::Exclusive);
    subject.granted(&next, subject.lease()).await;
    let reply = forget().await;
    promise!(
        KEPT,
        reply == RevokeReply::Changed,
        "a running key: {reply:?}"
    );
}

/// The work of each key runs once, whatever replies and calls are lost.
async fn lost_replies_do_no_harm(subject: &Subject) {
    for lost in [Fate::Unsent, Fate::Unanswered] {
        let pass = Arc::new(
            |event: &_, listener: &Arc<dyn lock_runtime::store::Listener>| {
                listener.on_event(event);
            },
        );
        let calls = std::sync::atomic::AtomicUsize::new(0);
        let decide = move |_: &_| match calls.fetch_add(1, std::sync::atomic::Ordering::Relaxed) {
            0 => lost,
            _ => Fate::Answered,
        };
        let store = subject.store.clone();
        let losing = Subject::over(Intercepted::losing(store, pass, Arc::new(decide)));
        let key = unique();
        let run = async |locks: &LockClient, result: &[u8]| {
            let once = locks.once(&*key).keep(KEEP).wait(LONG);
            let result = result.to_vec();
            once.run_bytes(async move |_| Ok::<_, LockErrorKind>(result))
                .await
        };
        let (first, second) = (losing.client(), subject.client());
        let ran = run(&first, b"first").await.expect("the work is recorded");
        let ran = ran.expect("the body succeeds");
        promise!(KEPT, !ran.is_replay, "{ran:?}");
        let replayed = run(&second, b"second").await.expect("the work is done");
        let replayed = replayed.expect("no body runs");
        let is_first = replayed.is_replay && replayed.value == b"first";
        promise!(
            KEPT,
            is_first && replayed.fence == ran.fence,
            "{replayed:?}"
        );
    }
}
