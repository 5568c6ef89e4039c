//! An inventory over gRPC: warehouses reserve and release pieces concurrently, while an auditor
//! counts the stock. A layer around the tonic server admits one request at a time for each item.
//!
//! The lock is configured in `server.rs`.

mod client;
mod server;
mod stock;

use std::{
    net::{Ipv4Addr, SocketAddr},
    process::ExitCode,
};

use clap::{Parser, value_parser};
use futures_util::future::{join_all, try_join_all};
use lock_examples::{run_id, start, stopped};
use lock_runtime::LockClient;
use tokio::sync::oneshot;
use tonic::transport::server::TcpIncoming;

use crate::{
    client::{Client, Ledger},
    server::serve,
    stock::Stock,
};

/// The items, each with its own lock.
const ITEMS: [&str; 2] = ["bolt", "nut"];

/// Runs warehouses that reserve and release stock over gRPC during a stock count, and counts
/// errors
///
/// The server holds a lock for each item, from the request to the last frame of the response: a
/// stock count is streamed under its lock, and no piece moves until the count is complete. A
/// request that waits too long is refused with a retry delay, and its client retries. The run
/// fails if more was reserved than in stock, or if a count was not exact.
#[derive(Debug, Parser)]
#[command(name = "inventory")]
struct Options {
    /// The number of warehouses, each with its own connection
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = value_parser!(u64).range(2..=500))]
    warehouses: u64,

    /// The number of orders of each warehouse
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = value_parser!(u64).range(1..))]
    orders: u64,

    /// The number of pieces of each item
    #[arg(long, value_name = "N", default_value_t = 1_000)]
    stock: u64,

    /// Keep the locks in this Redis, such as redis://user:password@host:6379/0, instead of in
    /// memory
    #[arg(long, value_name = "URL")]
    redis: Option<String>,

    /// Serve without the lock, to show the race
    #[arg(long)]
    no_lock: bool,

    /// Only serve at this address, until Ctrl-C or SIGTERM, without warehouses
    #[arg(long, value_name = "ADDRESS:PORT", conflicts_with_all = ["warehouses", "orders"])]
    serve: Option<SocketAddr>,
}

fn main() -> ExitCode {
    let options = Options::parse();
    start("inventory", async move { open(&options).await })
}

async fn open(options: &Options) -> anyhow::Result<ExitCode> {
    if let Some(address) = options.serve {
        return open_until_stopped(options, address).await;
    }
    let Options {
        warehouses,
        orders,
        stock,
        redis,
        no_lock,
        serve: _,
    } = options;
    println!(
        "inventory: {warehouses} warehouses place {orders} orders each, over gRPC, for {stock} bolts and {stock} nuts.\n\
         An auditor counts the stock meanwhile. {}\n",
        match (no_lock, redis) {
            (true, _) => "With --no-lock, requests can overlap.",
            (false, None) =>
                "LockLayer::new(locks, \"item:{header.x-item}\") serializes them per item, in memory.",
            (false, Some(_)) =>
                "LockLayer::new(locks, \"item:{header.x-item}\") serializes them per item, in Redis.",
        },
    );
    let locks = connect(options).await?;
    let incoming = TcpIncoming::bind((Ipv4Addr::LOCALHOST, 0).into())?.with_nodelay(Some(true));
    let url = format!("http://{}", incoming.local_addr()?);
    let (stop, stopped) = oneshot::channel::<()>();
    let stopped = async { drop(stopped.await) };
    let serving = serve(
        incoming,
        Stock::of(&ITEMS, *stock),
        (!no_lock).then(|| locks.clone()),
        stopped,
    );
    let business = async {
        // Dropped after the trade, even if it fails, to stop the server.
        let _stop = stop;
        trade(options, &url).await
    };
    let (served, report) = tokio::join!(serving, business);
    locks.shutdown().await;
    served?;
    Ok(report?.print(options))
}

async fn connect(options: &Options) -> anyhow::Result<LockClient> {
    let url = options.redis.as_deref().unwrap_or("memory:");
    let builder = LockClient::builder();
    // The servers at an address share their locks; a run with warehouses has its own.
    let builder = match options.serve {
        Some(_) => builder.namespace("inventory"),
        None => builder.namespace(run_id("inventory")),
    };
    Ok(builder.connect(url).await?)
}

/// Serves until the process is asked to stop. Requests in progress are completed, and their locks
/// are released.
async fn open_until_stopped(options: &Options, address: SocketAddr) -> anyhow::Result<ExitCode> {
    let stopped = stopped()?;
    let locks = connect(options).await?;
    let incoming = TcpIncoming::bind(address)?.with_nodelay(Some(true));
    let address = incoming.local_addr()?;
    println!("inventory serves gRPC at http://{address} until Ctrl-C or SIGTERM.");
    let stock = Stock::of(&ITEMS, options.stock);
    let served = serve(
        incoming,
        stock,
        (!options.no_lock).then(|| locks.clone()),
        stopped,
    )
    .await;
    locks.shutdown().await;
    served?;
    Ok(ExitCode::SUCCESS)
}

/// The results of all clients.
struct Report {
    ledger: Ledger,
    /// Counts that were not exact.
    miscounted: u64,
}

async fn trade(options: &Options, url: &str) -> anyhow::Result<Report> {
    let warehouses = try_join_all((0..options.warehouses).map(|_| Client::connect(url))).await?;
    let auditors = try_join_all(ITEMS.map(|_| Client::connect(url))).await?;
    let audits = auditors
        .into_iter()
        .zip(ITEMS)
        .map(|(auditor, item)| audit(options, auditor, item));
    let trade = join_all(
        warehouses
            .into_iter()
            .map(|warehouse| warehouse.order(options.orders)),
    );
    let (ledgers, audits) = tokio::join!(trade, join_all(audits));

    let mut report = Report {
        ledger: ledgers.into_iter().fold(Ledger::default(), Ledger::add),
        miscounted: 0,
    };
    let confirmed = report.ledger.reserved;
    for ((mut auditor, during), (item, confirmed)) in
        audits.into_iter().zip(ITEMS.into_iter().zip(confirmed))
    {
        let after = auditor.count(item).await;
        let exact = after.is_some_and(|[on_the_shelf, set_aside]| {
            set_aside == confirmed && on_the_shelf + set_aside == options.stock
        });
        report.miscounted += u64::from(!during) + u64::from(!exact);
        report.ledger = report.ledger.add(auditor.ledger);
    }
    Ok(report)
}

/// Counts one item while it is traded. Returns whether the sum is correct.
async fn audit(options: &Options, mut auditor: Client, item: &'static str) -> (Client, bool) {
    let Some([on_the_shelf, set_aside]) = auditor.count(item).await else {
        return (auditor, false);
    };
    let sum = on_the_shelf + set_aside;
    println!(
        "{item}: {on_the_shelf} on the shelf and {set_aside} set aside are {sum} of {}",
        options.stock
    );
    (auditor, sum == options.stock)
}

impl Report {
    /// Prints the last line. The exit code indicates whether the lock prevented errors.
    fn print(&self, options: &Options) -> ExitCode {
        let Self {
            ledger:
                Ledger {
                    reserved,
                    sold_out,
                    refused,
                    errors,
                },
            miscounted,
        } = self;
        let oversold: u64 = reserved
            .iter()
            .map(|reserved| reserved.saturating_sub(options.stock))
            .sum();
        let orders = options.warehouses * options.orders;
        let reserved: u64 = reserved.iter().sum();
        println!(
            "\norders={orders} reserved={reserved} sold_out={sold_out} refused={refused} oversold={oversold} \
             miscounted={miscounted} errors={errors}"
        );
        let failed = *errors > 0 || (oversold + miscounted > 0 && !options.no_lock);
        if failed {
            ExitCode::FAILURE
        } else {
            ExitCode::SUCCESS
        }
    }
}
