//! One lock or permit at a time, step by step, at any time.

use std::{num::NonZeroU32, sync::Arc};

use super::*;
use crate::{
    guard::fence::FencingToken,
    store::{RaiseReply, Token},
};

const LEASE: Duration = Duration::from_secs(30);
const SECOND: Duration = Duration::from_secs(1);
const INSTANT: Duration = Duration::from_nanos(1);

/// A table with the counter of its fencing tokens, at a time.
struct Bench {
    table: Table,
    fences: Fences,
    now: Instant,
    /// A transaction of the user keeps locks from being granted.
    is_guarded: bool,
}

/// A message to a client.
#[derive(Debug, PartialEq, Eq)]
enum Sent {
    Granted(Token),
    FreeIn(Duration),
    Revoked(Token),
}

impl Bench {
    fn new() -> Self {
        let fences = Fences::default();
        Self {
            table: Table::default(),
            now: fences.epoch.0,
            fences,
            is_guarded: false,
        }
    }

    /// Makes a step. Returns its outcome and its messages.
    fn step<T>(
        &mut self,
        caller: Option<Token>,
        rule: impl FnOnce(&mut Table, &mut Step<'_>) -> T,
    ) -> (T, Vec<Sent>) {
        let mut step = Step::new(self.now, &self.fences, caller);
        step.grants_nothing |= self.is_guarded;
        let outcome = rule(&mut self.table, &mut step);
        let sent = step.events.into_iter().map(|event| match event {
            StoreEvent::Granted { hold, .. } => Sent::Granted(hold.token),
            StoreEvent::FreeIn { ttl, .. } => Sent::FreeIn(ttl),
            StoreEvent::Revoked { token } => Sent::Revoked(token),
            event => panic!("{event:?}"),
        });
        (outcome, sent.collect())
    }

    fn acquire(&mut self, request: &KeyRequest) -> (AcquireReply, Vec<Sent>) {
        let caller = Some(request.hold.token);
        self.step(caller, |table, step| table.acquire(request, step))
    }

    fn request(&self, mode: Mode) -> KeyRequest {
        let hold = Hold::new(key("a"), mode, Token::random());
        KeyRequest::new(hold, LEASE, self.now + LEASE)
    }

    /// Acquires the lock for a new token.
    fn held(&mut self, mode: Mode) -> Hold {
        let request = self.request(mode);
        let (reply, _) = self.acquire(&request);
        assert!(matches!(reply, AcquireReply::Granted(_)), "{reply:?}");
        request.hold
    }

    /// Lets a new token wait for the lock.
    fn waits(&mut self, mode: Mode) -> Hold {
        let request = self.request(mode).queued();
        let (reply, sent) = self.acquire(&request);
        assert!(matches!(reply, AcquireReply::Queued { .. }), "{reply:?}");
        assert_eq!(sent, []);
        request.hold
    }

    /// Returns the time until another attempt, of a request that is refused or waits.
    fn refused_for(&mut self, request: &KeyRequest) -> Option<Duration> {
        match self.acquire(request) {
            (AcquireReply::Queued { holder_ttl, .. }, sent) => {
                assert_eq!(sent, []);
                holder_ttl
            }
            (AcquireReply::Busy { holder_ttl, .. }, _) => holder_ttl,
            (reply, _) => panic!("{reply:?}"),
        }
    }

    fn poll(&mut self, hold: &Hold) -> (PollReply, Vec<Sent>) {
        self.step(Some(hold.token), |table, step| table.poll(hold, step))
    }

    /// Returns the time until another attempt, of a waiter that polls.
    fn waits_for(&mut self, hold: &Hold) -> Option<Duration> {
        match self.poll(hold) {
            (PollReply::Queued { holder_ttl, .. }, sent) => {
                assert_eq!(sent, []);
                holder_ttl
            }
            (reply, _) => panic!("{reply:?}"),
        }
    }

    /// Releases a hold. Returns the messages.
    fn release(&mut self, release: &Release) -> Vec<Sent> {
        let (reply, sent) = self.step(None, |table, step| table.release(release, step));
        assert_eq!(reply, ReleaseReply::Released);
        sent
    }

    fn inspect(&self, kind: LockKind) -> Inspection {
        let step = Step::new(self.now, &self.fences, None);
        self.table.inspect(&key("a"), kind, &step)
    }
}

fn key(name: &str) -> LockKey {
    LockKey::new(name).unwrap()
}

fn permits(number: u32) -> Mode {
    Mode::Permits(NonZeroU32::new(number).unwrap())
}

#[test]
fn a_lease_that_ends_now_is_over() {
    let mut bench = Bench::new();
    let holder = bench.held(Mode::Exclusive);
    bench.now += LEASE - INSTANT;
    let found = bench.inspect(LockKind::Lock);
    assert_eq!(found.holders[0].ttl, Some(INSTANT));
    assert_eq!(bench.table.names("", bench.now).len(), 1);
    let other = bench.request(Mode::Exclusive);
    assert_eq!(bench.refused_for(&other), Some(INSTANT));

    bench.now += INSTANT;
    let found = bench.inspect(LockKind::Lock);
    assert_eq!((found.holders, found.fence), (Vec::new(), None));
    assert_eq!(bench.table.names("", bench.now), []);
    let renewal = Renewal::new(holder, LEASE);
    let renewed = bench.table.renew(&renewal, bench.now, bench.now);
    assert_eq!(renewed, RenewReply::Gone);
    bench.held(Mode::Exclusive);
}

#[test]
fn a_request_takes_effect_until_its_deadline_and_not_after_it() {
    for (late, is_late) in [(LEASE, false), (LEASE + INSTANT, true)] {
        let mut bench = Bench::new();
        let request = bench.request(Mode::Exclusive);
        bench.now += late;
        let (reply, _) = bench.acquire(&request);
        assert_eq!(reply == AcquireReply::Late, is_late, "{reply:?}");
    }
}

/// A reader beside others could have the lock but for a writer that is before it and silent.
#[test]
fn a_silent_waiter_is_skipped_at_the_time_in_the_replies_to_others() {
    let mut bench = Bench::new();
    bench.held(Mode::Shared);
    bench.waits(Mode::Exclusive);
    bench.now += SECOND;
    let reader = bench.request(Mode::Shared);
    let left = Waiter::STALE_AFTER - SECOND;
    assert_eq!(bench.refused_for(&reader), Some(left));
    bench.now += left;
    bench.held(Mode::Shared);
}

#[test]
fn a_waiter_that_is_silent_for_its_whole_life_leaves_the_queue() {
    let mut bench = Bench::new();
    bench.held(Mode::Exclusive);
    bench.waits(Mode::Exclusive);
    bench.now += Waiter::TTL - INSTANT;
    assert_eq!(bench.inspect(LockKind::Lock).waiters.len(), 1);
    bench.now += INSTANT;
    assert_eq!(bench.inspect(LockKind::Lock).waiters, []);
}

/// The number of permits is part of their name; a lock has one queue for writers and readers.
#[test]
fn an_acquisition_that_is_abandoned_no_longer_waits_in_any_mode_of_its_lock() {
    for (waits, abandons, waiters) in [
        (Mode::Exclusive, Mode::Shared, 0),
        (permits(1), permits(2), 1),
        (permits(1), permits(1), 0),
    ] {
        let mut bench = Bench::new();
        bench.held(waits);
        let mut hold = bench.waits(waits);
        let kind = waits.kind();
        hold.mode = abandons;
        bench.step(None, |table, step| table.abandon(&hold, step));
        assert_eq!(bench.inspect(kind).waiters.len(), waiters, "{waits:?}");
    }
}

#[test]
fn the_readers_of_a_group_do_not_wait_behind_a_writer_and_others_do() {
    let mut bench = Bench::new();
    let first = bench.held(Mode::Shared);
    bench.waits(Mode::Exclusive);
    for (group, is_admitted) in [
        (None, false),
        (Some(Token::random()), false),
        (Some(first.token), true),
    ] {
        let request = bench.request(Mode::Shared).reader_group(group);
        let (reply, _) = bench.acquire(&request);
        let is_granted = matches!(reply, AcquireReply::Granted(_));
        assert_eq!(is_granted, is_admitted, "{reply:?}");
    }
}

#[test]
fn fencing_tokens_are_reserved_for_writers_only() {
    for (mode, reserved) in [(Mode::Exclusive, 5), (Mode::Shared, 0), (permits(2), 0)] {
        let mut bench = Bench::new();
        let request = bench.request(mode).reserved(5);
        let (AcquireReply::Granted(grant), _) = bench.acquire(&request) else {
            panic!("{mode:?} is refused");
        };
        assert_eq!(grant.reserved, reserved, "{mode:?}");
        assert_eq!(bench.fences.latest(), Some(grant.fence.later(reserved)));
    }
}

#[test]
fn a_release_notifies_the_next_waiter_and_no_other_one() {
    let mut bench = Bench::new();
    let holder = bench.held(Mode::Exclusive);
    let waiter = bench.waits(Mode::Exclusive);
    bench.waits(Mode::Exclusive);
    let sent = bench.release(&Release::new(holder));
    assert_eq!(sent, [Sent::Granted(waiter.token)]);
}

/// Each of them asks, and leaves the queue with the result.
#[test]
fn waiters_are_notified_one_after_the_other_that_a_lock_is_done() {
    let mut bench = Bench::new();
    let holder = bench.held(Mode::Exclusive);
    let waiters = [bench.waits(Mode::Exclusive), bench.waits(Mode::Exclusive)];
    let fence = bench.fences.latest().unwrap();
    let release = Release::new(holder).keep_for(Some(LEASE));
    let release = release.result(Some((fence, Arc::from(*b"result"))));
    let next = || vec![Sent::FreeIn(Duration::ZERO)];
    assert_eq!(bench.release(&release), next());
    for (waiter, next) in waiters.iter().zip([next(), Vec::new()]) {
        let (reply, sent) = bench.poll(waiter);
        assert!(matches!(reply, PollReply::Done(_)), "{reply:?}");
        assert_eq!(sent, next);
    }
    let done = |at| bench.table.done(&key("a"), at);
    let done_at = done(bench.now + LEASE - INSTANT).map(|done| done.value);
    assert_eq!(done_at, Some(b"result".to_vec()));
    assert_eq!(done(bench.now + LEASE), None);
}

/// The end of a transaction of the user is no event.
#[test]
fn the_next_waiter_of_a_guarded_lock_asks_again_soon_and_the_others_at_their_pace() {
    let soon = Some(Duration::from_millis(40));
    let mut bench = Bench::new();
    bench.is_guarded = true;
    let requests = [(); 2].map(|()| bench.request(Mode::Exclusive).queued());
    let usual = Some(Waiter::STALE_AFTER);
    for (request, left) in requests.iter().zip([soon, usual]) {
        assert_eq!(bench.refused_for(request), left);
    }
    for (request, left) in requests.iter().zip([soon, usual]) {
        assert_eq!(bench.waits_for(&request.hold), left);
    }
    bench.is_guarded = false;
    let (reply, _) = bench.poll(&requests[0].hold);
    assert!(matches!(reply, PollReply::Granted(_)), "{reply:?}");
}

#[test]
fn a_guarded_release_of_a_lock_has_its_next_waiter_ask_again_soon() {
    let mut bench = Bench::new();
    let holder = bench.held(Mode::Exclusive);
    bench.is_guarded = true;
    let waiter = bench.request(Mode::Exclusive).queued();
    // While the lock is held, its lease counts.
    assert_eq!(bench.refused_for(&waiter), Some(LEASE));
    let sent = bench.release(&Release::new(holder));
    assert_eq!(sent, [Sent::FreeIn(Duration::from_millis(40))]);
}

/// No token is left to grant the lock to them.
#[test]
fn waiters_do_not_ask_sooner_once_the_fencing_tokens_are_used_up() {
    let mut bench = Bench::new();
    let holder = bench.held(Mode::Exclusive);
    let waiter = bench.waits(Mode::Exclusive);
    let end = FencingToken::LAST.number() - (1 << 48);
    let before = FencingToken::new(end - 2).unwrap();
    assert_eq!(bench.fences.raise(before), RaiseReply::Raised);
    let mut other = bench.request(Mode::Exclusive);
    other.hold.key = key("b");
    let (reply, _) = bench.acquire(&other);
    let AcquireReply::Granted(last) = reply else {
        panic!("{reply:?}");
    };
    assert_eq!(last.fence.number(), end - 1);
    let at_end = FencingToken::new(end).unwrap();
    assert_eq!(bench.fences.raise(at_end), RaiseReply::Raised);
    other.hold.key = key("c");
    let (reply, _) = bench.acquire(&other);
    assert_eq!(reply, AcquireReply::ForeignKey(KeyPart::Fence));
    assert_eq!(bench.release(&Release::new(holder)), []);
    assert_eq!(bench.waits_for(&waiter), Some(Waiter::STALE_AFTER));
}

/// A client of an earlier version would not find its own permit.
#[test]
fn a_waiter_for_another_number_of_permits_gets_one_when_it_polls() {
    let mut bench = Bench::new();
    let holders = [(); 3].map(|()| bench.held(permits(3)));
    let waiter = bench.waits(permits(2));
    assert_eq!(bench.release(&Release::new(holders[0].clone())), []);
    let sent = bench.release(&Release::new(holders[1].clone()));
    assert_eq!(sent, [Sent::FreeIn(Duration::ZERO)]);
    // Nor does it get one when another client asks for the same number.
    bench.waits(permits(2));
    let found = bench.inspect(LockKind::Permits);
    assert_eq!((found.holders.len(), found.waiters.len()), (1, 2));
    let (reply, _) = bench.poll(&waiter);
    assert!(matches!(reply, PollReply::Granted(_)), "{reply:?}");
}

#[test]
fn the_last_permit_to_be_released_goes_to_a_waiter_for_any_number() {
    let mut bench = Bench::new();
    let holder = bench.held(permits(3));
    let waiter = bench.waits(permits(1));
    let sent = bench.release(&Release::new(holder));
    assert_eq!(sent, [Sent::Granted(waiter.token)]);
}

/// A dead process does not renew its lease, and the lock is free before the next one polls.
#[test]
fn the_end_of_a_short_lease_from_the_queue_is_known_to_the_next_waiter() {
    let short = Waiter::POLL_INTERVAL / 2;
    for (lease, is_known) in [(short, true), (LEASE, false)] {
        let mut bench = Bench::new();
        bench.held(Mode::Exclusive);
        bench.now += LEASE - SECOND;
        let first = bench.request(Mode::Exclusive).queued();
        let first = KeyRequest { lease, ..first };
        assert_eq!(bench.refused_for(&first), Some(SECOND));
        bench.waits(Mode::Exclusive);
        bench.now += SECOND;
        let other = bench.request(Mode::Exclusive);
        let (_, sent) = bench.acquire(&other);
        let mut expected = vec![Sent::Granted(first.hold.token)];
        expected.extend(is_known.then_some(Sent::FreeIn(short)));
        assert_eq!(sent, expected);
    }
}

#[test]
fn a_lease_that_is_too_long_is_shortened() {
    let (mut bench, begins) = (Bench::new(), Duration::from_millis(100));
    let hold = bench.held(Mode::Exclusive);
    for (lease, at_most, left) in [
        (SECOND, None, LEASE),
        (Duration::ZERO, Some(SECOND * 10), SECOND * 10 + begins),
        (SECOND * 20, Some(SECOND * 5), SECOND * 5 + begins),
    ] {
        let renewal = Renewal::new(hold.clone(), lease).at_most(at_most);
        let reply = bench.table.renew(&renewal, bench.now, bench.now + begins);
        assert_eq!(reply, RenewReply::Renewed { ttl: left });
    }
}

/// The number of a fencing token that a majority has proposed may be ahead of the clock.
#[test]
fn the_time_since_a_grant_is_known_however_far_ahead_its_fencing_token_is() {
    let mut bench = Bench::new();
    let mut request = bench.request(Mode::Exclusive);
    request.lease = MAX_PROPOSAL_SKEW * 2;
    request.proposal = Some(FencingToken::LAST);
    let (reply, _) = bench.acquire(&request);
    assert!(matches!(reply, AcquireReply::Granted(_)), "{reply:?}");
    let held_for = |bench: &Bench| bench.inspect(LockKind::Lock).holders[0].held_for;
    assert_eq!(held_for(&bench), Some(Duration::ZERO));
    bench.now += MAX_PROPOSAL_SKEW + SECOND;
    assert_eq!(held_for(&bench), Some(SECOND));
}

/// An insertion that drops expired locks visits all of them.
#[test]
fn expired_locks_are_dropped_now_and_then_and_do_not_pile_up() {
    let mut bench = Bench::new();
    let (mut visits, locks) = (0, 1000);
    for number in 0..locks {
        let mut request = bench.request(Mode::Exclusive);
        request.hold.key = key(&number.to_string());
        let before = bench.table.len();
        let (reply, _) = bench.acquire(&request);
        assert!(matches!(reply, AcquireReply::Granted(_)), "{reply:?}");
        visits += usize::from(bench.table.len() <= before);
        assert!(bench.table.len() < 16, "{number}");
        bench.now += LEASE;
    }
    assert!(visits <= locks / 2, "{visits}");
}

#[test]
fn a_fencing_token_is_raised_to_larger_ones_only() {
    let fences = Fences::default();
    let token = |number| FencingToken::new(number).unwrap();
    let latest = RaiseReply::NotRaised { latest: token(5) };
    for (number, reply) in [
        (5, RaiseReply::Raised),
        (5, latest),
        (4, latest),
        (6, RaiseReply::Raised),
    ] {
        assert_eq!(fences.raise(token(number)), reply, "{number}");
    }
    assert_eq!(fences.latest(), Some(token(6)));
}

/// Releases a hold and asks for the lock again in the same step. Returns the token of the request.
fn passes_on(bench: &mut Bench, hold: Hold) -> (Token, ReleaseReply, Vec<Sent>) {
    let token = Token::random();
    let mut release = Release::new(hold);
    release.next = Some(NextHolder::new(token, LEASE, 0));
    let (reply, sent) = bench.step(None, |table, step| table.release(&release, step));
    (token, reply, sent)
}

#[test]
fn a_writer_that_releases_a_free_lock_takes_it_again_and_a_reader_does_not() {
    let mut bench = Bench::new();
    let writer = bench.held(Mode::Exclusive);
    let (token, reply, sent) = passes_on(&mut bench, writer);
    assert!(matches!(reply, ReleaseReply::Passed(_)), "{reply:?}");
    assert_eq!(sent, []);
    let next = Hold::new(key("a"), Mode::Exclusive, token);
    assert_eq!(bench.release(&Release::new(next)), []);

    let reader = bench.held(Mode::Shared);
    let (_, reply, _) = passes_on(&mut bench, reader);
    assert_eq!(reply, ReleaseReply::Released);
    bench.held(Mode::Exclusive);
}

/// Otherwise there would be two holders, or one beside a transaction.
#[test]
fn a_writer_that_releases_a_lock_queues_behind_a_waiter_and_behind_a_transaction() {
    for is_guarded in [false, true] {
        let mut bench = Bench::new();
        let writer = bench.held(Mode::Exclusive);
        let mut expected = Vec::new();
        if !is_guarded {
            expected.push(Sent::Granted(bench.waits(Mode::Exclusive).token));
        }
        bench.is_guarded = is_guarded;
        let (_, reply, sent) = passes_on(&mut bench, writer);
        assert!(matches!(reply, ReleaseReply::Queued { .. }), "{reply:?}");
        assert_eq!(sent, expected);
    }
}

/// The reply to the first release may have been lost.
#[test]
fn a_repeated_release_of_a_reserved_lock_succeeds_and_ends_no_other_reservation() {
    let mut bench = Bench::new();
    let readers = [(); 2].map(|()| bench.held(Mode::Shared));
    let kept = Release::new(readers[0].clone()).keep_for(Some(LEASE));
    assert_eq!(bench.release(&kept), []);
    let found = bench.inspect(LockKind::Lock);
    assert_eq!(found.holders.len(), 2);
    assert_eq!(bench.release(&kept), []);
    assert_eq!(bench.release(&Release::new(readers[1].clone())), []);
    let (reply, _) = bench.step(None, |table, step| {
        table.release(&Release::new(readers[1].clone()), step)
    });
    assert_eq!(reply, ReleaseReply::NotHeld);
}

#[test]
fn a_revocation_ends_the_holder_that_was_seen_and_no_other() {
    let mut bench = Bench::new();
    let readers = [(); 2].map(|()| bench.held(Mode::Shared));
    let revoke = |bench: &mut Bench, scope| {
        bench.step(None, |table, step| {
            table.revoke(&key("a"), LockKind::Lock, scope, step)
        })
    };
    let seen = RevokeScope::Holder(HolderId::of(&key("a"), readers[0].token, false));
    let revoked = vec![Sent::Revoked(readers[0].token)];
    assert_eq!(revoke(&mut bench, seen), (RevokeReply::Revoked, revoked));
    assert_eq!(revoke(&mut bench, seen), (RevokeReply::Changed, Vec::new()));
    bench.now += LEASE;
    for scope in [seen, RevokeScope::Leased] {
        assert_eq!(
            revoke(&mut bench, scope),
            (RevokeReply::NotHeld, Vec::new())
        );
        bench.held(Mode::Shared);
        bench.now += LEASE;
    }
}
