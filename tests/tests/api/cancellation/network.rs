//! Random interleavings over a network that delays, reorders and loses requests and replies, with
//! the clock paused: at most one holder, no task hangs, and no lock is left at the end.

use std::{
    future::pending,
    sync::{Arc, Mutex},
    time::Duration,
};

use lock_runtime::{
    LockClient, LockKey, LockKind,
    store::{MemoryStore, Store as _, StoreError, StoreErrorKind},
};
use lock_tests::{FaultyStore, FencedResource, place::LONG};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use tokio::{
    sync::oneshot,
    task::JoinSet,
    time::{Instant, sleep, timeout},
};

const SEEDS: u64 = 60;
const TASKS: usize = 12;
const LEASE: Duration = Duration::from_secs(2);

#[tokio::test(start_paused = true)]
async fn acquire_over_a_bad_network_excludes_and_leaves_no_lock() {
    for seed in 0..SEEDS {
        let mut random = StdRng::seed_from_u64(seed);
        let store = Arc::default();
        let loss = random.random_range(0.0..0.2);
        let slowness = Duration::from_millis(random.random_range(1..400));
        let network = network(&store, seed, loss, slowness);
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
        assert!(done.is_ok(), "seed {seed}: a task hangs");
        let report = resource.report();
        assert!(report.is_clean(), "seed {seed}: {report}");

        // A delayed request and its lease last no longer.
        sleep(LEASE * 3).await;
        for key in ["a", "b"].map(|key| LockKey::new(key).unwrap()) {
            let left = store.inspect(&key, LockKind::Lock).await.unwrap().holders;
            assert!(left.is_empty(), "seed {seed}: {key} is left: {left:?}");
        }
    }
}

/// Rule 8 of docs/PROTOCOL.md: a request may be executed after its caller gave up. Its lock is free
/// soon all the same, long before the lease ends.
#[tokio::test(start_paused = true)]
async fn acquire_executed_after_its_caller_gave_up_holds_no_lock() {
    for seed in 0..SEEDS {
        let store = Arc::default();
        let network = network(&store, seed, 0.0, Duration::from_millis(1200));
        let locks = LockClient::with_store(network);
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

/// The steps of one task; each may be cut off. The resource belongs to key "a".
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
        // With two keys, too, the fencing token is that of "a": it is the first.
        let step = async {
            match random.random_range(0..5) {
                0 => drop(request(&locks).lease(LEASE).acquire().await),
                1 => {
                    let reader = locks.shared("a").lease(LEASE);
                    let inside = async |_| {
                        let _inside = resource.enter_reader();
                        sleep(stay).await;
                    };
                    let _ = reader.run(inside).await;
                }
                2 => {
                    if let Ok(writer) = locks.exclusive("a").lease(LEASE).acquire().await
                        && let Ok(reader) = writer.downgrade().await
                    {
                        let inside = async {
                            let _inside = resource.enter_reader();
                            sleep(stay).await;
                        };
                        let _ = reader.run(inside).await;
                    }
                }
                3 => {
                    if let Ok(Some(guard)) = request(&locks).lease(LEASE).try_acquire().await {
                        let fence = guard.fence().number();
                        let _ = guard.run(write(fence)).await;
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

/// A client's view of `store` at the far end of a network, which delays each request and reply by
/// up to `slowness` and loses each with the probability `loss`. A call that is dropped here is
/// executed there all the same, if it arrives.
fn network(store: &Arc<MemoryStore>, seed: u64, loss: f64, slowness: Duration) -> Arc<FaultyStore> {
    let random = Mutex::new(StdRng::seed_from_u64(seed));
    FaultyStore::new(store.clone(), move |call| {
        let mut random = random.lock().unwrap();
        let [there, back] =
            std::array::from_fn(|_| slowness.mul_f64(random.random::<f64>().powi(4)));
        let [request_lost, reply_lost] = std::array::from_fn(|_| random.random_bool(loss));
        let breaks = random.random_bool(0.5);
        drop(random);
        let (reply, answer) = oneshot::channel();
        tokio::spawn(async move {
            sleep(there).await;
            if !request_lost {
                let outcome = call.execute().await;
                sleep(back).await;
                if !reply_lost {
                    let _ = reply.send(outcome);
                    return;
                }
            }
            // Either the connection breaks, or it stays silent until the client gives up.
            if !breaks {
                sleep(LONG).await;
            }
        });
        let sent = Instant::now();
        async move {
            match answer.await {
                Ok(outcome) => outcome,
                Err(_) if sent.elapsed() >= LONG => pending().await,
                Err(_) => Err(StoreError::new(
                    StoreErrorKind::Unavailable,
                    "the connection broke",
                )),
            }
        }
    })
}
