//! The local wait queues: first come, first served per lock, and only the head of a
//! queue calls the store.
//!
//! [`Line`] decides and does no I/O, as do the [`Place`] of a queue in the store's wait queue and
//! the [`Baton`] of a local hand-off. [`Gates`] keeps one [`Line`] per requested lock, and a
//! [`Turn`] is a ticket in it.

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
    spec::LockKind,
    store::{Grant, Hold, StoreError, Token},
    sync::lock,
};

/// The time within which every head calls the store after a broken connection.
pub(crate) const ASK_WITHIN: Duration = Duration::from_millis(50);

/// The local wait queues of one client.
pub(crate) struct Gates {
    lines: Mutex<Lines>,
    /// The largest number of waiters behind the head of each queue.
    limit: usize,
    limit_in_all: usize,
    /// Notified when the queue of a lock becomes empty after the shutdown of the client.
    left: Notify,
}

#[derive(Default)]
struct Lines {
    closed: bool,
    /// The number of tickets in all queues.
    tickets: usize,
    /// The latest time at which the store may have lost data.
    lost: Option<Instant>,
    by_lock: HashMap<(LockKind, LockKey), Line, RandomState>,
}

impl Lines {
    fn line(&mut self, kind: LockKind, key: &LockKey) -> Option<&mut Line> {
        if self.by_lock.is_empty() {
            return None;
        }
        self.by_lock.get_mut(&(kind, key.clone()))
    }
}

/// The reason for refusing a new or a waiting request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shut {
    /// The queue is as long as the request or the client allows.
    Full,
    /// All queues together are as long as the client allows.
    FullInAll,
    /// The client was shut down.
    Closed,
}

impl Gates {
    /// Queues with at most `limit` waiters behind the head, and at most `limit_in_all`
    /// tickets in total.
    pub(crate) fn new(limit: usize, limit_in_all: usize) -> Self {
        Self {
            lines: Mutex::default(),
            limit,
            limit_in_all,
            left: Notify::new(),
        }
    }

    /// Takes a ticket at the end of the queue, unless `limit` waiters or as many as the client
    /// allows stand behind its head.
    pub(crate) fn enter(&self, key: &LockKey, wish: Wish, limit: usize) -> Result<Turn<'_>, Shut> {
        let lock_name = (wish.mode.kind(), key.clone());
        let mut lines = lock(&self.lines);
        if lines.closed {
            return Err(Shut::Closed);
        }
        if lines.tickets >= self.limit_in_all {
            return Err(Shut::FullInAll);
        }
        let line = lines.by_lock.entry(lock_name.clone()).or_default();
        let ticket = line
            .enter(wish, limit.min(self.limit), Instant::now())
            .ok_or(Shut::Full)?;
        let first = line.is_head(ticket);
        lines.tickets += 1;
        Ok(Turn {
            gates: self,
            lock_name,
            ticket,
            first,
        })
    }

    /// Calls `f` with the queue of a lock, if there is one.
    fn with<T>(&self, kind: LockKind, key: &LockKey, f: impl FnOnce(&mut Line) -> T) -> Option<T> {
        lock(&self.lines).line(kind, key).map(f)
    }

    /// Returns the store's latest reply to the waiters of this process, unless there are
    /// none or the lock was granted to all of them. A request that does not wait needs no
    /// call of its own then.
    pub(crate) fn last_refusal(&self, key: &LockKey, kind: LockKind) -> Option<Refusal> {
        self.with(kind, key, |line| line.stuck.then(|| line.last.clone()))
            .flatten()
    }

    /// Records that the lock was released or lost in this process. Its queue may make
    /// an attempt at once.
    pub(crate) fn released(&self, key: &LockKey, kind: LockKind) {
        wake(
            self.with(kind, key, |line| line.released(Instant::now()))
                .flatten(),
        );
    }

    /// Handles the departure of the last guard of an exclusive lock; see [`Line::part`].
    pub(crate) fn part(
        &self,
        key: &LockKey,
        lease: Duration,
        baton: impl FnOnce(Instant) -> Option<Baton>,
    ) -> Parting {
        let mut lines = lock(&self.lines);
        let lost = lines.lost;
        let Some(line) = lines.line(LockKind::Lock, key) else {
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

    /// Records that a lock is held again after it was released for the waiters of this process.
    /// Returns the hold to release if no waiter takes it.
    pub(crate) fn handed_back(&self, baton: Baton) -> Result<(), Hold> {
        let mut lines = lock(&self.lines);
        let lost = lines.lost;
        let Some(line) = lines.line(LockKind::Lock, &baton.hold.key) else {
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

    /// Records that a lock that was released for the waiters of this process has another
    /// holder, and that the store has queued the token of `hold`. Returns `false` if no
    /// waiter uses that token.
    pub(crate) fn queued_again(
        &self,
        hold: &Hold,
        sent: Instant,
        counter: Option<FencingToken>,
        holder_ttl: Option<Duration>,
    ) -> bool {
        let queued = self.with(LockKind::Lock, &hold.key, |line| {
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

    /// Removes the queue entry that a release was to open and did not.
    pub(crate) fn drop_place(&self, hold: &Hold) {
        let waker = self.with(LockKind::Lock, &hold.key, |line| {
            line.drop_place(hold.token);
            line.released(Instant::now())
        });
        wake(waker.flatten());
    }

    /// Records a pushed grant. Returns `false` if no waiter uses its token.
    pub(crate) fn pushed(&self, hold: &Hold, grant: Grant) -> bool {
        let pushed = self
            .with(hold.mode.kind(), &hold.key, |line| {
                line.pushed(hold.token, grant)
            })
            .flatten();
        let is_known = pushed.is_some();
        wake(pushed.flatten());
        is_known
    }

    /// Records that the lock may be free after `ttl`; see [`Line::ask_by`].
    pub(crate) fn free_in(&self, key: &LockKey, kind: LockKind, ttl: Duration) {
        // One millisecond past the expiry, so that the request does not arrive just before it.
        // Without a remaining time it is sent at once.
        let past = if ttl.is_zero() {
            Duration::ZERO
        } else {
            Duration::from_millis(1)
        };
        let over = ttl
            .checked_add(past)
            .and_then(|ttl| Instant::now().checked_add(ttl));
        wake(
            over.and_then(|over| self.with(kind, key, |line| line.ask_by(over)))
                .flatten(),
        );
    }

    /// Handles a store that may have lost data and push messages. Locks are no longer handed off
    /// under fencing tokens that were reserved before; hand-offs that were not taken yet are
    /// returned, to be released. Every head calls the store after a random delay of up to
    /// [`ASK_WITHIN`]. The delay keeps clients from calling in step, and from calling as fast as
    /// a server may accept and cut connections.
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

    /// Refuses new requests and wakes every waiter with [`Shut::Closed`].
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

    /// Waits until every queue is empty.
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

/// A ticket in a queue. Its owner must call [`leave`](Self::leave), also when it is dropped.
pub(crate) struct Turn<'a> {
    gates: &'a Gates,
    lock_name: (LockKind, LockKey),
    ticket: Ticket,
    first: bool,
}

impl Turn<'_> {
    /// Calls `f` with the queue, which exists as long as it has a ticket.
    fn with<T>(&self, f: impl FnOnce(&mut Line) -> T) -> Option<T> {
        lock(&self.gates.lines)
            .by_lock
            .get_mut(&self.lock_name)
            .map(f)
    }

    /// Returns whether the queue was empty when this ticket was taken.
    pub(crate) fn is_first(&self) -> bool {
        self.first
    }

    /// Waits to become the head. Dropping the future keeps the position in the queue.
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

    /// Returns the next step of the head.
    pub(crate) fn next(&self, now: Instant) -> Next {
        self.with(|line| line.next(now)).unwrap_or(Next::Wait(now))
    }

    /// See [`Line::reader_group`].
    pub(crate) fn reader_group(&self) -> Option<Token> {
        self.with(|line| line.reader_group()).flatten()
    }

    /// Waits for news for the head. Dropping the future loses nothing.
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

    /// See [`Line::served`]. Returns whether this waiter had to wait for another request
    /// or holder.
    pub(crate) fn served(&self, token: Option<Token>, passing_until: Option<Instant>) -> bool {
        let contended = self.with(|line| line.served(token, passing_until));
        !self.first || contended.unwrap_or(false)
    }

    /// Returns the store's latest reply to the head, whichever waiter that was.
    pub(crate) fn last_refusal(&self) -> Refusal {
        self.with(|line| line.last.clone()).unwrap_or_default()
    }

    /// Leaves the queue, so that the next waiter becomes its head. Called once for every ticket.
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
