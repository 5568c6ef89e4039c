//! The command line options.

use std::net::SocketAddr;

use clap::{Parser, value_parser};

const ABOUT: &str = "\
Sells a limited stock to a crowd of customers, and counts the sales.

Starts one or more HTTP servers as separate processes and sends them POST /buy/sneaker over many connections at once. Each
sale reads the stock, yields, and writes it back: a race, unless #[distributed_lock] admits one sale at a time across all
processes. --no-lock shows the race.

The run fails if more was sold than in stock, if a request got no proper response, or if a lock was left behind.";

const EXAMPLES: &str = "\
Examples:
  flash-sale                                                        one server, everything in memory
  flash-sale --redis redis://127.0.0.1:6379/0 --processes 4         four servers that share a Redis
  flash-sale --no-lock                                              the race without the lock
  flash-sale --serve 127.0.0.1:8080                                 a server for an external load generator";

/// The command line options.
#[derive(Clone, Debug, Parser)]
#[command(name = "flash-sale", about = "Sells a limited stock to a crowd of customers", long_about = ABOUT, after_help = EXAMPLES)]
pub(crate) struct Options {
    /// The number of attempts to buy
    #[arg(long, value_name = "N", default_value_t = 20_000, value_parser = value_parser!(u64).range(1..))]
    pub(crate) requests: u64,

    /// The number of concurrent customers, each with its own connection
    #[arg(long, value_name = "N", default_value_t = 1_000, value_parser = value_parser!(u64).range(1..=1_000_000))]
    pub(crate) concurrency: u64,

    /// The number of pieces in stock
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    pub(crate) stock: u64,

    /// Keep the stock and its lock in this Redis, such as redis://user:password@host:6379/0,
    /// instead of in memory
    #[arg(long, value_name = "URL")]
    pub(crate) redis: Option<String>,

    /// The number of server processes; more than one requires --redis
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = value_parser!(u64).range(1..=64))]
    pub(crate) processes: u64,

    /// Sell without the lock, to show the race
    #[arg(long)]
    pub(crate) no_lock: bool,

    /// Only serve, at this address, until Ctrl-C
    #[arg(long, value_name = "ADDR", conflicts_with_all = ["processes", "requests"])]
    pub(crate) serve: Option<SocketAddr>,

    /// Serve on behalf of a parent process, under the name of its run.
    #[arg(long, value_name = "RUN", hide = true)]
    pub(crate) child_of: Option<String>,
}

impl Options {
    /// Returns the command line of a server process of this run.
    pub(crate) fn for_server(&self, run: &str) -> Vec<String> {
        let mut args = vec![
            format!("--child-of={run}"),
            format!("--concurrency={}", self.concurrency),
            format!("--stock={}", self.stock),
        ];
        args.extend(self.redis.iter().map(|url| format!("--redis={url}")));
        args.extend(self.no_lock.then(|| "--no-lock".to_owned()));
        args
    }
}
