//! Cost of requests that wait for their lock in the layer: the heap use of each, less that of the
//! same requests waiting in a service without a lock.

use std::{convert::Infallible, future, time::Duration};

use http::{Request, Response};
use lock_runtime::{LockClient, LockGuard};
use lock_tower::LockLayer;
use tokio::task::{JoinSet, yield_now};
use tower::{Layer, Service, ServiceExt, service_fn};

use crate::{heap, report::Row};

/// The default limit of waiters for a key.
const REQUESTS: usize = 10_000;

pub(crate) async fn measure() -> Vec<Row> {
    eprintln!("layer, {REQUESTS} requests that wait");
    let locked = growth(async || {
        let locks = LockClient::in_memory();
        let guard = locks
            .exclusive("order:42")
            .acquire()
            .await
            .expect("no other task uses this key");
        let layer = LockLayer::new(locks, "order:{header.order}").expect("a request can fill it");
        (
            layer.wait(Duration::from_secs(600)).layer(endless()),
            Some(guard),
        )
    });
    let (locked, alone) = (locked.await, growth(async || (endless(), None)).await);
    let mut row = Row::new("layer", "waiting requests", REQUESTS);
    row.bytes_per_waiter = Some((locked - alone) / REQUESTS as f64);
    vec![row]
}

fn endless()
-> impl Service<Request<()>, Response = Response<String>, Error = Infallible, Future: Send>
+ Clone
+ Send {
    service_fn(async |_: Request<()>| future::pending().await)
}

/// Heap use of `REQUESTS` requests to a service, each in a separate task, once all of them wait.
async fn growth<S>(service: impl AsyncFnOnce() -> (S, Option<LockGuard>) + Send + 'static) -> f64
where
    S: Service<Request<()>, Response: Send, Error: Send, Future: Send> + Clone + Send + 'static,
{
    let prepare = async || {
        let (service, guard) = service().await;
        (service, guard, JoinSet::new())
    };
    let wait = async |(service, _, requests): &mut (S, Option<LockGuard>, JoinSet<_>)| {
        for _ in 0..REQUESTS {
            let service = service.clone();
            requests.spawn(async move {
                let request = Request::post("/orders/42")
                    .header("order", "42")
                    .body(())
                    .expect("the header is valid");
                drop(service.oneshot(request).await);
            });
        }
        // Each task is polled once, one after the other.
        for _ in 0..REQUESTS {
            yield_now().await;
        }
    };
    heap::growth(prepare, wait).await
}
