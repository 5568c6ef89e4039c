//! A flash sale: a crowd of customers, a limited stock, several servers, and a lock that prevents
//! overselling.
//!
//! The critical section is in `shop.rs`. The other files start servers, simulate the crowd and
//! count.

mod customers;
mod files;
#[cfg(feature = "observed")]
mod observed;
mod options;
mod private_server;
mod report;
mod server;
mod shop;
mod stock;

use std::{net::SocketAddr, process::ExitCode};

use anyhow::{Context, anyhow};
use clap::Parser;
use futures_util::future::try_join_all;
use lock_examples::{Child, run_id, start};

use crate::{
    customers::{Experience, storm},
    options::Options,
    report::Report,
    server::{Account, lock_client, serve_parent, serve_public},
    stock::{Stock, lock_namespace},
};

/// The item on sale.
const ITEM: &str = "sneaker";

fn main() -> ExitCode {
    let mut options = Options::parse();
    start("flash-sale", async move {
        options.store()?;
        // Ends after the run.
        let _server = private_server::start(&mut options).await?;
        match (&options.child_of, options.serve) {
            (Some(run), _) => serve_parent(&options, run).await,
            (None, Some(address)) => serve_public(&options, address).await,
            (None, None) => hold_sale(options).await,
        }
    })
}

async fn hold_sale(mut options: Options) -> anyhow::Result<ExitCode> {
    options.concurrency = options.concurrency.min(options.requests);
    files::make_room_for(options.concurrency)?;
    introduce(&options)?;

    let run = run_id("flash-sale");
    let Some(url) = options.url() else {
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
    // Connects a lock client first, because its errors best describe a problem with the server.
    lock_client(&options, &run)
        .connect(url)
        .await?
        .shutdown()
        .await;
    let stock = Stock::connect(&options, &run).await?;
    let filled = stock.fill(ITEM, options.stock).await;
    filled.context("cannot fill the stock")?;
    let sold = run_servers(&options, &run).await;
    // Counted after the servers have terminated, so that no request is in flight. The clean-up
    // runs even after an error.
    let leftover_keys = stock.leftover_locks().await;
    stock.clear(ITEM).await.context("cannot clean up")?;
    let (experience, servers) = sold?;
    let leftover_keys = leftover_keys.context("cannot count the leftover locks")?;
    Ok(Report {
        options: &options,
        experience: &experience,
        servers: &servers,
        leftover_keys,
    }
    .print())
}

fn introduce(options: &Options) -> anyhow::Result<()> {
    let Options {
        requests,
        concurrency,
        stock,
        processes,
        no_lock,
        ..
    } = options;
    let servers = if *processes == 1 {
        "One server process sells".into()
    } else {
        format!("{processes} server processes sell")
    };
    println!(
        "flash-sale: {concurrency} concurrent customers make {requests} attempts to buy one of {stock} sneakers.\n\
         {servers} them over TCP. Stock and lock are {}.\n\
         A sale reads the stock, yields, and writes it back; {}\n",
        options.place()?,
        if *no_lock {
            "with --no-lock, sales can overlap."
        } else {
            "#[distributed_lock(key = \"stock:{item}\")] admits one sale at a time."
        },
    );
    Ok(())
}

/// Starts the servers, runs the customers, and ends the servers.
async fn run_servers(options: &Options, run: &str) -> anyhow::Result<(Experience, Vec<Account>)> {
    let children = (0..options.processes).map(|_| Child::spawn(options.for_server(run)));
    let mut children = children.collect::<anyhow::Result<Vec<_>>>()?;
    let mut addresses = Vec::<SocketAddr>::new();
    for child in &mut children {
        addresses.push(child.line().await?.parse()?);
    }
    if cfg!(feature = "observed") {
        println!("Locks: {}", lock_namespace(run));
        for address in &addresses {
            println!(
                "Server: http://{address}/metrics http://{address}/ready http://{address}/locks"
            );
        }
    }
    let experience = tokio::select! {
        experience = storm(&addresses, options.concurrency, options.requests) => experience,
        _ = tokio::signal::ctrl_c() => Err(anyhow!("interrupted")),
    };
    // Also after an interruption: a server that shuts down releases its locks.
    let partings = try_join_all(children.into_iter().map(Child::end)).await;
    let (experience, partings) = (experience?, partings?);
    let accounts = partings
        .into_iter()
        .map(|parting| parting.context("a server sent no account")?.parse());
    Ok((experience, accounts.collect::<anyhow::Result<_>>()?))
}
