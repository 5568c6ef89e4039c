//! The connection of a client to a server: models `redis/link.rs` and `redis/connection.rs`.

use std::{io, time::Duration};

use tokio::time::Instant;

use super::{
    Broken,
    client::{Calling, Client, Purpose},
    message::{Call, Greeted, Reply, Request},
    sim::{Conn, Event, Sim, Timer},
};
use crate::{
    explorer::sim::say,
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
    pub(super) fn call(
        &mut self,
        sim: &mut Sim,
        server: usize,
        request: Request,
        purpose: Purpose,
    ) -> Call {
        let id = sim.number();
        let repeat = if request.is_repeated() {
            Repeat::Once
        } else {
            Repeat::Never
        };
        let sent = self.now(sim);
        self.calls.insert(
            id,
            Calling {
                server,
                request,
                purpose,
                conn: None,
                repeat,
                sent,
            },
        );
        self.transmit(sim, id);
        id
    }

    fn transmit(&mut self, sim: &mut Sim, id: Call) {
        let now = self.now(sim);
        let Some(call) = self.calls.get_mut(&id) else {
            return;
        };
        let link = &mut self.links[call.server];
        match &mut link.state {
            State::Over => {
                let conn = sim.connection(self.who, call.server);
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
                if let Some(error) = tenure.check(now).err().filter(|_| call.request.votes()) {
                    return sim.at(sim.now, Event::Failed(self.who, id, error));
                }
                link.silent_since.get_or_insert(now);
                call.conn = Some(*conn);
                sim.send(*conn, id, call.request.clone());
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
        self.complete(sim, id);
        self.transmit(sim, id);
    }

    /// Fills in the parameters that depend on the server: the deadline in its time, and its marker.
    fn complete(&mut self, sim: &Sim, id: Call) {
        let Some(call) = self.calls.get_mut(&id) else {
            return;
        };
        let link = &self.links[call.server];
        if let (Request::Acquire(acquire), Purpose::Lead(_, led), Some(clock)) =
            (&mut call.request, &call.purpose, &link.clock)
            && acquire.deadline == 0
        {
            acquire.deadline = clock.server_micros(led.deadline);
            acquire.marker = link.marker(sim);
        }
    }

    /// Sends an acquire with the parameters of the server as they are known at first.
    pub(super) fn acquire(
        &mut self,
        sim: &mut Sim,
        server: usize,
        request: Request,
        purpose: Purpose,
    ) {
        let id = sim.number();
        let sent = self.now(sim);
        self.calls.insert(
            id,
            Calling {
                server,
                request,
                purpose,
                conn: None,
                repeat: Repeat::Never,
                sent,
            },
        );
        self.complete(sim, id);
        self.transmit(sim, id);
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
        let on_it = |call: &Calling| call.server == server && call.conn == Some(conn);
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
            self.disconnected(sim);
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
        if let (Reply::Acquire(_, micros) | Reply::Strange(micros), Some(clock)) =
            (reply, &link.clock)
        {
            clock.observe(micros, call.sent, now);
        }
        match (reply, &mut call.purpose, &mut call.request) {
            // The estimate of the server's clock was wrong: repeat the request.
            (
                Reply::Acquire(AcquireReply::Late, _),
                Purpose::Lead(_, led),
                Request::Acquire(acquire),
            ) if !led.asked_again && led.deadline > now => {
                acquire.deadline = 0;
                led.asked_again = true;
                call.conn = None;
                self.transmit_late(sim, id);
            }
            (Reply::Strange(_), ..) if sim.is_broken(Broken::UptimeOnly) => {
                unreachable!("no marker was required")
            }
            (Reply::Strange(_), ..) => {
                self.end_current(sim, server);
                self.done(sim, id, Err(lost_its_data()));
            }
            _ => self.done(sim, id, Ok(reply)),
        }
    }

    fn end_current(&mut self, sim: &mut Sim, server: usize) {
        if let State::Up(conn, _) = self.links[server].state {
            self.end(sim, server, conn);
        }
    }

    /// Drops a call that is no longer awaited. After a long silence, closes the connection.
    pub(super) fn drop_call(&mut self, sim: &mut Sim, id: Call) {
        let now = self.now(sim);
        let Some(call) = self.calls.remove(&id) else {
            return;
        };
        let link = &mut self.links[call.server];
        if let State::Up(conn, _) = link.state
            && call.conn == Some(conn)
            && link
                .silent_since
                .is_some_and(|since| now - since >= SILENCE)
        {
            self.end(sim, call.server, conn);
        }
    }
}
