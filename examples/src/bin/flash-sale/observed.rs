//! What operators see of a server: metrics, readiness, and log lines on standard error.

use std::{env, io, time::Duration};

use anyhow::Context;
use axum::{Router, routing::get};
use lock_runtime::{LockClient, web::readiness};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use tokio::time::sleep;
use tracing_subscriber::{filter::Targets, fmt, prelude::*};

/// The levels of log lines without `RUST_LOG`.
const LEVELS: &str = "info";
/// The interval at which the recorder condenses the values of its histograms.
const UPKEEP: Duration = Duration::from_secs(5);

/// Writes log lines, and records metrics from now on.
pub(crate) fn observe() -> anyhow::Result<PrometheusHandle> {
    let levels = env::var("RUST_LOG").unwrap_or_else(|_| LEVELS.into());
    let levels: Targets = levels.parse().context("RUST_LOG has no levels")?;
    let lines = fmt::layer().with_writer(io::stderr).with_filter(levels);
    tracing_subscriber::registry().with(lines).try_init()?;

    // Without buckets, histograms are summaries, which cannot be aggregated over processes.
    let recorder = PrometheusBuilder::new()
        .set_buckets(&[0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0])?
        .set_buckets_for_metric(
            Matcher::Full("lock_store_group_size".into()),
            &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0],
        )?
        .install_recorder()?;
    lock_runtime::metrics::describe();
    let metrics = recorder.clone();
    tokio::spawn(async move {
        loop {
            sleep(UPKEEP).await;
            recorder.run_upkeep();
        }
    });
    Ok(metrics)
}

/// `GET /metrics` for Prometheus, `GET /ready` for a readiness probe.
pub(crate) fn routes(metrics: PrometheusHandle, locks: &LockClient) -> Router {
    Router::new()
        .route("/metrics", get(async move || metrics.render()))
        .route("/ready", readiness(locks))
}
