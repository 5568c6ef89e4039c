//! The line of one lock, by property and by story; no store, no sleep.

use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};

use futures_util::{FutureExt as _, task::ArcWake};
use proptest::prelude::*;

use super::*;

const LEASE: Duration = Duration::from_secs(30);

fn key() -> LockKey {
    LockKey::new("k").unwrap()
}

fn enter<'a>(gates: &'a Gates) -> Turn<'a> {
    gates.enter(&key(), Family::Lock).unwrap()
}

/// Counts how often it was woken.
#[derive(Default)]
struct Bell(AtomicU32);

impl ArcWake for Bell {
    fn wake_by_ref(bell: &Arc<Self>) {
        bell.0.fetch_add(1, Ordering::Relaxed);
    }
}

fn poll_head(turn: &Turn<'_>, bell: &Arc<Bell>) -> Poll<Result<(), Shut>> {
    let waker = futures_util::task::waker(bell.clone());
    Box::pin(turn.head()).poll_unpin(&mut Context::from_waker(&waker))
}

fn poll_news(turn: &Turn<'_>, bell: &Arc<Bell>) -> Poll<Result<(), Shut>> {
    let waker = futures_util::task::waker(bell.clone());
    Box::pin(turn.news()).poll_unpin(&mut Context::from_waker(&waker))
}

#[test]
fn a_place_goes_to_the_next_with_the_same_wish() {
    let gates = Gates::new(10);
    let now = Instant::now();
    let (mut first, mut second, mut third) = (enter(&gates), enter(&gates), enter(&gates));
    assert_eq!(first.take_place(Mode::Exclusive, LEASE, now), None);
    first.refused(now, None, true, 0.5);
    let place = *first.place().unwrap();
    assert_eq!(first.leave(), None, "the second goes on with it");

    assert_eq!(second.take_place(Mode::Exclusive, LEASE, now), None);
    assert_eq!(second.place(), Some(&place));
    assert_eq!(second.leave(), None);

    let unfit = third.take_place(Mode::Shared, LEASE, now);
    assert_eq!(unfit, Some(place), "nobody goes on with it, so it must be abandoned in the store");
    assert_ne!(third.place().unwrap().token, place.token);
}

#[test]
fn the_last_to_leave_gives_up_a_place_in_the_stores_line() {
    let gates = Gates::new(10);
    let now = Instant::now();
    for queued in [false, true] {
        let mut turn = enter(&gates);
        turn.take_place(Mode::Exclusive, LEASE, now);
        turn.refused(now, None, queued, 0.5);
        assert_eq!(turn.leave().is_some(), queued);
        assert!(lock(&gates.lines).by_lock.is_empty());
    }
}

#[test]
fn a_name_without_an_answer_is_not_used_again() {
    let gates = Gates::new(10);
    let now = Instant::now();
    let mut turn = enter(&gates);
    turn.take_place(Mode::Exclusive, LEASE, now);
    let token = turn.place().unwrap().token;
    turn.refused(now, None, false, 0.5);
    assert_eq!(turn.place().unwrap().token, token, "a refusal is an answer");
    turn.failed(now, None, 0.5);
    assert_ne!(turn.place().unwrap().token, token);
}

#[test]
fn a_release_during_the_question_is_not_missed() {
    let gates = Gates::new(10);
    let now = Instant::now();
    let bell = Arc::<Bell>::default();
    let mut turn = enter(&gates);
    turn.take_place(Mode::Exclusive, LEASE, now);
    turn.asking();
    gates.released(&key(), Family::Lock);
    turn.refused(now, None, false, 0.5);
    assert_eq!(poll_news(&turn, &bell), Poll::Ready(Ok(())));

    turn.asking();
    turn.refused(now, None, false, 0.5);
    assert_eq!(poll_news(&turn, &bell), Poll::Pending);
    gates.released(&key(), Family::Lock);
    assert_eq!(bell.0.load(Ordering::Relaxed), 1);
    assert_eq!(poll_news(&turn, &bell), Poll::Ready(Ok(())));
}

#[test]
fn a_release_between_two_heads_is_not_missed() {
    let gates = Gates::new(10);
    let now = Instant::now();
    let bell = Arc::<Bell>::default();
    let (mut first, mut second) = (enter(&gates), enter(&gates));
    first.take_place(Mode::Exclusive, LEASE, now);
    first.asking();
    first.granted(now + LEASE);
    // The first holds and releases before the second comes forward.
    gates.released(&key(), Family::Lock);
    first.leave();
    second.take_place(Mode::Exclusive, LEASE, now);
    assert_eq!(poll_news(&second, &bell), Poll::Ready(Ok(())));
}

#[test]
fn the_pause_between_questions_grows_to_its_limit_and_ends_with_the_holders_lease() {
    let gates = Gates::new(10);
    let now = Instant::now();
    let mut turn = enter(&gates);
    turn.take_place(Mode::Exclusive, LEASE, now);
    let mut last = Duration::ZERO;
    for _ in 0..30 {
        turn.refused(now, Some(LEASE), false, 1.0);
        let pause = turn.place().unwrap().ask_at - now;
        assert!(pause >= last && pause <= LONGEST_PAUSE);
        last = pause;
    }
    assert_eq!(last, LONGEST_PAUSE);
    turn.refused(now, Some(Duration::from_millis(7)), false, 1.0);
    assert_eq!(turn.place().unwrap().ask_at - now, Duration::from_millis(8));
}

#[test]
fn closing_sends_everybody_home() {
    let gates = Gates::new(10);
    let (mut head, waiting) = (enter(&gates), enter(&gates));
    let (at_head, behind) = (Arc::<Bell>::default(), Arc::<Bell>::default());
    head.take_place(Mode::Exclusive, LEASE, Instant::now());
    assert_eq!(poll_news(&head, &at_head), Poll::Pending);
    assert_eq!(poll_head(&waiting, &behind), Poll::Pending);
    gates.close();
    assert_eq!((at_head.0.load(Ordering::Relaxed), behind.0.load(Ordering::Relaxed)), (1, 1));
    assert_eq!(poll_head(&waiting, &behind), Poll::Ready(Err(Shut::Closed)));
    assert_eq!(gates.enter(&key(), Family::Lock).map(drop), Err(Shut::Closed));
}

proptest! {
    /// Whoever comes and goes in whatever order: heads follow one another in the order of arrival, the next head is woken
    /// if it waits, nobody beyond the limit is let in, and nothing is left at the end.
    #[test]
    fn first_come_first_served(steps in proptest::collection::vec((any::<bool>(), any::<prop::sample::Index>(), any::<bool>()), 1..200)) {
        const LIMIT: usize = 8;
        let gates = Gates::new(LIMIT);
        let mut line: Vec<(Turn<'_>, Arc<Bell>, bool)> = Vec::new();
        for (comes, who, polls) in steps {
            if comes {
                match gates.enter(&key(), Family::Lock) {
                    Ok(turn) => {
                        let bell = Arc::<Bell>::default();
                        let waits = polls && poll_head(&turn, &bell).is_pending();
                        prop_assert_eq!(turn.is_first(), line.is_empty());
                        line.push((turn, bell, waits));
                    }
                    Err(shut) => {
                        prop_assert_eq!(shut, Shut::Full);
                        prop_assert_eq!(line.len(), LIMIT + 1);
                    }
                }
            } else if !line.is_empty() {
                let index = who.index(line.len());
                let (mut turn, ..) = line.remove(index);
                turn.leave();
                if index == 0 && let Some((_, bell, waits)) = line.first() {
                    prop_assert_eq!(bell.0.load(Ordering::Relaxed), u32::from(*waits));
                }
            }
            for (index, (turn, bell, _)) in line.iter().enumerate() {
                let head = lock(&gates.lines).by_lock[&(Family::Lock, key())].head == Some(turn.ticket);
                prop_assert_eq!(head, index == 0);
                prop_assert!(index == 0 || bell.0.load(Ordering::Relaxed) == 0);
            }
        }
        for (turn, ..) in &mut line {
            turn.leave();
        }
        prop_assert!(lock(&gates.lines).by_lock.is_empty());
    }
}
