//! Costs of the layer beyond the runtime: allocations per request, and memory per waiting request.

use std::{convert::Infallible, future, time::Duration};

use axum::{body::Body, http::Request, response::Response};
use lock_runtime::LockClient;
use lock_tower::{LockLayer, LockPolicies, PolicyLayer};
use tokio::{
    runtime,
    task::{JoinSet, yield_now},
};
use tower::{Layer, Service, ServiceExt, service_fn};

const KIB: usize = 1024;

fn runtime() -> runtime::Runtime {
    runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
}

/// Allocations of a call, without those that occur only once.
fn allocations(runtime: &runtime::Runtime, call: impl AsyncFn()) -> u64 {
    let counted = (0..50).map(|_| {
        allocation_counter::measure(|| runtime.block_on(async { call().await })).count_total
    });
    // The minimum leaves out tables that grow, and timers.
    counted.min().unwrap()
}

#[test]
fn layer_allocates_at_most_four_times_beside_the_runtime() {
    const LAYER: u64 = 4;
    let runtime = runtime();
    let locks = runtime.block_on(async { LockClient::in_memory() });
    let by_hand = allocations(&runtime, async || {
        let key = lock_runtime::KeyWriter::new()
            .lit("order:")
            .arg(format_args!("{}", 7))
            .finish();
        locks.exclusive(key).run(async |_| ()).await.unwrap();
    });
    let service =
        service_fn(async |_: Request<Body>| Ok::<_, Infallible>(Response::new(Body::empty())));
    // Requests have no other extensions, so that of the lock costs two allocations. After a router,
    // which adds its own, it would not.
    let request = || {
        Request::post("/orders/7")
            .header("order", "7")
            .body(Body::empty())
            .unwrap()
    };
    let served = allocations(&runtime, async || drop(service.oneshot(request()).await));
    let policies =
        LockPolicies::from_toml_str("routes.\"POST /orders/{id}\" = { key = \"order:{id}\" }")
            .unwrap();
    let by_policy = PolicyLayer::new(locks.clone(), policies).layer(service);
    let by_template = LockLayer::new(locks.clone(), "order:{header.order}")
        .unwrap()
        .layer(service);
    for (name, locked) in [
        (
            "template",
            allocations(&runtime, async || {
                drop(by_template.clone().oneshot(request()).await)
            }),
        ),
        (
            "policies",
            allocations(&runtime, async || {
                drop(by_policy.clone().oneshot(request()).await)
            }),
        ),
    ] {
        println!(
            "{name}: {locked} allocations, {served} without the layer, {by_hand} of the runtime"
        );
        assert!(
            locked <= served + by_hand + LAYER,
            "{name}: {locked} > {served} + {by_hand} + {LAYER}"
        );
    }
}

/// The heap memory of `requests` pending requests to the service.
fn growth<S>(requests: usize, service: S) -> usize
where
    S: Service<Request<Body>, Response = Response, Error = Infallible, Future: Send>
        + Clone
        + Send
        + 'static,
{
    let runtime = runtime();
    let mut waiting = JoinSet::new();
    let grown = allocation_counter::measure(|| {
        runtime.block_on(async {
            for _ in 0..requests {
                let service = service.clone();
                waiting
                    .spawn(async move { drop(service.oneshot(Request::new(Body::empty())).await) });
            }
            // Each request is polled once.
            for _ in 0..requests {
                yield_now().await;
            }
        });
    });
    usize::try_from(grown.bytes_current).unwrap()
}

#[test]
fn ten_thousand_requests_that_wait_take_four_kib_each_at_most() {
    const REQUESTS: usize = 10_000;
    let runtime = runtime();
    let locks = LockClient::in_memory();
    let _guard = runtime
        .block_on(locks.exclusive("order").acquire())
        .unwrap();
    let endless = || {
        service_fn(async |_: Request<Body>| future::pending::<Result<Response, Infallible>>().await)
    };
    let key = lock_tower::key::global("order").unwrap();
    let lock = LockLayer::with_key(locks.clone(), key).wait(Duration::from_secs(600));
    let locked = growth(
        REQUESTS,
        lock.layer(endless())
            .map_response(|response| response.map(Body::new)),
    );
    let alone = growth(REQUESTS, endless());
    let each = (locked - alone) / REQUESTS;
    println!("{each} bytes for each request that waits");
    assert!(each <= 4 * KIB, "{each} bytes");
}
