//! Every public future, dropped at each of its polls.

use std::{
    future::{Future, poll_fn},
    task::Poll,
    time::Duration,
};

use lock_runtime::{LockClient, LockGuard};
use lock_tests::{
    Proxy,
    proxy::Direction::{ToClient, ToServer},
    shared_server,
};

use crate::place::{LONG, Place, begun, in_time};

/// Less than the lease of 30 s: a lock acquired within it was released and has not expired.
const BEFORE_THE_LEASE: Duration = Duration::from_secs(15);

/// Moment of the drop after a given number of polls.
#[derive(Clone, Copy, Debug)]
enum When {
    /// As soon as the future waits again.
    Waiting,
    /// After the next wake-up, before the future is polled again.
    Woken,
}

/// Client, key and moment of a drop.
struct Scene {
    locks: LockClient,
    /// Another process.
    others: LockClient,
    key: String,
    polls: usize,
    when: When,
}

impl Scene {
    /// Polls a future until the moment of the drop. Returns its output if it is ready before.
    async fn cancelled<F: Future>(&self, future: F) -> Option<F::Output> {
        let mut future = Box::pin(future);
        let mut polls = self.polls;
        let output = poll_fn(|cx| {
            if polls == 0 {
                return Poll::Ready(None);
            }
            polls -= 1;
            match future.as_mut().poll(cx) {
                Poll::Ready(output) => Poll::Ready(Some(output)),
                Poll::Pending if polls == 0 && matches!(self.when, When::Waiting) => {
                    Poll::Ready(None)
                }
                Poll::Pending => Poll::Pending,
            }
        });
        output.await
    }

    async fn guard(&self) -> LockGuard {
        self.locks.exclusive(&self.key).acquire().await.unwrap()
    }
}

/// Runs `scene`, which returns whether its future was ready, and drops the future one poll later
/// each time. After each run another client and then this one must get the lock, and in the end no
/// holder is left.
async fn at_every_poll(place: Place, scene: impl AsyncFn(&Scene) -> bool) {
    let (place, proxy) = match place {
        Place::Memory(_) | Place::Majority(_) => (place, None),
        Place::Redis { url, .. } => {
            let proxy = Proxy::to_url(&url).await;
            (Place::at(proxy.url()), Some(proxy))
        }
    };
    let locks = place.client().await;
    let others = place.client().await;
    if let Some(proxy) = &proxy {
        proxy.delay(ToServer, Duration::from_millis(2));
        proxy.delay(ToClient, Duration::from_millis(2));
    }
    let mut keys = Vec::new();
    for when in [When::Waiting, When::Woken] {
        for polls in 0.. {
            let key = format!("{when:?}:{polls}");
            let this = Scene {
                locks: locks.clone(),
                others: others.clone(),
                key: key.clone(),
                polls,
                when,
            };
            let done = scene(&this).await;
            for client in [&others, &locks] {
                let guard = client
                    .exclusive(&key)
                    .wait(BEFORE_THE_LEASE)
                    .acquire()
                    .await;
                guard
                    .unwrap_or_else(|error| panic!("{key}: {error}"))
                    .release()
                    .await
                    .unwrap();
            }
            keys.push(key);
            if done {
                break;
            }
            assert!(polls < 50, "it is never ready");
        }
    }
    locks.shutdown().await;
    for key in keys {
        assert!(
            others.inspect(&key).await.unwrap().holders.is_empty(),
            "{key} is left"
        );
    }
}

macro_rules! at_every_poll {
    ($($name:ident: $scene:expr;)+) => {
        mod in_memory {
            use super::*;
            $(#[tokio::test(start_paused = true)]
            async fn $name() {
                in_time(at_every_poll(Place::memory(), $scene)).await;
            })+
        }
        mod on_redis {
            use super::*;
            $(#[tokio::test]
            async fn $name() {
                in_time(at_every_poll(Place::at(shared_server().await.url()), $scene)).await;
            })+
        }
    };
}

at_every_poll! {
    a_dropped_acquire_leaves_no_key: async |scene: &Scene| {
        scene.cancelled(scene.locks.exclusive(&scene.key).acquire()).await.is_some()
    };
    a_dropped_shared_acquire_leaves_no_key: async |scene: &Scene| {
        scene.cancelled(scene.locks.read(&scene.key).acquire()).await.is_some()
    };
    a_dropped_acquire_that_waited_leaves_no_key: async |scene: &Scene| {
        let guard = scene.guard().await;
        let release = async {
            tokio::time::sleep(Duration::from_millis(3)).await;
            guard.release().await.unwrap();
        };
        let acquire = scene.cancelled(scene.locks.exclusive(&scene.key).wait(LONG).acquire());
        tokio::join!(acquire, release).0.is_some()
    };
    a_dropped_acquire_wakes_the_next_in_line: async |scene: &Scene| {
        let guard = scene.guard().await;
        let dropped = scene.cancelled(scene.locks.exclusive(&scene.key).wait(LONG).acquire());
        let behind = async {
            tokio::task::yield_now().await;
            scene.locks.exclusive(&scene.key).wait(LONG).acquire().await.unwrap().release().await.unwrap();
        };
        let release = async {
            tokio::time::sleep(Duration::from_millis(3)).await;
            guard.release().await.unwrap();
        };
        let begin = tokio::time::Instant::now();
        let done = tokio::join!(async { dropped.await.is_some() }, behind, release).0;
        assert!(begin.elapsed() < BEFORE_THE_LEASE, "a wake-up was lost");
        done
    };
    a_dropped_acquire_of_several_keys_leaves_none: async |scene: &Scene| {
        let keys = [format!("{}:2", scene.key), scene.key.clone(), format!("{}:1", scene.key)];
        let done = scene.cancelled(scene.locks.all(&keys).acquire()).await.is_some();
        scene.others.all(&keys).wait(BEFORE_THE_LEASE).acquire().await.unwrap().release().await.unwrap();
        done
    };
    a_dropped_try_leaves_no_key: async |scene: &Scene| {
        scene.cancelled(scene.locks.exclusive(&scene.key).try_acquire()).await.is_some()
    };
    a_dropped_try_of_several_keys_leaves_none: async |scene: &Scene| {
        let keys = [format!("{}:2", scene.key), scene.key.clone(), format!("{}:1", scene.key)];
        let done = scene.cancelled(scene.locks.all(&keys).try_acquire()).await.is_some();
        scene.others.all(&keys).wait(BEFORE_THE_LEASE).acquire().await.unwrap().release().await.unwrap();
        done
    };
    a_dropped_run_leaves_no_key: async |scene: &Scene| {
        let body = async |_| {
            tokio::task::yield_now().await;
            scene.locks.reentrant(&scene.key).run(async |_| tokio::task::yield_now().await).await.unwrap();
        };
        scene.cancelled(scene.locks.exclusive(&scene.key).run(body)).await.is_some()
    };
    a_dropped_release_frees_the_lock: async |scene: &Scene| {
        let guard = scene.guard().await;
        scene.cancelled(guard.release()).await.is_some()
    };
    a_dropped_release_of_several_keys_frees_all: async |scene: &Scene| {
        let keys = [format!("{}:2", scene.key), scene.key.clone(), format!("{}:1", scene.key)];
        let guard = scene.locks.all(&keys).acquire().await.unwrap();
        let done = scene.cancelled(guard.release()).await.is_some();
        scene.others.all(&keys).wait(BEFORE_THE_LEASE).acquire().await.unwrap().release().await.unwrap();
        done
    };
    a_dropped_downgrade_frees_the_lock: async |scene: &Scene| {
        let guard = scene.guard().await;
        scene.cancelled(guard.downgrade()).await.is_some()
    };
    a_dropped_extension_leaves_the_lock_held: async |scene: &Scene| {
        let guard = scene.guard().await;
        let done = scene.cancelled(guard.extend(LONG * 2)).await.is_some();
        guard.verify().await.unwrap();
        guard.release().await.unwrap();
        done
    };
    a_dropped_verify_leaves_the_lock_held: async |scene: &Scene| {
        let guard = scene.guard().await;
        let done = scene.cancelled(guard.verify()).await.is_some();
        assert!(!guard.is_lost());
        guard.release().await.unwrap();
        done
    };
    a_dropped_revoke_leaves_nothing_half_done: async |scene: &Scene| {
        let guard = scene.guard().await;
        let done = scene.cancelled(scene.locks.revoke(&scene.key, lock_runtime::RevokeScope::Leased)).await.is_some();
        let _ = guard.release().await;
        done
    };
    a_dropped_inner_guard_leaves_the_outer_one_held: async |scene: &Scene| {
        let guard = scene.guard().await;
        let done = guard.scope(scene.cancelled(scene.locks.reentrant(&scene.key).acquire())).await.is_some();
        guard.verify().await.unwrap();
        assert!(scene.others.exclusive(&scene.key).try_acquire().await.unwrap().is_none());
        guard.release().await.unwrap();
        done
    };
}

/// Shutdown is final, so each number of polls needs a new client.
#[tokio::test]
async fn a_dropped_shutdown_still_shuts_down() {
    in_time(async {
        let place = Place::redis().await;
        let others = place.client().await;
        for polls in 1..4 {
            let locks = place.client().await;
            let scene = Scene {
                locks,
                others: others.clone(),
                key: format!("a{polls}"),
                polls,
                when: When::Waiting,
            };
            drop(scene.guard().await);
            let waiting_for = others.exclusive("held").acquire().await.unwrap();
            let waiting = begun(scene.locks.exclusive("held").wait(LONG).acquire()).await;
            scene.cancelled(scene.locks.shutdown()).await;
            assert_eq!(
                waiting.await.unwrap_err().kind(),
                lock_runtime::LockErrorKind::ShuttingDown
            );
            waiting_for.release().await.unwrap();
            scene
                .others
                .exclusive(&scene.key)
                .wait(BEFORE_THE_LEASE)
                .acquire()
                .await
                .unwrap()
                .release()
                .await
                .unwrap();
        }
    })
    .await;
}

/// The drop of a guard is one step; the background task does the rest, and goes on without its
/// client.
#[tokio::test]
async fn a_guard_dropped_after_its_client_is_given_back() {
    in_time(async {
        for place in [Place::memory(), Place::redis().await] {
            let (locks, others) = (place.client().await, place.client().await);
            let guard = locks.exclusive("a").acquire().await.unwrap();
            drop(locks);
            guard.verify().await.unwrap();
            drop(guard);
            others
                .exclusive("a")
                .wait(BEFORE_THE_LEASE)
                .acquire()
                .await
                .unwrap()
                .release()
                .await
                .unwrap();
        }
    })
    .await;
}
