//! Tests of the wait queues, by property and by example, without a store.

use std::sync::Arc;

use proptest::prelude::*;

use super::{
    acquire::UNENDED,
    held::Held,
    held::lease::{Lease, drift},
    queue::entry::{Claim, UNREPORTED},
    queue::handoff::{Budget, Handoff, MAX_HANDOFFS},
    *,
};
use crate::{
    request::spec::{LockKind, Mode, Terms, Wait},
    store::{
        AcquireAllReply, AcquireReply, ConvertReply, Done, Grant, HolderId, PollReply, Release,
        ReleaseReply, RenewReply, StoreErrorKind,
    },
};

const LEASE: Duration = Duration::from_secs(30);
const WRITER: Terms = Terms::plain(Mode::Exclusive, LEASE, Wait::AtMost(LEASE));
const READER: Terms = Terms {
    mode: Mode::Shared,
    ..WRITER
};
const MILLI: Duration = Duration::from_millis(1);

/// The terms of a writer, edited.
fn writer(edit: impl FnOnce(&mut Terms)) -> Terms {
    let mut terms = WRITER;
    edit(&mut terms);
    terms
}

fn named(name: &str) -> LockKey {
    LockKey::new(name).unwrap()
}

fn key() -> LockKey {
    named("k")
}

fn fence(number: u64) -> Option<FencingToken> {
    FencingToken::new(number)
}

fn grant(number: u64) -> Grant {
    Grant::new(fence(number).unwrap(), Grant::HANDOFF_LEASE)
}

fn granted(number: u64) -> Reply {
    granted_with(number, 0)
}

/// A grant with fencing tokens that are reserved for hand-offs.
fn granted_with(number: u64, reserved: u32) -> Reply {
    let grant = Grant::new(fence(number).unwrap(), LEASE);
    Reply::Acquire(AcquireReply::Granted(grant.reserved(reserved)))
}

fn queued(counter: Option<u64>) -> Reply {
    Reply::Acquire(AcquireReply::Queued {
        counter: counter.and_then(fence),
        holder_ttl: Some(LEASE),
    })
}

fn polled_queued(counter: u64) -> Reply {
    Reply::Poll(PollReply::Queued {
        counter: fence(counter),
        holder_ttl: Some(LEASE),
    })
}

const BUSY: Reply = Reply::Acquire(AcquireReply::Busy {
    holder_ttl: None,
    has_waiters: false,
});

/// Counts the tokens, and always returns the same fraction.
#[derive(Clone)]
struct Numbers(u128, f64);

impl Entropy for Numbers {
    fn token(&mut self) -> Token {
        self.0 += 1;
        Token::from_hex(&format!("{:032x}", self.0)).unwrap()
    }

    fn fraction(&mut self) -> f64 {
        self.1
    }
}

/// A session with a clock that stands still between inputs.
#[derive(Clone)]
struct Bench {
    session: Session,
    now: Instant,
    entropy: Numbers,
    /// The acquisitions that were woken.
    woken: Vec<AcquireId>,
    /// How often the keeper was woken.
    watched: usize,
    /// A rule that is switched off.
    mutation: Option<Mutation>,
    /// The store sends no events.
    polls: bool,
}

impl Bench {
    fn new() -> Self {
        Self::with_limits(10, usize::MAX)
    }

    fn with_limits(per_key: usize, in_all: usize) -> Self {
        Self {
            session: Session::new(WaiterLimits { per_key, in_all }),
            now: Instant::now(),
            entropy: Numbers(0, 0.5),
            woken: Vec::new(),
            watched: 0,
            mutation: None,
            polls: false,
        }
    }

    fn input<T>(&mut self, input: impl FnOnce(&mut Session, &mut Cx<'_>) -> T) -> T {
        let mut out = Effects::new();
        let mut cx = Cx {
            now: self.now,
            entropy: &mut self.entropy,
            out: &mut out,
            polls: self.polls,
            is_debugged: true,
            mutation: self.mutation,
        };
        let output = input(&mut self.session, &mut cx);
        for effect in out {
            match effect {
                Effect::Wake(id) => self.woken.push(id),
                Effect::Watch => self.watched += 1,
                _ => {}
            }
        }
        output
    }

    fn begin_for(&mut self, key: &LockKey, terms: &Terms) -> Result<(AcquireId, Step), Refused> {
        let since = self.now;
        self.input(|session, cx| session.begin(key, terms, since, cx))
    }

    fn begin(&mut self, terms: &Terms) -> Result<(AcquireId, Step), Refused> {
        self.begin_for(&key(), terms)
    }

    /// Begins the request of a writer that is the head of its queue. Returns the token under which
    /// it asks for the lock.
    fn head(&mut self) -> (AcquireId, Token) {
        self.asks_for(&WRITER)
    }

    fn asks_for(&mut self, terms: &Terms) -> (AcquireId, Token) {
        let (id, step) = self.begin(terms).unwrap();
        (id, asks(&step))
    }

    /// Begins a request that waits behind others.
    fn behind(&mut self, terms: &Terms) -> AcquireId {
        let (id, step) = self.begin(terms).unwrap();
        match step {
            Step::Wait(_) => {}
            // Readers make an attempt outside of the queue first.
            step => {
                asks(&step);
                waits(&self.reply(id, BUSY));
            }
        }
        id
    }

    fn reply(&mut self, id: AcquireId, reply: Reply) -> Step {
        self.input(|session, cx| session.replied(id, Ok(reply), cx))
    }

    fn is_granted(&mut self, id: AcquireId, number: u64) -> HeldId {
        holds(self.reply(id, granted(number))).held
    }

    fn no_reply(&mut self, id: AcquireId) -> Step {
        let error = StoreError::timed_out(MILLI);
        self.input(|session, cx| session.replied(id, Err(error), cx))
    }

    fn resume(&mut self, id: AcquireId) -> Step {
        self.input(|session, cx| session.resume(id, cx))
    }

    fn cancel(&mut self, id: AcquireId) {
        self.input(|session, cx| session.cancel(id, cx));
    }

    fn event(&mut self, event: &StoreEvent) {
        self.input(|session, cx| session.event(event, cx));
    }

    fn push(&mut self, mode: Mode, token: Token, number: u64) {
        let hold = Hold::new(key(), mode, token);
        let grant = grant(number);
        self.event(&StoreEvent::granted(hold, grant));
    }

    /// Records that the lock was released in this process.
    fn freed(&mut self) {
        self.input(|session, cx| session.freed(LockKind::Lock, &key(), cx));
    }

    /// Holds the lock under a new token with fencing token 9, with this many hand-offs left.
    fn holds(&mut self, handoffs: u32, length: Duration) -> HeldId {
        self.holds_as_of(self.now, handoffs, length)
    }

    fn holds_as_of(&mut self, as_of: Instant, handoffs: u32, length: Duration) -> HeldId {
        let now = self.now;
        self.input(|session, cx| {
            let hold = Hold::new(key(), Mode::Exclusive, cx.token());
            let terms = writer(|it| it.lease = length);
            let lease = Lease::granted(length, true, now, length, 0.5);
            let budget = Budget::new(handoffs, as_of, now);
            let held = Held::new(hold, fence(9).unwrap(), terms, lease, Some(budget));
            session.hold(held, cx).held
        })
    }

    /// Releases the lock. Returns the call to the store, or `None` after a local hand-off.
    fn releases(&mut self, held: HeldId) -> Option<(ReleaseId, Release)> {
        match self.input(|session, cx| session.release(held, cx)) {
            ReleaseStep::Done(Ok(Released::Locally)) => None,
            ReleaseStep::Call(id, release, _) => {
                if let Some(next) = &release.next {
                    assert_eq!(next.reserved, MAX_HANDOFFS);
                }
                Some((id, release))
            }
            step => panic!("{step:?}"),
        }
    }

    fn hands_off(&mut self, held: HeldId) -> bool {
        self.releases(held).is_none()
    }

    /// Holds the lock and releases it, not for a waiter.
    #[track_caller]
    fn gives_back(&mut self, handoffs: u32, length: Duration, reason: &str) {
        let held = self.holds(handoffs, length);
        let (_, release) = self.releases(held).expect(reason);
        assert!(release.next.is_none(), "{reason}");
    }

    /// Releases the lock, which is to be held again for a waiter, under this token.
    #[track_caller]
    fn hands_back(&mut self, held: HeldId) -> (ReleaseId, Token) {
        let (id, release) = self.releases(held).unwrap();
        (id, release.next.unwrap().token)
    }

    fn release_reply(&mut self, id: ReleaseId, reply: ReleaseReply) {
        let reply = Ok(Reply::Release(reply));
        let released = self.input(|session, cx| session.release_replied(id, reply, cx));
        assert_eq!(released.unwrap(), Released::AtStore);
    }

    /// Releases the lock, and checks that the reply wakes the waiter, which waited for it. Returns
    /// the token of the release.
    #[track_caller]
    fn hands_back_to(&mut self, waiter: AcquireId, held: HeldId, reply: ReleaseReply) -> Token {
        let (release, token) = self.hands_back(held);
        // The releasing task sends the request.
        waits(&self.resume(waiter));
        self.woken.clear();
        self.release_reply(release, reply);
        assert_eq!(self.woken, [waiter]);
        token
    }

    /// Requests a longer lease. A reply that confirms it may follow.
    fn extends(&mut self, held: HeldId, ttl: Duration, is_answered: bool) {
        let begun = self.input(|session, cx| session.extend(held, ttl, cx));
        begun.unwrap();
        if is_answered {
            let reply = Ok(Reply::Renew(RenewReply::Renewed { ttl }));
            let sent = self.now;
            let extended = self.input(|session, cx| session.extend_replied(held, reply, sent, cx));
            extended.unwrap();
        }
    }

    fn due_job(&mut self) -> Option<(Job, Call)> {
        self.input(|session, cx| session.due_job(cx))
    }

    fn job_reply(&mut self, job: Job, answer: Answer) {
        self.input(|session, cx| session.job_replied(job, answer, cx));
    }

    /// Returns the tokens that are released or abandoned by now.
    fn endings(&mut self) -> Vec<Ended> {
        let due = std::iter::from_fn(|| self.due_job());
        due.map(|(_, call)| match call.request {
            Request::Release(release) => Ended::Released(release.hold.token),
            Request::Abandon(hold) => Ended::Abandoned(hold.token),
            request => panic!("{request:?}"),
        })
        .collect()
    }

    fn token_of(&self, held: HeldId) -> Token {
        self.session.held[held].hold.token
    }

    /// Checks that nothing is left of any request.
    fn is_empty(&self) -> bool {
        let is_unlisted = self.session.by_key.iter().all(HashMap::is_empty);
        assert_eq!(is_unlisted, self.session.queues.is_empty());
        assert_eq!(is_unlisted, self.session.acquisitions.is_empty());
        assert_eq!(is_unlisted, self.session.is_empty());
        is_unlisted
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ended {
    Released(Token),
    Abandoned(Token),
}

/// The token of an acquire request.
fn asks(step: &Step) -> Token {
    match step {
        Step::Call(Call {
            request: Request::Acquire(request),
            ..
        }) => request.hold.token,
        step => panic!("{step:?}"),
    }
}

fn polls(step: &Step) -> Token {
    match step {
        Step::CallOrWake(Call {
            request: Request::Poll(hold),
            ..
        }) => hold.token,
        step => panic!("{step:?}"),
    }
}

fn waits(step: &Step) -> Instant {
    match step {
        Step::Wait(at) => *at,
        step => panic!("{step:?}"),
    }
}

fn holds(step: Step) -> Granted {
    match step {
        Step::Done(Ok(granted)) => granted,
        step => panic!("{step:?}"),
    }
}

#[test]
fn an_entry_goes_to_the_next_with_the_same_claim() {
    let mut bench = Bench::new();
    let (first, token) = bench.head();
    let (second, reader) = (bench.behind(&WRITER), bench.behind(&READER));
    waits(&bench.reply(first, queued(Some(7))));
    bench.cancel(first);
    assert_eq!(bench.endings(), [], "the second waiter continues with it");
    waits(&bench.resume(second));
    bench.push(Mode::Exclusive, token, 8);
    let mut served = bench.clone();
    let granted = holds(served.resume(second));
    assert_eq!(served.token_of(granted.held), token);

    bench.cancel(second);
    // No waiter continues with it, so it must be abandoned in the store.
    assert_eq!(bench.endings(), [Ended::Abandoned(token)]);
    assert_ne!(asks(&bench.resume(reader)), token);
}

/// Readers of other processes may have larger fencing tokens than a grant that is older than the
/// reader.
#[test]
fn a_reader_polls_for_the_grant_of_an_inherited_entry() {
    let mut bench = Bench::new();
    let (first, _) = bench.asks_for(&READER);
    let token = asks(&bench.reply(first, BUSY));
    waits(&bench.reply(first, queued(Some(7))));
    bench.now += MILLI * 2;
    let second = bench.behind(&READER);
    bench.cancel(first);
    bench.push(Mode::Shared, token, 8);
    assert_eq!(polls(&bench.resume(second)), token);

    // In the queue at a time after its arrival: a later grant is younger than the reader.
    waits(&bench.reply(second, polled_queued(8)));
    bench.push(Mode::Shared, token, 9);
    let granted = holds(bench.resume(second));
    assert_eq!(bench.token_of(granted.held), token);
    assert_eq!(granted.fence.number(), 9);
}

#[test]
fn the_last_to_leave_gives_up_an_entry_that_the_store_knows() {
    for is_known in [false, true] {
        let mut bench = Bench::new();
        let (id, token) = bench.head();
        waits(&bench.reply(id, if is_known { queued(None) } else { BUSY }));
        bench.cancel(id);
        let abandoned = is_known.then_some(Ended::Abandoned(token));
        assert_eq!(bench.endings(), Vec::from_iter(abandoned));
        assert!(bench.is_empty());
    }
}

// Rule 1 of docs/PROTOCOL.md.
#[test]
fn a_token_without_a_reply_is_not_used_again() {
    let mut bench = Bench::new();
    let (id, token) = bench.head();
    let at = waits(&bench.no_reply(id));
    let (job, call) = bench.due_job().unwrap();
    assert!(matches!(call.request, Request::Abandon(hold) if hold.token == token));
    bench.push(Mode::Exclusive, token, 8);
    assert_eq!(bench.woken, [], "no waiter uses the token any more");
    assert_eq!(waits(&bench.resume(id)), at);
    // The store may have granted the lock after the abandonment.
    bench.job_reply(job, Ok(Reply::Abandoned));
    bench.now = at.max(bench.now + MILLI * 2);
    assert_eq!(bench.endings(), [Ended::Abandoned(token)]);
    assert_ne!(asks(&bench.resume(id)), token);
}

// Rule 3.
#[test]
fn a_push_counts_only_if_it_is_newer_than_the_latest_reply() {
    let mut bench = Bench::new();
    let sent = bench.now;
    let (id, token) = bench.head();
    bench.push(Mode::Exclusive, token, 7);
    assert_eq!(bench.woken, [id]);
    waits(&bench.resume(id));
    bench.now += MILLI;
    let at = waits(&bench.reply(id, queued(Some(7))));
    let mut later = bench.clone();
    bench.push(Mode::Exclusive, token, 8);
    assert_eq!(bench.woken, [id, id]);
    let granted = holds(bench.resume(id));
    assert_eq!(bench.token_of(granted.held), token);
    assert_eq!(granted.fence.number(), 8);
    let valid_for = Grant::HANDOFF_LEASE - drift(Grant::HANDOFF_LEASE);
    assert_eq!(granted.valid_until, sent + valid_for);

    // A poll shows the counter beyond the grant.
    later.now = at;
    assert_eq!(polls(&later.resume(id)), token);
    later.push(Mode::Exclusive, token, 8);
    waits(&later.reply(id, polled_queued(8)));
    waits(&later.resume(id));
}

// Rule 4: the latest instant at which the token surely did not hold the lock.
#[test]
fn pushed_grant_counts_from_the_latest_queued_reply() {
    let second = Duration::from_secs(1);
    let mut bench = Bench::new();
    bench.now += second * 2;
    let latest = bench.now;
    let (id, token) = bench.head();
    waits(&bench.reply(id, queued(None)));
    // The reply to a request that was sent earlier arrives late.
    bench.now -= second;
    bench.input(|session, cx| session.free_in(LockKind::Lock, &key(), Duration::ZERO, cx));
    assert_eq!(polls(&bench.resume(id)), token);
    let reply = Reply::Poll(PollReply::Queued {
        counter: None,
        holder_ttl: None,
    });
    waits(&bench.reply(id, reply));
    bench.push(Mode::Exclusive, token, 8);
    let granted = holds(bench.resume(id));
    let valid_for = Grant::HANDOFF_LEASE - drift(Grant::HANDOFF_LEASE);
    assert_eq!(granted.valid_until, latest + valid_for);
}

#[test]
fn release_during_a_request_is_seen_without_a_store_queue() {
    let mut bench = Bench::new();
    let (id, token) = bench.head();
    bench.freed();
    waits(&bench.resume(id));
    let second = asks(&bench.reply(id, BUSY));
    bench.woken.clear();

    waits(&bench.reply(id, BUSY));
    waits(&bench.resume(id));
    assert_eq!(bench.woken, []);
    bench.freed();
    assert_eq!(bench.woken, [id]);
    // Rule 1: with several servers, some may have granted the first attempt and not have
    // received its abandon yet.
    assert!(token != second && second != asks(&bench.resume(id)));
}

#[test]
fn without_events_the_first_polls_follow_soon() {
    let mut bench = Bench::new();
    bench.polls = true;
    let (id, token) = bench.head();
    let mut pauses = Vec::new();
    let mut step = bench.reply(id, queued(Some(7)));
    for _ in 0..8 {
        let at = waits(&step);
        pauses.push(at - bench.now);
        bench.now = at;
        assert_eq!(polls(&bench.resume(id)), token);
        step = bench.reply(id, polled_queued(7));
    }
    // At half of the spread.
    let expected = [20, 40, 80, 160, 320, 640, 1000, 1000].map(|pause| MILLI * pause * 7 / 8);
    assert_eq!(pauses, expected);
}

#[test]
fn queued_waiter_is_notified_and_polls_once_a_second() {
    let mut bench = Bench::new();
    let (id, _) = bench.head();
    waits(&bench.reply(id, queued(Some(7))));
    bench.freed();
    let pause = waits(&bench.resume(id)) - bench.now;
    assert!(pause >= Duration::from_millis(750), "{pause:?}");
    assert!(pause <= Duration::from_secs(1), "{pause:?}");
    bench.event(&StoreEvent::Disconnected);
    assert_eq!(bench.endings(), []);
    bench.now += ASK_WITHIN;
    polls(&bench.resume(id));
}

#[test]
fn poll_goes_on_until_the_head_can_be_served_without_it() {
    let mut bench = Bench::new();
    let (id, token) = bench.head();
    let next = waits(&bench.reply(id, queued(Some(7))));
    bench.now = next;
    polls(&bench.resume(id));
    // The poll may be on the broken connection. It fails by itself, and is repeated after a pause.
    bench.event(&StoreEvent::Disconnected);
    bench.freed();
    assert!(bench.woken.contains(&id));
    waits(&bench.resume(id));
    let pause = waits(&bench.no_reply(id)) - bench.now;
    assert!(pause >= MILLI, "{pause:?}");
    bench.now += pause;
    polls(&bench.resume(id));
    // The reply may be older than the broken connection, which may have delivered a grant since.
    bench.event(&StoreEvent::Disconnected);
    let next = waits(&bench.reply(id, polled_queued(7)));
    assert!(next <= bench.now + ASK_WITHIN, "{:?}", next - bench.now);
    bench.now = next;
    polls(&bench.resume(id));
    bench.push(Mode::Exclusive, token, 8);
    holds(bench.resume(id));
}

/// The circuit breaker is open: each waiter learns it from a call of its own, at once.
#[test]
fn an_outage_ends_the_waits_of_a_queue_one_after_another() {
    let mut bench = Bench::new();
    let (first, token) = bench.head();
    waits(&bench.reply(first, queued(Some(7))));
    let behind = [bench.behind(&WRITER), bench.behind(&WRITER)];
    bench.event(&StoreEvent::Disconnected);
    bench.now += ASK_WITHIN;
    polls(&bench.resume(first));
    for id in [first, behind[0], behind[1]] {
        let error = StoreError::timed_out(MILLI).with_unsent(true);
        let error = error.ending_waits(true);
        let step = bench.input(|session, cx| session.replied(id, Err(error), cx));
        let is_refused =
            matches!(&step, Step::Done(Err(Refused::Store(error))) if error.ends_waits());
        assert!(is_refused, "{step:?}");
        if id != behind[1] {
            let next = if id == first { behind[0] } else { behind[1] };
            assert!(bench.woken.contains(&next));
            polls(&bench.resume(next));
        }
    }
    // The store may still have the queue entry.
    assert_eq!(bench.endings(), [Ended::Abandoned(token)]);
    // A request that does not wait makes no second attempt.
    let (id, _) = bench.asks_for(&writer(|it| it.wait = Wait::No));
    let error = StoreError::timed_out(MILLI).ending_waits(true);
    let step = bench.input(|session, cx| session.replied(id, Err(error), cx));
    assert!(
        matches!(step, Step::Done(Err(Refused::Store(_)))),
        "{step:?}"
    );
}

#[test]
fn heads_that_got_no_reply_ask_soon_after_an_outage() {
    let mut bench = Bench::new();
    let (id, _) = bench.head();
    for _ in 0..20 {
        let next = waits(&bench.no_reply(id));
        bench.now = next;
        asks(&bench.resume(id));
    }
    let next = waits(&bench.no_reply(id));
    assert!(next > bench.now + ASK_WITHIN);
    bench.event(&StoreEvent::Reconnected);
    assert!(waits(&bench.resume(id)) <= bench.now + ASK_WITHIN);
}

#[test]
fn attempt_that_was_not_sent_is_not_abandoned() {
    let mut bench = Bench::new();
    for terms in [WRITER, writer(|it| it.wait = Wait::No)] {
        let (id, token) = bench.asks_for(&terms);
        let unsent = StoreError::timed_out(MILLI).with_unsent(true);
        let step = bench.input(|session, cx| session.replied(id, Err(unsent), cx));
        assert_eq!(bench.endings(), []);
        if let Step::Wait(at) = step {
            bench.now = at;
            assert!(token != asks(&bench.resume(id)));
        }
        bench.cancel(id);
        bench.endings();
    }
}

#[test]
fn hand_off_of_a_revoked_lock_is_not_taken() {
    for by_event in [true, false] {
        let mut bench = Bench::new();
        let (head, _) = bench.head();
        waits(&bench.reply(head, BUSY));
        let held = bench.holds(4, LEASE);
        let token = bench.token_of(held);
        assert!(bench.hands_off(held));
        let revoked = bench.session.holders_of(LockKind::Lock, &key());
        assert_eq!(revoked, [token]);
        if by_event {
            bench.event(&StoreEvent::Revoked { token });
        } else {
            bench.input(|session, cx| session.revoked(LockKind::Lock, &key(), &revoked, cx));
        }
        assert_eq!(bench.endings(), [Ended::Abandoned(token)]);
        assert!(token != asks(&bench.resume(head)));
    }
}

#[test]
fn a_grant_that_was_revoked_on_its_way_is_not_held() {
    let poll_granted = Reply::Poll(PollReply::Granted(grant(5)));
    let renewed = Reply::Renew(RenewReply::Renewed { ttl: LEASE });
    let unrenewed = writer(|it| it.renew = false);
    // The grant was pushed, and is to be confirmed, or is in a reply that arrives later.
    for (terms, is_queued, reply) in [
        (WRITER, false, granted(5)),
        (WRITER, true, poll_granted),
        (unrenewed, true, renewed),
    ] {
        let mut bench = Bench::new();
        let (id, token) = bench.asks_for(&terms);
        if is_queued {
            bench.now = waits(&bench.reply(id, queued(Some(4))));
            polls(&bench.resume(id));
        }
        if !terms.renew {
            bench.push(Mode::Exclusive, token, 5);
            let step = bench.resume(id);
            let is_renewal =
                matches!(&step, Step::Call(call) if matches!(call.request, Request::Renew(_)));
            assert!(is_renewal, "{step:?}");
        }
        bench.woken.clear();
        bench.event(&StoreEvent::Revoked { token });
        assert!(bench.endings().contains(&Ended::Abandoned(token)));
        if is_queued {
            assert_eq!(bench.woken, [id]);
        }
        let fresh = asks(&bench.reply(id, reply));
        assert!(fresh != token);
        bench.is_granted(id, 6);
    }
    // A request that does not wait finds the lock held.
    let mut bench = Bench::new();
    let (id, token) = bench.asks_for(&writer(|it| it.wait = Wait::No));
    bench.event(&StoreEvent::Revoked { token });
    let step = bench.reply(id, granted(5));
    let is_refused = matches!(step, Step::Done(Err(Refused::Contended(None))));
    assert!(is_refused, "{step:?}");
    assert!(bench.endings().contains(&Ended::Abandoned(token)));
}

#[test]
fn a_revocation_that_is_announced_again_ends_a_request_once() {
    let mut bench = Bench::new();
    let (_, token) = bench.asks_for(&WRITER);
    for _ in 0..100 {
        bench.event(&StoreEvent::Revoked { token });
    }
    assert_eq!(bench.endings(), [Ended::Abandoned(token)]);
}

/// A result answers those that had come before the call: a later one may come after it was
/// forgotten.
#[test]
fn a_result_answers_the_waiters_that_had_come_before_the_call() {
    let mut bench = Bench::new();
    bench.now += MILLI;
    let before = {
        let (first, _) = bench.head();
        let second = bench.behind(&WRITER);
        bench.cancel(first);
        bench.now += MILLI;
        // It calls as the head, after this one had come.
        let third = bench.behind(&WRITER);
        bench.now += MILLI;
        asks(&bench.resume(second));
        [second, third]
    };
    bench.now += MILLI;
    let after = bench.behind(&WRITER);
    bench.woken.clear();
    let id = HolderId::of(&key(), Token::random(), true);
    let done = Arc::new(Done::new(b"one".to_vec(), fence(7).unwrap(), 1, id));
    let reply = Reply::Acquire(AcquireReply::Done(done.clone()));
    let is_done = |step: &Step| matches!(step, Step::Done(Err(Refused::Done(it))) if *it == done);
    assert!(is_done(&bench.reply(before[0], reply)));
    assert!(bench.woken.contains(&before[1]));
    assert!(is_done(&bench.resume(before[1])));
    // One that came before the call, and whose thread was late.
    bench.now -= 3 * MILLI;
    let (_, step) = bench.begin(&WRITER).unwrap();
    assert!(is_done(&step), "{step:?}");
    bench.now += 3 * MILLI;
    // It asks for itself.
    asks(&bench.resume(after));
}

#[test]
fn a_pushed_grant_that_was_revoked_is_not_taken() {
    let mut bench = Bench::new();
    let (id, token) = bench.head();
    waits(&bench.reply(id, queued(Some(4))));
    bench.push(Mode::Exclusive, token, 5);
    bench.woken.clear();
    bench.event(&StoreEvent::Revoked { token });
    assert_eq!(bench.woken, [id]);
    assert_eq!(bench.endings(), [Ended::Abandoned(token)]);
    let fresh = asks(&bench.resume(id));
    assert!(fresh != token);
    // A message of the same grant that arrives once more is none for the fresh token.
    bench.push(Mode::Exclusive, token, 5);
    waits(&bench.resume(id));
    bench.is_granted(id, 6);
}

#[test]
fn a_writer_that_is_revoked_while_it_is_converted_is_no_reader() {
    let mut bench = Bench::new();
    let held = bench.holds(0, LEASE);
    let token = bench.token_of(held);
    bench.input(|session, cx| session.reserve(held, LEASE, cx));
    let begun = bench.input(|session, cx| session.convert(held, cx));
    let (conversion, _) = begun.unwrap();
    bench.event(&StoreEvent::Revoked { token });
    let reply = Ok(Reply::Convert(ConvertReply::Converted(grant(10))));
    let converted = bench.input(|session, cx| session.convert_replied(conversion, reply, cx));
    let is_lost = matches!(converted, Err(ConvertError::Lost(Loss::Revoked)));
    assert!(is_lost, "{converted:?}");
    assert_eq!(bench.endings(), [Ended::Abandoned(token)]);
}

#[test]
fn hand_off_goes_to_the_head_with_the_same_claim_only() {
    let mut bench = Bench::new();
    bench.gives_back(4, LEASE, "no request waits");
    let (reader, _) = bench.asks_for(&READER);
    asks(&bench.reply(reader, BUSY));
    let [first, second, third] = [(); 3].map(|()| bench.behind(&WRITER));
    bench.gives_back(4, LEASE, "a reader is at the head of the queue");
    bench.cancel(reader);
    bench.gives_back(4, LEASE * 2, "another lease");
    asks(&bench.resume(first));
    bench.woken.clear();

    let held = bench.holds(4, LEASE);
    let token = bench.token_of(held);
    assert!(bench.hands_off(held));
    assert_eq!(bench.woken, [first]);
    // The first waiter is cancelled: a hand-off that was not taken goes to the next one (rule 20).
    bench.endings();
    bench.cancel(first);
    assert!(!bench.endings().contains(&Ended::Released(token)));
    let granted = holds(bench.resume(second));
    let budget = bench.session.held[granted.held].budget;
    assert_eq!((granted.fence.number(), budget.unwrap().left), (10, 3));
    assert_eq!(bench.token_of(granted.held), token);

    // While the holder may hand off the lock, the head does not call the store.
    assert!(waits(&bench.resume(third)) > bench.now);
    assert!(bench.hands_off(granted.held));
    bench.cancel(third);
    // No waiter is left to take it.
    assert_eq!(bench.endings(), [Ended::Released(token)]);
    assert!(bench.is_empty());
}

#[test]
fn release_without_a_hand_off_wakes_local_waiters() {
    let mut bench = Bench::new();
    let (holder, _) = bench.head();
    let [first, second, third] = [(); 3].map(|()| bench.behind(&WRITER));
    let held = bench.is_granted(holder, 6);
    let reply = ReleaseReply::Queued {
        counter: fence(7),
        holder_ttl: Some(LEASE),
    };
    let token = bench.hands_back_to(first, held, reply);
    waits(&bench.resume(first));
    bench.gives_back(0, LEASE, "it is in the store's wait queue");
    bench.push(Mode::Exclusive, token, 8);
    let held = holds(bench.resume(first)).held;
    assert_eq!(bench.token_of(held), token);

    let token = bench.hands_back_to(second, held, ReleaseReply::Passed(grant(9)));
    let granted = holds(bench.resume(second));
    assert_eq!(granted.fence.number(), 9);
    assert_eq!(bench.token_of(granted.held), token);

    let token = bench.hands_back_to(third, granted.held, ReleaseReply::Released);
    // It makes its own attempt.
    assert_ne!(asks(&bench.resume(third)), token);
}

#[test]
fn hand_back_without_a_taker_makes_the_head_ask_at_once() {
    let mut bench = Bench::new();
    let (holder, _) = bench.head();
    let renews = bench.behind(&WRITER);
    let held = bench.is_granted(holder, 6);
    let (release, token) = bench.hands_back(held);
    let next = bench.behind(&writer(|it| it.renew = false));
    bench.cancel(renews);
    waits(&bench.resume(next));
    bench.woken.clear();
    bench.release_reply(release, ReleaseReply::Passed(grant(7)));
    assert_eq!(bench.endings(), [Ended::Released(token)]);
    assert_eq!(bench.woken, [next], "the head must be woken");
    assert_ne!(asks(&bench.resume(next)), token);
}

/// A holder hands a lock back for the only waiter. The waiter leaves, so the token is abandoned.
/// Another waiter arrives, and then the reply reports that the lock is held under that token.
/// Random schedules produce this about once in 200,000.
#[test]
fn a_lock_that_returns_under_an_abandoned_token_is_not_taken() {
    for mutation in [None, Some(Mutation::AcceptsAbandoned)] {
        let mut bench = Bench::with_limits(1, 2);
        bench.mutation = mutation;
        let (holder, _) = bench.head();
        let waiter = bench.behind(&WRITER);
        let held = holds(bench.reply(holder, granted(1))).held;
        let (release, token) = bench.hands_back(held);
        bench.cancel(waiter);
        // It has no other owner, so it is abandoned.
        assert!(bench.endings().contains(&Ended::Abandoned(token)));
        let (later, _) = bench.begin(&WRITER).unwrap();
        bench.release_reply(release, ReleaseReply::Passed(grant(1).reserved(32)));
        let is_given_back = bench.endings().contains(&Ended::Released(token));
        // The reply to the waiter's own request lets it take a hand-off.
        let step = bench.reply(later, BUSY);
        let is_taken = matches!(step, Step::Done(Ok(_)));
        assert_ne!(is_taken, is_given_back, "{step:?}");
        // The abandonment would free it while the next waiter holds it.
        assert_eq!(is_taken, mutation.is_some());
    }
}

/// The only waiter leaves while the task of a release, which has named its token, is no longer
/// polled. The release is ended in the background, as it may be executed after the abandonment.
#[test]
fn a_neglected_release_is_ended_once_its_waiter_has_left() {
    let mut bench = Bench::new();
    let (holder, _) = bench.head();
    let waiter = bench.behind(&WRITER);
    let held = holds(bench.reply(holder, granted(1))).held;
    let own = bench.token_of(held);
    let (release, named) = bench.hands_back(held);
    bench.cancel(waiter);
    let (job, _) = bench.due_job().unwrap();
    bench.job_reply(job, Ok(Reply::Abandoned));
    bench.now += UNREPORTED - MILLI;
    assert_eq!(bench.endings(), []);
    assert!(bench.session.needs_driver());
    bench.now += MILLI;
    let (job, call) = bench.due_job().unwrap();
    assert!(
        matches!(call.request, Request::Release(it) if it.hold.token == own && it.next.is_none())
    );
    bench.job_reply(job, Ok(Reply::Release(ReleaseReply::Released)));
    assert_eq!(bench.endings(), [Ended::Abandoned(named)]);
    // Its task goes on after all. The first call may have released the lock, or the driver's.
    for (answer, is_known) in [
        (Ok(ReleaseReply::Released), true),
        (Ok(ReleaseReply::NotHeld), false),
        (Err(silent()), false),
    ] {
        let answer = answer.map(Reply::Release);
        let released = bench.input(|session, cx| session.release_replied(release, answer, cx));
        match released {
            Ok(Released::AtStore) => assert!(is_known),
            Err(ReleaseError::Unknown(_)) => assert!(!is_known),
            released => panic!("{released:?}"),
        }
    }
}

/// The store has not granted the lock: a message was forged, and the token is in the wait queue.
#[test]
fn a_repeated_release_that_finds_nothing_is_followed_by_an_abandonment() {
    let mut bench = Bench::new();
    let (holder, _) = bench.head();
    bench.behind(&WRITER);
    let held = holds(bench.reply(holder, granted(1))).held;
    let own = bench.token_of(held);
    let (release, named) = bench.hands_back(held);
    let unknown = bench.input(|session, cx| session.release_replied(release, Err(silent()), cx));
    assert!(matches!(unknown, Err(ReleaseError::Unknown(_))));
    bench.now += Duration::from_secs(1);
    let (job, call) = bench.due_job().unwrap();
    assert!(matches!(call.request, Request::Release(it) if it.hold.token == own));
    bench.job_reply(job, Ok(Reply::Release(ReleaseReply::NotHeld)));
    let endings = bench.endings();
    let expected = [own, named].map(Ended::Abandoned);
    assert_eq!(endings.len(), 2);
    assert!(
        expected.iter().all(|it| endings.contains(it)),
        "{endings:?}"
    );
}

#[test]
fn hand_off_ends_once_the_store_may_have_lost_data() {
    let mut bench = Bench::new();
    let (holder, _) = bench.head();
    let (waiter, _behind) = (bench.behind(&WRITER), bench.behind(&WRITER));
    let before = bench.now;
    let held = holds(bench.reply(holder, granted_with(6, 4))).held;
    let token = bench.token_of(held);
    waits(&bench.resume(waiter));
    assert!(bench.hands_off(held));
    bench.now += MILLI;
    bench.event(&StoreEvent::Disconnected);
    // The head has not taken it.
    assert_eq!(bench.endings(), [Ended::Released(token)]);
    let held = bench.holds_as_of(before, 4, LEASE);
    let (release, token) = bench.hands_back(held);
    bench.event(&StoreEvent::Disconnected);
    bench.release_reply(release, ReleaseReply::Passed(grant(8).reserved(4)));
    assert_eq!(bench.endings(), [Ended::Released(token)]);
    assert_ne!(asks(&bench.resume(waiter)), token);
    bench.now += MILLI;
    let held = bench.holds(4, LEASE);
    assert!(bench.hands_off(held), "reserved since");
}

#[test]
fn hand_offs_end_with_their_budget_or_their_validity() {
    let now = Instant::now();
    let lease = |ttl| Lease::granted(LEASE, true, now, ttl, 0.5);
    let hand_off = |lease, budget, now| {
        let hold = Hold::new(key(), Mode::Exclusive, Token::random());
        Handoff::new(hold, fence(9).unwrap(), lease, budget, now)
    };
    let budget = Budget::new(1, now, now);
    let once = hand_off(lease(LEASE), budget, now).unwrap();
    let (second, until) = (Duration::from_secs(1), budget.until);
    let waited = "other processes have waited long enough";
    for (ttl, budget, now, reason) in [
        (LEASE, once.budget, now, "no fencing token is left"),
        (LEASE, budget, until, waited),
        (second, budget, now, "too little is left of the lease"),
    ] {
        assert!(hand_off(lease(ttl), budget, now).is_none(), "{reason}");
    }
    assert_eq!(Budget::new(1000, now, now).left, MAX_HANDOFFS);
}

#[test]
fn pause_between_requests_grows_and_ends_with_the_lease() {
    let mut bench = Bench::new();
    bench.entropy.1 = 1.0;
    let now = bench.now;
    bench.input(|_, cx| {
        let mut entry = queue::entry::QueueEntry::new(Claim::of(&WRITER), cx);
        let mut last = Duration::ZERO;
        for _ in 0..30 {
            entry.refused(Some(LEASE), cx);
            let pause = entry.ask_at - now;
            assert!(pause >= last && pause <= queue::entry::LONGEST_PAUSE);
            last = pause;
        }
        assert_eq!(last, queue::entry::LONGEST_PAUSE);
        entry.refused(Some(MILLI * 7), cx);
        assert_eq!(entry.ask_at - now, MILLI * 8);
        entry.queued(now, None, Some(MILLI * 7), cx);
        assert_eq!(entry.ask_at - now, MILLI * 8);
    });
}

#[test]
fn a_request_that_had_to_wait_was_contended() {
    let was_contended = |act: &dyn Fn(&mut Bench, AcquireId) -> Option<Step>| {
        let mut bench = Bench::new();
        let (id, _) = bench.head();
        if let Some(step) = act(&mut bench, id) {
            asks(&step);
        }
        holds(bench.reply(id, granted(8))).contended
    };
    assert!(!was_contended(&|_, _| None), "free at the first attempt");
    let no_reply = |bench: &mut Bench, id| {
        bench.now = waits(&bench.no_reply(id));
        Some(bench.resume(id))
    };
    assert!(!was_contended(&no_reply), "no reply is no contention");
    assert!(was_contended(&|bench, id| {
        waits(&bench.reply(id, BUSY));
        bench.freed();
        Some(bench.resume(id))
    }));
    assert!(was_contended(&|bench, id| {
        bench.now = waits(&bench.reply(id, queued(None)));
        polls(&bench.resume(id));
        Some(bench.reply(id, Reply::Poll(PollReply::Gone)))
    }));
    // Handed off before the first reply.
    let mut bench = Bench::new();
    let (id, _) = bench.head();
    let held = bench.holds(4, LEASE);
    assert!(bench.hands_off(held));
    assert!(holds(bench.no_reply(id)).contended);
    // Behind a waiter that left before it was granted the lock.
    let mut bench = Bench::new();
    let (first, _) = bench.head();
    let second = bench.behind(&WRITER);
    bench.cancel(first);
    bench.now = waits(&bench.resume(second));
    asks(&bench.resume(second));
    assert!(holds(bench.reply(second, granted(8))).contended);
}

#[test]
fn closing_wakes_every_waiter() {
    let mut bench = Bench::new();
    let (head, _) = bench.head();
    let waiting = bench.behind(&WRITER);
    waits(&bench.reply(head, queued(Some(7))));
    assert_eq!(bench.woken, []);
    bench.input(|session, cx| session.close(cx));
    bench.woken.sort_unstable();
    assert_eq!(bench.woken, [head, waiting]);
    for id in [waiting, head] {
        let step = bench.resume(id);
        assert!(matches!(step, Step::Done(Err(Refused::ShuttingDown))));
    }
    let begun = bench.begin(&WRITER);
    assert!(matches!(begun, Err(Refused::ShuttingDown)));
    assert!(bench.is_empty());
}

#[test]
fn a_waiter_is_counted_once_in_whatever_way_it_leaves() {
    let mut bench = Bench::with_limits(10, 3);
    let impatient = writer(|it| it.max_waiters = 0);
    let (other, _) = bench.begin_for(&named("other"), &WRITER).unwrap();
    let (head, _) = bench.head();
    let waiting = bench.behind(&WRITER);
    assert!(matches!(bench.begin(&WRITER), Err(Refused::FullInAll)));
    let begun = bench.begin_for(&named("free"), &impatient);
    assert!(matches!(begun, Err(Refused::FullInAll)));
    // A refused request leaves no queue behind.
    assert_eq!(bench.session.queues.len(), 2);
    assert_eq!(bench.session.by_key[LockKind::Lock as usize].len(), 2);
    assert_eq!(bench.session.acquisitions.len(), 3);
    // From the middle, from an end, and after a grant.
    bench.cancel(waiting);
    assert!(matches!(bench.begin(&impatient), Err(Refused::Full)));
    assert_eq!(bench.session.waiting, 2);
    holds(bench.reply(head, granted(8)));
    assert_eq!(bench.session.waiting, 1);
    bench.input(|session, cx| session.close(cx));
    bench.cancel(other);
    assert_eq!(bench.session.waiting, 0);
    assert!(bench.is_empty());
}

/// A store that cannot be reached may confirm an abandonment at once, as nothing was sent to it.
#[test]
fn own_abandonments_do_not_shorten_the_pause_of_a_waiter() {
    let mut bench = Bench::new();
    let (id, _) = bench.head();
    let at = waits(&bench.no_reply(id));
    assert!(at > bench.now);
    let (job, _) = bench.due_job().unwrap();
    bench.job_reply(job, Ok(Reply::Abandoned));
    assert_eq!(waits(&bench.resume(id)), at);
    // A refusal shows that the store can be reached: a release makes the next request succeed.
    bench.now = at;
    asks(&bench.resume(id));
    waits(&bench.reply(id, BUSY));
    bench.freed();
    asks(&bench.resume(id));
}

/// The store keeps an extended lock for the longest lease that was requested.
#[test]
fn release_of_an_extended_lock_is_repeated_until_that_lease_is_over() {
    let mut bench = Bench::new();
    let held = bench.holds(0, LEASE);
    let hour = LEASE * 120;
    bench.extends(held, hour, true);
    bench.input(|session, cx| session.guard_dropped(held, cx));
    let began = bench.now;
    let mut calls = 0;
    while !bench.session.is_drained() {
        while let Some((job, _)) = bench.due_job() {
            calls += 1;
            bench.job_reply(job, Err(StoreError::timed_out(MILLI)));
        }
        bench.now += Duration::from_secs(1);
    }
    assert!(calls > 2);
    assert!(bench.now - began >= hour, "{:?}", bench.now - began);
}

/// The next holder has asked for a shorter lease than the extended one.
#[test]
fn an_extended_lock_is_not_handed_off_locally() {
    for is_answered in [false, true] {
        let mut bench = Bench::new();
        let held = bench.holds(3, LEASE);
        bench.head();
        bench.extends(held, LEASE * 2, is_answered);
        assert!(!bench.hands_off(held), "{is_answered}");
    }
}

/// A renewal that was sent later is executed, or answered, before the extension (rule 41).
#[test]
fn an_extension_that_a_renewal_overtakes_is_valid() {
    let (second, length) = (Duration::from_secs(1), LEASE * 2);
    for is_extension_first in [false, true] {
        let mut bench = Bench::new();
        let held = bench.holds(0, LEASE);
        let sent = bench.now;
        bench
            .input(|session, cx| session.extend(held, length, cx))
            .unwrap();
        bench.now += second;
        let renewed = bench.now;
        bench.now += second;
        let extend = |bench: &mut Bench| {
            let reply = Ok(Reply::Renew(RenewReply::Renewed { ttl: length }));
            let extended = bench.input(|session, cx| session.extend_replied(held, reply, sent, cx));
            extended.unwrap();
        };
        let renew = |bench: &mut Bench| {
            let reply = Ok(RenewReply::Renewed { ttl: LEASE });
            bench.input(|session, cx| session.renewal_replied(held, reply, renewed, cx));
        };
        if is_extension_first {
            extend(&mut bench);
            renew(&mut bench);
        } else {
            renew(&mut bench);
            extend(&mut bench);
        }
        let valid_for = bench.session.held[held].validity(sent);
        assert_eq!(valid_for, length - drift(length), "{is_extension_first}");
    }
}

/// A loss that a guard may have reported stands.
#[test]
fn an_extension_is_no_success_once_the_lock_was_lost_or_released() {
    for is_released in [false, true] {
        let mut bench = Bench::new();
        let held = bench.holds(0, LEASE);
        let sent = bench.now;
        bench
            .input(|session, cx| session.extend(held, LEASE * 2, cx))
            .unwrap();
        if is_released {
            bench.releases(held).unwrap();
        } else {
            bench.now += LEASE;
        }
        let reply = Ok(Reply::Renew(RenewReply::Renewed { ttl: LEASE * 2 }));
        let extended = bench.input(|session, cx| session.extend_replied(held, reply, sent, cx));
        match (is_released, extended) {
            (true, Err(ExtendError::Released)) => {}
            (false, Err(ExtendError::Lost(Loss::Expired))) => {}
            (_, extended) => panic!("{is_released}: {extended:?}"),
        }
    }
}

/// Each reply that a request waits shows that it has no older grant (rules 3 and 38).
#[test]
fn a_push_counts_only_if_it_is_newer_than_every_reply() {
    let second = Duration::from_secs(1);
    let mut bench = Bench::new();
    bench.now += second;
    let (id, token) = bench.head();
    waits(&bench.reply(id, queued(Some(5))));
    // The request that was sent earlier was executed later.
    bench.now -= second;
    bench.input(|session, cx| session.free_in(LockKind::Lock, &key(), Duration::ZERO, cx));
    assert_eq!(polls(&bench.resume(id)), token);
    waits(&bench.reply(id, polled_queued(7)));
    bench.push(Mode::Exclusive, token, 6);
    waits(&bench.resume(id));
}

/// `min_hold` counts for a lock whose downgrade has no reply, too.
#[test]
fn a_failed_downgrade_leaves_the_lock_reserved() {
    let mut bench = Bench::new();
    let (id, _) = bench.asks_for(&writer(|it| it.min_hold = Some(LEASE)));
    let held = bench.is_granted(id, 7);
    let begun = bench.input(|session, cx| session.convert(held, cx));
    let (id, _) = begun.unwrap();
    bench.input(|session, cx| session.convert_dropped(id, cx));
    let mut modes = Vec::new();
    let token = loop {
        let (job, call) = bench.due_job().unwrap();
        let release = match call.request {
            Request::Release(release) => release,
            Request::Abandon(hold) => break hold.token,
            request => panic!("{request:?}"),
        };
        assert_eq!(release.keep_for, Some(LEASE));
        modes.push((release.hold.mode, release.hold.token));
        bench.job_reply(job, Ok(Reply::Release(ReleaseReply::NotHeld)));
    };
    // In the end it is in neither mode, and leaves the wait queue.
    let expected = [Mode::Exclusive, Mode::Shared].map(|mode| (mode, token));
    assert_eq!(modes, expected);
}

/// The duration for which a background release reserves its lock.
fn keeps_for(call: &Call) -> Option<Duration> {
    match &call.request {
        Request::Release(release) => release.keep_for,
        request => panic!("{request:?}"),
    }
}

fn silent() -> StoreError {
    StoreError::timed_out(MILLI)
}

/// `min_hold` counts from the grant, and not from the release that reaches the store.
#[test]
fn a_late_answer_to_a_call_that_was_repeated_ends_nothing_else() {
    let mut bench = Bench::new();
    let (holder, _) = bench.head();
    bench.behind(&WRITER);
    let held = bench.is_granted(holder, 5);
    let (release, next) = bench.hands_back(held);
    bench.input(|session, cx| session.release_dropped(release, cx));
    let (first, _) = bench.due_job().unwrap();
    // The driver's task does not run, and the keeper sends the call again.
    bench.now += Duration::from_secs(2);
    let overdue = bench.input(|session, cx| session.take_overdue(true, cx));
    let [(second, _)] = &overdue.jobs[..] else {
        panic!("{:?}", overdue.jobs)
    };
    let released = || Ok(Reply::Release(ReleaseReply::Released));
    bench.job_reply(*second, released());
    bench.job_reply(first, released());
    assert_eq!(bench.endings(), [Ended::Abandoned(next)]);
}

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
fn endings_are_repeated_at_different_times_and_keep_no_client() {
    let mut bench = Bench::new();
    let held = bench.holds(0, LEASE);
    let token = bench.token_of(held);
    let (release, _) = bench.releases(held).unwrap();
    bench.release_reply(release, ReleaseReply::Released);
    bench.event(&StoreEvent::Disconnected);
    assert!(bench.session.is_drained() && bench.session.needs_driver());
    assert_eq!(bench.endings(), []);
    bench.now += ASK_WITHIN;
    assert_eq!(bench.endings(), [Ended::Released(token)]);
}

#[test]
fn a_repeated_release_reserves_what_is_left_of_min_hold() {
    let min_hold = LEASE / 2;
    let mut bench = Bench::new();
    let (id, _) = bench.asks_for(&writer(|it| it.min_hold = Some(min_hold)));
    bench.now += MILLI * 400;
    let (held, since) = (bench.is_granted(id, 7), bench.now);
    bench.now += MILLI;
    let (release, first) = bench.releases(held).unwrap();
    assert_eq!(first.keep_for, Some(min_hold - MILLI));
    let unknown = bench.input(|session, cx| session.release_replied(release, Err(silent()), cx));
    assert!(matches!(unknown, Err(ReleaseError::Unknown(_))));
    for passed in [1, 7, 14, 20].map(Duration::from_secs) {
        bench.now = since + passed;
        let (job, call) = bench.due_job().unwrap();
        assert_eq!(keeps_for(&call), min_hold.checked_sub(passed));
        bench.job_reply(job, Err(silent()));
    }
}

/// The clock of a store may stand still while it does not answer.
#[test]
fn a_hold_is_ended_as_soon_as_the_store_answers_again_also_after_its_lease() {
    let minute = Duration::from_secs(60);
    for (outage, is_ended) in [
        (LEASE / 2, true),
        (LEASE + minute / 2, true),
        (LEASE + minute * 2, false),
    ] {
        let mut bench = Bench::new();
        let held = bench.holds(0, LEASE);
        let token = bench.token_of(held);
        let (release, _) = bench.releases(held).unwrap();
        let unknown =
            bench.input(|session, cx| session.release_replied(release, Err(silent()), cx));
        assert!(matches!(unknown, Err(ReleaseError::Unknown(_))));
        for _ in 0..outage.as_millis() / 100 {
            bench.now += MILLI * 100;
            if let Some((job, _)) = bench.due_job() {
                bench.job_reply(job, Err(silent()));
            }
        }
        bench.event(&StoreEvent::Reconnected);
        bench.now += ASK_WITHIN;
        let expected = is_ended.then_some(Ended::Released(token));
        assert_eq!(bench.endings(), Vec::from_iter(expected), "{outage:?}");
    }
}

#[test]
fn a_failed_downgrade_reserves_what_is_left_of_min_hold() {
    let mut bench = Bench::new();
    let (id, _) = bench.asks_for(&writer(|it| it.min_hold = Some(LEASE)));
    let held = bench.is_granted(id, 7);
    let begun = bench.input(|session, cx| session.convert(held, cx));
    let (id, _) = begun.unwrap();
    bench.input(|session, cx| session.convert_dropped(id, cx));
    for passed in [1, 2, 3].map(Duration::from_secs) {
        bench.now += Duration::from_secs(1);
        let (job, call) = bench.due_job().unwrap();
        assert_eq!(keeps_for(&call), Some(LEASE - passed));
        let is_lost = passed == Duration::from_secs(1);
        let reply = Reply::Release(ReleaseReply::NotHeld);
        bench.job_reply(job, if is_lost { Err(silent()) } else { Ok(reply) });
    }
    let (_, call) = bench.due_job().unwrap();
    assert!(matches!(call.request, Request::Abandon(_)), "{call:?}");
    assert!(bench.due_job().is_none());
}

/// Other programs may announce grants of the token for as long as they like.
#[test]
fn announced_grants_delay_neither_the_next_ending_nor_the_shutdown() {
    let mut bench = Bench::new();
    let (id, _) = bench.asks_for(&WRITER);
    let held = bench.is_granted(id, 7);
    let token = bench.token_of(held);
    let begun = bench.input(|session, cx| session.convert(held, cx));
    let (id, _) = begun.unwrap();
    bench.input(|session, cx| session.convert_dropped(id, cx));
    let mut ended = Vec::new();
    for _ in 0..5 {
        let (job, call) = bench.due_job().unwrap();
        let Request::Abandon(hold) = call.request else {
            panic!("{call:?}");
        };
        let event = StoreEvent::granted(
            Hold::new(hold.key.clone(), Mode::Exclusive, token),
            grant(7),
        );
        for _ in 0..3 {
            bench.input(|session, cx| session.event(&event, cx));
        }
        ended.push(hold.mode);
        bench.job_reply(job, Ok(Reply::Abandoned));
        assert_eq!(bench.session.is_drained(), ended.len() > 1, "{ended:?}");
    }
    // Once the writer has ended, the reader comes first.
    assert_eq!(ended[..3], [Mode::Exclusive, Mode::Shared, Mode::Exclusive]);
}

/// A lock that is lost by the holder's clock may be held at the store for longer.
#[test]
fn a_lost_lock_stays_reserved_unless_it_was_taken_away() {
    for (loss, keep_for) in [
        (Loss::Expired, Some(LEASE)),
        (Loss::MaxHold, Some(LEASE)),
        (Loss::Taken, None),
        (Loss::Revoked, None),
    ] {
        let mut bench = Bench::new();
        let (id, _) = bench.asks_for(&writer(|it| it.min_hold = Some(LEASE)));
        let held = bench.is_granted(id, 7);
        bench.input(|session, cx| session.lose(held, loss, cx));
        let (_, call) = bench.due_job().unwrap();
        match call.request {
            Request::Release(release) => assert_eq!(release.keep_for, keep_for, "{loss:?}"),
            request => assert!(keep_for.is_none(), "{loss:?}: {request:?}"),
        }
    }
}

/// The message about a grant from the queue comes after the lock was released, before the release
/// is executed.
#[test]
fn a_late_push_message_frees_no_lock_that_is_to_stay_reserved() {
    for (min_hold, is_abandoned) in [(MILLI, true), (LEASE, false)] {
        let mut bench = Bench::new();
        let (id, token) = bench.asks_for(&writer(|it| it.min_hold = Some(min_hold)));
        let held = bench.is_granted(id, 7);
        bench.now += MILLI;
        let (release, _) = bench.releases(held).unwrap();
        let lost = Err(silent());
        let unknown = bench.input(|session, cx| session.release_replied(release, lost, cx));
        assert!(unknown.is_err());
        bench.push(Mode::Exclusive, token, 7);
        let ended = bench.endings();
        assert_eq!(
            ended.contains(&Ended::Abandoned(token)),
            is_abandoned,
            "{ended:?}"
        );
    }
}

/// Other programs may be able to send any number of messages.
#[test]
fn grants_of_an_abandoned_token_add_one_abandonment() {
    // Rule 6.
    let mut bench = Bench::new();
    let (id, token) = bench.asks_for(&WRITER);
    let held = bench.is_granted(id, 7);
    bench.now += MILLI;
    let (release, _) = bench.releases(held).unwrap();
    let lost = Err(silent());
    let unknown = bench.input(|session, cx| session.release_replied(release, lost, cx));
    assert!(unknown.is_err());
    // Its release is in flight.
    bench.endings();
    for fence in 8..200 {
        bench.push(Mode::Exclusive, token, fence);
        // Another lock than that of the token.
        bench.push(Mode::Shared, token, fence);
    }
    assert_eq!(bench.endings(), [Ended::Abandoned(token)]);
}

#[test]
fn a_reserved_lock_is_not_handed_off_locally() {
    for (min_hold, is_handed_off) in [(MILLI, true), (LEASE / 2, false)] {
        let mut bench = Bench::new();
        let (id, _) = bench.asks_for(&writer(|it| it.min_hold = Some(min_hold)));
        bench.behind(&WRITER);
        let held = holds(bench.reply(id, granted_with(7, MAX_HANDOFFS))).held;
        bench.now += MILLI;
        let call = bench.releases(held);
        assert_eq!(call.is_none(), is_handed_off, "{min_hold:?}: {call:?}");
        let left = call.and_then(|(_, release)| release.keep_for);
        assert_eq!(left.is_none(), is_handed_off, "{left:?}");
    }
}

/// Of several keys one was granted too late: no lock is held, renewed or reserved.
#[test]
fn keys_that_were_granted_beside_one_that_came_too_late_are_released() {
    let mut bench = Bench::new();
    let keys = ["a", "b"].map(named);
    let terms = writer(|it| (it.wait, it.min_hold) = (Wait::No, Some(LEASE)));
    let times = (bench.now, terms.call_timeout());
    let begun = bench.input(|session, cx| session.begin_all(&keys, &terms, times, cx));
    let (together, _) = begun.unwrap();
    let grants = [(7, LEASE), (8, Duration::ZERO)];
    let grants = grants.map(|(number, ttl)| Grant::new(fence(number).unwrap(), ttl));
    let reply = Ok(AcquireAllReply::Granted(grants.to_vec()));
    let step = bench.input(|session, cx| session.all_replied(&together, reply, cx));
    assert!(matches!(step, AllStep::Done(Err(_))), "{step:?}");
    assert!(bench.session.held.is_empty());
    let mut ended = Vec::new();
    while let Some((job, call)) = bench.due_job() {
        match call.request {
            Request::Release(release) => {
                assert_eq!(release.keep_for, None);
                ended.push(release.hold.key);
                bench.job_reply(job, Ok(Reply::Release(ReleaseReply::Released)));
            }
            Request::Abandon(hold) => {
                ended.push(hold.key);
                bench.job_reply(job, Ok(Reply::Abandoned));
            }
            request => panic!("{request:?}"),
        }
    }
    ended.sort();
    assert_eq!(ended, keys);
}

/// The error of a store that acquires one key after the other names the key that was reached.
#[test]
fn an_error_of_several_keys_names_the_key_that_was_reached() {
    let mut bench = Bench::new();
    let keys = ["a", "b", "c"].map(named);
    let terms = writer(|it| it.wait = Wait::No);
    let times = (bench.now, terms.patience(keys.len()));
    assert_eq!(times.1, terms.call_timeout() * 3);
    let begun = bench.input(|session, cx| session.begin_all(&keys, &terms, times, cx));
    let (together, _) = begun.unwrap();
    bench.now += times.1;
    let reply = Err(StoreError::out_of_turn(1, 3));
    let step = bench.input(|session, cx| session.all_replied(&together, reply, cx));
    let is_named = matches!(step, AllStep::Done(Err((1, Refused::Store(_)))));
    assert!(is_named, "{step:?}");
    assert_eq!(bench.endings().len(), 3, "every token is abandoned");
}

/// A request for several keys that came too late is repeated as a whole.
#[test]
fn several_keys_that_came_too_late_are_requested_again() {
    let mut bench = Bench::new();
    let keys = ["a", "b"].map(named);
    let terms = writer(|it| it.wait = Wait::No);
    let times = (bench.now, terms.call_timeout());
    let begun = bench.input(|session, cx| session.begin_all(&keys, &terms, times, cx));
    let (together, first) = begun.unwrap();
    let too_late = |bench: &mut Bench| {
        let (index, reply) = (1, AcquireReply::Late);
        let reply = Ok(AcquireAllReply::Refused { index, reply });
        bench.input(|session, cx| session.all_replied(&together, reply, cx))
    };
    let AllStep::Call(second) = too_late(&mut bench) else {
        panic!("it is early")
    };
    assert_eq!(second.len(), 2);
    assert_ne!(first[0].hold.token, second[0].hold.token);
    let step = too_late(&mut bench);
    let is_refused = matches!(step, AllStep::Done(Err((1, Refused::Store(_)))));
    assert!(is_refused, "{step:?}");
    assert!(bench.session.rest().is_none());
}

/// Requests that are given up while their calls are in flight leave a token each, of which there is
/// a largest number, whatever kind of request they were.
#[test]
fn tokens_that_are_to_be_ended_are_limited() {
    let mut bench = Bench::new();
    let at_once = writer(|it| it.wait = Wait::No);
    for number in 0..UNENDED {
        let (id, step) = bench
            .begin_for(&named(&number.to_string()), &at_once)
            .unwrap();
        asks(&step);
        bench.cancel(id);
    }
    for terms in [&at_once, &WRITER, &READER] {
        let begun = bench.begin_for(&named("other"), terms);
        assert!(matches!(begun, Err(Refused::Unended)), "{begun:?}");
    }
    let (keys, times) = (["a", "b"].map(named), (bench.now, at_once.call_timeout()));
    let begun = bench.input(|session, cx| session.begin_all(&keys, &at_once, times, cx));
    assert!(matches!(begun, Err((0, Refused::Unended))), "{begun:?}");
    let (job, _) = bench.due_job().unwrap();
    let error = StoreError::new(StoreErrorKind::Forbidden, "no right");
    bench.job_reply(job, Err(error));
    bench.begin_for(&named("other"), &at_once).unwrap();
}

/// The end of a hold is not behind the ends of requests, of which a caller can cause any number.
#[test]
fn the_end_of_a_hold_goes_before_those_of_requests() {
    let mut bench = Bench::new();
    let held = bench.holds(0, LEASE);
    let given_up: Vec<_> = (0..3)
        .map(|number| {
            let (id, step) = bench
                .begin_for(&named(&number.to_string()), &WRITER)
                .unwrap();
            let token = asks(&step);
            bench.cancel(id);
            Ended::Abandoned(token)
        })
        .collect();
    bench.now += MILLI;
    let token = bench.session.held[held].hold.token;
    bench.input(|session, cx| session.guard_dropped(held, cx));
    let endings = bench.endings();
    assert_eq!(endings[0], Ended::Released(token));
    assert_eq!(endings[1..], given_up);
}

proptest! {
    /// Requests arrive and leave in any order: heads follow one another in the order of arrival,
    /// the next head is woken, no request beyond the limits is admitted, and nothing is left at
    /// the end.
    #[test]
    fn first_come_first_served(steps in proptest::collection::vec((any::<bool>(), any::<prop::sample::Index>(), any::<bool>()), 1..200)) {
        const LIMIT: usize = 8;
        let others = usize::from(steps.len() % 2 == 0) * 5;
        let mut bench = Bench::with_limits(LIMIT, LIMIT + 4);
        let others: Vec<_> = (0..others).map(|number| {
            bench.begin_for(&named(&number.to_string()), &WRITER).unwrap().0
        }).collect();
        let mut line: Vec<AcquireId> = Vec::new();
        for (comes, leaver, resumes) in steps {
            if comes {
                match bench.begin(&WRITER) {
                    Ok((id, step)) => {
                        // Only a request that arrives at an empty queue is its head.
                        prop_assert_eq!(matches!(step, Step::Call(_)), line.is_empty());
                        prop_assert_eq!(matches!(step, Step::Wait(_)), !line.is_empty());
                        line.push(id);
                    }
                    Err(Refused::Full) => prop_assert_eq!(line.len(), LIMIT + 1),
                    Err(refused) => {
                        prop_assert!(matches!(refused, Refused::FullInAll));
                        prop_assert_eq!(line.len(), LIMIT + 4 - others.len());
                    }
                }
            } else if !line.is_empty() {
                let index = leaver.index(line.len());
                bench.cancel(line.remove(index));
                let next: Vec<_> = line.first().filter(|_| index == 0).copied().into_iter().collect();
                prop_assert_eq!(&bench.woken, &next);
            }
            prop_assert!(bench.woken.iter().all(|id| Some(id) == line.first()));
            bench.woken.clear();
            let queue = bench.session.queue_of(LockKind::Lock, &key());
            prop_assert_eq!(queue.and_then(|queue| queue.head), line.first().copied());
            for id in line.iter().skip(1).filter(|_| resumes) {
                waits(&bench.resume(*id));
            }
            let contended = |id: &AcquireId| bench.session.acquisitions[*id].contended;
            prop_assert!(line.iter().skip(1).all(contended));
        }
        prop_assert_eq!(bench.session.waiting, line.len() + others.len());
        prop_assert_eq!(order(&mut bench), line.clone());
        for id in line.into_iter().chain(others) {
            bench.cancel(id);
        }
        prop_assert!(bench.is_empty());
    }
}

/// The requests in the queue of the lock, from its head to its end.
fn order(bench: &mut Bench) -> Vec<AcquireId> {
    let queue = bench.session.queue_of(LockKind::Lock, &key());
    let head = queue.and_then(|queue| queue.head);
    let next = |id: &AcquireId| bench.session.acquisitions[*id].next;
    std::iter::successors(head, next).collect()
}
