//! Every way in which a lock becomes free, and how soon a waiter of another process is granted it,
//! counted from the instant at which the store regards the lock as free.
//!
//! A store without a client stands for a killed process: it acquires the lock, or enters the wait
//! queue, and makes no further request.

use std::{fmt, num::NonZeroU32, sync::Arc, time::Duration};

use futures_util::future::join_all;
use lock_runtime::{
    LockClient, LockGuard, LockKey, LockRequest, Mode,
    future::AcquireFuture,
    operator::Waiter,
    store::{AcquireReply, Hold, Instant, KeyRequest, Store, Token},
};
use lock_tests::{
    Proxy,
    place::{eventually, in_time, on_every_store},
    proxy::Direction::{ToClient, ToServer},
};
use tokio::{task::JoinHandle, time::sleep};

use super::{LONG, Place, in_line};

on_every_store! {
    a_release_grants_at_once,
    a_dropped_guard_grants_at_once,
    the_release_of_several_keys_grants_at_once,
    the_last_guard_of_a_reentered_lock_grants_at_once,
    a_downgrade_grants_readers_at_once,
    a_revocation_grants_at_once,
    max_hold_grants_at_once,
    a_writer_that_gives_up_grants_readers_at_once,
    a_reader_stays_behind_a_writer_that_waits,
    a_reservation_of_a_writer_ends_on_time,
    a_reservation_of_a_reader_ends_on_time,
    release_reserves_on_time_after_the_loss_of_the_last_reader,
    release_reserves_on_time_behind_a_waiter_that_has_left,
    the_lease_of_a_dead_writer_ends_on_time,
    the_lease_of_a_dead_reader_ends_on_time_after_a_release,
    a_hand_off_to_a_dead_process_ends_on_time,
    a_dead_writer_in_the_queue_is_passed_over_on_time;
    with permits:
    a_returned_permit_grants_at_once,
    a_reservation_of_a_permit_ends_on_time,
    acquire_gets_a_dead_holders_permit_on_time_after_a_release,
    a_dead_waiter_for_a_permit_is_passed_over_on_time,
}

/// Together with [`LATE`] shorter than the pause before the first poll of a waiter, so that a grant
/// by that poll is too late.
const RESERVED: Duration = Duration::from_millis(400);
/// The accepted delay of a grant on a busy machine.
const LATE: Duration = Duration::from_millis(250);
/// The time without a poll after which a queue entry is passed over.
const KEY: &str = "a";

/// Three live processes, and the store of one that dies.
struct Scene {
    here: LockClient,
    there: LockClient,
    elsewhere: LockClient,
    dead: Arc<dyn Store>,
    /// The accepted delay of a grant.
    late: Duration,
}

impl Scene {
    async fn at(place: &Place) -> Self {
        let [here, there, elsewhere] = [
            place.client().await,
            place.client().await,
            place.client().await,
        ];
        Self {
            here,
            there,
            elsewhere,
            dead: place.store().await,
            late: LATE + place.unsure(),
        }
    }

    /// Starts a waiter for [`KEY`], and returns once it is in the queue behind `before` entries.
    async fn waits(&self, request: LockRequest, before: usize) -> Waiting {
        self.waits_for(request, KEY, before).await
    }

    async fn waits_for(&self, request: LockRequest, key: &str, before: usize) -> Waiting {
        let acquire = request.wait(LONG).acquire();
        let task = tokio::spawn(async move {
            let guard = acquire.await.unwrap();
            (Instant::now(), guard)
        });
        let waiting = Waiting(task, self.late);
        if key.starts_with("permits") {
            let what = format!("more than {before} queue entries");
            let waits = async || {
                self.here
                    .inspect(key)
                    .permits()
                    .await
                    .unwrap()
                    .waiters
                    .len()
                    > before
            };
            eventually(&what, waits).await;
        } else {
            in_line(&self.here, key, before + 1).await;
        }
        waiting
    }

    /// Starts a waiter for permits, and returns it once it is in the queue behind `before` entries.
    /// `None` if that took until `free`, as on a busy machine.
    async fn waits_before(
        &self,
        free: Instant,
        request: LockRequest,
        key: &str,
        before: usize,
    ) -> Option<Waiting> {
        let acquire = request.wait(LONG).acquire();
        let waiting =
            tokio::spawn(async move { acquire.await.map(|guard| (Instant::now(), guard)) });
        while Instant::now() < free {
            if self
                .here
                .inspect(key)
                .permits()
                .await
                .unwrap()
                .waiters
                .len()
                > before
            {
                let task = tokio::spawn(async { waiting.await.unwrap().unwrap() });
                return Some(Waiting(task, self.late));
            }
            sleep(Duration::from_millis(5)).await;
        }
        None
    }

    /// Acquires the lock, or enters the wait queue, for a process that is then killed.
    async fn dies(&self, key: &str, mode: Mode, lease: Duration) -> AcquireReply {
        let hold = Hold::new(LockKey::new(key).unwrap(), mode, Token::random());
        let request = KeyRequest::new(hold, lease, Instant::now() + LONG).queued();
        self.dead.acquire(&request).await.unwrap()
    }

    async fn dies_holding(&self, key: &str, mode: Mode, lease: Duration) -> Instant {
        let reply = self.dies(key, mode, lease).await;
        assert!(matches!(reply, AcquireReply::Granted(_)), "{reply:?}");
        Instant::now() + lease
    }

    async fn dies_waiting(&self, key: &str, mode: Mode, lease: Duration) -> Instant {
        let reply = self.dies(key, mode, lease).await;
        assert!(matches!(reply, AcquireReply::Queued { .. }), "{reply:?}");
        Instant::now()
    }
}

/// A waiter, and the accepted delay of its grant.
struct Waiting(JoinHandle<(Instant, LockGuard)>, Duration);

impl Waiting {
    /// Checks that the waiter is granted the lock soon after `free`, and not before.
    async fn granted_at(self, free: Instant) -> LockGuard {
        let (granted, guard) = self.granted_by(free).await;
        let early = free.saturating_duration_since(granted);
        // A store counts whole milliseconds, and the test takes the time after the reply.
        assert!(
            early < Duration::from_millis(150),
            "granted {early:?} before the lock was free"
        );
        guard
    }

    /// Checks that the waiter is granted the lock soon after `free`, or before.
    async fn granted_by(self, free: Instant) -> (Instant, LockGuard) {
        let (granted, guard) = self.0.await.unwrap();
        let late = granted.saturating_duration_since(free);
        assert!(late <= self.1, "granted {late:?} after the lock was free");
        (granted, guard)
    }
}

fn two() -> NonZeroU32 {
    NonZeroU32::new(2).unwrap()
}

async fn acquired(request: LockRequest) -> LockGuard {
    acquire(request.acquire()).await
}

async fn acquire(acquire: AcquireFuture) -> LockGuard {
    acquire.await.unwrap()
}

async fn released(guard: LockGuard) {
    guard.release().await.unwrap();
}

async fn a_release_grants_at_once(place: Place) {
    let scene = Scene::at(&place).await;
    let holders: [fn(&LockClient) -> LockRequest; 2] =
        [|locks| locks.exclusive(KEY), |locks| locks.shared(KEY)];
    for holder in holders {
        let guard = acquired(holder(&scene.here)).await;
        let waiting = scene.waits(scene.there.exclusive(KEY), 0).await;
        let free = Instant::now();
        released(guard).await;
        released(waiting.granted_at(free).await).await;
    }
}

async fn a_dropped_guard_grants_at_once(place: Place) {
    let scene = Scene::at(&place).await;
    let holders: [fn(&LockClient) -> LockRequest; 2] =
        [|locks| locks.exclusive(KEY), |locks| locks.shared(KEY)];
    for holder in holders {
        let guard = acquired(holder(&scene.here)).await;
        let waiting = scene.waits(scene.there.exclusive(KEY), 0).await;
        let free = Instant::now();
        drop(guard);
        released(waiting.granted_at(free).await).await;
    }
}

async fn the_release_of_several_keys_grants_at_once(place: Place) {
    let scene = Scene::at(&place).await;
    let guard = acquired(scene.here.all([KEY, "b"])).await;
    let first = scene.waits(scene.there.exclusive(KEY), 0).await;
    let second = scene.waits_for(scene.elsewhere.shared("b"), "b", 0).await;
    let free = Instant::now();
    released(guard).await;
    released(first.granted_at(free).await).await;
    released(second.granted_at(free).await).await;
}

async fn the_last_guard_of_a_reentered_lock_grants_at_once(place: Place) {
    let scene = Scene::at(&place).await;
    let request = scene.here.reentrant(KEY);
    let guard = acquired(request.clone()).await;
    let inner = guard.held().scope(acquire(request.acquire())).await;
    let waiting = scene.waits(scene.there.exclusive(KEY), 0).await;
    released(inner).await;
    sleep(RESERVED / 8).await;
    assert!(!waiting.0.is_finished(), "the outer guard holds the lock");
    let free = Instant::now();
    released(guard).await;
    released(waiting.granted_at(free).await).await;
}

async fn a_downgrade_grants_readers_at_once(place: Place) {
    let scene = Scene::at(&place).await;
    let writer = acquired(scene.here.exclusive(KEY)).await;
    let waiting = scene.waits(scene.there.shared(KEY), 0).await;
    let free = Instant::now();
    let reader = writer.downgrade().await.unwrap();
    released(waiting.granted_at(free).await).await;
    released(reader).await;
}

async fn a_revocation_grants_at_once(place: Place) {
    let scene = Scene::at(&place).await;
    let holders: [fn(&LockClient) -> LockRequest; 2] =
        [|locks| locks.exclusive(KEY), |locks| locks.shared(KEY)];
    for holder in holders {
        let guards = [acquired(holder(&scene.here)).await];
        let waiting = scene.waits(scene.there.exclusive(KEY), 0).await;
        let free = Instant::now();
        scene.elsewhere.revoke(KEY).await.unwrap();
        released(waiting.granted_at(free).await).await;
        drop(guards);
    }
}

async fn max_hold_grants_at_once(place: Place) {
    let scene = Scene::at(&place).await;
    let free = Instant::now() + RESERVED;
    let guard = acquired(scene.here.exclusive(KEY).max_hold(RESERVED)).await;
    let waiting = scene.waits(scene.there.exclusive(KEY), 0).await;
    released(waiting.granted_at(free).await).await;
    drop(guard);
}

async fn a_writer_that_gives_up_grants_readers_at_once(place: Place) {
    let scene = Scene::at(&place).await;
    let reader = acquired(scene.here.shared(KEY)).await;
    let writer = scene.waits(scene.there.exclusive(KEY), 0).await;
    let waiting = scene.waits(scene.elsewhere.shared(KEY), 1).await;
    let free = Instant::now();
    writer.0.abort();
    released(waiting.granted_at(free).await).await;
    released(reader).await;
}

async fn a_reader_stays_behind_a_writer_that_waits(place: Place) {
    let scene = Scene::at(&place).await;
    let reader = acquired(scene.here.shared(KEY)).await;
    let writer = scene.waits(scene.there.exclusive(KEY), 0).await;
    let waiting = scene.waits(scene.elsewhere.shared(KEY), 1).await;
    // Long enough for the requests that a reader of a majority sends to the other servers.
    sleep(LONG / 10).await;
    assert!(
        !waiting.0.is_finished(),
        "a reader that came after the writer has the lock"
    );
    assert!(
        scene
            .elsewhere
            .shared(KEY)
            .try_acquire()
            .await
            .unwrap()
            .is_none()
    );
    let free = Instant::now();
    released(reader).await;
    released(writer.granted_at(free).await).await;
    released(waiting.granted_by(Instant::now()).await.1).await;
}

async fn a_reservation_of_a_writer_ends_on_time(place: Place) {
    let scene = Scene::at(&place).await;
    let free = Instant::now() + RESERVED;
    let guard = acquired(scene.here.exclusive(KEY).min_hold(RESERVED)).await;
    let waiting = scene.waits(scene.there.exclusive(KEY), 0).await;
    released(guard).await;
    released(waiting.granted_at(free).await).await;
}

async fn a_reservation_of_a_reader_ends_on_time(place: Place) {
    let scene = Scene::at(&place).await;
    for dropped in [false, true] {
        let free = Instant::now() + RESERVED;
        let first = acquired(scene.here.shared(KEY).min_hold(RESERVED)).await;
        let second = acquired(scene.elsewhere.shared(KEY).lease(Duration::from_secs(10))).await;
        released(first).await;
        let waiting = scene.waits(scene.there.exclusive(KEY), 0).await;
        if dropped {
            drop(second);
        } else {
            released(second).await;
        }
        released(waiting.granted_at(free).await).await;
    }
}

async fn release_reserves_on_time_after_the_loss_of_the_last_reader(place: Place) {
    let scene = Scene::at(&place).await;
    let free = Instant::now() + RESERVED;
    let first = acquired(scene.here.shared(KEY).min_hold(RESERVED)).await;
    let second = acquired(scene.elsewhere.shared(KEY).max_hold(RESERVED / 4)).await;
    released(first).await;
    let waiting = scene.waits(scene.there.exclusive(KEY), 0).await;
    released(waiting.granted_at(free).await).await;
    drop(second);
}

async fn release_reserves_on_time_behind_a_waiter_that_has_left(place: Place) {
    let scene = Scene::at(&place).await;
    let free = Instant::now() + RESERVED;
    let guard = acquired(scene.here.exclusive(KEY).min_hold(RESERVED)).await;
    let first = scene.waits(scene.elsewhere.exclusive(KEY), 0).await;
    let waiting = scene.waits(scene.there.exclusive(KEY), 1).await;
    released(guard).await;
    sleep(RESERVED / 8).await;
    first.0.abort();
    released(waiting.granted_at(free).await).await;
}

async fn the_lease_of_a_dead_writer_ends_on_time(place: Place) {
    let scene = Scene::at(&place).await;
    let free = scene.dies_holding(KEY, Mode::Exclusive, RESERVED).await;
    let waiting = scene.waits(scene.there.exclusive(KEY), 0).await;
    released(waiting.granted_at(free).await).await;
}

async fn the_lease_of_a_dead_reader_ends_on_time_after_a_release(place: Place) {
    let scene = Scene::at(&place).await;
    let living = acquired(scene.here.shared(KEY)).await;
    let free = scene.dies_holding(KEY, Mode::Shared, RESERVED).await;
    let waiting = scene.waits(scene.there.exclusive(KEY), 0).await;
    released(living).await;
    released(waiting.granted_at(free).await).await;
}

async fn a_hand_off_to_a_dead_process_ends_on_time(place: Place) {
    let scene = Scene::at(&place).await;
    let guard = acquired(scene.here.exclusive(KEY)).await;
    scene.dies_waiting(KEY, Mode::Exclusive, RESERVED).await;
    let waiting = scene.waits(scene.there.exclusive(KEY), 1).await;
    released(guard).await;
    // A majority may grant the lock without the server that has handed it off.
    let (_, guard) = waiting.granted_by(Instant::now() + RESERVED).await;
    released(guard).await;
}

/// Several keys, because poll intervals are random: with polls alone, one of the waiters would be
/// too late.
const KEYS: [&str; 6] = ["a", "b", "c", "d", "e", "f"];

async fn a_dead_writer_in_the_queue_is_passed_over_on_time(place: Place) {
    let scene = Scene::at(&place).await;
    let mut granted = Vec::new();
    let mut readers = Vec::new();
    for key in KEYS {
        readers.push(acquired(scene.here.shared(key)).await);
        let free = scene.dies_waiting(key, Mode::Exclusive, LONG).await + Waiter::STALE_AFTER;
        let waiting = scene.waits_for(scene.there.shared(key), key, 1).await;
        // A majority may grant the lock without the server that has queued the dead process.
        granted.push(waiting.granted_by(free));
    }
    let granted = join_all(granted).await.into_iter().map(|(_, guard)| guard);
    join_all(granted.chain(readers).map(released)).await;
}

fn permits(key: impl fmt::Display) -> String {
    format!("permits-{key}")
}

async fn a_returned_permit_grants_at_once(place: Place) {
    let scene = Scene::at(&place).await;
    let key = permits(KEY);
    let guards = [
        acquired(scene.here.permits(&*key, two())).await,
        acquired(scene.here.permits(&*key, two())).await,
    ];
    let waiting = scene
        .waits_for(scene.there.permits(&*key, two()), &key, 0)
        .await;
    let [first, second] = guards;
    let free = Instant::now();
    released(first).await;
    released(waiting.granted_at(free).await).await;
    let third = acquired(scene.here.permits(&*key, two())).await;
    let waiting = scene
        .waits_for(scene.there.permits(&*key, two()), &key, 0)
        .await;
    let free = Instant::now();
    scene.elsewhere.revoke(&*key).permits().await.unwrap();
    released(waiting.granted_at(free).await).await;
    drop((second, third));
}

async fn a_reservation_of_a_permit_ends_on_time(place: Place) {
    let scene = Scene::at(&place).await;
    let key = permits(KEY);
    let living = acquired(scene.here.permits(&*key, two())).await;
    let free = Instant::now() + RESERVED;
    let first = acquired(scene.elsewhere.permits(&*key, two()).min_hold(RESERVED)).await;
    let waiting = scene
        .waits_for(scene.there.permits(&*key, two()), &key, 0)
        .await;
    released(first).await;
    released(waiting.granted_at(free).await).await;
    released(living).await;
}

async fn acquire_gets_a_dead_holders_permit_on_time_after_a_release(place: Place) {
    let scene = Scene::at(&place).await;
    for attempt in 0.. {
        let key = permits(format!("{KEY}-{attempt}"));
        let living = acquired(scene.here.permits(&*key, two())).await;
        let free = scene
            .dies_holding(&key, Mode::Permits(two()), RESERVED)
            .await;
        let (there, elsewhere) = (&scene.there, &scene.elsewhere);
        let waiting = scene.waits_before(free, there.permits(&*key, two()), &key, 0);
        let Some(waiting) = waiting.await else {
            continue;
        };
        let next = scene.waits_before(free, elsewhere.permits(&*key, two()), &key, 1);
        let Some(next) = next.await else { continue };
        let at_once = Instant::now();
        released(living).await;
        let second = waiting.granted_at(at_once).await;
        let third = next.granted_at(free).await;
        join_all([second, third].map(released)).await;
        return;
    }
}

async fn a_dead_waiter_for_a_permit_is_passed_over_on_time(place: Place) {
    let scene = Scene::at(&place).await;
    let one = NonZeroU32::MIN;
    let (mut held, mut waiting) = (Vec::new(), Vec::new());
    for key in KEYS.map(permits) {
        held.push(acquired(scene.here.permits(&*key, one)).await);
        scene.dies_waiting(&key, Mode::Permits(one), RESERVED).await;
        waiting.push(
            scene
                .waits_for(scene.there.permits(&*key, one), &key, 1)
                .await,
        );
    }
    // The dead waiters are passed over by then.
    sleep(Waiter::STALE_AFTER + RESERVED).await;
    let free = Instant::now();
    join_all(held.into_iter().map(released)).await;
    let granted = join_all(waiting.into_iter().map(|waiting| waiting.granted_at(free))).await;
    join_all(granted.into_iter().map(released)).await;
}

/// A withdrawn queue entry stays at the server until its abandonment arrives, and the request of
/// the next waiter takes as long. A release in between costs that waiter one round trip, and not
/// the lease of a hand-off.
#[tokio::test]
async fn release_that_meets_a_withdrawn_entry_costs_a_round_trip() {
    const ONE_WAY: Duration = Duration::from_millis(100);
    in_time(async {
        let place = Place::redis().await;
        let Place::Redis { url, namespace } = &place else {
            unreachable!("it is on Redis")
        };
        let proxy = Proxy::to_url(url).await;
        let far = Place::Redis {
            url: proxy.url(),
            namespace: namespace.clone(),
        };
        let (here, there) = (place.client().await, far.client().await);
        there
            .exclusive("warm")
            .acquire()
            .await
            .unwrap()
            .release()
            .await
            .unwrap();
        proxy.delay(ToServer, ONE_WAY);
        proxy.delay(ToClient, ONE_WAY);
        for pause in (0..=4).map(|quarters| ONE_WAY * quarters / 2) {
            let guard = acquired(here.exclusive(KEY)).await;
            let withdrawn = tokio::spawn(there.exclusive(KEY).wait(LONG).acquire());
            in_line(&here, KEY, 1).await;
            let acquire = there.shared(KEY).wait(LONG).acquire();
            let task = tokio::spawn(async move {
                let guard = acquire.await.unwrap();
                (Instant::now(), guard)
            });
            let waiting = Waiting(task, LATE);
            sleep(ONE_WAY / 10).await;
            withdrawn.abort();
            sleep(pause).await;
            let free = Instant::now();
            released(guard).await;
            // The request of the next waiter, which is sent at the withdrawal, and its reply.
            let (_, guard) = waiting.granted_by(free + ONE_WAY * 4).await;
            released(guard).await;
        }
    })
    .await;
}
