//! Scenarios that random schedules hardly ever produce.

use std::time::Duration;

use tokio::time::Instant;

use super::{
    Broken,
    dice::Dice,
    schedule::{self, Action, Arrival, Ending, Network, Schedule},
    world::World,
};
use crate::{
    fence::FencingToken,
    gate::{Baton, Budget, Line, Parting},
    key::LockKey,
    lease::Lease,
    spec::{Mode, Wait},
    store::Hold,
};

const BUSY: usize = 5;

/// Keeps a lock busy with five processes. In a sixth process a request arrives once a second and
/// waits for two seconds. Returns how often that process is served in a minute.
fn turns_of_the_impatient(broken: Option<Broken>) -> u32 {
    let (second, lease) = (Duration::from_secs(1), Duration::from_secs(30));
    let arrival = |number: usize| Arrival {
        number,
        process: number.min(BUSY),
        lock: 0,
        terms: schedule::terms(Mode::Exclusive, lease, Wait::AtMost(second * 60)),
        hold_for: second,
        ending: Ending::Release,
        cancel_after: None,
        extend: None,
        again: Some(Duration::from_millis(1)),
    };
    let busy = (0..BUSY).map(|number| (Duration::from_millis(number as u64), arrival(number)));
    let impatient = (0..60).map(|number| {
        let terms = schedule::terms(Mode::Exclusive, lease, Wait::AtMost(second * 2));
        (
            second * number as u32 + second / 2,
            Arrival {
                terms,
                again: None,
                ..arrival(BUSY + number)
            },
        )
    });
    let (instants, arrivals): (Vec<_>, Vec<_>) = busy.chain(impatient).unzip();
    let mut actions: Vec<_> = instants
        .into_iter()
        .zip(0..)
        .map(|(instant, number)| (instant, Action::Arrive(number)))
        .collect();
    actions.push((second * 60, Action::Quiet));
    let network = Network::PERFECT;
    let schedule = Schedule {
        processes: BUSY + 1,
        locks: 1,
        network,
        arrivals,
        actions,
        bound: second * 60,
    };
    let mut world = World::new(schedule, Dice::new(0), broken, false);
    if let Err(violation) = world.run(None) {
        panic!("{violation}");
    }
    world.sim.served[BUSY]
}

#[test]
fn wait_for_a_short_time_gets_turns_behind_busy_ones() {
    let turns = turns_of_the_impatient(None);
    // About one turn in six; each turn includes a hand-off.
    assert!(turns >= 6, "{turns} turns in a minute");
}

#[test]
fn a_client_that_inherits_no_place_is_found() {
    let turns = turns_of_the_impatient(Some(Broken::InheritsNoPlace));
    assert_eq!(turns, 0, "turns in a minute");
}

/// A holder hands a lock back for the only waiter. The waiter leaves, so the token is abandoned.
/// Another waiter arrives, and then the reply reports that the lock is held under that token.
/// Random schedules produce this about once in 200,000.
#[test]
fn a_lock_that_returns_under_an_abandoned_token_is_not_taken() {
    let (now, lease) = (Instant::now(), Duration::from_secs(30));
    let wish = schedule::terms(Mode::Exclusive, lease, Wait::AtMost(lease)).wish();
    let mut line = Line::default();
    let Some(waiter) = line.enter(wish, 1, now) else {
        panic!("the queue is empty")
    };
    let (Parting::HandBack(token), _) = line.part(lease, None, now) else {
        panic!("there is a waiter")
    };
    let left = line.leave(waiter);
    assert_eq!(
        left.orphan.map(|place| place.token),
        Some(token),
        "it has no other owner, so it is abandoned"
    );
    assert!(line.enter(wish, 1, now).is_some());

    let (Ok(key), Some(fence)) = (LockKey::new("a"), FencingToken::new(1)) else {
        panic!("both are valid")
    };
    let hold = Hold::new(key, Mode::Exclusive, token);
    let lease = Lease::granted(lease, true, now, lease, 0.0);
    let baton = Baton {
        hold,
        fence,
        lease,
        budget: Budget::new(32, now, now),
    };
    assert!(
        line.handed_back(baton).0.is_err(),
        "the abandonment would free it while the next waiter holds it"
    );
}
