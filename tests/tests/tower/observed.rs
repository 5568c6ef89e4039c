//! Metrics and spans of all locks, whether taken by a guard, the attribute or a layer.

use std::{
    collections::BTreeMap, convert::Infallible, panic::AssertUnwindSafe, sync::Arc, time::Duration,
};

use axum::{Router, body::Body, routing::post};
use futures_util::{FutureExt as _, future::join_all, poll};
use http::Request;
use lock_runtime::{
    LockClient, LockError, LockErrorKind, OnceEntry, distributed_lock, store::MemoryStore,
};
use lock_tests::{Captured, RedisServer, unique};
use lock_tower::LockLayer;
use metrics::{
    Counter, Gauge, Histogram, Key, KeyName, LocalRecorderGuard, Metadata, SharedString, Unit,
};
use metrics_util::debugging::{DebugValue, DebuggingRecorder, Snapshotter};
use tokio::time::{sleep, timeout};
use tower::ServiceExt as _;

const PROMPTLY: Duration = Duration::from_secs(10);

/// The metrics of this thread, the only one of a `#[tokio::test]`.
pub(crate) struct Counted {
    figures: Snapshotter,
    _recording: Option<LocalRecorderGuard<'static>>,
}

impl Counted {
    pub(crate) fn here() -> Self {
        let recorder: &'static DebuggingRecorder = Box::leak(Box::default());
        Self {
            figures: recorder.snapshotter(),
            _recording: Some(metrics::set_default_local_recorder(recorder)),
        }
    }

    /// Those of the threads without a recorder of their own, such as that of the library, which
    /// reports what a busy runtime is late for. For one test of a process.
    fn elsewhere() -> Self {
        let recorder = DebuggingRecorder::new();
        let figures = recorder.snapshotter();
        recorder.install().expect("the first recorder of all");
        Self {
            figures,
            _recording: None,
        }
    }

    /// Returns the change of each metric since the last call, by name and labels. For a histogram,
    /// it is the number of new values.
    pub(crate) fn since_last(&self) -> BTreeMap<String, f64> {
        let mut figures = self.all();
        figures.retain(|_, value| *value != 0.0);
        figures
    }

    /// The same with the metrics that have not changed.
    pub(crate) fn all(&self) -> BTreeMap<String, f64> {
        let figures = self
            .figures
            .snapshot()
            .into_vec()
            .into_iter()
            .map(|(key, _, _, value)| {
                let labels: Vec<_> = key
                    .key()
                    .labels()
                    .map(|label| format!("{}={}", label.key(), label.value()))
                    .collect();
                let value = match value {
                    DebugValue::Counter(count) => count as f64,
                    DebugValue::Gauge(value) => value.into_inner(),
                    DebugValue::Histogram(values) => {
                        assert!(
                            values
                                .iter()
                                .all(|value| (0.0..100.0).contains(&value.into_inner())),
                            "{values:?}"
                        );
                        values.len() as f64
                    }
                };
                (
                    format!("{}{{{}}}", key.key().name(), labels.join(",")),
                    value,
                )
            });
        figures.collect()
    }

    /// Returns the number of completed holds since the last call, by policy.
    pub(crate) fn held(&self) -> Vec<(String, f64)> {
        let figures = self.since_last().into_iter();
        figures
            .filter(|(name, _)| name.starts_with("lock_hold"))
            .collect()
    }

    /// Compares the changes of the metrics with the name `pay`.
    pub(crate) fn expect(&self, expected: &[(&str, f64)]) {
        let mut changes = self.since_last();
        changes.retain(|name, _| name.contains("{name=pay"));
        assert_eq!(changes, owned(expected));
    }

    /// Compares the changes of all metrics.
    pub(crate) fn expect_all(&self, expected: &[(&str, f64)]) {
        assert_eq!(self.since_last(), owned(expected));
    }
}

fn owned(expected: &[(&str, f64)]) -> BTreeMap<String, f64> {
    let owned = expected.iter();
    owned
        .map(|(name, value)| ((*name).to_owned(), *value))
        .collect()
}

/// The changes after one uncontended lock.
fn of_one_lock(name: &str, mode: &str) -> BTreeMap<String, f64> {
    let labels = format!("name={name},mode={mode}");
    BTreeMap::from([
        (
            format!("lock_acquisitions_total{{{labels},outcome=granted}}"),
            1.0,
        ),
        (format!("lock_wait_seconds{{{labels}}}"), 1.0),
        (format!("lock_hold_seconds{{{labels}}}"), 1.0),
    ])
}

#[distributed_lock(key = "k:{id}", client = locks)]
async fn function(locks: &LockClient, id: u64) -> Result<u64, LockError> {
    Ok(id)
}

#[distributed_lock(key = "k:{id}", client = locks, name = "given", shared)]
async fn named(locks: &LockClient, id: u64) -> Result<u64, LockError> {
    Ok(id)
}

struct Shop(LockClient);

impl Shop {
    #[distributed_lock(key = "k", client = self.0, no_wait, global)]
    async fn method(&self) -> Result<(), LockError> {
        Ok(())
    }
}

#[tokio::test]
async fn guard_attribute_and_layer_have_the_same_metrics_once() {
    let locks = LockClient::in_memory();
    let counted = Counted::here();
    let guard = locks.exclusive("k").acquire().await.unwrap();
    guard.release().await.unwrap();
    assert_eq!(counted.since_last(), of_one_lock("unnamed", "exclusive"));
    let guard = locks.shared("k").name("a").acquire().await.unwrap();
    guard.release().await.unwrap();
    assert_eq!(counted.since_last(), of_one_lock("a", "shared"));
    let name = String::from("b");
    let permit = locks.permits("k", 2.try_into().unwrap()).name(name);
    permit.run(async |_| ()).await.unwrap();
    assert_eq!(counted.since_last(), of_one_lock("b", "permits"));
    function(&locks, 1).await.unwrap();
    let path = concat!(module_path!(), "::function");
    assert_eq!(counted.since_last(), of_one_lock(path, "exclusive"));
    named(&locks, 1).await.unwrap();
    assert_eq!(counted.since_last(), of_one_lock("given", "shared"));
    let shop = Shop(locks.clone());
    shop.method().await.unwrap();
    let path = concat!(module_path!(), "::Shop::method");
    assert_eq!(counted.since_last(), of_one_lock(path, "exclusive"));
    let layer = LockLayer::new(locks.clone(), "order:{id}")
        .unwrap()
        .name("pay");
    let app = Router::new().route("/orders/{id}", post(async || "paid").layer(layer));
    let request = Request::post("/orders/7").body(Body::empty()).unwrap();
    let Ok::<_, Infallible>(response) = app.oneshot(request).await;
    assert_eq!(response.status(), 200);
    assert_eq!(counted.since_last(), of_one_lock("pay", "exclusive"));

    // Errors have the name, too.
    let _held = locks.exclusive("k").acquire().await.unwrap();
    let error = shop.method().await.unwrap_err();
    assert_eq!(
        (error.kind(), error.name()),
        (LockErrorKind::Contended, Some(path))
    );
    let error = locks.exclusive("k").no_wait().acquire().await.unwrap_err();
    assert_eq!(error.name(), None);
}

#[tokio::test]
async fn outcomes_exist_from_the_first_use_of_a_name() {
    let locks = LockClient::in_memory();
    // Without a recorder nothing is registered.
    let guard = locks.exclusive("k").name("zero").acquire().await.unwrap();
    guard.release().await.unwrap();
    let counted = Counted::here();
    assert!(counted.all().is_empty());
    let guard = locks.exclusive("k").name("zero").acquire().await.unwrap();
    let figures = counted.all();
    for metric in [
        "lock_acquisitions_total{name=zero,mode=exclusive,outcome=wait_timeout}",
        "lock_acquisitions_total{name=zero,mode=exclusive,outcome=blocked}",
        "lock_acquisitions_total{name=zero,mode=exclusive,outcome=unavailable}",
        "lock_lost_total{name=zero,mode=exclusive,loss=expired}",
        "lock_lost_total{name=zero,mode=exclusive,loss=max_hold}",
        "lock_renewal_failures_total{name=zero,mode=exclusive}",
        "lock_handoffs_total{name=zero,mode=exclusive,scope=remote}",
        "lock_waiting{name=zero,mode=exclusive}",
    ] {
        assert_eq!(figures.get(metric), Some(&0.0), "{metric}: {figures:?}");
    }
    // Of the outcomes, those that operators watch.
    let is_outcome = |metric: &&String| metric.starts_with("lock_acquisitions_total{name=zero");
    assert_eq!(figures.keys().filter(is_outcome).count(), 13, "{figures:?}");
    // A re-entered lock is one hold.
    let request = locks.exclusive("k").name("zero").reentrant();
    drop(guard.scope(request.acquire()).await.unwrap());
    guard.release().await.unwrap();
    let outcome = "lock_acquisitions_total{name=zero,mode=exclusive,outcome=reentered}";
    let figures = counted.since_last();
    assert_eq!(figures[outcome], 1.0);
    assert_eq!(figures["lock_hold_seconds{name=zero,mode=exclusive}"], 1.0);
}

/// Each request for work that is done once has one outcome.
#[tokio::test]
async fn outcomes_of_work_that_is_done_once_are_counted() {
    let counted = Counted::here();
    let locks = LockClient::in_memory();
    let once = |key: &str| locks.once(key.to_owned()).name("pay").no_wait();
    let guard = match once("a").begin().await.unwrap() {
        OnceEntry::Vacant(guard) => guard,
        OnceEntry::Done(done) => panic!("{done:?}"),
    };
    once("a").begin().await.unwrap_err();
    guard.complete(b"12345").await.unwrap();
    for _ in 0..2 {
        let done = once("a").begin().await.unwrap();
        assert!(matches!(done, OnceEntry::Done(_)), "{done:?}");
    }
    drop(once("b").begin().await.unwrap());
    once("c").conflicts();
    let figures = counted.since_last();
    let of_once: BTreeMap<_, _> = figures
        .into_iter()
        .filter(|(name, _)| name.starts_with("lock_once") || name.contains("done"))
        .collect();
    let expected = [
        (
            "lock_acquisitions_total{name=pay,mode=exclusive,outcome=done}",
            2.0,
        ),
        ("lock_once_stored_bytes_total{name=pay}", 5.0),
        ("lock_once_total{name=pay,outcome=conflict}", 1.0),
        ("lock_once_total{name=pay,outcome=ran}", 1.0),
        ("lock_once_total{name=pay,outcome=replayed}", 2.0),
        ("lock_once_total{name=pay,outcome=running}", 1.0),
        ("lock_once_total{name=pay,outcome=unrecorded}", 1.0),
    ];
    assert_eq!(of_once, owned(&expected));
}

#[tokio::test]
async fn gauges_return_to_zero() {
    let locks = LockClient::in_memory();
    let counted = Counted::here();
    let gauges = |counted: &Counted| {
        let mut figures = counted.since_last();
        figures.retain(|name, _| name.starts_with("lock_held") || name.starts_with("lock_waiting"));
        figures
    };
    let ask = || locks.exclusive("k").name("gauge");
    // A cancelled waiter, and a panic.
    let held = ask().acquire().await.unwrap();
    let mut waiting = Box::pin(ask().acquire());
    assert!(poll!(&mut waiting).is_pending());
    assert_eq!(gauges(&counted).len(), 2);
    drop(waiting);
    drop(held);
    assert_eq!(gauges(&counted).into_values().sum::<f64>(), -2.0);
    let panics = ask().run(async |_| panic!("on purpose"));
    assert!(AssertUnwindSafe(panics).catch_unwind().await.is_err());
    // A loss by a revocation, one by `max_hold`, a downgrade.
    let held = ask().acquire().await.unwrap();
    locks.revoke("k").await.unwrap();
    assert!(held.release().await.is_err());
    let brief = ask().max_hold(Duration::from_millis(20));
    let held = brief.acquire().await.unwrap();
    timeout(PROMPTLY, held.lost()).await.unwrap();
    drop(held);
    let writer = ask().acquire().await.unwrap();
    writer.downgrade().await.unwrap().release().await.unwrap();
    // A shutdown ends the waiters.
    let held = ask().acquire().await.unwrap();
    let mut waiting = Box::pin(ask().acquire());
    assert!(poll!(&mut waiting).is_pending());
    let ((), refused) = tokio::join!(locks.shutdown(), waiting);
    assert_eq!(refused.unwrap_err().kind(), LockErrorKind::ShuttingDown);
    drop(held);
    let figures = counted.since_last();
    let left: Vec<_> = (figures.iter())
        .filter(|(name, _)| name.starts_with("lock_held") || name.starts_with("lock_waiting"))
        .collect();
    assert!(left.is_empty(), "{left:?}");
    for loss in ["revoked", "max_hold"] {
        let metric = format!("lock_lost_total{{name=gauge,mode=exclusive,loss={loss}}}");
        assert_eq!(figures[&metric], 1.0, "{figures:?}");
    }
}

#[tokio::test]
async fn a_scrape_while_ten_thousand_locks_change_counts_each_once() {
    let locks = LockClient::in_memory();
    let counted = Counted::here();
    let locked = join_all((0..10_000).map(|index| {
        let request = locks.exclusive(format!("k:{index}")).name("many");
        async move {
            let guard = request.acquire().await.unwrap();
            tokio::task::yield_now().await;
            drop(guard);
        }
    }));
    let mut totals = BTreeMap::<String, f64>::new();
    let mut add = || {
        for (name, value) in counted.since_last() {
            *totals.entry(name).or_default() += value;
        }
    };
    let scrape = async {
        for _ in 0..20 {
            add();
            tokio::task::yield_now().await;
        }
    };
    tokio::join!(locked, scrape);
    add();
    totals.retain(|_, value| *value != 0.0);
    let expected = of_one_lock("many", "exclusive").into_iter();
    assert_eq!(
        totals,
        expected.map(|(name, one)| (name, one * 10_000.0)).collect()
    );
}

#[tokio::test]
async fn calls_and_reconnects_are_counted_by_server() {
    let counted = Counted::here();
    let redis = RedisServer::start().await;
    let locks = LockClient::connect(&redis.url()).await.unwrap();
    let server = format!("server={}", redis.addr());
    let guard = locks.exclusive("k").name("calls").acquire().await.unwrap();
    guard.release().await.unwrap();
    let figures = counted.all();
    for operation in ["acquire", "release"] {
        let labels = format!("{server},operation={operation}");
        assert_eq!(
            figures[&format!("lock_store_calls_total{{{labels},outcome=ok}}")],
            1.0
        );
        assert_eq!(
            figures[&format!("lock_store_calls_total{{{labels},outcome=error}}")],
            0.0
        );
        assert_eq!(
            figures[&format!("lock_store_call_seconds{{{labels}}}")],
            1.0
        );
    }
    let reconnects = format!("lock_store_reconnects_total{{{server}}}");
    assert_eq!(figures[&reconnects], 0.0);

    // Sixty-four at once share calls.
    let at_once = (0..64).map(|index| locks.exclusive(format!("k:{index}")).acquire());
    drop(join_all(at_once).await);
    let sizes = format!("lock_store_group_size{{{server},operation=acquire_group}}");
    assert!(counted.since_last()[&sizes] >= 1.0);

    redis.kill();
    let failed = locks.exclusive("k").no_wait().acquire().await;
    assert!(failed.is_err());
    let error = format!("lock_store_calls_total{{{server},operation=acquire,outcome=error}}");
    let figures = counted.since_last();
    assert!(figures[&error] >= 1.0, "{figures:?}");
    redis.restart_empty().await;
    let acquired = locks.exclusive("k").name("calls").acquire();
    drop(timeout(PROMPTLY, acquired).await.unwrap().unwrap());
    let figures = counted.since_last();
    assert!(figures[&reconnects] >= 1.0, "{figures:?}");
}

#[tokio::test]
async fn a_hand_off_between_clients_is_remote_and_failed_renewals_are_counted() {
    let (counted, elsewhere) = (Counted::here(), Counted::elsewhere());
    let redis = RedisServer::start().await;
    let connect = async || LockClient::connect(&redis.url()).await.unwrap();
    let (one, two) = tokio::join!(connect(), connect());
    let (key, two_name) = (unique("k"), unique("two"));
    let held = one.exclusive(&*key).name("one").acquire().await.unwrap();
    let waiting = tokio::spawn(two.exclusive(&*key).name(two_name.clone()).acquire());
    let queued = async {
        while one.inspect(&*key).await.unwrap().waiters.is_empty() {
            sleep(Duration::from_millis(2)).await;
        }
    };
    timeout(PROMPTLY, queued).await.unwrap();
    held.release().await.unwrap();
    let held = waiting.await.unwrap().unwrap();
    let figures = counted.since_last();
    let remote = format!("lock_handoffs_total{{name={two_name},mode=exclusive,scope=remote}}");
    assert_eq!(figures.get(&remote), Some(&1.0), "{figures:?}");
    held.release().await.unwrap();

    let brief = two
        .exclusive(&*key)
        .name(two_name.clone())
        .lease(Duration::from_millis(600));
    let held = brief.acquire().await.unwrap();
    redis.kill();
    timeout(PROMPTLY, held.lost()).await.unwrap();
    // The guard knows the end of its lease, maybe before the client has noticed and counted it.
    let mut failures = 0.0;
    let counted = async {
        let lost = format!("lock_lost_total{{name={two_name},mode=exclusive,loss=expired}}");
        let failed = format!("lock_renewal_failures_total{{name={two_name},mode=exclusive}}");
        let mut losses = 0.0;
        while losses == 0.0 {
            for figures in [counted.since_last(), elsewhere.since_last()] {
                failures += figures.get(&failed).unwrap_or(&0.0);
                losses += figures.get(&lost).unwrap_or(&0.0);
            }
            sleep(Duration::from_millis(2)).await;
        }
        losses
    };
    assert_eq!(timeout(PROMPTLY, counted).await.unwrap(), 1.0);
    assert!(failures >= 1.0, "{failures}");
}

#[tokio::test]
async fn a_hand_off_within_a_process_is_local() {
    let counted = Counted::here();
    let store = Arc::new(MemoryStore::new());
    let (other, locks) = (
        LockClient::with_store(store.clone()),
        LockClient::with_store(store),
    );
    let request = || locks.exclusive("k").name("two").acquire();
    let held = other.exclusive("k").acquire().await.unwrap();
    let (mut first, mut second) = (Box::pin(request()), Box::pin(request()));
    assert!(poll!(&mut first).is_pending());
    assert!(poll!(&mut second).is_pending());
    held.release().await.unwrap();
    let first = first.await.unwrap();
    let (released, second) = tokio::join!(first.release(), second);
    released.unwrap();
    second.unwrap().release().await.unwrap();
    let mut figures = counted.since_last();
    figures.retain(|name, _| name.starts_with("lock_handoffs"));
    let scope = |scope| format!("lock_handoffs_total{{name=two,mode=exclusive,scope={scope}}}");
    let one_each = BTreeMap::from([(scope("local"), 1.0), (scope("remote"), 1.0)]);
    assert_eq!(figures, one_each);
}

#[tokio::test]
async fn spans_have_the_token_and_the_outcome() {
    let traces = Captured::new();
    let _collecting = traces.set_default();
    let locks = LockClient::in_memory();
    let body = async |_| tracing::info!("at work");
    let named = |name: &'static str| locks.exclusive("k").name(name);
    let wanted = async |message: &'static str| {
        let found = traces.wait_for(|event| event.message.starts_with(message));
        timeout(PROMPTLY, found).await.expect(message)
    };
    let held = named("first").acquire().await.unwrap();
    let fence = held.fence();
    let mut second = Box::pin(named("second").run(body));
    assert!(poll!(&mut second).is_pending());
    let mut behind = Box::pin(named("behind").acquire());
    assert!(poll!(&mut behind).is_pending());
    for (message, name) in [
        ("waiting for its holder", "second"),
        ("waiting behind", "behind"),
    ] {
        let event = wanted(message).await;
        assert_eq!(event.spans, ["lock.acquire"]);
        assert_eq!(event.span_fields["lock.name"], name);
    }
    held.release().await.unwrap();
    second.await.unwrap();
    behind.await.unwrap().release().await.unwrap();
    let event = wanted("at work").await;
    assert_eq!(event.spans, ["lock.hold"]);
    assert_eq!(event.span_fields["lock.mode"], "exclusive");
    let later = &event.span_fields["lock.fence"];
    assert!(later.parse::<u64>().unwrap() > fence.number());
    let held = locks.exclusive("k").name("third").acquire().await.unwrap();
    let fence = held.fence().to_string();
    locks.revoke("k").await.unwrap();
    let event = wanted("lost").await;
    assert_eq!(
        (event.spans.as_slice(), &event.span_fields["lock.fence"]),
        (&["lock.hold".to_owned()][..], &fence)
    );
    // The span ends with the loss, although the guard is there.
    held.in_scope(|| tracing::info!("afterwards"));
    let event = wanted("afterwards").await;
    assert!(event.spans.is_empty());
}

/// A recorder that panics in each call.
struct Panics(#[expect(dead_code, reason = "gives it a size")] u8);

impl metrics::Recorder for Panics {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn register_counter(&self, _: &Key, _: &Metadata<'_>) -> Counter {
        panic!("a counter")
    }
    fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
        panic!("a gauge")
    }
    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        panic!("a histogram")
    }
}

#[tokio::test]
async fn a_recorder_that_panics_harms_no_connection_and_no_lock() {
    // Without a size it would stand for none.
    let recorder: &'static Panics = Box::leak(Box::new(Panics(1)));
    let _recording = metrics::set_default_local_recorder(recorder);
    let redis = RedisServer::start().await;
    let locks = LockClient::connect(&redis.url()).await.unwrap();
    for name in ["a", "b"] {
        let guard = locks.exclusive("k").name(name).acquire().await.unwrap();
        let waiting = locks.exclusive("k").name(name).no_wait().acquire().await;
        assert_eq!(waiting.unwrap_err().kind(), LockErrorKind::Contended);
        guard.release().await.unwrap();
        drop(locks.shared("k").name(name).acquire().await.unwrap());
        let next = locks.exclusive("k").acquire();
        timeout(PROMPTLY, next)
            .await
            .unwrap()
            .unwrap()
            .release()
            .await
            .unwrap();
    }
    timeout(PROMPTLY, locks.shutdown()).await.unwrap();
}
