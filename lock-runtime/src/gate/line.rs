//! The local wait queue of one lock, and the next step of its head. A state machine without I/O:
//! the time, the replies and the push messages are its input.

use std::{
    collections::BTreeMap,
    task::{Context, Poll, Waker},
    time::Duration,
};

use tokio::time::Instant;

use super::{
    baton::{Baton, PASSES},
    place::{Place, Proven},
};
use crate::{
    fence::FencingToken,
    spec::Mode,
    store::{Grant, Hold, StoreError, Token},
};

pub(crate) type Ticket = u64;

/// The terms of a waiter. Waiters with the same wish may continue with each other's queue entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Wish {
    pub(crate) mode: Mode,
    pub(crate) lease: Duration,
    /// Whether the lock may be handed off locally to this waiter and from it.
    pub(crate) passing: bool,
}

/// The waiters for one lock, in order of arrival. The head is not counted as waiting.
#[derive(Default)]
pub(crate) struct Line {
    head: Option<Head>,
    behind: BTreeMap<Ticket, Waiting>,
    next: Ticket,
    place: Option<Place>,
    /// A hand-off that the head has not taken yet.
    baton: Option<Baton>,
    /// Until when the holder in this process may hand off the lock, so that the head need
    /// not call the store.
    passing_until: Option<Instant>,
    /// The last admitted reader, and the first ticket of the next reader group.
    group: Option<(Token, Ticket)>,
    /// When the lock may be free, as announced by the store since the latest request was sent.
    ask_by: Option<Instant>,
    /// Whether there is news for the head.
    news: bool,
    head_waker: Option<Waker>,
    /// Whether there was a release in this process since the latest request was sent.
    released: bool,
    /// The store refused the head or did not reply, or the head holds the lock exclusively: a
    /// request that does not wait needs no call of its own.
    pub(crate) stuck: bool,
    /// The lock was not free at some time since the queue was created.
    contended: bool,
    /// The store's latest reply, for the waiters behind the head, which make no calls.
    pub(crate) last: Refusal,
}

#[derive(Clone, Copy)]
struct Head {
    ticket: Ticket,
    wish: Wish,
    /// When it entered the queue.
    since: Instant,
}

struct Waiting {
    wish: Wish,
    since: Instant,
    waker: Option<Waker>,
}

/// The reason why the latest acquire attempt was not granted.
#[derive(Clone, Debug, Default)]
pub(crate) enum Refusal {
    /// There was no refusal.
    #[default]
    None,
    /// The lock is held, for the given time if that is known.
    Busy(Option<Duration>),
    /// The store did not reply.
    Unavailable(StoreError),
}

/// The next step of the head.
#[derive(Debug)]
pub(crate) enum Next {
    /// Take over the lock from its previous holder in this process.
    Take(Baton),
    /// Take over a pushed grant.
    Granted(Token, Proven),
    /// Make an acquire attempt that enters the store's wait queue and reserves this number
    /// of fencing tokens.
    Ask(Token, u32),
    /// Poll the queue entry.
    Poll(Token),
    /// Abandon a token under which another task made a request, then determine the next
    /// step again.
    GiveUp(Token),
    /// Wait for news until this instant, then determine the next step again.
    Wait(Instant),
}

/// The work that remains after a waiter has left.
#[derive(Debug, Default)]
pub(crate) struct Left {
    /// A queue entry that the store may know and that no waiter continues with. It must
    /// be abandoned.
    pub(crate) orphan: Option<Place>,
    /// A hand-off that no waiter takes. The lock must be released to the store.
    pub(crate) baton: Option<Baton>,
    pub(crate) wake: Option<Waker>,
}

/// The outcome for a lock whose last guard leaves.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Parting {
    /// The lock was handed off to a waiter in this process.
    Passed,
    /// Release the lock and, in the same step, take it up again under this token for the waiters
    /// of this process, or enter the store's wait queue.
    HandBack(Token),
    /// Release the lock.
    GiveBack,
}

impl Line {
    pub(crate) fn enter(&mut self, wish: Wish, limit: usize, now: Instant) -> Option<Ticket> {
        if self.head.is_some() && self.behind.len() >= limit {
            return None;
        }
        let ticket = self.next;
        self.next += 1;
        match self.head {
            None => {
                self.head = Some(Head {
                    ticket,
                    wish,
                    since: now,
                });
            }
            Some(_) => {
                let waiting = Waiting {
                    wish,
                    since: now,
                    waker: None,
                };
                self.behind.insert(ticket, waiting);
            }
        }
        Some(ticket)
    }

    pub(crate) fn is_head(&self, ticket: Ticket) -> bool {
        self.head.is_some_and(|head| head.ticket == ticket)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.head.is_none()
    }

    pub(crate) fn poll_head(&mut self, ticket: Ticket, cx: &Context<'_>) -> Poll<()> {
        if self.is_head(ticket) {
            return Poll::Ready(());
        }
        if let Some(waiting) = self.behind.get_mut(&ticket) {
            waiting.waker = Some(cx.waker().clone());
        }
        Poll::Pending
    }

    /// Removes a waiter, served or not.
    pub(crate) fn leave(&mut self, ticket: Ticket) -> Left {
        if !self.is_head(ticket) {
            self.behind.remove(&ticket);
            return Left::default();
        }
        self.head_waker = None;
        let (head, wake) = self
            .behind
            .pop_first()
            .map(|(ticket, Waiting { wish, since, waker })| {
                let head = Head {
                    ticket,
                    wish,
                    since,
                };
                (head, waker)
            })
            .unzip();
        self.head = head;
        let wish = self.head.map(|head| head.wish);
        let orphan = self
            .place
            .take_if(|place| wish.is_none_or(|wish| !place.fits(wish)))
            .filter(Place::is_known);
        let baton = self
            .baton
            .take_if(|baton| wish.is_none_or(|wish| !takes(wish, baton.lease.length())));
        Left {
            orphan,
            baton,
            wake: wake.flatten(),
        }
    }

    /// Returns the next step of the head.
    pub(crate) fn next(&mut self, now: Instant) -> Next {
        self.news = false;
        if let Some(baton) = self.baton.take() {
            return Next::Take(baton);
        }
        let Some(Head { wish, since, .. }) = self.head else {
            return Next::Wait(now);
        };
        if self.place.is_none()
            && let Some(until) = self.passing_until.filter(|until| *until > now)
            && wish.passing
        {
            return Next::Wait(until);
        }
        let place = self.place.get_or_insert_with(|| Place::new(wish, now));
        if let Some(proven) = place.proven() {
            // The entry is that of an earlier waiter. Its grant may be older than grants that
            // other holders got before this waiter came; a poll draws a larger fencing token.
            if wish.mode != Mode::Exclusive && proven.as_of < since {
                return Next::Poll(place.token);
            }
            return Next::Granted(place.token, proven);
        }
        if place.ask_at > now {
            return Next::Wait(place.ask_at);
        }
        if place.is_asked() {
            // The task that releases the lock made this request. Its outcome is overdue;
            // the task may be gone.
            let token = place.token;
            place.rename();
            return Next::GiveUp(token);
        }
        self.released = false;
        // The reply announces when the lock may be free.
        self.ask_by = None;
        if place.asked(now) {
            return Next::Poll(place.token);
        }
        let reserved = if wish.passing && !self.behind.is_empty() {
            PASSES
        } else {
            0
        };
        Next::Ask(place.token, reserved)
    }

    /// Returns the reader together with which the head may be admitted, if both belong
    /// to one reader group.
    pub(crate) fn reader_group(&self) -> Option<Token> {
        let Head { ticket, wish, .. } = self.head?;
        let (token, end) = self.group?;
        (wish.mode == Mode::Shared && ticket < end).then_some(token)
    }

    /// Resolves when there is news for the head.
    pub(crate) fn poll_news(&mut self, cx: &Context<'_>) -> Poll<()> {
        if std::mem::take(&mut self.news) {
            return Poll::Ready(());
        }
        self.head_waker = Some(cx.waker().clone());
        Poll::Pending
    }

    /// Records news for the head and returns the waker to be woken.
    #[must_use]
    pub(crate) fn call_head(&mut self) -> Option<Waker> {
        self.news = true;
        self.head_waker.take()
    }

    pub(crate) fn sleepers(&mut self) -> impl Iterator<Item = Waker> {
        self.behind
            .values_mut()
            .filter_map(|waiting| waiting.waker.take())
            .chain(self.head_waker.take())
    }

    /// The token of the queue entry.
    #[cfg(test)]
    pub(crate) fn place_token(&self) -> Option<Token> {
        self.place.map(|place| place.token)
    }

    /// The token of the pending hand-off.
    #[cfg(test)]
    pub(crate) fn baton_token(&self) -> Option<Token> {
        self.baton.as_ref().map(|baton| baton.hold.token)
    }

    fn place_of(&mut self, token: Token) -> Option<&mut Place> {
        self.place.as_mut().filter(|place| place.token == token)
    }

    /// Records that the store has queued `token`, in reply to a request sent at `sent`. Returns
    /// `false` if no waiter uses that token.
    pub(crate) fn queued(
        &mut self,
        token: Token,
        sent: Instant,
        counter: Option<FencingToken>,
        holder_ttl: Option<Duration>,
        now: Instant,
        jitter: f64,
    ) -> bool {
        self.stuck = true;
        self.contended = true;
        self.last = Refusal::Busy(holder_ttl);
        let ask_by = self.ask_by.take().filter(|by| sent < *by);
        let Some(place) = self.place_of(token) else {
            return false;
        };
        place.queued(sent, counter, holder_ttl, now, jitter);
        // The reply may be older than the announcement.
        if let Some(by) = ask_by {
            place.ask_at = place.ask_at.min(by);
        }
        true
    }

    /// Records that the store has refused `token` and has no queue entry for it.
    pub(crate) fn refused(
        &mut self,
        token: Token,
        holder_ttl: Option<Duration>,
        now: Instant,
        jitter: f64,
    ) {
        self.stuck = true;
        self.contended = true;
        self.last = Refusal::Busy(holder_ttl);
        let released = self.released;
        if let Some(place) = self.place_of(token) {
            place.refused(now, holder_ttl, jitter);
            if released {
                place.ask_at = now;
            }
        }
    }

    /// Records that a poll, or the confirmation of a grant, got no reply. The queue entry is
    /// unchanged, and the next poll returns its state.
    pub(crate) fn unanswered(
        &mut self,
        token: Token,
        error: &StoreError,
        now: Instant,
        jitter: f64,
    ) {
        self.last = Refusal::Unavailable(error.clone());
        if let Some(place) = self.place_of(token) {
            place.try_later(now, None, jitter);
        }
    }

    /// Records a request without a reply, or with one that ends its token. The token must not be
    /// used again (PROTOCOL 1), and the next attempt is delayed.
    pub(crate) fn failed(
        &mut self,
        token: Token,
        error: Option<&StoreError>,
        now: Instant,
        jitter: f64,
    ) {
        if let Some(error) = error {
            self.stuck = true;
            self.last = Refusal::Unavailable(error.clone());
        }
        if let Some(place) = self.place_of(token) {
            place.rename();
            place.try_later(now, None, jitter);
        }
    }

    /// Records that the store no longer knows `token`. The next attempt is made at once,
    /// under a fresh token.
    pub(crate) fn gone(&mut self, token: Token, now: Instant) {
        if let Some(place) = self.place_of(token) {
            place.rename();
            place.ask_at = now;
        }
    }

    /// Records that the head holds the lock: under the token of its queue entry, or by a local
    /// hand-off if `token` is `None`. It may hand off the lock locally until `passing_until`.
    /// Returns whether the lock was not free at some time since the queue was created.
    pub(crate) fn served(&mut self, token: Option<Token>, passing_until: Option<Instant>) -> bool {
        if let Some(token) = token {
            self.group = self.head.filter(|head| head.wish.mode == Mode::Shared).map(
                |Head { ticket, .. }| {
                    // Waiters that arrive from now on belong to the next group.
                    let end = self.group.map(|(_, end)| end).filter(|end| ticket < *end);
                    (token, end.unwrap_or(self.next))
                },
            );
            self.drop_place(token);
            // The store would not have granted the lock while the hold of a pending
            // hand-off lasted.
            self.baton = None;
        }
        self.passing_until = passing_until;
        self.stuck = self
            .head
            .is_some_and(|head| head.wish.mode == Mode::Exclusive);
        self.last = Refusal::None;
        self.contended
    }

    /// Records a pushed grant and returns the waker to be woken, or `None` if no waiter
    /// uses that token.
    pub(crate) fn pushed(&mut self, token: Token, grant: Grant) -> Option<Option<Waker>> {
        self.place_of(token)?.pushed(grant);
        Some(self.call_head())
    }

    /// Records that the lock may be free from `at` on. A head with a queue entry polls by then.
    pub(crate) fn ask_by(&mut self, at: Instant) -> Option<Waker> {
        self.ask_by = Some(self.ask_by.map_or(at, |by| by.min(at)));
        let place = self
            .place
            .as_mut()
            .filter(|place| place.is_queued() && at < place.ask_at)?;
        place.ask_at = at;
        self.call_head()
    }

    /// Records that the store may have lost the queue entry, a push message or all its data. The
    /// head calls the store by `at`.
    pub(crate) fn ask_soon(&mut self, at: Instant) -> Option<Waker> {
        self.passing_until = None;
        if let Some(place) = &mut self.place {
            place.doubt(at);
        }
        self.call_head()
    }

    /// Withdraws a hand-off that the head has not taken.
    pub(crate) fn withdraw_baton(&mut self) -> Option<Baton> {
        self.baton.take()
    }

    /// Records that the lock was released or lost in this process.
    pub(crate) fn released(&mut self, now: Instant) -> Option<Waker> {
        self.passing_until = None;
        self.released = true;
        // A waiter with a queue entry is notified by the store.
        if let Some(place) = self.place.as_mut().filter(|place| !place.is_known()) {
            place.ask_at = now;
        }
        self.call_head()
    }

    /// Decides the outcome for a lock whose last guard leaves. The lock may be taken up again
    /// with a lease of `lease`, or handed off as `baton`.
    pub(crate) fn part(
        &mut self,
        lease: Duration,
        baton: Option<Baton>,
        now: Instant,
    ) -> (Parting, Option<Waker>) {
        let heir = self
            .head
            .map(|head| head.wish)
            .filter(|wish| takes(*wish, lease) && self.baton.is_none());
        match (heir, baton, &self.place) {
            (None, ..) => (Parting::GiveBack, None),
            (Some(_), Some(baton), _) => (Parting::Passed, self.pass(baton)),
            (Some(wish), None, None) => {
                self.ask_by = None;
                let mut place = Place::new(wish, now);
                place.asked(now);
                self.place = Some(place);
                (Parting::HandBack(place.token), None)
            }
            (Some(_), None, Some(_)) => (Parting::GiveBack, None),
        }
    }

    fn pass(&mut self, baton: Baton) -> Option<Waker> {
        self.passing_until = Some(baton.budget.until);
        self.contended = true;
        self.baton = Some(baton);
        self.call_head()
    }

    /// Records that a lock that was released for the waiters of this process is held
    /// again, as `baton`. Returns the hold to release if the head does not take it; the
    /// head then calls the store.
    pub(crate) fn handed_back(&mut self, baton: Baton) -> (Result<(), Hold>, Option<Waker>) {
        // The waiters for which the lock was taken up again have left, and the token is being
        // abandoned. Later waiters must not get it (PROTOCOL 1).
        if self.place_of(baton.hold.token).is_none() {
            return (Err(baton.hold), None);
        }
        self.drop_place(baton.hold.token);
        match self.head {
            Some(Head { wish, .. })
                if self.baton.is_none() && takes(wish, baton.lease.length()) =>
            {
                (Ok(()), self.pass(baton))
            }
            _ => {
                self.passing_until = None;
                (Err(baton.hold), self.call_head())
            }
        }
    }

    /// Removes the queue entry if `token` is its token.
    pub(crate) fn drop_place(&mut self, token: Token) {
        if self.place_of(token).is_some() {
            self.place = None;
        }
    }
}

/// Returns whether a lock with a lease of `lease` may be handed off to a waiter with this wish.
fn takes(wish: Wish, lease: Duration) -> bool {
    wish.passing && wish.lease == lease
}
