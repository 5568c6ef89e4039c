//! The cost of the attribute: the memory of the future, and no allocation but that of the key.

use std::num::NonZeroU32;

use lock_runtime::{LockClient, LockError, LockKey, LockSpec, distributed_lock};
use tokio::{runtime, task::yield_now};

const KIB: usize = 1024;

#[distributed_lock(key = "order:{id}")]
async fn one_kib(id: u64, argument: [u8; KIB]) -> Result<u64, LockError> {
    yield_now().await;
    Ok(id + u64::from(argument[0]))
}

#[distributed_lock(keys("order:{id}", "shop:{id}"), held = lock, on_busy = Ok(0), on_lost = ignore)]
async fn everything(id: u64, argument: [u8; KIB]) -> Result<u64, LockError> {
    yield_now().await;
    Ok(id + u64::from(argument[0]) + lock.fences().count() as u64)
}

#[test]
fn attribute_future_with_a_1_kib_argument_is_at_most_3_5_kib() {
    for (name, size) in [
        ("one key", size_of_val(&one_kib(1, [0; KIB]))),
        ("everything", size_of_val(&everything(1, [0; KIB]))),
    ] {
        println!("{name}: {size} bytes");
        assert!(size <= 3 * KIB + KIB / 2, "{name}: {size} bytes");
    }
}

#[distributed_lock(key = "order:{id}", client = locks)]
async fn exclusive(locks: &LockClient, id: u64) -> Result<u64, LockError> {
    Ok(id)
}

#[distributed_lock(key = "order:{id}", client = locks, shared, held = lock, on_busy = Ok(0))]
async fn shared(locks: &LockClient, id: u64) -> Result<u64, LockError> {
    Ok(id + u64::from(lock.is_lost()))
}

#[distributed_lock(key = "order:{id}", client = locks, permits = 2, map_err = Err)]
async fn permitted(locks: &LockClient, id: u64) -> Result<u64, LockError> {
    Ok(id)
}

#[distributed_lock(key = "order:{id}", client = locks, spec = LockSpec::exclusive(), reentrant)]
async fn entered_again(locks: &LockClient, id: u64) -> Result<u64, LockError> {
    Ok(id)
}

fn allocations<T>(
    runtime: &runtime::Runtime,
    call: &impl AsyncFn() -> Result<T, LockError>,
) -> i64 {
    let allocations = allocation_counter::measure(|| {
        runtime.block_on(async { call().await.unwrap() });
    });
    allocations.count_total.cast_signed()
}

/// The allocations that a call makes beside those of another one. Some calls include the growth of
/// a table or a timer, and all may include a log line while another test has a subscriber: the
/// calls take turns, and the median of the differences counts.
fn added<T, U>(
    runtime: &runtime::Runtime,
    call: impl AsyncFn() -> Result<T, LockError>,
    other: impl AsyncFn() -> Result<U, LockError>,
) -> i64 {
    let turns = 0..51;
    let added = turns.map(|_| allocations(runtime, &call) - allocations(runtime, &other));
    let mut added: Vec<_> = added.collect();
    added.sort_unstable();
    added[added.len() / 2]
}

/// The key is one allocation, regardless of its parts.
const THE_KEY: i64 = 1;

#[test]
fn attribute_allocates_nothing_but_the_key_beside_the_runtime() {
    let runtime = runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let locks = runtime.block_on(async { LockClient::in_memory() });
    let key = LockKey::new("order:7").unwrap();
    let two = NonZeroU32::new(2).unwrap();
    let by_hand = async |spec: LockSpec| locks.request(&key, spec).run(async |_| 7).await;

    for (name, added) in [
        (
            "exclusive",
            added(
                &runtime,
                async || exclusive(&locks, 7).await,
                async || by_hand(LockSpec::exclusive()).await,
            ),
        ),
        (
            "shared",
            added(
                &runtime,
                async || shared(&locks, 7).await,
                async || by_hand(LockSpec::shared()).await,
            ),
        ),
        (
            "permits",
            added(
                &runtime,
                async || permitted(&locks, 7).await,
                async || by_hand(LockSpec::permits(two)).await,
            ),
        ),
        (
            "entered again",
            added(
                &runtime,
                async || {
                    locks
                        .request(&key, LockSpec::exclusive())
                        .run(async |_| entered_again(&locks, 7).await)
                        .await?
                },
                async || {
                    let inner = async |_| by_hand(LockSpec::exclusive().reentrant()).await;
                    locks
                        .request(&key, LockSpec::exclusive())
                        .run(inner)
                        .await?
                },
            ),
        ),
    ] {
        assert_eq!(added, THE_KEY, "{name}");
    }
}
