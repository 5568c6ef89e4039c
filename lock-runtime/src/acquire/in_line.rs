//! Waiting for a lock: in the local queue, and at its head in the store's wait queue on behalf of
//! all local waiters.

use std::sync::Arc;

use tokio::time::{Instant, sleep_until};

use super::{
    Patience, in_vain,
    question::{Outcome, Question, STRAGGLE},
    shutting_down,
};
use crate::{
    call::{poll_one, renew_one},
    client::Core,
    driver::CleanUp,
    error::{LockError, LockErrorKind},
    gate::{Baton, Next, Proven, Refusal, Shut, Turn},
    guard::Entry,
    holding::Holding,
    key::LockKey,
    spec::Terms,
    store::{Grant, Hold, PollReply, Release, RenewReply, Renewal, StoreError, Token},
};

/// Waits for its turn in this process and then for the lock, until `until`. `refused` means that
/// the store has already refused the request.
pub(super) async fn wait_in_line(
    core: &Arc<Core>,
    key: &LockKey,
    terms: &Terms,
    patience: &Patience,
    until: Instant,
    refused: bool,
) -> Result<Entry, LockError> {
    let turn = core
        .gates
        .enter(key, terms.wish(), terms.max_waiters)
        .map_err(|shut| shut_out(shut, key))?;
    let waiter = Waiter {
        core,
        key,
        terms,
        patience,
        turn,
        refused,
    };
    if !waiter.turn.is_first() {
        tracing::debug!(%key, "waiting behind others in this process");
        tokio::select! {
            biased;
            ready = waiter.turn.head() => ready.map_err(|shut| shut_out(shut, key))?,
            () = sleep_until(until) => return Err(in_vain(waiter.turn.last_refusal(), key, patience)),
        }
    }
    waiter.serve(until).await
}

fn shut_out(shut: Shut, key: &LockKey) -> LockError {
    match shut {
        Shut::Closed => shutting_down(key),
        Shut::Full => overloaded(
            "too many requests wait for it in this process; `max_waiters` is the limit",
            key,
        ),
        Shut::FullInAll => {
            let message = "too many requests wait in this process, for all locks together; \
                           `LockClientBuilder::max_waiters_in_all` is the limit";
            overloaded(message, key)
        }
    }
}

fn overloaded(message: &'static str, key: &LockKey) -> LockError {
    LockError::new(LockErrorKind::Overloaded, message).with_key(key)
}

/// A waiter in the local queue. When dropped, it abandons the queue entry and releases a pending
/// hand-off unless another waiter continues with them.
struct Waiter<'a> {
    core: &'a Arc<Core>,
    key: &'a LockKey,
    terms: &'a Terms,
    patience: &'a Patience,
    turn: Turn<'a>,
    refused: bool,
}

/// The guard's entry, or `None` while the lock is not held yet.
type Served = Option<Entry>;

/// The next step of the head of the queue, which may have to be awaited.
enum Todo {
    Nothing(Served),
    Ask(Token, u32),
    Poll(Token),
    Confirm(Token, Grant),
    Wait(Instant),
}

impl Waiter<'_> {
    /// Runs the head of the queue until it holds the lock or `until` has passed.
    async fn serve(&self, until: Instant) -> Result<Entry, LockError> {
        let mut now = Instant::now();
        loop {
            let served = match self.todo(now) {
                Todo::Nothing(served) => served,
                Todo::Ask(token, reserved) => self.ask(token, reserved, now).await?,
                // Boxed: these are rare, and would enlarge the future of every waiter.
                Todo::Poll(token) => Box::pin(self.poll(token, now)).await?,
                Todo::Confirm(token, grant) => Box::pin(self.confirm(token, grant)).await?,
                Todo::Wait(at) => {
                    tokio::select! {
                        biased;
                        news = self.turn.news() => news.map_err(|shut| shut_out(shut, self.key))?,
                        () = sleep_until(at.min(until)) => {}
                    }
                    None
                }
            };
            if let Some(entry) = served {
                return Ok(entry);
            }
            now = Instant::now();
            if until <= now {
                return Err(in_vain(self.turn.last_refusal(), self.key, self.patience));
            }
        }
    }

    fn todo(&self, now: Instant) -> Todo {
        match self.turn.next(now) {
            Next::Take(baton) => Todo::Nothing(self.take(baton)),
            Next::Granted(token, Proven { grant, as_of }) => {
                match self.granted(token, grant, as_of) {
                    None => Todo::Confirm(token, grant),
                    served => Todo::Nothing(served),
                }
            }
            Next::Ask(token, reserved) => Todo::Ask(token, reserved),
            Next::Poll(token) => Todo::Poll(token),
            Next::GiveUp(token) => {
                let straggler = now + STRAGGLE;
                let clean_up =
                    CleanUp::abandon(self.hold(token), self.terms.lease, Some(straggler));
                self.core.driver.clean_up(self.core, clean_up);
                Todo::Nothing(None)
            }
            Next::Wait(at) => {
                // The driver, on which the waiters depend, may have been left on a runtime
                // that has ended.
                self.core.driver.revive(self.core);
                Todo::Wait(at)
            }
        }
    }

    fn hold(&self, token: Token) -> Hold {
        Hold::new(self.key.clone(), self.terms.mode, token)
    }

    fn served(&self, token: Option<Token>, holding: Arc<Holding>) -> Served {
        let contended = self.turn.served(token, holding.passing_until());
        Some(Entry::first(holding, self.refused || contended))
    }

    /// Takes over the lock from its previous holder in this process.
    fn take(&self, baton: Baton) -> Served {
        match Holding::passed(self.core, baton, *self.terms) {
            Ok(holding) => self.served(None, holding),
            Err(hold) => {
                self.give_back(hold);
                None
            }
        }
    }

    /// Takes over a grant from the store's wait queue. Returns `None` if the grant must
    /// be confirmed first.
    fn granted(&self, token: Token, grant: Grant, as_of: Instant) -> Served {
        let holding = Holding::handed_over(self.core, self.hold(token), grant, as_of, *self.terms)?;
        self.served(Some(token), holding)
    }

    /// Extends a grant to its full lease before the lock is used. If the future is dropped, the
    /// queue entry keeps the grant.
    async fn confirm(&self, token: Token, grant: Grant) -> Result<Served, LockError> {
        let renewal = Renewal::new(self.hold(token), self.terms.lease);
        let sent = Instant::now();
        let patience = self.patience.for_call(self.terms, sent);
        match renew_one(self.core, patience, &renewal).await {
            Ok(RenewReply::Renewed { ttl }) => {
                let grant = Grant { ttl, ..grant };
                match Holding::start(self.core, self.hold(token), grant, sent, *self.terms) {
                    Some(holding) => Ok(self.served(Some(token), holding)),
                    // No validity is left; a poll after a pause returns the current state.
                    None => self.unanswered(token, StoreError::timed_out(sent.elapsed())),
                }
            }
            Ok(RenewReply::Gone) => {
                self.turn.gone(token);
                // With several servers, some may still hold it (PROTOCOL 9).
                let clean_up = CleanUp::abandon(self.hold(token), self.terms.lease, None);
                self.core.driver.clean_up(self.core, clean_up);
                Ok(None)
            }
            Err(error) => self.unanswered(token, error),
        }
    }

    async fn ask(&self, token: Token, reserved: u32, now: Instant) -> Result<Served, LockError> {
        let patience = self.patience.for_call(self.terms, now);
        let mut question = Question::new(self.core, self.hold(token), self.terms, patience, now);
        question = question.queued(reserved, self.turn.reader_group());
        // A dropped attempt abandons its token, so the queue entry must not reuse it.
        let mut asking = Asking {
            turn: &self.turn,
            token,
            answered: false,
        };
        let answer = question.ask().await;
        asking.answered = true;
        let turn = &self.turn;
        match answer {
            Ok(Outcome::Granted(holding)) => return Ok(self.served(Some(token), holding)),
            Ok(Outcome::Queued {
                sent,
                counter,
                holder_ttl,
            }) => {
                tracing::debug!(key = %self.key, ?holder_ttl, in_line = true, "waiting for its holder");
                turn.queued(token, sent, counter, holder_ttl);
            }
            Ok(Outcome::Refused { holder_ttl }) => {
                if !matches!(turn.last_refusal(), Refusal::Busy(_)) {
                    tracing::debug!(key = %self.key, ?holder_ttl, in_line = false, "waiting for its holder");
                }
                turn.refused(token, holder_ttl);
            }
            Ok(Outcome::Unanswered(error)) => {
                tracing::debug!(key = %self.key, %error, "waiting for the store");
                turn.failed(token, self.telling(&error));
            }
            Err(error) => {
                turn.failed(token, None);
                return Err(error);
            }
        }
        Ok(None)
    }

    /// Polls the queue entry until there is other news.
    async fn poll(&self, token: Token, sent: Instant) -> Result<Served, LockError> {
        let hold = self.hold(token);
        let patience = self.patience.for_call(self.terms, sent);
        let reply = tokio::select! {
            biased;
            news = self.turn.news() => return news.map(|()| None).map_err(|shut| shut_out(shut, self.key)),
            reply = poll_one(self.core, patience, &hold) => reply,
        };
        match reply {
            Ok(PollReply::Granted(grant)) => match self.granted(token, grant, sent) {
                None => self.confirm(token, grant).await,
                served => Ok(served),
            },
            Ok(PollReply::Queued {
                counter,
                holder_ttl,
            }) => {
                self.turn.queued(token, sent, counter, holder_ttl);
                Ok(None)
            }
            Ok(PollReply::Gone) => {
                self.turn.gone(token);
                Ok(None)
            }
            Err(error) => self.unanswered(token, error),
        }
    }

    fn unanswered(&self, token: Token, error: StoreError) -> Result<Served, LockError> {
        tracing::debug!(key = %self.key, %error, "waiting for the store");
        if let Some(error) = self.telling(&error) {
            self.turn.unanswered(token, error);
        }
        if error.is_transient() {
            Ok(None)
        } else {
            Err(LockError::from_store(error).with_key(self.key))
        }
    }

    /// Returns `error` unless it only reflects the end of our own wait: a call that the time
    /// limit has cut short must not replace a more informative last reply.
    fn telling<'e>(&self, error: &'e StoreError) -> Option<&'e StoreError> {
        let is_cut_off = match self.turn.last_refusal() {
            Refusal::None => false,
            Refusal::Busy(_) => self.patience.is_over(),
            Refusal::Unavailable(_) => self.patience.is_over() && error.is_timed_out(),
        };
        (!is_cut_off).then_some(error)
    }

    fn give_back(&self, hold: Hold) {
        self.core.driver.clean_up(
            self.core,
            CleanUp::release(Release::new(hold), self.terms.lease),
        );
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        let left = self.turn.leave();
        if let Some(place) = left.orphan {
            let hold = Hold::new(self.key.clone(), place.mode, place.token);
            self.core
                .driver
                .clean_up(self.core, CleanUp::abandon(hold, place.lease, None));
        }
        if let Some(baton) = left.baton {
            self.give_back(baton.hold);
        }
    }
}

struct Asking<'a> {
    turn: &'a Turn<'a>,
    token: Token,
    answered: bool,
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        if !self.answered {
            self.turn.failed(self.token, None);
        }
    }
}
