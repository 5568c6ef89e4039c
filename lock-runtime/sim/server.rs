//! A single store, or one of the servers of a majority: its data, its clock, and its replies.

use std::{collections::BTreeMap, mem::take, time::Duration};

use super::{
    Broken,
    client::Input,
    clock::Clock,
    message::{Call, Conditions, Greeted, Reply, Request, alias},
    network::{Conn, Connection, Event, Network},
    process::{Message, Who},
    records::{self, Stored},
};
use lock_tests_lua::Keyspace;

use crate::{
    protocol::{
        self, Mutation,
        majority::{self, ServerRequest},
    },
    request::spec::{LockKind, Mode},
    shell::time::Instant,
    store::{
        AcquireReply, KeyRequest, ReleaseReply, RenewReply, RevokeScope, StoreEvent, Token,
        redis::topology::scripts::{Origin, Redis},
        table::{Fences, Step, Table, acquire_all},
    },
};

/// The start of the run in true time, in microseconds since 1970.
pub(super) const MICROS: u64 = 1_800_000_000_000_000;

/// The kinds of locks that share a key.
pub(super) const KINDS: [LockKind; 2] = [LockKind::Lock, LockKind::Permits];

/// The data that a server has after a restart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Left {
    All,
    /// The data that were saved last.
    Saved,
    Nothing,
}

struct Data {
    table: Table,
    fences: Fences,
    /// Its name, and when it was written.
    marker: Option<(u64, u64)>,
    records: Stored,
}

impl Data {
    fn none(start: Instant, epoch: u64) -> Self {
        Self {
            table: Table::default(),
            fences: Fences::since(start, epoch),
            marker: None,
            records: Stored::default(),
        }
    }

    fn save(&self) -> Self {
        Self {
            table: self.table.clone(),
            fences: self.fences.saved(),
            marker: self.marker,
            records: self.records.clone(),
        }
    }
}

pub(super) struct Server {
    pub(super) number: usize,
    pub(super) clock: Clock,
    /// The time of its clock at the start of the run.
    epoch: u64,
    data: Data,
    saved: Data,
    /// In place of the data, if the server is one of Redis. The table shows what it has.
    redis: Option<Redis<Who>>,
    saved_keys: Option<Keyspace>,
    pub(super) up: bool,
    pub(super) life: u32,
    started: u64,
    pub(super) stalls_until: Instant,
    /// Everything that the server kept before is lost.
    pub(super) lost_data_at: Option<Instant>,
    /// The tokens that it knew when it lost its data, and when that was.
    lost: Vec<(Token, Instant)>,
    /// The tokens whose grants a crash has undone.
    undone: Vec<Token>,
    /// When a single store granted each token its lock.
    granted_at: BTreeMap<Token, Instant>,
}

impl Server {
    pub(super) fn new(net: &Network, number: usize, fast: u32, ahead: i64) -> Self {
        let start = net.start;
        let epoch = MICROS.saturating_add_signed(ahead);
        // The server has been up for long, with its marker.
        let long_ago = epoch - 1_000_000_000;
        let mut data = Data::none(start, epoch);
        data.marker = Some((0, long_ago));
        let redis = (net.schedule.of_scripts).then(|| {
            let edit = match net.broken {
                Some(Broken::Script(from, to) | Broken::ScriptOfMajority(from, to)) => {
                    Some((from, to))
                }
                _ => None,
            };
            let mut redis = Redis::new(Origin::at(start, epoch), edit);
            redis.marker(0, long_ago);
            redis
        });
        Self {
            number,
            clock: Clock::new(start, fast),
            epoch,
            saved: data.save(),
            data,
            saved_keys: redis.as_ref().map(Redis::data),
            redis,
            up: true,
            life: 0,
            started: long_ago,
            stalls_until: start,
            lost_data_at: None,
            lost: Vec::new(),
            undone: Vec::new(),
            granted_at: BTreeMap::new(),
        }
    }

    pub(super) fn table(&self) -> &Table {
        &self.data.table
    }

    /// Whether the lock was granted to this token before the single store lost its data. It is no
    /// longer exclusive.
    pub(super) fn has_lost(&self, token: Token) -> bool {
        let granted_at = self.granted_at.get(&token);
        self.lost_data_at
            .is_some_and(|lost_at| granted_at.is_none_or(|at| *at <= lost_at))
    }

    /// Whether it has lost a vote for this acquisition with its data since then.
    pub(super) fn has_lost_vote(&self, token: Token, since: Instant) -> bool {
        let mut lost = self.lost.iter();
        lost.any(|(vote, at)| vote.stem() == token.stem() && *at >= since)
    }

    /// The tokens of all holders and waiters.
    fn tokens(&self, net: &Network) -> impl Iterator<Item = Token> {
        let (table, now) = (&self.data.table, self.clock.at(net.now));
        let tokens = net
            .locks()
            .flat_map(move |(key, kind)| table.tokens(key, kind, now));
        tokens.map(|(token, _)| token)
    }

    /// Records that all that it knows is lost.
    fn loses_data(&mut self, net: &Network) {
        let lost: Vec<_> = self.tokens(net).map(|token| (token, net.now)).collect();
        self.lost.extend(lost);
        self.lost_data_at = Some(net.now);
    }

    /// Whether a crash of a store of records has undone the grant.
    pub(super) fn has_undone(&self, token: Token) -> bool {
        self.undone.contains(&token)
    }

    /// Undoes some of the changes that need not survive a crash.
    pub(super) fn undo(&mut self, net: &mut Network) {
        let now = self.clock.at(net.now);
        let tokens = |table: &Table, net: &Network, at| -> Vec<(Token, Option<Mode>)> {
            let tokens = net
                .locks()
                .flat_map(|(key, kind)| table.tokens(key, kind, at));
            tokens.collect()
        };
        let before = tokens(&self.data.table, net, now);
        self.data.records.undo(&mut net.dice);
        self.data.table = self.data.records.table(net.start, self.epoch);
        let after = tokens(&self.data.table, net, now);
        let undone = before.iter().filter(|it| !after.contains(it));
        self.undone.extend(undone.map(|(token, _)| *token));
        let before: Vec<_> = before.into_iter().map(|(token, _)| token).collect();
        // A late copy of a renewal extends also those whose leases have ended.
        let after = tokens(&self.data.table, net, net.start);
        let after = after.into_iter().map(|(token, _)| token);
        let returned = after.filter(|it| !before.contains(it));
        net.excused
            .extend(returned.map(|token| (self.number, token)));
    }

    fn micros(&self, now: Instant) -> u64 {
        self.epoch + self.clock.micros(now)
    }

    pub(super) fn save(&mut self) {
        self.saved = self.data.save();
        self.saved_keys = self.redis.as_ref().map(Redis::data);
    }

    pub(super) fn crash(&mut self, net: &mut Network) {
        self.up = false;
        self.life += 1;
        let here = (self.number, Some(self.life - 1));
        for conn in 0..net.connections.len() {
            let &Connection {
                who, server, life, ..
            } = &net.connections[conn];
            if (server, life) == here {
                let soon = net.dice.up_to(Duration::from_millis(2));
                net.after(soon, Event::InClient(who, Input::Broken(conn)));
            }
        }
    }

    pub(super) fn start(&mut self, net: &mut Network, left: Left) {
        if left != Left::All {
            self.loses_data(net);
        }
        match left {
            Left::All => {}
            Left::Saved => self.data = self.saved.save(),
            Left::Nothing => self.data = Data::none(net.start, self.epoch),
        }
        match (&self.redis, &self.saved_keys) {
            (Some(redis), Some(keys)) if left == Left::Saved => redis.restore(keys.clone()),
            (Some(redis), _) if left == Left::Nothing => redis.flush(),
            _ => {}
        }
        let now = self.clock.at(net.now);
        for key in &net.keys {
            let tokens = self.data.table.tokens(key, LockKind::Lock, now);
            net.excused
                .extend(tokens.map(|(token, _)| (self.number, token)));
        }
        self.up = true;
        self.started = self.micros(net.now);
    }

    /// Deletes all data. The clock of a single store continues.
    pub(super) fn flush(&mut self, net: &Network) {
        self.loses_data(net);
        let fences = self.data.fences.saved();
        self.data = Data::none(net.start, self.epoch);
        self.redis.iter().for_each(Redis::flush);
        if net.is_single {
            self.data.fences = fences;
        }
    }

    pub(super) fn execute(&mut self, net: &mut Network, conn: Conn, call: Call, request: &Request) {
        if self.redis.is_some() && !matches!(request, Request::Greet) {
            return self.execute_scripts(net, conn, call, request);
        }
        let (now, micros) = (self.clock.at(net.now), self.micros(net.now));
        let caller = match request {
            Request::Call(request, _) if call != 0 => alias(request).map(|hold| hold.token),
            Request::Direct(Message::One(protocol::Request::Acquire(request))) => {
                Some(request.hold.token)
            }
            Request::Direct(Message::One(protocol::Request::Poll(hold))) => Some(hold.token),
            _ => None,
        };
        let Data {
            table,
            fences,
            marker,
            records: data,
        } = &mut self.data;
        let mut step = Step::new(now, fences, caller);
        let reply = match request {
            Request::Greet => {
                let number = u64::from(net.number());
                let (name, since) = match &mut self.redis {
                    Some(redis) => redis.marker(number, micros),
                    None => *marker.get_or_insert((number, micros)),
                };
                let seconds = micros / 1_000_000 - self.started / 1_000_000;
                net.connections[conn].life = Some(self.life);
                Reply::Greeted(Greeted {
                    micros,
                    uptime: Duration::from_secs(seconds),
                    marker: name,
                    with_data: Duration::from_micros(micros - since),
                })
            }
            Request::Direct(message) if net.schedule.of_records => {
                excuse_next(net, message);
                let now = records::now(micros, net.schedule.doubt, &mut net.dice);
                let reply = data.execute(message, caller, now, net.broken, &mut step);
                *table = data.table(net.start, self.epoch);
                Reply::Direct(reply)
            }
            Request::Direct(message) => {
                let mutation = net.of_client();
                step.lets_nobody_in = mutation == Some(Mutation::OnlyReleaseAdvances)
                    && !matches!(message, Message::One(protocol::Request::Release(_)));
                excuse_next(net, message);
                Reply::Direct(match message {
                    Message::One(request) => execute_one(table, request, mutation, &mut step),
                    Message::All(requests) => majority::Reply::AcquireAll(acquire_all(
                        &mut [table],
                        |_| 0,
                        requests,
                        &mut step,
                    )),
                    Message::Revoke(key, kind) => majority::Reply::Revoke(table.revoke(
                        key,
                        *kind,
                        RevokeScope::Leased,
                        &mut step,
                    )),
                })
            }
            Request::Call(_, Conditions { deadline, .. })
                if deadline.is_some_and(|deadline| micros > deadline) =>
            {
                Reply::Call(majority::Reply::Acquire(AcquireReply::Late), micros)
            }
            Request::Call(_, conditions)
                if conditions.marker.is_some()
                    && conditions.marker != marker.map(|(name, _)| name) =>
            {
                Reply::Strange(micros)
            }
            Request::Call(request, conditions) => {
                excuse_late(net, self.number, request, conditions);
                net.look |= matches!(request, ServerRequest::Abandon(_));
                Reply::Call(vote(table, fences, request, &mut step), micros)
            }
        };
        let mut events = take(&mut step.events);
        if net.of_client() == Some(Mutation::AnnouncesNoEnd) {
            events.retain(|event| !matches!(event, StoreEvent::FreeIn { .. }));
        }
        if let Request::Direct(_) = request {
            self.record_grants(net, now);
        }
        // The events of a step are sent before its reply, and may arrive after it.
        for event in events {
            match event {
                StoreEvent::Revoked { token } => {
                    net.revoked.push(token);
                    self.push(net, token, event);
                }
                StoreEvent::Granted { ref hold, .. } => self.push(net, hold.token, event),
                StoreEvent::Wanted { token, .. } => self.push(net, token, event),
                // The clients of a majority poll instead.
                _ if !net.is_single => {}
                event => (0..net.connections.len()).for_each(|it| net.push(it, event.clone())),
            }
        }
        net.reply(conn, call, reply);
    }

    /// Executes a request on Redis.
    fn execute_scripts(&mut self, net: &mut Network, conn: Conn, call: Call, request: &Request) {
        let (now, micros) = (self.clock.at(net.now), self.micros(net.now));
        if let Request::Direct(Message::Revoke(key, kind)) = request {
            // A message does not name the holder of a reservation that was revoked.
            let mut step = Step::new(now, &self.data.fences, None);
            self.data
                .table
                .revoke(key, *kind, RevokeScope::Leased, &mut step);
            net.revoked.extend(step.events.iter().filter_map(revoked));
        }
        let Some(redis) = &mut self.redis else { return };
        let who = net.connections[conn].who;
        // Each process is subscribed by its latest connection.
        let mut alive: Vec<Who> = Vec::new();
        for it in &net.connections {
            if (it.server, it.life) == (self.number, Some(self.life)) {
                alive.retain(|other| other.process != it.who.process);
                alive.push(it.who);
            }
        }
        let (reply, events) = match request {
            Request::Greet => return,
            Request::Direct(message) => {
                excuse_next(net, message);
                let (reply, events) = redis.execute(who, alive, message, micros);
                (Reply::Direct(reply), events)
            }
            Request::Call(request, conditions) => {
                let terms = (conditions.marker, conditions.deadline);
                let (reply, events) = redis.vote(who, alive, request, terms, micros);
                if let Some(majority::Reply::Acquire(reply)) = &reply
                    && *reply != AcquireReply::Late
                {
                    excuse_late(net, self.number, request, conditions);
                }
                net.look |= matches!(request, ServerRequest::Abandon(_));
                let reply = reply.map_or(Reply::Strange(micros), |it| Reply::Call(it, micros));
                (reply, events)
            }
        };
        self.data.table = redis.table(net.locks(), micros);
        if net.is_single {
            self.record_grants(net, now);
        }
        for (who, event) in events {
            net.revoked.extend(revoked(&event));
            if let Some(conn) = self.latest_connection(net, who) {
                net.push(conn, event);
            }
        }
        net.reply(conn, call, reply);
    }

    /// The latest connection of a client to this life of the server.
    fn latest_connection(&self, net: &Network, who: Who) -> Option<Conn> {
        let here = (who, self.number, Some(self.life));
        let leads_there = |it: &Connection| (it.who, it.server, it.life) == here;
        net.connections.iter().rposition(leads_there)
    }

    fn record_grants(&mut self, net: &Network, now: Instant) {
        let tokens = |(key, kind)| self.data.table.tokens(key, kind, now);
        for (token, mode) in net.locks().flat_map(tokens) {
            if mode.is_some() {
                self.granted_at.entry(token).or_insert(now);
            }
        }
    }

    /// Sends an event to the client of a token, on its latest connection.
    fn push(&self, net: &mut Network, token: Token, event: StoreEvent) {
        let whose = net.origin(token).map(|origin| origin.who);
        if let Some(conn) = whose.and_then(|who| self.latest_connection(net, who)) {
            net.push(conn, event);
        }
    }
}

/// The holder that an event says to have lost its lock.
fn revoked(event: &StoreEvent) -> Option<Token> {
    match event {
        StoreEvent::Revoked { token } => Some(*token),
        _ => None,
    }
}

/// Excuses the token of an acquire that is executed late. Without recent replies, the client's
/// estimate of the server's clock is outdated.
fn excuse_late(net: &mut Network, server: usize, request: &ServerRequest, conditions: &Conditions) {
    if let ServerRequest::Acquire(request) = request
        && (conditions.deadline_there).is_some_and(|there| net.now > there)
    {
        net.excused.push((server, request.hold.token));
    }
}

/// Excuses the token that an excused one of a single store names as its successor.
fn excuse_next(net: &mut Network, message: &Message) {
    if let Message::One(protocol::Request::Release(release)) = message
        && net.excused.contains(&(0, release.hold.token))
    {
        net.excused.extend(release.next.map(|next| (0, next.token)));
    }
}

/// Executes a request to a server of a majority, as its store does.
fn vote(
    table: &mut Table,
    fences: &Fences,
    request: &ServerRequest,
    step: &mut Step<'_>,
) -> majority::Reply {
    use majority::Reply;
    match request {
        ServerRequest::Acquire(request) => {
            // The deadline was checked before.
            let mut request = request.clone();
            request.deadline = step.now;
            Reply::Acquire(table.acquire(&request, step))
        }
        ServerRequest::Poll(hold) => Reply::Poll(table.poll(hold, step)),
        ServerRequest::Renew(renewals) => {
            let renewed = renewals
                .iter()
                .map(|it| Ok(table.renew(it, step.now, step.begins)));
            Reply::Renew(renewed.collect())
        }
        ServerRequest::Release(release) => Reply::Release(table.release(release, step)),
        ServerRequest::Convert(hold) => Reply::Convert(table.convert(hold, step)),
        ServerRequest::Abandon(hold) => {
            table.abandon(hold, step);
            Reply::Abandoned
        }
        ServerRequest::Raise(_, _, fence) => Reply::Raise(*fence, fences.raise(*fence)),
        ServerRequest::Inspect(key, kind) => Reply::Inspect(table.inspect(key, *kind, step)),
        ServerRequest::Revoke(..) => unreachable!("no lock of a majority is revoked"),
    }
}

/// Executes a request to a single store, as [`MemoryStore`](crate::store::MemoryStore) does.
pub(super) fn execute_one(
    table: &mut Table,
    request: &protocol::Request,
    mutation: Option<Mutation>,
    step: &mut Step<'_>,
) -> majority::Reply {
    use majority::Reply;
    use protocol::Request;
    match request {
        Request::Acquire(request) => Reply::Acquire(table.acquire(request, step)),
        Request::Poll(hold) => Reply::Poll(table.poll(hold, step)),
        Request::Release(release) => {
            let reply = table.release(release, step);
            if reply == ReleaseReply::NotHeld
                && release.result.is_some()
                && mutation == Some(Mutation::RecordsUnheld)
            {
                let hold = release.hold.clone();
                let lease = Duration::from_secs(1);
                let request = KeyRequest::new(hold, lease, step.now + lease);
                if let AcquireReply::Granted(_) = table.acquire(&request, step) {
                    return Reply::Release(table.release(release, step));
                }
            }
            Reply::Release(reply)
        }
        Request::Abandon(hold) => {
            table.abandon(hold, step);
            Reply::Abandoned
        }
        Request::Convert(hold) => Reply::Convert(table.convert(hold, step)),
        Request::Renew(renewal) => match table.renew(renewal, step.now, step.begins) {
            RenewReply::Renewed { .. } if mutation == Some(Mutation::RenewalShortens) => {
                table.shorten(&renewal.hold, renewal.lease, step.now);
                Reply::Renew(vec![Ok(RenewReply::Renewed { ttl: renewal.lease })])
            }
            reply => Reply::Renew(vec![Ok(reply)]),
        },
    }
}
