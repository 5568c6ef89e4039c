//! A task that computes or sleeps without an await point loses no lock, whatever its runtime: the
//! locks of its process are renewed, dropped guards are released, and losses are noticed.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use futures_util::future::join_all;
use lock_runtime::{LockClient, LockError, LockGuard, distributed_lock};
use tokio::{
    runtime::{Builder, Runtime},
    sync::oneshot,
    task::spawn_blocking,
    time::{Instant, sleep},
};

use lock_tests::place::{LONG, Place, in_time};

const LEASE: Duration = Duration::from_secs(3);
/// More than two leases.
const BLOCKED: Duration = Duration::from_secs(7);

/// The use of a lock on a runtime that is blocked.
#[derive(Clone, Copy, Debug)]
enum Way {
    /// The client has just been made.
    Guard,
    UsedBefore,
    Run,
    Attribute,
    /// The task that holds the lock yields; another one blocks the runtime.
    Neighbour,
}

/// Blocks its thread. `is_held` is set meanwhile.
fn block(is_held: &AtomicBool) {
    is_held.store(true, Ordering::SeqCst);
    thread::sleep(BLOCKED);
    is_held.store(false, Ordering::SeqCst);
}

#[distributed_lock(key = "{key}", lease = "3s", client = locks)]
async fn locked(locks: &LockClient, key: &str, is_held: &AtomicBool) -> Result<(), LockError> {
    block(is_held);
    Ok(())
}

impl Way {
    const ALL: [Self; 5] = [
        Self::Guard,
        Self::UsedBefore,
        Self::Run,
        Self::Attribute,
        Self::Neighbour,
    ];

    /// Holds the lock for a while. Sets `is_held` meanwhile.
    async fn hold(self, locks: LockClient, key: &str, is_held: Arc<AtomicBool>) {
        let request = || locks.exclusive(key).lease(LEASE);
        let release = async |guard: LockGuard| {
            assert!(!guard.is_lost(), "{self:?}: lost");
            guard.release().await.unwrap();
        };
        match self {
            Self::Guard | Self::UsedBefore => {
                if matches!(self, Self::UsedBefore) {
                    release(request().acquire().await.unwrap()).await;
                    sleep(Duration::from_millis(20)).await;
                }
                let guard = request().acquire().await.unwrap();
                block(&is_held);
                release(guard).await;
            }
            Self::Run => request().run(async |_| block(&is_held)).await.unwrap(),
            Self::Attribute => locked(&locks, key, &is_held).await.unwrap(),
            Self::Neighbour => {
                let guard = request().acquire().await.unwrap();
                let blocking = tokio::spawn(async move { block(&is_held) });
                blocking.await.unwrap();
                release(guard).await;
            }
        }
    }
}

fn runtimes() -> [Runtime; 2] {
    let several = Builder::new_multi_thread()
        .worker_threads(4)
        .enable_all()
        .build();
    [
        several.unwrap(),
        Builder::new_current_thread().enable_all().build().unwrap(),
    ]
}

/// Holds a lock in each way on each kind of runtime. Another process asks for it all the time.
async fn keeps_its_locks(place: Place) {
    let others = place.client().await;
    let mut holders = Vec::new();
    for runtime in 0..2 {
        for way in Way::ALL {
            let (place, others) = (place.clone(), others.clone());
            holders.push(async move {
                let key = format!("{way:?}-{runtime}");
                let is_held = Arc::new(AtomicBool::new(false));
                let (held, name) = (is_held.clone(), key.clone());
                let holder = spawn_blocking(move || {
                    let runtime = &runtimes()[runtime];
                    // On a worker, as far as there are any.
                    runtime.block_on(async move {
                        let locks = place.client().await;
                        let held = tokio::spawn(async move { way.hold(locks, &name, held).await });
                        held.await.unwrap();
                    });
                });
                while !holder.is_finished() {
                    let begun = is_held.load(Ordering::SeqCst);
                    // Not an answer of a store that is busy.
                    let taken = others.exclusive(key.as_str()).try_acquire().await.ok();
                    if let Some(taken) = taken.flatten() {
                        let is_second = begun && is_held.load(Ordering::SeqCst);
                        assert!(!is_second, "{key}: another process holds it too");
                        let _ = taken.release().await;
                    }
                    sleep(Duration::from_millis(10)).await;
                }
                holder.await.expect("the holder keeps its lock");
            });
        }
    }
    in_time(join_all(holders)).await;
}

/// A guard that is dropped right before its task blocks is released meanwhile.
async fn releases_dropped_guards(place: Place) {
    let others = place.client().await;
    let (sender, acquired) = oneshot::channel();
    let holder = spawn_blocking(move || {
        let [_, runtime] = runtimes();
        runtime.block_on(async {
            let locks = place.client().await;
            let request = locks.exclusive("dropped").lease(LEASE * 20);
            let guard = request.acquire().await.unwrap();
            sleep(Duration::from_millis(50)).await;
            sender.send(()).unwrap();
            drop(guard);
            thread::sleep(BLOCKED * 2);
            Instant::now()
        })
    });
    acquired.await.unwrap();
    let request = others.exclusive("dropped").wait(LONG);
    let guard = request.acquire().await.unwrap();
    let granted = Instant::now();
    let blocked_until = in_time(holder).await.unwrap();
    assert!(granted < blocked_until, "{:?}", granted - blocked_until);
    guard.release().await.unwrap();
}

async fn on(place: Place) {
    tokio::join!(
        keeps_its_locks(place.clone()),
        releases_dropped_guards(place)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn in_memory() {
    on(Place::memory()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn by_majority_in_memory() {
    on(Place::majority()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn on_redis() {
    on(Place::redis().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn on_a_cluster() {
    on(Place::cluster().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn on_postgres() {
    on(Place::postgres().await).await;
}
