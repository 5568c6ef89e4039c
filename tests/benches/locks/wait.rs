//! How late the next one starts: many wait, one at a time holds the lock for a while, and what is timed is how long after the
//! call of `release` the next acquire has returned. All clients are in this process, so one clock serves. The limit is
//! one round trip.

use std::{
    pin::pin,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use futures_util::future::join_all;
use lock_tests::redis_server::RedisServer;
use tokio::time::sleep;

use crate::{
    contest::{Contest, LIMIT, Round},
    raw::{self, Raw, RawTrip},
    report::Row,
    subject::{Ours, Rslock, Subject, connect},
    turns::{Watch, acquire_before, repeat, together},
};

/// In clients of their own; one more holds.
const WAITERS: usize = 100;
const HELD: Duration = Duration::from_millis(50);
/// There are only 20 turns in a second.
const LONGER: u32 = 3;

pub(crate) async fn measure(slice: Duration) -> Vec<Row> {
    let server = RedisServer::start().await;
    let client = raw::client(&server.url());
    let ours = &connect(&server.url(), WAITERS + 1).await;
    let raw = &Raw::connect(&client).await;
    let peers = &(0..=WAITERS).map(|_| Rslock::manager(&client)).collect::<Vec<_>>();
    // Every round has a key of its own: on the last one may still lie what the end has cut off.
    let contest = Contest::new("wait", WAITERS)
        .subject("lock-runtime", |round| {
            in_turn(slice, ours.iter().map(move |locks| Ours::new(locks, format!("bench:{round}"))))
        })
        .subject(LIMIT, |_| together(slice, [RawTrip(raw.clone())], |trip, watch| repeat(trip, 1, watch)))
        .subject("rslock", |round| {
            in_turn(slice, peers.iter().map(move |manager| Rslock::new(manager, format!("rslock:{round}"))))
        });
    let mut rows = contest.run().await;
    // Turns that last 50 ms are not to be compared with round trips, nor is their number of interest.
    for row in &mut rows {
        (row.ratio_to_limit, row.served_min, row.served_max) = (None, None, None);
    }
    join_all(ours.iter().map(|locks| locks.shutdown())).await;
    rows
}

fn in_turn<S: Subject>(slice: Duration, subjects: impl Iterator<Item = S>) -> impl Future<Output = Round> {
    let released = Arc::new(Mutex::new(None));
    together(slice * LONGER, subjects, move |subject, watch| hold_in_turn(subject, released.clone(), watch))
}

/// `released` is when the one before was about to release.
async fn hold_in_turn(subject: impl Subject, released: Arc<Mutex<Option<Instant>>>, watch: Watch) -> u64 {
    let mut end = pin!(watch.end());
    let mut turns = 0;
    while let Some(guard) = acquire_before(&subject, end.as_mut()).await {
        let acquired = Instant::now();
        if let Some(released) = *released.lock().expect("nobody panics under it") {
            watch.record(acquired - released, 1);
        }
        sleep(HELD).await;
        *released.lock().expect("nobody panics under it") = Some(Instant::now());
        subject.release(guard).await;
        turns += 1;
    }
    turns
}
