//! The model test: random operations on the in-memory store and on a Redis server get the same
//! replies.
//!
//! The seed alone determines a sequence. The sequences run concurrently, each with its own keys,
//! over the one connection of one [`RedisStore`]. A sequence that fails prints its seed and every
//! step with both replies; `LOCK_TESTS_SEED` sets the first seed.

mod answer;
mod step;

use std::{fmt::Write as _, sync::Arc, time::Duration};

use lock_runtime::store::{MemoryStore, QuorumMember, redis::RedisStore};
use lock_tests::RedisServer;
use tokio::task::JoinSet;

use self::{answer::Side, step::Steps};

const SEQUENCES: u64 = 1_000;
const STEPS: usize = 110;
/// Number of sequences in progress at a time: enough that those that sleep cost no time.
const BESIDE: u64 = 100;

#[tokio::test]
async fn redis_answers_as_memory_does() {
    let server = RedisServer::start().await;
    let redis = Arc::new(RedisStore::connect(&server.url(), "model").await.unwrap());
    compare(redis, None).await;
}

#[tokio::test]
async fn server_of_a_quorum_answers_as_memory_does() {
    let servers = RedisServer::builder().start_all(3).await;
    let urls: Vec<_> = servers.iter().map(RedisServer::url).collect();
    let urls: Vec<_> = urls.iter().map(String::as_str).collect();
    let members = RedisStore::members(&urls, "model", Duration::ZERO).await;
    let (_, member) = members.unwrap().swap_remove(0);
    // The uptime is in whole seconds.
    tokio::time::sleep(Duration::from_millis(1100)).await;
    let channel = format!("model:{}:quorum", "0".repeat(32));
    // A server grants nothing to an heir whose channel has no subscriber.
    let client = redis::Client::open(urls[0]).unwrap();
    let mut subscription = client.get_async_pubsub().await.unwrap();
    subscription.subscribe(&channel).await.unwrap();
    compare(member, Some(channel.into())).await;
}

async fn compare(redis: Arc<dyn QuorumMember>, channel: Option<Arc<str>>) {
    let memory = Arc::new(MemoryStore::new());
    let first: u64 = std::env::var("LOCK_TESTS_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok())
        .unwrap_or_default();
    let mut sequences = JoinSet::new();
    let mut operations = 0;
    for seed in first..first + SEQUENCES {
        if sequences.len() as u64 >= BESIDE {
            operations += finished(sequences.join_next().await);
        }
        sequences.spawn(sequence(
            seed,
            memory.clone(),
            redis.clone(),
            channel.clone(),
        ));
    }
    while !sequences.is_empty() {
        operations += finished(sequences.join_next().await);
    }
    assert!(operations >= 100_000, "{operations} operations");
}

fn finished(sequence: Option<Result<usize, tokio::task::JoinError>>) -> usize {
    match sequence {
        Some(Ok(operations)) => operations,
        Some(Err(error)) => std::panic::resume_unwind(error.into_panic()),
        None => 0,
    }
}

async fn sequence(
    seed: u64,
    memory: Arc<MemoryStore>,
    redis: Arc<dyn QuorumMember>,
    channel: Option<Arc<str>>,
) -> usize {
    let mut steps = Steps::new(seed, channel.is_some());
    let (mut in_memory, mut on_redis) = (
        Side::new(memory),
        Side::new(redis).remembering().with_channel(channel),
    );
    let mut story = String::new();
    for number in 1..=STEPS {
        let step = steps.next();
        let (expected, found) = (in_memory.take(&step).await, on_redis.take(&step).await);
        let _ = writeln!(
            story,
            "{number:3}. {step}\n     memory: {expected:?}\n      redis: {found:?}"
        );
        assert!(
            expected.is_ok() && expected == found,
            "seed {seed}:\n{story}"
        );
        steps.learn(&step, expected.unwrap_or_default());
        if step.is_short() {
            tokio::time::sleep(2 * Duration::from_millis(step::SHORT_MS)).await;
        }
    }
    STEPS
}
