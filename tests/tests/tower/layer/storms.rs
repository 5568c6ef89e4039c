//! Thousands of requests for a hundred locks, each with a resource that detects a violation.
//!
//! Sends twenty times as many with
//! `LOCK_TESTS_STORM=20 cargo test -p lock-tests --test tower layer::storms`.

use std::sync::{Arc, Mutex};

use axum::{Router, extract::Path, http::StatusCode, routing::post};
use lock_runtime::{HeldLock, LockClient};
use lock_tests::{
    FencedResource,
    place::{LONG, Place, times_as_long},
};
use lock_tower::LockLayer;
use tokio::{task::JoinSet, time::timeout};

use super::client::{Connected, Http};

const KEYS: usize = 100;
/// Clients that send one request after another. Over HTTP/1.1, each has its own connection.
const CLIENTS: usize = 64;

/// The resource of a lock.
#[derive(Default)]
struct Order {
    resource: FencedResource,
    /// The served requests and their fencing tokens.
    served: Mutex<Vec<(usize, u64)>>,
}

type Orders = Arc<[Order]>;

fn app(locks: LockClient, orders: Orders) -> Router {
    let handler = async move |Path((id, request)): Path<(usize, usize)>, lock: HeldLock| {
        let order = &orders[id];
        order
            .resource
            .increment(lock.fence())
            .await
            .map_err(|stale| (StatusCode::CONFLICT, stale.to_string()))?;
        order
            .served
            .lock()
            .unwrap()
            .push((request, lock.fence().number()));
        Ok::<_, (StatusCode, String)>(())
    };
    let layer = LockLayer::new(locks, "order:{id}").unwrap().wait(LONG);
    Router::new().route("/orders/{id}/{request}", post(handler).layer(layer))
}

/// Sends requests from [`CLIENTS`] clients to one server per client of `places`. All servers guard
/// the same resources.
async fn storm(http: Http, places: &[LockClient], requests: usize) {
    let requests = requests * times_as_long();
    let orders: Orders = (0..KEYS).map(|_| Order::default()).collect();
    let mut servers = Vec::new();
    for locks in places {
        servers.push(Connected::start(http, app(locks.clone(), orders.clone())).await);
    }
    let servers: Arc<[_]> = servers.into();
    let mut clients = JoinSet::new();
    for client in 0..CLIENTS {
        let servers = servers.clone();
        clients.spawn(async move {
            for request in (client..requests).step_by(CLIENTS) {
                // Clients with neighbouring numbers request the same lock.
                let id = request / 8 % KEYS;
                let server = &servers[client % servers.len()];
                let response = server.post(&format!("/orders/{id}/{request}")).await;
                assert_eq!(response.status(), 200, "{}", response.text().await.unwrap());
            }
        });
    }
    clients.join_all().await;

    let mut served = Vec::new();
    for order in orders.iter() {
        let report = order.resource.report();
        assert!(report.is_clean() && report.peak == 1, "{report}");
        let of_order = order.served.lock().unwrap();
        assert_eq!(report.value, of_order.len() as u64);
        assert!(
            of_order.is_sorted_by(|(_, earlier), (_, later)| earlier < later),
            "the fencing tokens do not increase"
        );
        served.extend(of_order.iter().map(|(request, _)| *request));
    }
    served.sort_unstable();
    assert!(
        served.iter().copied().eq(0..requests),
        "each request is served exactly once"
    );
    for locks in places {
        for id in 0..KEYS {
            let left = locks.inspect(format!("order:{id}")).await.unwrap();
            assert!(
                left.holders.is_empty() && left.waiters.is_empty(),
                "{left:?}"
            );
        }
    }
}

/// Fails if the storm hangs.
async fn in_a_while(storm: impl Future<Output = ()>) {
    let longest = LONG * 2 * u32::try_from(times_as_long()).unwrap();
    timeout(longest, storm).await.expect("the storm hangs");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_requests_are_served_one_by_one_over_http1() {
    in_a_while(storm(Http::One, &[LockClient::in_memory()], 10_000)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_requests_are_served_one_by_one_over_http2() {
    in_a_while(storm(Http::Two, &[LockClient::in_memory()], 10_000)).await;
}

/// Each server has its own lock client, like two processes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_to_two_servers_on_redis_are_served_one_by_one() {
    let place = Place::redis().await;
    in_a_while(storm(
        Http::Two,
        &[place.client().await, place.client().await],
        2_000,
    ))
    .await;
}
