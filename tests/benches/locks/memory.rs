//! Acquire and release in memory, one task.

use std::time::Duration;

use lock_runtime::{LockClient, LockKey};

use crate::{
    ROUNDS,
    report::{Report, Round, latencies},
};

/// So many turns are timed together, as reading the clock costs a good part of one.
const TURNS: u32 = 1_000;

pub(crate) async fn measure(report: &mut Report, slice: Duration) {
    let locks = LockClient::in_memory();
    let key = LockKey::new("bench").expect("a short name is valid");
    let mut rounds = Vec::new();
    for round in 0..=ROUNDS {
        eprintln!("memory, 1 task, round {round} of {ROUNDS}");
        let (locks, key) = (locks.clone(), key.clone());
        // A task of its own, as in a service: the main future of a multi-threaded runtime is on another thread.
        let task = tokio::spawn(async move {
            let mut latencies = latencies();
            let start = std::time::Instant::now();
            let mut before = start;
            while before - start < slice {
                for _ in 0..TURNS {
                    let guard = locks.exclusive(&key).acquire().await.expect("nobody else wants this key");
                    guard.release().await.expect("it is held");
                }
                let after = std::time::Instant::now();
                let each = ((after - before) / TURNS).as_nanos() as u64;
                latencies.record_n(each, u64::from(TURNS)).expect("the histogram grows");
                before = after;
            }
            Round::new(start.elapsed(), &latencies)
        });
        let measured = task.await.expect("the subject does not panic");
        if round > 0 {
            rounds.push(measured);
        }
    }
    report.compare("memory", 1, &rounds, None);
    locks.shutdown().await;
}
