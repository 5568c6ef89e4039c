//! Other attributes above and below, and lints, which find nothing in the expansion.

use std::sync::LazyLock;

use async_trait::async_trait;
use axum::{debug_handler, extract::Path};
use lock_runtime::{LockClient, LockError, distributed_lock};
use lock_tests::Captured;
use tracing::instrument;

use super::{assert_excludes, assert_excludes_with, visit};

#[instrument(err)]
#[distributed_lock(key = "order:{id}")]
async fn instrumented_above(id: u64) -> Result<u64, LockError> {
    visit("order:7").await;
    tracing::info!("paid");
    Ok(id)
}

#[distributed_lock(key = "order:{id}")]
#[instrument(err)]
async fn instrumented_below(id: u64) -> Result<u64, LockError> {
    visit("order:7").await;
    tracing::info!("paid");
    Ok(id)
}

#[debug_handler]
#[distributed_lock(key = "order:{id}")]
async fn handler_above(Path(id): Path<u64>) -> Result<String, LockError> {
    visit("order:7").await;
    Ok(id.to_string())
}

#[distributed_lock(key = "order:{id}")]
#[debug_handler]
async fn handler_below(Path(id): Path<u64>) -> Result<String, LockError> {
    visit("order:7").await;
    Ok(id.to_string())
}

static LOCKS: LazyLock<LockClient> = LazyLock::new(LockClient::in_memory);

/// A test that runs under the lock.
#[distributed_lock(key = "test", global, client = LOCKS)]
#[tokio::test]
async fn a_test_may_be_locked() -> Result<(), LockError> {
    assert!(lock_runtime::is_held(&lock_runtime::LockKey::new("test")?));
    assert!(
        LOCKS
            .exclusive("test")
            .try_acquire()
            .await
            .is_err_and(|error| error.code() == "would_deadlock")
    );
    Ok(())
}

#[distributed_lock(key = "order:{id}")]
#[must_use = "the receipt is the proof"]
async fn must_use(id: u64) -> Result<u64, LockError> {
    visit("order:7").await;
    Ok(id)
}

#[cfg(any())]
#[distributed_lock(key = "order:{id}")]
async fn configured(id: u64) -> Nonsense {}

#[distributed_lock(key = "order:{id}")]
#[cfg(any())]
async fn configured(id: u64) -> Nonsense {}

#[cfg_attr(all(), distributed_lock(key = "order:{id}"))]
#[cfg(not(any()))]
#[allow(clippy::unused_async)]
#[inline]
async fn configured(id: u64) -> Result<u64, LockError> {
    visit("order:7").await;
    Ok(id)
}

#[distributed_lock(key = "order:{id}")]
async fn inner_attributes(id: u64) -> Result<u64, LockError> {
    #![allow(unused_variables)]
    let unused = 1;
    visit("order:7").await;
    Ok(id)
}

/// Two locks; the lower one is acquired first.
#[distributed_lock(key = "order:{id}", held = order)]
#[distributed_lock(key = "shop:{shop}", held = at_shop)]
async fn twice(id: u64, shop: u64) -> Result<u64, LockError> {
    visit("order:7").await;
    assert_eq!(
        (order.key().as_str(), at_shop.key().as_str()),
        ("order:7", "shop:1")
    );
    Ok(id)
}

#[async_trait]
trait Pay {
    async fn above(&self, id: u64) -> Result<u64, LockError>;
    async fn below(&self, id: u64) -> Result<u64, LockError>;
}

struct Service;

#[async_trait]
impl Pay for Service {
    #[instrument(skip(self))]
    #[distributed_lock(key = "order:{id}")]
    async fn above(&self, id: u64) -> Result<u64, LockError> {
        visit("order:7").await;
        tracing::info!("paid");
        Ok(id)
    }

    #[distributed_lock(key = "order:{id}")]
    #[instrument(skip(self))]
    async fn below(&self, id: u64) -> Result<u64, LockError> {
        visit("order:7").await;
        tracing::info!("paid");
        Ok(id)
    }
}

/// Lints that are off by default do not report the expansion.
#[deny(warnings, clippy::all, clippy::pedantic, clippy::nursery)]
mod strict {
    use super::*;

    struct Jobs {
        locks: LockClient,
    }

    impl Jobs {
        #[distributed_lock(
            keys("order:{id}", key("shop:{}", id + 1)),
            client = self.locks,
            held = lock,
            lease = "10s",
            wait = "1s",
            on_busy = Ok(None),
            on_lost = ignore,
            max_hold = "1m",
        )]
        async fn all(&self, id: u64) -> Result<Option<u64>, LockError> {
            visit("order:7").await;
            lock.verify().await?;
            Ok(Some(id))
        }

        #[distributed_lock(key = "job", global, no_wait, on_busy = skip, map_err = drop)]
        async fn skipped(&self) {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn no_lint_sees_the_expansion() {
        assert_excludes_with("order:7", async |locks| {
            let jobs = Jobs {
                locks: locks.clone(),
            };
            jobs.skipped().await;
            jobs.all(7)
                .await?
                .ok_or_else(|| std::io::Error::other("somebody else holds it"))
        })
        .await;
    }
}

#[tokio::test(start_paused = true)]
async fn instrument_above_and_below() {
    let traces = Captured::new();
    let _collecting = traces.set_default();
    assert_excludes("order:7", async || instrumented_above(7).await).await;
    assert_spans(&traces, "instrumented_above", 1 + 3);
    assert_excludes("order:7", async || instrumented_below(7).await).await;
    assert_spans(&traces, "instrumented_below", 1 + 3);
}

/// Checks that the body ran in the span, and in that of the lock, this number of times.
fn assert_spans(traces: &Captured, span: &str, times: usize) {
    let events = traces.events();
    let is_within = |spans: &[String]| {
        let has = |name: &str| spans.iter().any(|span| span == name);
        spans.len() == 2 && has("lock.hold") && has(span)
    };
    let inside = events
        .iter()
        .filter(|event| event.message == "paid" && is_within(&event.spans));
    assert_eq!(inside.count(), times, "{events:?}");
}

#[tokio::test(start_paused = true)]
async fn debug_handler_above_and_below() {
    assert_excludes("order:7", async || handler_above(Path(7)).await).await;
    assert_excludes("order:7", async || handler_below(Path(7)).await).await;
}

#[tokio::test(start_paused = true)]
async fn must_use_goes_on() {
    #[expect(unused_must_use, reason = "it has to be noticed")]
    assert_excludes("order:7", async || {
        must_use(7).await;
        must_use(7).await
    });
    assert_excludes("order:7", async || must_use(7).await).await;
}

#[tokio::test(start_paused = true)]
async fn configured_out_and_in() {
    assert_excludes("order:7", async || configured(7).await).await;
}

#[tokio::test(start_paused = true)]
async fn the_attribute_itself_above_and_below() {
    assert_excludes("order:7", async || twice(7, 1).await).await;
}

#[tokio::test(start_paused = true)]
async fn attributes_inside_of_the_body() {
    assert_excludes("order:7", async || inner_attributes(7).await).await;
}

#[tokio::test(start_paused = true)]
async fn instrument_above_and_below_under_async_trait() {
    let traces = Captured::new();
    let _collecting = traces.set_default();
    assert_excludes("order:7", async || Service.above(7).await).await;
    assert_spans(&traces, "above", 1 + 3);
    assert_excludes("order:7", async || Service.below(7).await).await;
    assert_spans(&traces, "below", 1 + 3);
}
