//! Old clients and present ones on the same keys.
//!
//! The seed alone decides a sequence of steps. One that fails prints its seed and its steps, and
//! `LOCK_TESTS_SEED` starts at another seed. A model has the holders of each key and its waiters in
//! their order; after each step old and present clients must find the key as the model has it.

use std::{
    collections::{BTreeSet, VecDeque},
    fmt::Write as _,
};

use lock_runtime::{LockClient, LockError, LockErrorKind, LockGuard, LockRequest, Mode};
use lock_tests::{RedisServer, unique};
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use tokio::{
    task::JoinHandle,
    time::{Instant, sleep, timeout},
};

use super::{
    super::permits,
    Duration, LONG, connect, in_time,
    old_client::{Names, OldClient, word},
};

const SEQUENCES: u64 = 8;
const STEPS: usize = 200;
/// The even ones are old.
const CLIENTS: usize = 12;
/// Longer than a sequence.
const LEASE: Duration = Duration::from_secs(120);
/// A waiter that polls less often than every three seconds is passed over.
const POLL: Duration = Duration::from_millis(200);

#[tokio::test]
async fn old_and_new_clients_share_keys() {
    let server = RedisServer::start().await;
    let first: u64 = std::env::var("LOCK_TESTS_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok())
        .unwrap_or_default();
    let mut hand_offs = [[0; 2]; 2];
    for seed in first..first + SEQUENCES {
        server.command(&["FLUSHALL"]).await;
        let mut sequence = Sequence::new(&server, seed).await;
        in_time(async {
            for _ in 0..STEPS {
                sequence.step().await;
            }
            sequence.end().await;
        })
        .await;
        let fences: BTreeSet<_> = sequence.keys.iter().map(|key| &*key.names.fence).collect();
        let left = server.keys("*").await;
        let is_name = |key: &str| key.starts_with("f:") && key.contains(":client:");
        let stays = |key: &String| fences.contains(&**key) || is_name(key);
        assert!(left.iter().all(stays), "{left:?}");
        for (from, to) in sequence.hand_offs.drain(..) {
            hand_offs[usize::from(from)][usize::from(to)] += 1;
        }
    }
    let [[_, from_new_to_old], [from_old_to_new, _]] = hand_offs;
    assert!(
        from_new_to_old > SEQUENCES && from_old_to_new > SEQUENCES,
        "{hand_offs:?}"
    );
}

struct Sequence {
    story: String,
    random: StdRng,
    keys: Vec<Key>,
    clients: Vec<Client>,
    /// Reads for the old clients and for the present ones.
    probes: (OldClient, LockClient),
    polled: Instant,
    /// From an old one to an old one?
    hand_offs: Vec<(bool, bool)>,
}

/// A lock, as it must be.
struct Key {
    name: &'static str,
    names: Names,
    permits: Option<u32>,
    holders: Vec<(usize, Mode)>,
    queue: VecDeque<(usize, Mode)>,
    /// The fencing tokens of all grants.
    fences: BTreeSet<u64>,
    /// The largest fencing token of a hold that has ended.
    ended: u64,
}

struct Client {
    side: Side,
    state: State,
}

enum Side {
    Old(OldClient),
    New(LockClient),
}

enum State {
    Idle,
    Waits {
        key: usize,
        mode: Mode,
        acquiring: Option<JoinHandle<Result<LockGuard, LockError>>>,
    },
    Holds {
        key: usize,
        mode: Mode,
        fence: u64,
        guard: Option<LockGuard>,
    },
}

impl Drop for Sequence {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.story);
        }
    }
}

impl Key {
    fn new(namespace: &str, name: &'static str, permits: Option<u32>) -> Self {
        Self {
            name,
            names: Names::new(namespace, name, permits.is_some()),
            permits,
            holders: Vec::new(),
            queue: VecDeque::new(),
            fences: BTreeSet::new(),
            ended: 0,
        }
    }

    fn lets_in(&self, mode: Mode) -> bool {
        match mode {
            Mode::Exclusive => self.holders.is_empty(),
            Mode::Permits(permits) => self.holders.len() < permits.get() as usize,
            _ => self.holders.iter().all(|(_, held)| *held == Mode::Shared),
        }
    }

    /// A grant's fencing token is larger than those of all holds before it. Holders that share a
    /// lock are in no order.
    fn grants(&mut self, mode: Mode, fence: u64) {
        let before = match mode {
            Mode::Exclusive => self.fences.last().copied().unwrap_or_default(),
            _ => self.ended,
        };
        assert!(fence > before, "{fence} after {before}");
        assert!(self.fences.insert(fence), "{fence} twice");
    }

    fn ends(&mut self, client: usize, fence: u64) {
        self.holders.retain(|(holder, _)| *holder != client);
        self.ended = self.ended.max(fence);
    }

    fn request(&self, locks: &LockClient, mode: Mode) -> LockRequest {
        let request = match mode {
            Mode::Exclusive => locks.exclusive(self.name),
            Mode::Permits(count) => locks.permits(self.name, count),
            _ => locks.shared(self.name),
        };
        request.lease(LEASE).wait(LONG)
    }
}

impl Sequence {
    async fn new(server: &RedisServer, seed: u64) -> Self {
        let namespace = &*unique("ns");
        let mut clients = Vec::new();
        for number in 0..CLIENTS {
            let side = match number % 2 {
                0 => Side::Old(OldClient::connect(server, namespace).await),
                _ => Side::New(connect(&server.url(), namespace).await.unwrap()),
            };
            clients.push(Client {
                side,
                state: State::Idle,
            });
        }
        Self {
            story: format!("seed {seed}:\n"),
            random: StdRng::seed_from_u64(seed),
            keys: [
                ("a", None),
                ("{b}:c", None),
                ("d", Some(2)),
                ("e{f}", Some(2)),
            ]
            .map(|(name, permits)| Key::new(namespace, name, permits))
            .into(),
            clients,
            probes: (
                OldClient::connect(server, namespace).await,
                connect(&server.url(), namespace).await.unwrap(),
            ),
            polled: Instant::now(),
            hand_offs: Vec::new(),
        }
    }

    async fn step(&mut self) {
        let client = self.random.random_range(0..CLIENTS);
        match std::mem::replace(&mut self.clients[client].state, State::Idle) {
            State::Idle => self.acquire(client).await,
            State::Waits {
                key,
                mode,
                acquiring,
            } if self.random.random_bool(0.7) => {
                self.clients[client].state = State::Waits {
                    key,
                    mode,
                    acquiring,
                };
                self.poll(client).await;
            }
            State::Waits {
                key,
                mode,
                acquiring,
            } => self.give_up(client, key, mode, acquiring).await,
            State::Holds {
                key,
                mode,
                fence,
                guard,
            } => self.go_on(client, key, mode, fence, guard).await,
        }
        if self.polled.elapsed() > POLL {
            self.polled = Instant::now();
            for client in 0..CLIENTS {
                self.poll(client).await;
            }
        }
    }

    /// Every client releases its lock, or gives up.
    async fn end(&mut self) {
        for client in 0..CLIENTS {
            match std::mem::replace(&mut self.clients[client].state, State::Idle) {
                State::Idle => {}
                State::Waits {
                    key,
                    mode,
                    acquiring,
                } => self.give_up(client, key, mode, acquiring).await,
                State::Holds {
                    key,
                    mode,
                    fence,
                    guard,
                } => self.release(client, key, mode, fence, guard).await,
            }
        }
    }

    async fn acquire(&mut self, client: usize) {
        let number = self.random.random_range(0..self.keys.len());
        let key = &mut self.keys[number];
        let mode = match key.permits {
            Some(count) => Mode::Permits(permits(count)),
            None if self.random.random_bool(0.4) => Mode::Shared,
            None => Mode::Exclusive,
        };
        let waits = self.random.random_bool(0.8);
        let expected = match key.queue.is_empty() && key.lets_in(mode) {
            true => "granted",
            false if waits => "queued",
            false => "refused",
        };
        let name = key.name;
        let _ = writeln!(self.story, "{client} acquires {name} {mode:?}: {expected}");
        let mut guard = None;
        let mut acquiring = None;
        let fence = match &mut self.clients[client].side {
            Side::Old(old) => {
                let (word, fence) = old.acquire(&key.names, mode, LEASE, waits).await;
                assert_eq!(word, expected);
                fence
            }
            Side::New(locks) => {
                let request = key.request(locks, mode);
                let request = if waits { request } else { request.no_wait() };
                if expected == "queued" {
                    acquiring = Some(tokio::spawn(request.acquire()));
                    None
                } else {
                    match timeout(LONG, request.acquire()).await.unwrap() {
                        Ok(granted) => {
                            assert_eq!("granted", expected);
                            Some(guard.insert(granted).fence().number())
                        }
                        Err(error) => {
                            assert_eq!(error.kind(), LockErrorKind::Contended, "{error}");
                            assert_eq!("refused", expected);
                            None
                        }
                    }
                }
            }
        };
        match expected {
            "granted" => {
                key.holders.push((client, mode));
                let fence = fence.unwrap();
                key.grants(mode, fence);
                self.clients[client].state = State::Holds {
                    key: number,
                    mode,
                    fence,
                    guard,
                };
            }
            "queued" => {
                key.queue.push_back((client, mode));
                self.clients[client].state = State::Waits {
                    key: number,
                    mode,
                    acquiring,
                };
            }
            _ => {}
        }
        self.agree(number).await;
    }

    /// A waiter is still one. The present client polls by itself.
    async fn poll(&mut self, client: usize) {
        if let Client {
            side: Side::Old(old),
            state: State::Waits { key, mode, .. },
        } = &self.clients[client]
        {
            assert_eq!(old.poll(&self.keys[*key].names, *mode).await, None);
        }
    }

    async fn give_up(
        &mut self,
        client: usize,
        key: usize,
        mode: Mode,
        acquiring: Option<JoinHandle<Result<LockGuard, LockError>>>,
    ) {
        let _ = writeln!(self.story, "{client} gives up {}", self.keys[key].name);
        match &self.clients[client].side {
            Side::Old(old) => old.abandon(&self.keys[key].names, mode).await,
            Side::New(_) => acquiring.unwrap().abort(),
        }
        self.keys[key].queue.retain(|(waiter, _)| *waiter != client);
        self.advance(client, key).await;
    }

    /// A holder renews, becomes a reader, releases and asks again, or releases.
    async fn go_on(
        &mut self,
        client: usize,
        number: usize,
        mode: Mode,
        fence: u64,
        guard: Option<LockGuard>,
    ) {
        let key = &mut self.keys[number];
        let name = key.name;
        let is_writer = mode == Mode::Exclusive;
        match (
            self.random.random_range(0..8),
            &mut self.clients[client].side,
            guard,
        ) {
            (0 | 1, side, guard) => {
                let _ = writeln!(self.story, "{client} renews {name}");
                match (side, &guard) {
                    (Side::Old(old), _) => {
                        let left = old.renew(&key.names, mode, LEASE).await;
                        assert_eq!(left, LEASE.as_millis() as i64);
                    }
                    (Side::New(_), guard) => guard.as_ref().unwrap().extend(LEASE).await.unwrap(),
                }
                self.clients[client].state = State::Holds {
                    key: number,
                    mode,
                    fence,
                    guard,
                };
                self.agree(number).await;
            }
            (2, side, guard) if is_writer => {
                let _ = writeln!(self.story, "{client} becomes a reader of {name}");
                key.ends(client, fence);
                let mode = Mode::Shared;
                let (fence, guard) = match (side, guard) {
                    (Side::Old(old), _) => (old.downgrade(&key.names).await, None),
                    (Side::New(_), guard) => {
                        let guard = guard.unwrap().downgrade().await.unwrap();
                        (guard.fence().number(), Some(guard))
                    }
                };
                key.grants(mode, fence);
                key.holders.push((client, mode));
                self.clients[client].state = State::Holds {
                    key: number,
                    mode,
                    fence,
                    guard,
                };
                self.advance(client, number).await;
            }
            (3, Side::Old(old), guard) if is_writer => {
                let _ = writeln!(self.story, "{client} releases {name} and asks again");
                key.ends(client, fence);
                let passed = old.pass(&key.names, LEASE).await;
                assert_eq!(passed.is_some(), key.queue.is_empty());
                self.clients[client].state = match passed {
                    Some(fence) => {
                        key.grants(mode, fence);
                        key.holders.push((client, mode));
                        State::Holds {
                            key: number,
                            mode,
                            fence,
                            guard,
                        }
                    }
                    None => {
                        key.queue.push_back((client, mode));
                        State::Waits {
                            key: number,
                            mode,
                            acquiring: None,
                        }
                    }
                };
                self.advance(client, number).await;
            }
            (_, _, guard) => self.release(client, number, mode, fence, guard).await,
        }
    }

    async fn release(
        &mut self,
        client: usize,
        key: usize,
        mode: Mode,
        fence: u64,
        guard: Option<LockGuard>,
    ) {
        let names = &self.keys[key].names;
        let _ = writeln!(self.story, "{client} releases {}", self.keys[key].name);
        match &self.clients[client].side {
            Side::Old(old) => {
                let word = old.release(names, mode).await;
                assert!(["released", "handed_over"].contains(&&*word), "{word}");
            }
            Side::New(_) => guard.unwrap().release().await.unwrap(),
        }
        self.keys[key].ends(client, fence);
        self.advance(client, key).await;
    }

    /// The waiters whose turn it is after a change by `from` are granted the lock.
    async fn advance(&mut self, from: usize, number: usize) {
        let key = &mut self.keys[number];
        while let Some((client, mode)) = key.queue.front().copied()
            && key.lets_in(mode)
        {
            key.queue.pop_front();
            key.holders.push((client, mode));
            let _ = writeln!(self.story, "  {client} is granted {} {mode:?}", key.name);
            let Client { side, state } = &mut self.clients[client];
            let (fence, guard) = match (side, std::mem::replace(state, State::Idle)) {
                (Side::Old(old), _) => {
                    let sent = old.granted(&key.names, mode).await;
                    let fence = old.poll(&key.names, mode).await.unwrap();
                    // A poll draws another number for one that shares the lock.
                    assert!(sent == fence || (sent < fence && mode != Mode::Exclusive));
                    old.renew(&key.names, mode, LEASE).await;
                    (fence, None)
                }
                (
                    Side::New(_),
                    State::Waits {
                        acquiring: Some(acquiring),
                        ..
                    },
                ) => {
                    let acquired = timeout(LONG, acquiring).await.unwrap();
                    let guard = acquired.unwrap().unwrap();
                    (guard.fence().number(), Some(guard))
                }
                _ => unreachable!("a waiter of the present client is a task"),
            };
            key.grants(mode, fence);
            *state = State::Holds {
                key: number,
                mode,
                fence,
                guard,
            };
            self.hand_offs
                .push((from.is_multiple_of(2), client.is_multiple_of(2)));
        }
        self.agree(number).await;
    }

    /// Waits until the key is as in the model: a present client joins and leaves a queue in the
    /// background.
    async fn agree(&self, number: usize) {
        let key = &self.keys[number];
        let words = |of: &mut dyn Iterator<Item = Mode>| of.map(word).collect::<Vec<_>>();
        let expected = (
            words(&mut key.holders.iter().map(|(_, mode)| *mode)),
            words(&mut key.queue.iter().map(|(_, mode)| *mode)),
        );
        let (old, locks) = &self.probes;
        let until = Instant::now() + LONG;
        loop {
            let inspected = match key.permits {
                Some(_) => locks.inspect(key.name).permits().await,
                None => locks.inspect(key.name).await,
            };
            let inspected = inspected.unwrap();
            let new = (
                words(&mut inspected.holders.iter().map(|holder| holder.mode)),
                words(&mut inspected.waiters.iter().map(|waiter| waiter.mode)),
            );
            let old = old.inspect(&key.names).await;
            if new == expected && old == expected {
                return;
            }
            assert!(Instant::now() < until, "{old:?} {new:?} {expected:?}");
            sleep(Duration::from_millis(1)).await;
        }
    }
}
