//! An order service with its lock policies in a file: the locked routes, their keys, and the
//! responses to refused requests.
//!
//! `locks.toml` is the file, `service.rs` the service. The other files simulate customers and the
//! operator.

mod service;
mod story;

use std::{net::SocketAddr, path::PathBuf, process::ExitCode};

use anyhow::Context;
use clap::Parser;
use lock_examples::{run_id, start, stopped};
use lock_runtime::LockClient;
use lock_tower::{LockPolicies, PolicyError, inspector::Inspector};
use tokio::{
    net::TcpListener,
    signal::unix::{SignalKind, signal},
};

use crate::service::{Orders, app};

const LOCKS: &str = include_str!("locks.toml");

/// Serves orders under the lock policies of a file, to simulated customers and an operator
///
/// The run fails if an order is ever charged twice.
#[derive(Debug, Parser)]
#[command(name = "orders")]
struct Options {
    /// Serve at this address until Ctrl-C, instead of running the story
    #[arg(long, value_name = "ADDRESS", num_args = 0..=1, default_missing_value = "127.0.0.1:8080")]
    serve: Option<SocketAddr>,

    /// Read the policies from this file, instead of those of the example
    #[arg(long, value_name = "FILE", requires = "serve")]
    policies: Option<PathBuf>,

    /// Keep the locks in this Redis, such as redis://user:password@host:6379/0, instead of in
    /// memory
    #[arg(long, value_name = "URL")]
    redis: Option<String>,
}

fn main() -> ExitCode {
    let options = Options::parse();
    start("orders", async move {
        let url = options.redis.as_deref().unwrap_or("memory:");
        // Servers of one service share a namespace, or they would not exclude each other. A story
        // is alone.
        let namespace = if options.serve.is_some() {
            "orders".to_owned()
        } else {
            run_id("orders")
        };
        let locks = LockClient::builder()
            .namespace(namespace)
            .connect(url)
            .await?;
        let ended = match options.serve {
            Some(address) => serve(address, options.policies, locks.clone()).await,
            None => story::tell(locks.clone()).await,
        };
        locks.shutdown().await;
        ended
    })
}

async fn serve(
    address: SocketAddr,
    file: Option<PathBuf>,
    locks: LockClient,
) -> anyhow::Result<ExitCode> {
    let policies = match &file {
        Some(file) => LockPolicies::from_file(file)?,
        None => LockPolicies::from_toml_str(LOCKS)?,
    };
    let stopped = stopped()?;
    let listener = TcpListener::bind(address)
        .await
        .with_context(|| format!("cannot serve at {address}"))?;
    let address = listener.local_addr()?;
    println!(
        "orders serves at http://{address} until Ctrl-C or SIGTERM.\n\n  \
         curl -i -X POST http://{address}/orders/7/pay\n  \
         curl -i http://{address}/orders/7\n  \
         curl -N http://{address}/reports/2026-11 -H 'x-tenant: acme'\n  \
         http://{address}/locks         in a browser: who holds which lock, and who waits"
    );
    if let Some(file) = &file {
        println!(
            "  kill -HUP {}         reloads {}",
            std::process::id(),
            file.display()
        );
    }
    reload_on_hangup(policies.clone(), |reloaded| match reloaded {
        Ok(()) => eprintln!("orders: policies reloaded"),
        Err(error) => eprintln!("orders: the policies were not changed:\n{error}"),
    })?;
    // In production, behind a middleware that admits operators only.
    let inspector = Inspector::new(locks.clone()).allow_revoke(&format!("http://{address}"));
    let app = app(Orders::default(), locks, policies).nest_service("/locks", inspector);
    let app = app.into_make_service_with_connect_info::<SocketAddr>();
    axum::serve(listener, app)
        .with_graceful_shutdown(stopped)
        .await?;
    Ok(ExitCode::SUCCESS)
}

/// Reloads the policies on each SIGHUP. An invalid file changes nothing.
fn reload_on_hangup(
    policies: LockPolicies,
    tell: impl Fn(Result<(), PolicyError>) + Send + 'static,
) -> anyhow::Result<()> {
    let mut hangups = signal(SignalKind::hangup()).context("cannot listen for SIGHUP")?;
    tokio::spawn(async move {
        while hangups.recv().await.is_some() {
            tell(policies.reload());
        }
    });
    Ok(())
}
