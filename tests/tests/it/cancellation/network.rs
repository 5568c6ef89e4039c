//! Random interleavings over a network that delays, reorders and loses requests and replies, with the clock paused: at most
//! one holder, nobody waits for ever, and nothing is left in the end.

use std::{
    future::pending,
    sync::{Arc, Mutex, Weak},
    time::Duration,
};

use futures_util::future::BoxFuture;
use lock_runtime::{
    LockClient, LockKey, LockKind, RevokeReply, RevokeScope,
    store::{
        AcquireAllReply, AcquireReply, ConvertReply, Hold, Inspection, KeyPart, KeyRequest, Limits,
        Listener, MemoryStore, PollReply, Release, ReleaseReply, RenewReply, Renewal, Store,
        StoreError, StoreErrorKind,
    },
};
use lock_tests::FencedResource;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use tokio::{
    sync::oneshot,
    task::JoinSet,
    time::{Instant, sleep, timeout},
};

use crate::place::LONG;

const SEEDS: u64 = 60;
const TASKS: usize = 12;
const LEASE: Duration = Duration::from_secs(2);

#[tokio::test(start_paused = true)]
async fn over_a_bad_network_nobody_meets_nobody_hangs_and_nothing_is_left() {
    for seed in 0..SEEDS {
        let mut random = StdRng::seed_from_u64(seed);
        let network = Network {
            store: Arc::default(),
            random: Mutex::new(StdRng::seed_from_u64(seed)),
            loss: random.random_range(0.0..0.2),
            slowness: Duration::from_millis(random.random_range(1..400)),
        };
        let (store, network) = (network.store.clone(), Arc::new(network));
        let clients = [
            LockClient::with_store(network.clone()),
            LockClient::with_store(network),
        ];
        let resource = Arc::new(FencedResource::new());
        let mut tasks = JoinSet::new();
        for task in 0..TASKS {
            let random = StdRng::seed_from_u64(seed * 1000 + task as u64);
            tasks.spawn(work(clients[task % 2].clone(), resource.clone(), random));
        }
        let done = timeout(Duration::from_secs(600), tasks.join_all()).await;
        assert!(done.is_ok(), "seed {seed}: somebody hangs");
        let report = resource.report();
        assert!(report.is_clean(), "seed {seed}: {report}");

        // The longest a straggler and its lease may last.
        sleep(LEASE * 3).await;
        for key in ["a", "b"].map(|key| LockKey::new(key).unwrap()) {
            let left = store.inspect(&key, LockKind::Lock).await.unwrap().holders;
            assert!(left.is_empty(), "seed {seed}: {key} is left: {left:?}");
        }
    }
}

/// PROTOCOL 8: a request may be executed after it was given up. Its lock is free soon all the same, long before its lease ends.
#[tokio::test(start_paused = true)]
async fn a_request_that_is_executed_after_it_was_given_up_holds_nothing() {
    for seed in 0..SEEDS {
        let network = Network {
            store: Arc::default(),
            random: Mutex::new(StdRng::seed_from_u64(seed)),
            loss: 0.0,
            slowness: Duration::from_millis(1200),
        };
        let store = network.store.clone();
        let locks = LockClient::with_store(Arc::new(network));
        let keys: Vec<_> = (0..10)
            .map(|number| LockKey::new(format!("k{number}")).unwrap())
            .collect();
        for (key, patience) in keys.iter().zip(0..) {
            let acquire = locks.exclusive(key).lease(LONG * 10).acquire();
            drop(timeout(Duration::from_millis(patience * 40), acquire).await);
        }
        sleep(Duration::from_secs(6)).await;
        for key in keys {
            let left = store.inspect(&key, LockKind::Lock).await.unwrap().holders;
            assert!(left.is_empty(), "seed {seed}: {key} is left: {left:?}");
        }
    }
}

/// What one task does; every step may be cut off. The resource belongs to key "a".
async fn work(locks: LockClient, resource: Arc<FencedResource>, mut random: StdRng) {
    for _ in 0..6 {
        let patience = Duration::from_millis(random.random_range(0..4000));
        let stay = Duration::from_millis(random.random_range(0..3000));
        let both = random.random_bool(0.3);
        let request = |locks: &LockClient| {
            if both {
                locks.all(["b", "a"])
            } else {
                locks.exclusive("a")
            }
        };
        let write = async |fence: u64| {
            let _inside = resource.enter(fence);
            sleep(stay).await;
        };
        // The token of "a" also where it is one of two keys: "a" is the first.
        let step = async {
            match random.random_range(0..5) {
                0 => drop(request(&locks).lease(LEASE).acquire().await),
                1 => {
                    let reader = locks.read("a").lease(LEASE);
                    let inside = async |_| {
                        let _inside = resource.enter_reader();
                        sleep(stay).await;
                    };
                    let _ = reader.run(inside).await;
                }
                2 => {
                    if let Ok(writer) = locks.write("a").lease(LEASE).acquire().await
                        && let Ok(reader) = writer.downgrade().await
                    {
                        let inside = async {
                            let _inside = resource.enter_reader();
                            sleep(stay).await;
                        };
                        let _ = reader.cancel_on_loss(inside).await;
                    }
                }
                3 => {
                    if let Ok(Some(guard)) = request(&locks).lease(LEASE).try_acquire().await {
                        let fence = guard.fence().number();
                        let _ = guard.cancel_on_loss(write(fence)).await;
                    }
                }
                _ => {
                    let body =
                        async |held: lock_runtime::HeldLock| write(held.fence().number()).await;
                    let _ = request(&locks).lease(LEASE).wait(LONG).run(body).await;
                }
            }
        };
        let _ = timeout(patience, step).await;
    }
}

/// A store at the far end of a network. A call that is dropped here is executed there all the same, if it arrives.
#[derive(Debug)]
struct Network {
    store: Arc<MemoryStore>,
    random: Mutex<StdRng>,
    /// How probable it is that a request is lost; and that a reply is.
    loss: f64,
    slowness: Duration,
}

impl Network {
    fn send<T: Send + 'static>(
        &self,
        execute: impl FnOnce(Arc<MemoryStore>) -> BoxFuture<'static, Result<T, StoreError>>
        + Send
        + 'static,
    ) -> BoxFuture<'static, Result<T, StoreError>> {
        let mut random = self.random.lock().unwrap();
        let [there, back] =
            std::array::from_fn(|_| self.slowness.mul_f64(random.random::<f64>().powi(4)));
        let [request_lost, reply_lost] = std::array::from_fn(|_| random.random_bool(self.loss));
        let told = random.random_bool(0.5);
        drop(random);
        let store = self.store.clone();
        let (reply, answer) = oneshot::channel();
        tokio::spawn(async move {
            sleep(there).await;
            if !request_lost {
                let result = execute(store).await;
                sleep(back).await;
                if !reply_lost {
                    let _ = reply.send(result);
                    return;
                }
            }
            // Either the connection breaks, or the silence lasts until somebody gives up.
            if !told {
                sleep(LONG).await;
            }
        });
        let sent = Instant::now();
        Box::pin(async move {
            match answer.await {
                Ok(result) => result,
                Err(_) if sent.elapsed() >= LONG => pending().await,
                Err(_) => Err(StoreError::new(
                    StoreErrorKind::Unavailable,
                    "the connection broke",
                )),
            }
        })
    }
}

impl Store for Network {
    fn acquire<'a>(
        &'a self,
        request: &'a KeyRequest,
    ) -> BoxFuture<'a, Result<AcquireReply, StoreError>> {
        let request = request.clone();
        self.send(|store| Box::pin(async move { store.acquire(&request).await }))
    }

    fn acquire_all<'a>(
        &'a self,
        requests: &'a [KeyRequest],
    ) -> BoxFuture<'a, Result<AcquireAllReply, StoreError>> {
        let requests = requests.to_vec();
        self.send(|store| Box::pin(async move { store.acquire_all(&requests).await }))
    }

    fn poll<'a>(&'a self, holds: &'a [Hold]) -> BoxFuture<'a, Vec<Result<PollReply, StoreError>>> {
        let holds = holds.to_vec();
        let answer = self.send(|store| Box::pin(async move { Ok(store.poll(&holds).await) }));
        Box::pin(async { answer.await.unwrap_or_else(|error| vec![Err(error)]) })
    }

    fn renew<'a>(
        &'a self,
        renewals: &'a [Renewal],
    ) -> BoxFuture<'a, Vec<Result<RenewReply, StoreError>>> {
        let renewals = renewals.to_vec();
        let answer = self.send(|store| Box::pin(async move { Ok(store.renew(&renewals).await) }));
        Box::pin(async { answer.await.unwrap_or_else(|error| vec![Err(error)]) })
    }

    fn release<'a>(
        &'a self,
        release: &'a Release,
    ) -> BoxFuture<'a, Result<ReleaseReply, StoreError>> {
        let release = release.clone();
        self.send(|store| Box::pin(async move { store.release(&release).await }))
    }

    fn convert<'a>(&'a self, hold: &'a Hold) -> BoxFuture<'a, Result<ConvertReply, StoreError>> {
        let hold = hold.clone();
        self.send(|store| Box::pin(async move { store.convert(&hold).await }))
    }

    fn abandon<'a>(&'a self, hold: &'a Hold) -> BoxFuture<'a, Result<(), StoreError>> {
        let hold = hold.clone();
        self.send(|store| Box::pin(async move { store.abandon(&hold).await }))
    }

    fn inspect<'a>(
        &'a self,
        key: &'a LockKey,
        kind: LockKind,
    ) -> BoxFuture<'a, Result<Inspection, StoreError>> {
        self.store.inspect(key, kind)
    }

    fn revoke<'a>(
        &'a self,
        key: &'a LockKey,
        kind: LockKind,
        scope: RevokeScope,
    ) -> BoxFuture<'a, Result<RevokeReply, StoreError>> {
        self.store.revoke(key, kind, scope)
    }

    fn listen(&self, listener: Weak<dyn Listener>) {
        self.store.listen(listener);
    }

    fn name_of(&self, key: &LockKey, kind: LockKind, part: KeyPart) -> Option<String> {
        self.store.name_of(key, kind, part)
    }

    fn server_of(&self, key: &LockKey, kind: LockKind) -> u64 {
        self.store.server_of(key, kind)
    }

    fn limits(&self) -> Limits {
        self.store.limits()
    }

    fn settled(&self) -> BoxFuture<'_, ()> {
        self.store.settled()
    }
}
