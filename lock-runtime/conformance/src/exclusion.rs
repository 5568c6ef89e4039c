//! Exclusion between the tasks of several processes, in a storm.

use std::{
    env,
    sync::{Arc, LazyLock},
    time::{Duration, Instant},
};

use lock_runtime::{LockKey, LockKind, operator::Waiter, store::Store};

use super::{
    SEED,
    storm::{KEYS, Nanos, Plan, in_nanos},
    subject::{Subject, eventually, unique},
};

/// The number of clients, which are processes to the store.
const CLIENTS: usize = 3;
/// The number of tasks in all of them.
const TASKS: usize = 15;
const LENGTH: Duration = Duration::from_millis(2500);
/// Longer than a lock may be free while a request waits for it. So a lock that a store has kept
/// until the end of its lease is noticed.
const LEASE: Duration = Duration::from_secs(3);
/// The store's events may be lost, so a waiter may learn of its grant from its next poll.
const HANDOVER: Duration = Waiter::POLL_INTERVAL.saturating_add(Duration::from_millis(500));
/// The same of a store that sends none: the waiter before may be granted the lock after that poll,
/// and give up before its own.
const HANDOVER_BY_POLLS: Duration = HANDOVER.saturating_add(Waiter::POLL_INTERVAL);

/// Checks exclusion and fencing tokens in a storm: tasks of several clients acquire exclusive
/// locks, readers, permits and several keys, with and without waiting, with minimum and maximum
/// hold times, and drop some of their requests and guards.
///
/// No holder relies on a lock that another one holds, fencing tokens are unique and increase, no
/// lock is free for long while a request waits for it, and at the end nothing is left.
///
/// The environment variable `LOCK_CONFORMANCE_SEED` repeats the choices of a storm, but not their
/// times.
///
/// # Panics
/// If the store breaks one of these promises.
pub async fn holders_exclude_each_other(make: &impl AsyncFn() -> Arc<dyn Store>) {
    let mut subjects = Vec::new();
    for _ in 0..CLIENTS {
        subjects.push(Subject::of(make).await);
    }
    let seed = env::var(SEED).ok().and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or_else(|| rand::random::<u32>().into());
    println!("{SEED}={seed}");
    let limits = subjects[0].limits;
    let lease = subjects[0].at_least(LEASE);
    let plan = Plan {
        tasks: TASKS,
        lease,
        brief_lease: subjects[0].at_least(Duration::from_millis(150)),
        permits: limits.permits,
        several_at_once: limits
            .keys_at_once
            .is_none_or(|most| most.get() >= KEYS.len() - 1),
        prefix: format!("{}:", unique()),
        seed,
        ..Plan::new(nanos)
    };
    let clients: Vec<_> = subjects.iter().map(Subject::client).collect();
    let handover = match limits.push {
        true => HANDOVER,
        false => HANDOVER_BY_POLLS,
    };
    let report = plan.run(&clients, LENGTH, handover).await;
    for client in &clients {
        client.shutdown().await;
    }
    println!("{report}");
    report.assert_all();
    for key in KEYS {
        let key = LockKey::new(format!("{}{key}", plan.prefix)).expect("a short name");
        nothing_is_left(&subjects[0], &key).await;
    }
}

async fn nothing_is_left(subject: &Subject, key: &LockKey) {
    let kinds = if subject.limits.permits {
        &[LockKind::Lock, LockKind::Permits][..]
    } else {
        &[LockKind::Lock]
    };
    for kind in kinds {
        eventually("nothing is left after the last release", async || {
            let found = subject.inspect_key(key, *kind).await;
            found.holders.is_empty() && found.waiters.is_empty()
        })
        .await;
    }
}

/// The time since the first call.
fn nanos() -> Nanos {
    static ZERO: LazyLock<Instant> = LazyLock::new(Instant::now);
    in_nanos(ZERO.elapsed())
}
