//! A flash sale: a crowd of customers, a limited stock, a fleet of servers, and a lock that keeps them from selling more
//! than there is.
//!
//! The critical section is in `shop.rs`. Everything else starts servers, plays the crowd and counts.

mod customers;
mod files;
mod options;
mod report;
mod server;
mod shop;
mod stock;

use std::process::ExitCode;

use anyhow::{Context, anyhow, bail};
use clap::Parser;
use futures_util::future::try_join_all;
use lock_examples::{Child, run_id, start};

use crate::{
    customers::{Experience, storm},
    options::Options,
    report::Report,
    server::{Account, lock_client, serve_parent, serve_public},
    stock::{RedisStock, Stock},
};

/// What is on sale.
const ITEM: &str = "sneaker";

fn main() -> ExitCode {
    let options = Options::parse();
    start("flash-sale", async move {
        match (&options.child_of, options.serve) {
            (Some(run), _) => serve_parent(&options, run).await,
            (None, Some(address)) => serve_public(&options, address).await,
            (None, None) => hold_sale(options).await,
        }
    })
}

async fn hold_sale(mut options: Options) -> anyhow::Result<ExitCode> {
    if options.processes > 1 && options.redis.is_none() {
        bail!(
            "{} processes need a store that they share, and locks in memory live in one process; add --redis URL",
            options.processes
        );
    }
    options.concurrency = options.concurrency.min(options.requests);
    files::make_room_for(options.concurrency)?;
    introduce(&options);

    let run = run_id("flash-sale");
    let Some(url) = &options.redis else {
        let (experience, servers) = run_servers(&options, &run).await?;
        let leftover_keys = servers.iter().map(|server| server.leftover_keys).sum();
        return Ok(Report {
            options: &options,
            experience: &experience,
            servers: &servers,
            leftover_keys,
        }
        .print());
    };
    // The lock client knows best what may be wrong with a server, and how to say it.
    lock_client(&options, &run)
        .connect(url)
        .await?
        .shutdown()
        .await;
    let stock = RedisStock::connect(url, &run).await?;
    Stock::Redis(stock.clone())
        .write(ITEM, options.stock)
        .await
        .context("cannot fill the stock")?;
    let sold = run_servers(&options, &run).await;
    // Asked once the servers have gone, so that nothing is on its way any more; cleaned up whatever happened.
    let leftover_keys = stock.leftover_locks().await;
    stock.clear(ITEM).await.context("cannot clean up")?;
    let (experience, servers) = sold?;
    let leftover_keys = leftover_keys.context("cannot count the locks that were left behind")?;
    Ok(Report {
        options: &options,
        experience: &experience,
        servers: &servers,
        leftover_keys,
    }
    .print())
}

fn introduce(options: &Options) {
    let Options {
        requests,
        concurrency,
        stock,
        processes,
        redis,
        no_lock,
        ..
    } = options;
    let servers = if *processes == 1 {
        "One server process sells".into()
    } else {
        format!("{processes} server processes sell")
    };
    println!(
        "flash-sale: {concurrency} customers at once try {requests} times to buy one of {stock} sneakers.\n\
         {servers} them over TCP. Stock and lock are {}.\n\
         A sale reads the stock, yields, and writes it back; {}\n",
        if redis.is_some() {
            "in Redis"
        } else {
            "in memory"
        },
        if *no_lock {
            "with --no-lock nothing keeps two sales apart."
        } else {
            "#[distributed_lock(key = \"stock:{item}\")] lets in one sale at a time."
        },
    );
}

/// Starts the servers, lets the customers loose, and ends the servers.
async fn run_servers(options: &Options, run: &str) -> anyhow::Result<(Experience, Vec<Account>)> {
    let children = (0..options.processes).map(|_| Child::spawn(options.for_server(run)));
    let mut children = children.collect::<anyhow::Result<Vec<_>>>()?;
    let mut addresses = Vec::new();
    for child in &mut children {
        addresses.push(child.line().await?.parse()?);
    }
    let experience = tokio::select! {
        experience = storm(&addresses, options.concurrency, options.requests) => experience,
        _ = tokio::signal::ctrl_c() => Err(anyhow!("interrupted")),
    };
    // Also after an interruption: a server that comes to its end gives back what it holds.
    let partings = try_join_all(children.into_iter().map(Child::end)).await;
    let (experience, partings) = (experience?, partings?);
    let accounts = partings
        .into_iter()
        .map(|parting| parting.context("a server gave no account")?.parse());
    Ok((experience, accounts.collect::<anyhow::Result<_>>()?))
}
