//! Scenarios that random schedules hardly ever produce.

use std::time::Duration;

use super::{
    Broken,
    checker::Wrong,
    dice::Dice,
    process::{Act, Arrival, Event},
    schedule::{self, Action, Schedule},
    world::World,
};
use crate::{
    protocol::{Mutation, majority},
    request::spec::{Mode, Terms, Wait},
};

const BUSY: usize = 5;
const SECOND: Duration = Duration::from_secs(1);
const LEASE: Duration = Duration::from_secs(30);

/// Keeps a lock busy with five processes. In a sixth process a request arrives once a second and
/// waits for two seconds. Returns how often that process is served in a minute.
fn turns_of_the_impatient(mutation: Option<Mutation>) -> u32 {
    let arrival = |process, wait| {
        let terms = Terms::plain(Mode::Exclusive, LEASE, Wait::AtMost(wait));
        schedule::arrival(process, terms, SECOND)
    };
    let busy = (0..BUSY).map(|process| {
        let arrival = Arrival {
            again: 60,
            ..arrival(process, SECOND * 60)
        };
        (Duration::from_millis(process as u64), arrival)
    });
    let impatient = (0..60).map(|number| (SECOND * number + SECOND / 2, arrival(BUSY, SECOND * 2)));
    let mut schedule = Schedule::perfect(busy.chain(impatient), SECOND * 60);
    // The waits of the last requests have ended.
    schedule.actions.push((SECOND * 62, Action::Quiet));
    served(schedule, mutation.map(Broken::Client), BUSY)
}

/// Runs a schedule. Returns how often a process is served.
fn served(schedule: Schedule, broken: Option<Broken>, process: usize) -> u32 {
    let mut world = World::new(schedule, Dice::new(0), broken, false);
    if let Err(violation) = world.run(None) {
        panic!("{violation}");
    }
    world.clients[process].process.served
}

#[test]
fn wait_for_a_short_time_gets_turns_behind_busy_ones() {
    let turns = turns_of_the_impatient(None);
    // About one turn in six; each turn includes a hand-off.
    assert!(turns >= 6, "{turns} turns in a minute");
}

#[test]
fn found_client_that_inherits_no_entry() {
    let turns = turns_of_the_impatient(Some(Mutation::InheritsNoEntry));
    assert_eq!(turns, 0, "turns in a minute");
}

/// A reader leaves a reservation behind, and a second reader leaves while a writer waits for both.
/// Returns how often the writer, which waits until a little after the reservation, is served.
fn writers_behind_a_reservation(mutation: Option<Mutation>) -> u32 {
    let millis = Duration::from_millis;
    let arrival = |process, mode, wait, hold_for| {
        let terms = Terms::plain(mode, LEASE, Wait::AtMost(wait));
        schedule::arrival(process, terms, hold_for)
    };
    let mut first = arrival(0, Mode::Shared, SECOND, millis(10));
    first.terms.min_hold = Some(millis(300));
    let second = arrival(1, Mode::Shared, SECOND, millis(60));
    let writer = arrival(2, Mode::Exclusive, millis(350), millis(1));
    let arrivals = [(0, first), (1, second), (30, writer)];
    let arrivals = arrivals.map(|(when, arrival)| (millis(when), arrival));
    let schedule = Schedule::perfect(arrivals, SECOND);
    served(schedule, mutation.map(Broken::Client), 2)
}

#[test]
fn writer_gets_the_lock_at_the_end_of_a_reservation() {
    assert_eq!(writers_behind_a_reservation(None), 1, "writers");
}

#[test]
fn found_store_that_announces_no_end() {
    let writers = writers_behind_a_reservation(Some(Mutation::AnnouncesNoEnd));
    assert_eq!(writers, 0, "writers");
}

/// A client dies with the vote of the coordinator alone. Returns how many of two requests of
/// another client are served long before that vote expires: one that waits, and one that does not.
fn served_beside_a_dead_vote(mutation: Option<majority::MajorityMutation>) -> u32 {
    // The coordinator of this lock.
    const COORDINATOR: usize = 1;
    let millis = Duration::from_millis;
    let arrival = |process, wait| {
        schedule::arrival(
            process,
            Terms::plain(Mode::Exclusive, LEASE, wait),
            millis(1),
        )
    };
    let arrivals = [
        (SECOND, arrival(0, Wait::AtMost(LEASE))),
        (SECOND * 2, arrival(1, Wait::No)),
        (SECOND * 3, arrival(1, Wait::AtMost(SECOND * 5))),
    ];
    let mut schedule = Schedule::perfect(arrivals, SECOND);
    schedule.servers = vec![(0, 0); 3];
    schedule.longest_lease = LEASE;
    let others = (0..3).filter(|server| *server != COORDINATOR);
    let parts = others.map(|server| (Duration::ZERO, Action::Part(0, server, LEASE)));
    schedule.actions.extend(parts);
    let dies = (SECOND + millis(10), Action::Crash(0));
    schedule.actions.push(dies);
    served(schedule, mutation.map(Broken::Majority), 1)
}

#[test]
fn one_dead_vote_blocks_no_request() {
    assert_eq!(served_beside_a_dead_vote(None), 2, "requests");
}

#[test]
fn found_client_that_yields_to_a_dead_vote() {
    let requests = served_beside_a_dead_vote(Some(majority::MajorityMutation::YieldsToDeadVote));
    assert_eq!(requests, 0, "requests");
}

/// A writer is extended to an hour, becomes a reader, and leaves in an outage of three minutes.
/// Returns the first violation.
fn extended_reader_in_an_outage(mutation: Option<Mutation>) -> Option<Wrong> {
    let millis = Duration::from_millis;
    let terms = Terms::plain(Mode::Exclusive, LEASE, Wait::AtMost(SECOND));
    let writer = Arrival {
        acts: vec![
            (millis(10), Act::Extend(120)),
            (millis(20), Act::Convert { is_dropped: false }),
        ],
        ..schedule::arrival(0, terms, millis(60))
    };
    let mut schedule = Schedule::perfect([(Duration::ZERO, writer)], SECOND);
    let outage = (millis(50), Action::Part(0, 0, SECOND * 180));
    schedule
        .actions
        .extend([outage, (SECOND * 200, Action::Quiet)]);
    let broken = mutation.map(Broken::Client);
    let mut world = World::new(schedule, Dice::new(0), broken, false);
    world.run(None).err().map(|violation| violation.wrong)
}

#[test]
fn extended_reader_is_given_up_after_an_outage() {
    assert_eq!(extended_reader_in_an_outage(None), None);
}

#[test]
fn found_reader_that_forgets_the_extension_of_its_writer() {
    let forgets = Some(Mutation::ConvertsForOneLease);
    assert_eq!(extended_reader_in_an_outage(forgets), Some(Wrong::Left));
}

/// A client uses a lock for a moment, and retains it until its lease is almost over. Returns how
/// many of three requests of another client are served, each a second after the one before.
fn served_behind_a_retained_lock(
    mutation: Option<Mutation>,
    wait: Wait,
    edit: impl FnOnce(Schedule) -> Schedule,
) -> u32 {
    let arrival = |process, wait| {
        let terms = Terms::plain(Mode::Exclusive, LEASE, wait);
        schedule::arrival(process, terms, Duration::from_millis(1))
    };
    let mut first = arrival(0, Wait::AtMost(SECOND));
    first.terms.retain = Some(LEASE);
    let others = (1..=3).map(|second| (SECOND * second, arrival(1, wait)));
    let arrivals = [(Duration::ZERO, first)].into_iter().chain(others);
    let mut schedule = Schedule::perfect(arrivals, LEASE);
    schedule.actions.push((SECOND * 10, Action::Quiet));
    served(edit(schedule), mutation.map(Broken::Client), 1)
}

const SHORT: Wait = Wait::AtMost(Duration::from_millis(20));

#[test]
fn retained_lock_is_released_for_another_client() {
    let of_records = |schedule| Schedule {
        of_records: true,
        ..schedule
    };
    for wait in [SHORT, Wait::No] {
        let in_memory = served_behind_a_retained_lock(None, wait, |schedule| schedule);
        let on_redis = served_behind_a_retained_lock(None, wait, Schedule::on_redis);
        let in_records = served_behind_a_retained_lock(None, wait, of_records);
        assert_eq!([in_memory, on_redis, in_records], [3; 3], "{wait:?}");
    }
}

#[test]
fn found_client_that_ignores_the_waiters_for_its_idle_lock() {
    let ignores = Some(Mutation::IgnoresWanted);
    for wait in [SHORT, Wait::No] {
        let requests = served_behind_a_retained_lock(ignores, wait, |schedule| schedule);
        assert_eq!(requests, 0, "{wait:?}");
    }
}

#[test]
fn found_client_that_is_refused_by_an_idle_lock() {
    let refuses = Some(Mutation::RefusesForRetained);
    let requests = served_behind_a_retained_lock(refuses, Wait::No, |schedule| schedule);
    assert_eq!(requests, 0, "requests");
}

/// The same, where the first client is shut down before, and its messages are lost.
fn served_behind_a_client_that_has_ended(mutation: Option<Mutation>) -> u32 {
    served_behind_a_retained_lock(mutation, SHORT, |mut schedule| {
        let shutdown = Action::Process(0, Event::Shutdown);
        let parted = Action::Part(0, 0, SECOND * 9);
        let half = SECOND / 2;
        schedule
            .actions
            .extend([(half, shutdown), (half * 3 / 2, parted)]);
        schedule
    })
}

#[test]
fn retained_lock_is_released_by_a_shutdown() {
    assert_eq!(served_behind_a_client_that_has_ended(None), 3, "requests");
}

#[test]
fn found_client_that_retains_after_its_shutdown() {
    let retains = Some(Mutation::RetainsAfterShutdown);
    assert_eq!(
        served_behind_a_client_that_has_ended(retains),
        0,
        "requests"
    );
}

/// Two clients with a request each, repeated at once, take turns on one lock that both retain.
/// Returns the number of requests of the one that is served less often in ten seconds.
fn turns_of_two_that_retain(retain: Option<Duration>) -> u32 {
    const AGAIN: usize = 1_000_000;
    let arrival = |process| {
        let mut terms = Terms::plain(Mode::Exclusive, LEASE, Wait::AtMost(LEASE));
        terms.retain = retain;
        Arrival {
            again: AGAIN,
            ..schedule::arrival(process, terms, Duration::from_millis(1))
        }
    };
    let arrivals = (0..2).map(|process| (Duration::ZERO, arrival(process)));
    let mut schedule = Schedule::perfect(arrivals, SECOND);
    schedule.actions.push((SECOND * 10, Action::Quiet));
    let mut world = World::new(schedule, Dice::new(0), None, false);
    if let Err(violation) = world.run(None) {
        panic!("{violation}");
    }
    let served = world.clients.iter().map(|client| client.process.served);
    served.min().unwrap_or_default()
}

#[test]
fn retention_does_not_slow_clients_that_take_turns() {
    let turns = turns_of_two_that_retain(None);
    let with_retention = turns_of_two_that_retain(Some(SECOND));
    assert!(
        with_retention * 10 >= turns * 9,
        "{with_retention} of {turns}"
    );
}

/// Two clients wait for a lock, the second one for half a second. Returns how often the second one
/// is served; the first one would retain the lock for ten seconds.
fn served_behind_a_waiter_that_retains(mutation: Option<Mutation>) -> u32 {
    let millis = Duration::from_millis;
    let arrival = |process, wait, hold_for| {
        let terms = Terms::plain(Mode::Exclusive, SECOND * 3, Wait::AtMost(wait));
        schedule::arrival(process, terms, hold_for)
    };
    let mut first = arrival(1, SECOND, millis(1));
    first.terms.retain = Some(SECOND * 10);
    let holder = arrival(0, SECOND, millis(100));
    let second = arrival(2, SECOND / 2, millis(1));
    let arrivals = [(0, holder), (10, first), (20, second)];
    let arrivals = arrivals.map(|(when, arrival)| (millis(when), arrival));
    let mut schedule = Schedule::perfect(arrivals, SECOND);
    schedule.actions.push((SECOND * 20, Action::Quiet));
    served(schedule, mutation.map(Broken::Client), 2)
}

#[test]
fn lock_from_the_wait_queue_is_not_retained() {
    assert_eq!(served_behind_a_waiter_that_retains(None), 1);
}

#[test]
fn found_client_that_retains_a_lock_for_which_others_wait() {
    let retains = Some(Mutation::RetainsContended);
    assert_eq!(served_behind_a_waiter_that_retains(retains), 0);
}
