//! Who waits in this process for which lock: first come first served, and only the head of a line asks the store.
//!
//! [`Line`] decides and does no I/O, and so do the [`Place`] that it has in the store's line and the [`Baton`] with which a lock
//! is passed on without the store. [`Gates`] keeps one line per lock that is asked for, and a [`Turn`] is a ticket in it.

mod baton;
mod line;
mod place;

use std::{
    collections::HashMap,
    future::poll_fn,
    sync::Mutex,
    task::{Poll, Waker},
    time::Duration,
};

use foldhash::fast::RandomState;
use tokio::{sync::Notify, time::Instant};

use self::line::Ticket;
pub(crate) use self::{
    baton::{Baton, Budget, PASSES},
    line::{Left, Line, Next, Parting, Refusal, Wish},
    place::Proven,
};
use crate::{
    fence::FencingToken,
    key::LockKey,
    spec::Family,
    store::{Grant, Hold, StoreError, Token},
    sync::lock,
};

/// After a broken connection every head asks within this time.
pub(crate) const ASK_WITHIN: Duration = Duration::from_millis(50);

/// The lines of one client.
pub(crate) struct Gates {
    lines: Mutex<Lines>,
    /// Behind the head of each line.
    limit: usize,
    limit_in_all: usize,
    /// The last one has left the line of a lock, after closing time.
    left: Notify,
}

#[derive(Default)]
struct Lines {
    closed: bool,
    /// All tickets of all lines.
    tickets: usize,
    /// When the store may have lost data, the latest time.
    lost: Option<Instant>,
    by_lock: HashMap<(Family, LockKey), Line, RandomState>,
}

impl Lines {
    fn line(&mut self, family: Family, key: &LockKey) -> Option<&mut Line> {
        if self.by_lock.is_empty() {
            return None;
        }
        self.by_lock.get_mut(&(family, key.clone()))
    }
}

/// Why nobody is let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shut {
    /// The line is as long as the request or the client allows.
    Full,
    /// All lines together are as long as the client allows.
    FullInAll,
    /// The client was shut down.
    Closed,
}

impl Gates {
    /// Lines in which at most `limit` wait behind the head, and at most `limit_in_all` have a ticket.
    pub(crate) fn new(limit: usize, limit_in_all: usize) -> Self {
        Self {
            lines: Mutex::default(),
            limit,
            limit_in_all,
            left: Notify::new(),
        }
    }

    /// Takes a place at the end of the line, if at most `limit` wait there behind the head, and no more than the client allows.
    pub(crate) fn enter(&self, key: &LockKey, wish: Wish, limit: usize) -> Result<Turn<'_>, Shut> {
        let lock_name = (wish.mode.family(), key.clone());
        let mut lines = lock(&self.lines);
        if lines.closed {
            return Err(Shut::Closed);
        }
        if lines.tickets >= self.limit_in_all {
            return Err(Shut::FullInAll);
        }
        let line = lines.by_lock.entry(lock_name.clone()).or_default();
        let ticket = line.enter(wish, limit.min(self.limit)).ok_or(Shut::Full)?;
        let first = line.is_head(ticket);
        lines.tickets += 1;
        Ok(Turn {
            gates: self,
            lock_name,
            ticket,
            first,
        })
    }

    /// Does something in the line of a lock, if there is one.
    fn with<T>(
        &self,
        family: Family,
        key: &LockKey,
        what: impl FnOnce(&mut Line) -> T,
    ) -> Option<T> {
        lock(&self.lines).line(family, key).map(what)
    }

    /// The latest answer of the store to the waiters of this process, if there are any and the lock was not granted to all: a
    /// request that does not wait need not ask again.
    pub(crate) fn last_refusal(&self, key: &LockKey, family: Family) -> Option<Refusal> {
        self.with(family, key, |line| line.stuck.then(|| line.last.clone()))
            .flatten()
    }

    /// The lock was given back, or lost, in this process: its line may ask at once.
    pub(crate) fn released(&self, key: &LockKey, family: Family) {
        wake(
            self.with(family, key, |line| line.released(Instant::now()))
                .flatten(),
        );
    }

    /// The last guard of an exclusive lock leaves: see [`Line::part`].
    pub(crate) fn part(
        &self,
        key: &LockKey,
        lease: Duration,
        baton: impl FnOnce(Instant) -> Option<Baton>,
    ) -> Parting {
        let mut lines = lock(&self.lines);
        let lost = lines.lost;
        let Some(line) = lines.line(Family::Lock, key) else {
            return Parting::GiveBack;
        };
        let now = Instant::now();
        let (parting, waker) = line.part(
            lease,
            baton(now).filter(|baton| baton.budget.is_after(lost)),
            now,
        );
        drop(lines);
        wake(waker);
        parting
    }

    /// A lock that was handed back is held again. The hold to release is returned if no waiter takes it.
    pub(crate) fn handed_back(&self, baton: Baton) -> Result<(), Hold> {
        let mut lines = lock(&self.lines);
        let lost = lines.lost;
        let Some(line) = lines.line(Family::Lock, &baton.hold.key) else {
            return Err(baton.hold);
        };
        let (handed_back, waker) = if baton.budget.is_after(lost) {
            line.handed_back(baton)
        } else {
            line.drop_place(baton.hold.token);
            (Err(baton.hold), line.released(Instant::now()))
        };
        drop(lines);
        wake(waker);
        handed_back
    }

    /// A lock that was handed back is somebody else's, and `token` stands in line for it. `false` if nobody waits under that token.
    pub(crate) fn queued_again(
        &self,
        hold: &Hold,
        sent: Instant,
        counter: Option<FencingToken>,
        holder_ttl: Option<Duration>,
    ) -> bool {
        let queued = self.with(Family::Lock, &hold.key, |line| {
            line.queued(
                hold.token,
                sent,
                counter,
                holder_ttl,
                Instant::now(),
                rand::random(),
            )
            .then(|| line.call_head())
        });
        let known = queued.flatten();
        let is_known = known.is_some();
        wake(known.flatten());
        is_known
    }

    /// Nothing came of a place in line that was opened by handing a lock back.
    pub(crate) fn drop_place(&self, hold: &Hold) {
        let waker = self.with(Family::Lock, &hold.key, |line| {
            line.drop_place(hold.token);
            line.released(Instant::now())
        });
        wake(waker.flatten());
    }

    /// The store pushed a grant. `false` if nobody waits for it.
    pub(crate) fn pushed(&self, hold: &Hold, grant: Grant) -> bool {
        let pushed = self
            .with(hold.mode.family(), &hold.key, |line| {
                line.pushed(hold.token, grant)
            })
            .flatten();
        let is_known = pushed.is_some();
        wake(pushed.flatten());
        is_known
    }

    /// The lock may be free after `ttl`: see [`Line::ask_by`].
    pub(crate) fn kept(&self, key: &LockKey, family: Family, ttl: Duration) {
        // Past the very millisecond, so that the question does not come a moment too early. With nothing left it may come at once.
        let past = if ttl.is_zero() {
            Duration::ZERO
        } else {
            Duration::from_millis(1)
        };
        let over = ttl
            .checked_add(past)
            .and_then(|ttl| Instant::now().checked_add(ttl));
        wake(
            over.and_then(|over| self.with(family, key, |line| line.ask_by(over)))
                .flatten(),
        );
    }

    /// The store may have lost data and push messages. No lock is handed off any more under fencing tokens that were reserved
    /// before: the hand-offs that were not taken yet are returned, to be released. Every head asks the store within a moment; not
    /// all together, and not as fast as a server may accept and cut connections.
    pub(crate) fn store_lost(&self) -> Vec<Baton> {
        let now = Instant::now();
        let at = now + ASK_WITHIN.mul_f64(rand::random());
        let mut lines = lock(&self.lines);
        lines.lost = Some(now);
        let batons = lines
            .by_lock
            .values_mut()
            .filter_map(Line::withdraw_baton)
            .collect();
        let wakers: Vec<_> = lines
            .by_lock
            .values_mut()
            .filter_map(|line| line.ask_soon(at))
            .collect();
        drop(lines);
        wakers.into_iter().for_each(Waker::wake);
        batons
    }

    /// Lets nobody in any more and sends everybody home.
    pub(crate) fn close(&self) {
        let mut lines = lock(&self.lines);
        lines.closed = true;
        let wakers: Vec<_> = lines
            .by_lock
            .values_mut()
            .flat_map(Line::sleepers)
            .collect();
        drop(lines);
        wakers.into_iter().for_each(Waker::wake);
    }

    pub(crate) fn is_closed(&self) -> bool {
        lock(&self.lines).closed
    }

    /// Waits until nobody is left in any line.
    pub(crate) async fn emptied(&self) {
        loop {
            let left = self.left.notified();
            if lock(&self.lines).by_lock.is_empty() {
                return;
            }
            left.await;
        }
    }
}

fn wake(waker: Option<Waker>) {
    waker.into_iter().for_each(Waker::wake);
}

/// A ticket in a line. Its owner must [`leave`](Self::leave), also when it is dropped.
pub(crate) struct Turn<'a> {
    gates: &'a Gates,
    lock_name: (Family, LockKey),
    ticket: Ticket,
    first: bool,
}

impl Turn<'_> {
    /// Does something in the line, which exists as long as somebody has a ticket.
    fn with<T>(&self, what: impl FnOnce(&mut Line) -> T) -> Option<T> {
        lock(&self.gates.lines)
            .by_lock
            .get_mut(&self.lock_name)
            .map(what)
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
            let line = lines.by_lock.get_mut(&self.lock_name);
            line.map_or(Poll::Ready(()), |line| line.poll_head(self.ticket, cx))
                .map(Ok)
        })
        .await
    }

    /// What the head does next.
    pub(crate) fn next(&self, now: Instant) -> Next {
        self.with(|line| line.next(now)).unwrap_or(Next::Wait(now))
    }

    /// See [`Line::beside`].
    pub(crate) fn beside(&self) -> Option<Token> {
        self.with(|line| line.beside()).flatten()
    }

    /// Waits until there is something new for the head. Dropping the future loses nothing.
    pub(crate) async fn news(&self) -> Result<(), Shut> {
        poll_fn(|cx| {
            let mut lines = lock(&self.gates.lines);
            if lines.closed {
                return Poll::Ready(Err(Shut::Closed));
            }
            let line = lines.by_lock.get_mut(&self.lock_name);
            line.map_or(Poll::Ready(()), |line| line.poll_news(cx))
                .map(Ok)
        })
        .await
    }

    /// See [`Line::queued`].
    pub(crate) fn queued(
        &self,
        token: Token,
        sent: Instant,
        counter: Option<FencingToken>,
        holder_ttl: Option<Duration>,
    ) {
        self.with(|line| {
            line.queued(
                token,
                sent,
                counter,
                holder_ttl,
                Instant::now(),
                rand::random(),
            )
        });
    }

    /// See [`Line::refused`].
    pub(crate) fn refused(&self, token: Token, holder_ttl: Option<Duration>) {
        self.with(|line| line.refused(token, holder_ttl, Instant::now(), rand::random()));
    }

    /// See [`Line::unanswered`].
    pub(crate) fn unanswered(&self, token: Token, error: &StoreError) {
        self.with(|line| line.unanswered(token, error, Instant::now(), rand::random()));
    }

    /// See [`Line::failed`].
    pub(crate) fn failed(&self, token: Token, error: Option<&StoreError>) {
        self.with(|line| line.failed(token, error, Instant::now(), rand::random()));
    }

    /// See [`Line::gone`].
    pub(crate) fn gone(&self, token: Token) {
        self.with(|line| line.gone(token, Instant::now()));
    }

    /// See [`Line::served`]. Had this one to wait for somebody else?
    pub(crate) fn served(&self, token: Option<Token>, passing_until: Option<Instant>) -> bool {
        let contended = self.with(|line| line.served(token, passing_until));
        !self.first || contended.unwrap_or(false)
    }

    /// What the store said last to whoever was the head.
    pub(crate) fn last_refusal(&self) -> Refusal {
        self.with(|line| line.last.clone()).unwrap_or_default()
    }

    /// Lets the next one come forward. For every ticket once.
    pub(crate) fn leave(&self) -> Left {
        let mut lines = lock(&self.gates.lines);
        let Some(line) = lines.by_lock.get_mut(&self.lock_name) else {
            return Left::default();
        };
        let mut left = line.leave(self.ticket);
        let is_empty = line.is_empty();
        lines.tickets -= 1;
        if is_empty {
            lines.by_lock.remove(&self.lock_name);
            if lines.closed {
                self.gates.left.notify_waiters();
            }
        }
        drop(lines);
        wake(left.wake.take());
        left
    }
}

#[cfg(test)]
mod tests;
