//! The log of an outage: what happened, and not a line for each request.
//!
//! `LOCK_TESTS_STORM=6 cargo test -p lock-tests --test topologies outage::log` makes the outage of
//! the storm last half a minute.

use axum::{Router, body::Body, routing::post};
use http::{Request, StatusCode};
use lock_runtime::{LockClient, LockError, distributed_lock};
use lock_tests::{
    Captured, Lateness, RedisServer,
    place::{in_time, times_as_long},
    traces::Event,
};
use lock_tower::LockLayer;
use tokio::{
    task::JoinSet,
    time::{Instant, MissedTickBehavior, interval, sleep},
};
use tower::ServiceExt as _;
use tracing::Level;

use super::{Duration, once, until_refused_at_once, until_served};

/// The events that an operator sees.
fn seen(traces: &Captured) -> Vec<Event> {
    let mut events = traces.events();
    events.retain(|event| event.level <= Level::INFO && event.target.starts_with("lock_"));
    events
}

#[tokio::test]
async fn a_connection_is_made_lost_and_restored_in_one_line_each() {
    in_time(async {
        let traces = Captured::new();
        let _collecting = traces.set_default();
        let server = RedisServer::start().await;
        let locks = LockClient::connect(&server.url()).await.unwrap();
        server.kill();
        until_refused_at_once(&locks, "k").await;
        sleep(Duration::from_millis(500)).await;
        server.restart_empty().await;
        until_served(&locks, "k").await;
        let mut events = seen(&traces);
        events.retain(|event| event.field("server").is_some());
        let messages: Vec<_> = events.iter().map(|it| it.message.as_str()).collect();
        assert_eq!(
            messages,
            [
                "connected",
                "connection lost",
                "no connection; trying again in the background",
                "connection restored"
            ]
        );
        for event in &events {
            assert_eq!(
                event.field("server"),
                Some(&*server.addr().to_string()),
                "{event:?}"
            );
        }
        assert!(
            events[2]
                .field("error")
                .unwrap()
                .contains("is Redis running there")
        );
        assert!(events[3].field("outage").is_some());
    })
    .await;
}

#[distributed_lock(key = "job:{number}", wait = "100ms")]
async fn job(number: u64) -> Result<(), LockError> {
    let _ = number;
    Ok(())
}

/// A thousand requests a second, through a layer that fails open, one that does not, the attribute
/// and guards, while the server is down.
#[tokio::test]
async fn an_outage_under_load_writes_few_lines() {
    let traces = Captured::new();
    let _collecting = traces.set_default();
    let server = RedisServer::start().await;
    let outage = Duration::from_secs(5) * times_as_long() as u32;
    let locks = LockClient::builder().unavailable_after(Duration::from_millis(500));
    let locks = locks.connect(&server.url()).await.unwrap();
    let layer = || {
        let layer = LockLayer::new(locks.clone(), "order:{id}").unwrap();
        layer.wait(Duration::from_secs(2))
    };
    let (strict, open) = (layer().name("pay"), layer().name("view").fail_open());
    let app = Router::new()
        .route("/pay/{id}", post(async || "paid").layer(strict))
        .route("/view/{id}", post(async || "seen").layer(open));
    let held: Vec<_> = {
        let held = (0..100).map(|number| locks.exclusive(format!("held:{number}")));
        let held = held.map(|request| request.lease(Duration::from_secs(3)).acquire());
        futures_util::future::try_join_all(held).await.unwrap()
    };
    let late = Lateness::start();
    let mut requests = JoinSet::new();
    let mut ticks = interval(Duration::from_millis(4));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
    let begin = Instant::now();
    let (before, after) = (Duration::from_secs(1), Duration::from_secs(1));
    let (mut number, mut is_down, mut is_back) = (0_u64, false, false);
    while begin.elapsed() < before + outage + after {
        ticks.tick().await;
        if !is_down && begin.elapsed() >= before {
            is_down = true;
            server.kill();
        }
        if !is_back && begin.elapsed() >= before + outage {
            is_back = true;
            server.restart_empty().await;
        }
        number += 1;
        for path in ["pay", "view"] {
            let request = Request::post(format!("/{path}/{number}"));
            let request = request.body(Body::empty()).unwrap();
            let (app, begun) = (app.clone(), Instant::now());
            requests.spawn(async move {
                let status = app.oneshot(request).await.unwrap().status();
                (path, status, begun.elapsed())
            });
        }
        let client = locks.clone();
        requests.spawn(async move {
            let begun = Instant::now();
            let _ = client.as_default(job(number)).await;
            ("job", StatusCode::OK, begun.elapsed())
        });
        let client = locks.clone();
        requests.spawn(async move {
            let begun = Instant::now();
            let _ = once(&client, &format!("guard:{number}")).await;
            ("guard", StatusCode::OK, begun.elapsed())
        });
    }
    let results = requests.join_all().await;
    assert_eq!(results.len() as u64, 4 * number);
    let count =
        |is: fn(&(&str, StatusCode, Duration)) -> bool| results.iter().filter(|it| is(it)).count();
    let refused =
        count(|(path, status, _)| *path == "pay" && *status == StatusCode::SERVICE_UNAVAILABLE);
    assert!(refused > number as usize / 3, "{refused} of {number}");
    // A busy machine may make others wait for longer than they can, but none is unavailable.
    let unavailable = |(path, status, _): &(&str, _, _)| {
        *path == "view" && *status == StatusCode::SERVICE_UNAVAILABLE
    };
    assert_eq!(count(unavailable), 0);
    drop(held);
    // The next line of a cause has the number of those that were left out before it.
    sleep(Duration::from_millis(10_500)).await;
    server.kill();
    until_refused_at_once(&locks, "k").await;
    for path in ["pay", "view"] {
        let request = Request::post(format!("/{path}/0")).body(Body::empty());
        let _ = app.clone().oneshot(request.unwrap()).await.unwrap();
    }
    let events = seen(&traces);
    let lines: Vec<_> = events
        .iter()
        .map(|it| format!("{} {:?}", it.message, it.fields))
        .collect();
    println!(
        "{} requests, {} lines:\n{}",
        results.len(),
        lines.len(),
        lines.join("\n")
    );
    assert!(lines.len() < 50, "{}", lines.len());
    // Each of the refusals is in one of the lines.
    let told = |message: &str, name: (&str, &str)| -> u64 {
        let lines = events.iter().filter(|it| it.message == message);
        let lines = lines.filter(|it| it.field(name.0) == Some(name.1));
        lines
            .map(|it| {
                1 + it
                    .field("left_out")
                    .map_or(0, |count| count.parse::<u64>().unwrap())
            })
            .sum()
    };
    assert_eq!(told("request refused", ("name", "pay")), refused as u64 + 1);
    assert!(told("served without its lock", ("policy", "view")) > number / 3);
    // A hundred losses are a line. Those that a busy runtime is late for are reported by a thread
    // of the library, which writes nothing for the subscriber of this thread.
    let lost = told("lost", ("loss", "Expired")) + told("lost", ("loss", "Taken"));
    let is_busy = late.allows(Duration::ZERO) > Duration::from_millis(500);
    assert!((1..5).contains(&lost) || is_busy, "{lost}");
}
