//! Who waits in this process for which lock: first come first served, and only the head of a line asks the store.
//!
//! [`Line`] decides and does no I/O; [`Gates`] keeps one per lock that is asked for, and a [`Turn`] is a ticket in it.

use std::{
    collections::{BTreeMap, HashMap},
    future::poll_fn,
    sync::{Mutex, MutexGuard},
    task::{Context, Poll, Waker},
    time::Duration,
};

use foldhash::fast::RandomState;
use tokio::time::Instant;

use crate::{
    key::LockKey,
    spec::{Family, Mode},
    store::{StoreError, Token},
    sync::lock,
};

/// The first pause between two questions to the store about a lock that somebody else holds.
const FIRST_PAUSE: Duration = Duration::from_millis(2);
/// The longest one.
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

type Ticket = u64;

/// What stands for this process at the store: the head of a line holds it, and leaves it to the next with the same wish (PROTOCOL 17).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// The name under which the store was asked.
    pub(crate) token: Token,
    pub(crate) mode: Mode,
    pub(crate) lease: Duration,
    /// The store put the token in its own line, so it must be abandoned there when nobody goes on with it.
    pub(crate) queued: bool,
    /// The next question is due then; at once if the lock is released in this process before.
    pub(crate) ask_at: Instant,
    /// How many releases in this process the line had seen when the store was asked last: a later one is news.
    seen: u64,
    pause: Duration,
}

impl Place {
    fn new(mode: Mode, lease: Duration, now: Instant) -> Self {
        Self { token: Token::random(), mode, lease, queued: false, ask_at: now, seen: 0, pause: FIRST_PAUSE }
    }

    /// The store refused: the next question is due after a pause that grows, at the latest when the holder's lease ends.
    /// `jitter` in 0..1 keeps the processes that wait for one lock from asking in step.
    fn refused(&mut self, now: Instant, holder_ttl: Option<Duration>, jitter: f64) {
        let pause = self.pause.mul_f64(0.5 + 0.5 * jitter);
        self.pause = self.pause.mul_f64(1.6).min(LONGEST_PAUSE);
        // Past the very millisecond, so that the question does not come a moment too early.
        let expiry = holder_ttl.map_or(LONGEST_PAUSE, |ttl| ttl.saturating_add(Duration::from_millis(1)));
        self.ask_at = now + pause.min(expiry);
    }

    /// A fresh name after an answer that never came (PROTOCOL 1).
    fn rename(&mut self) {
        self.queued = false;
        self.token = Token::random();
    }
}

/// Those who wait for one lock, in order. The head is not counted as waiting.
#[derive(Default)]
struct Line {
    head: Option<Ticket>,
    behind: BTreeMap<Ticket, Option<Waker>>,
    next: Ticket,
    /// Left behind by the last head.
    place: Option<Place>,
    /// Counts the releases in this process, so that one that happens while the head is asking is not missed.
    releases: u64,
    head_waker: Option<Waker>,
    /// The store refused the head, or gave it the whole lock: whoever does not wait need not ask.
    stuck: bool,
    /// What the store said last, for those behind who never ask.
    last: Refusal,
}

/// Why the last question was not granted.
#[derive(Clone, Debug, Default)]
pub(crate) enum Refusal {
    /// There was none.
    #[default]
    None,
    /// Somebody holds the lock, for so long if it is known.
    Busy(Option<Duration>),
    /// The store did not answer.
    Unavailable(StoreError),
}

impl Line {
    fn enter(&mut self, limit: usize) -> Option<Ticket> {
        if self.head.is_some() && self.behind.len() >= limit {
            return None;
        }
        let ticket = self.next;
        self.next += 1;
        match self.head {
            None => self.head = Some(ticket),
            Some(_) => {
                self.behind.insert(ticket, None);
            }
        }
        Some(ticket)
    }

    /// Leaves; whoever is to be woken is returned.
    fn leave(&mut self, ticket: Ticket) -> Option<Waker> {
        if self.head != Some(ticket) {
            self.behind.remove(&ticket);
            return None;
        }
        self.head_waker = None;
        let next = self.behind.pop_first();
        self.head = next.as_ref().map(|(ticket, _)| *ticket);
        next.and_then(|(_, waker)| waker)
    }

    fn poll_head(&mut self, ticket: Ticket, cx: &Context<'_>) -> Poll<()> {
        if self.head == Some(ticket) {
            return Poll::Ready(());
        }
        if let Some(waker) = self.behind.get_mut(&ticket) {
            *waker = Some(cx.waker().clone());
        }
        Poll::Pending
    }
}

/// The lines of one client.
pub(crate) struct Gates {
    lines: Mutex<Lines>,
    limit: usize,
}

#[derive(Default)]
struct Lines {
    closed: bool,
    by_lock: HashMap<(Family, LockKey), Line, RandomState>,
}

/// Why nobody is let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shut {
    /// The line is as long as the client allows.
    Full,
    /// The client was shut down.
    Closed,
}

impl Gates {
    /// Lines in which at most `limit` wait behind the head.
    pub(crate) fn new(limit: usize) -> Self {
        Self { lines: Mutex::default(), limit }
    }

    /// Takes a place at the end of the line.
    pub(crate) fn enter(&self, key: &LockKey, family: Family) -> Result<Turn<'_>, Shut> {
        let lock_name = (family, key.clone());
        let mut lines = lock(&self.lines);
        if lines.closed {
            return Err(Shut::Closed);
        }
        let line = lines.by_lock.entry(lock_name).or_default();
        let ticket = line.enter(self.limit).ok_or(Shut::Full)?;
        let first = line.head == Some(ticket);
        Ok(Turn { gates: self, lock_name: (family, key.clone()), ticket, first, place: None })
    }

    /// Do others wait here for a lock that is not free?
    pub(crate) fn is_stuck(&self, key: &LockKey, family: Family) -> bool {
        let lines = lock(&self.lines);
        !lines.by_lock.is_empty() && lines.by_lock.get(&(family, key.clone())).is_some_and(|line| line.stuck)
    }

    /// The lock was released, or lost, in this process: its line may ask at once.
    pub(crate) fn released(&self, key: &LockKey, family: Family) {
        let mut lines = lock(&self.lines);
        if lines.by_lock.is_empty() {
            return;
        }
        let waker = lines.by_lock.get_mut(&(family, key.clone())).and_then(|line| {
            line.releases += 1;
            line.head_waker.take()
        });
        drop(lines);
        waker.into_iter().for_each(Waker::wake);
    }

    /// Lets nobody in any more and sends everybody home.
    pub(crate) fn close(&self) {
        let mut lines = lock(&self.lines);
        lines.closed = true;
        let wakers: Vec<_> = lines
            .by_lock
            .values_mut()
            .flat_map(|line| line.behind.values_mut().filter_map(Option::take).chain(line.head_waker.take()))
            .collect();
        drop(lines);
        wakers.into_iter().for_each(Waker::wake);
    }

    pub(crate) fn is_closed(&self) -> bool {
        lock(&self.lines).closed
    }
}

/// A ticket in a line. Its owner must [`leave`](Self::leave), also when it is dropped.
pub(crate) struct Turn<'a> {
    gates: &'a Gates,
    lock_name: (Family, LockKey),
    ticket: Ticket,
    first: bool,
    /// Held by the head while it asks; left to the next on dropping.
    place: Option<Place>,
}

impl Turn<'_> {
    fn line<T>(&self, lines: &mut MutexGuard<'_, Lines>, f: impl FnOnce(&mut Line) -> T) -> Option<T> {
        lines.by_lock.get_mut(&self.lock_name).map(f)
    }

    pub(crate) fn key(&self) -> &LockKey {
        &self.lock_name.1
    }

    /// Was the line empty when this one came?
    pub(crate) fn is_first(&self) -> bool {
        self.first
    }

    /// Waits to become the head. Dropping the future keeps the place.
    pub(crate) async fn head(&self) -> Result<(), Shut> {
        poll_fn(|cx| {
            let mut lines = lock(&self.gates.lines);
            if lines.closed {
                return Poll::Ready(Err(Shut::Closed));
            }
            self.line(&mut lines, |line| line.poll_head(self.ticket, cx)).unwrap_or(Poll::Ready(())).map(Ok)
        })
        .await
    }

    /// What the head asks the store with: the place of the one before it if their wishes are the same, or a new one.
    /// A place that this one cannot go on with, and that stands in the store's line, is returned.
    pub(crate) fn take_place(&mut self, mode: Mode, lease: Duration, now: Instant) -> Option<Place> {
        let mut lines = lock(&self.gates.lines);
        let left = self.line(&mut lines, |line| line.place.take()).flatten();
        drop(lines);
        let (place, unfit) = match left {
            Some(left) if (left.mode, left.lease) == (mode, lease) => (left, None),
            left => (Place::new(mode, lease, now), left.filter(|place| place.queued)),
        };
        self.place = Some(place);
        unfit
    }

    /// The head's place; none before [`take_place`](Self::take_place).
    pub(crate) fn place(&self) -> Option<&Place> {
        self.place.as_ref()
    }

    /// The head is about to ask: releases from now on are news.
    pub(crate) fn asking(&mut self) {
        let mut lines = lock(&self.gates.lines);
        let releases = self.line(&mut lines, |line| line.releases);
        drop(lines);
        if let (Some(place), Some(releases)) = (&mut self.place, releases) {
            place.seen = releases;
        }
    }

    /// Waits for a release in this process since the head's place last asked. Dropping the future is harmless.
    pub(crate) async fn news(&self) -> Result<(), Shut> {
        let seen = self.place.map(|place| place.seen);
        poll_fn(|cx| {
            let mut lines = lock(&self.gates.lines);
            if lines.closed {
                return Poll::Ready(Err(Shut::Closed));
            }
            self.line(&mut lines, |line| {
                if Some(line.releases) != seen {
                    return Poll::Ready(Ok(()));
                }
                line.head_waker = Some(cx.waker().clone());
                Poll::Pending
            })
            .unwrap_or(Poll::Ready(Ok(())))
        })
        .await
    }

    /// The store refused the head's request; `queued` if it put it in its own line.
    pub(crate) fn refused(&mut self, now: Instant, holder_ttl: Option<Duration>, queued: bool, jitter: f64) {
        self.remember(true, Refusal::Busy(holder_ttl));
        if let Some(place) = &mut self.place {
            place.queued = queued;
            place.refused(now, holder_ttl, jitter);
        }
    }

    /// The head's request has no answer: its name is not to be used again (PROTOCOL 1), and the next question waits.
    pub(crate) fn failed(&mut self, now: Instant, error: Option<&StoreError>, jitter: f64) {
        if let Some(error) = error {
            self.remember(true, Refusal::Unavailable(error.clone()));
        }
        if let Some(place) = &mut self.place {
            place.rename();
            place.refused(now, None, jitter);
        }
    }

    /// The head has the lock, and takes its name with it. The next one has no use in asking before `ask_at`, unless the lock
    /// is released in this process before.
    pub(crate) fn granted(&mut self, ask_at: Instant) {
        if let Some(place) = &mut self.place {
            place.rename();
            place.pause = FIRST_PAUSE;
            place.ask_at = ask_at;
            let stuck = place.mode == Mode::Exclusive;
            self.remember(stuck, Refusal::None);
        }
    }

    fn remember(&self, stuck: bool, last: Refusal) {
        let mut lines = lock(&self.gates.lines);
        self.line(&mut lines, |line| {
            line.stuck = stuck;
            line.last = last;
        });
    }

    /// What the store said last to whoever was the head.
    pub(crate) fn last_refusal(&self) -> Refusal {
        let mut lines = lock(&self.gates.lines);
        self.line(&mut lines, |line| line.last.clone()).unwrap_or_default()
    }

    /// Lets the next one come forward. A place that nobody goes on with, and that stands in the store's line, is returned.
    pub(crate) fn leave(&mut self) -> Option<Place> {
        let mut lines = lock(&self.gates.lines);
        let line = lines.by_lock.get_mut(&self.lock_name)?;
        let waker = line.leave(self.ticket);
        let place = self.place.take();
        let orphan = if line.head.is_none() {
            let left = line.place.take();
            lines.by_lock.remove(&self.lock_name);
            place.or(left).filter(|place| place.queued)
        } else {
            line.place = place.or(line.place.take());
            None
        };
        drop(lines);
        waker.into_iter().for_each(Waker::wake);
        orphan
    }
}

#[cfg(test)]
mod tests;
