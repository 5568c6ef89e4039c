//! Tests of the session of one store, by property and by example, without a store.

mod driver;
mod ends;
mod handoff;
mod held;
mod keeping;
mod messages;
mod outage;
mod queue;
mod several;

use std::sync::Arc;

use proptest::prelude::*;

use super::{
    abandon::FIRST_BACKOFF,
    acquire::{CONFIRM_WITHIN, UNENDED},
    held::keeping::LATE,
    held::lease::{Lease, drift},
    held::{CHECK_WITHIN, Held},
    queue::entry::{Claim, LONGEST_PAUSE, QueueEntry, UNREPORTED},
    queue::handoff::{Budget, Handoff, MAX_HANDOFFS},
    *,
};
use crate::{
    request::spec::{LockKind, Mode, Terms, Wait, call_timeout},
    store::{
        AcquireAllReply, AcquireReply, ConvertReply, Done, Grant, HolderId, KeyRequest, PollReply,
        Release, ReleaseReply, RenewReply, StoreErrorKind,
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
    /// How often the driver was notified.
    roused: usize,
    /// The events for the log.
    notes: Vec<String>,
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
            roused: 0,
            notes: Vec::new(),
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
                Effect::Rouse => self.roused += 1,
                Effect::Note(note) => self.notes.push(format!("{note:?}")),
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
            let hold = Hold::new(key(), Mode::Exclusive, cx.token(false));
            let terms = writer(|it| it.lease = length);
            let lease = Lease::granted(length, true, now, length, 0.5);
            let budget = Budget::new(handoffs, as_of, now);
            let held = Held::new(hold, fence(9).unwrap(), terms, lease, Some(budget));
            session.hold(held, cx).held
        })
    }

    /// Holds a lock in this mode under a new token.
    fn holds_in(&mut self, key: &LockKey, mode: Mode, length: Duration) -> HeldId {
        let now = self.now;
        self.input(|session, cx| {
            let hold = Hold::new(key.clone(), mode, cx.token(false));
            let terms = Terms::plain(mode, length, Wait::No);
            let lease = Lease::granted(length, true, now, length, 0.5);
            let held = Held::new(hold, fence(9).unwrap(), terms, lease, None);
            session.hold(held, cx).held
        })
    }

    /// Returns the leases whose renewals are to be sent by now.
    fn due_renewals(&mut self) -> Vec<HeldId> {
        let mut renewals = Vec::new();
        self.input(|session, cx| session.due_renewals(&mut renewals, cx));
        renewals.into_iter().map(|due| due.held).collect()
    }

    /// Returns when the next renewal of a lease is due.
    fn renews_at(&self, held: HeldId) -> Instant {
        self.session.held[held].lease.next_due()
    }

    fn drops_guard(&mut self, held: HeldId) {
        self.input(|session, cx| session.guard_dropped(held, cx));
    }

    /// Returns the number of events of this kind for the log.
    fn noted(&self, kind: &str) -> usize {
        let kind = format!("{kind}(");
        let noted = self.notes.iter().filter(|note| note.starts_with(&kind));
        noted.count()
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
        assert!(self.session.releases.contains_key(id));
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

/// The acquire request of a step.
fn request(step: &Step) -> &KeyRequest {
    match step {
        Step::Call(Call {
            request: Request::Acquire(request),
            ..
        }) => request,
        step => panic!("{step:?}"),
    }
}

/// The token of an acquire request.
fn asks(step: &Step) -> Token {
    request(step).hold.token
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
