# use std::time::Duration;
# use axum::{Router, routing::get};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder};

# #[tokio::main(flavor = "current_thread")]
# async fn main() -> Result<(), Box<dyn std::error::Error>> {
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
let app: Router = Router::new().route("/metrics", get(async move || metrics.render()));
// Condenses the values of the histograms, also if no scrape comes.
tokio::spawn(async move {
    loop {
        tokio::time::sleep(Duration::from_secs(5)).await;
        recorder.run_upkeep();
    }
});
# let locks = lock_runtime::LockClient::in_memory();
# locks.exclusive("order:42").name("checkout").acquire().await?.release().await?;
# use tower::ServiceExt as _;
# let scrape = axum::http::Request::get("/metrics").body(axum::body::Body::empty())?;
# let page = axum::body::to_bytes(app.oneshot(scrape).await?.into_body(), 1 << 20).await?;
# let line = r#"lock_acquisitions_total{name="checkout",mode="exclusive",outcome="granted"} 1"#;
# assert!(String::from_utf8(page.to_vec())?.contains(line));
# Ok(()) }
