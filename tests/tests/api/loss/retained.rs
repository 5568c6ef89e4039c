//! A process that retains a lock is killed, stopped or cut off: the lock is free when its lease
//! ends, and the process does not use it any more.

use std::time::Duration;

use lock_runtime::{LockClient, LockGuard};
use lock_tests::{
    Proxy, Worker,
    place::{LONG, Place, in_time, on_every_store},
};
use tokio::time::sleep;

use super::LEASE;

const WORKER: &str = env!("CARGO_BIN_EXE_lock-worker");

/// Returns the URL of a store that several processes can use and that retains locks.
fn url(place: &Place) -> Option<&str> {
    match place {
        Place::Redis { url, .. }
        | Place::Postgres { url, .. }
        | Place::Etcd { url, .. }
        | Place::ZooKeeper { url, .. } => Some(url),
        Place::Memory(_) | Place::Majority(_) => None,
    }
}

/// Starts a process that retains "a". Returns the fencing token of its latest use.
async fn retaining(url: &str, place: &Place) -> (Worker, u64) {
    // An idle lock is released while a third of its lease is left.
    let lease = (2 * LEASE).as_millis().to_string();
    let arguments = ["retain", "--url", url, "--namespace", place.namespace()];
    let mut worker = Worker::spawn(WORKER, &[&arguments[..], &["--lease-ms", &lease]].concat());
    let first = used(&mut worker).await;
    worker.say("again").await;
    // The store would draw a number by its clock.
    let second = used(&mut worker).await;
    assert_eq!(second, first + 1, "it is not retained");
    (worker, second)
}

async fn used(worker: &mut Worker) -> u64 {
    let line = worker.line().await.expect("it uses the lock");
    line.parse().expect("a fencing token")
}

/// Acquires "a", which is not free before its lease ends.
async fn overtake(locks: &LockClient, fence: u64) -> LockGuard {
    let request = locks.exclusive("a").wait(LONG);
    let early = request.clone().try_acquire().await.unwrap();
    assert!(early.is_none(), "it is free at once");
    let guard = in_time(request.acquire()).await.unwrap();
    assert!(guard.fence().number() > fence);
    guard
}

/// Lets the process use the lock again while another one holds it.
async fn uses_it_later(mut worker: Worker, guard: LockGuard) {
    worker.say("again").await;
    sleep(Duration::from_millis(300)).await;
    let overtaken_by = guard.fence().number();
    guard.release().await.unwrap();
    assert!(used(&mut worker).await > overtaken_by);
}

on_every_store! {
    lock_that_a_killed_process_retains_is_free_when_its_lease_ends,
    stopped_process_does_not_use_the_lock_that_it_retained,
}

async fn lock_that_a_killed_process_retains_is_free_when_its_lease_ends(place: Place) {
    let Some(url) = url(&place) else { return };
    let locks = place.client().await;
    let (worker, fence) = retaining(url, &place).await;
    // This kills it.
    drop(worker);
    overtake(&locks, fence).await.release().await.unwrap();
}

async fn stopped_process_does_not_use_the_lock_that_it_retained(place: Place) {
    let Some(url) = url(&place) else { return };
    let locks = place.client().await;
    let (mut worker, fence) = retaining(url, &place).await;
    worker.stop();
    let guard = overtake(&locks, fence).await;
    worker.resume();
    uses_it_later(worker, guard).await;
}

#[tokio::test]
async fn a_process_that_is_cut_off_does_not_use_the_lock_that_it_retained() {
    let place = Place::redis().await;
    let proxy = Proxy::to_url(url(&place).unwrap()).await;
    let locks = place.client().await;
    let (worker, fence) = retaining(&proxy.url(), &place).await;
    proxy.black_hole();
    let guard = overtake(&locks, fence).await;
    proxy.let_through().await;
    uses_it_later(worker, guard).await;
}
