//! One client on several Tokio runtimes, such as a static client in tests, or one in a library that
//! creates its own runtimes.

use std::{
    num::NonZeroU32,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::pin,
    sync::Arc,
    task::{Context, Poll, Waker},
    thread,
    time::Duration,
};

use lock_runtime::{
    LockClient, LockError, LockErrorKind, LockKey, distributed_lock, store::MemoryStore,
};
use lock_tests::{
    FaultyStore, Proxy, RedisServer, chain,
    faulty_store::Operation,
    place::{LONG, begun, cluster_url_of, eventually, in_time},
    shared_etcd, shared_server, shared_zookeeper, unique,
};
use tokio::{
    runtime::{Builder, Runtime},
    time::{Instant, sleep, timeout},
};

fn runtime() -> Runtime {
    Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap()
}

/// A driver that does not sleep would starve a runtime with one thread, and with it the reply that
/// it waits for.
#[test]
fn a_client_that_is_gone_does_not_wait_for_the_reply_to_a_renewal() {
    let (over, is_over) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let store = FaultyStore::new(Arc::new(MemoryStore::new()), |call| async move {
                match call.operation {
                    Operation::Renew(_) => std::future::pending().await,
                    _ => call.execute().await,
                }
            });
            let locks = LockClient::with_store(store.clone());
            // A renewal is given up after half a second.
            let lease = Duration::from_secs(3);
            let guard = locks.exclusive("a").lease(lease).acquire().await.unwrap();
            let is_renewal = |operation: &Operation| matches!(operation, Operation::Renew(_));
            store.wait_for(1, is_renewal).await;
            guard.release().await.unwrap();
            drop(locks);
            let gone = Instant::now();
            while Arc::strong_count(&store) > 1 {
                // The keeper has a reference for a moment, once a second.
                let waited = gone.elapsed();
                assert!(
                    waited < Duration::from_millis(300),
                    "the driver has not ended"
                );
                sleep(Duration::from_millis(5)).await;
            }
        });
        over.send(()).unwrap();
    });
    is_over.recv_timeout(LONG).expect("the runtime is starved");
}

#[test]
fn a_lease_is_renewed_when_the_runtime_of_the_driver_ends() {
    let locks = LockClient::in_memory();
    let (first, second) = (runtime(), runtime());
    let elsewhere = first
        .block_on(locks.exclusive("elsewhere").acquire())
        .unwrap();
    let lease = Duration::from_millis(300);
    let guard = second
        .block_on(locks.exclusive("a").lease(lease).acquire())
        .unwrap();
    drop(first);
    second.block_on(async {
        // Nothing but the passing of time tells that it is renewed: three leases.
        assert!(
            timeout(3 * lease, guard.lost()).await.is_err(),
            "it was lost"
        );
        guard.release().await.unwrap();
        elsewhere.release().await.unwrap();
    });
}

/// A renewal in flight ends together with its runtime, and is sent again on another one.
#[test]
fn a_renewal_under_way_on_a_runtime_that_ends_is_sent_again() {
    let store = FaultyStore::new(Arc::new(MemoryStore::new()), |call| async move {
        match call.operation {
            Operation::Renew(_) if call.nth == 0 => std::future::pending().await,
            _ => call.execute().await,
        }
    });
    let locks = LockClient::with_store(store.clone());
    let (first, second) = (runtime(), runtime());
    // The driver runs on the first.
    let elsewhere = first
        .block_on(locks.exclusive("elsewhere").acquire())
        .unwrap();
    let request = locks.exclusive("a").lease(Duration::from_secs(2));
    let guard = second.block_on(request.acquire()).unwrap();
    let is_renewal = |operation: &Operation| matches!(operation, Operation::Renew(_));
    second.block_on(in_time(store.wait_for(1, is_renewal)));
    drop(first);
    second.block_on(in_time(async {
        tokio::select! {
            error = guard.lost() => panic!("{error}"),
            () = store.wait_for(2, is_renewal) => {}
        }
        guard.release().await.unwrap();
        elsewhere.release().await.unwrap();
    }));
}

#[test]
fn shutdown_releases_a_guard_dropped_outside_of_a_runtime() {
    let locks = LockClient::in_memory();
    let first = runtime();
    let guard = first.block_on(locks.exclusive("a").acquire()).unwrap();
    drop(first);
    drop(guard);
    runtime().block_on(in_time(async {
        locks.shutdown().await;
        assert!(locks.inspect("a").await.unwrap().holders.is_empty());
    }));
}

#[test]
fn a_release_under_way_on_a_runtime_that_ends_is_not_forgotten() {
    let (first, second) = (runtime(), runtime());
    let server = second.block_on(RedisServer::start());
    let locks = second.block_on(LockClient::connect(&server.url())).unwrap();
    // The driver runs on the first.
    let guard = first.block_on(locks.exclusive("a").acquire()).unwrap();
    server.stop();
    drop(guard);
    first.block_on(tokio::task::yield_now());
    drop(first);
    server.resume();
    second.block_on(in_time(async {
        locks.shutdown().await;
        assert!(locks.inspect("a").await.unwrap().holders.is_empty());
    }));
}

#[test]
fn a_client_on_redis_survives_the_runtime_it_was_made_on() {
    let first = runtime();
    let (locks, key) = first.block_on(async {
        let locks = LockClient::connect(&shared_server().await.url())
            .await
            .unwrap();
        let key = unique("survivor");
        locks
            .exclusive(key.as_str())
            .acquire()
            .await
            .unwrap()
            .release()
            .await
            .unwrap();
        (locks, key)
    });
    drop(first);
    for _ in 0..2 {
        runtime().block_on(in_time(async {
            locks
                .exclusive(key.as_str())
                .no_wait()
                .acquire()
                .await
                .unwrap()
                .release()
                .await
                .unwrap();
        }));
    }
}

#[test]
fn a_client_on_etcd_outlives_the_runtime_it_was_made_on_or_goes_on_while_it_idles() {
    let place = runtime();
    outlives(&place.block_on(async { shared_etcd().await.url() }));
}

#[test]
fn a_client_on_zookeeper_outlives_the_runtime_it_was_made_on_or_goes_on_while_it_idles() {
    let place = runtime();
    outlives(&place.block_on(async { shared_zookeeper().await.url() }));
}

fn outlives(url: &str) {
    for ends in [true, false] {
        let first = Builder::new_current_thread().enable_all().build().unwrap();
        let namespace = unique("ns");
        let connect = async || {
            let locks = LockClient::builder().namespace(&namespace);
            let locks = locks.connect(url).await.unwrap();
            locks
                .exclusive("k")
                .acquire()
                .await
                .unwrap()
                .release()
                .await
                .unwrap();
            // It listens for messages.
            let held = locks.exclusive("k").acquire().await.unwrap();
            drop(begun(locks.exclusive("k").wait(LONG).acquire()).await);
            held.release().await.unwrap();
            locks
        };
        let locks = first.block_on(connect());
        let idle = (!ends).then_some(first);
        runtime().block_on(in_time(async {
            let once = async || {
                let guard = locks.exclusive("k").no_wait().acquire().await?;
                guard.release().await
            };
            eventually("the client is connected", async || once().await.is_ok()).await;
            let other = LockClient::builder().namespace(&namespace);
            let other = other.connect(url).await.unwrap();
            let mut shortest = Duration::MAX;
            // The stream of messages may come back later.
            for _ in 0..20 {
                let held = other.exclusive("k").wait(LONG).acquire().await.unwrap();
                let waiting = tokio::spawn(locks.exclusive("k").wait(LONG).acquire());
                sleep(Duration::from_millis(100)).await;
                let released = Instant::now();
                held.release().await.unwrap();
                let guard = waiting.await.unwrap().unwrap();
                shortest = shortest.min(released.elapsed());
                guard.release().await.unwrap();
            }
            // By a message, and not by a poll. They come to a runtime that stands still.
            assert!(
                !ends || shortest < Duration::from_millis(100),
                "{shortest:?}"
            );
        }));
        drop(idle);
    }
}

#[test]
fn acquire_reconnects_after_the_end_of_the_first_runtime() {
    let (first, second) = (runtime(), runtime());
    let server = second.block_on(RedisServer::start());
    let locks = first.block_on(LockClient::connect(&server.url())).unwrap();
    first.block_on(async {
        locks
            .exclusive("a")
            .acquire()
            .await
            .unwrap()
            .release()
            .await
            .unwrap()
    });
    server.kill();
    // It ends in the pause between two attempts.
    let trying = locks.exclusive("a").no_wait().acquire();
    let tried =
        first.block_on(async { timeout(Duration::from_millis(50), trying).await.map(drop) });
    assert!(tried.is_err(), "it did not try a second time");
    drop(first);
    second.block_on(async {
        server.restart_empty().await;
        in_time(locks.exclusive("a").wait(LONG).acquire())
            .await
            .unwrap()
            .release()
            .await
            .unwrap();
    });
}

#[test]
fn a_guard_may_be_dropped_on_any_thread() {
    let locks = LockClient::in_memory();
    runtime().block_on(in_time(async {
        let guard = locks.exclusive("a").acquire().await.unwrap();
        thread::spawn(move || drop(guard)).join().unwrap();
        locks
            .exclusive("a")
            .acquire()
            .await
            .unwrap()
            .release()
            .await
            .unwrap();
    }));
}

#[tokio::test]
async fn the_connection_is_closed_with_the_last_clone_of_the_client() {
    in_time(async {
        let server = RedisServer::start().await;
        let connections = async || server.clients().await.len();
        let before = connections().await;
        let locks = LockClient::connect(&server.url()).await.unwrap();
        let guard = locks.exclusive("a").acquire().await.unwrap();
        assert_eq!(connections().await, before + 1);
        drop((locks, guard));
        eventually("the connection is closed", async || {
            connections().await == before
        })
        .await;
        assert!(
            server.keys("lock:*").await.is_empty(),
            "the guard was given back before"
        );
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn limits_that_no_clock_can_hold_are_refused() {
    let locks = LockClient::in_memory();
    for request in [
        locks.exclusive("a").max_hold(Duration::MAX),
        locks.exclusive("a").min_hold(Duration::MAX),
        locks.exclusive("a").lease(Duration::MAX),
        locks.exclusive("a").wait(Duration::MAX),
    ] {
        let error = request.acquire().await.unwrap_err();
        assert_eq!(error.kind(), LockErrorKind::InvalidSpec, "{error}");
    }
    let guard = locks.exclusive("a").acquire().await.unwrap();
    let error = guard.extend(Duration::MAX).await.unwrap_err();
    assert_eq!(error.kind(), LockErrorKind::InvalidSpec, "{error}");
    guard.release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn acquire_all_fails_if_its_first_key_has_ended_meanwhile() {
    let locks = LockClient::in_memory();
    let blocker = locks.exclusive("b").acquire().await.unwrap();
    let waiting = begun(
        locks
            .all(["a", "b"])
            .max_hold(Duration::from_secs(1))
            .wait(LONG)
            .acquire(),
    )
    .await;
    tokio::time::advance(Duration::from_secs(2)).await;
    blocker.release().await.unwrap();
    let error = waiting.await.unwrap_err();
    assert!(matches!(error.kind(), LockErrorKind::Lost(_)), "{error}");
    eventually("all are free", async || {
        locks.all(["a", "b"]).try_acquire().await.unwrap().is_some()
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn what_can_never_be_granted_is_refused_before_it_waits() {
    let locks = LockClient::in_memory();
    let _blocker = locks.exclusive("a").acquire().await.unwrap();
    let held = locks.exclusive("b").acquire().await.unwrap();
    let start = tokio::time::Instant::now();
    let error = held
        .scope(locks.all(["a", "b"]).wait(LONG).acquire())
        .await
        .unwrap_err();
    assert_eq!(error.kind(), LockErrorKind::WouldDeadlock, "{error}");
    assert!(start.elapsed().is_zero());
}

#[tokio::test]
async fn a_waiter_in_an_outage_gets_an_error() {
    in_time(async {
        let server = RedisServer::start().await;
        let locks = LockClient::connect(&server.url()).await.unwrap();
        server.kill();
        let wait = Duration::from_secs(1);
        let waiting = (0..10)
            .map(|_| tokio::spawn(locks.exclusive("a").wait(wait).acquire()))
            .collect::<Vec<_>>();
        for waiting in waiting {
            assert_eq!(
                waiting.await.unwrap().unwrap_err().kind(),
                LockErrorKind::Unavailable
            );
        }
    })
    .await;
}

#[tokio::test]
async fn several_keys_take_no_longer_to_release_than_one() {
    in_time(async {
        let server = RedisServer::start().await;
        let locks = LockClient::connect(&server.url()).await.unwrap();
        let names: Vec<_> = (0..8).map(|number| format!("k{number}")).collect();
        let guard = locks.all(&names).acquire().await.unwrap();
        server.stop();
        let start = std::time::Instant::now();
        assert_eq!(
            guard.release().await.unwrap_err().kind(),
            LockErrorKind::ReleaseUnknown
        );
        assert!(
            start.elapsed() < Duration::from_secs(2),
            "{:?}",
            start.elapsed()
        );
        server.resume();
    })
    .await;
}

/// A reader need not wait for the answer that another reader gets.
#[tokio::test]
async fn readers_and_permits_ask_side_by_side() {
    in_time(async {
        let server = shared_server().await;
        let proxy = lock_tests::Proxy::to(server).await;
        let locks = LockClient::builder()
            .namespace(unique("ns"))
            .connect(&proxy.url())
            .await
            .unwrap();
        locks
            .shared("warm")
            .acquire()
            .await
            .unwrap()
            .release()
            .await
            .unwrap();
        proxy.delay(
            lock_tests::proxy::Direction::ToClient,
            Duration::from_millis(50),
        );
        let start = std::time::Instant::now();
        let all = NonZeroU32::new(100).unwrap();
        let readers = (0..100).map(|_| locks.shared("a").acquire());
        let permits = (0..100).map(|_| locks.permits("a", all).acquire());
        for guard in futures_util::future::join_all(readers.chain(permits)).await {
            drop(guard.unwrap());
        }
        // One after another they would take ten seconds.
        assert!(
            start.elapsed() < Duration::from_secs(5),
            "{:?}",
            start.elapsed()
        );
    })
    .await;
}

/// Where nothing can be locked.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Elsewhere {
    OutsideOfARuntime,
    WithoutTimers,
}

impl Elsewhere {
    const BOTH: [Self; 2] = [Self::OutsideOfARuntime, Self::WithoutTimers];

    /// Polls `future` to its end there.
    fn run<T>(self, future: impl Future<Output = T>) -> T {
        match self {
            Self::WithoutTimers => Builder::new_current_thread()
                .build()
                .unwrap()
                .block_on(future),
            Self::OutsideOfARuntime => {
                let mut future = pin!(future);
                loop {
                    if let Poll::Ready(output) = future
                        .as_mut()
                        .poll(&mut Context::from_waker(Waker::noop()))
                    {
                        return output;
                    }
                    thread::sleep(Duration::from_millis(1));
                }
            }
        }
    }

    /// The call is refused with the remedy.
    #[track_caller]
    fn refuses<T>(self, key: Option<&str>, call: impl Future<Output = Result<T, LockError>>) {
        let Err(error) = self.run(call) else {
            panic!("it was done")
        };
        assert_eq!(error.code(), "no_runtime", "{self:?}: {error}");
        assert_eq!(error.key().map(LockKey::as_str), key, "{self:?}: {error}");
        let remedy = if self == Self::WithoutTimers {
            "`enable_all()`"
        } else {
            "`Runtime::block_on`"
        };
        assert!(
            chain(&error).contains(remedy) && chain(&error).contains("#[tokio::main]"),
            "{error}"
        );
    }
}

#[distributed_lock(key = "a", global, client = locks)]
async fn locked(locks: &LockClient) -> Result<(), LockError> {
    panic!("without the lock")
}

#[test]
fn acquire_without_a_runtime_or_its_timers_is_an_error() {
    let place = runtime();
    let url = place.block_on(async { shared_server().await.url() });
    for elsewhere in Elsewhere::BOTH {
        let on_redis = LockClient::builder().namespace(unique("ns"));
        let on_redis = place.block_on(on_redis.connect(&url)).unwrap();
        for locks in [LockClient::in_memory(), on_redis] {
            let a = Some("a");
            elsewhere.refuses(a, locks.exclusive("a").acquire());
            elsewhere.refuses(a, locks.shared("a").no_wait().acquire());
            elsewhere.refuses(a, locks.permits("a", NonZeroU32::MIN).try_acquire());
            elsewhere.refuses(a, locks.all(["b", "a"]).acquire());
            elsewhere.refuses(
                a,
                locks
                    .exclusive("a")
                    .run(async |_| panic!("without the lock")),
            );
            elsewhere.refuses(a, locked(&locks));
            elsewhere.refuses(a, locks.inspect("a").into_future());
            elsewhere.refuses(a, locks.revoke("a").into_future());
            let hold = || {
                place
                    .block_on(locks.exclusive("a").wait(LONG).acquire())
                    .unwrap()
            };
            let guard = hold();
            elsewhere.refuses(a, guard.extend(LONG));
            elsewhere.refuses(a, guard.verify());
            assert!(!guard.is_lost());
            elsewhere.refuses(a, guard.release());
            elsewhere.refuses(a, hold().downgrade());
            // All was given back in the background, and no body ran.
            place.block_on(hold().release()).unwrap();
        }
        elsewhere.refuses(None, LockClient::connect(&url));
        let several = format!("redlock:{url}/1,redis://127.0.0.1:1,redis://127.0.0.1:2");
        elsewhere.refuses(None, LockClient::connect(&several));
        elsewhere.refuses(None, LockClient::builder().connect(&cluster_url_of([&url])));
    }
}

#[test]
fn shutdown_outside_of_a_runtime_panics_with_the_callers_line() {
    for elsewhere in Elsewhere::BOTH {
        let locks = LockClient::in_memory();
        let (shutdown, line) = (locks.shutdown(), line!());
        let panic = catch_unwind(AssertUnwindSafe(|| elsewhere.run(shutdown))).unwrap_err();
        let message = panic.downcast_ref::<String>().cloned().unwrap_or_default();
        assert!(
            message.contains(&format!("{}:{line}:", file!())),
            "{elsewhere:?}: {message:?}"
        );
        let error = runtime()
            .block_on(locks.exclusive("a").acquire())
            .unwrap_err();
        assert_eq!(
            error.kind(),
            LockErrorKind::ShuttingDown,
            "it is shut down all the same"
        );
    }
}

/// The connection belongs to the client, and the attempt to connect to a runtime that has ended, or
/// that exists and is not driven any more.
#[test]
fn another_runtime_connects_when_the_first_one_ends_or_idles_while_it_connects() {
    let place = runtime();
    let proxy = place.block_on(async { Proxy::to(shared_server().await).await });
    for ends in [true, false] {
        proxy.black_hole();
        let first = Builder::new_current_thread().enable_all().build().unwrap();
        let after = Duration::from_millis(100);
        let builder = LockClient::builder().without_identity();
        let builder = builder.namespace(unique("ns")).unavailable_after(after);
        let locks = first.block_on(async {
            let locks = builder.connect_lazy(&proxy.url()).unwrap();
            let request = locks.exclusive("k").wait(LONG).acquire();
            let error = timeout(LONG, request).await.unwrap().unwrap_err();
            assert_eq!(error.kind(), LockErrorKind::Unavailable, "{error}");
            locks
        });
        let idle = match ends {
            true => None,
            false => Some(first),
        };
        place.block_on(async {
            proxy.cut();
            proxy.let_through().await;
        });
        runtime().block_on(eventually("the client is connected", async || {
            locks.exclusive("k").no_wait().acquire().await.is_ok()
        }));
        drop(idle);
    }
}
