//! What the macro and the layer add to a call of the runtime, in this process.
//!
//! Every call writes its key out of a number or a header, as in a service. The rows' `added_ns` are differences: of the runtime
//! to no lock at all, of the macro to the runtime, of the layer to the runtime and the service within.

use std::{convert::Infallible, hint::black_box, time::Duration};

use http::{Request, Response};
use lock_runtime::{KeyWriter, LockClient, LockError, distributed_lock};
use lock_tower::LockLayer;
use tower::{Layer, Service, ServiceExt, service_fn};

use crate::{
    contest::{Contest, Round},
    report::Row,
    turns::{Call, repeat, together},
};

const BATCH: u32 = 1_000;
const ORDER: u64 = 42;

pub(crate) async fn measure(slice: Duration) -> Vec<Row> {
    let locks = &LockClient::in_memory();
    locks.clone().install().expect("nobody else has installed one");
    let layer = &LockLayer::new(locks.clone(), "order:{header.order}").expect("a request can fill it");
    let service = service_fn(async |_: Request<()>| Ok::<_, Infallible>(Response::new(())));
    let mut rows = Contest::new("overhead", 1, slice)
        .subject("lock-runtime", |_, slice| time(slice, Runtime(locks.clone())))
        .subject("macro", |_, slice| time(slice, Macro))
        .subject("layer", |_, slice| time(slice, Served(layer.layer(service))))
        .subject("service", |_, slice| time(slice, Served(service)))
        .run()
        .await;
    let nanos: Vec<_> = rows.iter().map(|row| row.p50_us.map_or(f64::NAN, |micros| micros * 1e3)).collect();
    rows[0].added_ns = Some(nanos[0]);
    rows[1].added_ns = Some(nanos[1] - nanos[0]);
    rows[2].added_ns = Some(nanos[2] - nanos[0] - nanos[3]);
    locks.shutdown().await;
    rows
}

fn time(slice: Duration, call: impl Call) -> impl Future<Output = Round> {
    together(slice, [call], |call, watch| repeat(call, BATCH, watch))
}

struct Runtime(LockClient);

impl Call for Runtime {
    async fn call(&self) {
        let mut key = KeyWriter::new();
        key.lit("order:").arg(format_args!("{}", black_box(ORDER)));
        let result = self.0.exclusive(key.finish()).run(async |_| black_box(ORDER)).await;
        result.expect("nobody else wants this key");
    }
}

struct Macro;

#[distributed_lock(key = "order:{order}")]
async fn locked(order: u64) -> Result<u64, LockError> {
    Ok(black_box(order))
}

impl Call for Macro {
    async fn call(&self) {
        locked(black_box(ORDER)).await.expect("nobody else wants this key");
    }
}

/// A service, cloned for each call, as servers do.
struct Served<S>(S);

impl<S> Call for Served<S>
where
    S: Service<Request<()>, Error = Infallible, Future: Send> + Clone + Send + Sync + 'static,
{
    async fn call(&self) {
        let request = Request::builder().header("order", "42").body(()).expect("the header is valid");
        let response = self.0.clone().oneshot(request).await;
        black_box(response.unwrap_or_else(|never| match never {}));
    }
}
