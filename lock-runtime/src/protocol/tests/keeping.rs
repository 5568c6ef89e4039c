//! The keeper, which does the work of a driver that is late.

use super::*;

/// However long the lease is: later replies may leave less of it.
#[test]
fn the_keeper_looks_at_a_holder_within_a_second() {
    let mut bench = Bench::new();
    bench.holds(0, Duration::from_secs(3600));
    let soon = bench.now + Duration::from_secs(1);
    assert_eq!(bench.session.look(bench.now), Look::Calm(soon));
    assert_eq!(bench.session.look_at, Some(soon));
}

/// As clients that hand a lock to each other do.
#[test]
fn a_client_that_is_idle_for_a_moment_does_not_wake_the_keeper_again() {
    let mut bench = Bench::new();
    for _ in 0..100 {
        let held = bench.holds(0, LEASE);
        let (release, _) = bench.releases(held).unwrap();
        bench.release_reply(release, ReleaseReply::Released);
        // The keeper was woken by another client.
        let look = bench.session.look(bench.now);
        assert!(matches!(look, Look::Calm(_)), "{look:?}");
        bench.now += MILLI;
    }
    assert_eq!(bench.watched, 1);
    bench.now += Duration::from_secs(1);
    assert_eq!(bench.session.look(bench.now), Look::Idle);
    assert!(!bench.session.is_looked_at());
    bench.holds(0, LEASE);
    assert_eq!(bench.watched, 2);
}

#[test]
fn the_keeper_takes_waiting_calls_of_a_driver_that_is_stuck_or_gone() {
    for has_room in [true, false] {
        for (is_stuck, is_dead) in [(false, false), (true, false), (false, true)] {
            let mut bench = Bench::new();
            if is_stuck {
                let held = bench.holds(0, LEASE);
                bench.input(|session, cx| session.guard_dropped(held, cx));
                bench.due_job().unwrap();
                bench.now += Duration::from_secs(2);
            }
            let held = bench.holds(0, LEASE);
            bench.input(|session, cx| session.guard_dropped(held, cx));
            bench.session.check_at(has_room);
            if is_dead {
                bench.input(|session, cx| session.driver_died(cx));
            }
            bench.now += Duration::from_secs(1);
            let overdue = bench.input(|session, cx| session.take_overdue(true, cx));
            let expected = usize::from(is_stuck) + usize::from(has_room || is_stuck || is_dead);
            assert_eq!(
                overdue.jobs.len(),
                expected,
                "{has_room} {is_stuck} {is_dead}"
            );
        }
    }
}
