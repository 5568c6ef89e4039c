//! Futures of a client, dropped at each of their polls.

use std::{
    future::{Future, poll_fn},
    sync::Arc,
    task::Poll,
    time::Duration,
};

use lock_runtime::{LockClient, LockGuard, store::Store, time::Instant};
use tokio::{sync::Mutex, task::yield_now, time::sleep};

use crate::subject::{LONG, Subject, in_time, promise, skipped, unique};

const FREED: &str = "a dropped future leaves its lock to others, long before the lease ends";
const KEPT: &str = "a dropped future leaves a held lock with its holder";
/// The time after which a holder releases a lock while others wait for it.
const STAY: Duration = Duration::from_millis(3);
/// The largest number of polls of a future.
const MOST_POLLS: usize = 100;

/// Moment of the drop after a given number of polls.
#[derive(Clone, Copy, Debug)]
enum When {
    /// As soon as the future waits again.
    Waiting,
    /// After the next wake-up, before the future is polled again.
    Woken,
}

/// Polls a future until the moment of the drop. Returns its output if it is ready before.
async fn dropped<F: Future>(mut polls: usize, when: When, future: F) -> Option<F::Output> {
    let mut future = Box::pin(future);
    poll_fn(|cx| {
        if polls == 0 {
            return Poll::Ready(None);
        }
        polls -= 1;
        match future.as_mut().poll(cx) {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            Poll::Pending if polls == 0 && matches!(when, When::Waiting) => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}

/// Polls a future at most `polls` times, and drops it when it waits again. Returns its output if it
/// is ready before.
#[doc(hidden)]
pub async fn cancelled<F: Future>(polls: usize, future: F) -> Option<F::Output> {
    dropped(polls, When::Waiting, future).await
}

/// Two clients, and the keys that they have used.
struct Stage {
    subject: Subject,
    locks: LockClient,
    /// Another process.
    others: LockClient,
    run: String,
    keys: Mutex<Vec<String>>,
}

/// Client, key and moment of a drop.
struct Scene<'a> {
    locks: &'a LockClient,
    others: &'a LockClient,
    key: String,
    polls: usize,
    when: When,
    /// Less than a lease: a lock acquired within it was released and has not expired.
    patience: Duration,
}

impl Scene<'_> {
    /// Returns whether `future` was ready before it was dropped.
    async fn ready(&self, future: impl Future) -> bool {
        dropped(self.polls, self.when, future).await.is_some()
    }

    async fn guard(&self) -> LockGuard {
        self.locks
            .exclusive(&self.key)
            .acquire()
            .await
            .expect("a free lock")
    }

    fn keys(&self) -> [String; 3] {
        let key = &self.key;
        [format!("{key}:2"), key.clone(), format!("{key}:1")]
    }

    async fn all_are_free(&self) {
        let guard = self
            .others
            .all(self.keys())
            .wait(self.patience)
            .acquire()
            .await;
        let guard = guard.unwrap_or_else(|error| panic!("{FREED}: {}: {error}", self.key));
        release(guard).await;
    }
}

async fn release(guard: LockGuard) {
    guard.release().await.expect("a release");
}

impl Stage {
    async fn set(make: &impl AsyncFn() -> Arc<dyn Store>) -> Self {
        let (one, other) = (Subject::of(make).await, Subject::of(make).await);
        Self {
            locks: one.client(),
            others: other.client(),
            subject: one,
            run: unique(),
            keys: Mutex::default(),
        }
    }

    /// Plays `scene`, which returns whether its future was ready, and drops the future one poll
    /// later each time. After each time another client and then this one must get the lock.
    async fn play(&self, name: &str, scene: impl AsyncFn(&Scene<'_>) -> bool) {
        for when in [When::Waiting, When::Woken] {
            for polls in 0.. {
                let key = format!("{}:{name}:{when:?}:{polls}", self.run);
                let this = Scene {
                    locks: &self.locks,
                    others: &self.others,
                    key: key.clone(),
                    polls,
                    when,
                    patience: self.subject.lease() / 2,
                };
                let done = scene(&this).await;
                for client in [&self.others, &self.locks] {
                    let guard = client.exclusive(&key).wait(this.patience).acquire().await;
                    release(guard.unwrap_or_else(|error| panic!("{FREED}: {key}: {error}"))).await;
                }
                self.keys.lock().await.push(key);
                if done {
                    break;
                }
                assert!(polls < MOST_POLLS, "{name} is never ready");
            }
        }
    }

    /// Fails if a holder is left after all scenes.
    async fn end(self) {
        self.locks.shutdown().await;
        for key in self.keys.into_inner() {
            let found = self.others.inspect(&key).await.expect("an inspection");
            promise!(
                "nothing is left after a dropped future",
                found.holders.is_empty(),
                "{key}: {found:?}"
            );
        }
        self.others.shutdown().await;
    }
}

/// Checks that an acquire that is dropped at any of its polls leaves nothing behind: another client
/// acquires the lock long before a lease could end.
///
/// # Panics
/// If the store breaks this promise.
pub async fn dropped_acquires_leave_nothing(make: &impl AsyncFn() -> Arc<dyn Store>) {
    let stage = Stage::set(make).await;
    in_time(async {
        tokio::join!(
            stage.play("acquire", async |scene| {
                scene
                    .ready(scene.locks.exclusive(&scene.key).acquire())
                    .await
            }),
            stage.play("read", async |scene| {
                scene.ready(scene.locks.shared(&scene.key).acquire()).await
            }),
            stage.play("try", async |scene| {
                scene
                    .ready(scene.locks.exclusive(&scene.key).try_acquire())
                    .await
            }),
            stage.play("wait", wait),
            stage.play("wait before another", wait_before_another),
            stage.play("several", async |scene| {
                let ready = scene.ready(scene.locks.all(scene.keys()).acquire()).await;
                scene.all_are_free().await;
                ready
            }),
            stage.play("run", run),
        );
        if stage
            .subject
            .limits
            .keys_at_once
            .is_some_and(|most| most.get() < 3)
        {
            skipped(
                "several keys without waiting",
                "limits().keys_at_once is below 3",
            );
        } else {
            stage
                .play("try several", async |scene| {
                    let ready = scene
                        .ready(scene.locks.all(scene.keys()).try_acquire())
                        .await;
                    scene.all_are_free().await;
                    ready
                })
                .await;
        }
        stage.end().await;
    })
    .await;
}

async fn wait(scene: &Scene<'_>) -> bool {
    let guard = scene.guard().await;
    let acquire = scene.locks.exclusive(&scene.key).wait(LONG).acquire();
    let later = async {
        sleep(STAY).await;
        release(guard).await;
    };
    tokio::join!(scene.ready(acquire), later).0
}

async fn wait_before_another(scene: &Scene<'_>) -> bool {
    let guard = scene.guard().await;
    let request = || scene.locks.exclusive(&scene.key).wait(LONG).acquire();
    let behind = async {
        yield_now().await;
        release(request().await.expect("a lock that is released")).await;
    };
    let later = async {
        sleep(STAY).await;
        release(guard).await;
    };
    let begin = Instant::now();
    let (ready, ..) = tokio::join!(scene.ready(request()), behind, later);
    promise!(
        "a dropped waiter costs the next one no turn",
        begin.elapsed() < scene.patience,
        "{}: it was served after {:?}",
        scene.key,
        begin.elapsed()
    );
    ready
}

async fn run(scene: &Scene<'_>) -> bool {
    let body = async |_| {
        yield_now().await;
        let again = scene
            .locks
            .reentrant(&scene.key)
            .run(async |_| yield_now().await);
        again.await.expect("a lock that is held can be entered");
    };
    scene
        .ready(scene.locks.exclusive(&scene.key).run(body))
        .await
}

/// Checks that a release or a downgrade that is dropped at any of its polls leaves the lock to
/// others.
///
/// # Panics
/// If the store breaks this promise.
pub async fn dropped_releases_free_the_lock(make: &impl AsyncFn() -> Arc<dyn Store>) {
    let stage = Stage::set(make).await;
    in_time(async {
        tokio::join!(
            stage.play("release", async |scene| {
                let guard = scene.guard().await;
                scene.ready(guard.release()).await
            }),
            stage.play("release several", async |scene| {
                let guard = scene.locks.all(scene.keys()).acquire().await;
                let ready = scene.ready(guard.expect("free locks").release()).await;
                scene.all_are_free().await;
                ready
            }),
            stage.play("downgrade", async |scene| {
                let guard = scene.guard().await;
                scene.ready(guard.downgrade()).await
            }),
            stage.play("revoke", async |scene| {
                let guard = scene.guard().await;
                let revoke = scene.others.revoke(&scene.key).into_future();
                let ready = scene.ready(revoke).await;
                // The lock may have been revoked.
                let _ = guard.release().await;
                ready
            }),
        );
        stage.end().await;
    })
    .await;
}

/// Checks that any other call about a held lock, dropped at any of its polls, leaves the lock held.
///
/// # Panics
/// If the store breaks this promise.
pub async fn dropped_calls_leave_the_lock_held(make: &impl AsyncFn() -> Arc<dyn Store>) {
    let stage = Stage::set(make).await;
    let longer = (2 * stage.subject.lease()).min(stage.subject.limits.longest_lease);
    in_time(async {
        tokio::join!(
            stage.play("extend", async |scene| {
                let guard = scene.guard().await;
                let ready = scene.ready(guard.extend(longer)).await;
                still_held(scene, guard).await;
                ready
            }),
            stage.play("verify", async |scene| {
                let guard = scene.guard().await;
                let ready = scene.ready(guard.verify()).await;
                still_held(scene, guard).await;
                ready
            }),
            stage.play("enter again", async |scene| {
                let guard = scene.guard().await;
                let inner = scene.locks.reentrant(&scene.key).acquire();
                let ready = guard.scope(scene.ready(inner)).await;
                still_held(scene, guard).await;
                ready
            }),
        );
        stage.end().await;
    })
    .await;
}

async fn still_held(scene: &Scene<'_>, guard: LockGuard) {
    let verified = guard.verify().await;
    promise!(KEPT, verified.is_ok(), "{}: {verified:?}", scene.key);
    let other = scene.others.exclusive(&scene.key).try_acquire().await;
    let other = other.expect("a request that does not wait");
    promise!(
        KEPT,
        other.is_none(),
        "{}: another client has it",
        scene.key
    );
    release(guard).await;
}
