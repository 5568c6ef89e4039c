//! How long a lock is held: at least, at most, longer, and whether it still is.

use std::time::Duration;

use lock_runtime::{LockErrorKind, Loss};
use tokio::time::{Instant, sleep};

use lock_tests::place::{LONG, Place, all_free, begun, on_every_store};

on_every_store! {
    min_hold_keeps_a_lock_that_is_released_early,
    min_hold_keeps_a_lock_whose_guard_is_dropped,
    min_hold_that_has_passed_keeps_nothing,
    a_lock_that_is_kept_is_found_when_it_is_free,
    a_lock_that_is_kept_is_had_as_soon_as_it_is_free,
    max_hold_ends_in_a_loss_and_frees_the_lock,
    without_renewal_a_lock_ends_with_its_lease,
    with_renewal_a_lock_outlives_its_lease,
    extend_keeps_a_lock_for_longer,
    extend_never_shortens,
    an_extension_out_of_range_is_refused,
    verify_asks_the_store,
    max_hold_goes_on_in_a_downgraded_lock,
}

/// Long enough that a busy machine keeps it, short enough to be waited for.
const WHILE: Duration = Duration::from_secs(1);

async fn min_hold_keeps_a_lock_that_is_released_early(place: Place) {
    let (locks, others) = (place.client().await, place.client().await);
    for mode in [locks.exclusive("a"), locks.shared("a")] {
        let start = Instant::now();
        let guard = mode.min_hold(WHILE).acquire().await.unwrap();
        let view = guard.held();
        guard.release().await.unwrap();
        assert!(!view.is_lost());
        let held = [locks.clone(), others.clone()];
        for client in held {
            let refused = client.exclusive("a").try_acquire().await.unwrap().is_none();
            assert!(refused || start.elapsed() >= WHILE, "it was free too soon");
        }
        let guard = others.exclusive("a").wait(LONG).acquire().await.unwrap();
        assert!(
            start.elapsed() >= WHILE - Duration::from_millis(5),
            "{:?}",
            start.elapsed()
        );
        guard.release().await.unwrap();
    }
}

async fn min_hold_keeps_a_lock_whose_guard_is_dropped(place: Place) {
    let (locks, others) = (place.client().await, place.client().await);
    let start = Instant::now();
    drop(
        locks
            .exclusive("a")
            .min_hold(WHILE)
            .acquire()
            .await
            .unwrap(),
    );
    let guard = others.exclusive("a").wait(LONG).acquire().await.unwrap();
    assert!(
        start.elapsed() >= WHILE - Duration::from_millis(5),
        "{:?}",
        start.elapsed()
    );
    guard.release().await.unwrap();
}

async fn min_hold_that_has_passed_keeps_nothing(place: Place) {
    let locks = place.client().await;
    let guard = locks
        .exclusive("a")
        .min_hold(WHILE / 8)
        .acquire()
        .await
        .unwrap();
    sleep(WHILE / 4).await;
    guard.release().await.unwrap();
    locks
        .exclusive("a")
        .try_acquire()
        .await
        .unwrap()
        .expect("it is free")
        .release()
        .await
        .unwrap();
}

async fn a_lock_that_is_kept_is_found_when_it_is_free(place: Place) {
    let locks = place.client().await;
    let guard = locks
        .exclusive("a")
        .min_hold(WHILE)
        .acquire()
        .await
        .unwrap();
    let waiting = begun(locks.exclusive("a").wait(LONG).acquire()).await;
    guard.release().await.unwrap();
    let start = Instant::now();
    waiting.await.unwrap().release().await.unwrap();
    assert!(start.elapsed() < LONG / 2, "{:?}", start.elapsed());
}

async fn a_lock_that_is_kept_is_had_as_soon_as_it_is_free(place: Place) {
    let (locks, others) = (place.client().await, place.client().await);
    let kept = Duration::from_millis(300);
    let one = 1.try_into().unwrap();
    let permits = [
        (locks.permits("a", one), others.permits("a", one)),
        (locks.permits("a", one), locks.permits("a", one)),
    ];
    let permits = permits.into_iter().filter(|_| place.has_permits());
    let modes = [
        (locks.exclusive("a"), others.exclusive("a")),
        (locks.exclusive("a"), locks.exclusive("a")),
        (locks.exclusive("a"), others.shared("a")),
        (locks.shared("a"), others.exclusive("a")),
        (locks.shared("a"), locks.exclusive("a")),
    ];
    for (held, wanted) in modes.into_iter().chain(permits) {
        let start = Instant::now();
        let guard = held.min_hold(kept).acquire().await.unwrap();
        let waiting = tokio::spawn(async move { wanted.wait(LONG).acquire().await });
        // It stands in line.
        sleep(kept / 6).await;
        guard.release().await.unwrap();
        let guard = waiting.await.unwrap().unwrap();
        let waited = start.elapsed();
        assert!(
            waited >= kept - Duration::from_millis(5)
                && waited < kept + Duration::from_millis(150) + place.unsure(),
            "{waited:?}"
        );
        guard.release().await.unwrap();
    }
}

async fn max_hold_ends_in_a_loss_and_frees_the_lock(place: Place) {
    let (locks, others) = (place.client().await, place.client().await);
    let start = Instant::now();
    let guard = locks
        .exclusive("a")
        .max_hold(WHILE)
        .acquire()
        .await
        .unwrap();
    assert!(guard.validity() <= WHILE);
    let lost = guard.lost().await;
    assert_eq!(lost.kind(), LockErrorKind::Lost(Loss::MaxHold));
    assert!(
        start.elapsed() >= WHILE - Duration::from_millis(5),
        "{:?}",
        start.elapsed()
    );
    assert!(guard.is_lost() && guard.validity().is_zero());
    // Long before the lease of 30 s.
    let next = others
        .exclusive("a")
        .wait(LONG / 2)
        .acquire()
        .await
        .unwrap();
    assert!(next.fence() > guard.fence());
    assert_eq!(
        guard.release().await.unwrap_err().kind(),
        LockErrorKind::Lost(Loss::MaxHold)
    );
    next.verify().await.unwrap();
    next.release().await.unwrap();
}

async fn without_renewal_a_lock_ends_with_its_lease(place: Place) {
    let (locks, others) = (place.client().await, place.client().await);
    let start = Instant::now();
    let guard = locks
        .exclusive("a")
        .lease(WHILE)
        .no_renew()
        .acquire()
        .await
        .unwrap();
    let lost = guard.lost().await;
    assert_eq!(lost.kind(), LockErrorKind::Lost(Loss::Expired));
    // By its own clock a moment before the store frees it, and never after.
    assert!(
        start.elapsed() >= WHILE - WHILE / 20 - place.unsure(),
        "{:?}",
        start.elapsed()
    );
    assert_eq!(
        guard.release().await.unwrap_err().kind(),
        LockErrorKind::Lost(Loss::Expired)
    );
    others
        .exclusive("a")
        .wait(LONG)
        .acquire()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
}

async fn with_renewal_a_lock_outlives_its_lease(place: Place) {
    let (locks, others) = (place.client().await, place.client().await);
    let one = 1.try_into().unwrap();
    let mut guards = vec![
        locks.exclusive("a").lease(WHILE).acquire().await.unwrap(),
        locks.shared("b").lease(WHILE).acquire().await.unwrap(),
    ];
    if place.has_permits() {
        guards.push(
            locks
                .permits("c", one)
                .lease(WHILE)
                .acquire()
                .await
                .unwrap(),
        );
    }
    for _ in 0..6 {
        sleep(WHILE / 2).await;
        assert!(others.exclusive("a").try_acquire().await.unwrap().is_none());
        assert!(others.exclusive("b").try_acquire().await.unwrap().is_none());
        assert!(
            !place.has_permits()
                || others
                    .permits("c", one)
                    .try_acquire()
                    .await
                    .unwrap()
                    .is_none()
        );
    }
    for guard in guards {
        assert!(!guard.is_lost());
        guard.release().await.unwrap();
    }
}

async fn extend_keeps_a_lock_for_longer(place: Place) {
    let (locks, others) = (place.client().await, place.client().await);
    for request in [
        locks.exclusive("a"),
        locks.shared("a"),
        locks.exclusive("a").no_renew(),
    ] {
        let guard = request.lease(WHILE).acquire().await.unwrap();
        guard.extend(WHILE * 20).await.unwrap();
        assert!(guard.validity() > WHILE * 15, "{:?}", guard.validity());
        assert!(others.inspect("a").await.unwrap().holders[0].ttl.unwrap() > WHILE * 15);
        sleep(WHILE * 2).await;
        guard.verify().await.unwrap();
        guard.release().await.unwrap();
    }
}

async fn extend_never_shortens(place: Place) {
    let locks = place.client().await;
    let permit = place
        .has_permits()
        .then(|| locks.permits("a", 2.try_into().unwrap()));
    for request in [locks.exclusive("a"), locks.shared("a")]
        .into_iter()
        .chain(permit)
    {
        let guard = request.acquire().await.unwrap();
        guard.extend(Duration::from_secs(1)).await.unwrap();
        guard.verify().await.unwrap();
        assert!(
            guard.validity() > Duration::from_secs(20),
            "{:?}",
            guard.validity()
        );
        guard.release().await.unwrap();
    }
}

async fn an_extension_out_of_range_is_refused(place: Place) {
    let locks = place.client().await;
    let guard = locks.exclusive("a").acquire().await.unwrap();
    for lease in [
        Duration::ZERO,
        Duration::from_millis(99),
        lock_runtime::LockSpec::MAX_LEASE + Duration::from_nanos(1),
    ] {
        assert_eq!(
            guard.extend(lease).await.unwrap_err().kind(),
            LockErrorKind::InvalidSpec
        );
    }
    assert!(!guard.is_lost());
    guard.release().await.unwrap();
}

async fn verify_asks_the_store(place: Place) {
    let (locks, others) = (place.client().await, place.client().await);
    let guard = locks.exclusive("a").acquire().await.unwrap();
    guard.verify().await.unwrap();
    // Another process takes it away; nothing here has heard of it.
    others.revoke("a").await.unwrap();
    let error = guard.verify().await.unwrap_err();
    assert!(matches!(error.kind(), LockErrorKind::Lost(_)), "{error}");
    assert!(guard.is_lost());
    guard.lost().await;
    all_free(&locks, &["a"]).await;
}

async fn max_hold_goes_on_in_a_downgraded_lock(place: Place) {
    let locks = place.client().await;
    let start = Instant::now();
    let writer = locks
        .exclusive("a")
        .max_hold(WHILE * 2)
        .acquire()
        .await
        .unwrap();
    sleep(WHILE).await;
    let reader = writer.downgrade().await.unwrap();
    assert_eq!(
        reader.lost().await.kind(),
        LockErrorKind::Lost(Loss::MaxHold)
    );
    assert!(
        start.elapsed() < WHILE * 2 + LONG / 2,
        "{:?}",
        start.elapsed()
    );
    all_free(&locks, &["a"]).await;
}
