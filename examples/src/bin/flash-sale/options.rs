//! The command line.

use std::net::SocketAddr;

use clap::{Parser, value_parser};

const ABOUT: &str = "\
Sells a limited stock to a crowd of customers, and counts what was sold.

Starts one or more HTTP servers as processes of their own and sends them POST /buy/sneaker over many connections at once.
Each sale reads the stock, yields, and writes it back: a race, unless #[distributed_lock] lets in one sale at a time, of the
whole fleet. With --no-lock you see the race.

It fails if more was sold than there was, if a request got no proper answer, or if a lock was left behind.";

const EXAMPLES: &str = "\
Examples:
  flash-sale                                                        one server, everything in memory
  flash-sale --redis redis://127.0.0.1:6379/0 --processes 4         four servers that share a Redis
  flash-sale --no-lock                                              what happens without the lock
  flash-sale --serve 127.0.0.1:8080                                 a server for a load tool of your own";

/// What the user asks for.
#[derive(Clone, Debug, Parser)]
#[command(name = "flash-sale", about = "Sells a limited stock to a crowd of customers", long_about = ABOUT, after_help = EXAMPLES)]
pub(crate) struct Options {
    /// How many times somebody tries to buy
    #[arg(long, value_name = "N", default_value_t = 20_000, value_parser = value_parser!(u64).range(1..))]
    pub(crate) requests: u64,

    /// How many customers are there at once, each on a connection of its own
    #[arg(long, value_name = "N", default_value_t = 1_000, value_parser = value_parser!(u64).range(1..=1_000_000))]
    pub(crate) concurrency: u64,

    /// How many pieces there are
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    pub(crate) stock: u64,

    /// Keep the stock and its lock in this Redis, such as redis://user:password@host:6379/0, instead of in memory
    #[arg(long, value_name = "URL")]
    pub(crate) redis: Option<String>,

    /// How many server processes sell; more than one needs --redis
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = value_parser!(u64).range(1..=64))]
    pub(crate) processes: u64,

    /// Sell without the lock, to see what it is good for
    #[arg(long)]
    pub(crate) no_lock: bool,

    /// Only serve, at this address, until ctrl-c
    #[arg(long, value_name = "ADDR", conflicts_with_all = ["processes", "requests"])]
    pub(crate) serve: Option<SocketAddr>,

    /// Serve on behalf of a parent process, under the names of its run.
    #[arg(long, value_name = "RUN", hide = true)]
    pub(crate) child_of: Option<String>,
}

impl Options {
    /// The command line of a server process of this run.
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
