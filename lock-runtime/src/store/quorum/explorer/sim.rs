//! The shared state of a run: the true time, the event queue, the network, the dice, the trace.

use std::{collections::BTreeMap, fmt::Write as _, time::Duration};

use tokio::time::Instant;

use super::{
    Broken,
    message::{Call, Reply, Request, parts},
    schedule::{Action, Network},
};
use crate::{
    explorer::{dice::Dice, sim::say},
    fence::FencingToken,
    key::LockKey,
    protocol::quorum::{Mutation, RequestId, ServerRequest},
    store::{Grant, Hold, StoreError, Token},
};

/// The longest delay of a message that is not late.
const SHORT: Duration = Duration::from_millis(1);
const AT_LAST: Duration = Duration::from_micros(200);

/// A client, and the number of its restarts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Who {
    pub(super) client: usize,
    pub(super) life: u32,
}

/// The number of a connection.
pub(super) type Conn = usize;

pub(super) enum Event {
    /// A request reaches a server.
    AtServer(Conn, Call, Request),
    /// A reply reaches the sender of the request.
    Replied(Conn, Call, Reply),
    Pushed(Conn, Hold, Grant),
    /// The client notices the end of a connection.
    Broken(Conn),
    /// A call cannot be sent.
    Failed(Who, Call, StoreError),
    Timer(Who, Timer),
    Action(Action),
}

/// The timers of a client. A second number distinguishes the current wait from earlier ones.
#[derive(Clone, Copy, Debug)]
pub(super) enum Timer {
    /// The time-out of an attempt to connect.
    Attempt(Conn),
    Redial(usize, Conn),
    /// The next step of a request to the session.
    Request(RequestId, u32),
    /// The calls that a finished request has left are no longer awaited.
    Forget(RequestId),
    /// The time-out of a call.
    Call(Call, Duration),
    User(u32, u32),
    /// The user is cancelled.
    Cancel(u32),
    /// The driver checks a lease.
    Lease(u32, u32),
    /// The holder is done.
    Done(u32),
    /// The time-out of a renewal.
    Renewal(u32, RequestId),
    /// The next attempt of a release.
    Release(u32),
    /// The time-out of an attempt.
    Attempted(u32),
}

/// A guard was handed out.
pub(super) struct Began {
    pub(super) hold: Hold,
    pub(super) fence: FencingToken,
}

pub(super) struct Connection {
    pub(super) who: Who,
    pub(super) server: usize,
    /// The life of the server to which it leads, once the greeting has been executed.
    pub(super) life: Option<u32>,
    /// The latest arrival in each direction: messages do not overtake each other.
    arrives: Instant,
    returns: Instant,
}

pub(super) struct Sim {
    pub(super) start: Instant,
    pub(super) now: Instant,
    events: BTreeMap<(Instant, u64), Event>,
    numbers: u64,
    pub(super) dice: Dice,
    pub(super) network: Network,
    pub(super) connections: Vec<Connection>,
    /// Clients and servers that cannot reach each other until the given time.
    pub(super) parted: Vec<(usize, usize, Instant)>,
    /// There are no more faults.
    pub(super) quiet: bool,
    pub(super) broken: Option<Broken>,
    pub(super) keys: Vec<LockKey>,
    pub(super) longest_lease: Duration,
    /// The stem of each acquisition, the number of its first alias, its client, and when it began.
    stems: Vec<(u128, u64, Who, Instant)>,
    /// Aliases that may stay at a server without an owner: they came back with old data, or retries
    /// of their abandonment had to end.
    excused: Vec<Token>,
    pub(super) began: Vec<Began>,
    /// There is something to check.
    pub(super) look: bool,
    pub(super) trace: Option<String>,
}

impl Sim {
    pub(super) fn new(dice: Dice, network: Network, broken: Option<Broken>, traced: bool) -> Self {
        let start = Instant::now();
        Self {
            start,
            now: start,
            events: BTreeMap::new(),
            numbers: 0,
            dice,
            network,
            connections: Vec::new(),
            parted: Vec::new(),
            quiet: false,
            broken,
            keys: Vec::new(),
            longest_lease: Duration::ZERO,
            stems: Vec::new(),
            excused: Vec::new(),
            began: Vec::new(),
            look: false,
            trace: traced.then(String::new),
        }
    }

    pub(super) fn is_broken(&self, rule: Broken) -> bool {
        self.broken == Some(rule)
    }

    pub(super) fn mutation(&self) -> Option<Mutation> {
        match self.broken {
            Some(Broken::Session(mutation)) => Some(mutation),
            _ => None,
        }
    }

    pub(super) fn number(&mut self) -> u32 {
        self.numbers += 1;
        self.numbers as u32
    }

    pub(super) fn at(&mut self, when: Instant, event: Event) {
        self.numbers += 1;
        self.events
            .insert((when.max(self.now), self.numbers), event);
    }

    pub(super) fn after(&mut self, pause: Duration, event: Event) {
        self.at(self.now + pause, event);
    }

    pub(super) fn next(&mut self) -> Option<Event> {
        let ((when, _), event) = self.events.pop_first()?;
        self.now = when;
        Some(event)
    }

    pub(super) fn connection(&mut self, who: Who, server: usize) -> Conn {
        let (arrives, returns) = (self.now, self.now);
        self.connections.push(Connection {
            who,
            server,
            life: None,
            arrives,
            returns,
        });
        self.connections.len() - 1
    }

    /// Sends a request, which may be lost, delayed or duplicated. An acquire is not duplicated,
    /// because no two acquires are ever sent under one alias.
    pub(super) fn send(&mut self, conn: Conn, call: Call, request: Request) {
        let fate = self.travel(conn, false);
        let Connection { who, server, .. } = self.connections[conn];
        say!(
            self,
            "{who} to s{server} #{call} {}{}",
            self.show(&request),
            self.fate(fate)
        );
        let is_doubled = !self.quiet && self.dice.chance(self.network.doubled);
        let never = matches!(
            request,
            Request::Call(ServerRequest::Acquire(..), _) | Request::Greet
        );
        if is_doubled && !never {
            let late = self.dice.up_to(self.network.longest);
            self.after(late, Event::AtServer(conn, 0, request.clone()));
        }
        if let Some(when) = fate {
            self.at(when, Event::AtServer(conn, call, request));
        }
    }

    pub(super) fn reply(&mut self, conn: Conn, call: Call, reply: Reply) {
        if call == 0 && !matches!(reply, Reply::Greeted(_)) {
            return;
        }
        let fate = self.travel(conn, true);
        let Connection { who, server, .. } = self.connections[conn];
        say!(
            self,
            "    s{server} to {who} #{call} {}{}",
            self.show_reply(&reply),
            self.fate(fate)
        );
        if let Some(when) = fate {
            self.at(when, Event::Replied(conn, call, reply));
        }
    }

    pub(super) fn push(&mut self, conn: Conn, hold: Hold, grant: Grant) {
        let fate = self.travel(conn, true);
        let Connection { who, server, .. } = self.connections[conn];
        let name = self.name(hold.token);
        say!(
            self,
            "    s{server} pushes {name} to {who}: {}{}",
            self.show_grant(&grant),
            self.fate(fate)
        );
        if let Some(when) = fate {
            self.at(when, Event::Pushed(conn, hold, grant));
        }
    }

    /// The time at which a message that is sent now arrives, or `None` if it is lost.
    fn travel(&mut self, conn: Conn, returns: bool) -> Option<Instant> {
        let Connection {
            who,
            server,
            arrives,
            returns: returned,
            ..
        } = self.connections[conn];
        let mut sent = self.now;
        let mut longest = AT_LAST;
        if !self.quiet {
            let parted = |(client, other, until): &&(usize, usize, Instant)| {
                *client == who.client && *other == server && *until > self.now
            };
            if let Some((_, _, until)) = self.parted.iter().find(parted).copied() {
                if self.dice.chance(500) {
                    return None;
                }
                sent = until;
            }
            if self.dice.chance(self.network.lost) {
                return None;
            }
            longest = if self.dice.chance(self.network.late) {
                self.network.longest
            } else {
                SHORT
            };
            if self.dice.chance(self.network.breaks) {
                let soon = self.dice.up_to(longest);
                self.after(soon, Event::Broken(conn));
            }
        }
        let when = (sent + self.dice.up_to(longest)).max(if returns { returned } else { arrives });
        let connection = &mut self.connections[conn];
        *if returns {
            &mut connection.returns
        } else {
            &mut connection.arrives
        } = when;
        Some(when)
    }

    pub(super) fn introduce(&mut self, token: Token, who: Who) {
        let (stem, first) = parts(token);
        self.stems.push((stem, first, who, self.now));
    }

    pub(super) fn whose(&self, token: Token) -> Option<Who> {
        self.stem(token).map(|(.., who, _)| *who)
    }

    /// When an acquisition began.
    pub(super) fn introduced_at(&self, token: Token) -> Option<Instant> {
        self.stem(token).map(|(.., at)| *at)
    }

    fn stem(&self, token: Token) -> Option<&(u128, u64, Who, Instant)> {
        self.stems
            .iter()
            .rev()
            .find(|(stem, ..)| *stem == token.stem())
    }

    pub(super) fn excuse(&mut self, token: Token) {
        self.excused.push(token);
    }

    pub(super) fn is_excused(&self, token: Token) -> bool {
        self.excused.contains(&token)
    }

    /// The name of an alias in the trace.
    pub(super) fn name(&self, token: Token) -> String {
        let (stem, number) = parts(token);
        match self.stems.iter().position(|(known, ..)| *known == stem) {
            Some(place) => format!(
                "t{place}.{}",
                (number as u16).wrapping_sub(self.stems[place].1 as u16)
            ),
            None => "t?".into(),
        }
    }

    fn fate(&self, fate: Option<Instant>) -> String {
        match fate {
            None => " (lost)".into(),
            Some(when) if when - self.now <= SHORT => String::new(),
            Some(when) => format!(" (arrives after {:?})", when - self.now),
        }
    }

    pub(super) fn write(&mut self, line: &str) {
        let at = (self.now - self.start).as_secs_f64() * 1e3;
        if let Some(trace) = &mut self.trace {
            // Writing to a string does not fail.
            let _ = writeln!(trace, "{at:>10.3} ms  {line}");
        }
    }
}

impl std::fmt::Display for Who {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "c{}", self.client)?;
        (0..self.life).try_for_each(|_| f.write_str("'"))
    }
}
