//! Delay of the next holder: many clients wait, one at a time holds the lock for a while, and the
//! time from the call of `release` to the return of the next acquire is measured. All clients are
//! in this process, so one clock serves. The limit is one round trip.

use std::{
    pin::pin,
    time::{Duration, Instant},
};

use futures_util::future::join_all;
use lock_runtime::LockClient;
use lock_tests::redis_server::RedisServer;
use tokio::{sync::watch, time::sleep};

use crate::{
    contest::{Contest, LIMIT, Round},
    raw::{self, Raw, RawTrip},
    report::Row,
    subject::{Ours, Rslock, Subject, connect},
    turns::{Watch, acquire_before, repeat, together},
};

/// Number of waiters, each with its own client; one more client is the holder.
const WAITERS: usize = 100;
const HELD: Duration = Duration::from_millis(50);
/// Factor for the slice, as there are only 20 turns in a second.
const LONGER: u32 = 3;

pub(crate) async fn measure(slice: Duration) -> Vec<Row> {
    let server = RedisServer::start().await;
    let client = raw::client(&server.url());
    let ours = &connect(&server.url(), WAITERS + 1).await;
    let raw = &Raw::connect(&client).await;
    let peers = &(0..=WAITERS)
        .map(|_| Rslock::manager(&client))
        .collect::<Vec<_>>();
    let contest = Contest::new("wait", WAITERS, slice)
        .subject("lock-runtime", |round, slice| {
            in_turn(
                slice,
                ours.iter()
                    .map(move |locks| Ours::new(locks, format!("bench:{round}"))),
            )
        })
        .subject(LIMIT, |_, slice| {
            together(slice, [RawTrip(raw.clone())], |trip, watch| {
                repeat(trip, 1, watch)
            })
        })
        .subject("rslock", |round, slice| {
            in_turn(
                slice,
                peers
                    .iter()
                    .map(move |manager| Rslock::new(manager, format!("rslock:{round}"))),
            )
        });
    let mut rows = contest.run().await;
    // Turns of 50 ms are not comparable with round trips, and their number is of no interest.
    for row in &mut rows {
        (row.ratio_to_limit, row.served_min, row.served_max) = (None, None, None);
    }
    join_all(ours.iter().map(LockClient::shutdown)).await;
    rows
}

fn in_turn<S: Subject>(
    slice: Duration,
    subjects: impl Iterator<Item = S>,
) -> impl Future<Output = Round> {
    let (line, _) = watch::channel(Line::default());
    together(slice * LONGER, subjects, move |subject, watch| {
        hold_in_turn(subject, line.clone(), watch)
    })
}

/// State that the clients share.
#[derive(Clone, Copy, Default)]
struct Line {
    grants: u64,
    /// Time when the last holder was about to release.
    released: Option<Instant>,
}

async fn hold_in_turn(subject: impl Subject, line: watch::Sender<Line>, watch: Watch) -> u64 {
    let mut end = pin!(watch.end());
    let mut changes = line.subscribe();
    let mut turns = 0;
    while let Some(guard) = acquire_before(&subject, end.as_mut()).await {
        let acquired = Instant::now();
        let Line {
            grants: before,
            released,
        } = *line.borrow();
        if let Some(released) = released {
            watch.record(acquired - released, 1);
        }
        line.send_modify(|line| line.grants += 1);
        watch.granted();
        sleep(HELD).await;
        line.send_modify(|line| line.released = Some(Instant::now()));
        subject.release(guard).await;
        turns += 1;
        // A client that requested the lock again at once would be the first: the delay of a client
        // that waits is measured.
        tokio::select! {
            _ = changes.wait_for(|line| line.grants > before + 1) => {}
            () = end.as_mut() => break,
        }
    }
    turns
}
