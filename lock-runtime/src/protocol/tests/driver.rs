//! The work of the driver: what it finds to do, and what becomes of it when the driver ends.

use super::*;

#[test]
fn a_client_needs_its_driver_while_it_holds_a_lock_or_ends_one() {
    let mut bench = Bench::new();
    let needs = |bench: &Bench| (bench.session.needs_driver(), bench.session.holds_any());
    assert_eq!(needs(&bench), (false, false));
    let held = bench.holds(0, LEASE);
    assert_eq!(needs(&bench), (true, true));
    bench.drops_guard(held);
    assert_eq!(needs(&bench), (true, false));
    let (job, _) = bench.due_job().unwrap();
    assert_eq!(needs(&bench), (true, false), "its call is in flight");
    bench.job_reply(job, Ok(Reply::Release(ReleaseReply::Released)));
    assert_eq!(needs(&bench), (false, false));
}

/// Those of tasks that still wait for their outcome are left to them.
#[test]
fn calls_in_flight_of_a_driver_that_has_ended_are_made_again() {
    let mut bench = Bench::new();
    let held = bench.holds(0, LEASE);
    bench.now += LEASE / 3;
    assert_eq!(bench.due_renewals(), [held]);
    let (id, token) = bench.head();
    bench.cancel(id);
    bench.due_job().unwrap();
    let other = bench.holds(0, LEASE);
    let (release, _) = bench.releases(other).unwrap();
    bench.input(|session, cx| session.driver_died(cx));
    assert_eq!(bench.endings(), [Ended::Abandoned(token)]);
    bench.now += Duration::from_secs(1);
    assert_eq!(bench.due_renewals(), [held]);
    bench.release_reply(release, ReleaseReply::Released);
}

#[test]
fn the_next_driver_is_notified_if_work_is_left() {
    for (is_held, is_given_up) in [(false, false), (true, false), (false, true)] {
        let mut bench = Bench::new();
        if is_held {
            bench.holds(0, LEASE);
        }
        if is_given_up {
            let (id, _) = bench.head();
            bench.cancel(id);
        }
        bench.session.check_at(true);
        bench.roused = 0;
        bench.input(|session, cx| session.driver_died(cx));
        let is_roused = bench.roused > 0;
        assert_eq!(is_roused, is_held || is_given_up, "{is_held} {is_given_up}");
    }
}

#[test]
fn leases_are_renewed_soon_after_a_broken_connection_but_not_at_once() {
    let mut bench = Bench::new();
    let held = bench.holds(0, LEASE);
    bench.event(&StoreEvent::Disconnected);
    assert_eq!(bench.due_renewals(), []);
    // At half of the spread.
    assert_eq!(bench.renews_at(held), bench.now + CHECK_WITHIN / 2);
    bench.now += CHECK_WITHIN / 2;
    assert_eq!(bench.due_renewals(), [held]);
}

/// Only then do they share a round trip.
#[test]
fn a_renewal_is_sent_early_only_beside_one_that_is_due() {
    let mut bench = Bench::new();
    let first = bench.holds(0, LEASE);
    bench.now += MILLI * 20;
    let second = bench.holds(0, LEASE);
    bench.now = bench.renews_at(first) - MILLI * 20;
    assert_eq!(bench.due_renewals(), []);
    bench.now = bench.renews_at(first);
    assert_eq!(bench.due_renewals(), [first, second]);
}

#[test]
fn a_lease_that_is_renewed_often_hides_no_other_and_takes_little_memory() {
    let mut bench = Bench::new();
    let [other, held] = [(); 2].map(|()| bench.holds(0, LEASE));
    for _ in 0..200 {
        bench.now += MILLI;
        let (reply, sent) = (Ok(RenewReply::Renewed { ttl: LEASE }), bench.now);
        bench.input(|session, cx| session.renewal_replied(held, reply, sent, cx));
    }
    let entries = bench.session.leases.len();
    assert!((2..=68).contains(&entries), "{entries}");
    bench.now = bench.renews_at(other);
    assert_eq!(bench.due_renewals(), [other]);
}

#[test]
fn a_lock_that_was_lost_or_released_is_not_renewed() {
    let mut bench = Bench::new();
    let [lost, released] = [(); 2].map(|()| bench.holds(0, LEASE));
    assert!(bench.session.is_held(lost) && bench.session.is_held(released));
    bench.input(|session, cx| session.lose(lost, Loss::Taken, cx));
    bench.releases(released).unwrap();
    assert!(!bench.session.is_held(lost) && !bench.session.is_held(released));
    bench.now += LEASE / 3;
    assert_eq!(bench.due_renewals(), []);
}

#[test]
fn the_shares_that_are_reported_are_those_held_for_the_longest() {
    let mut bench = Bench::new();
    bench.holds(0, LEASE);
    let began = bench.now;
    let second = Duration::from_secs(1);
    let [youngest, oldest, middle] = [3, 0, 1].map(|passed| {
        bench.now = began + passed * second;
        let held = bench.holds_in(&key(), Mode::Shared, LEASE);
        bench.token_of(held)
    });
    let now = began + 4 * second;
    let shown = |token, held_for| (HolderId::of(&key(), token, false), held_for);
    let all = [
        shown(oldest, 4 * second),
        shown(middle, 3 * second),
        shown(youngest, second),
    ];
    assert_eq!(bench.session.oldest_shares(2, now), all[..2]);
    assert_eq!(bench.session.oldest_shares(9, now), all);
}

/// The log names the hold to which a loss belongs.
#[test]
fn an_event_is_the_loss_of_one_hold() {
    let [own, later] = [9, 10].map(|number| fence(number).unwrap());
    let lost = Note::Lost(key(), own, Loss::Taken);
    assert!(lost.is_loss_of(&key(), own));
    assert!(!lost.is_loss_of(&key(), later));
    assert!(!lost.is_loss_of(&named("other"), own));
    assert!(!Note::Released(key()).is_loss_of(&key(), own));
}
