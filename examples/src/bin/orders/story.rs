//! Customers that press the button twice, and an operator that changes the policies at the same
//! time.

use std::{collections::BTreeMap, fs, net::SocketAddr, process::ExitCode, time::Instant};

use anyhow::{Context, ensure};
use bytes::Bytes;
use futures_util::future::try_join_all;
use http_body_util::{BodyExt, Empty};
use hyper::{Method, Request, Response, StatusCode, body::Incoming, header::HeaderName};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use lock_runtime::LockClient;
use lock_tower::LockPolicies;
use rustix::process::{Signal, getpid, kill_process};
use tokio::{net::TcpListener, sync::mpsc};

use crate::{
    LOCKS, reload_on_hangup,
    service::{Orders, app},
};

/// The first is paid under the original policies, the second after the reload.
const ORDERS: [u64; 2] = [7, 8];
/// The number of simultaneous requests.
const PRESSES: u64 = 20;

pub(crate) async fn tell(locks: LockClient) -> anyhow::Result<ExitCode> {
    let directory = tempfile::tempdir()?;
    let file = directory.path().join("locks.toml");
    fs::write(&file, LOCKS)?;
    let policies = LockPolicies::from_file(&file)?;
    let (reloaded, mut reloads) = mpsc::unbounded_channel();
    reload_on_hangup(policies.clone(), move |result| drop(reloaded.send(result)))?;
    let orders = Orders::default();
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let customers = Customers::of(listener.local_addr()?);
    tokio::spawn(axum::serve(listener, app(orders.clone(), locks, policies)).into_future());
    println!(
        "orders: the lock policies of the service are in locks.toml. {PRESSES} concurrent requests try to pay an order.\n"
    );

    let presses = customers.press(ORDERS[0]).await?;
    println!("pay, no_wait = true:   {}", counted(&presses));
    let refused = presses
        .iter()
        .find(|(status, _)| *status == StatusCode::LOCKED);
    let (_, problem) = refused.context("no request was refused with 423")?;
    println!("                       {problem}");

    let since = Instant::now();
    let reports = [customers.report(), customers.report()];
    try_join_all(reports).await?;
    println!(
        "report, hold_until = body: two requests of one tenant, one after the other: {:.1?}",
        since.elapsed()
    );

    let mut reload = async |text: String| -> anyhow::Result<_> {
        fs::write(&file, text)?;
        kill_process(getpid(), Signal::HUP)?;
        reloads
            .recv()
            .await
            .context("the SIGHUP listener has ended")
    };
    let bad = LOCKS
        .replace("max_hold", "max_hodl")
        .replace("order:{id:int}", "order:{number:int}");
    let mistakes = reload(bad)
        .await?
        .err()
        .context("an invalid file was accepted")?;
    let shown: Vec<_> = mistakes
        .all()
        .iter()
        .map(|at| format!("{}:{}: {}", at.line, at.column, at.message))
        .collect();
    println!(
        "SIGHUP, invalid file:  rejected, the policies have not changed\n    {}",
        shown.join("\n    ")
    );
    reload(LOCKS.replace("no_wait = true", "wait = \"5s\"")).await??;
    println!("SIGHUP, wait = \"5s\":   accepted");
    let waited = customers.press(ORDERS[1]).await?;
    println!("pay, wait = \"5s\":      {}", counted(&waited));

    let paid = |presses: &[(StatusCode, String)]| {
        presses
            .iter()
            .filter(|(_, text)| text.ends_with("is paid"))
            .count()
    };
    let errors = presses
        .iter()
        .chain(&waited)
        .filter(|(status, _)| status.is_server_error())
        .count();
    let double_charges = orders.charges().saturating_sub(ORDERS.len() as u64);
    println!(
        "\ncharges={} double_charges={double_charges} refused={} errors={errors}",
        orders.charges(),
        counts(&presses).get(&StatusCode::LOCKED).unwrap_or(&0)
    );
    // All requests that waited must be served.
    let served = waited.iter().all(|(status, _)| status.is_success());
    let failed =
        double_charges > 0 || errors > 0 || paid(&presses) != 1 || paid(&waited) != 1 || !served;
    Ok(if failed {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}

fn counts(answers: &[(StatusCode, String)]) -> BTreeMap<StatusCode, usize> {
    answers
        .iter()
        .fold(BTreeMap::new(), |mut counts, (status, _)| {
            *counts.entry(*status).or_default() += 1;
            counts
        })
}

fn counted(answers: &[(StatusCode, String)]) -> String {
    let counts = counts(answers)
        .into_iter()
        .map(|(status, count)| format!("{count} x {status}"));
    counts.collect::<Vec<_>>().join(", ")
}

struct Customers {
    server: SocketAddr,
    http: Client<HttpConnector, Empty<Bytes>>,
}

impl Customers {
    fn of(server: SocketAddr) -> Self {
        Self {
            server,
            http: Client::builder(TokioExecutor::new()).build_http(),
        }
    }

    /// Sends all requests for an order at once.
    async fn press(&self, order: u64) -> anyhow::Result<Vec<(StatusCode, String)>> {
        let presses = (0..PRESSES).map(async |_| {
            let response = self
                .send(Method::POST, &format!("/orders/{order}/pay"))
                .await?;
            let status = response.status();
            let body = response.into_body().collect().await?.to_bytes();
            anyhow::Ok((status, String::from_utf8_lossy(&body).into_owned()))
        });
        try_join_all(presses).await
    }

    async fn report(&self) -> anyhow::Result<()> {
        let response = self.send(Method::GET, "/reports/2026-11").await?;
        ensure!(
            response.status().is_success(),
            "no report: {}",
            response.status()
        );
        response.into_body().collect().await?;
        Ok(())
    }

    async fn send(&self, method: Method, path: &str) -> anyhow::Result<Response<Incoming>> {
        let tenant = HeaderName::from_static("x-tenant");
        let uri = format!("http://{}{path}", self.server);
        let request = Request::builder()
            .method(method)
            .uri(uri)
            .header(tenant, "acme")
            .body(Empty::new())?;
        Ok(self.http.request(request).await?)
    }
}
