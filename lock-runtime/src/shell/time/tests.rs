//! Suspensions of the machine, and the promises about the store's time. They are injected here; the
//! test binary `it` has processes with a clock that stands still while they are stopped.

use std::future::pending;

use tokio::time::{advance, timeout};

use super::{suspension::injected::suspend, *};
use crate::{HeldLock, LockClient, LockError, LockErrorKind, Loss};

const HOUR: Duration = Duration::from_secs(3600);
const MINUTE: Duration = Duration::from_secs(60);

fn in_memory() -> LockClient {
    LockClient::in_memory()
}

#[tokio::test(start_paused = true)]
async fn the_time_goes_on_with_tokio_s_clock_and_in_suspension() {
    let begun = Instant::now();
    advance(MINUTE).await;
    assert_eq!(begun.elapsed(), MINUTE);
    suspend(HOUR);
    assert_eq!(begun.elapsed(), MINUTE + HOUR);
    assert_eq!(suspended(), HOUR);
}

#[cfg(unix)]
#[test]
fn a_look_serves_for_a_tenth_of_a_millisecond() {
    use super::suspension::is_due;
    for (looked, awake, expected) in [
        (0, 1 << 62, true),
        (5_000_000, 5_000_000, false),
        (5_000_000, 5_099_999, false),
        (5_000_000, 5_100_000, true),
        (5_000_000, 4_999_999, true),
    ] {
        assert_eq!(is_due(looked, awake), expected, "{looked} {awake}");
    }
}

/// The clock is paused, so that the background task notices nothing before the first look.
#[tokio::test(start_paused = true)]
async fn a_holder_that_was_suspended_knows_at_the_first_look() -> Result<(), LockError> {
    let locks = in_memory();
    let guard = locks.exclusive("k").lease(MINUTE).acquire().await?;
    suspend(MINUTE / 2);
    assert!(!guard.is_lost());
    assert!(guard.validity() < MINUTE / 2, "{:?}", guard.validity());
    suspend(MINUTE / 2);
    assert!(guard.is_lost());
    assert_eq!(guard.validity(), Duration::ZERO);
    let error = guard.release().await.unwrap_err();
    assert_eq!(error.kind(), LockErrorKind::Lost(Loss::Expired));
    // The store has counted it as well.
    locks.exclusive("k").acquire().await?.release().await
}

#[tokio::test(start_paused = true)]
async fn max_hold_counts_suspension() -> Result<(), LockError> {
    let guard = in_memory().exclusive("k").max_hold(HOUR).acquire().await?;
    suspend(HOUR);
    let lost = timeout(Duration::ZERO, guard.lost()).await.unwrap();
    assert_eq!(lost.kind(), LockErrorKind::Lost(Loss::MaxHold));
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn min_hold_counts_suspension() -> Result<(), LockError> {
    let locks = in_memory();
    for (asleep, is_free) in [(MINUTE / 2, false), (MINUTE, true)] {
        let request = locks.exclusive("k").lease(2 * MINUTE).min_hold(MINUTE);
        let guard = request.acquire().await?;
        suspend(asleep);
        guard.release().await?;
        let next = locks.exclusive("k").try_acquire().await?;
        assert_eq!(next.is_some(), is_free, "{asleep:?}");
        suspend(MINUTE);
    }
    Ok(())
}

/// A local hand-off has the next fencing token of the block that was reserved for it. A grant of
/// the store is behind that block.
#[tokio::test(start_paused = true)]
async fn the_time_of_local_hand_offs_counts_suspension() -> Result<(), LockError> {
    let locks = in_memory();
    for (asleep, is_local) in [(Duration::ZERO, true), (Duration::from_millis(50), false)] {
        let holder = locks.exclusive("k").acquire().await?;
        let in_turn = async || {
            let guard = locks.exclusive("k").acquire().await?;
            let fence = guard.fence().number();
            suspend(asleep);
            guard.release().await?;
            Ok::<_, LockError>(fence)
        };
        let (one, two, released) = tokio::join!(in_turn(), in_turn(), holder.release());
        released?;
        assert_eq!(two? == one? + 1, is_local, "{asleep:?}");
    }
    Ok(())
}

/// The background task notices at its next turn.
#[tokio::test(start_paused = true)]
async fn a_body_ends_once_the_background_task_is_woken_after_a_suspension() {
    let begun = tokio::time::Instant::now();
    let body = async |held: HeldLock| {
        // The background task sleeps until the next renewal.
        tokio::task::yield_now().await;
        suspend(HOUR);
        held.views()[0].core.work.notify_one();
        pending::<()>().await;
    };
    let ended = in_memory().exclusive("k").run(body).await;
    let error = ended.unwrap_err();
    assert_eq!(error.kind(), LockErrorKind::Lost(Loss::Expired));
    assert_eq!(begun.elapsed(), Duration::ZERO);
}

/// The timer itself fires when it would have without the suspension: a wait until the same instant
/// takes none of it into account twice.
#[tokio::test(start_paused = true)]
async fn timers_wait_for_the_rest_of_the_time() {
    suspend(HOUR);
    let (begun, clock) = (Instant::now(), tokio::time::Instant::now());
    sleep_until(begun + MINUTE).await;
    assert!(begun.elapsed() >= MINUTE);
    assert!(clock.elapsed() < MINUTE + Duration::from_millis(2));
    suspend(MINUTE);
    let late = timeout_at(begun + 2 * MINUTE, pending::<()>());
    assert!(late.await.is_err());
    assert!(clock.elapsed() < MINUTE + Duration::from_millis(4));
}

#[cfg(feature = "redis")]
#[test]
fn a_quarantine_and_the_estimate_of_a_server_s_clock_count_suspension() {
    use crate::store::redis::{clock::ServerClock, topology::quarantine::Tenure};
    let now = Instant::now();
    let tenure = Tenure::new(MINUTE, HOUR, Duration::ZERO, String::new(), now);
    let clock = ServerClock::new(0, now);
    assert!(tenure.keeps_away(Instant::now()).is_some());
    suspend(MINUTE);
    assert_eq!(tenure.keeps_away(Instant::now()), None);
    assert!(u128::from(clock.server_micros(Instant::now())) >= MINUTE.as_micros());
}

#[test]
fn a_machine_that_is_awake_was_not_suspended_however_busy_it_is() {
    let look = || (0..100_000).map(|_| suspended()).max();
    let threads = [(); 4].map(|()| std::thread::spawn(look));
    for thread in threads {
        assert_eq!(thread.join().unwrap(), Some(Duration::ZERO));
    }
}
