//! The handler for readiness probes.

use std::time::Duration;

use axum::{Router, body::Body, http::Request};
use futures_util::future::join_all;
use http_body_util::BodyExt as _;
use lock_runtime::{LockClient, web::readiness};
use lock_tests::{Captured, RedisServer, place::LONG};
use serde_json::Value;
use tokio::time::{Instant, sleep, timeout};
use tower::ServiceExt as _;

struct Probed {
    status: u16,
    headers: http::HeaderMap,
    body: String,
}

async fn probe(app: &Router, method: &str) -> Probed {
    let request = Request::builder().method(method).uri("/ready");
    let response = app.clone().oneshot(request.body(Body::empty()).unwrap());
    let (parts, body) = response.await.unwrap().into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    Probed {
        status: parts.status.as_u16(),
        headers: parts.headers,
        body: String::from_utf8(body.to_vec()).unwrap(),
    }
}

/// Waits until a probe is answered with this status.
async fn responds(app: &Router, status: u16) {
    let deadline = Instant::now() + LONG;
    while probe(app, "GET").await.status != status {
        assert!(Instant::now() < deadline, "never {status}");
        sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn a_probe_follows_the_store_through_kill_and_restart() {
    let traces = Captured::new();
    let _default = traces.set_default();
    let server = RedisServer::builder().password("hunter2").start().await;
    let locks = LockClient::connect(&server.url()).await.unwrap();
    let app = Router::new().route("/ready", readiness(&locks));
    let ready = probe(&app, "GET").await;
    assert_eq!(
        (ready.status, &*ready.body),
        (200, r#"{"findings":[],"verdict":"healthy"}"#)
    );
    assert_eq!(ready.headers["content-type"], "application/json");
    assert_eq!(ready.headers["cache-control"], "no-store");
    let head = probe(&app, "HEAD").await;
    assert_eq!((head.status, &*head.body), (200, ""));
    assert_eq!(head.headers["cache-control"], "no-store");
    assert_eq!(probe(&app, "POST").await.status, 405);

    server.kill();
    responds(&app, 503).await;
    let down = probe(&app, "GET").await;
    let body: Value = serde_json::from_str(&down.body).unwrap();
    assert_eq!(body["verdict"], "unavailable");
    assert_eq!(body["findings"][0]["code"], "unavailable");
    assert!(
        !down.body.contains("127.0.0.1") && !down.body.contains("hunter2"),
        "{}",
        down.body
    );
    assert_eq!(probe(&app, "HEAD").await.status, 503);

    server.restart_empty().await;
    responds(&app, 200).await;
    let changes = || {
        let events = traces.events().into_iter();
        let changes = events.filter(|event| event.message.contains("state of the lock store"));
        changes
            .map(|event| event.field("verdict").unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    assert_eq!(
        changes(),
        ["unavailable", "healthy"],
        "one line for each change"
    );
    locks.shutdown().await;
    responds(&app, 503).await;
}

#[tokio::test]
async fn a_storm_of_probes_is_one_question() {
    let server = RedisServer::start().await;
    let locks = LockClient::connect(&server.url()).await.unwrap();
    let app = Router::new().route("/ready", readiness(&locks));
    server.command(&["CONFIG", "RESETSTAT"]).await;
    let probes = join_all((0..1000).map(|_| probe(&app, "GET"))).await;
    assert!(probes.iter().all(|probed| probed.status == 200));
    let stats: String = server.query(&["INFO", "commandstats"]).await;
    let line = stats
        .lines()
        .find_map(|line| line.strip_prefix("cmdstat_info:calls="));
    let calls: u32 = line.map_or(0, |line| line.split(',').next().unwrap().parse().unwrap());
    // A slow machine may take more than the second for which an answer is used.
    assert!((1..=3).contains(&calls), "{calls}");
}

/// A probe with a time-out that is shorter than the examination of a server that hangs.
#[tokio::test]
async fn a_probe_that_gives_up_leaves_the_answer_to_the_next_one() {
    let server = RedisServer::start().await;
    let locks = LockClient::connect(&server.url()).await.unwrap();
    let app = Router::new().route("/ready", readiness(&locks));
    assert_eq!(probe(&app, "GET").await.status, 200);
    sleep(Duration::from_millis(1100)).await;
    server.stop();
    let short = Duration::from_millis(400);
    let mut answered = Vec::new();
    for _ in 0..8 {
        let probed = timeout(short, probe(&app, "GET")).await;
        answered.extend(probed.map(|probed| probed.status));
        sleep(short / 4).await;
    }
    assert!(answered.contains(&503), "{answered:?}");
}
