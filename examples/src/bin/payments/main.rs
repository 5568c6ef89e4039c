//! Payments over HTTP: customers press twice, and their networks fail, so each payment is sent
//! several times, to two servers. Each is charged once, as the policy in `locks.toml` says.

use std::{
    net::SocketAddr,
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use axum::{Router, body::Body, extract::State, http::Request, routing::post};
use bytes::Bytes;
use clap::{Parser, value_parser};
use http_body_util::BodyExt as _;
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use lock_examples::{run_id, start};
use lock_runtime::{HeldLock, LockClient};
use lock_tower::{LockPolicies, OnceLayer, PolicyLayer};
use tokio::{net::TcpListener, task::JoinSet, time::sleep};

const LOCKS: &str = include_str!("locks.toml");

/// The time that a charge takes at the bank.
const CHARGE: Duration = Duration::from_millis(5);

/// Sends each payment several times to two servers, and counts the charges
///
/// The key of a payment is its customer and the `idempotency-key` of the request. The run fails if
/// a payment was charged twice or never, or if two answers to one payment differ.
#[derive(Debug, Parser)]
#[command(name = "payments")]
struct Options {
    /// The number of payments
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = value_parser!(u64).range(1..=100_000))]
    payments: u64,

    /// How often each payment is sent
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = value_parser!(u64).range(1..=100))]
    times: u64,

    /// Serve the payments without the layer, to see them charged again
    #[arg(long)]
    no_once: bool,

    /// Keep the results in this Redis, such as redis://user:password@host:6379/0, instead of in
    /// memory
    #[arg(long, value_name = "URL")]
    redis: Option<String>,
}

/// The number of charges at the bank.
type Charges = Arc<AtomicU64>;

/// The bank is sent the fencing token, with which it can refuse a charge that comes late.
async fn pay(State(charges): State<Charges>, held: Option<HeldLock>, amount: Bytes) -> String {
    sleep(CHARGE).await;
    let receipt = charges.fetch_add(1, Ordering::Relaxed);
    let fence = held.map_or(0, |held| held.fence().number());
    let amount = String::from_utf8_lossy(&amount);
    format!("receipt {receipt} for {amount}, fencing token {fence}")
}

/// Serves payments at a free port until the process ends.
async fn serve(
    locks: &LockClient,
    charges: &Charges,
    options: &Options,
) -> anyhow::Result<SocketAddr> {
    let policies = LockPolicies::from_toml_str(LOCKS)?;
    let app = Router::new().route("/payments", post(pay));
    let app = if options.no_once {
        app
    } else {
        // For the routes without `once`, if there were any.
        let locked = app.layer(PolicyLayer::new(locks.clone(), policies.clone()));
        locked.layer(OnceLayer::with_policies(locks.clone(), policies))
    };
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let app = app.with_state(charges.clone());
    tokio::spawn(async move { axum::serve(listener, app).await });
    Ok(address)
}

fn main() -> ExitCode {
    let options = Options::parse();
    start("payments", async move { charge(&options).await })
}

async fn charge(options: &Options) -> anyhow::Result<ExitCode> {
    let Options {
        payments, times, ..
    } = *options;
    println!(
        "payments: {payments} payments are sent {times} times each, to two servers.\n\
         The policy in locks.toml serves each once, for its customer and idempotency key.\n"
    );
    let url = options.redis.as_deref().unwrap_or("memory:");
    let namespace = run_id("payments");
    let connect = || LockClient::builder().namespace(&namespace).connect(url);
    let one = connect().await?;
    // Each process has a client. A store in memory belongs to one.
    let other = match options.redis {
        Some(_) => connect().await?,
        None => one.clone(),
    };
    let charges = Charges::default();
    let servers = [
        serve(&one, &charges, options).await?,
        serve(&other, &charges, options).await?,
    ];
    let client: Client<_, Body> = Client::builder(TokioExecutor::new()).build_http();
    let mut requests = JoinSet::new();
    for number in 0..payments * times {
        let payment = number % payments;
        let server = servers[(number / payments % 2) as usize];
        let request = Request::post(format!("http://{server}/payments"))
            .header("x-customer", payment % 7)
            .header("idempotency-key", format!("{payment}"))
            .body(Body::from(format!("{payment} EUR")))?;
        let client = client.clone();
        requests.spawn(async move {
            let response = client.request(request).await?;
            let status = response.status();
            let is_replay = response.headers().contains_key("idempotent-replayed");
            let answer = response.into_body().collect().await?.to_bytes();
            Ok::<_, anyhow::Error>((payment, status, is_replay, answer))
        });
    }
    let mut answers = vec![None::<Bytes>; payments as usize];
    let (mut replays, mut different, mut errors) = (0_u64, 0_u64, 0_u64);
    while let Some(answer) = requests.join_next().await {
        let (payment, status, is_replay, answer) = answer??;
        errors += u64::from(!status.is_success());
        replays += u64::from(is_replay);
        let first = answers[payment as usize].get_or_insert_with(|| answer.clone());
        different += u64::from(*first != answer);
    }
    let mut forgotten = JoinSet::new();
    for payment in 0..payments {
        let once = one.once(format!("pay:{}:{payment}", payment % 7));
        forgotten.spawn(once.forget());
    }
    forgotten.join_all().await;
    one.shutdown().await;
    other.shutdown().await;
    let charges = charges.load(Ordering::Relaxed);
    println!(
        "payments={payments} requests={} charges={charges} replays={replays} different={different} errors={errors}",
        payments * times
    );
    Ok(match charges == payments && different == 0 && errors == 0 {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}
