//! Scenarios that random schedules hardly ever produce.

use std::time::Duration;

use tokio::time::Instant;

use super::{
    schedule::{self, Action, Network, Schedule},
    world::World,
};
use crate::{
    fence::FencingToken,
    key::LockKey,
    protocol::{
        Call, Cx, Effects, Mutation, ReleaseStep, Reply, Request, Session, Step, WaiterLimits,
    },
    sim::process::terms,
    sim::{dice::Dice, explore::Run, process::Arrival},
    spec::{Mode, Terms, Wait},
    store::{AcquireReply, Grant, Hold, ReleaseReply, Token},
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
    let mut actions: Vec<_> = busy
        .chain(impatient)
        .map(|(when, arrival)| (when, Action::Arrive(Box::new(arrival))))
        .collect();
    // The waits of the last requests have ended.
    actions.push((SECOND * 62, Action::Quiet));
    let schedule = Schedule {
        processes: BUSY + 1,
        locks: 1,
        limits: schedule::UNLIMITED,
        network: Network::PERFECT,
        actions,
        bound: SECOND * 60,
    };
    let mut world = World::new(schedule, Dice::new(0), mutation, false);
    if let Err(violation) = world.run(None) {
        panic!("{violation}");
    }
    world.processes[BUSY].served
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

/// A holder hands a lock back for the only waiter. The waiter leaves, so the token is abandoned.
/// Another waiter arrives, and then the reply reports that the lock is held under that token.
/// Random schedules produce this about once in 200,000. Returns whether the waiter takes the lock.
fn is_taken_under_an_abandoned_token(mutation: Option<Mutation>) -> bool {
    let now = Instant::now();
    let mut session = Session::new(WaiterLimits {
        per_key: 1,
        in_all: 2,
    });
    let (mut dice, mut out) = (Dice::new(0), Effects::new());
    let cx = &mut Cx {
        now,
        entropy: &mut dice,
        out: &mut out,
        is_debugged: true,
        mutation,
    };
    let (Ok(key), Some(fence)) = (LockKey::new("a"), FencingToken::new(1)) else {
        panic!("both are valid")
    };
    let terms: Terms = terms(Mode::Exclusive, LEASE, Wait::AtMost(LEASE));
    let grant = Grant::new(fence, LEASE);
    let begin = |session: &mut Session, cx: &mut Cx<'_>| match session.begin(&key, &terms, now, cx)
    {
        Ok(begun) => begun,
        Err(refused) => panic!("{refused:?}"),
    };

    let (holder, _) = begin(&mut session, cx);
    let (waiter, _) = begin(&mut session, cx);
    let granted = Reply::Acquire(AcquireReply::Granted(grant));
    let Step::Done(Ok(granted)) = session.replied(holder, Ok(granted), cx) else {
        panic!("it was granted")
    };
    let ReleaseStep::Call(release, call) = session.release(granted.held, cx) else {
        panic!("no fencing token was reserved for a hand-off")
    };
    let Request::Release(request) = call.request else {
        panic!("{call:?}")
    };
    let Some(next) = request.next else {
        panic!("there is a waiter")
    };
    session.cancel(waiter, cx);
    assert!(
        ends(&mut session, cx).contains(&(false, next.token)),
        "it has no other owner, so it is abandoned"
    );
    let (later, _) = begin(&mut session, cx);
    let passed = Reply::Release(ReleaseReply::Passed(grant.reserved(32)));
    if let Err(error) = session.release_replied(release, Ok(passed), cx) {
        panic!("{error:?}")
    }
    let is_given_back = ends(&mut session, cx).contains(&(true, next.token));
    // The reply to the waiter's own request lets it take a hand-off.
    let busy = Reply::Acquire(AcquireReply::Busy {
        holder_ttl: None,
        has_waiters: false,
    });
    let step = session.replied(later, Ok(busy), cx);
    let is_taken = matches!(step, Step::Done(Ok(_)));
    assert_ne!(is_taken, is_given_back, "{step:?}");
    is_taken
}

/// The tokens that are released or abandoned by now, and whether they are released.
fn ends(session: &mut Session, cx: &mut Cx<'_>) -> Vec<(bool, Token)> {
    let mut ends = Vec::new();
    while let Some((_, Call { request, .. })) = session.due_job(cx) {
        let is_release = matches!(request, Request::Release(_));
        if let Request::Abandon(Hold { token, .. }) = request {
            ends.push((is_release, token));
        } else if let Request::Release(release) = request {
            ends.push((is_release, release.hold.token));
        }
    }
    ends
}

#[test]
fn a_lock_that_returns_under_an_abandoned_token_is_not_taken() {
    assert!(
        !is_taken_under_an_abandoned_token(None),
        "the abandonment would free it while the next waiter holds it"
    );
    let mutation = Some(Mutation::AcceptsAbandoned);
    assert!(is_taken_under_an_abandoned_token(mutation));
}
