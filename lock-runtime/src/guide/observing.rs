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
//! recorder at the start of `main`, then describe the metrics. For Prometheus, with the crate
//! `metrics-exporter-prometheus`, whose endpoint is `/metrics`:
//!
//! ```text
//! // Without buckets, histograms are summaries, which cannot be aggregated over processes.
//! PrometheusBuilder::new()
//!     .with_http_listener(([0, 0, 0, 0], 9000))
//!     .set_buckets(&[0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0])?
//!     .set_buckets_for_metric(
//!         Matcher::Full("lock_store_group_size".into()),
//!         &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0],
//!     )?
//!     .install()?;
//! lock_runtime::metrics::describe();
//! ```
//!
//! For OpenTelemetry, install the recorder of the crate `metrics-exporter-opentelemetry` in the
//! same way, or let a collector scrape that endpoint (its receiver `prometheus`).
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
//! Their fields are `lock.name`, `lock.key`, `lock.mode`, `lock.fence`, `lock.waited_ms`,
//! `outcome` and, for a refusal or a loss, `error.type`: the [code](crate::LockError::code) of the
//! error. The body of `run`, of the attribute and of a layer runs within the span of its hold; the
//! code beside a guard does not. The events of a request (it waits, the store did not reply) are in
//! its `lock.acquire`, a hand-off is in the `lock.release` of the former holder, and a loss in the
//! `lock.hold`. Without the feature the events are the same, and the spans of the application are
//! around them.
//!
//! For OpenTelemetry, the layer of the crate `tracing-opentelemetry` exports them:
//!
//! ```text
//! let tracer = opentelemetry::global::tracer("orders");
//! tracing_subscriber::registry()
//!     .with(tracing_opentelemetry::layer().with_tracer(tracer))
//!     .with(EnvFilter::new("info,lock_runtime=debug"))
//!     .init();
//! ```
