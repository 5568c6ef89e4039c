//! Every argument reaches the lock.

use std::{
    num::NonZeroU32,
    sync::{Arc, LazyLock, Mutex},
    time::Duration,
};

use lock_runtime::{
    LockClient, LockError, LockErrorKind, LockSpec, Loss, Mode, OnLost, distributed_lock,
};
use lock_tests::FencedResource;
use tokio::{
    task::{JoinSet, yield_now},
    time::{Instant, sleep},
};

use super::{WOULD_WAIT, holders, with_client};

const LEASE: Duration = Duration::from_secs(7);

async fn ttl(locks: &LockClient) -> Duration {
    locks.inspect("a").await.unwrap().holders[0].ttl.unwrap()
}

#[distributed_lock(key = "a", global, lease = "1m 5s")]
async fn lease(locks: &LockClient) -> Result<Duration, LockError> {
    Ok(ttl(locks).await)
}

#[distributed_lock(key = "a", global, lease = LEASE * 2)]
async fn lease_expression(locks: &LockClient) -> Result<Duration, LockError> {
    Ok(ttl(locks).await)
}

#[distributed_lock(key = "a", global)]
async fn defaults(locks: &LockClient) -> Result<Duration, LockError> {
    Ok(ttl(locks).await)
}

#[distributed_lock(key = "a", global, wait = "250ms")]
async fn wait() -> Result<(), LockError> {
    Ok(())
}

#[distributed_lock(key = "a", global, no_wait)]
async fn no_wait() -> Result<(), LockError> {
    Ok(())
}

#[distributed_lock(key = "a", global, shared)]
async fn read(locks: &LockClient) -> Result<usize, LockError> {
    assert_eq!(locks.inspect("a").await?.holders[0].mode, Mode::Shared);
    sleep(LEASE).await;
    Ok(holders(locks, "a").await)
}

#[distributed_lock(key = "a", global, exclusive, no_wait)]
async fn write(locks: &LockClient) -> Result<Mode, LockError> {
    Ok(locks.inspect("a").await?.holders[0].mode)
}

#[distributed_lock(key = "a", global, permits = 2, no_wait)]
async fn permits(locks: &LockClient) -> Result<usize, LockError> {
    yield_now().await;
    Ok(locks.inspect("a").permits().await?.holders.len())
}

const THREE: NonZeroU32 = NonZeroU32::new(3).unwrap();

#[distributed_lock(key = "b", global, permits = THREE)]
async fn permits_expression(locks: &LockClient) -> Result<Mode, LockError> {
    Ok(locks.inspect("b").permits().await?.holders[0].mode)
}

#[distributed_lock(key = "a", global, max_waiters = 0)]
async fn max_waiters() -> Result<(), LockError> {
    Ok(())
}

#[distributed_lock(key = "a", global, max_waiters = [1, 2].len())]
async fn max_waiters_expression() -> Result<(), LockError> {
    Ok(())
}

#[distributed_lock(key = "a", global, spec = LockSpec::exclusive().reentrant(), no_reentrant)]
async fn no_reentrant(depth: u32) -> Result<(), LockError> {
    match depth {
        0 => Ok(()),
        depth => Box::pin(no_reentrant(depth - 1)).await,
    }
}

#[distributed_lock(key = "a", global, min_hold = "5s")]
async fn min_hold() -> Result<(), LockError> {
    Ok(())
}

#[distributed_lock(key = "a", global, max_hold = "5s")]
async fn max_hold(done: &mut bool) -> Result<(), LockError> {
    sleep(LEASE).await;
    *done = true;
    Ok(())
}

#[distributed_lock(key = "a", global, reentrant)]
async fn reentrant(depth: u32) -> Result<u32, LockError> {
    yield_now().await;
    if depth == 0 {
        Ok(0)
    } else {
        Ok(1 + Box::pin(reentrant(depth - 1)).await?)
    }
}

#[distributed_lock(key = "a", global)]
async fn not_reentrant(depth: u32) -> Result<u32, LockError> {
    yield_now().await;
    if depth == 0 {
        Ok(0)
    } else {
        Ok(1 + Box::pin(not_reentrant(depth - 1)).await?)
    }
}

#[distributed_lock(key = "a", global, no_renew, lease = "3s")]
async fn no_renew(done: &mut bool) -> Result<(), LockError> {
    sleep(LEASE).await;
    *done = true;
    Ok(())
}

#[derive(Clone)]
struct Config {
    lock: LockSpec,
}

#[distributed_lock(key = "a", global, spec = config.lock)]
async fn spec(config: &Config, locks: &LockClient) -> Result<Duration, LockError> {
    Ok(ttl(locks).await)
}

#[distributed_lock(key = "a", global, spec = &*config.lock().unwrap(), lease = "9s", reentrant)]
async fn spec_and_more(config: Mutex<LockSpec>, locks: &LockClient) -> Result<Duration, LockError> {
    // The guard of the mutex is not kept: the body can take it, and own it.
    let config = config;
    assert_eq!(config.lock().unwrap().mode(), Mode::Shared);
    assert_eq!(locks.inspect("a").await?.holders[0].mode, Mode::Shared);
    Ok(ttl(locks).await)
}

static NAMED: LazyLock<LockClient> = LazyLock::new(LockClient::in_memory);

#[distributed_lock(key = "a", global, client = NAMED)]
async fn named_client() -> Result<usize, LockError> {
    Ok(holders(&NAMED, "a").await)
}

struct Service {
    locks: LockClient,
    calls: u32,
}

impl Service {
    #[distributed_lock(key = "a", global, client = self.locks)]
    async fn call(&mut self) -> Result<u32, LockError> {
        assert_eq!(holders(&self.locks, "a").await, 1);
        self.calls += 1;
        Ok(self.calls)
    }
}

#[tokio::test(start_paused = true)]
async fn the_lease_is_the_one_that_is_written() {
    with_client(async |locks| {
        assert_eq!(lease(locks).await.unwrap(), Duration::from_secs(65));
        assert_eq!(lease_expression(locks).await.unwrap(), LEASE * 2);
        assert_eq!(
            defaults(locks).await.unwrap(),
            lock_runtime::LockSpec::DEFAULT_LEASE
        );
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn it_waits_as_long_as_is_written_and_not_at_all_with_no_wait() {
    with_client(async |locks| {
        let guard = locks.exclusive("a").acquire().await.unwrap();
        let start = Instant::now();
        assert_eq!(no_wait().await.unwrap_err().kind(), WOULD_WAIT[0]);
        assert_eq!(start.elapsed(), Duration::ZERO);
        assert_eq!(wait().await.unwrap_err().kind(), WOULD_WAIT[1]);
        assert!(
            start.elapsed() >= Duration::from_millis(250)
                && start.elapsed() < Duration::from_millis(400)
        );
        assert_eq!(defaults(locks).await.unwrap_err().kind(), WOULD_WAIT[1]);
        assert!(start.elapsed() >= lock_runtime::LockSpec::DEFAULT_WAIT);
        // Places in line are given up in the background.
        sleep(Duration::from_millis(1)).await;
        guard.release().await.unwrap();
        no_wait().await.unwrap();
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn readers_overlap_and_a_writer_is_alone() {
    with_client(async |locks| {
        let both = async { tokio::join!(read(locks), read(locks)) };
        let writer = async {
            sleep(LEASE / 2).await;
            write(locks).await
        };
        let ((one, two), refused) = tokio::join!(both, writer);
        assert_eq!((one.unwrap(), two.unwrap()), (2, 1));
        assert_eq!(refused.unwrap_err().kind(), LockErrorKind::Contended);
        assert_eq!(write(locks).await.unwrap(), Mode::Exclusive);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn as_many_as_there_are_permits() {
    with_client(async |locks| {
        let (one, two, three) = tokio::join!(permits(locks), permits(locks), permits(locks));
        let mut counts = [one, two, three].map(|result| result.map_err(|error| error.kind()));
        counts.sort_by_key(Result::is_err);
        assert!(counts[0].is_ok() && counts[1].is_ok(), "{counts:?}");
        assert_eq!(counts[2], Err(LockErrorKind::Contended));
        assert_eq!(
            permits_expression(locks).await.unwrap(),
            Mode::Permits(THREE)
        );
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn it_holds_at_least_and_at_most_as_long_as_is_written() {
    with_client(async |locks| {
        let start = Instant::now();
        min_hold().await.unwrap();
        assert!(
            start.elapsed() < Duration::from_secs(1),
            "the function does not wait for it"
        );
        assert_eq!(
            no_wait().await.unwrap_err().kind(),
            LockErrorKind::Contended
        );
        sleep(Duration::from_secs(5)).await;
        no_wait().await.unwrap();

        let mut done = false;
        let error = max_hold(&mut done).await.unwrap_err();
        assert_eq!(error.kind(), LockErrorKind::Lost(Loss::MaxHold));
        assert!(!done, "the body ran on");
        locks
            .exclusive("a")
            .acquire()
            .await
            .unwrap()
            .release()
            .await
            .unwrap();
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn without_renewal_it_ends_with_its_lease() {
    with_client(async |_| {
        let mut done = false;
        let error = no_renew(&mut done).await.unwrap_err();
        assert_eq!(error.kind(), LockErrorKind::Lost(Loss::Expired));
        assert!(!done);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn attribute_spec_is_an_expression_that_arguments_override() {
    with_client(async |locks| {
        let config = Config {
            lock: LockSpec::exclusive().lease(LEASE).no_wait(),
        };
        assert_eq!(spec(&config, locks).await.unwrap(), LEASE);
        let other = Mutex::new(LockSpec::shared().lease(LEASE));
        assert_eq!(
            spec_and_more(other, locks).await.unwrap(),
            Duration::from_secs(9)
        );
        let guard = locks.exclusive("a").acquire().await.unwrap();
        assert_eq!(
            spec(&config, locks).await.unwrap_err().kind(),
            LockErrorKind::Contended
        );
        guard.release().await.unwrap();
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn only_a_reentrant_function_calls_itself() {
    with_client(async |locks| {
        assert_eq!(reentrant(10).await.unwrap(), 10);
        assert_eq!(not_reentrant(0).await.unwrap(), 0);
        assert_eq!(
            not_reentrant(1).await.unwrap_err().kind(),
            LockErrorKind::WouldDeadlock
        );
        assert_eq!(holders(locks, "a").await, 0);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn the_client_is_the_one_that_is_named() {
    assert_eq!(named_client().await.unwrap(), 1);
    let mut service = Service {
        locks: LockClient::in_memory(),
        calls: 0,
    };
    assert_eq!(service.call().await.unwrap(), 1);
    assert_eq!(service.call().await.unwrap(), 2);
    with_client(async |locks| {
        let _guard = locks.exclusive("a").acquire().await.unwrap();
        named_client().await.expect("the scope is another client's");
    })
    .await;
}

#[distributed_lock(key = "stock", global, wait = "30s")]
async fn increment(resource: &FencedResource) -> Result<(), LockError> {
    // The attribute hands out no token: only overlaps and lost updates count here.
    resource.increment(1u64).await.unwrap();
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bodies_never_overlap() {
    lock_tests::place::in_time(async {
        let (locks, resource) = (LockClient::in_memory(), Arc::new(FencedResource::new()));
        let mut tasks = JoinSet::new();
        for _ in 0..20 {
            let (locks, resource) = (locks.clone(), resource.clone());
            tasks.spawn(async move {
                for _ in 0..20 {
                    locks.as_default(increment(&resource)).await.unwrap();
                }
            });
        }
        tasks.join_all().await;
        let report = resource.report();
        assert!(
            report.is_clean() && report.value == 400 && report.peak == 1,
            "{report}"
        );
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn max_waiters_refuses_callers_beyond_the_head_of_the_queue() {
    with_client(async |locks| {
        let held = locks.exclusive("a").acquire().await.unwrap();
        let (first, second) = tokio::join!(max_waiters(), max_waiters());
        assert_eq!(first.unwrap_err().kind(), LockErrorKind::WaitTimeout);
        assert_eq!(second.unwrap_err().kind(), LockErrorKind::Overloaded);
        let (first, second) = tokio::join!(max_waiters_expression(), max_waiters_expression());
        for waited in [first, second] {
            assert_eq!(waited.unwrap_err().kind(), LockErrorKind::WaitTimeout);
        }
        held.release().await.unwrap();
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn no_reentrant_overrides_the_spec() {
    with_client(async |_| {
        assert!(no_reentrant(0).await.is_ok());
        let error = no_reentrant(1).await.unwrap_err();
        assert_eq!(error.kind(), LockErrorKind::WouldDeadlock);
    })
    .await;
}

/// A function with each option and each mode of the list from which the setters of `LockSpec` are
/// generated. An option that the attribute lacks does not compile.
mod each {
    use super::*;

    macro_rules! functions {
        (
            options { $( $(#[$doc:meta])* $option:ident($($arg:ident: $of:ty)?) { $($set:tt)* } )* }
            modes { $( $mode:ident($($count:ident: $of_count:ty)?) { $($text:tt)* } )* }
        ) => {
            $(
                #[distributed_lock(key = "each", global, $option $(= <$of as Sample>::SAMPLE)?)]
                async fn $option() -> Result<&'static str, LockError> {
                    Ok(stringify!($option))
                }
            )*
            $(
                #[distributed_lock(key = "each", global, $mode $(= <$of_count as Sample>::SAMPLE)?)]
                async fn $mode() -> Result<&'static str, LockError> {
                    Ok(stringify!($mode))
                }
            )*

            #[tokio::test(start_paused = true)]
            async fn attribute_has_each_option_of_a_spec() {
                with_client(async |_| {
                    $( assert_eq!($option().await.unwrap(), stringify!($option)); )*
                    $( assert_eq!($mode().await.unwrap(), stringify!($mode)); )*
                })
                .await;
            }
        };
    }

    lock_runtime::__lock_options!(functions);

    trait Sample {
        const SAMPLE: Self;
    }

    impl Sample for Duration {
        const SAMPLE: Self = LEASE;
    }

    impl Sample for usize {
        const SAMPLE: Self = 7;
    }

    impl Sample for NonZeroU32 {
        const SAMPLE: Self = THREE;
    }

    impl Sample for OnLost {
        const SAMPLE: Self = Self::Error;
    }
}
