//! A request with a local queue of its own: models `acquire.rs`, `in_line.rs` and `question.rs`.

use std::{
    task::{Context, Waker},
    time::Duration,
};

use tokio::time::Instant;

use super::{
    client::{Asker, Client},
    holder::renewed,
    schedule::Arrival,
    sim::{Event, Sim, Timer},
};
use crate::{
    acquire::{SHORTEST_CALL, STRAGGLE},
    explorer::sim::say,
    gate::{Line, Next, Wish},
    key::LockKey,
    lease::Lease,
    protocol::quorum::{Reply, RequestId},
    spec::{Mode, call_timeout},
    store::{
        AcquireReply, Grant, Hold, IfBusy, KeyRequest, PollReply, RenewReply, Renewal, StoreError,
        Token,
    },
};

pub(super) struct User {
    arrival: Arrival,
    /// `None` if it does not wait.
    pub(super) until: Option<Instant>,
    line: Line,
    ticket: Option<u64>,
    state: State,
    wait: u32,
}

#[derive(Clone, Copy, Debug)]
enum State {
    /// Makes an acquire attempt without entering the wait queue.
    Beside(RequestId, Token),
    /// Waits for a notification or for the next request to be due.
    Waiting,
    Asking(RequestId, Token),
    Polling(RequestId, Token),
    Confirming(RequestId, Token, Grant),
}

impl User {
    fn patience(&self, now: Instant) -> Duration {
        let timeout = call_timeout(self.arrival.lease);
        let left = self.until.map(|until| until.saturating_duration_since(now));
        left.map_or(timeout, |left| timeout.min(left.max(SHORTEST_CALL)))
    }

    fn is_out_of_patience(&self, now: Instant) -> bool {
        self.until.is_none_or(|until| until <= now)
    }
}

impl Client {
    pub(super) fn arrive(&mut self, sim: &mut Sim, arrival: Arrival) {
        let (id, now) = (sim.number(), self.now(sim));
        let until = arrival.wait.map(|wait| now + wait);
        let Arrival {
            lock, mode, wait, ..
        } = arrival;
        say!(
            sim,
            "{} u{id} wants {:?} {mode:?}, waits {wait:?}",
            self.who,
            sim.keys[lock]
        );
        if arrival.all {
            return self.acquire_all(sim, arrival);
        }
        let user = User {
            arrival,
            until,
            line: Line::default(),
            ticket: None,
            state: State::Waiting,
            wait: 0,
        };
        self.users.insert(id, user);
        if let Some(pause) = arrival.cancel_after {
            sim.after(pause, Event::Timer(self.who, Timer::Cancel(id)));
        }
        match (until, mode) {
            (Some(_), Mode::Exclusive) => self.enter(sim, id),
            _ => self.acquire(sim, id, Token::random(), IfBusy::Refuse),
        }
    }

    fn enter(&mut self, sim: &mut Sim, id: u32) {
        let Some(user) = self.users.get_mut(&id) else {
            return;
        };
        // This local queue has no other waiter for a local hand-off.
        let wish = Wish {
            mode: user.arrival.mode,
            lease: user.arrival.lease,
            passing: false,
        };
        user.ticket = user.line.enter(wish, 1, sim.now);
        self.go(sim, id);
    }

    fn acquire(&mut self, sim: &mut Sim, id: u32, token: Token, if_busy: IfBusy) {
        let now = self.now(sim);
        let Some(user) = self.users.get(&id) else {
            return;
        };
        let Arrival {
            lock, mode, lease, ..
        } = user.arrival;
        let patience = user.patience(now);
        let hold = Hold::new(sim.keys[lock].clone(), mode, token);
        sim.introduce(token, self.who);
        let request = KeyRequest {
            if_busy,
            ..KeyRequest::new(hold, lease, now + patience + STRAGGLE)
        };
        let lead = self.ask(sim, Asker::User(id), |session, cx| {
            session.acquire(&request, cx)
        });
        let state = if if_busy == IfBusy::Queue {
            State::Asking(lead, token)
        } else {
            State::Beside(lead, token)
        };
        self.waits_for(sim, id, state, now + patience);
    }

    fn waits_for(&mut self, sim: &mut Sim, id: u32, state: State, until: Instant) {
        let Some(user) = self.users.get_mut(&id) else {
            return;
        };
        user.state = state;
        user.wait += 1;
        let wait = user.wait;
        self.timer_at(sim, until, Timer::User(id, wait));
    }

    /// Notifies the users that wait for a lock.
    pub(super) fn call_waiting(
        &mut self,
        sim: &mut Sim,
        key: &LockKey,
        news: impl Fn(&mut Line) -> Option<Waker>,
    ) {
        let ids: Vec<_> = self.users.keys().copied().collect();
        for id in ids {
            let Some(user) = self
                .users
                .get_mut(&id)
                .filter(|user| sim.keys[user.arrival.lock] == *key)
            else {
                continue;
            };
            news(&mut user.line);
            let cx = Context::from_waker(Waker::noop());
            match user.state {
                State::Waiting if user.ticket.is_some() && user.line.poll_news(&cx).is_ready() => {
                    self.go_on(sim, id)
                }
                State::Polling(lead, _) if user.line.poll_news(&cx).is_ready() => {
                    self.drop_request(sim, lead);
                    self.go_on(sim, id);
                }
                _ => {}
            }
        }
    }

    /// Ends the current wait of a user: for a call, or for the next request to be due.
    pub(super) fn wait_over(&mut self, sim: &mut Sim, id: u32, wait: u32) {
        let now = self.now(sim);
        let Some(user) = self.users.get(&id).filter(|user| user.wait == wait) else {
            return;
        };
        let silence = || Err(StoreError::timed_out(Duration::ZERO));
        match user.state {
            State::Waiting => self.go_on(sim, id),
            State::Beside(lead, _) | State::Asking(lead, _) | State::Polling(lead, _) => {
                self.drop_request(sim, lead);
                self.user_answered(sim, id, lead, now, silence());
            }
            State::Confirming(ask, ..) => {
                self.drop_request(sim, ask);
                self.confirmed(sim, id, now, None);
            }
        }
    }

    /// Continues without the lock, unless the user's time is up.
    fn go_on(&mut self, sim: &mut Sim, id: u32) {
        let now = self.now(sim);
        match self.users.get(&id) {
            Some(user) if user.is_out_of_patience(now) => self.give_up_waiting(sim, id),
            Some(_) => self.go(sim, id),
            None => {}
        }
    }

    fn go(&mut self, sim: &mut Sim, id: u32) {
        let now = self.now(sim);
        let jitter = sim.dice.fraction();
        loop {
            let Some(user) = self.users.get_mut(&id) else {
                return;
            };
            let cx = Context::from_waker(Waker::noop());
            match user.line.next(now) {
                Next::Ask(token, _) => return self.acquire(sim, id, token, IfBusy::Queue),
                Next::Poll(token) => {
                    if user.line.poll_news(&cx).is_ready() {
                        continue;
                    }
                    let patience = user.patience(now);
                    let hold = self.hold(sim, id, token);
                    let lead =
                        self.ask(sim, Asker::User(id), |session, cx| session.poll(&hold, cx));
                    let state = State::Polling(lead, token);
                    return self.waits_for(sim, id, state, now + patience);
                }
                Next::Wait(at) => {
                    if user.line.poll_news(&cx).is_ready() {
                        continue;
                    }
                    let at = user.until.map_or(at, |until| at.min(until));
                    return self.waits_for(sim, id, State::Waiting, at);
                }
                Next::GiveUp(token) => {
                    self.abandon(sim, &self.hold(sim, id, token));
                    self.with_line(id, |line| line.failed(token, None, now, jitter));
                }
                // A quorum store never reports a grant by itself, and there are no local hand-offs.
                Next::Take(_) | Next::Granted(..) => unreachable!("a user is alone in its queue"),
            }
        }
    }

    fn with_line(&mut self, id: u32, what: impl FnOnce(&mut Line)) {
        if let Some(user) = self.users.get_mut(&id) {
            what(&mut user.line);
        }
    }

    pub(super) fn user_answered(
        &mut self,
        sim: &mut Sim,
        id: u32,
        lead: RequestId,
        sent: Instant,
        answer: Result<Reply, StoreError>,
    ) {
        let (now, jitter) = (self.now(sim), sim.dice.fraction());
        let Some(user) = self.users.get_mut(&id) else {
            return;
        };
        let (state, arrival) = (user.state, user.arrival);
        let (key, mode) = (sim.keys[arrival.lock].clone(), arrival.mode);
        let hold = |token| Hold::new(key.clone(), mode, token);
        match (state, answer) {
            (State::Beside(own, token) | State::Asking(own, token), answer) if own == lead => {
                let is_beside = matches!(state, State::Beside(..));
                let error = match answer {
                    Ok(Reply::Acquire(AcquireReply::Granted(grant))) => {
                        match self.start(sim, arrival, grant, sent) {
                            Some(lease) => return self.served(sim, id, token, grant, lease),
                            None => {
                                self.abandon(sim, &hold(token));
                                Some(StoreError::timed_out(Duration::ZERO))
                            }
                        }
                    }
                    Ok(Reply::Acquire(AcquireReply::Queued {
                        counter,
                        holder_ttl,
                    })) => {
                        user.line
                            .queued(token, sent, counter, holder_ttl, now, jitter);
                        None
                    }
                    Ok(Reply::Acquire(AcquireReply::Busy { holder_ttl, .. })) => {
                        user.line.refused(token, holder_ttl, now, jitter);
                        None
                    }
                    Ok(_) => Some(StoreError::late()),
                    Err(error) => {
                        self.abandon(sim, &hold(token));
                        Some(error)
                    }
                };
                if is_beside {
                    return self.not_beside(sim, id);
                }
                if let Some(error) = error {
                    self.with_line(id, |line| line.failed(token, Some(&error), now, jitter));
                }
            }
            (State::Polling(own, token), answer) if own == lead => match answer {
                Ok(Reply::Poll(PollReply::Granted(grant))) => {
                    return match self.handed_over(sim, arrival, grant, sent) {
                        Some(lease) => self.served(sim, id, token, grant, lease),
                        None => self.confirm(sim, id, token, grant),
                    };
                }
                Ok(Reply::Poll(PollReply::Queued {
                    counter,
                    holder_ttl,
                })) => {
                    user.line
                        .queued(token, sent, counter, holder_ttl, now, jitter);
                }
                Ok(_) => user.line.gone(token, now),
                Err(error) => user.line.unanswered(token, &error, now, jitter),
            },
            (State::Confirming(own, ..), answer) if own == lead => {
                return self.confirmed(sim, id, sent, renewed(answer));
            }
            _ => return,
        }
        self.go_on(sim, id);
    }

    fn not_beside(&mut self, sim: &mut Sim, id: u32) {
        match self.users.get(&id).map(|user| user.until) {
            Some(Some(_)) => self.enter(sim, id),
            _ => self.give_up_waiting(sim, id),
        }
    }

    fn confirm(&mut self, sim: &mut Sim, id: u32, token: Token, grant: Grant) {
        let now = self.now(sim);
        let patience = self
            .users
            .get(&id)
            .map_or(Duration::ZERO, |user| user.patience(now));
        let lease = self
            .users
            .get(&id)
            .map_or(Duration::ZERO, |user| user.arrival.lease);
        let renewal = [Renewal::new(self.hold(sim, id, token), lease)];
        let ask = self.ask(sim, Asker::User(id), |session, cx| {
            session.renew(&renewal, cx)
        });
        let state = State::Confirming(ask, token, grant);
        self.waits_for(sim, id, state, now + patience);
    }

    /// The hold of a user under this token.
    fn hold(&self, sim: &Sim, id: u32, token: Token) -> Hold {
        let arrival = self.users[&id].arrival;
        Hold::new(sim.keys[arrival.lock].clone(), arrival.mode, token)
    }

    pub(super) fn confirmed(
        &mut self,
        sim: &mut Sim,
        id: u32,
        sent: Instant,
        reply: Option<RenewReply>,
    ) {
        let (now, jitter) = (self.now(sim), sim.dice.fraction());
        let Some(user) = self.users.get_mut(&id) else {
            return;
        };
        let (State::Confirming(_, token, grant), arrival) = (user.state, user.arrival) else {
            return;
        };
        match reply {
            Some(RenewReply::Renewed { ttl }) => {
                let grant = Grant { ttl, ..grant };
                if let Some(lease) = self.start(sim, arrival, grant, sent) {
                    return self.served(sim, id, token, grant, lease);
                }
                let error = StoreError::timed_out(Duration::ZERO);
                self.with_line(id, |line| line.unanswered(token, &error, now, jitter));
            }
            Some(RenewReply::Gone) => {
                user.line.gone(token, now);
                self.abandon(sim, &self.hold(sim, id, token));
            }
            None => {
                user.line
                    .unanswered(token, &StoreError::timed_out(Duration::ZERO), now, jitter)
            }
        }
        self.go_on(sim, id);
    }

    fn served(&mut self, sim: &mut Sim, id: u32, token: Token, grant: Grant, lease: Lease) {
        let Some(user) = self.users.remove(&id) else {
            return;
        };
        let hold = Hold::new(
            sim.keys[user.arrival.lock].clone(),
            user.arrival.mode,
            token,
        );
        self.begin(sim, user.arrival, hold, grant, lease);
    }

    /// Drops the future of the user.
    pub(super) fn cancel(&mut self, sim: &mut Sim, id: u32) {
        if !sim.quiet && self.users.contains_key(&id) {
            say!(sim, "{} u{id} is cancelled", self.who);
            self.give_up_waiting(sim, id);
        }
    }

    fn give_up_waiting(&mut self, sim: &mut Sim, id: u32) {
        let now = self.now(sim);
        let jitter = sim.dice.fraction();
        let Some(mut user) = self.users.remove(&id) else {
            return;
        };
        say!(sim, "{} u{id} leaves", self.who);
        let (key, mode) = (sim.keys[user.arrival.lock].clone(), user.arrival.mode);
        let hold = |token| Hold::new(key.clone(), mode, token);
        match user.state {
            State::Waiting => {}
            State::Polling(lead, _) => self.drop_request(sim, lead),
            State::Confirming(ask, ..) => self.drop_request(sim, ask),
            State::Beside(lead, token) | State::Asking(lead, token) => {
                self.drop_request(sim, lead);
                user.line.failed(token, None, now, jitter);
                self.abandon(sim, &hold(token));
            }
        }
        if let Some(ticket) = user.ticket
            && let Some(place) = user.line.leave(ticket).orphan
        {
            self.abandon(sim, &hold(place.token));
        }
        self.again(sim, user.arrival);
    }

    /// Repeats the request of a worker, until the end of the faults.
    pub(super) fn again(&mut self, sim: &mut Sim, arrival: Arrival) {
        if let Some(pause) = arrival.again
            && arrival.times > 0
            && !sim.quiet
        {
            sim.after(
                pause,
                Event::Action(super::schedule::Action::Arrive(arrival.number)),
            );
        }
    }
}
