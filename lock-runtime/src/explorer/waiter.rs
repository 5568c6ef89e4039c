//! A waiter: models `acquire.rs`, `in_line.rs` and `question.rs` as messages.

use std::{
    task::{Context, Poll, Waker},
    time::Duration,
};

use tokio::time::Instant;

use super::{
    Broken,
    clean_up::CleanUp,
    holder::Holder,
    message::{Call, Reply, Request},
    process::{Process, Purpose},
    question::Question,
    schedule::{Action, Arrival},
    sim::{Event, Sim, Timer, say},
};
use crate::{
    acquire::SHORTEST_CALL,
    acquire::STRAGGLE,
    gate::{Next, Proven},
    spec::{Mode, Wait},
    store::{
        AcquireReply, Grant, Hold, IfBusy, PollReply, Release, RenewReply, Renewal, StoreError,
        Token,
    },
};

pub(super) struct Waiter {
    pub(super) arrival: Arrival,
    pub(super) until: Option<Instant>,
    ticket: Option<u64>,
    waker: Waker,
    pub(super) state: State,
    wait: u32,
}

pub(super) enum State {
    /// Makes an acquire attempt without entering the wait queue.
    Beside(Question),
    /// Waits behind others of this process.
    Behind,
    /// At the head of the queue: waits for a notification or for the next request to be due.
    Waiting,
    Asking(Question),
    Polling(Call, Token),
    Confirming(Call, Token, Grant),
}

impl Waiter {
    pub(super) fn asks_as(&self, token: Token) -> bool {
        matches!(&self.state, State::Beside(question) | State::Asking(question) if question.hold.token == token)
    }

    pub(super) fn patience(&self, now: Instant) -> Duration {
        let timeout = self.arrival.terms.call_timeout();
        let left = self.until.map(|until| until.saturating_duration_since(now));
        left.map_or(timeout, |left| timeout.min(left.max(SHORTEST_CALL)))
    }

    fn is_out_of_patience(&self, now: Instant) -> bool {
        self.until.is_none_or(|until| until <= now)
    }
}

impl Process {
    pub(super) fn arrive(&mut self, sim: &mut Sim, arrival: Arrival) {
        let id = sim.number();
        let Arrival { lock, terms, .. } = arrival;
        let until = match terms.wait {
            Wait::No => None,
            Wait::AtMost(wait) => Some(sim.now + wait),
        };
        say!(
            sim,
            "{} w{id} arrives for {:?} {:?}, waits {:?}",
            self.who,
            sim.keys[lock],
            terms.mode,
            terms.wait
        );
        let waker = sim.waker(self.who, id);
        self.waiters.insert(
            id,
            Waiter {
                arrival,
                until,
                ticket: None,
                waker,
                state: State::Behind,
                wait: 0,
            },
        );
        if let Some(pause) = arrival.cancel_after {
            sim.after(pause, Event::Timer(self.who, Timer::Cancel(id)));
        }
        let is_stuck = self.lines[lock].as_ref().is_some_and(|line| line.stuck);
        match until {
            None if is_stuck => self.give_up(sim, id),
            Some(_) if is_stuck || terms.mode == Mode::Exclusive => self.enter(sim, id),
            _ => {
                let token = Token::random();
                self.ask(sim, id, token, IfBusy::Refuse, 0);
            }
        }
    }

    fn enter(&mut self, sim: &mut Sim, id: u32) {
        let Some(waiter) = self.waiters.get_mut(&id) else {
            return;
        };
        let line = self.lines[waiter.arrival.lock].get_or_insert_default();
        let Some(ticket) = line.enter(waiter.arrival.terms.wish(), usize::MAX, sim.now) else {
            return;
        };
        waiter.ticket = Some(ticket);
        waiter.state = State::Behind;
        if let Some(until) = waiter.until {
            sim.at(
                until,
                Event::Timer(self.who, Timer::Waiter(id, waiter.wait)),
            );
        }
        self.woken(sim, id);
    }

    /// Handles a wake-up of the waiter.
    pub(super) fn woken(&mut self, sim: &mut Sim, id: u32) {
        let Some(waiter) = self.waiters.get(&id) else {
            return;
        };
        let Some(line) = &mut self.lines[waiter.arrival.lock] else {
            return;
        };
        let cx = Context::from_waker(&waiter.waker);
        match waiter.state {
            State::Behind => {
                if let Some(ticket) = waiter.ticket
                    && line.poll_head(ticket, &cx).is_ready()
                {
                    self.go(sim, id);
                }
            }
            State::Waiting => {
                if line.poll_news(&cx).is_ready() {
                    self.go_on(sim, id);
                }
            }
            State::Polling(call, _) => {
                if line.poll_news(&cx).is_ready() {
                    self.calls.remove(&call);
                    self.go_on(sim, id);
                }
            }
            State::Beside(_) | State::Asking(_) | State::Confirming(..) => {}
        }
    }

    pub(super) fn wait_over(&mut self, sim: &mut Sim, id: u32, wait: u32) {
        let Some(waiter) = self.waiters.get(&id).filter(|waiter| waiter.wait == wait) else {
            return;
        };
        match waiter.state {
            State::Behind if waiter.is_out_of_patience(sim.now) => self.give_up(sim, id),
            State::Waiting => self.go_on(sim, id),
            _ => {}
        }
    }

    /// Continues without the lock, unless the waiter's time is up.
    fn go_on(&mut self, sim: &mut Sim, id: u32) {
        match self.waiters.get(&id) {
            Some(waiter) if waiter.is_out_of_patience(sim.now) => self.give_up(sim, id),
            Some(_) => self.go(sim, id),
            None => {}
        }
    }

    /// Performs the next step of the head of the queue.
    fn go(&mut self, sim: &mut Sim, id: u32) {
        let now = sim.now;
        loop {
            let Some(waiter) = self.waiters.get_mut(&id) else {
                return;
            };
            let Some(line) = &mut self.lines[waiter.arrival.lock] else {
                return;
            };
            let hold = |token| {
                Hold::new(
                    sim.keys[waiter.arrival.lock].clone(),
                    waiter.arrival.terms.mode,
                    token,
                )
            };
            match line.next(now) {
                Next::Take(baton) => match Holder::passed(sim, waiter.arrival, baton) {
                    Ok(holder) => return self.served(sim, id, None, holder),
                    Err(hold) => {
                        let lease = waiter.arrival.terms.lease;
                        self.clean_up(sim, CleanUp::release(now, Release::new(hold), lease));
                        if self
                            .waiters
                            .get(&id)
                            .is_some_and(|waiter| waiter.is_out_of_patience(now))
                        {
                            return self.give_up(sim, id);
                        }
                    }
                },
                Next::Granted(token, Proven { grant, as_of }) => {
                    return self.granted(sim, id, token, grant, as_of);
                }
                Next::Ask(token, reserved) => {
                    return self.ask(sim, id, token, IfBusy::Queue, reserved);
                }
                Next::Poll(token) => {
                    let (hold, patience) = (hold(token), waiter.patience(now));
                    // A notification ends the poll.
                    let Poll::Pending = line.poll_news(&Context::from_waker(&waiter.waker)) else {
                        continue;
                    };
                    let call = self.call(sim, Purpose::Waiter(id), Request::Poll(hold), patience);
                    return self.becomes(id, State::Polling(call, token));
                }
                Next::GiveUp(token) => {
                    let (hold, lease) = (hold(token), waiter.arrival.terms.lease);
                    self.clean_up(
                        sim,
                        CleanUp::abandon(now, hold, lease, Some(now + STRAGGLE)),
                    );
                }
                Next::Wait(at) => {
                    let Poll::Pending = line.poll_news(&Context::from_waker(&waiter.waker)) else {
                        continue;
                    };
                    waiter.wait += 1;
                    waiter.state = State::Waiting;
                    let at = waiter.until.map_or(at, |until| at.min(until));
                    return sim.at(at, Event::Timer(self.who, Timer::Waiter(id, waiter.wait)));
                }
            }
        }
    }

    pub(super) fn becomes(&mut self, id: u32, state: State) {
        if let Some(waiter) = self.waiters.get_mut(&id) {
            waiter.state = state;
        }
    }

    fn granted(&mut self, sim: &mut Sim, id: u32, token: Token, grant: Grant, as_of: Instant) {
        let Some(waiter) = self.waiters.get(&id) else {
            return;
        };
        let (arrival, patience) = (waiter.arrival, waiter.patience(sim.now));
        let hold = Hold::new(sim.keys[arrival.lock].clone(), arrival.terms.mode, token);
        match Holder::handed_over(sim, arrival, hold.clone(), grant, as_of) {
            Some(holder) => self.served(sim, id, Some(token), holder),
            None => {
                let renewal = Request::Renew(Renewal::new(hold, arrival.terms.lease));
                let call = self.call(sim, Purpose::Waiter(id), renewal, patience);
                self.becomes(id, State::Confirming(call, token, grant));
            }
        }
    }

    pub(super) fn waiter_answered(
        &mut self,
        sim: &mut Sim,
        id: u32,
        call: Call,
        sent: Instant,
        reply: Option<Reply>,
    ) {
        let Some(waiter) = self.waiters.get_mut(&id) else {
            return;
        };
        let arrival = waiter.arrival;
        let (jitter, now) = (sim.dice.fraction(), sim.now);
        let counter_is_hidden = sim.is_broken(Broken::HidesTheCounter);
        match (std::mem::replace(&mut waiter.state, State::Behind), reply) {
            (State::Beside(question), Some(Reply::Acquire(reply))) => {
                match self.question_answered(sim, arrival, question, sent, reply) {
                    Some(Ok(holder)) => return self.served(sim, id, None, holder),
                    _ => return self.not_beside(sim, id),
                }
            }
            (State::Beside(question), _) => {
                self.give_up_token(sim, id, question, sent, arrival.terms.lease);
                return self.not_beside(sim, id);
            }
            (State::Asking(question), Some(Reply::Acquire(reply))) => {
                let token = question.hold.token;
                match self.question_answered(sim, arrival, question, sent, reply) {
                    Some(Ok(holder)) => return self.served(sim, id, Some(token), holder),
                    Some(Err(AcquireReply::Queued {
                        counter,
                        holder_ttl,
                    })) => {
                        if let Some(line) = &mut self.lines[arrival.lock] {
                            let counter = counter.filter(|_| !counter_is_hidden);
                            line.queued(token, sent, counter, holder_ttl, now, jitter);
                        }
                    }
                    Some(Err(AcquireReply::Busy { holder_ttl, .. })) => {
                        if let Some(line) = &mut self.lines[arrival.lock] {
                            line.refused(token, holder_ttl, now, jitter);
                        }
                    }
                    _ => self.failed(sim, arrival.lock, token, jitter),
                }
            }
            (State::Asking(question), _) => {
                let token = question.hold.token;
                self.give_up_token(sim, id, question, sent, arrival.terms.lease);
                self.failed(sim, arrival.lock, token, jitter);
            }
            (State::Polling(_, token), Some(Reply::Poll(reply))) => {
                let Some(line) = &mut self.lines[arrival.lock] else {
                    return;
                };
                match reply {
                    PollReply::Granted(grant) => {
                        self.granted(sim, id, token, grant, sent);
                        // The waiter has been served, or confirms the grant.
                        return;
                    }
                    PollReply::Queued {
                        counter,
                        holder_ttl,
                    } => {
                        let counter = counter.filter(|_| !counter_is_hidden);
                        line.queued(token, sent, counter, holder_ttl, now, jitter);
                    }
                    PollReply::Gone => line.gone(token, now),
                }
            }
            (State::Confirming(_, token, grant), Some(Reply::Renew(reply))) => match reply {
                RenewReply::Renewed { ttl } => {
                    let hold = Hold::new(sim.keys[arrival.lock].clone(), arrival.terms.mode, token);
                    if let Some(holder) =
                        Holder::start(sim, arrival, hold, Grant { ttl, ..grant }, sent)
                    {
                        return self.served(sim, id, Some(token), holder);
                    }
                }
                RenewReply::Gone => {
                    if let Some(line) = &mut self.lines[arrival.lock] {
                        line.gone(token, now);
                    }
                    let hold = Hold::new(sim.keys[arrival.lock].clone(), arrival.terms.mode, token);
                    self.clean_up(sim, CleanUp::abandon(now, hold, arrival.terms.lease, None));
                }
            },
            (State::Polling(_, token) | State::Confirming(_, token, _), _) => {
                if let Some(line) = &mut self.lines[arrival.lock] {
                    line.unanswered(
                        token,
                        &StoreError::timed_out(arrival.terms.call_timeout()),
                        now,
                        jitter,
                    );
                }
            }
            (State::Behind | State::Waiting, _) => {
                unreachable!("call {call} of a waiter that made none")
            }
        }
        self.go_on(sim, id);
    }

    fn not_beside(&mut self, sim: &mut Sim, id: u32) {
        match self.waiters.get(&id).map(|waiter| waiter.until) {
            Some(Some(_)) => self.enter(sim, id),
            _ => self.give_up(sim, id),
        }
    }

    fn failed(&mut self, sim: &Sim, lock: usize, token: Token, jitter: f64) {
        if let Some(line) = &mut self.lines[lock] {
            line.failed(token, Some(&StoreError::late()), sim.now, jitter);
        }
    }

    pub(super) fn served(&mut self, sim: &mut Sim, id: u32, token: Option<Token>, holder: Holder) {
        let Some(waiter) = self.waiters.remove(&id) else {
            return;
        };
        if waiter.ticket.is_some()
            && let Some(line) = &mut self.lines[waiter.arrival.lock]
        {
            line.served(token, holder.passing_until());
        }
        say!(sim, "{} w{id} is served", self.who);
        self.begin(sim, holder);
        self.leave(sim, &waiter);
    }

    /// Drops the future of the waiter.
    pub(super) fn cancel(&mut self, sim: &mut Sim, id: u32) {
        if sim.quiet || !self.waiters.contains_key(&id) {
            return;
        }
        say!(sim, "{} w{id} is cancelled", self.who);
        self.give_up(sim, id);
    }

    fn give_up(&mut self, sim: &mut Sim, id: u32) {
        let Some(mut waiter) = self.waiters.remove(&id) else {
            return;
        };
        say!(sim, "{} w{id} leaves", self.who);
        let Arrival { lock, terms, .. } = waiter.arrival;
        match std::mem::replace(&mut waiter.state, State::Behind) {
            State::Behind | State::Waiting => {}
            State::Polling(call, _) | State::Confirming(call, ..) => {
                self.calls.remove(&call);
            }
            State::Beside(question) => {
                self.calls.remove(&question.call);
                self.abandon_question(sim, question, terms.lease);
            }
            State::Asking(question) => {
                self.calls.remove(&question.call);
                if let Some(line) = &mut self.lines[lock] {
                    line.failed(question.hold.token, None, sim.now, sim.dice.fraction());
                }
                self.abandon_question(sim, question, terms.lease);
            }
        }
        self.leave(sim, &waiter);
        if sim.is_broken(Broken::InheritsNoPlace) && waiter.ticket.is_some() {
            self.drop_inheritance(sim, waiter.arrival);
        }
        self.again(sim, waiter.arrival);
    }

    /// Removes the waiter from the queue, so that the next one moves up.
    fn leave(&mut self, sim: &mut Sim, waiter: &Waiter) {
        let Some(ticket) = waiter.ticket else { return };
        let Arrival { lock, terms, .. } = waiter.arrival;
        let Some(line) = &mut self.lines[lock] else {
            return;
        };
        let left = line.leave(ticket);
        if line.is_empty() {
            self.lines[lock] = None;
        }
        if let Some(waker) = left.wake {
            waker.wake();
        }
        if let Some(place) = left.orphan {
            let hold = Hold::new(sim.keys[lock].clone(), place.mode, place.token);
            self.clean_up(sim, CleanUp::abandon(sim.now, hold, place.lease, None));
        }
        if let Some(baton) = left.baton {
            self.clean_up(
                sim,
                CleanUp::release(sim.now, Release::new(baton.hold), terms.lease),
            );
        }
    }

    /// Switches PROTOCOL 17 off: the next waiter goes to the end of the store's wait queue.
    fn drop_inheritance(&mut self, sim: &mut Sim, arrival: Arrival) {
        let Some(line) = &mut self.lines[arrival.lock] else {
            return;
        };
        if let Some(token) = line.place_token() {
            line.drop_place(token);
            let hold = Hold::new(sim.keys[arrival.lock].clone(), arrival.terms.mode, token);
            self.clean_up(
                sim,
                CleanUp::abandon(sim.now, hold, arrival.terms.lease, None),
            );
        }
    }

    /// Repeats the request of a worker, until the end of the faults.
    pub(super) fn again(&mut self, sim: &mut Sim, arrival: Arrival) {
        if let Some(pause) = arrival.again
            && !sim.quiet
        {
            sim.after(pause, Event::Action(Action::Arrive(arrival.number)));
        }
    }
}
