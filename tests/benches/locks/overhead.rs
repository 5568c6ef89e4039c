//! Cost that the macro and the layer add to a call of the runtime, in this process.
//!
//! Every call formats its key from a number, a header or a path, as in a service. `added_ns` and
//! `added_allocations` of the rows are differences: of the runtime to no lock at all, of the macro
//! to the runtime, of the layer to the runtime and the inner service; `policies` is the layer with
//! a file of a thousand routes, and `look-up` is the search for one of them. The differences are
//! small beside other load on a machine, so the subjects take turns every few milliseconds.

use std::{
    array,
    convert::Infallible,
    fmt::Write,
    hint::black_box,
    time::{Duration, Instant},
};

use http::{Method, Request, Response};
use lock_runtime::{KeyWriter, LockClient, LockError, distributed_lock};
use lock_tower::{LockLayer, LockPolicies, PolicyLayer};
use tokio::runtime;
use tower::{Layer, Service, ServiceExt, service_fn};

use crate::{
    contest::{ROUNDS, Round, Tally, rows},
    report::Row,
    turns::Call,
};

const SUBJECTS: [&str; 6] = [
    "lock-runtime",
    "macro",
    "layer",
    "policies",
    "look-up",
    "service",
];
const BATCH: u32 = 1_000;
const ORDER: u64 = 42;
const ROUTES: usize = 1_000;
const PATH: &str = "/shop-177/orders/42";

pub(crate) async fn measure(slice: Duration) -> Vec<Row> {
    let locks = LockClient::in_memory();
    locks
        .clone()
        .install()
        .expect("no client was installed before");
    let mut measured = SUBJECTS.map(|name| (name, Vec::new()));
    for round in 0..ROUNDS {
        eprintln!("overhead, round {} of {ROUNDS}", round + 1);
        let alternating = tokio::spawn(alternate(locks.clone(), slice * SUBJECTS.len() as u32));
        let taken = alternating.await.expect("a subject does not panic");
        measured
            .iter_mut()
            .zip(taken)
            .for_each(|((_, rounds), round)| rounds.push(round));
    }
    let counting = tokio::task::spawn_blocking({
        let locks = locks.clone();
        move || allocations(locks)
    });
    let allocations = counting.await.expect("a subject does not panic");
    locks.shutdown().await;

    let mut rows = rows("overhead", 1, &measured);
    let nanos =
        array::from_fn(|row: usize| rows[row].p50_us.map_or(f64::NAN, |micros| micros * 1e3));
    let added = |of: &[f64; SUBJECTS.len()]| {
        let [runtime, of_macro, layer, policies, look_up, service] = *of;
        let alone = runtime + service;
        [
            runtime,
            of_macro - runtime,
            layer - alone,
            policies - alone,
            look_up,
        ]
    };
    for ((row, nanos), count) in rows.iter_mut().zip(added(&nanos)).zip(added(&allocations)) {
        row.added_ns = Some(nanos);
        row.added_allocations = Some(count);
    }
    rows
}

/// One round of all subjects.
async fn alternate(locks: LockClient, slice: Duration) -> [Round; SUBJECTS.len()] {
    let subjects = Subjects::of(locks);
    let mut tallies: [_; SUBJECTS.len()] = array::from_fn(|_| (Tally::new(), Duration::ZERO, 0));
    let start = Instant::now();
    while start.elapsed() < slice {
        for ((tally, took, turns), taken) in tallies.iter_mut().zip(subjects.batches().await) {
            tally.record(taken / BATCH, BATCH.into());
            *took += taken;
            *turns += u64::from(BATCH);
        }
    }
    tallies.map(|(tally, took, turns)| tally.round(took, &[turns]))
}

/// Number of allocations for a call of each subject, after all one-time allocations.
fn allocations(locks: LockClient) -> [f64; SUBJECTS.len()] {
    let runtime = runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime can be built");
    let _runtime = runtime.enter();
    let subjects = Subjects::of(locks);
    runtime.block_on(subjects.batches());
    let count = |call: &dyn Fn()| {
        // The minimum, as a growing table or a timer is not part of the call.
        let counted = (0..50).map(|_| allocation_counter::measure(call).count_total);
        counted.min().unwrap_or_default() as f64
    };
    let Subjects {
        runtime: by_hand,
        layered,
        by_policy,
        policies,
        service,
    } = &subjects;
    [
        count(&|| runtime.block_on(by_hand.call())),
        count(&|| runtime.block_on(Macro.call())),
        count(&|| runtime.block_on(layered.call())),
        count(&|| runtime.block_on(by_policy.call())),
        count(&|| runtime.block_on(policies.call())),
        count(&|| runtime.block_on(service.call())),
    ]
}

struct Subjects<L, P, S> {
    runtime: Runtime,
    layered: Served<L>,
    by_policy: Served<P>,
    policies: LookUp,
    service: Served<S>,
}

impl Subjects<(), (), ()> {
    fn of(locks: LockClient) -> Subjects<impl Orders, impl Orders, impl Orders> {
        let layer =
            LockLayer::new(locks.clone(), "order:{header.order}").expect("a request can fill it");
        let policies = policies();
        let by_policy = PolicyLayer::new(locks.clone(), policies.clone());
        let service =
            service_fn(async |_: Request<()>| Ok::<_, Infallible>(Response::new(String::new())));
        Subjects {
            runtime: Runtime(locks),
            layered: Served(layer.layer(service)),
            by_policy: Served(by_policy.layer(service)),
            policies: LookUp(policies),
            service: Served(service),
        }
    }
}

impl<L: Orders, P: Orders, S: Orders> Subjects<L, P, S> {
    async fn batches(&self) -> [Duration; SUBJECTS.len()] {
        let Self {
            runtime,
            layered,
            by_policy,
            policies,
            service,
        } = self;
        [
            batch(runtime).await,
            batch(&Macro).await,
            batch(layered).await,
            batch(by_policy).await,
            batch(policies).await,
            batch(service).await,
        ]
    }
}

/// A thousand routes, as a large service has them: by resource and by method.
fn policies() -> LockPolicies {
    let mut text = "[defaults]\nkey = \"order:{id}\"\n[routes]\n".to_owned();
    for route in 0..ROUTES {
        let method = ["GET", "POST", "PUT|PATCH", "DELETE"][route % 4];
        writeln!(
            text,
            "\"{method} /shop-{}/orders/{{id}}\" = {{}}",
            route / 4
        )
        .expect("a string takes all");
    }
    LockPolicies::from_toml_str(&text).expect("a thousand routes are no mistake")
}

/// Times many calls together, since reading the clock costs a good part of a call.
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
        let result = self
            .0
            .exclusive(key.finish())
            .run(async |_| black_box(ORDER))
            .await;
        result.expect("no other task uses this key");
    }
}

struct Macro;

#[distributed_lock(key = "order:{order}")]
async fn locked(order: u64) -> Result<u64, LockError> {
    Ok(black_box(order))
}

impl Call for Macro {
    async fn call(&self) {
        locked(black_box(ORDER))
            .await
            .expect("no other task uses this key");
    }
}

struct LookUp(LockPolicies);

impl Call for LookUp {
    async fn call(&self) {
        let policy = self.0.find(black_box(&Method::POST), black_box(PATH));
        black_box(policy.expect("there is such a route"));
    }
}

/// A service for orders.
trait Orders:
    Service<Request<()>, Error = Infallible, Future: Send> + Clone + Send + Sync + 'static
{
}

impl<S> Orders for S where
    S: Service<Request<()>, Error = Infallible, Future: Send> + Clone + Send + Sync + 'static
{
}

/// A service that is cloned for each call, as servers do.
struct Served<S>(S);

impl<S: Orders> Call for Served<S> {
    async fn call(&self) {
        let request = Request::post(PATH)
            .header("order", "42")
            .body(())
            .expect("the header is valid");
        let response = self.0.clone().oneshot(request).await;
        black_box(response.unwrap_or_else(|never| match never {}));
    }
}
