//! Tests of the local wait queue, by property and by example, without a store.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    task::Context,
};

use futures_util::{FutureExt as _, task::ArcWake};
use proptest::prelude::*;

use super::{
    place::{LONGEST_PAUSE, Place},
    *,
};
use crate::{lease::Lease, spec::Mode, store::HANDOFF_LEASE};

const LEASE: Duration = Duration::from_secs(30);
const WISH: Wish = Wish {
    mode: Mode::Exclusive,
    lease: LEASE,
    passing: true,
};

fn key() -> LockKey {
    LockKey::new("k").unwrap()
}

fn enter<'a>(gates: &'a Gates) -> Turn<'a> {
    gates.enter(&key(), WISH, usize::MAX).unwrap()
}

/// Counts its wake-ups.
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

fn asked(turn: &Turn<'_>) -> Token {
    match turn.next(Instant::now()) {
        Next::Ask(token, _) => token,
        next => panic!("{next:?}"),
    }
}

fn queued(turn: &Turn<'_>) -> Token {
    let token = asked(turn);
    turn.queued(token, Instant::now(), FencingToken::new(7), Some(LEASE));
    token
}

fn waits(turn: &Turn<'_>) -> Instant {
    match turn.next(Instant::now()) {
        Next::Wait(at) => at,
        next => panic!("{next:?}"),
    }
}

fn grant(fence: u64) -> Grant {
    Grant::new(FencingToken::new(fence).unwrap(), HANDOFF_LEASE)
}

fn hold(token: Token) -> Hold {
    Hold::new(key(), Mode::Exclusive, token)
}

fn baton(left: u32) -> Baton {
    let now = Instant::now();
    let lease = Lease::granted(LEASE, true, now, LEASE, 0.5);
    Baton::new(
        hold(Token::random()),
        FencingToken::new(9).unwrap(),
        lease,
        Budget::new(left + 1, now, now),
        now,
    )
    .unwrap()
}

#[test]
fn a_place_goes_to_the_next_with_the_same_wish() {
    let gates = Gates::new(10, usize::MAX);
    let (first, second) = (enter(&gates), enter(&gates));
    let reader = gates
        .enter(
            &key(),
            Wish {
                mode: Mode::Shared,
                lease: LEASE,
                passing: false,
            },
            usize::MAX,
        )
        .unwrap();
    let token = queued(&first);
    assert!(
        first.leave().orphan.is_none(),
        "the second waiter continues with it"
    );
    waits(&second);
    gates.pushed(&hold(token), grant(8));
    assert!(matches!(second.next(Instant::now()), Next::Granted(granted, _) if granted == token));

    let orphan = second
        .leave()
        .orphan
        .expect("no waiter continues with it, so it must be abandoned in the store");
    assert_eq!(orphan.token, token);
    assert_ne!(asked(&reader), token);
}

/// Readers of other processes may have larger fencing tokens than a grant that is older than the
/// reader.
#[test]
fn a_reader_polls_for_the_grant_of_an_inherited_place() {
    let gates = Gates::new(10, usize::MAX);
    let wish = Wish {
        mode: Mode::Shared,
        lease: LEASE,
        passing: false,
    };
    let enter = || gates.enter(&key(), wish, usize::MAX).unwrap();
    let first = enter();
    let token = queued(&first);
    std::thread::sleep(Duration::from_millis(2));
    let second = enter();
    drop(first.leave());
    let hold = Hold::new(key(), Mode::Shared, token);
    gates.pushed(&hold, grant(8));
    assert!(matches!(second.next(Instant::now()), Next::Poll(polled) if polled == token));

    // In the queue at a time after its arrival: a later grant is younger than the reader.
    second.queued(token, Instant::now(), FencingToken::new(8), Some(LEASE));
    gates.pushed(&hold, grant(9));
    assert!(matches!(second.next(Instant::now()), Next::Granted(granted, _) if granted == token));
}

#[test]
fn the_last_to_leave_gives_up_a_place_that_the_store_knows() {
    let gates = Gates::new(10, usize::MAX);
    for known in [false, true] {
        let turn = enter(&gates);
        let token = asked(&turn);
        match known {
            true => turn.queued(token, Instant::now(), None, None),
            false => turn.refused(token, None),
        }
        assert_eq!(turn.leave().orphan.is_some(), known);
        assert!(lock(&gates.lines).by_lock.is_empty());
    }
}

// Rule 1 of docs/PROTOCOL.md.
#[test]
fn a_name_without_an_answer_is_not_used_again() {
    let gates = Gates::new(10, usize::MAX);
    let turn = enter(&gates);
    let token = asked(&turn);
    turn.failed(token, None);
    assert!(
        !gates.pushed(&hold(token), grant(8)),
        "no waiter uses the token any more"
    );
    std::thread::sleep(waits(&turn).saturating_duration_since(Instant::now()));
    assert_ne!(asked(&turn), token);
}

// Rule 3.
#[test]
fn a_push_counts_only_if_it_is_newer_than_the_latest_reply() {
    let gates = Gates::new(10, usize::MAX);
    let turn = enter(&gates);
    let token = asked(&turn);
    assert!(gates.pushed(&hold(token), grant(7)));
    waits(&turn);
    let sent = Instant::now();
    turn.queued(token, sent, FencingToken::new(7), Some(LEASE));
    waits(&turn);
    assert!(gates.pushed(&hold(token), grant(8)));
    let Next::Granted(granted, proven) = turn.next(Instant::now()) else {
        panic!("it is newer")
    };
    assert_eq!(
        (granted, proven),
        (
            token,
            Proven {
                grant: grant(8),
                as_of: sent
            }
        )
    );

    // A poll shows the counter beyond the grant.
    turn.queued(token, Instant::now(), FencingToken::new(8), Some(LEASE));
    waits(&turn);
}

// Rule 4: the latest instant at which the token surely did not hold the lock.
#[test]
fn pushed_grant_counts_from_the_latest_queued_reply() {
    let gates = Gates::new(10, usize::MAX);
    let turn = enter(&gates);
    let token = asked(&turn);
    let t0 = Instant::now();
    turn.queued(token, t0 + Duration::from_secs(2), None, None);
    // The reply to an earlier request arrives late.
    turn.queued(token, t0 + Duration::from_secs(1), None, None);
    gates.pushed(&hold(token), grant(8));
    let Next::Granted(_, proven) = turn.next(Instant::now()) else {
        panic!("it is queued")
    };
    assert_eq!(proven.as_of, t0 + Duration::from_secs(2));
}

#[test]
fn release_during_a_request_is_seen_without_a_store_queue() {
    let gates = Gates::new(10, usize::MAX);
    let bell = Arc::<Bell>::default();
    let turn = enter(&gates);
    let token = asked(&turn);
    gates.released(&key(), LockKind::Lock);
    turn.refused(token, None);
    let second = asked(&turn);

    turn.refused(second, None);
    waits(&turn);
    assert_eq!(poll_news(&turn, &bell), Poll::Pending);
    gates.released(&key(), LockKind::Lock);
    assert_eq!(bell.0.load(Ordering::Relaxed), 1);
    assert_eq!(poll_news(&turn, &bell), Poll::Ready(Ok(())));
    // Rule 1: with several servers, some may have granted the first attempt and not have
    // received its abandon yet.
    assert!(token != second && second != asked(&turn));
}

#[test]
fn queued_waiter_is_notified_and_polls_once_a_second() {
    let gates = Gates::new(10, usize::MAX);
    let turn = enter(&gates);
    let before = Instant::now();
    queued(&turn);
    gates.released(&key(), LockKind::Lock);
    let at = waits(&turn);
    assert!(
        at >= before + Duration::from_millis(750),
        "{:?}",
        at - before
    );
    assert!(at <= Instant::now() + Duration::from_secs(1));
    assert!(gates.store_lost().is_empty());
    assert!(matches!(
        turn.next(Instant::now() + ASK_WITHIN),
        Next::Poll(_)
    ));
}

#[test]
fn hand_off_goes_to_the_head_with_the_same_wish_only() {
    let gates = Gates::new(10, usize::MAX);
    let part = |baton: Option<Baton>| gates.part(&key(), LEASE, |_| baton);
    assert_eq!(part(Some(baton(3))), Parting::GiveBack, "no request waits");
    let reader = gates
        .enter(
            &key(),
            Wish {
                mode: Mode::Shared,
                lease: LEASE,
                passing: false,
            },
            usize::MAX,
        )
        .unwrap();
    let (first, second) = (enter(&gates), enter(&gates));
    assert_eq!(
        part(Some(baton(3))),
        Parting::GiveBack,
        "a reader is at the head of the queue"
    );
    reader.leave();
    assert_eq!(
        gates.part(&key(), LEASE * 2, |_| Some(baton(3))),
        Parting::GiveBack,
        "another lease"
    );

    let bell = Arc::<Bell>::default();
    assert_eq!(poll_news(&first, &bell), Poll::Pending);
    assert_eq!(part(Some(baton(3))), Parting::Passed);
    assert_eq!(bell.0.load(Ordering::Relaxed), 1);
    // The first waiter is cancelled: a hand-off that was not taken goes to the next
    // one (PROTOCOL 20).
    assert!(first.leave().baton.is_none());
    let Next::Take(passed) = second.next(Instant::now()) else {
        panic!("it was handed off")
    };
    assert_eq!((passed.fence.number(), passed.budget.left), (10, 3));
    second.served(None, Some(passed.budget.until));

    let third = enter(&gates);
    second.leave();
    // While the holder may hand off the lock, the head does not call the store.
    assert!(waits(&third) > Instant::now());
    assert_eq!(part(Some(baton(3))), Parting::Passed);
    assert!(
        third.leave().baton.is_some(),
        "no waiter is left to take it"
    );
}

#[test]
fn release_without_a_hand_off_wakes_local_waiters() {
    let gates = Gates::new(10, usize::MAX);
    let turn = enter(&gates);
    let Parting::HandBack(token) = gates.part(&key(), LEASE, |_| None) else {
        panic!("a request waits")
    };
    // The releasing task sends the request.
    waits(&turn);
    assert!(gates.queued_again(
        &hold(token),
        Instant::now(),
        FencingToken::new(7),
        Some(LEASE)
    ));
    assert_eq!(
        gates.part(&key(), LEASE, |_| None),
        Parting::GiveBack,
        "it is in the store's wait queue"
    );
    gates.pushed(&hold(token), grant(8));
    assert!(matches!(turn.next(Instant::now()), Next::Granted(granted, _) if granted == token));
    turn.served(Some(token), None);

    let Parting::HandBack(token) = gates.part(&key(), LEASE, |_| None) else {
        panic!("a request waits")
    };
    let taken_up = Baton {
        hold: hold(token),
        ..baton(3)
    };
    gates.handed_back(taken_up).unwrap();
    assert!(matches!(turn.next(Instant::now()), Next::Take(_)));

    let Parting::HandBack(token) = gates.part(&key(), LEASE, |_| None) else {
        panic!("a request waits")
    };
    gates.drop_place(&hold(token));
    assert_ne!(asked(&turn), token, "it makes its own attempt");
}

#[test]
fn hand_back_without_a_taker_makes_the_head_ask_at_once() {
    let gates = Gates::new(10, usize::MAX);
    let (renews, other) = (
        enter(&gates),
        Wish {
            mode: Mode::Exclusive,
            lease: LEASE,
            passing: false,
        },
    );
    let Parting::HandBack(token) = gates.part(&key(), LEASE, |_| None) else {
        panic!("a request waits")
    };
    let next = gates.enter(&key(), other, usize::MAX).unwrap();
    renews.leave();
    let bell = Arc::<Bell>::default();
    assert_eq!(poll_news(&next, &bell), Poll::Pending);
    let taken_up = Baton {
        hold: hold(token),
        ..baton(3)
    };
    assert_eq!(gates.handed_back(taken_up), Err(hold(token)));
    assert_eq!(bell.0.load(Ordering::Relaxed), 1, "the head must be woken");
    assert_ne!(asked(&next), token);
}

#[test]
fn hand_off_ends_once_the_store_may_have_lost_data() {
    let gates = Gates::new(10, usize::MAX);
    let (turn, _behind) = (enter(&gates), enter(&gates));
    let before = baton(3);
    let handed_off = baton(3);
    let token = handed_off.hold.token;
    assert_eq!(
        gates.part(&key(), LEASE, |_| Some(handed_off)),
        Parting::Passed
    );
    let withdrawn: Vec<_> = gates
        .store_lost()
        .into_iter()
        .map(|baton| baton.hold.token)
        .collect();
    assert_eq!(withdrawn, [token], "the head has not taken it");
    let Parting::HandBack(token) = gates.part(&key(), LEASE, |_| Some(before)) else {
        panic!("it was handed off")
    };
    let sent_before = Baton {
        hold: hold(token),
        ..baton(3)
    };
    gates.store_lost();
    assert_eq!(gates.handed_back(sent_before), Err(hold(token)));
    assert_ne!(asked(&turn), token);
    assert_eq!(
        gates.part(&key(), LEASE, |_| Some(baton(3))),
        Parting::Passed,
        "reserved since"
    );
}

#[test]
fn passing_ends_with_its_budget_or_its_validity() {
    let now = Instant::now();
    let lease = |ttl| Lease::granted(LEASE, true, now, ttl, 0.5);
    let fence = FencingToken::new(9).unwrap();
    let pass = |lease, budget, now| Baton::new(hold(Token::random()), fence, lease, budget, now);
    let budget = Budget::new(1, now, now);
    let once = pass(lease(LEASE), budget, now).unwrap();
    assert!(
        pass(lease(LEASE), once.budget, now).is_none(),
        "no fencing token is left"
    );
    assert!(
        pass(lease(LEASE), budget, budget.until).is_none(),
        "other processes have waited long enough"
    );
    assert!(
        pass(lease(Duration::from_secs(1)), budget, now).is_none(),
        "too little is left of the lease"
    );
    assert_eq!(Budget::new(1000, now, now).left, PASSES);
}

#[test]
fn pause_between_requests_grows_and_ends_with_the_lease() {
    let mut place = Place::new(WISH, Instant::now());
    let now = Instant::now();
    let mut last = Duration::ZERO;
    for _ in 0..30 {
        place.refused(now, Some(LEASE), 1.0);
        let pause = place.ask_at - now;
        assert!(pause >= last && pause <= LONGEST_PAUSE);
        last = pause;
    }
    assert_eq!(last, LONGEST_PAUSE);
    place.refused(now, Some(Duration::from_millis(7)), 1.0);
    assert_eq!(place.ask_at - now, Duration::from_millis(8));
    place.queued(now, None, Some(Duration::from_millis(7)), now, 1.0);
    assert_eq!(place.ask_at - now, Duration::from_millis(8));
}

#[test]
fn a_request_that_had_to_wait_was_contended() {
    let gates = Gates::new(10, usize::MAX);
    let was_contended = |act: &dyn Fn(&Turn<'_>)| {
        let turn = enter(&gates);
        act(&turn);
        let contended = turn.served(Some(asked(&turn)), None);
        turn.leave();
        contended
    };
    assert!(!was_contended(&|_| {}), "free at the first attempt");
    let no_answer = |turn: &Turn<'_>| {
        turn.failed(asked(turn), Some(&StoreError::late()));
        std::thread::sleep(waits(turn).saturating_duration_since(Instant::now()));
    };
    assert!(!was_contended(&no_answer), "no reply is no contention");
    assert!(was_contended(&|turn| {
        turn.refused(asked(turn), None);
        gates.released(&key(), LockKind::Lock);
    }));
    assert!(was_contended(&|turn| turn.gone(queued(turn))));
    // Handed off before the first attempt.
    let turn = enter(&gates);
    assert_eq!(
        gates.part(&key(), LEASE, |_| Some(baton(3))),
        Parting::Passed
    );
    assert!(matches!(turn.next(Instant::now()), Next::Take(_)));
    assert!(turn.served(None, None));
    turn.leave();
    // Behind a waiter that left before it was granted the lock.
    let (first, second) = (enter(&gates), enter(&gates));
    first.leave();
    assert!(second.served(Some(asked(&second)), None));
    second.leave();
}

#[test]
fn closing_wakes_every_waiter() {
    let gates = Gates::new(10, usize::MAX);
    let (head, waiting) = (enter(&gates), enter(&gates));
    let (at_head, behind) = (Arc::<Bell>::default(), Arc::<Bell>::default());
    assert_eq!(poll_news(&head, &at_head), Poll::Pending);
    assert_eq!(poll_head(&waiting, &behind), Poll::Pending);
    gates.close();
    assert_eq!(
        (
            at_head.0.load(Ordering::Relaxed),
            behind.0.load(Ordering::Relaxed)
        ),
        (1, 1)
    );
    assert_eq!(poll_head(&waiting, &behind), Poll::Ready(Err(Shut::Closed)));
    assert_eq!(
        gates.enter(&key(), WISH, usize::MAX).map(drop),
        Err(Shut::Closed)
    );
}

#[test]
fn a_ticket_is_counted_once_in_whatever_way_it_is_returned() {
    let gates = Gates::new(10, 3);
    let counted = || lock(&gates.lines).tickets;
    let other = gates
        .enter(&LockKey::new("other").unwrap(), WISH, usize::MAX)
        .unwrap();
    let (head, waiting) = (enter(&gates), enter(&gates));
    assert_eq!(
        gates.enter(&key(), WISH, usize::MAX).map(drop),
        Err(Shut::FullInAll)
    );
    assert_eq!(
        gates
            .enter(&LockKey::new("free").unwrap(), WISH, 0)
            .map(drop),
        Err(Shut::FullInAll)
    );
    assert_eq!(
        lock(&gates.lines).by_lock.len(),
        2,
        "a refused request leaves no queue behind"
    );
    // From the middle, from an end, and after a grant.
    waiting.leave();
    assert_eq!(gates.enter(&key(), WISH, 0).map(drop), Err(Shut::Full));
    assert_eq!(counted(), 2);
    let token = asked(&head);
    head.served(Some(token), None);
    head.leave();
    assert_eq!(counted(), 1);
    gates.close();
    other.leave();
    assert_eq!(counted(), 0);
}

proptest! {
    /// Requests arrive and leave in any order: heads follow one another in the order of arrival,
    /// the next head is woken if it waits, no request beyond the limits is admitted, and nothing
    /// is left at the end.
    #[test]
    fn first_come_first_served(steps in proptest::collection::vec((any::<bool>(), any::<prop::sample::Index>(), any::<bool>()), 1..200)) {
        const LIMIT: usize = 8;
        let others = usize::from(steps.len() % 2 == 0) * 5;
        let gates = Gates::new(LIMIT, LIMIT + 4);
        let others: Vec<_> = (0..others).map(|number| {
            gates.enter(&LockKey::new(number.to_string()).unwrap(), WISH, usize::MAX).unwrap()
        }).collect();
        let mut line: Vec<(Turn<'_>, Arc<Bell>, bool)> = Vec::new();
        for (comes, leaver, polls) in steps {
            if comes {
                match gates.enter(&key(), WISH, usize::MAX) {
                    Ok(turn) => {
                        let bell = Arc::<Bell>::default();
                        let waits = polls && poll_head(&turn, &bell).is_pending();
                        prop_assert_eq!(turn.is_first(), line.is_empty());
                        line.push((turn, bell, waits));
                    }
                    Err(shut) => {
                        match shut {
                            Shut::Full => prop_assert_eq!(line.len(), LIMIT + 1),
                            shut => prop_assert_eq!((shut, line.len()), (Shut::FullInAll, LIMIT + 4 - others.len())),
                        }
                    }
                }
            } else if !line.is_empty() {
                let index = leaver.index(line.len());
                let (turn, ..) = line.remove(index);
                turn.leave();
                if index == 0 && let Some((_, bell, waits)) = line.first() {
                    prop_assert_eq!(bell.0.load(Ordering::Relaxed), u32::from(*waits));
                }
            }
            for (index, (turn, bell, _)) in line.iter().enumerate() {
                let head = lock(&gates.lines).by_lock[&(LockKind::Lock, key())].is_head(turn.ticket);
                prop_assert_eq!(head, index == 0);
                prop_assert!(index == 0 || bell.0.load(Ordering::Relaxed) == 0);
            }
        }
        prop_assert_eq!(lock(&gates.lines).tickets, line.len() + others.len());
        for turn in line.iter().map(|(turn, ..)| turn).chain(&others) {
            turn.leave();
        }
        prop_assert_eq!(lock(&gates.lines).tickets, 0);
        prop_assert!(lock(&gates.lines).by_lock.is_empty());
    }
}
