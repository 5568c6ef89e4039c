//! How fast requests are refused during an outage, and served after it.
//!
//! `LOCK_TESTS_STORM=4 cargo test -p lock-tests --test topologies outage::speed -- --nocapture`
//! prints the figures of twelve restarts.

use axum::{Router, body::Body, routing::post};
use http::{Request, StatusCode, Version};
use lock_runtime::LockClient;
use lock_tests::{
    RedisServer,
    place::{LONG, in_time, times_as_long},
};
use lock_tower::LockLayer;
use tokio::time::{Instant, sleep};
use tower::ServiceExt as _;

use super::{Duration, SOON, until_refused_at_once};

const AFTER: Duration = Duration::from_millis(300);

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

#[tokio::test]
async fn refusals_take_milliseconds_and_service_returns_within_half_a_second() {
    let server = RedisServer::start().await;
    let locks = LockClient::builder().unavailable_after(AFTER);
    let locks = locks.connect(&server.url()).await.unwrap();
    let (mut refusals, mut returns) = (Vec::new(), Vec::new());
    for _ in 0..3 * times_as_long() {
        server.kill();
        while locks.exclusive("k").wait(LONG).acquire().await.is_ok() {}
        for number in 0..500 {
            let begun = Instant::now();
            let request = locks.exclusive(format!("k{number}")).wait(LONG);
            request.acquire().await.unwrap_err();
            refusals.push(begun.elapsed());
            if number % 50 == 0 {
                sleep(Duration::from_millis(7)).await;
            }
        }
        let back = tokio::spawn({
            let locks = locks.clone();
            // From the first answer of the server on, by its own connection.
            let url = server.url();
            async move {
                let client = redis::Client::open(url).unwrap();
                while client.get_multiplexed_async_connection().await.is_err() {
                    sleep(Duration::from_millis(1)).await;
                }
                let back = Instant::now();
                while locks.exclusive("back").wait(LONG).acquire().await.is_err() {
                    sleep(Duration::from_millis(1)).await;
                }
                back.elapsed()
            }
        });
        server.restart_empty().await;
        returns.push(back.await.unwrap());
    }
    refusals.sort_unstable();
    returns.sort_unstable();
    let p99 = refusals[refusals.len() * 99 / 100];
    let (median, max) = (returns[returns.len() / 2], returns[returns.len() - 1]);
    println!(
        "refusal: p50 {:.3} ms, p99 {:.3} ms, max {:.3} ms of {}; first success after a restart: median {:.0} ms, \
         max {:.0} ms of {}",
        ms(refusals[refusals.len() / 2]),
        ms(p99),
        ms(refusals[refusals.len() - 1]),
        refusals.len(),
        ms(median),
        ms(max),
        returns.len()
    );
    // On a busy machine; the goals are 5 ms and 500 ms.
    assert!(p99 < Duration::from_millis(50), "{p99:?}");
    assert!(max < SOON, "{max:?}");
}

#[tokio::test]
async fn a_layer_that_fails_open_serves_at_once() {
    in_time(async {
        let server = RedisServer::start().await;
        let locks = LockClient::builder().unavailable_after(AFTER);
        let locks = locks.connect(&server.url()).await.unwrap();
        let waits = LockLayer::new(locks.clone(), "order:{id}")
            .unwrap()
            .fail_open();
        let app = Router::new().route(
            "/shop.Orders/{id}",
            post(async || "served").layer(waits.wait(LONG)),
        );
        server.stop();
        let serve = async |timeout: &str| {
            let begun = Instant::now();
            let request = Request::post("/shop.Orders/1").version(Version::HTTP_2);
            let request = request.header("content-type", "application/grpc");
            let request = request.header("grpc-timeout", timeout);
            let request = request.body(Body::empty()).unwrap();
            let response = app.clone().oneshot(request).await.unwrap();
            assert_eq!(response.status(), StatusCode::OK);
            begun.elapsed()
        };
        // Served as soon as the server has not answered for long enough, and not after the wait.
        assert!(serve("9M").await < SOON);
        until_refused_at_once(&locks, "k").await;
        for _ in 0..20 {
            // Also for a caller that gives up before the wait is over.
            let took = serve("1S").await;
            assert!(took < Duration::from_millis(100), "{took:?}");
        }
        server.resume();
    })
    .await;
}
