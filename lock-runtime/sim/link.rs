//! The connection of a client to a server: models `connection/connector.rs`,
//! `connection/link.rs` and `connection/mod.rs` of the Redis store.

use std::time::Duration;

use super::{
    Broken,
    client::{Client, Input},
    message::{Call, Conditions, Greeted, Reply, Request, is_repeated, votes},
    network::{Conn, Event, Network},
};
use crate::{
    protocol::majority::{self, Send, ServerRequest},
    shell::time::Instant,
    store::{
        AcquireReply, StoreError, StoreErrorKind,
        redis::{
            clock::ServerClock,
            topology::quarantine::{Tenure, lost_its_data},
        },
    },
};

/// The longest attempt to connect.
pub(super) const ATTEMPT: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(100);
const SILENCE: Duration = Duration::from_secs(2);
/// The uptime of a server that was not restarted recently, or the age of old data.
const LONG: Duration = Duration::from_secs(1_000_000);

#[derive(Default)]
pub(super) struct Link {
    state: State,
    /// The current connection, or the one of an attempt.
    conn: Option<Conn>,
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
        sent: Instant,
        is_second: bool,
    },
    Up(Tenure),
}

impl Link {
    /// The server's marker, as of the last established connection.
    fn marker(&self, net: &Network) -> Option<u64> {
        self.marker.filter(|_| !net.is_broken(Broken::UptimeOnly))
    }

    fn is_up(&self, conn: Conn) -> bool {
        self.conn == Some(conn) && matches!(self.state, State::Up(_))
    }
}

/// A call to a server.
pub(super) struct Calling {
    pub(super) send: Send,
    conditions: Conditions,
    /// `None` while it waits for a connection.
    conn: Option<Conn>,
    /// It was repeated because its connection was lost.
    was_repeated: bool,
    sent: Instant,
    /// It was repeated because the estimate of the server's clock was wrong.
    asked_again: bool,
}

fn broken(why: &str) -> StoreError {
    StoreError::new(StoreErrorKind::Unavailable, why)
}

impl Client {
    /// Makes a call of the session.
    pub(super) fn call(&mut self, net: &mut Network, send: Send) {
        let (id, now) = (net.number(), self.now(net));
        if let Some(timeout) = send.timeout {
            self.at(net, now + timeout, Input::Call(id, timeout));
        }
        let mut conditions = Conditions::default();
        if let ServerRequest::Acquire(request) = &send.request {
            conditions.deadline_there = Some(self.clock.when(request.deadline));
        } else if let ServerRequest::Raise(..) = &send.request {
            conditions.marker = self.links[send.ticket.server].marker(net);
        }
        let calling = Calling {
            send,
            conditions,
            conn: None,
            was_repeated: false,
            sent: now,
            asked_again: false,
        };
        self.calls.insert(id, calling);
        self.transmit(net, id);
    }

    /// Sends a call, or lets it wait for the connection. The deadline of an acquire, in the
    /// server's time, and the server's marker are not known before the first connection.
    fn transmit(&mut self, net: &mut Network, id: Call) {
        let now = self.now(net);
        let Some(call) = self.calls.get_mut(&id) else {
            return;
        };
        let server = call.send.ticket.server;
        let link = &mut self.links[server];
        if let (ServerRequest::Acquire(request), None, Some(clock)) =
            (&call.send.request, call.conditions.deadline, &link.clock)
        {
            call.conditions.deadline = Some(clock.server_micros(request.deadline));
            call.conditions.marker = link.marker(net);
        }
        match (&link.state, link.conn) {
            (State::Over, _) => self.dial(net, server, false),
            (State::Up(tenure), Some(conn)) => {
                if let Some(error) = tenure
                    .check(now)
                    .err()
                    .filter(|_| votes(&call.send.request))
                {
                    return net.at(net.now, Event::InClient(self.who, Input::Failed(id, error)));
                }
                link.silent_since.get_or_insert(now);
                call.conn = Some(conn);
                let request = Request::Call(call.send.request.clone(), call.conditions);
                net.send(conn, id, request);
            }
            _ => {}
        }
    }

    pub(super) fn dial(&mut self, net: &mut Network, server: usize, is_second: bool) {
        let (sent, conn) = (self.now(net), net.connect(self.who, server));
        let link = &mut self.links[server];
        (link.state, link.conn) = (State::Connecting { sent, is_second }, Some(conn));
        net.send(conn, 0, Request::Greet);
        self.at(net, sent + ATTEMPT, Input::Attempt(conn));
    }

    pub(super) fn calls_of(&self, is_one: impl Fn(&Calling) -> bool) -> Vec<Call> {
        let calls = self.calls.iter().filter(|(_, call)| is_one(call));
        calls.map(|(id, _)| *id).collect()
    }

    /// The calls to a server that were sent on this connection, or that wait for one.
    fn calls_on(&self, server: usize, conn: Option<Conn>) -> Vec<Call> {
        self.calls_of(|call| call.send.ticket.server == server && call.conn == conn)
    }

    fn greeted(&mut self, net: &mut Network, conn: Conn, mut greeted: Greeted) {
        let now = self.now(net);
        let server = net.connections[conn].server;
        let waiting = self.calls_on(server, None);
        let link = &mut self.links[server];
        let (&State::Connecting { sent, .. }, true) = (&link.state, link.conn == Some(conn)) else {
            return;
        };
        if net.is_broken(Broken::MarkerOnly) {
            greeted.uptime = LONG;
        }
        if net.is_broken(Broken::UptimeOnly) {
            greeted.with_data = LONG;
        }
        let (micros, marker) = (greeted.micros, greeted.marker);
        let clock = link.clock.get_or_insert(ServerClock::new(micros, now));
        clock.observe(micros, sent, now);
        let (longest_lease, name) = (net.schedule.longest_lease, marker.to_string());
        let tenure = Tenure::new(longest_lease, greeted.uptime, greeted.with_data, name, now);
        if let Some(left) = tenure.keeps_away(now) {
            net.say(|_| format!("{}: s{server} does not vote for {left:?}", self.who));
        }
        link.marker = Some(marker);
        link.state = State::Up(tenure);
        waiting.into_iter().for_each(|id| self.transmit(net, id));
    }

    /// Handles a failed attempt to connect.
    pub(super) fn attempt_over(&mut self, net: &mut Network, conn: Conn) {
        let server = net.connections[conn].server;
        let link = &mut self.links[server];
        let (&State::Connecting { is_second, .. }, true) = (&link.state, link.conn == Some(conn))
        else {
            return;
        };
        link.conn = None;
        if !is_second {
            return self.at(net, self.now(net) + PAUSE, Input::Redial(server));
        }
        link.state = State::Over;
        for id in self.calls_on(server, None) {
            self.failed(net, id, broken("cannot connect").with_unsent(true));
        }
    }

    pub(super) fn broken(&mut self, net: &mut Network, conn: Conn) {
        let server = net.connections[conn].server;
        self.attempt_over(net, conn);
        let calls = self.calls_on(server, Some(conn));
        self.end(net, server, conn);
        for id in calls {
            match self.calls.get_mut(&id) {
                Some(call) if is_repeated(&call.send.request) && !call.was_repeated => {
                    (call.conn, call.was_repeated) = (None, true);
                    self.transmit(net, id);
                }
                _ => self.failed(net, id, broken("the connection was lost")),
            }
        }
    }

    /// Closes a connection. Requests sent on it may still be answered.
    fn end(&mut self, net: &mut Network, server: usize, conn: Conn) {
        let link = &mut self.links[server];
        if link.is_up(conn) {
            net.say(|_| format!("{} closes its connection to s{server}", self.who));
            (link.state, link.conn, link.silent_since) = (State::Over, None, None);
            self.disconnected(net, server);
        }
    }

    /// Ends a call. An earlier execution of one that was repeated may have had an effect.
    pub(super) fn failed(&mut self, net: &mut Network, id: Call, error: StoreError) {
        if let Some(call) = self.calls.get(&id) {
            let is_unsent = error.is_unsent() && !call.was_repeated;
            self.done(net, id, Err(error.with_unsent(is_unsent)));
        }
    }

    pub(super) fn replied(&mut self, net: &mut Network, conn: Conn, id: Call, reply: Reply) {
        let (server, now) = (net.connections[conn].server, self.now(net));
        if let Reply::Greeted(greeted) = reply {
            return self.greeted(net, conn, greeted);
        }
        let call = self.calls.get_mut(&id);
        let Some(call) = call.filter(|call| call.conn == Some(conn)) else {
            return;
        };
        let link = &mut self.links[server];
        if link.is_up(conn) {
            link.silent_since = None;
        }
        if let Reply::Call(majority::Reply::Acquire(_), micros) | Reply::Strange(micros) = &reply
            && let Some(clock) = &link.clock
        {
            clock.observe(*micros, call.sent, now);
        }
        match (reply, &call.send.request) {
            // The estimate of the server's clock was wrong: repeat the request.
            (
                Reply::Call(majority::Reply::Acquire(AcquireReply::Late), _),
                ServerRequest::Acquire(request),
            ) if !call.asked_again && request.deadline > now => {
                call.conditions.deadline = None;
                call.asked_again = true;
                call.conn = None;
                self.transmit(net, id);
            }
            (Reply::Strange(_), _) if net.is_broken(Broken::UptimeOnly) => {
                unreachable!("no marker was required")
            }
            (Reply::Strange(_), _) => {
                if let Some(current) = link.conn {
                    self.end(net, server, current);
                }
                self.done(net, id, Err(lost_its_data()));
            }
            (Reply::Call(reply, _), _) => self.done(net, id, Ok(reply)),
            (Reply::Greeted(_) | Reply::Direct(_), _) => {}
        }
    }

    /// Drops a call that is no longer awaited. After a long silence, closes the connection.
    pub(super) fn drop_call(&mut self, net: &mut Network, id: Call) -> Option<Calling> {
        let now = self.now(net);
        let call = self.calls.remove(&id)?;
        let server = call.send.ticket.server;
        let silent_since = self.links[server].silent_since;
        if let Some(conn) = call.conn
            && silent_since.is_some_and(|since| now - since >= SILENCE)
        {
            self.end(net, server, conn);
        }
        Some(call)
    }
}
