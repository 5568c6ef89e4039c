//! A lottery: a job that fires on every replica of a service at once, and must run on only one of
//! them.
//!
//! The job is in `draw.rs`: the replica that gets the lock draws, the others skip. `min_hold`
//! keeps the lock for a while after the draw, so that a replica whose clock is behind does not
//! draw a second time.

mod draw;
mod private_redis;
mod replica;

use std::{
    process::ExitCode,
    time::{Duration, SystemTime},
};

use clap::{Parser, value_parser};
use futures_util::future::try_join_all;
use lock_examples::{run_id, start};
use lock_runtime::LockClient;

use crate::{draw::Outcome, private_redis::PrivateRedis, replica::Replica};

/// The time for every replica to receive its instant.
const NOTICE: Duration = Duration::from_millis(200);
/// The delay of the replica with the slow clock, after the draw.
const LATENESS: Duration = Duration::from_millis(500);

/// Draws ten winners once, although every replica of the service starts the draw
///
/// Starts the replicas as separate processes that share a Redis, and fires all of them at the
/// same instant, except for a late one, whose clock is behind. The run fails unless exactly one
/// replica drew and all others skipped.
///
/// Without --redis, it starts a redis-server for the time of the run. If none is installed, the
/// replicas are tasks in one process, with the lock in memory.
#[derive(Debug, Parser)]
#[command(name = "lottery")]
struct Options {
    /// The number of replicas
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = value_parser!(u64).range(1..=100))]
    replicas: u64,

    /// Keep the lock in this Redis, such as redis://user:password@host:6379/0
    #[arg(long, value_name = "URL")]
    redis: Option<String>,

    /// Be a replica on behalf of a parent process, under the name of its run.
    #[arg(long, value_name = "RUN", hide = true, requires = "redis")]
    child_of: Option<String>,
}

fn main() -> ExitCode {
    let options = Options::parse();
    start("lottery", async move {
        match (&options.child_of, &options.redis) {
            (Some(run), Some(url)) => replica::follow_orders(url, run).await,
            _ => hold_lottery(&options).await,
        }
    })
}

async fn hold_lottery(options: &Options) -> anyhow::Result<ExitCode> {
    println!(
        "lottery: {} replicas fire the same job at the same instant, the last one late. One draws, the others skip:\n\
         #[distributed_lock(key = \"lottery:draw\", global, no_wait, min_hold = \"3s\", lease = \"10s\")]",
        options.replicas
    );
    // Alive as long as the replicas need it.
    let own = if options.redis.is_none() {
        PrivateRedis::start().await?
    } else {
        None
    };
    let url = options
        .redis
        .as_deref()
        .or(own.as_ref().map(PrivateRedis::url));
    let Some(url) = url else {
        println!(
            "No redis-server is installed, so the replicas are tasks in one process, and the lock is in memory.\n"
        );
        let locks = LockClient::in_memory();
        locks.install()?;
        let ended = draw_once((0..options.replicas).map(|_| Replica::Task).collect()).await;
        locks.shutdown().await;
        return ended;
    };
    let server = if own.is_some() {
        "a Redis of their own, started for this run"
    } else {
        "your Redis"
    };
    println!("The replicas are processes; the lock is in {server}.\n");
    // Connects once first, because one error message is better than one per replica.
    LockClient::connect(url).await?.shutdown().await;
    let run = run_id("lottery");
    draw_once(try_join_all((0..options.replicas).map(|_| Replica::start(url, &run))).await?).await
}

/// Fires every replica once, and checks that only one of them drew.
async fn draw_once(mut replicas: Vec<Replica>) -> anyhow::Result<ExitCode> {
    let (late, on_time) = match replicas.split_last_mut() {
        Some((late, on_time)) if !on_time.is_empty() => (Some(late), on_time),
        _ => (None, &mut replicas[..]),
    };
    let instant = SystemTime::now() + NOTICE;
    let mut outcomes =
        try_join_all(on_time.iter_mut().map(|replica| replica.fire(instant))).await?;
    if let Some(late) = late {
        // The draw is over at this time. Without `min_hold` the lock would be free.
        outcomes.push(late.fire(SystemTime::now() + LATENESS).await?);
    }
    try_join_all(replicas.into_iter().map(Replica::end)).await?;

    let (mut draws, mut skipped) = (0, 0);
    for (number, outcome) in (1..).zip(&outcomes) {
        let lateness = if number > 1 && number == outcomes.len() {
            " (late)"
        } else {
            ""
        };
        println!("replica {number}{lateness}: {outcome}");
        match outcome {
            Outcome::Drew(_) => draws += 1,
            Outcome::Skipped => skipped += 1,
            Outcome::Failed(_) => {}
        }
    }
    println!(
        "\nreplicas={} draws={draws} skipped={skipped}",
        outcomes.len()
    );
    let kept = draws == 1 && draws + skipped == outcomes.len();
    Ok(if kept {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}
