//! Steps on records: what they write, how durably, and whom they concern.

use std::{num::NonZeroU32, ops::RangeInclusive};

use super::{
    super::{
        body::Body,
        evaluation::{Evaluation, Lock, Terms, Writes, evaluate},
    },
    *,
};
use crate::{
    request::{key::LockKey, spec::LockKind},
    store::{
        AcquireReply, Hold, HolderId, KeyRequest, PollReply, Release, Renewal, RevokeReply,
        RevokeScope, StoreEvent,
        table::{Step, Table, acquire_all},
    },
};

/// The records of some locks, and the time of their database.
struct Bench {
    locks: Vec<Lock>,
    found: Vec<Option<Record>>,
    terms: Terms,
}

impl Bench {
    fn new() -> Self {
        Self::with([("a", LockKind::Lock)])
    }

    fn with<const N: usize>(locks: [(&str, LockKind); N]) -> Self {
        let lock = |(name, kind)| Lock::new(&LockKey::new(name).unwrap(), kind);
        Self {
            locks: locks.map(lock).into(),
            found: vec![None; N],
            terms: Terms {
                now: exactly(NOW),
                caller: None,
                is_guarded: false,
                writes: Writes::Changes,
            },
        }
    }

    fn pass(&mut self, time: Duration) {
        self.terms.now = exactly(self.terms.now.reached.later(time));
    }

    /// Makes a step and writes what it changes.
    fn step<T>(&mut self, rule: impl FnOnce(&mut Table, &mut Step<'_>) -> T) -> Evaluation<T> {
        let result = evaluate(&self.locks, &self.found, &self.terms, rule).unwrap();
        for change in result.swap.iter().flat_map(|swap| &swap.changes) {
            let place = self.locks.iter().position(|lock| lock.name == change.name);
            self.found[place.unwrap()] = Some(change.record.clone());
        }
        result
    }

    fn hold(&self, mode: Mode) -> Hold {
        Hold::new(self.locks[0].key.clone(), mode, Token::random())
    }

    /// Acquires a lock or waits for it.
    fn acquire(&mut self, hold: &Hold) -> Evaluation<AcquireReply> {
        self.terms.caller = Some(hold.token);
        let result = self.step(|table, step| {
            let request = KeyRequest::new(hold.clone(), LEASE, step.now);
            table.acquire(&request.queued(), step)
        });
        self.terms.caller = None;
        result
    }

    /// Acquires a free lock. Returns the fencing token as well.
    fn held(&mut self, mode: Mode) -> (Hold, FencingToken) {
        let hold = self.hold(mode);
        let fence = granted(&self.acquire(&hold));
        (hold, fence)
    }

    /// Lets a new token wait for the lock.
    fn waits(&mut self, mode: Mode) -> Hold {
        let hold = self.hold(mode);
        let result = self.acquire(&hold);
        assert!(result.is_queued);
        let reply = result.outcome;
        assert!(matches!(reply, AcquireReply::Queued { .. }), "{reply:?}");
        hold
    }

    fn poll(&mut self, hold: &Hold) -> Evaluation<PollReply> {
        self.step(|table, step| table.poll(hold, step))
    }

    fn renew(&mut self, hold: &Hold, lease: Duration) -> bool {
        let renewal = Renewal::new(hold.clone(), lease);
        let result = self.step(|table, step| table.renew(&renewal, step.now, step.begins));
        is_durable(&result)
    }

    fn release(&mut self, hold: &Hold, keep_for: Duration) -> Evaluation<()> {
        let release = Release::new(hold.clone()).keep_for(Some(keep_for));
        self.step(|table, step| {
            table.release(&release, step);
        })
    }

    fn revoke(&mut self, scope: RevokeScope) -> Evaluation<RevokeReply> {
        let key = self.locks[0].key.clone();
        self.terms.writes = Writes::Durably;
        let result = self.step(|table, step| table.revoke(&key, LockKind::Lock, scope, step));
        self.terms.writes = Writes::Changes;
        assert_eq!(result.outcome, RevokeReply::Revoked);
        result
    }

    fn body(&self) -> Body {
        Body::read(&name(), &self.found[0].as_ref().unwrap().body).unwrap()
    }
}

fn granted(result: &Evaluation<AcquireReply>) -> FencingToken {
    match &result.outcome {
        AcquireReply::Granted(grant) => grant.fence,
        reply => panic!("{reply:?}"),
    }
}

/// Returns the fencing tokens with which the holders write, by the only change of a step.
fn fences<T>(result: &Evaluation<T>) -> Option<RangeInclusive<FencingToken>> {
    match &result.swap.as_ref().unwrap().changes[..] {
        [change] => change.fences.clone(),
        changes => panic!("{changes:?}"),
    }
}

/// Returns the grant of a waiter, by the only event of a step.
fn handed_off<T>(result: &Evaluation<T>, to: &Hold) -> FencingToken {
    match &result.events[..] {
        [caused] => match &caused.event {
            StoreEvent::Granted { hold, grant, .. } => {
                assert_eq!((hold, caused.client), (to, to.token.client()));
                grant.fence
            }
            event => panic!("{event:?}"),
        },
        events => panic!("{} events", events.len()),
    }
}

fn refuses_all<T>(result: &Evaluation<T>) -> bool {
    fences(result).is_some_and(|fences| fences.is_empty())
}

fn is_durable<T>(result: &Evaluation<T>) -> bool {
    result.swap.as_ref().expect("a change").durable
}

#[test]
fn the_fencing_tokens_of_a_record_are_those_of_its_holders_or_of_the_last_ones() {
    let mut bench = Bench::new();
    let one = bench.hold(Mode::Shared);
    let result = bench.acquire(&one);
    let first = granted(&result);
    assert_eq!(fences(&result), Some(first..=first));
    bench.pass(SECOND);
    let two = bench.hold(Mode::Shared);
    let result = bench.acquire(&two);
    let second = granted(&result);
    assert_eq!(fences(&result), Some(first..=second));
    assert_eq!(bench.body().fence, second.number());
    for hold in [one, two] {
        let result = bench.release(&hold, Duration::ZERO);
        assert_eq!(fences(&result), Some(first..=second));
    }
    assert_eq!(
        bench.step(|_, step| step.latest_fence()).outcome,
        Some(second)
    );
    // At the same time: the number is one larger.
    let writer = bench.hold(Mode::Exclusive);
    let result = bench.acquire(&writer);
    let third = granted(&result);
    assert_eq!(
        (third, fences(&result)),
        (second.later(1), Some(third..=third))
    );
    // The next writer takes the lock over while the lease of this one lasts.
    let next = bench.waits(Mode::Exclusive);
    let result = bench.release(&writer, Duration::ZERO);
    let fourth = handed_off(&result, &next);
    assert_eq!(fences(&result), Some(fourth..=fourth));
    // A lease that ends now is over, also that of the same token.
    let expires = Timestamp::from_micros(bench.body().slots[0].expires);
    bench.pass(expires.since(bench.terms.now.reached));
    let result = bench.acquire(&next);
    let fifth = granted(&result);
    assert_eq!(fences(&result), Some(fifth..=fifth));
}

#[test]
fn a_revoked_holder_is_notified_and_its_fencing_token_refused() {
    let mut bench = Bench::new();
    let (holder, _) = bench.held(Mode::Exclusive);
    let result = bench.revoke(RevokeScope::Leased);
    let concerned: Vec<_> = result.events.iter().map(|it| it.client).collect();
    assert_eq!(concerned, [holder.token.client()]);
    assert!(is_durable(&result) && refuses_all(&result));
    // Each later step notifies it, in case the event was lost.
    let (next, fence) = bench.held(Mode::Exclusive);
    assert_eq!(bench.poll(&next).revoked, [holder.token]);
    assert_eq!(bench.body().since, fence.number());
}

#[test]
fn the_fencing_token_of_a_revoked_holder_is_refused_by_that_of_the_next_one() {
    let mut bench = Bench::new();
    bench.held(Mode::Exclusive);
    let next = bench.waits(Mode::Exclusive);
    let result = bench.revoke(RevokeScope::Leased);
    let granted = result.events.iter().find_map(|it| match &it.event {
        StoreEvent::Granted { hold, grant, .. } if *hold == next => Some(grant.fence),
        _ => None,
    });
    let fence = granted.unwrap();
    assert_eq!(fences(&result), Some(fence..=fence));
}

#[test]
fn the_fencing_tokens_of_readers_stay_while_one_of_them_is_not_revoked() {
    let mut bench = Bench::new();
    let (one, first) = bench.held(Mode::Shared);
    let (_, second) = bench.held(Mode::Shared);
    let id = HolderId::of(&one.key, one.token, false);
    let result = bench.revoke(RevokeScope::Holder(id));
    assert_eq!(fences(&result), Some(first..=second));
    assert!(refuses_all(&bench.revoke(RevokeScope::Leased)));
}

/// Its transaction has compared the token, and goes on.
#[test]
fn a_guarded_revocation_refuses_no_fencing_token() {
    let mut bench = Bench::new();
    let (_, fence) = bench.held(Mode::Exclusive);
    bench.terms.is_guarded = true;
    let result = bench.revoke(RevokeScope::Leased);
    assert_eq!(fences(&result), Some(fence..=fence));
}

#[test]
fn what_a_crash_may_undo_costs_waiting_and_no_more() {
    let mut bench = Bench::new();
    let holder = bench.hold(Mode::Exclusive);
    assert!(is_durable(&bench.acquire(&holder)), "a grant");
    let waiter = bench.hold(Mode::Exclusive);
    assert!(!is_durable(&bench.acquire(&waiter)), "a request that waits");
    bench.pass(SECOND);
    assert!(!is_durable(&bench.poll(&waiter)), "a poll");
    bench.terms.writes = Writes::Always;
    let abandoned = bench.step(|table, step| table.abandon(&waiter, step));
    assert!(!is_durable(&abandoned), "the end of a wait");
    bench.terms.writes = Writes::Changes;
    assert!(bench.renew(&holder, LEASE), "a longer lease");
    let kept = bench.release(&holder, SECOND);
    assert!(!is_durable(&kept), "a reservation within the lease");
    bench.pass(SECOND);
    let reader = bench.hold(Mode::Shared);
    assert!(is_durable(&bench.acquire(&reader)), "a grant");
    let repeated = bench.poll(&reader);
    assert!(is_durable(&repeated), "a fencing token of the same holder");
}

#[test]
fn a_result_survives_a_crash_and_ends_with_its_reservation() {
    let mut bench = Bench::new();
    let (holder, fence) = bench.held(Mode::Exclusive);
    let release = Release::new(holder).keep_for(Some(SECOND));
    let release = release.result(Some((fence, Arc::from(*b"result"))));
    assert!(is_durable(
        &bench.step(|table, step| table.release(&release, step))
    ));
    let (body, key) = (bench.body(), &bench.locks[0].key);
    let done = |after| body.done(key, NOW.later(after)).map(|done| done.value);
    let last = SECOND - Duration::from_micros(1);
    assert_eq!(done(last), Some(b"result".to_vec()));
    assert_eq!(done(SECOND), None);
    let taken = [last, SECOND].map(|after| body.is_taken(NOW.later(after)));
    assert_eq!(taken, [true, false]);
}

#[test]
fn a_poll_is_written_once_three_quarters_of_the_usual_time_have_passed() {
    let mut bench = Bench::new();
    bench.held(Mode::Exclusive);
    let waiter = bench.waits(Mode::Exclusive);
    let (almost, rest) = (Duration::from_millis(749), Duration::from_millis(1));
    for _ in 0..2 {
        bench.pass(almost);
        assert!(bench.poll(&waiter).swap.is_none());
        bench.pass(rest);
        assert!(bench.poll(&waiter).swap.is_some());
    }
}

/// The step may be executed when the clock shows more than is known. Its reply is shortened.
#[test]
fn a_lease_is_as_long_as_requested_by_a_clock_that_is_known_within_bounds() {
    let mut bench = Bench::new();
    let unsure = Duration::from_millis(100);
    bench.terms.now = Now {
        latest: NOW.later(unsure * 2),
        unsure,
        ..exactly(NOW)
    };
    let (holder, _) = bench.held(Mode::Exclusive);
    let ends = |bench: &Bench| Timestamp::from_micros(bench.body().slots[0].expires);
    assert_eq!(ends(&bench), NOW.later(LEASE + unsure));
    bench.release(&holder, SECOND);
    assert_eq!(ends(&bench), NOW.later(SECOND + unsure * 2));
}

#[test]
fn an_event_goes_to_the_next_waiter_for_its_lock_and_not_for_others() {
    let locks = [
        ("a", LockKind::Lock),
        ("a", LockKind::Permits),
        ("b", LockKind::Lock),
    ];
    let mut bench = Bench::with(locks);
    let permit = Mode::Permits(NonZeroU32::MIN);
    let mut waiters = Vec::new();
    for (place, mode) in [Mode::Exclusive, permit, Mode::Exclusive]
        .iter()
        .enumerate()
    {
        let key = &bench.locks[place].key.clone();
        let [holder, waiter] = [(); 2].map(|()| Hold::new(key.clone(), *mode, Token::random()));
        assert!(!bench.acquire(&holder).is_queued);
        assert!(bench.acquire(&waiter).is_queued);
        waiters.push(waiter);
    }
    for (place, waiter) in waiters.iter().enumerate() {
        let Lock { key, kind, name } = bench.locks[place].clone();
        let ttl = Duration::ZERO;
        let result = bench.step(|_, step| step.events.push(StoreEvent::FreeIn { key, kind, ttl }));
        let events = result.events.iter();
        let concerned: Vec<_> = events.map(|it| (&it.record, it.client)).collect();
        assert_eq!(concerned, [(&name, waiter.token.client())]);
    }
}

/// One of them is held already, by the same token.
#[test]
fn a_step_on_several_locks_writes_the_records_of_those_that_change() {
    let mut bench = Bench::with([("a", LockKind::Lock), ("b", LockKind::Lock)]);
    let (held, fence) = bench.held(Mode::Exclusive);
    let other = Hold {
        key: bench.locks[1].key.clone(),
        ..held.clone()
    };
    let result = bench.step(|table, step| {
        let requests = [&held, &other].map(|it| KeyRequest::new(it.clone(), LEASE, step.now));
        acquire_all(&mut [table], |_| 0, &requests, step)
    });
    let next = fence.later(1);
    assert_eq!(fences(&result), Some(next..=next));
    assert_eq!(bench.body().fence, fence.number());
}
