//! A single store on Redis, or a server of a majority: its calls, scripts, replies and messages are
//! those of production code.
//! The scripts run in an embedded Lua, over keys in memory (`lock-tests-lua`).
//!
//! It is a module of the Redis store, so that it can replace the connection.

use std::{
    collections::BTreeMap,
    iter,
    pin::Pin,
    slice::from_ref,
    sync::{Arc, Mutex, MutexGuard, Weak},
    task::{Context, Poll, Waker},
    time::Duration,
};

use lock_tests_lua::{Edit, Keyspace};
use redis::{PushInfo, PushKind, Value};

use super::{
    super::{
        RedisStore,
        clock::ServerClock,
        connection::{Errand, pushes::Pushes},
        script::{
            self, Call,
            names::{Names, marker_name, settings_name},
        },
    },
    quarantine::lost_its_data,
    servers::{ScriptReply, Servers},
};
use crate::{
    guard::fence::FencingToken,
    protocol::{
        Request,
        majority::{Reply, ServerRequest},
    },
    request::{
        key::LockKey,
        spec::{LockKind, Mode},
    },
    shell::{sync::lock, time::Instant},
    sim::Message,
    store::{
        ClientId, KeyPart, Listener, NextHolder, QuorumMember as _, RevokeScope, Store as _,
        StoreError, StoreEvent, Token,
        table::{
            Table,
            entry::{Entry, Place, Recorded, Slot},
        },
    },
};

const NAMESPACE: &str = "lock";
/// More polls than a call needs that waits for nothing.
const POLLS: usize = 16;

/// The server, as a client's store calls it.
pub(crate) struct Scripts {
    keyspace: Arc<Mutex<Keyspace>>,
    pushes: Arc<Pushes>,
    terms: Arc<Mutex<Terms>>,
    origin: Origin,
    edit: Option<Edit>,
}

/// What a client of a majority knows of the server, by its connection.
#[derive(Clone, Default)]
struct Terms {
    marker: Option<String>,
    /// The deadline of the request, in the server's time.
    deadline: Option<u64>,
}

/// An instant by the server's clock, and its time in microseconds since 1970.
#[derive(Clone, Copy)]
pub(crate) struct Origin(Instant, u64);

impl Origin {
    pub(crate) fn at(start: Instant, micros: u64) -> Self {
        Self(start, micros)
    }

    fn micros(self, instant: Instant) -> u64 {
        self.1 + instant.saturating_duration_since(self.0).as_micros() as u64
    }

    /// The instant at which this millisecond since 1970 begins.
    fn instant(self, millis: u64) -> Instant {
        self.0 + Duration::from_micros((millis * 1000).saturating_sub(self.1))
    }
}

impl Scripts {
    pub(super) fn pushes(&self) -> &Pushes {
        &self.pushes
    }

    pub(super) fn marker(&self) -> Option<String> {
        lock(&self.terms).marker.clone()
    }

    pub(super) fn run(&self, errand: Errand<'_>) -> ScriptReply {
        match errand {
            Errand::Call(call, _) => self.call(call),
            Errand::By {
                deadline, write, ..
            } => {
                let estimate = lock(&self.terms).deadline;
                let deadline = estimate.unwrap_or_else(|| self.origin.micros(deadline));
                self.call(&write(deadline))
            }
        }
    }

    pub(super) fn call(&self, call: &Call) -> ScriptReply {
        let keys: Vec<_> = (0..call.keys()).map(|index| call.key(index)).collect();
        let (text, args) = call.parts();
        let value = lock(&self.keyspace).eval(text, self.edit, &keys, &args);
        if let Value::ServerError(error) = &value {
            panic!("a script failed: {error:?}");
        }
        ScriptReply::of_one(value)
    }
}

/// The server, with a store for each client.
pub(crate) struct Redis<Who> {
    keyspace: Arc<Mutex<Keyspace>>,
    clients: Vec<(Who, Client)>,
    origin: Origin,
    edit: Option<Edit>,
    /// The texts of the markers, by the numbers that they have in the simulator.
    markers: BTreeMap<u64, String>,
}

struct Client {
    store: RedisStore,
    pushes: Arc<Pushes>,
    terms: Arc<Mutex<Terms>>,
    events: Arc<Events>,
}

#[derive(Default)]
struct Events(Mutex<Vec<StoreEvent>>);

impl Listener for Events {
    fn on_event(&self, event: &StoreEvent) {
        lock(&self.0).push(event.clone());
    }
}

impl Client {
    fn new<Who: Copy + PartialEq + Into<ClientId>>(server: &Redis<Who>, who: Who) -> Self {
        let pushes = Arc::new(Pushes::of(NAMESPACE, who.into()));
        let terms = Arc::<Mutex<Terms>>::default();
        let events = Arc::<Events>::default();
        let listener: Weak<Events> = Arc::downgrade(&events);
        pushes.listeners.add(listener);
        let scripts = server.scripts(pushes.clone(), terms.clone());
        let store = RedisStore {
            servers: Servers::Simulated(scripts),
            replicas: None,
            namespace: NAMESPACE.to_owned(),
        };
        Self {
            store,
            pushes,
            terms,
            events,
        }
    }
}

impl<Who: Copy + PartialEq + Into<ClientId>> Redis<Who> {
    pub(crate) fn new(origin: Origin, edit: Option<Edit>) -> Self {
        Self {
            keyspace: Arc::default(),
            clients: Vec::new(),
            origin,
            edit,
            markers: BTreeMap::new(),
        }
    }

    fn scripts(&self, pushes: Arc<Pushes>, terms: Arc<Mutex<Terms>>) -> Scripts {
        Scripts {
            keyspace: self.keyspace.clone(),
            pushes,
            terms,
            origin: self.origin,
            edit: self.edit,
        }
    }

    /// The data, as a server saves them.
    pub(crate) fn data(&self) -> Keyspace {
        self.keyspace().clone()
    }

    pub(crate) fn restore(&self, data: Keyspace) {
        *self.keyspace() = data;
    }

    /// Returns the number of the marker, and when it was written (microseconds). It gets this
    /// number if it is missing.
    pub(crate) fn marker(&mut self, number: u64, micros: u64) -> (u64, u64) {
        self.keyspace().micros = micros;
        let call = Call::new(&script::MARKER, 2)
            .arg(marker_name(NAMESPACE))
            .arg(settings_name(NAMESPACE))
            .number(number)
            .arg("settings");
        let scripts = self.scripts(Arc::new(Pushes::new(NAMESPACE)), Arc::default());
        let mut reply = scripts.call(&call).reply().expect("a list");
        let _server_time = reply.count();
        let marker = reply.text().expect("a marker");
        let age = reply.count().expect("an age");
        let number = marker.rsplit(' ').next().and_then(|it| it.parse().ok());
        let number = number.expect("a number");
        self.markers.insert(number, marker);
        (number, micros - age)
    }

    fn keyspace(&self) -> MutexGuard<'_, Keyspace> {
        lock(&self.keyspace)
    }

    pub(crate) fn flush(&self) {
        self.keyspace().flush();
    }

    /// Executes a request of `who` to a single store at this time. Returns the messages to the
    /// clients that are alive.
    pub(crate) fn execute(
        &mut self,
        who: Who,
        alive: impl IntoIterator<Item = Who>,
        message: &Message,
        micros: u64,
    ) -> (Reply, Vec<(Who, StoreEvent)>) {
        let answer = |store: &RedisStore| answer(store, message);
        self.perform(who, alive, Terms::default(), micros, answer)
    }

    /// The same for a request to a server of a majority, with the marker and the deadline that its
    /// client expects. There is no reply of a server with another marker.
    pub(crate) fn vote(
        &mut self,
        who: Who,
        alive: impl IntoIterator<Item = Who>,
        request: &ServerRequest,
        (marker, deadline): (Option<u64>, Option<u64>),
        micros: u64,
    ) -> (Option<Reply>, Vec<(Who, StoreEvent)>) {
        // A client learns the numbers of markers by greetings.
        let marker = marker.and_then(|number| self.markers.get(&number).cloned());
        let terms = Terms {
            marker,
            deadline: Some(deadline.unwrap_or(u64::MAX)),
        };
        let vote = |store: &RedisStore| match vote(store, request) {
            Ok(reply) => Some(reply),
            Err(error) if error.to_string() == lost_its_data().to_string() => None,
            Err(error) => panic!("a script failed: {error}"),
        };
        self.perform(who, alive, terms, micros, vote)
    }

    fn perform<T>(
        &mut self,
        who: Who,
        alive: impl IntoIterator<Item = Who>,
        terms: Terms,
        micros: u64,
        answer: impl FnOnce(&RedisStore) -> T,
    ) -> (T, Vec<(Who, StoreEvent)>) {
        let mut before = std::mem::take(&mut self.clients);
        for who in alive {
            let known = before.iter().position(|(it, _)| *it == who);
            let client = known.map(|known| before.swap_remove(known));
            let client = client.unwrap_or_else(|| (who, Client::new(self, who)));
            self.clients.push(client);
        }
        let caller = self.clients.iter().find(|(it, _)| *it == who);
        let dead;
        let caller = match caller {
            Some((_, client)) => client,
            // A request of a client that has crashed since.
            None => {
                dead = Client::new(self, who);
                &dead
            }
        };
        {
            let mut keyspace = self.keyspace();
            keyspace.micros = micros;
            let channels = self.clients.iter().flat_map(|(_, it)| it.pushes.channels());
            keyspace.channels = channels.map(str::to_owned).collect();
        }
        *lock(&caller.terms) = terms;
        let reply = answer(&caller.store);
        let clock = ServerClock::new(micros, Instant::now());
        let published = std::mem::take(&mut self.keyspace().published);
        let mut events = Vec::new();
        for (channel, message) in published {
            let push = PushInfo {
                kind: PushKind::Message,
                data: vec![Value::BulkString(channel), Value::BulkString(message)],
            };
            for (who, client) in &self.clients {
                client.pushes.take(&push, Some(&clock));
                let received = std::mem::take(&mut *lock(&client.events.0));
                events.extend(received.into_iter().map(|event| (*who, event)));
            }
        }
        (reply, events)
    }

    /// Returns the locks in the form in which the checker examines them.
    pub(crate) fn table<'a>(
        &self,
        locks: impl Iterator<Item = (&'a LockKey, LockKind)>,
        micros: u64,
    ) -> Table {
        let mut keyspace = self.keyspace();
        keyspace.micros = micros;
        let mut table = Table::default();
        for (key, kind) in locks {
            let entry = self.entry(&keyspace, key, kind);
            if !entry.slots.is_empty() || !entry.line.is_empty() {
                table.insert(key, kind, entry);
            }
        }
        table
    }

    fn entry(&self, keyspace: &Keyspace, key: &LockKey, kind: LockKind) -> Entry {
        let names = Names::new(NAMESPACE, key, kind);
        let name = |part| names.of(part).concat();
        let mut entry = Entry::new(Mode::Exclusive);
        if let Some((holder, expires)) = keyspace.text(&name(KeyPart::Lock)) {
            // A key exists until the millisecond of its expiry is over.
            let expires = expires.map_or(u64::MAX / 2000, |at| at as u64 + 1);
            entry.slots.extend(self.slot(holder, expires));
        }
        for (member, score) in keyspace.members(&name(KeyPart::Lock)) {
            let text = str::from_utf8(member).expect("a member is text");
            entry.mode = match text.split_once(':') {
                Some((permits, _)) => mode(permits),
                None => Mode::Shared,
            };
            entry.slots.extend(self.slot(member, score as u64));
        }
        let fields = keyspace.fields(&name(KeyPart::Queue));
        let places = fields.iter().filter_map(|(field, value)| {
            let place: u64 = str::from_utf8(field).ok()?.parse().ok()?;
            let mut words = str::from_utf8(value).ok()?.split(' ');
            let number = |words: &mut dyn Iterator<Item = &str>| words.next()?.parse().ok();
            let seen = self.origin.instant(number(&mut words)?);
            let mode = mode(words.next()?);
            let lease = Duration::from_millis(number(&mut words)?);
            let reserved = u32::try_from(number(&mut words)?).ok()?;
            let token = token(words.next()?)?;
            let request = NextHolder::new(token, lease, reserved);
            let came = seen;
            Some((
                place,
                Place {
                    mode,
                    request,
                    seen,
                    came,
                },
            ))
        });
        let mut places: Vec<_> = places.collect();
        places.sort_by_key(|(place, _)| *place);
        entry.line = places.into_iter().map(|(_, place)| place).collect();
        entry
    }

    fn slot(&self, member: &[u8], expires: u64) -> Option<Slot> {
        let text = str::from_utf8(member).ok()?;
        let (member, kept) = match text.strip_suffix(".kept") {
            Some(member) => (member, true),
            None => (text, false),
        };
        let done = text.split_once(".done ");
        let result = done.and_then(|(_, result)| {
            let mut words = result.splitn(3, ' ');
            let at = words.next()?.parse().ok()?;
            let fence = FencingToken::new(words.next()?.parse().ok()?)?;
            let value = words.next()?.as_bytes().into();
            Some(Box::new(Recorded { fence, at, value }))
        });
        let member = done.map_or(member, |(member, _)| member);
        Some(Slot {
            token: token(member)?,
            kept: kept || result.is_some(),
            expires: self.origin.instant(expires),
            fence: FencingToken::new(1)?,
            result,
        })
    }
}

fn mode(text: &str) -> Mode {
    match text {
        "exclusive" => Mode::Exclusive,
        "shared" => Mode::Shared,
        permits => Mode::Permits(permits.parse().expect("a number of permits")),
    }
}

fn token(member: &str) -> Option<Token> {
    Token::from_hex(member.rsplit(':').next()?)
}

fn answer(store: &RedisStore, message: &Message) -> Reply {
    const SUCCEEDS: &str = "a script succeeds";
    match message {
        Message::All(requests) => {
            Reply::AcquireAll(now(store.acquire_all(requests)).expect(SUCCEEDS))
        }
        Message::Revoke(key, kind) => {
            let revoked = now(store.revoke(key, *kind, RevokeScope::Leased));
            Reply::Revoke(revoked.expect(SUCCEEDS))
        }
        Message::One(request) => match request {
            Request::Acquire(request) => {
                Reply::Acquire(now(store.acquire(request)).expect(SUCCEEDS))
            }
            Request::Poll(hold) => {
                let polled = now(store.poll(from_ref(hold))).pop();
                Reply::Poll(polled.expect("a reply for each").expect(SUCCEEDS))
            }
            Request::Renew(renewal) => Reply::Renew(now(store.renew(from_ref(renewal)))),
            Request::Release(release) => {
                Reply::Release(now(store.release(release)).expect(SUCCEEDS))
            }
            Request::Convert(hold) => Reply::Convert(now(store.convert(hold)).expect(SUCCEEDS)),
            Request::Abandon(hold) => {
                now(store.abandon(hold)).expect(SUCCEEDS);
                Reply::Abandoned
            }
        },
    }
}

fn vote(store: &RedisStore, request: &ServerRequest) -> Result<Reply, StoreError> {
    Ok(match request {
        ServerRequest::Acquire(request) => Reply::Acquire(now(store.acquire(request))?),
        ServerRequest::Poll(hold) => {
            let polled = now(store.poll(from_ref(hold))).pop();
            Reply::Poll(polled.expect("a reply for each")?)
        }
        ServerRequest::Renew(renewals) => Reply::Renew(now(store.renew(renewals))),
        ServerRequest::Release(release) => Reply::Release(now(store.release(release))?),
        ServerRequest::Convert(hold) => Reply::Convert(now(store.convert(hold))?),
        ServerRequest::Abandon(hold) => {
            now(store.abandon(hold))?;
            Reply::Abandoned
        }
        ServerRequest::Raise(key, kind, fence) => {
            Reply::Raise(*fence, now(store.raise(key, *kind, *fence))?)
        }
        ServerRequest::Inspect(key, kind) => Reply::Inspect(now(store.inspect(key, *kind))?),
        ServerRequest::Revoke(..) => unreachable!("no lock of a majority is revoked"),
    })
}

/// The result of a call that waits for nothing.
fn now<T>(mut call: Pin<Box<dyn Future<Output = T> + Send + '_>>) -> T {
    let mut cx = Context::from_waker(Waker::noop());
    let mut polls = iter::repeat_with(|| call.as_mut().poll(&mut cx)).take(POLLS);
    let result = polls.find_map(|polled| match polled {
        Poll::Ready(result) => Some(result),
        Poll::Pending => None,
    });
    result.expect("the call waits for nothing")
}
