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

#[test]
fn the_keeper_is_woken_once_for_the_same_time_and_again_once_it_has_ended() {
    let mut bench = Bench::new();
    assert!(!bench.session.is_looked_at());
    bench.holds(0, LEASE);
    bench.holds(0, LEASE);
    assert!(bench.session.is_looked_at());
    assert_eq!(bench.watched, 1);
    bench.session.forget_keeper();
    assert!(!bench.session.is_looked_at());
    bench.holds(0, LEASE);
    assert_eq!(bench.watched, 2);
}

/// A lease is late once half of it is over, and a call half a second after it was due.
#[test]
fn the_keeper_finds_work_that_is_late_and_no_other() {
    let second = Duration::from_secs(1);
    let mut bench = Bench::new();
    let began = bench.now;
    bench.holds(0, LEASE);
    let late_at = began + (LEASE - drift(LEASE)) / 2;
    assert_eq!(bench.session.look(began), Look::Calm(began + second));
    let dropped = bench.holds(0, LEASE);
    bench.now += second / 2 + second / 4;
    let due = bench.now;
    bench.drops_guard(dropped);
    // The next look is not brought forward to a call that is late after it.
    let now = began + second;
    assert_eq!(bench.session.look(now), Look::Calm(due + LATE));
    let now = due + LATE;
    assert_eq!(
        bench.session.look(now),
        Look::Late(now + call_timeout(LATE))
    );
    assert_eq!(bench.endings().len(), 1);
    // The call of the driver was answered.
    let id = bench.session.pending_ends.keys().next().unwrap();
    bench.job_reply(Job::End(id), Ok(Reply::Release(ReleaseReply::Released)));
    let mut now = now + call_timeout(LATE);
    while now + second < late_at {
        assert_eq!(bench.session.look(now), Look::Calm(now + second));
        now += second;
    }
    assert_eq!(bench.session.look(now), Look::Calm(late_at));
    let next = late_at + call_timeout(LEASE);
    assert_eq!(bench.session.look(late_at), Look::Late(next));
}

#[test]
fn a_call_that_is_planned_wakes_the_keeper_once_it_is_late() {
    let mut bench = Bench::new();
    let (id, _) = bench.head();
    bench.cancel(id);
    assert_eq!(bench.session.look_at, Some(bench.now + LATE));
}

#[test]
fn the_keeper_takes_over_what_is_late_and_nothing_before() {
    let overdue = |bench: &mut Bench| {
        let overdue = bench.input(|session, cx| session.take_overdue(true, cx));
        let number = (overdue.renewals.len(), overdue.jobs.len());
        (number, overdue.is_driver_late)
    };
    // A lease of which half is over.
    let mut bench = Bench::new();
    bench.holds(0, LEASE);
    bench.now += (LEASE - drift(LEASE)) / 2 - MILLI;
    assert_eq!(overdue(&mut bench), ((0, 0), false));
    bench.now += MILLI;
    let mut waiting = bench.clone();
    assert_eq!(overdue(&mut bench), ((1, 0), true));
    // The driver has sent the renewal: the store is late, and not the driver.
    assert_eq!(waiting.due_renewals().len(), 1);
    assert_eq!(overdue(&mut waiting), ((1, 0), false));
    // A call that should have been answered.
    let mut bench = Bench::new();
    let held = bench.holds(0, LEASE);
    bench.drops_guard(held);
    bench.due_job().unwrap();
    bench.now += call_timeout(LEASE) + LATE - MILLI;
    assert_eq!(overdue(&mut bench), ((0, 0), false));
    bench.now += MILLI;
    assert_eq!(overdue(&mut bench), ((0, 1), true));
}

/// Other programs may announce grants of an abandoned token for as long as they like.
#[test]
fn announced_grants_do_not_hide_a_late_call_from_the_keeper() {
    let mut bench = Bench::new();
    let (id, token) = bench.head();
    bench.cancel(id);
    for _ in 0..7 {
        bench.now += MILLI * 100;
        bench.push(Mode::Exclusive, token, 7);
    }
    let overdue = bench.input(|session, cx| session.take_overdue(true, cx));
    assert_eq!(overdue.jobs.len(), 1);
}
