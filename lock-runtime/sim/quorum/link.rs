//! The connection of a client to a server: models `redis/link.rs` and `redis/connection.rs`.

use std::{io, time::Duration};

use tokio::time::Instant;

use super::{
    Broken,
    client::Client,
    message::{Call, Conditions, Greeted, Reply, Request, is_repeated, votes},
    sim::{Conn, Event, Sim, Timer},
};
use crate::{
    protocol::quorum::{Send, ServerReply, ServerRequest, Ticket},
    sim::say,
    store::{
        AcquireReply, StoreError, StoreErrorKind,
        redis::{
            clock::ServerClock,
            quarantine::{Tenure, lost_its_data},
        },
    },
};

const ATTEMPT: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(100);
const SILENCE: Duration = Duration::from_secs(2);
/// The uptime of a server that was not restarted recently, or the age of old data.
const LONG: Duration = Duration::from_secs(1_000_000);

#[derive(Default)]
pub(super) struct Link {
    state: State,
    /// As of the last established connection.
    clock: Option<ServerClock>,
    marker: Option<u64>,
    silent_since: Option<Instant>,
}

#[derive(Default)]
enum State {
    #[default]
    Over,
    Connecting {
        conn: Conn,
        sent: Instant,
        is_second: bool,
        waiting: Vec<Call>,
    },
    Up(Conn, Tenure),
}

impl Link {
    /// The server's marker, as of the last established connection.
    pub(super) fn marker(&self, sim: &Sim) -> Option<u64> {
        self.marker.filter(|_| !sim.is_broken(Broken::UptimeOnly))
    }
}

/// A call to a server.
pub(super) struct Calling {
    pub(super) ticket: Ticket,
    request: ServerRequest,
    conditions: Conditions,
    conn: Option<Conn>,
    repeat: Repeat,
    sent: Instant,
    /// It has a shorter time-out than the other calls of its request.
    pub(super) is_limited: bool,
    /// It was repeated because the estimate of the server's clock was wrong.
    asked_again: bool,
}

/// Whether a call is repeated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Repeat {
    /// Once, if its connection is lost.
    Once,
    Never,
    /// It was repeated.
    Done,
}

fn broken(why: &str) -> StoreError {
    StoreError::new(
        StoreErrorKind::Unavailable,
        io::Error::other(why).to_string(),
    )
}

impl Client {
    /// Makes a call of the session.
    pub(super) fn call(&mut self, sim: &mut Sim, send: Send) {
        let (id, now) = (sim.number(), self.now(sim));
        let Send {
            request,
            timeout,
            ticket,
        } = send;
        if let Some(timeout) = timeout {
            self.timer_at(sim, now + timeout, Timer::Call(id, timeout));
        }
        let repeat = if is_repeated(&request) {
            Repeat::Once
        } else {
            Repeat::Never
        };
        let calling = Calling {
            ticket,
            request,
            conditions: Conditions::default(),
            conn: None,
            repeat,
            sent: now,
            is_limited: timeout.is_some(),
            asked_again: false,
        };
        self.calls.insert(id, calling);
        self.complete(sim, id, true);
        self.transmit(sim, id);
    }

    fn transmit(&mut self, sim: &mut Sim, id: Call) {
        let now = self.now(sim);
        let Some(call) = self.calls.get_mut(&id) else {
            return;
        };
        let link = &mut self.links[call.ticket.server];
        match &mut link.state {
            State::Over => {
                let conn = sim.connection(self.who, call.ticket.server);
                link.state = State::Connecting {
                    conn,
                    sent: now,
                    is_second: false,
                    waiting: vec![id],
                };
                self.greet(sim, conn);
            }
            State::Connecting { waiting, .. } => waiting.push(id),
            State::Up(conn, tenure) => {
                if let Some(error) = tenure.check(now).err().filter(|_| votes(&call.request)) {
                    return sim.at(sim.now, Event::Failed(self.who, id, error));
                }
                link.silent_since.get_or_insert(now);
                call.conn = Some(*conn);
                let request = Request::Call(call.request.clone(), call.conditions);
                sim.send(*conn, id, request);
            }
        }
    }

    fn greet(&self, sim: &mut Sim, conn: Conn) {
        sim.send(conn, 0, Request::Greet);
        self.timer_at(sim, self.now(sim) + ATTEMPT, Timer::Attempt(conn));
    }

    fn greeted(&mut self, sim: &mut Sim, conn: Conn, greeted: Greeted) {
        let now = self.now(sim);
        let server = sim.connections[conn].server;
        let link = &mut self.links[server];
        let State::Connecting {
            conn: expected,
            sent,
            waiting,
            ..
        } = &mut link.state
        else {
            return;
        };
        if *expected != conn {
            return;
        }
        let Greeted {
            micros,
            mut uptime,
            marker,
            mut with_data,
        } = greeted;
        if sim.is_broken(Broken::MarkerOnly) {
            uptime = LONG;
        }
        if sim.is_broken(Broken::UptimeOnly) {
            with_data = LONG;
        }
        let clock = link
            .clock
            .get_or_insert_with(|| ServerClock::new(micros, now));
        clock.observe(micros, *sent, now);
        let tenure = Tenure::new(
            sim.longest_lease,
            uptime,
            with_data,
            marker.to_string(),
            *sent,
        );
        if let Some(left) = tenure.keeps_away(now) {
            say!(sim, "{}: s{server} does not vote for {left:?}", self.who);
        }
        link.marker = Some(marker);
        let waiting = std::mem::take(waiting);
        link.state = State::Up(conn, tenure);
        waiting
            .into_iter()
            .for_each(|call| self.transmit_late(sim, call));
    }

    /// Sends a call that has waited for the connection. The server's time was not known before the
    /// first connection.
    fn transmit_late(&mut self, sim: &mut Sim, id: Call) {
        self.complete(sim, id, false);
        self.transmit(sim, id);
    }

    /// Fills in the conditions that depend on the server: the deadline in its time, and its marker,
    /// as they are known at first.
    fn complete(&mut self, sim: &Sim, id: Call, is_first: bool) {
        let clock = self.clock;
        let Some(call) = self.calls.get_mut(&id) else {
            return;
        };
        let link = &self.links[call.ticket.server];
        match &call.request {
            ServerRequest::Acquire(request, _) if call.conditions.deadline.is_none() => {
                call.conditions.deadline_there = Some(clock.when(request.deadline));
                if let Some(clock) = &link.clock {
                    call.conditions.deadline = Some(clock.server_micros(request.deadline));
                    call.conditions.marker = link.marker(sim);
                }
            }
            ServerRequest::Raise(..) if is_first => call.conditions.marker = link.marker(sim),
            _ => {}
        }
    }

    /// Handles a failed attempt to connect.
    pub(super) fn attempt_over(&mut self, sim: &mut Sim, conn: Conn) {
        let server = sim.connections[conn].server;
        let link = &mut self.links[server];
        let State::Connecting {
            conn: expected,
            is_second,
            waiting,
            ..
        } = &mut link.state
        else {
            return;
        };
        if *expected != conn {
            return;
        }
        if !*is_second {
            *is_second = true;
            let at = self.now(sim) + PAUSE;
            return self.timer_at(sim, at, Timer::Redial(server, conn));
        }
        let waiting = std::mem::take(waiting);
        link.state = State::Over;
        for id in waiting {
            let repeated = self
                .calls
                .get(&id)
                .is_some_and(|call| call.repeat == Repeat::Done);
            self.done(
                sim,
                id,
                Err(broken("cannot connect").with_unsent(!repeated)),
            );
        }
    }

    pub(super) fn redial(&mut self, sim: &mut Sim, server: usize, failed: Conn) {
        let now = self.now(sim);
        let State::Connecting { conn, sent, .. } = &mut self.links[server].state else {
            return;
        };
        if *conn == failed {
            (*conn, *sent) = (sim.connection(self.who, server), now);
            let conn = *conn;
            self.greet(sim, conn);
        }
    }

    pub(super) fn broken(&mut self, sim: &mut Sim, conn: Conn) {
        let server = sim.connections[conn].server;
        self.attempt_over(sim, conn);
        let on_it = |call: &Calling| call.ticket.server == server && call.conn == Some(conn);
        let calls: Vec<_> = self
            .calls
            .iter()
            .filter(|(_, call)| on_it(call))
            .map(|(id, _)| *id)
            .collect();
        self.end(sim, server, conn);
        for id in calls {
            match self.calls.get_mut(&id) {
                Some(call) if call.repeat == Repeat::Once => {
                    call.repeat = Repeat::Done;
                    call.conn = None;
                    self.transmit(sim, id);
                }
                _ => self.done(sim, id, Err(broken("the connection was lost"))),
            }
        }
    }

    /// Closes a connection. Requests sent on it may still be answered.
    fn end(&mut self, sim: &mut Sim, server: usize, conn: Conn) {
        if matches!(self.links[server].state, State::Up(current, _) if current == conn) {
            say!(sim, "{} closes its connection to s{server}", self.who);
            self.links[server].state = State::Over;
            self.links[server].silent_since = None;
            self.disconnected(sim, server);
        }
    }

    pub(super) fn failed(&mut self, sim: &mut Sim, id: Call, error: StoreError) {
        let repeated = self
            .calls
            .get(&id)
            .is_some_and(|call| call.repeat == Repeat::Done);
        let error = if repeated {
            error.with_unsent(false)
        } else {
            error
        };
        self.done(sim, id, Err(error));
    }

    pub(super) fn replied(&mut self, sim: &mut Sim, conn: Conn, id: Call, reply: Reply) {
        let (server, now) = (sim.connections[conn].server, self.now(sim));
        if let Reply::Greeted(greeted) = reply {
            return self.greeted(sim, conn, greeted);
        }
        let Some(call) = self
            .calls
            .get_mut(&id)
            .filter(|call| call.conn == Some(conn))
        else {
            return;
        };
        let link = &mut self.links[server];
        if matches!(link.state, State::Up(current, _) if current == conn) {
            link.silent_since = None;
        }
        if let (
            Reply::Call(ServerReply::Acquire(_), micros) | Reply::Strange(micros),
            Some(clock),
        ) = (&reply, &link.clock)
        {
            clock.observe(*micros, call.sent, now);
        }
        match (reply, &call.request) {
            // The estimate of the server's clock was wrong: repeat the request.
            (
                Reply::Call(ServerReply::Acquire(AcquireReply::Late), _),
                ServerRequest::Acquire(request, _),
            ) if !call.asked_again && request.deadline > now => {
                call.conditions.deadline = None;
                call.asked_again = true;
                call.conn = None;
                self.transmit_late(sim, id);
            }
            (Reply::Strange(_), _) if sim.is_broken(Broken::UptimeOnly) => {
                unreachable!("no marker was required")
            }
            (Reply::Strange(_), _) => {
                self.end_current(sim, server);
                self.done(sim, id, Err(lost_its_data()));
            }
            (Reply::Call(reply, _), _) => self.done(sim, id, Ok(reply)),
            (Reply::Greeted(_), _) => {}
        }
    }

    fn end_current(&mut self, sim: &mut Sim, server: usize) {
        if let State::Up(conn, _) = self.links[server].state {
            self.end(sim, server, conn);
        }
    }

    /// Drops a call that is no longer awaited. After a long silence, closes the connection.
    pub(super) fn drop_call(&mut self, sim: &mut Sim, id: Call) -> Option<Calling> {
        let now = self.now(sim);
        let call = self.calls.remove(&id)?;
        let link = &mut self.links[call.ticket.server];
        if let State::Up(conn, _) = link.state
            && call.conn == Some(conn)
            && link
                .silent_since
                .is_some_and(|since| now - since >= SILENCE)
        {
            self.end(sim, call.ticket.server, conn);
        }
        Some(call)
    }
}
