//! What the macro and the layer add to a call of the runtime, in this process.
//!
//! Every call writes its key out of a number or a header, as in a service. The rows' `added_ns` are differences: of the runtime
//! to no lock at all, of the macro to the runtime, of the layer to the runtime and the service within.
//! They are small beside what else happens on a machine, so the subjects take turns every few milliseconds here.

use std::{
    array,
    convert::Infallible,
    hint::black_box,
    time::{Duration, Instant},
};

use http::{Request, Response};
use lock_runtime::{KeyWriter, LockClient, LockError, distributed_lock};
use lock_tower::LockLayer;
use tower::{Layer, Service, ServiceExt, service_fn};

use crate::{
    contest::{ROUNDS, Round, Tally, rows},
    report::Row,
    turns::Call,
};

const SUBJECTS: [&str; 4] = ["lock-runtime", "macro", "layer", "service"];
const BATCH: u32 = 1_000;
const ORDER: u64 = 42;

pub(crate) async fn measure(slice: Duration) -> Vec<Row> {
    let locks = LockClient::in_memory();
    locks.clone().install().expect("nobody else has installed one");
    let mut measured = SUBJECTS.map(|name| (name, Vec::new()));
    for round in 0..ROUNDS {
        eprintln!("overhead, round {} of {ROUNDS}", round + 1);
        let alternating = tokio::spawn(alternate(locks.clone(), slice * SUBJECTS.len() as u32));
        let taken = alternating.await.expect("a subject does not panic");
        measured.iter_mut().zip(taken).for_each(|((_, rounds), round)| rounds.push(round));
    }
    locks.shutdown().await;

    let mut rows = rows("overhead", 1, &measured);
    let nanos: Vec<_> = rows.iter().map(|row| row.p50_us.map_or(f64::NAN, |micros| micros * 1e3)).collect();
    rows[0].added_ns = Some(nanos[0]);
    rows[1].added_ns = Some(nanos[1] - nanos[0]);
    rows[2].added_ns = Some(nanos[2] - nanos[0] - nanos[3]);
    rows
}

/// One round of all subjects.
async fn alternate(locks: LockClient, slice: Duration) -> [Round; SUBJECTS.len()] {
    let layer = LockLayer::new(locks.clone(), "order:{header.order}").expect("a request can fill it");
    let service = service_fn(async |_: Request<()>| Ok::<_, Infallible>(Response::new(String::new())));
    let (runtime, layered, service) = (Runtime(locks), Served(layer.layer(service)), Served(service));
    let mut tallies: [_; SUBJECTS.len()] = array::from_fn(|_| (Tally::new(), Duration::ZERO, 0));
    let start = Instant::now();
    while start.elapsed() < slice {
        let taken = [batch(&runtime).await, batch(&Macro).await, batch(&layered).await, batch(&service).await];
        for ((tally, took, turns), taken) in tallies.iter_mut().zip(taken) {
            tally.record(taken / BATCH, BATCH.into());
            *took += taken;
            *turns += u64::from(BATCH);
        }
    }
    tallies.map(|(tally, took, turns)| tally.round(took, &[turns]))
}

/// Reading the clock costs a good part of a call, so many are timed together.
async fn batch(call: &impl Call) -> Duration {
    let before = Instant::now();
    for _ in 0..BATCH {
        call.call().await;
    }
    before.elapsed()
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
