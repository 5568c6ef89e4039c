//! Processes that are killed or stopped while they do work once.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    time::Duration,
};

use futures_util::future::join_all;
use lock_runtime::OnceEntry;
use lock_tests::{
    Proxy, Worker,
    place::{LONG, Place, in_time, times_as_long},
    proxy::Direction,
    unique,
};
use tokio::time::sleep;

const WORKER: &str = env!("CARGO_BIN_EXE_lock-worker");

/// The number of rounds. In each, two processes with the same keys are killed.
const ROUNDS: usize = 30;
/// Long enough for the calls of a step on a busy machine; a key is free after it.
const LEASE: Duration = Duration::from_millis(400);
/// The longest time between the first line of a process and its death, in which it makes some
/// dozens of calls.
const LIFE: Duration = Duration::from_millis(80);

/// The lines of the processes about a key.
#[derive(Debug, Default)]
struct Said {
    /// The values of bodies that ran to their end.
    ended: BTreeSet<String>,
    /// The results that were returned.
    done: BTreeSet<String>,
}

fn start(url: &str, namespace: &str, lease: Duration, how: &[&str]) -> Worker {
    let lease = lease.as_millis().to_string();
    let arguments = ["--url", url, "--namespace", namespace, "--lease-ms", &lease];
    Worker::spawn(WORKER, &[&["once"], &arguments[..], how].concat())
}

/// Returns the lines of a process that is killed at a random moment.
async fn killed(mut worker: Worker) -> Vec<String> {
    let first = worker.line().await.expect("it begins");
    sleep(LIFE.mul_f64(rand::random())).await;
    worker.kill().await;
    let mut lines = worker.lines().await;
    lines.insert(0, first);
    lines
}

/// After the death of all processes each key has one result, of a body that ran to its end, or is
/// free after its lease.
async fn leave_each_key_done_or_free(place: Place, url: &str) {
    let proxy = Proxy::to_url(url).await;
    // Most moments are within a call.
    for direction in [Direction::ToServer, Direction::ToClient] {
        proxy.delay(direction, Duration::from_millis(1));
    }
    let mut keys: BTreeMap<String, Said> = BTreeMap::new();
    for round in 0..ROUNDS * times_as_long() {
        let prefix = format!("{round}:");
        let workers = [0, 1].map(|_| start(&proxy.url(), place.namespace(), LEASE, &[&prefix]));
        for line in join_all(workers.map(killed)).await.concat() {
            let words: Vec<_> = line.split(' ').collect();
            let said = keys.entry(format!("{prefix}{}", words[1])).or_default();
            match words[..] {
                ["began", ..] | ["failed", _] => continue,
                ["ended", _, value] => said.ended.insert(value.to_owned()),
                ["done", _, value] => said.done.insert(value.to_owned()),
                _ => panic!("{line}"),
            };
        }
    }
    let clients = [place.client().await, place.client().await];
    let left = keys.iter().map(async |(key, said)| {
        let begun = clients[0].once(&**key).wait(LONG).begin().await;
        match begun.unwrap_or_else(|error| panic!("{error}: {said:?}")) {
            OnceEntry::Done(done) => {
                let value = String::from_utf8(done.value).unwrap();
                assert!(said.ended.contains(&value), "{key} is {value}: {said:?}");
                assert!(said.done.iter().all(|it| *it == value), "{key}: {said:?}");
                true
            }
            OnceEntry::Vacant(guard) => {
                assert!(said.done.is_empty(), "{key} is free: {said:?}");
                guard.complete(b"at last").await.unwrap();
                let done = clients[1].once(&**key).stored().await.unwrap();
                assert_eq!(done.unwrap().value, b"at last");
                false
            }
        }
    });
    let left = join_all(left).await;
    let done = left.iter().filter(|is_done| **is_done).count();
    // Most processes die during the work of a key, after that of some others.
    assert!(done > ROUNDS, "{done} of {} are done", left.len());
    assert!(left.len() - done > ROUNDS / 10, "{done} of {}", left.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_process_leaves_each_key_done_or_free() {
    let place = Place::redis().await;
    let Place::Redis { url, .. } = place.clone() else {
        unreachable!("on Redis");
    };
    in_time(leave_each_key_done_or_free(place, &url)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_process_leaves_each_key_done_or_free_on_postgres() {
    let place = Place::postgres().await;
    let Place::Postgres { url, .. } = place.clone() else {
        unreachable!("on PostgreSQL");
    };
    in_time(leave_each_key_done_or_free(place, &url)).await;
}

/// A process that was stopped for longer than its lease records nothing, whether another one has
/// done the work meanwhile or not.
async fn records_nothing_after_a_pause(place: Place) {
    let (Place::Redis { url, namespace }
    | Place::Postgres { url, namespace }
    | Place::Etcd { url, namespace }) = &place
    else {
        unreachable!("no store of several processes");
    };
    let locks = place.client().await;
    let lease = Duration::from_millis(1500);
    for is_done in [true, false] {
        let key = unique("job");
        let mut worker = start(url, namespace, lease, &["--one", &key]);
        assert_eq!(worker.line().await.as_deref(), Some("began"));
        // The process prints the line just before it waits, and is to be stopped while it waits.
        sleep(lease / 10).await;
        worker.stop();
        let once = || locks.once(&*key).wait(LONG);
        let fence = match is_done {
            true => {
                let ran = once().run_bytes(async |_| Ok::<_, io::Error>(b"next".to_vec()));
                let ran = ran.await.unwrap().unwrap();
                assert!(!ran.is_replay);
                Some(ran.fence)
            }
            false => {
                let guard = locks.exclusive(&*key).wait(LONG).acquire().await.unwrap();
                guard.release().await.unwrap();
                None
            }
        };
        worker.say("go on").await;
        worker.resume();
        assert_eq!(worker.line().await.as_deref(), Some("lost_expired"));
        let stored = once().stored().await.unwrap();
        let stored = stored.map(|it| (it.value, it.fence));
        assert_eq!(stored, fence.map(|fence| (b"next".to_vec(), fence)));
        assert!(worker.finish().await.success());
    }
}

#[tokio::test]
async fn a_result_after_a_pause_is_refused() {
    let place = Place::redis().await;
    in_time(records_nothing_after_a_pause(place)).await;
}

#[tokio::test]
async fn a_result_after_a_pause_is_refused_on_postgres() {
    let place = Place::postgres().await;
    in_time(records_nothing_after_a_pause(place)).await;
}

#[tokio::test]
async fn a_result_after_a_pause_is_refused_on_etcd() {
    let place = Place::etcd().await;
    in_time(records_nothing_after_a_pause(place)).await;
}
