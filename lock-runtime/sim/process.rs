//! A process: the session of its client, and the tasks that use it. It performs the effects of the
//! session; the calls to the store go to its outbox.

use std::{collections::BTreeMap, fmt, sync::Arc, time::Duration};

use super::{dice::Dice, message, network::Network};
use crate::{
    error::Loss,
    guard::fence::FencingToken,
    protocol::{
        AcquireId, AllStep, Call, ConversionId, ConvertError, Cx, Effect, Effects, Entropy,
        Granted, HeldId, Job, Mutation, Note, Refused, ReleaseId, ReleaseStep, Reply, Request,
        Session, Step, Together, majority,
    },
    request::key::LockKey,
    request::spec::{LockKind, Terms, Wait},
    shell::time::Instant,
    store::{ClientId, Hold, KeyRequest, RevokeReply, StoreError, StoreEvent, Token},
};

/// A process, and the number of its restarts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Who {
    pub(super) process: usize,
    pub(super) life: u32,
}

impl fmt::Display for Who {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "c{}", self.process)?;
        (0..self.life).try_for_each(|_| f.write_str("'"))
    }
}

/// The time by which a clock of a client may be late.
const LATE: Duration = Duration::from_millis(1);

/// The time after which a neglected future is dropped: when all waiters must have been served.
const NEGLECTED_FOR: Duration = Duration::from_secs(120);

/// The end of a hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    Release,
    /// The future of the release is dropped after this time.
    DropRelease(Duration),
    /// The future of the release is not polled again, and is dropped much later.
    NeglectRelease,
    Drop,
}

/// The use of a guard while it is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Act {
    /// Extends the hold to this number of leases.
    Extend(u32),
    /// Converts the writer to a reader. The future may be dropped.
    Convert { is_dropped: bool },
    /// Adds a guard.
    Reenter,
}

/// A request for a lock, and the use of the lock.
#[derive(Clone, Debug)]
pub(super) struct Arrival {
    pub(super) process: usize,
    /// One key, or several that are acquired in one call.
    pub(super) keys: Vec<usize>,
    pub(super) terms: Terms,
    pub(super) hold_for: Duration,
    pub(super) ending: Ending,
    pub(super) cancel_after: Option<Duration>,
    /// Each this time after the grant.
    pub(super) acts: Vec<(Duration, Act)>,
    /// Repeats the request this often.
    pub(super) again: usize,
    /// The longest pause before a repetition.
    pub(super) pause: Duration,
    /// The release leaves a result for this time, if the store keeps results.
    pub(super) completes: Option<Duration>,
}

/// A result that the store has confirmed.
#[derive(Clone, Debug)]
pub(super) struct Completed {
    pub(super) hold: Hold,
    pub(super) result: Arc<[u8]>,
    /// In true time, by the slowest clock.
    pub(super) until: Instant,
}

/// A message to the store.
#[derive(Clone, Debug)]
pub(crate) enum Message {
    One(Request),
    All(Vec<KeyRequest>),
    Revoke(LockKey, LockKind),
}

/// An event in a process.
#[derive(Clone, Debug)]
pub(super) enum Event {
    Arrive(Box<Arrival>),
    /// The reply to a call, or its time-out.
    Replied(u32, Option<majority::Reply>),
    FromStore(StoreEvent),
    Woken(AcquireId),
    /// The end of a wait, by number.
    Timer(AcquireId, u32),
    Cancel(AcquireId),
    /// The use of a lock ends.
    Done(u32),
    Act(u32, Act),
    /// The future that awaits a call is dropped.
    DropCall(u32),
    Driver,
    DriverDies,
    DriverRestarts,
    Revoke(usize),
    /// The client is shut down.
    Shutdown,
}

impl Event {
    /// The acquisition that waits for this.
    pub(super) fn wakes(&self) -> Option<AcquireId> {
        match self {
            Self::Timer(id, _) | Self::Woken(id) => Some(*id),
            _ => None,
        }
    }

    /// Returns whether this is the arrival of a message.
    pub(super) fn is_message(&self) -> bool {
        matches!(self, Self::Replied(_, Some(_)) | Self::FromStore(_))
    }
}

/// A request in a wait queue, or one whose attempt is in flight.
struct Waiter {
    arrival: Arrival,
    since: Instant,
    /// The call in flight, and whether a wake-up may end it.
    call: Option<(u32, bool)>,
    wait: u32,
    sleeps: bool,
    is_woken: bool,
}

/// A guard of a held lock.
#[derive(Clone, Debug)]
pub(super) struct Guard {
    pub(super) held: HeldId,
    pub(super) key: usize,
    pub(super) arrival: Arrival,
}

#[derive(Clone, Debug)]
pub(super) enum Purpose {
    Acquire(AcquireId),
    All(Together, Arrival, Instant),
    Release(ReleaseId, Option<Completed>),
    Convert(ConversionId, Guard),
    Extend(HeldId, Duration),
    Renewal(HeldId),
    Job(Job),
    Revoke(LockKind, LockKey, Vec<Token>),
}

/// A guard was handed out.
pub(super) struct Began {
    pub(super) held: HeldId,
    pub(super) hold: Hold,
    pub(super) min_hold: Option<Duration>,
    pub(super) fence: FencingToken,
    /// When it was requested.
    pub(super) asked_at: Instant,
    /// It is not from the wait queue, or lasts at least as long as a renewal may take.
    pub(super) is_long_enough: bool,
}

pub(super) struct Process {
    pub(super) who: Who,
    /// The time of the event that is handled.
    now: Instant,
    pub(super) session: Session,
    keys: Vec<LockKey>,
    /// The store acquires several keys one after the other.
    is_in_turn: bool,
    entropy: Own,
    mutation: Option<Mutation>,
    waiters: BTreeMap<AcquireId, Waiter>,
    pub(super) guards: BTreeMap<u32, Guard>,
    /// The calls whose replies are awaited, each with the time at which it was sent.
    pub(super) calls: BTreeMap<u32, (Purpose, Instant)>,
    /// The time at which the driver checks for work. `None` while it is dead.
    driver_at: Option<Instant>,
    /// The locks that are renewed, each with its token and the time of its grant.
    renewed: BTreeMap<HeldId, (Token, Instant)>,
    /// Calls whose replies are ignored.
    neglected: Vec<u32>,
    driver_is_dead: bool,
    numbers: u32,
    /// The event is the reply to a request that is granted with its full lease.
    is_direct: bool,
    /// There are no more faults: requests wait long enough, and locks are not held for long.
    pub(super) is_quiet: bool,
    /// The number of requests served.
    pub(super) served: u32,
    is_traced: bool,
    pub(super) out: Out,
}

/// The effects of an event outside of the process.
#[derive(Default)]
pub(super) struct Out {
    pub(super) sent: Vec<(u32, Message)>,
    pub(super) timers: Vec<(Instant, Event)>,
    pub(super) began: Vec<Began>,
    /// The locks that the store has taken away.
    pub(super) taken: Vec<HeldId>,
    /// The writers that are to be converted.
    pub(super) converts: Vec<HeldId>,
    /// The results that holders have asked the store to keep.
    pub(super) asked: Vec<Completed>,
    pub(super) completed: Vec<Completed>,
    /// The locks of requests that were refused as contended.
    pub(super) contended: Vec<(LockKind, LockKey)>,
    /// The holds whose release or abandonment was given up.
    pub(super) given_up: Vec<Hold>,
    /// The locks that were lost although they are renewed, each with the time of its grant.
    pub(super) lost: Vec<(Token, Instant)>,
    /// The lines of the history.
    pub(super) log: Vec<String>,
    pub(super) wrong: Option<String>,
    /// An extension that was confirmed, and by which the lease was not extended.
    pub(super) unextended: Option<String>,
}

impl Entropy for Dice {
    fn token(&mut self) -> Token {
        let mut bits = || self.below(usize::MAX) as u128;
        let text = format!("{:032x}", bits() << 64 | bits());
        Token::from_hex(&text).unwrap_or_else(|| panic!("{text} is a token"))
    }

    fn fraction(&mut self) -> f64 {
        self.fraction()
    }
}

/// The random numbers of a process, whose tokens begin with its identifier.
struct Own {
    dice: Dice,
    client: ClientId,
}

impl Entropy for Own {
    fn token(&mut self) -> Token {
        self.dice.token().by(self.client)
    }

    fn fraction(&mut self) -> f64 {
        self.dice.fraction()
    }
}

impl From<Who> for ClientId {
    fn from(Who { process, life }: Who) -> Self {
        let number = format!("{:010x}", process << 16 | life as usize);
        Self::from_hex(&number).expect("ten digits")
    }
}

impl Process {
    pub(super) fn new(net: &mut Network, who: Who) -> Self {
        Self {
            who,
            now: net.now,
            session: Session::new(net.schedule.limits),
            keys: net.keys.clone(),
            is_in_turn: !net.is_single,
            entropy: Own {
                dice: net.dice.fork(),
                client: who.into(),
            },
            mutation: net.of_client(),
            waiters: BTreeMap::new(),
            guards: BTreeMap::new(),
            calls: BTreeMap::new(),
            driver_at: None,
            renewed: BTreeMap::new(),
            neglected: Vec::new(),
            driver_is_dead: false,
            numbers: 0,
            is_direct: false,
            is_quiet: false,
            served: 0,
            is_traced: net.history.is_some(),
            out: Out::default(),
        }
    }

    fn number(&mut self) -> u32 {
        self.numbers += 1;
        self.numbers
    }

    fn say(&mut self, line: impl FnOnce() -> String) {
        if self.is_traced {
            self.out.log.push(line());
        }
    }

    /// Passes one input to the session, and performs its effects.
    fn visit<T>(&mut self, input: impl FnOnce(&mut Session, &mut Cx<'_>) -> T) -> T {
        let mut out = Effects::new();
        // The time is read before the session is locked: another visit may have seen a later one.
        let is_early = self.entropy.dice.chance(100);
        let early = is_early.then(|| self.entropy.dice.up_to(Duration::from_micros(300)));
        let mut cx = Cx {
            now: self.now - early.unwrap_or_default(),
            entropy: &mut self.entropy,
            out: &mut out,
            polls: false,
            is_debugged: true,
            mutation: self.mutation,
        };
        let output = input(&mut self.session, &mut cx);
        let mut has_work = false;
        for effect in out {
            match effect {
                Effect::Wake(id) => {
                    if let Some(waiter) = self.waiters.get_mut(&id) {
                        waiter.is_woken = true;
                        let pause = self.entropy.dice.up_to(Duration::from_micros(100));
                        self.after(pause, Event::Woken(id));
                    }
                }
                Effect::Rouse => has_work = true,
                // The simulated driver is never late.
                Effect::Watch => {}
                Effect::Extended { .. } => {}
                Effect::Released(id) => drop(self.renewed.remove(&id)),
                Effect::Lost(id, loss) => {
                    let lost = self.renewed.remove(&id);
                    if matches!(loss, Loss::Expired | Loss::Taken) {
                        self.out.lost.extend(lost);
                    }
                    if matches!(loss, Loss::Taken | Loss::Revoked) {
                        self.out.taken.push(id);
                    }
                    self.say(|| format!("{id:?} is lost: {loss:?}"));
                }
                Effect::Note(note) => {
                    if let Note::GaveUp(hold, _) = &*note {
                        self.out.given_up.push(hold.clone());
                    }
                    self.say(|| format!("{note:?}"));
                }
            }
        }
        let must_start = self.session.needs_driver() && self.driver_at.is_none();
        if (has_work || must_start) && !self.driver_is_dead {
            self.check_work(self.now);
        }
        output
    }

    fn after(&mut self, pause: Duration, event: Event) {
        self.out.timers.push((self.now + pause, event));
    }

    fn check_work(&mut self, at: Instant) {
        self.driver_at = Some(at);
        self.out.timers.push((at.max(self.now), Event::Driver));
    }

    fn send(&mut self, purpose: Purpose, message: Message, timeout: Duration) -> u32 {
        let number = self.number();
        self.say(|| format!("calls #{number} for {purpose:?}"));
        self.calls.insert(number, (purpose, self.now));
        self.out.sent.push((number, message));
        self.after(timeout, Event::Replied(number, None));
        number
    }

    fn call(&mut self, purpose: Purpose, call: Call) -> u32 {
        self.send(purpose, Message::One(call.request), call.timeout)
    }

    pub(super) fn happens(&mut self, now: Instant, event: Event) {
        self.now = now;
        self.is_direct = match &event {
            Event::Replied(_, Some(majority::Reply::Poll(_) | majority::Reply::Release(_))) => {
                false
            }
            Event::Replied(..) => true,
            _ => false,
        };
        match event {
            Event::Arrive(arrival) => self.arrive(*arrival),
            Event::Replied(number, reply) => self.replied(number, reply),
            Event::FromStore(event) => {
                self.visit(|session, cx| session.event(&event, cx));
            }
            Event::Woken(id) => {
                let Some(waiter) = self.waiters.get_mut(&id) else {
                    return;
                };
                waiter.is_woken = false;
                // A task that awaits any other call is not affected by the wake-up.
                if waiter.call.is_none_or(|(_, may_wake)| may_wake) {
                    self.resume(id);
                }
            }
            Event::Timer(id, wait) => {
                let waiter = self.waiters.get(&id);
                if waiter.is_some_and(|it| it.call.is_none() && it.wait == wait) {
                    self.resume(id);
                }
            }
            Event::Cancel(id) => self.cancel(id),
            Event::Done(guard) => self.done(guard),
            Event::Act(guard, act) => self.act(guard, act),
            Event::DropCall(call) => match self.calls.remove(&call) {
                Some((Purpose::All(together, ..), _)) => {
                    self.visit(|session, cx| session.cancel_all(&together, cx));
                }
                Some((Purpose::Release(id, _), _)) => {
                    self.visit(|session, cx| session.release_dropped(id, cx));
                }
                Some((Purpose::Convert(id, _), _)) => {
                    self.visit(|session, cx| session.convert_dropped(id, cx));
                }
                _ => {}
            },
            Event::Driver => self.drive(),
            Event::DriverDies => {
                self.say(|| "the driver dies".into());
                let is_background =
                    |purpose: &Purpose| matches!(purpose, Purpose::Job(_) | Purpose::Renewal(_));
                self.calls.retain(|_, (purpose, _)| !is_background(purpose));
                (self.driver_at, self.driver_is_dead) = (None, true);
                self.visit(|session, cx| session.driver_died(cx));
                let pause = self.entropy.dice.up_to(Duration::from_millis(5));
                self.after(pause, Event::DriverRestarts);
            }
            Event::DriverRestarts => {
                self.driver_is_dead = false;
                self.check_work(self.now);
            }
            Event::Shutdown => self.visit(|session, cx| session.close(cx)),
            Event::Revoke(key) => {
                let (kind, key) = (LockKind::Lock, self.keys[key].clone());
                let holders = self.session.holders_of(kind, &key);
                let message = Message::Revoke(key.clone(), kind);
                let purpose = Purpose::Revoke(kind, key, holders);
                self.send(purpose, message, Duration::from_millis(500));
            }
        }
    }

    fn drive(&mut self) {
        if self.driver_at.is_none_or(|at| at > self.now) {
            return;
        }
        let mut renewals = Vec::new();
        self.visit(|session, cx| session.due_renewals(&mut renewals, cx));
        for due in renewals {
            let request = Message::One(Request::Renew(due.renewal));
            self.send(Purpose::Renewal(due.held), request, due.timeout);
        }
        while let Some((job, call)) = self.visit(|session, cx| session.due_job(cx)) {
            self.call(Purpose::Job(job), call);
        }
        match self.session.check_at(true) {
            Some(at) => self.check_work(at.max(self.now + Duration::from_micros(1))),
            None => self.driver_at = None,
        }
    }

    fn arrive(&mut self, arrival: Arrival) {
        let (now, terms, cancel_after) = (self.now, arrival.terms, arrival.cancel_after);
        let (asked, mode, wait) = (&arrival.keys, terms.mode, terms.wait);
        self.say(|| format!("a request for {asked:?} arrives: {mode:?} {wait:?}"));
        let keys: Vec<_> = asked.iter().map(|key| self.keys[*key].clone()).collect();
        let [key] = &keys[..] else {
            let times = (now, self.patience(&terms, keys.len()));
            match self.visit(|session, cx| session.begin_all(&keys, &terms, times, cx)) {
                Ok((together, requests)) => {
                    let step = AllStep::Call(requests);
                    let call = self.all_step(together, arrival, now, step);
                    if let (Some(call), Some(pause)) = (call, cancel_after) {
                        self.after(pause, Event::DropCall(call));
                    }
                }
                Err((index, refused)) => self.refused(&arrival, index, &refused),
            }
            return;
        };
        match self.visit(|session, cx| session.begin(key, &terms, now, cx)) {
            Ok((id, step)) => {
                let waiter = Waiter {
                    arrival,
                    since: now,
                    call: None,
                    wait: 0,
                    sleeps: false,
                    is_woken: false,
                };
                self.waiters.insert(id, waiter);
                self.perform(id, step);
                if let Some(pause) = cancel_after.filter(|_| !self.is_quiet) {
                    self.after(pause, Event::Cancel(id));
                }
            }
            Err(refused) => self.refused(&arrival, 0, &refused),
        }
    }

    /// A request is refused, because of the key with this index.
    fn refused(&mut self, arrival: &Arrival, index: usize, refused: &Refused) {
        self.say(|| format!("refused: {refused:?}"));
        if let Refused::Contended(_) = refused {
            let key = self.keys[arrival.keys[index]].clone();
            self.out.contended.push((arrival.terms.mode.kind(), key));
        }
        match refused {
            Refused::ShuttingDown if self.session.is_closed() => {}
            Refused::ForeignKey(_) | Refused::ModeMismatch | Refused::ShuttingDown => {
                self.out.wrong = Some(format!("refused: {refused:?}"));
            }
            _ => {}
        }
    }

    fn resume(&mut self, id: AcquireId) {
        let step = self.visit(|session, cx| session.resume(id, cx));
        self.perform(id, step);
    }

    /// Performs the next step of a request.
    fn perform(&mut self, id: AcquireId, step: Step) {
        let Some(waiter) = self.waiters.get_mut(&id) else {
            return;
        };
        waiter.sleeps = false;
        match step {
            Step::Call(call) => self.acquire_call(id, call, false),
            Step::CallOrWake(call) => self.acquire_call(id, call, true),
            Step::Wait(at) => {
                waiter.sleeps = true;
                if waiter.call.is_none() {
                    waiter.wait += 1;
                    let timer = Event::Timer(id, waiter.wait);
                    self.out.timers.push((at.max(self.now), timer));
                }
            }
            Step::Done(outcome) => {
                let Some(Waiter { arrival, since, .. }) = self.leaves(id) else {
                    return;
                };
                match outcome {
                    Ok(granted) => self.begins(arrival.keys[0], arrival, granted, since),
                    Err(refused) => self.refused(&arrival, 0, &refused),
                }
            }
        }
    }

    /// The time for a call that acquires several keys.
    fn patience(&self, terms: &Terms, keys: usize) -> Duration {
        terms.patience(if self.is_in_turn { keys } else { 1 })
    }

    fn acquire_call(&mut self, id: AcquireId, call: Call, is_interruptible: bool) {
        let number = self.call(Purpose::Acquire(id), call);
        if let Some(waiter) = self.waiters.get_mut(&id)
            && let Some((old, _)) = waiter.call.replace((number, is_interruptible))
        {
            self.calls.remove(&old);
        }
    }

    /// Performs the next step of a request for several keys. Returns the call, if there is one.
    fn all_step(
        &mut self,
        together: Together,
        mut arrival: Arrival,
        asked_at: Instant,
        step: AllStep,
    ) -> Option<u32> {
        match step {
            AllStep::Call(requests) => {
                let timeout = self.patience(&arrival.terms, requests.len());
                let purpose = Purpose::All(together, arrival, asked_at);
                return Some(self.send(purpose, Message::All(requests), timeout));
            }
            AllStep::Done(Ok(granted)) => {
                for (key, granted) in arrival.keys.clone().into_iter().zip(granted) {
                    self.begins(key, arrival.clone(), granted, asked_at);
                    // One request follows them all.
                    arrival.again = 0;
                }
            }
            // The task would acquire them one by one.
            AllStep::OneByOne => {}
            AllStep::Done(Err((index, refused))) => self.refused(&arrival, index, &refused),
        }
        None
    }

    /// A guard is handed out.
    fn begins(&mut self, key: usize, arrival: Arrival, granted: Granted, asked_at: Instant) {
        self.served += 1;
        let (held, fence) = (granted.held, granted.fence);
        let valid = self.session.valid(self.now).find(|(id, ..)| *id == held);
        let Some((hold, until)) = valid.map(|(_, hold, until)| (hold.clone(), until)) else {
            // It was lost in the same instant.
            self.visit(|session, cx| session.guard_dropped(held, cx));
            return;
        };
        let guard = self.number();
        let key_name = &hold.key;
        self.say(|| format!("HOLDS {key_name} as {held:?}, guard {guard}, fence {fence}"));
        if arrival.terms.renew {
            self.renewed.insert(held, (hold.token, self.now));
        }
        self.out.began.push(Began {
            held,
            hold,
            min_hold: arrival.terms.min_hold,
            fence,
            asked_at,
            is_long_enough: self.is_direct
                || granted.ends_at.is_some()
                || until + Duration::from_millis(1) - self.now > arrival.terms.call_timeout(),
        });
        self.after(self.time_to_hold(arrival.hold_for), Event::Done(guard));
        if !self.is_quiet {
            for (pause, act) in &arrival.acts {
                self.after(*pause, Event::Act(guard, *act));
            }
        }
        self.guards.insert(guard, Guard { held, key, arrival });
    }

    fn replied(&mut self, number: u32, reply: Option<majority::Reply>) {
        if self.neglected.contains(&number) {
            return;
        }
        let Some((purpose, sent)) = self.calls.remove(&number) else {
            return;
        };
        self.say(|| match &reply {
            Some(reply) => format!("#{number} is answered: {reply:?}"),
            None => format!("#{number} has no reply in time"),
        });
        let waited = self.now - sent;
        let silent = || StoreError::timed_out(waited);
        let answer = reply.clone().and_then(message::one).ok_or_else(silent);
        match purpose {
            Purpose::Acquire(id) => {
                let Some(waiter) = self.waiters.get_mut(&id) else {
                    return;
                };
                waiter.call = None;
                let step = self.visit(|session, cx| session.replied(id, answer, cx));
                self.perform(id, step);
            }
            Purpose::All(together, arrival, asked_at) => {
                let answer = match reply {
                    Some(majority::Reply::AcquireAll(reply)) => Ok(reply),
                    _ => Err(silent()),
                };
                let step = self.visit(|session, cx| session.all_replied(&together, answer, cx));
                self.all_step(together, arrival, asked_at, step);
            }
            Purpose::Release(id, completed) => {
                let released = self.visit(|session, cx| session.release_replied(id, answer, cx));
                self.say(|| format!("released: {released:?}"));
                if released.is_ok() {
                    self.out.completed.extend(completed);
                }
            }
            Purpose::Convert(id, mut guard) => {
                match self.visit(|session, cx| session.convert_replied(id, answer, cx)) {
                    Ok(granted) => {
                        guard.arrival.acts.retain(|(_, act)| *act == Act::Reenter);
                        // It counts from the grant of the writer.
                        guard.arrival.terms.min_hold = None;
                        self.begins(guard.key, guard.arrival, granted, sent);
                    }
                    Err(error) => self.say(|| format!("not converted: {error:?}")),
                }
            }
            Purpose::Extend(held, lease) => {
                let extended =
                    self.visit(|session, cx| session.extend_replied(held, answer, sent, cx));
                self.say(|| format!("extended: {extended:?}"));
                if extended.is_ok() && !self.session.is_extended(held, sent, lease) {
                    self.out.unextended = Some(format!("{held:?} is not extended by {lease:?}"));
                }
            }
            Purpose::Renewal(held) => {
                let answer = match answer {
                    Ok(Reply::Renew(reply)) => Ok(reply),
                    other => Err(other.err().unwrap_or_else(silent)),
                };
                self.visit(|session, cx| session.renewal_replied(held, answer, sent, cx));
            }
            Purpose::Job(job) => {
                self.visit(|session, cx| session.job_replied(job, answer, cx));
            }
            Purpose::Revoke(kind, key, holders) => {
                if let Some(majority::Reply::Revoke(RevokeReply::Revoked)) = reply {
                    self.visit(|session, cx| session.revoked(kind, &key, &holders, cx));
                }
            }
        }
    }

    fn cancel(&mut self, id: AcquireId) {
        if self.leaves(id).is_some() {
            self.say(|| format!("{id:?} is cancelled"));
            self.visit(|session, cx| session.cancel(id, cx));
        }
    }

    /// Removes a request, and the call that it awaits.
    fn leaves(&mut self, id: AcquireId) -> Option<Waiter> {
        let waiter = self.waiters.remove(&id)?;
        waiter.call.and_then(|(call, _)| self.calls.remove(&call));
        Some(waiter)
    }

    fn done(&mut self, guard: u32) {
        let Some(Guard { held, arrival, .. }) = self.guards.remove(&guard) else {
            return;
        };
        self.say(|| format!("guard {guard} of {held:?} leaves: {:?}", arrival.ending));
        if arrival.ending == Ending::Drop {
            self.visit(|session, cx| session.guard_dropped(held, cx));
        } else {
            let keep = arrival.completes.filter(|_| !self.is_in_turn);
            // A visit may read the time a little early.
            let mut valid = self.session.valid(self.now - LATE);
            let is_valid = valid.any(|(id, ..)| id == held);
            drop(valid);
            let result: Arc<[u8]> = format!("{} {held:?}", self.who).into_bytes().into();
            let step = self.visit(move |session, cx| {
                let completed = keep.and_then(|keep| session.complete(held, (result, keep), cx));
                completed.unwrap_or_else(|| session.release(held, cx))
            });
            match step {
                ReleaseStep::Done(outcome) => self.say(|| format!("released: {outcome:?}")),
                ReleaseStep::Call(id, release, timeout) => {
                    let completed = release.result.clone().zip(release.keep_for);
                    let completed = completed.map(|((_, result), keep)| Completed {
                        hold: release.hold.clone(),
                        result,
                        until: self.now + (keep - keep / 50).saturating_sub(LATE),
                    });
                    self.out
                        .asked
                        .extend(completed.clone().filter(|_| is_valid));
                    let call = Call::new(Request::Release(Box::new(release)), timeout);
                    let call = self.call(Purpose::Release(id, completed), call);
                    match arrival.ending {
                        Ending::DropRelease(pause) => self.after(pause, Event::DropCall(call)),
                        Ending::NeglectRelease => {
                            self.neglected.push(call);
                            self.after(NEGLECTED_FOR, Event::DropCall(call));
                        }
                        Ending::Release | Ending::Drop => {}
                    }
                }
            }
        }
        if arrival.again > 0 && !self.is_quiet {
            let pause = self.entropy.dice.up_to(arrival.pause);
            let again = arrival.again - 1;
            let arrival = Arrival { again, ..arrival };
            self.after(pause, Event::Arrive(Box::new(arrival)));
        }
    }

    fn act(&mut self, number: u32, act: Act) {
        let Some(mut guard) = self.guards.get(&number).cloned() else {
            return;
        };
        let held = guard.held;
        match act {
            Act::Extend(times) => {
                let lease = guard.arrival.terms.lease * times;
                match self.visit(|session, cx| session.extend(held, lease, cx)) {
                    Ok(call) => drop(self.call(Purpose::Extend(held, lease), call)),
                    Err(error) => self.say(|| format!("not extended: {error:?}")),
                }
            }
            Act::Convert { is_dropped } => {
                self.guards.remove(&number);
                match self.visit(|session, cx| session.convert(held, cx)) {
                    Ok((id, call)) => {
                        self.out.converts.push(held);
                        let call = self.call(Purpose::Convert(id, guard), call);
                        if is_dropped {
                            let pause = self.entropy.dice.up_to(Duration::from_millis(3));
                            self.after(pause, Event::DropCall(call));
                        }
                    }
                    Err(ConvertError::Reentered) => {
                        self.visit(|session, cx| session.guard_dropped(held, cx));
                    }
                    Err(error) => self.say(|| format!("not converted: {error:?}")),
                }
            }
            Act::Reenter => {
                if let Ok(true) = self.visit(|session, cx| session.reenter(held, cx)) {
                    let inner = self.number();
                    let pause = self.entropy.dice.up_to(guard.arrival.hold_for * 2);
                    self.after(self.time_to_hold(pause), Event::Done(inner));
                    guard.arrival.again = 0;
                    self.guards.insert(inner, guard);
                }
            }
        }
    }

    /// The time after which a new guard leaves: soon, once there are no more faults.
    fn time_to_hold(&self, planned: Duration) -> Duration {
        if self.is_quiet {
            Duration::from_millis(5)
        } else {
            planned
        }
    }

    /// Ends the faults: requests wait longer, and guards leave soon.
    pub(super) fn quiet(&mut self, now: Instant, longer: Duration) {
        (self.now, self.is_quiet) = (now, true);
        self.session.wait_longer(longer);
        let soon = self.now + Duration::from_millis(50);
        let ends = self.guards.keys().map(|guard| (soon, Event::Done(*guard)));
        self.out.timers.extend(ends);
    }

    /// Returns whether the event has no effect any more.
    pub(super) fn ignores(&self, event: &Event, now: Instant) -> bool {
        match event {
            Event::Replied(call, _) | Event::DropCall(call) => !self.calls.contains_key(call),
            Event::Woken(id) | Event::Cancel(id) => !self.waiters.contains_key(id),
            Event::Timer(id, wait) => {
                let waiter = self.waiters.get(id);
                waiter.is_none_or(|it| it.call.is_some() || it.wait != *wait)
            }
            Event::Done(guard) | Event::Act(guard, _) => !self.guards.contains_key(guard),
            Event::Driver => self.driver_at.is_none_or(|at| at > now),
            _ => false,
        }
    }

    pub(super) fn is_waiting(&self) -> bool {
        let mut waiters = self.waiters.values();
        waiters.any(|waiter| waiter.arrival.terms.wait != Wait::No)
    }

    /// Returns a waiting task that sleeps although it has something to do, or work that the driver
    /// will miss. A task whose wake-up or timer is due now is about to run.
    pub(super) fn overslept(
        &self,
        now: Instant,
        is_due: impl Fn(AcquireId) -> bool,
    ) -> Option<String> {
        for (id, waiter) in &self.waiters {
            if !waiter.sleeps || waiter.is_woken || waiter.call.is_some() || is_due(*id) {
                continue;
            }
            let mut session = self.session.clone();
            let (mut out, mut dice) = (Effects::new(), Dice::new(1));
            let mut cx = Cx {
                now,
                entropy: &mut dice,
                out: &mut out,
                polls: false,
                is_debugged: true,
                mutation: self.mutation,
            };
            let step = session.resume(*id, &mut cx);
            if !matches!(step, Step::Wait(_)) {
                return Some(format!("{} {id:?} sleeps, and could {step:?}", self.who));
            }
        }
        None
    }
}
