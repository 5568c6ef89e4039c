//! Who waits in this process for one lock, in order; what the first of them is to do. Decides only; it is told the time.

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

/// What somebody in the line wants. Those with the same wish may go on with one another's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Wish {
    pub(crate) mode: Mode,
    pub(crate) lease: Duration,
    /// May the lock be passed on to this one, and from it?
    pub(crate) passing: bool,
}

/// Those who wait for one lock, in order. The head is not counted as waiting.
#[derive(Default)]
pub(crate) struct Line {
    head: Option<(Ticket, Wish)>,
    behind: BTreeMap<Ticket, Waiting>,
    next: Ticket,
    place: Option<Place>,
    /// On its way to the head.
    baton: Option<Baton>,
    /// Whoever holds the lock in this process may pass it on until then, so the store need not be asked.
    passing_until: Option<Instant>,
    /// The reader who was let in last, and who came before everybody that stands behind it in this line from that number on.
    group: Option<(Token, Ticket)>,
    /// When the lock may be free, as the store has announced since the latest request was sent.
    ask_by: Option<Instant>,
    /// There is something new for the head.
    news: bool,
    head_waker: Option<Waker>,
    /// Something was given back since the store was asked last.
    released: bool,
    /// The store refused the head, or gave it the whole lock: whoever does not wait need not ask.
    pub(crate) stuck: bool,
    /// Since the line began the lock was not free.
    contended: bool,
    /// What the store said last, for those behind who never ask.
    pub(crate) last: Refusal,
}

struct Waiting {
    wish: Wish,
    waker: Option<Waker>,
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

/// What the head is to do.
#[derive(Debug)]
pub(crate) enum Next {
    /// Go on with the lock of whoever held it in this process.
    Take(Baton),
    /// Go on with what the store has pushed.
    Granted(Token, Proven),
    /// Ask the store: to be put in line, with so many spare fencing tokens.
    Ask(Token, u32),
    /// Ask the store how the place is doing.
    Poll(Token),
    /// Give a token up that others asked with, and look again.
    GiveUp(Token),
    /// Wait for news, and look again then.
    Wait(Instant),
}

/// What is left to do for somebody who has left.
#[derive(Debug, Default)]
pub(crate) struct Left {
    /// Nobody goes on with it, and the store may know it: abandon it.
    pub(crate) orphan: Option<Place>,
    /// Nobody takes it: give it back to the store.
    pub(crate) baton: Option<Baton>,
    pub(crate) wake: Option<Waker>,
}

/// What becomes of a lock whose last guard leaves.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Parting {
    /// Somebody in this process has it.
    Passed,
    /// Give it back, and take it up again under this token for those who wait here, or stand in line.
    HandBack(Token),
    /// Give it back.
    GiveBack,
}

impl Line {
    pub(crate) fn enter(&mut self, wish: Wish, limit: usize) -> Option<Ticket> {
        if self.head.is_some() && self.behind.len() >= limit {
            return None;
        }
        let ticket = self.next;
        self.next += 1;
        match self.head {
            None => self.head = Some((ticket, wish)),
            Some(_) => {
                self.behind.insert(ticket, Waiting { wish, waker: None });
            }
        }
        Some(ticket)
    }

    pub(crate) fn is_head(&self, ticket: Ticket) -> bool {
        self.head.is_some_and(|(head, _)| head == ticket)
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

    /// Somebody leaves, served or not.
    pub(crate) fn leave(&mut self, ticket: Ticket) -> Left {
        if !self.is_head(ticket) {
            self.behind.remove(&ticket);
            return Left::default();
        }
        self.head_waker = None;
        let (head, wake) = self
            .behind
            .pop_first()
            .map(|(ticket, next)| ((ticket, next.wish), next.waker))
            .unzip();
        self.head = head;
        let wish = self.head.map(|(_, wish)| wish);
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

    /// What the head does next.
    pub(crate) fn next(&mut self, now: Instant) -> Next {
        self.news = false;
        if let Some(baton) = self.baton.take() {
            return Next::Take(baton);
        }
        let Some((_, wish)) = self.head else {
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
            return Next::Granted(place.token, proven);
        }
        if place.ask_at > now {
            return Next::Wait(place.ask_at);
        }
        if place.is_asked() {
            // By whoever hands the lock back, who should have said by now how it went, and may be gone.
            let token = place.token;
            place.rename();
            return Next::GiveUp(token);
        }
        self.released = false;
        // The reply says when the lock may be free.
        self.ask_by = None;
        if place.asked(now) {
            return Next::Poll(place.token);
        }
        let spare = if wish.passing && !self.behind.is_empty() {
            PASSES
        } else {
            0
        };
        Next::Ask(place.token, spare)
    }

    /// The reader beside whom the head may come in, as one of those who stood in line behind it.
    pub(crate) fn beside(&self) -> Option<Token> {
        let (ticket, wish) = self.head?;
        let (token, end) = self.group?;
        (wish.mode == Mode::Shared && ticket < end).then_some(token)
    }

    /// Is ready when there is something new for the head.
    pub(crate) fn poll_news(&mut self, cx: &Context<'_>) -> Poll<()> {
        if std::mem::take(&mut self.news) {
            return Poll::Ready(());
        }
        self.head_waker = Some(cx.waker().clone());
        Poll::Pending
    }

    /// There is something new for the head; whoever is to be woken is returned.
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

    /// The token of its place at the store.
    #[cfg(test)]
    pub(crate) fn place_token(&self) -> Option<Token> {
        self.place.map(|place| place.token)
    }

    /// The token of the lock that is being passed on.
    #[cfg(test)]
    pub(crate) fn baton_token(&self) -> Option<Token> {
        self.baton.as_ref().map(|baton| baton.hold.token)
    }

    fn place_of(&mut self, token: Token) -> Option<&mut Place> {
        self.place.as_mut().filter(|place| place.token == token)
    }

    /// The store put `token` in line, in reply to a request sent at `sent`. `false` if nobody waits under that token.
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
        // The reply may be from before this was told.
        if let Some(by) = ask_by {
            place.ask_at = place.ask_at.min(by);
        }
        true
    }

    /// The store refused `token`, and put it in no line.
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

    /// A poll, or the confirmation of a grant, was not answered: the place is as it was, and the next poll tells.
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

    /// A request has no answer, or one that ends its token: that name is not to be used again (PROTOCOL 1), and the next question
    /// waits.
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

    /// The store does not know `token` any more: ask under a fresh name, at once.
    pub(crate) fn gone(&mut self, token: Token, now: Instant) {
        if let Some(place) = self.place_of(token) {
            place.rename();
            place.ask_at = now;
        }
    }

    /// The head has the lock under its place's token, or by a baton with `token` none. It may pass it on until then. Was the lock
    /// not free at some time since the line began?
    pub(crate) fn served(&mut self, token: Option<Token>, passing_until: Option<Instant>) -> bool {
        if let Some(token) = token {
            self.group =
                self.head
                    .filter(|(_, wish)| wish.mode == Mode::Shared)
                    .map(|(ticket, _)| {
                        // Whoever comes now is of the next group.
                        let end = self.group.map(|(_, end)| end).filter(|end| ticket < *end);
                        (token, end.unwrap_or(self.next))
                    });
            self.drop_place(token);
            // The store has ended what was to be passed on, or it would not have granted this.
            self.baton = None;
        }
        self.passing_until = passing_until;
        self.stuck = self
            .head
            .is_some_and(|(_, wish)| wish.mode == Mode::Exclusive);
        self.last = Refusal::None;
        self.contended
    }

    /// The store pushed a grant. Whoever is to be woken is returned; `None` if nobody waits under that token.
    pub(crate) fn pushed(&mut self, token: Token, grant: Grant) -> Option<Option<Waker>> {
        self.place_of(token)?.pushed(grant);
        Some(self.call_head())
    }

    /// The lock may be free from `at` on: whoever stands in line asks by then.
    pub(crate) fn ask_by(&mut self, at: Instant) -> Option<Waker> {
        self.ask_by = Some(self.ask_by.map_or(at, |by| by.min(at)));
        let place = self
            .place
            .as_mut()
            .filter(|place| place.is_queued() && at < place.ask_at)?;
        place.ask_at = at;
        self.call_head()
    }

    /// The store may have lost the queue entry, a push message, or all its data: the head asks by `at`.
    pub(crate) fn ask_soon(&mut self, at: Instant) -> Option<Waker> {
        self.passing_until = None;
        if let Some(place) = &mut self.place {
            place.doubt(at);
        }
        self.call_head()
    }

    /// Ends a hand-off that the head has not taken.
    pub(crate) fn withdraw_baton(&mut self) -> Option<Baton> {
        self.baton.take()
    }

    /// The lock was given back, or lost, in this process.
    pub(crate) fn released(&mut self, now: Instant) -> Option<Waker> {
        self.passing_until = None;
        self.released = true;
        // Who stands in the store's line is told by the store.
        if let Some(place) = self.place.as_mut().filter(|place| !place.is_known()) {
            place.ask_at = now;
        }
        self.call_head()
    }

    /// The last guard of a lock leaves. It may hand it back with a lease of `lease`, or even pass it on as `baton`.
    pub(crate) fn part(
        &mut self,
        lease: Duration,
        baton: Option<Baton>,
        now: Instant,
    ) -> (Parting, Option<Waker>) {
        let heir = self
            .head
            .map(|(_, wish)| wish)
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

    /// The lock that was handed back is held again, as `baton`. The hold to release is returned if the head does not take it: then
    /// the head asks the store.
    pub(crate) fn handed_back(&mut self, baton: Baton) -> (Result<(), Hold>, Option<Waker>) {
        // The waiters for which it was handed back have left, and the token is being abandoned: later ones must not get it
        // (PROTOCOL 1).
        if self.place_of(baton.hold.token).is_none() {
            return (Err(baton.hold), None);
        }
        self.drop_place(baton.hold.token);
        match self.head {
            Some((_, wish)) if self.baton.is_none() && takes(wish, baton.lease.length()) => {
                (Ok(()), self.pass(baton))
            }
            _ => {
                self.passing_until = None;
                (Err(baton.hold), self.call_head())
            }
        }
    }

    /// `token` does not stand for anybody any more.
    pub(crate) fn drop_place(&mut self, token: Token) {
        if self.place_of(token).is_some() {
            self.place = None;
        }
    }
}

/// May a lock with a lease of `lease` be passed on to somebody with that wish?
fn takes(wish: Wish, lease: Duration) -> bool {
    wish.passing && wish.lease == lease
}
