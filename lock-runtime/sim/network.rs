//! The shared state of a run: the true time, the event queue, the network, the dice, the history.

use std::{collections::BTreeMap, fmt::Write as _, time::Duration};

use super::{
    Broken,
    client::Input,
    dice::Dice,
    link::ATTEMPT,
    message::{Call, Reply, Request, acquires, alias_number, leases},
    process::{self, Began, Completed, Who},
    schedule::{Action, Schedule},
    search::Search,
    server::KINDS,
};
use crate::{
    protocol::{
        self, HeldId,
        majority::{MajorityMutation, ServerRequest},
    },
    request::key::LockKey,
    request::spec::LockKind,
    shell::time::Instant,
    store::{Hold, StoreEvent, Token},
};

/// The longest delay of a message that is not late.
const SHORT: Duration = Duration::from_millis(1);
/// The same when there are no more faults.
const AT_LAST: Duration = Duration::from_micros(200);

/// The fault rates of the network. Probabilities are in thousandths.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Rates {
    pub(super) lost: usize,
    pub(super) doubled: usize,
    /// Messages that take more than a millisecond, up to `longest`.
    pub(super) late: usize,
    /// The same for push messages.
    pub(super) pushes_late: usize,
    /// Messages after which the connection ends. The client notices its end after a delay.
    pub(super) breaks: usize,
    pub(super) longest: Duration,
    /// The shortest delay of a message, also when there are no more faults.
    pub(super) shortest: Duration,
}

/// The number of a connection.
pub(super) type Conn = usize;

/// The connection of a client to a server of a majority, on which messages do not overtake each
/// other, or the way to a single store, on which they do.
pub(super) struct Connection {
    pub(super) who: Who,
    pub(super) server: usize,
    /// The life of the server to which it leads, once the greeting has been executed.
    pub(super) life: Option<u32>,
    /// The latest arrival at the server, and at the client.
    latest: [Instant; 2],
}

pub(super) enum Event {
    /// A request reaches a server.
    AtServer(Conn, Call, Request),
    InClient(Who, Input),
    Action(Action),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Request,
    Reply,
    Push,
}

/// The first appearance of an acquisition.
pub(super) struct Origin {
    /// Its number in the history.
    place: usize,
    /// Its first alias.
    first: Token,
    pub(super) who: Who,
    pub(super) at: Instant,
}

pub(super) struct Network {
    pub(super) start: Instant,
    pub(super) now: Instant,
    /// Boxed, as the map moves its values often.
    pub(super) events: BTreeMap<(Instant, u64), Box<Event>>,
    numbers: u64,
    pub(super) dice: Dice,
    /// Without its actions.
    pub(super) schedule: Schedule,
    /// It leads to a single store, and not to a majority of servers.
    pub(super) is_single: bool,
    pub(super) connections: Vec<Connection>,
    /// Clients and servers that cannot reach each other until the given time.
    pub(super) parted: Vec<(usize, usize, Instant)>,
    /// There are no more faults.
    pub(super) is_quiet: bool,
    pub(super) broken: Option<Broken>,
    pub(super) keys: Vec<LockKey>,
    /// Makes all choices, in place of the dice.
    pub(super) search: Option<Search>,
    /// By the stems of their tokens.
    origins: BTreeMap<u128, Origin>,
    /// Tokens that may stay at this server without an owner: they came back with old data, or
    /// retries of their abandonment had to end. With a single store, they may also be granted
    /// twice: their acquire was duplicated by the network, which rule 10 excludes.
    pub(super) excused: Vec<(usize, Token)>,
    /// Tokens that a single store has revoked. Their holders may not know of it yet.
    pub(super) revoked: Vec<Token>,
    /// The guards that were handed out in this event.
    pub(super) began: Vec<(Who, Began)>,
    /// The locks that the store has taken away in this event.
    pub(super) taken: Vec<(Who, HeldId)>,
    /// The results that holders have asked the store to keep in this event.
    pub(super) asked: Vec<Completed>,
    pub(super) completed: Vec<Completed>,
    /// The writers of which a conversion has begun in this event.
    pub(super) converts: Vec<(Who, HeldId)>,
    /// The locks of requests that were refused as contended in this event.
    pub(super) contended: Vec<(LockKind, LockKey)>,
    /// When a client was paused last: what it knows is as old as the pause is long.
    pub(super) paused_until: Option<Instant>,
    /// When the leases end that were requested of each server for each token, counted from the
    /// sending.
    requested: BTreeMap<(usize, Token), Instant>,
    /// The holds that clients have left to their leases, each with its server. The checker looks at
    /// them and takes them away.
    pub(super) left: Vec<(usize, Hold)>,
    /// The locks that clients have lost in this event although they renew them, each with the time
    /// of its grant.
    pub(super) lost: Vec<(Who, Token, Instant)>,
    /// For each process, the end of the latest fault that has affected it.
    troubled: BTreeMap<usize, Instant>,
    /// The acquisition of a majority that was granted by push messages alone, and ends before it
    /// can be renewed.
    pub(super) short: Option<Token>,
    /// There is something to check.
    pub(super) look: bool,
    /// A request was refused in a way that its schedule excludes.
    pub(super) wrong: Option<String>,
    /// An extension was confirmed that is none.
    pub(super) unextended: Option<String>,
    pub(super) history: Option<String>,
}

impl Network {
    pub(super) fn new(
        schedule: Schedule,
        dice: Dice,
        broken: Option<Broken>,
        is_traced: bool,
    ) -> Self {
        let start = Instant::now();
        let keys = ["a", "b", "c"].into_iter().take(schedule.locks);
        Self {
            start,
            now: start,
            events: BTreeMap::new(),
            numbers: 0,
            dice,
            is_single: schedule.servers.len() == 1,
            connections: Vec::new(),
            parted: Vec::new(),
            is_quiet: false,
            broken,
            keys: keys.filter_map(|name| LockKey::new(name).ok()).collect(),
            schedule,
            search: None,
            origins: BTreeMap::new(),
            excused: Vec::new(),
            revoked: Vec::new(),
            began: Vec::new(),
            taken: Vec::new(),
            asked: Vec::new(),
            completed: Vec::new(),
            converts: Vec::new(),
            contended: Vec::new(),
            paused_until: None,
            requested: BTreeMap::new(),
            left: Vec::new(),
            lost: Vec::new(),
            troubled: BTreeMap::new(),
            short: None,
            look: false,
            wrong: None,
            unextended: None,
            history: is_traced.then(String::new),
        }
    }

    pub(super) fn is_broken(&self, rule: Broken) -> bool {
        self.broken == Some(rule)
    }

    /// The rule of a client's session that is switched off.
    pub(super) fn of_client(&self) -> Option<protocol::Mutation> {
        match self.broken {
            Some(Broken::Client(mutation)) => Some(mutation),
            _ => None,
        }
    }

    /// The rule of the session of a majority that is switched off.
    pub(super) fn of_majority(&self) -> Option<MajorityMutation> {
        match self.broken {
            Some(Broken::Majority(mutation)) => Some(mutation),
            _ => None,
        }
    }

    pub(super) fn number(&mut self) -> u32 {
        self.numbers += 1;
        self.numbers as u32
    }

    pub(super) fn at(&mut self, when: Instant, event: Event) {
        self.numbers += 1;
        let when = when.max(self.now);
        self.events.insert((when, self.numbers), Box::new(event));
    }

    pub(super) fn after(&mut self, pause: Duration, event: Event) {
        self.at(self.now + pause, event);
    }

    /// Opens a connection. That to a server of a majority is established by a greeting.
    pub(super) fn connect(&mut self, who: Who, server: usize) -> Conn {
        self.connections.push(Connection {
            who,
            server,
            life: self.is_single.then_some(0),
            latest: [self.now; 2],
        });
        self.connections.len() - 1
    }

    /// Sends a request. No two acquires are ever sent to one server under one alias, so an acquire
    /// by a majority is not duplicated.
    pub(super) fn send(&mut self, conn: Conn, call: Call, request: Request) {
        let server = self.connections[conn].server;
        for (token, lease) in leases(&request) {
            let until = self.requested.entry((server, token)).or_insert(self.now);
            *until = (*until).max(self.now + lease);
        }
        let may_double = match &request {
            Request::Greet | Request::Call(ServerRequest::Acquire(_), _) => false,
            Request::Call(..) | Request::Direct(_) => true,
        };
        let copies = self.copies(conn, Way::Request, may_double, |net| {
            format!("to s{server} #{call} {}", net.show(&request))
        });
        self.greeted(conn, call, copies);
        if let (Request::Direct(message), [Some(_), Some(_)]) = (&request, copies) {
            let tokens = acquires(message).into_iter();
            self.excused.extend(tokens.map(|token| (server, token)));
        }
        // The reply to the copy of a request to a majority is not awaited.
        let of_copy = if self.is_single { call } else { 0 };
        for (when, call) in copies.into_iter().zip([call, of_copy]) {
            if let Some(when) = when {
                self.at(when, Event::AtServer(conn, call, request.clone()));
            }
        }
    }

    pub(super) fn reply(&mut self, conn: Conn, call: Call, reply: Reply) {
        if call == 0 && !matches!(reply, Reply::Greeted(_)) {
            return;
        }
        let copies = self.copies(conn, Way::Reply, self.is_single, |net| {
            format!("is sent the reply to #{call} {}", net.show_reply(&reply))
        });
        self.greeted(conn, call, copies);
        let input = match reply {
            Reply::Direct(reply) => Input::Process(process::Event::Replied(call, Some(reply))),
            reply => Input::Replied(conn, call, reply),
        };
        self.deliver(conn, copies, input);
    }

    /// Records that a lost greeting keeps the client from the server until its attempt is over.
    fn greeted(&mut self, conn: Conn, call: Call, copies: [Option<Instant>; 2]) {
        if call == 0 && copies[0].is_none() {
            let who = self.connections[conn].who;
            self.trouble(who.process, self.now + ATTEMPT);
        }
    }

    pub(super) fn push(&mut self, conn: Conn, event: StoreEvent) {
        let copies = self.copies(conn, Way::Push, self.is_single, |net| {
            format!("is pushed {}", net.show_event(&event))
        });
        let input = if self.schedule.of_records {
            Input::Message(self.now, event)
        } else if self.is_single {
            Input::Process(process::Event::FromStore(event))
        } else {
            Input::Pushed(conn, event)
        };
        self.deliver(conn, copies, input);
    }

    fn deliver(&mut self, conn: Conn, copies: [Option<Instant>; 2], input: Input) {
        let who = self.connections[conn].who;
        for when in copies.into_iter().rev().flatten() {
            self.at(when, Event::InClient(who, input.clone()));
        }
    }

    /// The times at which a message that is sent now arrives, and its copy, if they do.
    fn copies(
        &mut self,
        conn: Conn,
        way: Way,
        may_double: bool,
        what: impl FnOnce(&Self) -> String,
    ) -> [Option<Instant>; 2] {
        let (now, rates) = (self.now, self.schedule.rates);
        let copies = if let Some(search) = &mut self.search {
            let copies = search.copies();
            [copies > 0, copies > 1].map(|arrives| arrives.then_some(now))
        } else {
            let is_doubled = may_double && !self.is_quiet && self.dice.chance(rates.doubled);
            let copy = is_doubled.then(|| now + self.dice.up_to(rates.longest));
            [self.arrival(conn, way), copy]
        };
        self.say(|net| {
            let times: Vec<_> = copies.iter().flatten().map(|when| *when - now).collect();
            let who = net.connections[conn].who;
            format!("    {who} {}, arrives after {times:?}", what(net))
        });
        copies
    }

    fn arrival(&mut self, conn: Conn, way: Way) -> Option<Instant> {
        let who = self.connections[conn].who;
        let when = self.arrives(conn, way);
        // A message that is lost, or waits for another one, is a fault.
        let timely = self.now + self.schedule.rates.shortest + SHORT;
        if when.is_none_or(|when| when > timely) {
            self.trouble(who.process, when.unwrap_or(self.now));
        }
        when
    }

    fn arrives(&mut self, conn: Conn, way: Way) -> Option<Instant> {
        let Connection { who, server, .. } = self.connections[conn];
        let (mut sent, mut longest, rates) = (self.now, AT_LAST, self.schedule.rates);
        if !self.is_quiet {
            let parted = |(client, other, until): &(usize, usize, Instant)| {
                *client == who.process && *other == server && *until > self.now
            };
            if let Some((_, _, until)) = self.parted.iter().copied().find(parted) {
                if self.dice.chance(500) {
                    return None;
                }
                sent = until;
            }
            if self.dice.chance(rates.lost) {
                return None;
            }
            let late = match way {
                Way::Request | Way::Reply => rates.late,
                Way::Push => rates.pushes_late,
            };
            let is_late = self.dice.chance(late);
            longest = if is_late { rates.longest } else { SHORT };
            if self.dice.chance(rates.breaks) {
                let soon = self.dice.up_to(longest);
                self.trouble(who.process, self.now + soon);
                self.after(soon, Event::InClient(who, Input::Broken(conn)));
            }
        }
        let mut when = sent + rates.shortest + self.dice.up_to(longest);
        if !self.is_single {
            let latest = &mut self.connections[conn].latest[usize::from(way != Way::Request)];
            when = when.max(*latest);
            *latest = when;
        }
        Some(when)
    }

    /// Records the client that takes care of a token and of its aliases.
    pub(super) fn introduce(&mut self, token: Token, who: Who) {
        let place = self.origins.len();
        self.origins.entry(token.stem()).or_insert(Origin {
            place,
            first: token,
            who,
            at: self.now,
        });
    }

    pub(super) fn origin(&self, token: Token) -> Option<&Origin> {
        self.origins.get(&token.stem())
    }

    /// The name of a token in the history.
    pub(super) fn name(&self, token: Token) -> String {
        self.origin(token).map_or("t?".into(), |origin| {
            let alias = alias_number(token).wrapping_sub(alias_number(origin.first));
            format!("t{}.{alias}", origin.place)
        })
    }

    /// The locks of all kinds.
    pub(super) fn locks(&self) -> impl Iterator<Item = (&LockKey, LockKind)> {
        (self.keys.iter()).flat_map(|key| KINDS.map(|kind| (key, kind)))
    }

    /// Writes a line to the history, if there is one.
    pub(super) fn say(&mut self, line: impl FnOnce(&Self) -> String) {
        if let Some(mut history) = self.history.take() {
            let (at, line) = ((self.now - self.start).as_secs_f64() * 1e3, line(self));
            // Writing to a string does not fail.
            let _ = writeln!(history, "{at:>10.3} ms  {line}");
            self.history = Some(history);
        }
    }

    /// Records that a client leaves a token to its lease at a server.
    pub(super) fn leave(&mut self, who: Who, server: usize, hold: Hold) {
        self.say(|net| format!("{who} leaves {} to its lease", net.name(hold.token)));
        // A copy of its request may be executed at any time.
        if !self.excused.contains(&(server, hold.token)) {
            self.excused.push((server, hold.token));
            self.left.push((server, hold));
            self.look = true;
        }
    }

    /// When the leases end that were requested of a server for a token, counted from the sending.
    pub(super) fn ends(&self, server: usize, token: Token) -> Option<Instant> {
        self.requested.get(&(server, token)).copied()
    }

    /// Records that a fault affects a process until then.
    pub(super) fn trouble(&mut self, process: usize, until: Instant) {
        let latest = self.troubled.entry(process).or_insert(until);
        *latest = until.max(*latest);
    }

    /// Records that a fault affects all processes until then.
    pub(super) fn trouble_all(&mut self, until: Instant) {
        (0..self.schedule.clients.len()).for_each(|process| self.trouble(process, until));
    }

    /// Whether a fault has affected a process since then.
    pub(super) fn was_troubled(&self, process: usize, since: Instant) -> bool {
        let latest = self.troubled.get(&process);
        latest.is_some_and(|until| *until >= since)
    }
}
