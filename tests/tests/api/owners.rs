//! Ownership of locks: it follows a future, never a thread.

use std::{num::NonZeroU32, time::Duration};

use lock_runtime::{LockClient, LockError, LockErrorKind, LockKey, distributed_lock, is_held};
use tokio::task::yield_now;

use lock_tests::place::{LONG, Place, all_free, begun, in_vain, on_every_store};

on_every_store! {
    a_reentrant_request_enters_again_across_awaits,
    entering_again_asks_the_store_nothing_and_has_the_same_token,
    an_inner_guard_outlives_the_outer_one,
    a_released_inner_guard_leaves_the_outer_one_held,
    a_request_that_is_not_reentrant_would_deadlock,
    writing_under_ones_own_read_would_deadlock,
    reading_under_ones_own_read_needs_to_be_reentrant,
    reading_under_ones_own_write_enters_again,
    siblings_contend_like_strangers,
    a_spawned_task_inherits_nothing,
    a_bare_acquire_opens_no_frame,
    a_closure_runs_in_its_frame_from_its_first_line_on,
    a_guards_scope_is_a_frame,
    is_held_knows_the_frames_around_it,
    two_clients_are_strangers,
    a_scope_whose_guard_was_released_is_no_frame,
    entering_again_after_a_loss_tells_of_it,
    locked_functions_call_each_other,
    several_keys_enter_what_is_held_and_take_the_rest,
    ; with permits:
    another_number_of_permits_within_a_scope_is_refused,
}

async fn a_reentrant_request_enters_again_across_awaits(place: Place) {
    let (locks, others) = (place.client().await, place.client().await);
    let depth = locks
        .reentrant("a")
        .run(|_| async {
            yield_now().await;
            locks
                .reentrant("a")
                .run(|_| async {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                    assert!(others.exclusive("a").try_acquire().await.unwrap().is_none());
                    locks.reentrant("a").run(async |_| 3).await.unwrap()
                })
                .await
                .unwrap()
        })
        .await
        .unwrap();
    assert_eq!(depth, 3);
    others
        .exclusive("a")
        .try_acquire()
        .await
        .unwrap()
        .expect("all have left")
        .release()
        .await
        .unwrap();
}

async fn entering_again_asks_the_store_nothing_and_has_the_same_token(place: Place) {
    let (locks, others) = (place.client().await, place.client().await);
    let guard = locks.exclusive("a").acquire().await.unwrap();
    guard
        .scope(async {
            // Even when the store would reply otherwise.
            others.revoke("a").await.unwrap();
            if !guard.is_lost() {
                let again = locks.reentrant("a").acquire().await.unwrap();
                assert_eq!(again.fence(), guard.fence());
                let _ = again.release().await;
            }
        })
        .await;
    let _ = guard.release().await;
}

async fn an_inner_guard_outlives_the_outer_one(place: Place) {
    let (locks, others) = (place.client().await, place.client().await);
    let outer = locks.exclusive("a").acquire().await.unwrap();
    let inner = outer.scope(locks.reentrant("a").acquire()).await.unwrap();
    outer.release().await.unwrap();
    inner.verify().await.unwrap();
    assert!(!inner.is_lost() && !inner.validity().is_zero());
    assert!(others.exclusive("a").try_acquire().await.unwrap().is_none());
    inner.release().await.unwrap();
    others
        .exclusive("a")
        .try_acquire()
        .await
        .unwrap()
        .expect("the last has left")
        .release()
        .await
        .unwrap();
}

async fn a_released_inner_guard_leaves_the_outer_one_held(place: Place) {
    let (locks, others) = (place.client().await, place.client().await);
    let outer = locks.exclusive("a").acquire().await.unwrap();
    for drops in [false, true] {
        let inner = outer.scope(locks.reentrant("a").acquire()).await.unwrap();
        if drops {
            drop(inner)
        } else {
            inner.release().await.unwrap()
        }
        yield_now().await;
        assert!(others.exclusive("a").try_acquire().await.unwrap().is_none());
        outer.verify().await.unwrap();
    }
    outer.release().await.unwrap();
    others
        .exclusive("a")
        .try_acquire()
        .await
        .unwrap()
        .expect("released")
        .release()
        .await
        .unwrap();
}

async fn a_request_that_is_not_reentrant_would_deadlock(place: Place) {
    let locks = place.client().await;
    locks
        .exclusive("a")
        .run(async |_| {
            let would = [
                locks.exclusive("a").wait(LONG),
                locks.exclusive("a").no_wait(),
                locks.shared("a").wait(LONG),
                locks.all(["b", "a"]).wait(LONG),
            ];
            for request in would {
                let error = request.acquire().await.unwrap_err();
                assert_eq!(error.kind(), LockErrorKind::WouldDeadlock);
                assert_eq!(error.key().unwrap().as_str(), "a");
                assert!(error.to_string().contains("reentrant"), "{error}");
            }
            all_free(&locks, &["b"]).await;
            locks.exclusive("b").run(async |_| ()).await.unwrap();
        })
        .await
        .unwrap();
}

async fn writing_under_ones_own_read_would_deadlock(place: Place) {
    let locks = place.client().await;
    let body = async |_| {
        for request in [
            locks.exclusive("a").wait(LONG),
            locks.reentrant("a").wait(LONG),
        ] {
            let error = request.acquire().await.unwrap_err();
            assert_eq!(error.kind(), LockErrorKind::WouldDeadlock);
        }
        locks
            .shared("a")
            .reentrant()
            .run(async |_| ())
            .await
            .unwrap();
    };
    locks.shared("a").run(body).await.unwrap();
}

/// A writer may wait between the two, and the second would wait behind it.
async fn reading_under_ones_own_read_needs_to_be_reentrant(place: Place) {
    let (locks, others) = (place.client().await, place.client().await);
    let body = async |_| {
        for request in [locks.shared("a").wait(LONG), locks.shared("a").no_wait()] {
            let error = request.acquire().await.unwrap_err();
            assert_eq!(error.kind(), LockErrorKind::WouldDeadlock);
        }
        let writing = begun(others.exclusive("a").wait(LONG).acquire()).await;
        locks
            .shared("a")
            .reentrant()
            .run(async |_| ())
            .await
            .unwrap();
        drop(writing);
    };
    locks.shared("a").run(body).await.unwrap();
}

async fn reading_under_ones_own_write_enters_again(place: Place) {
    let (locks, others) = (place.client().await, place.client().await);
    let body = async |_| {
        let reader = locks.shared("a").reentrant().acquire().await.unwrap();
        assert!(
            others.shared("a").try_acquire().await.unwrap().is_none(),
            "it is still the writer's"
        );
        reader.release().await.unwrap();
    };
    locks.exclusive("a").run(body).await.unwrap();
}

async fn another_number_of_permits_within_a_scope_is_refused(place: Place) {
    let locks = place.client().await;
    let permits = |count| {
        locks
            .permits("a", NonZeroU32::new(count).unwrap())
            .reentrant()
    };
    let body = async |_| {
        assert_eq!(
            permits(3).acquire().await.unwrap_err().kind(),
            LockErrorKind::ModeMismatch
        );
        permits(2).acquire().await.unwrap().release().await.unwrap();
        assert_eq!(
            locks.inspect("a").permits().await.unwrap().holders.len(),
            1,
            "entered again, not one more"
        );
        locks
            .exclusive("a")
            .run(async |_| ())
            .await
            .expect("another object");
    };
    permits(2).run(body).await.unwrap();
}

async fn siblings_contend_like_strangers(place: Place) {
    let locks = place.client().await;
    let body = async || {
        let guard = locks.reentrant("a").wait(LONG).acquire().await.unwrap();
        let contended = guard.scope(async {
            yield_now().await;
            locks.inspect("a").await.unwrap().holders.len()
        });
        assert_eq!(contended.await, 1);
        let fence = guard.fence();
        guard.release().await.unwrap();
        fence
    };
    let (left, right) = tokio::join!(body(), body());
    assert_ne!(left, right, "each had a grant of its own");

    // Within a frame of another lock as well.
    let (left, right) = locks
        .exclusive("b")
        .run(async |_| tokio::join!(body(), body()))
        .await
        .unwrap();
    assert_ne!(left, right);
    let held = locks.exclusive("a").acquire().await.unwrap();
    let error = tokio::select! {
        () = held.scope(std::future::pending()) => unreachable!(),
        error = in_vain(locks.reentrant("a")) => error,
    };
    assert_eq!(error.kind(), LockErrorKind::WaitTimeout);
    held.release().await.unwrap();
}

async fn a_spawned_task_inherits_nothing(place: Place) {
    let locks = place.client().await;
    let inner = locks.clone();
    let body = async |_| {
        let task = async move {
            assert!(!is_held(&LockKey::new("a").unwrap()));
            in_vain(inner.reentrant("a")).await.kind()
        };
        assert_eq!(
            tokio::spawn(task).await.unwrap(),
            LockErrorKind::WaitTimeout
        );
    };
    locks.reentrant("a").run(body).await.unwrap();
}

async fn a_bare_acquire_opens_no_frame(place: Place) {
    let locks = place.client().await;
    let guard = locks.reentrant("a").acquire().await.unwrap();
    assert!(!is_held(guard.key()));
    assert_eq!(
        in_vain(locks.reentrant("a")).await.kind(),
        LockErrorKind::WaitTimeout
    );
    assert!(locks.reentrant("a").try_acquire().await.unwrap().is_none());
    guard.release().await.unwrap();
}

async fn a_closure_runs_in_its_frame_from_its_first_line_on(place: Place) {
    let locks = place.client().await;
    let begun = locks.exclusive("a").run(|held| {
        let is_in_its_frame = is_held(held.key());
        async move { is_in_its_frame }
    });
    assert!(begun.await.unwrap());
}

async fn a_guards_scope_is_a_frame(place: Place) {
    let locks = place.client().await;
    let guard = locks.exclusive("a").acquire().await.unwrap();
    let again = guard
        .scope(async {
            assert!(is_held(guard.key()));
            yield_now().await;
            let error = locks.exclusive("a").acquire().await.unwrap_err();
            assert_eq!(error.kind(), LockErrorKind::WouldDeadlock);
            locks.reentrant("a").acquire().await.unwrap()
        })
        .await;
    assert!(!is_held(guard.key()), "the frame ends with the scope");
    again.release().await.unwrap();
    guard.release().await.unwrap();
}

async fn is_held_knows_the_frames_around_it(place: Place) {
    let locks = place.client().await;
    let (a, b) = (LockKey::new("a").unwrap(), LockKey::new("b").unwrap());
    assert!(!is_held(&a));
    let body = async |_| {
        assert!(is_held(&a) && !is_held(&b));
        locks
            .exclusive("b")
            .run(async |_| assert!(is_held(&a) && is_held(&b)))
            .await
            .unwrap();
        assert!(is_held(&a) && !is_held(&b));
        locks.revoke("a").await.unwrap();
        assert!(!is_held(&a), "a lost lock is not held");
    };
    let _ = locks.exclusive("a").run(body).await;
    assert!(!is_held(&a));
}

async fn two_clients_are_strangers(place: Place) {
    let (locks, others) = (place.client().await, place.client().await);
    let body = async |_| in_vain(others.reentrant("a")).await.kind();
    assert_eq!(
        locks.reentrant("a").run(body).await.unwrap(),
        LockErrorKind::WaitTimeout
    );
}

async fn a_scope_whose_guard_was_released_is_no_frame(place: Place) {
    let locks = place.client().await;
    let guard = locks.exclusive("a").acquire().await.unwrap();
    let scope = guard.scope(async {
        yield_now().await;
        assert!(!is_held(&LockKey::new("a").unwrap()));
        locks.exclusive("a").acquire().await.unwrap()
    });
    let scope = begun(scope).await;
    guard.release().await.unwrap();
    scope.await.release().await.unwrap();
}

async fn entering_again_after_a_loss_tells_of_it(place: Place) {
    let locks = place.client().await;
    let guard = locks.exclusive("a").acquire().await.unwrap();
    locks.revoke("a").await.unwrap();
    for request in [
        locks.reentrant("a"),
        locks.exclusive("a"),
        locks.shared("a").no_wait(),
    ] {
        let error = guard.scope(request.acquire()).await.unwrap_err();
        assert!(matches!(error.kind(), LockErrorKind::Lost(_)), "{error}");
    }
}

#[distributed_lock(key = "tree", global, client = *locks, reentrant)]
async fn count_down(locks: &LockClient, from: u32) -> Result<u32, LockError> {
    yield_now().await;
    assert!(is_held(&LockKey::new("tree").unwrap()));
    match from {
        0 => Ok(0),
        more => Ok(1 + Box::pin(count_down(locks, more - 1)).await?),
    }
}

#[distributed_lock(key = "tree", global, client = *locks)]
async fn outer(locks: &LockClient) -> Result<u32, LockError> {
    count_down(locks, 5).await
}

#[distributed_lock(key = "tree", global, client = *locks)]
async fn outer_twice(locks: &LockClient) -> Result<u32, LockError> {
    outer(locks).await
}

async fn locked_functions_call_each_other(place: Place) {
    let locks = place.client().await;
    assert_eq!(count_down(&locks, 20).await.unwrap(), 20);
    assert_eq!(outer(&locks).await.unwrap(), 5);
    assert_eq!(
        outer_twice(&locks).await.unwrap_err().kind(),
        LockErrorKind::WouldDeadlock
    );
    let within = locks
        .exclusive("tree")
        .run(async |_| count_down(&locks, 3).await)
        .await
        .unwrap();
    assert_eq!(within.unwrap(), 3);
    all_free(&locks, &["tree"]).await;
}

async fn several_keys_enter_what_is_held_and_take_the_rest(place: Place) {
    let (locks, others) = (place.client().await, place.client().await);
    let body = async |held: lock_runtime::HeldLock| {
        for request in [
            locks.all(["a", "b", "c"]),
            locks.all(["c", "b", "a"]).no_wait(),
        ] {
            let guard = request.reentrant().acquire().await.unwrap();
            let fences: Vec<_> = guard.fences().map(|(_, fence)| fence).collect();
            assert_eq!((fences.len(), fences[1]), (3, held.fence()));
            guard.release().await.unwrap();
            assert!(others.exclusive("b").try_acquire().await.unwrap().is_none());
            all_free(&others, &["a", "c"]).await;
        }
    };
    locks.exclusive("b").run(body).await.unwrap();
}
