//! Names, metrics and spans.
//!
//! # Naming
//!
//! A request has a name, which stands for a place in the code or a kind of lock. It is the label of
//! its metrics, a field of its spans, and is in its errors
//! ([`LockError::name`](crate::LockError::name)):
//!
//! | lock | name |
//! |---|---|
//! | of a guard | that of [`LockRequest::name`](crate::LockRequest::name), or none |
//! | of `#[distributed_lock]` | `name = ".."`, or the path of the function: `shop::orders::pay` |
//! | of a layer of lock-tower | the name of the policy, or the route |
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), lock_runtime::LockError> {
//! # let locks = lock_runtime::LockClient::in_memory();
//! let guard = locks.exclusive("order:42").name("checkout").acquire().await?;
//! # guard.release().await?;
//! # Ok(()) }
//! ```
//!
//! A key is not a name: each name has metrics of its own. A process distinguishes 256 names, and
//! counts the requests of all further ones as `other`.
//!
//! # Metrics
//!
//! With the feature `metrics`, all requests, holds and calls to servers are recorded through the
//! crate `metrics`. The table is on the page of the module `lock_runtime::metrics`. Install a
//! recorder at the start of `main`, then describe the metrics.
//!
//! For Prometheus, with the crate `metrics-exporter-prometheus` and a route of axum:
//!
#![cfg_attr(feature = "metrics", doc = "```")]
#![cfg_attr(not(feature = "metrics"), doc = "```ignore")]
//! # use std::time::Duration;
//! # use axum::{Router, routing::get};
//! use metrics_exporter_prometheus::{Matcher, PrometheusBuilder};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // Without buckets, histograms are summaries, which cannot be aggregated over processes.
//! let recorder = PrometheusBuilder::new()
//!     .set_buckets(&[0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0])?
//!     .set_buckets_for_metric(
//!         Matcher::Full("lock_store_group_size".into()),
//!         &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0],
//!     )?
//!     .install_recorder()?;
//! lock_runtime::metrics::describe();
//!
//! let metrics = recorder.clone();
//! let app: Router = Router::new().route("/metrics", get(async move || metrics.render()));
//! // Condenses the values of the histograms, also if no scrape comes.
//! tokio::spawn(async move {
//!     loop {
//!         tokio::time::sleep(Duration::from_secs(5)).await;
//!         recorder.run_upkeep();
//!     }
//! });
//! # let locks = lock_runtime::LockClient::in_memory();
//! # locks.exclusive("order:42").name("checkout").acquire().await?.release().await?;
//! # use tower::ServiceExt as _;
//! # let scrape = axum::http::Request::get("/metrics").body(axum::body::Body::empty())?;
//! # let page = axum::body::to_bytes(app.oneshot(scrape).await?.into_body(), 1 << 20).await?;
//! # let line = r#"lock_acquisitions_total{name="checkout",mode="exclusive",outcome="granted"} 1"#;
//! # assert!(String::from_utf8(page.to_vec())?.contains(line));
//! # Ok(()) }
//! ```
//!
//! For OpenTelemetry, let a collector scrape the same route, with its receiver `prometheus`.
//!
//! `docs/prometheus` in the repository has a dashboard for Grafana and alerting rules with their
//! tests. Both are tested with a Prometheus server that scrapes the example `flash-sale`, whose
//! servers have this route with `--features observed`.
//!
//! # Alerts
//!
//! These alerts of `docs/prometheus/alerts.yml` are worth waking an operator:
//!
//! - `LockLost`: a lock ended while its holder was at work. Check the data, unless writes are
//!   [fenced](super::fencing). Then look for pauses of the process (`expired`), or for a server
//!   that lost its data or was flushed (`taken`).
//! - `LockStoreUnavailable`, `LockStoreSilent`: requests fail, or wait, because a server does not
//!   answer. [`LockClient::health`](crate::LockClient::health) names the server and the remedy.
//! - `LockRenewalsFail`: held locks will be lost when their leases end. As above; the remaining
//!   lease is the time that is left.
//! - `LockStoreRefuses`: the server refuses calls because of a password, a right, its role or other
//!   data under a key. The `outcome` and the log line name the cause; no retry helps. With
//!   `blocked`, a session of the database has locked the record, and `health` names it.
//!
//! The others can wait for the morning: `LockWaitTimeouts` and `LockRequestsShed` (too much work
//! for one lock: shorten the critical section or split the key), `LockHeldTooLong` (work that
//! hangs), `LockStoreSlow` and `LockStoreFlaps` (the network or the server).
//!
//! A revoked lock is the act of an operator, so it is on the dashboard but no alert. A readiness
//! probe ([recipe](super::recipes)) takes a process without a store out of service; a liveness
//! probe must not depend on the store.
//!
//! # Spans
//!
//! With the feature `tracing`, there are three spans, of level `DEBUG`:
//!
//! | span | from | to |
//! |---|---|---|
//! | `lock.acquire` | the first poll of the request | its outcome |
//! | `lock.hold` | the grant | the release or the loss |
//! | `lock.release` | the call of `release` | the reply of the store |
//!
//! Their fields are `lock.name`, `lock.key`, `lock.mode`, `lock.fence`, `outcome`, for a request
//! `lock.waited_ms` and, for a refusal or a loss, `error.type`: the [code](crate::LockError::code)
//! of the error. The body of `run`, of the attribute and of a layer runs within the span of its
//! hold; the code beside a guard does not. The events of a request (it waits, the store did not
//! reply) are in its `lock.acquire`, a hand-off is in the `lock.release` of the former holder, and
//! a loss in the `lock.hold`. Without the feature the events are the same, and the spans of the
//! application are around them.
//!
//! For OpenTelemetry, the layer of the crate `tracing-opentelemetry` exports them:
//!
#![cfg_attr(feature = "tracing", doc = "```")]
#![cfg_attr(not(feature = "tracing"), doc = "```ignore")]
//! use opentelemetry::trace::TracerProvider as _;
//! use opentelemetry_sdk::trace::{InMemorySpanExporter, SdkTracerProvider};
//! use tracing_subscriber::{Layer as _, filter::Targets, prelude::*};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // For example. In production it is an exporter of the crate `opentelemetry-otlp`, and the
//! // provider is built `with_batch_exporter`.
//! let exporter = InMemorySpanExporter::default();
//! let provider = SdkTracerProvider::builder()
//!     .with_simple_exporter(exporter.clone())
//!     .build();
//! let levels: Targets = "info,lock_runtime=debug".parse()?;
//! let spans = tracing_opentelemetry::layer().with_tracer(provider.tracer("orders"));
//! tracing_subscriber::registry()
//!     .with(spans.with_filter(levels))
//!     .init();
//! # let locks = lock_runtime::LockClient::in_memory();
//! # locks.exclusive("order:42").name("checkout").acquire().await?.release().await?;
//! # let spans = exporter.get_finished_spans()?;
//! # let names: Vec<_> = spans.iter().map(|span| &*span.name).collect();
//! # for name in ["lock.acquire", "lock.hold", "lock.release"] {
//! #     assert!(names.contains(&name), "{names:?}");
//! # }
//! # let has_key = |span: &opentelemetry_sdk::trace::SpanData| {
//! #     let mut fields = span.attributes.iter();
//! #     fields.any(|field| field.key.as_str() == "lock.key" && field.value.as_str() == "order:42")
//! # };
//! # assert!(spans.iter().all(has_key), "{spans:?}");
//! # Ok(()) }
//! ```
