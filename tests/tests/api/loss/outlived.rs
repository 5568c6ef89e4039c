//! A body that ends after its lock was lost: no success, unless the request says so, and never
//! without a warning.

use std::{
    cell::OnceCell,
    fmt::Debug,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use futures_util::FutureExt as _;
use lock_runtime::{
    HeldLock, LockClient, LockError, LockErrorKind, LockKind, LockRequest, Loss, OnLost,
    store::{MemoryStore, ReleaseReply, RevokeScope, StoreError, StoreErrorKind},
};
use lock_tests::{
    Captured, FaultyStore,
    faulty_store::Operation,
    place::{Place, on_every_store},
};
use tokio::{
    runtime,
    task::yield_now,
    time::{advance, sleep},
};

/// Long enough for three requests of a busy machine.
const LEASE: Duration = Duration::from_secs(1);
const SETTINGS: [OnLost; 3] = [OnLost::Cancel, OnLost::Error, OnLost::Ignore];

/// Keeps the thread busy, so that no other task runs on it.
fn block(place: &Place, time: Duration) {
    match place {
        Place::Memory(_) | Place::Majority(_) => {
            // Without its await point behind the step.
            let _ = advance(time).now_or_never();
        }
        Place::Redis { .. }
        | Place::Postgres { .. }
        | Place::Etcd { .. }
        | Place::ZooKeeper { .. } => thread::sleep(time),
    }
}

/// Asserts that the body has ended, and that the error says so. Returns the loss.
fn assert_outlived<T: Debug>(result: Result<T, LockError>) -> Loss {
    let error = result.expect_err("its lock was lost");
    let message = error.to_string();
    assert!(message.contains("the body has ended"), "{message}");
    match error.kind() {
        LockErrorKind::Lost(loss) => loss,
        kind => panic!("{kind:?}: {message}"),
    }
}

on_every_store! {
    a_body_that_ends_after_the_lease_is_no_success,
    a_body_whose_lock_is_gone_at_its_release_is_no_success,
}

async fn a_body_that_ends_after_the_lease_is_no_success(place: Place) {
    let locks = place.client().await;
    let request = |key, on_lost| {
        let request = locks.exclusive(key).lease(LEASE).no_renew();
        request.on_lost(on_lost).acquire()
    };
    let (error, ignore, cancel) = tokio::try_join!(
        request("a", OnLost::Error),
        request("b", OnLost::Ignore),
        request("c", OnLost::Cancel),
    )
    .unwrap();
    let lock = ignore.held();
    let (error, ignore, cancel) = tokio::join!(
        error.run(yield_now()),
        ignore.run(async {
            yield_now().await;
            lock.is_lost()
        }),
        // The last one, so that the others have begun.
        cancel.run(async { block(&place, LEASE) }),
    );
    assert_eq!(assert_outlived(error), Loss::Expired);
    assert!(ignore.unwrap(), "lost, and its output is returned");
    assert_eq!(assert_outlived(cancel), Loss::Expired);
    // The next holder.
    locks
        .exclusive("c")
        .acquire()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
}

async fn a_body_whose_lock_is_gone_at_its_release_is_no_success(place: Place) {
    let locks = place.client().await;
    for on_lost in SETTINGS {
        let request = locks.exclusive("a").on_lost(on_lost);
        let ended = request.run(async |_| revoke_elsewhere(&place)).await;
        match on_lost {
            OnLost::Ignore => ended.unwrap(),
            // The stores in memory report it at once, and the others not before the release.
            _ => {
                let loss = assert_outlived(ended);
                assert!(matches!(loss, Loss::Taken | Loss::Revoked), "{loss:?}");
            }
        }
    }
}

/// Revokes the lock as another process would, before this client can know of it.
fn revoke_elsewhere(place: &Place) {
    thread::scope(|scope| {
        let revoked = scope.spawn(|| {
            let runtime = runtime::Builder::new_current_thread().enable_all().build();
            runtime.unwrap().block_on(async {
                let store = place.store().await;
                let (key, kind) = ("a".parse().unwrap(), LockKind::Lock);
                let revoke = async || store.revoke(&key, kind, RevokeScope::Leased).await;
                // The runtime that waits for this may have been stopped within a transaction.
                let is_blocked = |error: &StoreError| error.kind() == StoreErrorKind::Blocked;
                let mut revoked = revoke().await;
                while revoked.as_ref().is_err_and(is_blocked) {
                    revoked = revoke().await;
                }
                revoked.unwrap();
            });
        });
        revoked.join().unwrap();
    });
}

/// A request in memory, for a body that blocks for longer than the lease.
fn request(locks: &LockClient, on_lost: OnLost) -> LockRequest {
    let request = locks.exclusive("a").name("report").on_lost(on_lost);
    request.lease(LEASE)
}

fn block_for(time: Duration) {
    block(&Place::memory(), time);
}

#[tokio::test(start_paused = true)]
async fn a_warning_names_the_work_and_the_time_since_the_loss() {
    for on_lost in SETTINGS {
        let (traces, fence) = (Captured::new(), OnceCell::new());
        let _collecting = traces.set_default();
        let locks = LockClient::in_memory();
        let body = async |lock: HeldLock| {
            block_for(lock.validity() + Duration::from_secs(3));
            fence.set(lock.fence().to_string()).unwrap();
        };
        // Each with a name of its own, as lines of one name are written as one.
        let name = format!("report {on_lost:?}");
        let ended = request(&locks, on_lost).name(name.clone()).run(body).await;
        assert_eq!(ended.is_ok(), on_lost == OnLost::Ignore);
        let warnings = traces.events();
        let warnings = warnings
            .iter()
            .filter(|event| event.message == "a body has ended after the loss of its lock");
        let [warning] = *warnings.collect::<Vec<_>>() else {
            panic!("not one: {:?}", traces.events())
        };
        let fields = ["name", "key", "fence", "loss", "after"].map(|it| warning.field(it));
        let expected = [&name, "a", fence.get().unwrap(), "Expired", "3s"];
        assert_eq!(fields, expected.map(Some), "{on_lost:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_body_that_may_run_to_its_end_is_not_cancelled() {
    for on_lost in SETTINGS {
        let locks = LockClient::in_memory();
        let reached = AtomicBool::new(false);
        let body = async |_| {
            locks.revoke("a").await.unwrap();
            sleep(LEASE).await;
            reached.store(true, Ordering::Relaxed);
        };
        let ended = request(&locks, on_lost).run(body).await;
        assert_eq!(reached.into_inner(), on_lost != OnLost::Cancel);
        match on_lost {
            OnLost::Ignore => ended.unwrap(),
            OnLost::Error => assert_eq!(assert_outlived(ended), Loss::Revoked),
            _ => {
                let message = ended.unwrap_err().to_string();
                assert!(!message.contains("ended"), "it was dropped: {message}");
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_body_does_not_begin_after_the_loss() {
    for on_lost in SETTINGS {
        let locks = LockClient::in_memory();
        let guard = request(&locks, on_lost).acquire().await.unwrap();
        locks.revoke("a").await.unwrap();
        let error = guard.run(async { panic!("it begins") }).await.unwrap_err();
        assert_eq!(error.kind(), LockErrorKind::Lost(Loss::Revoked));
    }
}

#[tokio::test(start_paused = true)]
async fn a_guard_that_is_kept_is_returned_only_if_the_loss_is_ignored() {
    for on_lost in SETTINGS {
        let locks = LockClient::in_memory();
        let guard = request(&locks, on_lost).acquire().await.unwrap();
        assert_eq!(guard.on_lost(), on_lost);
        let held = guard.while_held(async { block_for(LEASE) }).await;
        match held {
            Ok(((), guard)) => {
                assert_eq!(on_lost, OnLost::Ignore);
                let error = guard.release().await.unwrap_err();
                assert_eq!(error.kind(), LockErrorKind::Lost(Loss::Expired));
            }
            held => drop(assert_outlived(held.map(drop))),
        }
    }
}

/// The setting is that of each request, and not that of the lease.
#[tokio::test(start_paused = true)]
async fn a_request_that_reenters_has_a_setting_of_its_own() {
    let locks = LockClient::in_memory();
    let inner = |on_lost| request(&locks, on_lost).reentrant();
    let outer = request(&locks, OnLost::Ignore).run(async |_| {
        let cancelled = inner(OnLost::Cancel).run(async |_| block_for(LEASE)).await;
        let refused = inner(OnLost::Ignore).run(async |_| ()).await;
        (cancelled, refused)
    });
    let (cancelled, refused) = outer.await.unwrap();
    assert_outlived(cancelled);
    assert!(matches!(
        refused.unwrap_err().kind(),
        LockErrorKind::Lost(_)
    ));
}

/// Of several keys, one that the store no longer held is enough.
#[tokio::test(start_paused = true)]
async fn a_release_without_a_reply_is_no_loss() {
    let store = FaultyStore::new(Arc::new(MemoryStore::new()), |call| async move {
        match &call.operation {
            Operation::Release(release) if release.hold.key.as_str().starts_with("silent") => {
                Err(StoreError::new(StoreErrorKind::Unavailable, "no reply"))
            }
            Operation::Release(release) if release.hold.key.as_str() == "taken" => {
                Ok(Box::new(ReleaseReply::NotHeld) as _)
            }
            _ => call.execute().await,
        }
    });
    let locks = LockClient::with_store(store);
    let ended = locks.exclusive("silent").run(async |_| 7).await;
    assert_eq!(ended.unwrap(), 7);
    let ended = locks.all(["silent too", "taken"]).run(async |_| 7);
    assert_eq!(assert_outlived(ended.await), Loss::Taken);
}
