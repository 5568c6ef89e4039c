//! A scenario that random schedules hardly ever produce.

use std::time::Duration;

use super::{
    Broken,
    dice::Dice,
    process::{Arrival, terms},
    schedule::{self, Action, Schedule},
    world::World,
};
use crate::{
    protocol::Mutation,
    spec::{Mode, Wait},
};

const BUSY: usize = 5;
const SECOND: Duration = Duration::from_secs(1);
const LEASE: Duration = Duration::from_secs(30);

/// Keeps a lock busy with five processes. In a sixth process a request arrives once a second and
/// waits for two seconds. Returns how often that process is served in a minute.
fn turns_of_the_impatient(mutation: Option<Mutation>) -> u32 {
    let arrival = |process, wait| {
        let terms = terms(Mode::Exclusive, LEASE, Wait::AtMost(wait));
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
    let broken = mutation.map(Broken::Client);
    let mut world = World::new(schedule, Dice::new(0), broken, false);
    if let Err(violation) = world.run(None) {
        panic!("{violation}");
    }
    world.clients[BUSY].process.served
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
