//! Each kind of a faulty store is noticed, and the message names the promise that it breaks.

use std::{
    collections::HashMap,
    panic::AssertUnwindSafe,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures_util::FutureExt as _;
use lock_conformance::Model;
use lock_runtime::{
    FencingToken, LockKey,
    operator::Inspection,
    store::{
        AcquireReply, Grant, Hold, Instant, KeyRequest, MemoryStore, Page, Release, ReleaseReply,
        RenewReply, Store, StoreError, Token,
    },
};
use lock_tests::{
    FaultyStore,
    faulty_store::{Call, Operation, Outcome},
};
use tokio::time::sleep;

const FENCES: &str = "fencing tokens of a key are unique and increase";
const AS_MEMORY: &str = "it replies as the in-memory store does";
const HELD_TWICE: &str = "no holder relies on a lock that another one holds";
pub(crate) const LATE: &str = "a request has no effect after its deadline and an abandonment";
const RENEWED: &str = "a renewal makes a lease longer, never shorter";

/// Connects to the same store each time.
macro_rules! make {
    ($store:expr) => {{
        let store: Arc<dyn Store> = $store;
        async move || store.clone()
    }};
}

/// A store with a hook for each call.
fn faulty<F: Future<Output = Outcome> + Send + 'static>(
    hook: impl Fn(Call) -> F + Send + Sync + 'static,
) -> Arc<FaultyStore> {
    FaultyStore::new(Arc::new(MemoryStore::new()), hook)
}

/// Fails unless `test` fails with a message that contains `promise`.
pub(crate) async fn notices(promise: &str, test: impl Future<Output = ()>) {
    let outcome = AssertUnwindSafe(test).catch_unwind().await;
    let panic = outcome.expect_err("the fault was not noticed");
    let message = panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap();
    assert!(
        message.contains(promise),
        "{promise:?} is not in: {message}"
    );
}

/// Each third grant of a key has the token of the one before.
fn repeats_fences() -> Arc<FaultyStore> {
    let latest: Arc<Mutex<HashMap<LockKey, (usize, FencingToken)>>> = Arc::default();
    faulty(move |call| {
        let latest = latest.clone();
        async move {
            let mut outcome = call.execute().await?;
            if let Operation::Acquire(KeyRequest { hold, .. }) = &call.operation
                && let Some(AcquireReply::Granted(grant)) = outcome.downcast_mut()
            {
                let mut latest = latest.lock().unwrap();
                let (count, fence) = latest.entry(hold.key.clone()).or_insert((0, grant.fence));
                *count += 1;
                if *count % 3 == 0 {
                    grant.fence = *fence;
                }
                *fence = grant.fence;
            }
            Ok(outcome)
        }
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fencing_tokens_that_are_repeated_are_noticed() {
    let make = make!(repeats_fences());
    notices(FENCES, lock_conformance::fencing_tokens_increase(&make)).await;
    notices(
        AS_MEMORY,
        lock_conformance::it_answers_as_memory_does(&make),
    )
    .await;
    notices(
        FENCES,
        lock_conformance::contenders_exclude_each_other(&make),
    )
    .await;
}

/// A release leaves the lock to the next call that finds it free.
fn forgets_to_advance() -> Arc<FaultyStore> {
    faulty(|mut call| async move {
        if let Operation::Release(Release {
            keep_for,
            next: None,
            ..
        }) = &mut call.operation
        {
            keep_for.get_or_insert(Duration::from_micros(1));
        }
        call.execute().await
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_that_does_not_advance_the_queue_is_noticed() {
    let make = make!(forgets_to_advance());
    let promise = "a call that frees a lock grants it to the next waiter in the same step";
    notices(
        promise,
        lock_conformance::a_freed_lock_goes_to_the_next_waiter(&make),
    )
    .await;
    notices(
        AS_MEMORY,
        lock_conformance::it_answers_as_memory_does(&make),
    )
    .await;
}

/// Some releases are answered and not executed.
fn loses_releases() -> Arc<FaultyStore> {
    faulty(|call| async move {
        match call.operation {
            Operation::Release(Release { next: None, .. }) if call.nth % 10 == 9 => {
                Ok(Box::new(ReleaseReply::Released) as _)
            }
            _ => call.execute().await,
        }
    })
}

/// Some renewals are answered and not executed.
fn loses_renewals() -> Arc<FaultyStore> {
    faulty(|call| async move {
        match &call.operation {
            Operation::Renew(renewals) if call.nth % 3 == 2 => {
                let renewed = renewals.iter().map(|renewal| {
                    let ttl = renewal.lease;
                    Ok(RenewReply::Renewed { ttl })
                });
                Ok(Box::new(renewed.collect::<Vec<Result<_, StoreError>>>()) as _)
            }
            _ => call.execute().await,
        }
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn releases_and_renewals_that_are_lost_are_noticed() {
    let make = make!(loses_releases());
    notices(
        AS_MEMORY,
        lock_conformance::it_answers_as_memory_does(&make),
    )
    .await;
    // The lock stays with its holder until the end of a long lease.
    let promise = "nothing is left after the last release";
    notices(
        promise,
        lock_conformance::contenders_exclude_each_other(&make),
    )
    .await;
    let make = make!(loses_renewals());
    notices(
        RENEWED,
        lock_conformance::renewals_never_shorten_a_lease(&make),
    )
    .await;
    notices(
        AS_MEMORY,
        lock_conformance::it_answers_as_memory_does(&make),
    )
    .await;
}

/// Ignores the deadline of a request.
fn has_no_deadline() -> Arc<FaultyStore> {
    faulty(|mut call| async move {
        if let Operation::Acquire(request) = &mut call.operation {
            request.deadline += Duration::from_secs(3600);
        }
        call.execute().await
    })
}

/// Executes a request long after its deadline, also if its future is dropped.
fn executes_late() -> Arc<FaultyStore> {
    faulty(|mut call| async move {
        let Operation::Acquire(request) = &mut call.operation else {
            return call.execute().await;
        };
        request.deadline = Instant::now() + Duration::from_secs(3600);
        let execution = tokio::spawn(async move {
            sleep(Duration::from_millis(300)).await;
            call.execute().await
        });
        execution.await.unwrap()
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_is_executed_late_is_noticed() {
    for store in [has_no_deadline(), executes_late()] {
        let make = make!(store);
        notices(
            LATE,
            lock_conformance::abandoned_requests_have_no_effect(&make),
        )
        .await;
    }
}

/// Grants each hundredth request that should be refused or queued.
fn grants_twice() -> Arc<FaultyStore> {
    let refusals = Arc::new(AtomicUsize::new(0));
    faulty(move |call| {
        let refusals = refusals.clone();
        async move {
            let outcome = call.execute().await?;
            let Operation::Acquire(request) = &call.operation else {
                return Ok(outcome);
            };
            let refused = matches!(
                outcome.downcast_ref(),
                Some(AcquireReply::Busy { .. } | AcquireReply::Queued { .. })
            );
            if !refused || refusals.fetch_add(1, Ordering::Relaxed) % 100 != 99 {
                return Ok(outcome);
            }
            call.inner.abandon(&request.hold).await?;
            // Another lock has a fencing token that is larger.
            let key = LockKey::new(lock_tests::unique("other")).unwrap();
            let other = Hold::new(key, request.hold.mode, Token::random());
            let other = KeyRequest::new(other, request.lease, request.deadline);
            let granted: AcquireReply = call.inner.acquire(&other).await?;
            Ok(Box::new(granted))
        }
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_with_two_holders_is_noticed() {
    let make = make!(grants_twice());
    notices(
        AS_MEMORY,
        lock_conformance::it_answers_as_memory_does(&make),
    )
    .await;
    notices(
        HELD_TWICE,
        lock_conformance::contenders_exclude_each_other(&make),
    )
    .await;
}

/// An event may be lost. A store that sends none must say so.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_never_sends_events_is_noticed() {
    let silent = |says_so| FaultyStore::silent(Arc::new(MemoryStore::new()), says_so);
    let make = make!(silent(false));
    let promise = "a store whose limits().push is true sends the grants from its queue";
    notices(
        promise,
        lock_conformance::grants_from_the_queue_are_pushed(&make),
    )
    .await;
    let make = make!(silent(true));
    lock_conformance::holders_exclude_each_other(&make).await;
}

/// Ends a lease after the time of its latest renewal, and says so or conceals it.
fn shortens_leases(conceals: bool) -> Arc<FaultyStore> {
    faulty(move |call| async move {
        let mut outcome = call.execute().await?;
        if let Operation::Renew(renewals) = &call.operation
            && let Some(replies) = outcome.downcast_mut::<Vec<Result<RenewReply, StoreError>>>()
        {
            for (renewal, reply) in renewals.clone().into_iter().zip(replies) {
                if let (Ok(RenewReply::Renewed { ttl }), false) = (reply, conceals) {
                    *ttl = renewal.lease;
                }
                let inner = call.inner.clone();
                tokio::spawn(async move {
                    sleep(renewal.lease).await;
                    inner.abandon(&renewal.hold).await
                });
            }
        }
        Ok(outcome)
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leases_that_a_renewal_shortens_are_noticed() {
    for conceals in [false, true] {
        let make = make!(shortens_leases(conceals));
        notices(
            RENEWED,
            lock_conformance::renewals_never_shorten_a_lease(&make),
        )
        .await;
    }
}

/// Shows one holder, waiter or lock less than there are.
fn conceals_the_last() -> Arc<FaultyStore> {
    faulty(|call| async move {
        let mut outcome = call.execute().await?;
        if let Some(inspection) = outcome.downcast_mut::<Inspection>() {
            inspection.waiters.pop();
            if inspection.holders.len() > 1 {
                inspection.holders.pop();
            }
        }
        if let Some(page) = outcome.downcast_mut::<Page>() {
            page.locks.pop();
        }
        Ok(outcome)
    })
}

/// Shows a lease that is a tenth of the true one.
fn shows_other_leases() -> Arc<FaultyStore> {
    faulty(|call| async move {
        let mut outcome = call.execute().await?;
        if let Some(inspection) = outcome.downcast_mut::<Inspection>() {
            for holder in &mut inspection.holders {
                holder.ttl = holder.ttl.map(|ttl| ttl / 10);
            }
        }
        Ok(outcome)
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn inspections_and_lists_that_lie_are_noticed() {
    let make = make!(conceals_the_last());
    let promise = "an inspection shows the holders of a lock";
    notices(
        promise,
        lock_conformance::inspections_show_holders_and_waiters(&make),
    )
    .await;
    let all = "a list contains every lock that is held";
    notices(all, lock_conformance::lists_contain_every_held_lock(&make)).await;
    notices(AS_MEMORY, Model::new().run(&make)).await;
    let make = make!(shows_other_leases());
    notices(
        promise,
        lock_conformance::inspections_show_holders_and_waiters(&make),
    )
    .await;
    notices(AS_MEMORY, Model::new().run(&make)).await;
}

/// Grants from the queue last for the whole lease.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grants_from_the_queue_that_last_long_are_noticed() {
    let make = make!(faulty(|call| async move {
        let mut outcome = call.execute().await?;
        let hour = Duration::from_secs(3600);
        if let Some(replies) =
            outcome.downcast_mut::<Vec<Result<lock_runtime::store::PollReply, StoreError>>>()
        {
            for reply in replies {
                if let Ok(lock_runtime::store::PollReply::Granted(Grant { ttl, .. })) = reply {
                    *ttl = hour;
                }
            }
        }
        Ok(outcome)
    }));
    let promise = "a grant from the queue ends soon unless it is renewed";
    notices(
        promise,
        lock_conformance::grants_from_the_queue_are_short(&make),
    )
    .await;
}
