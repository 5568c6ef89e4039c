//! The command line options.

use std::net::SocketAddr;

use anyhow::bail;
use clap::{Parser, ValueEnum, value_parser};

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
  flash-sale --store postgres --processes 4                         the same with a PostgreSQL, started for this run
  flash-sale --store etcd --processes 4                             locks in etcd, and the stock in a file
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
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = value_parser!(u64).range(..=i64::MAX.cast_unsigned()))]
    pub(crate) stock: u64,

    /// Keep the stock and its lock in this Redis, such as redis://user:password@host:6379/0,
    /// instead of in memory
    #[arg(
        long,
        value_name = "URL",
        group = "url",
        required_if_eq("store", "redis")
    )]
    pub(crate) redis: Option<String>,

    /// Keep them in this PostgreSQL database, such as postgres://user:password@host/database; needs
    /// the feature `postgres`
    #[arg(long, value_name = "URL", group = "url")]
    pub(crate) postgres: Option<String>,

    /// Keep the lock in this etcd, such as etcd://host:2379, and the stock in a file; needs the
    /// feature `etcd`
    #[arg(long, value_name = "URL", group = "url")]
    pub(crate) etcd: Option<String>,

    /// Keep the lock in this ZooKeeper, such as zookeeper://host:2181, and the stock in a file;
    /// needs the feature `zookeeper`
    #[arg(long, value_name = "URL", group = "url")]
    pub(crate) zookeeper: Option<String>,

    /// Keep them there; without a URL, `postgres`, `etcd` and `zookeeper` start a server for this
    /// run
    #[arg(long, value_name = "STORE")]
    pub(crate) store: Option<Store>,

    /// The number of server processes; more than one requires a store that they share
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

/// The place of the stock and of its lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Store {
    Memory,
    Redis,
    Postgres,
    Etcd,
    #[value(name = "zookeeper")]
    ZooKeeper,
}

impl Store {
    /// Returns its name in options, which is that of its feature.
    const fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Redis => "redis",
            Self::Postgres => "postgres",
            Self::Etcd => "etcd",
            Self::ZooKeeper => "zookeeper",
        }
    }

    const fn is_compiled_in(self) -> bool {
        match self {
            Self::Memory | Self::Redis => true,
            Self::Postgres => cfg!(feature = "postgres"),
            Self::Etcd => cfg!(feature = "etcd"),
            Self::ZooKeeper => cfg!(feature = "zookeeper"),
        }
    }

    /// Returns the beginnings of its URLs, and an example.
    const fn url(self) -> (&'static [&'static str], &'static str) {
        match self {
            Self::Memory => (&[], "memory:"),
            // Its client checks them.
            Self::Redis => (&[""], "redis://user:password@host:6379/0"),
            Self::Postgres => (
                &["postgres://", "postgresql://"],
                "postgres://user:password@host/database",
            ),
            Self::Etcd => (&["etcd://"], "etcd://host:2379"),
            Self::ZooKeeper => (&["zookeeper://"], "zookeeper://host:2181"),
        }
    }
}

impl Options {
    /// Returns the place of the stock and of its lock.
    ///
    /// # Errors
    /// If the options contradict each other, or need a feature that is not compiled in.
    pub(crate) fn store(&self) -> anyhow::Result<Store> {
        let by_url = self.shared().next();
        if let (Some(store), Some((other, _))) = (self.store, by_url)
            && store != other
        {
            let (store, other) = (store.name(), other.name());
            bail!("--{other} URL cannot be used with --store {store}");
        }
        let by_url = by_url.map(|(store, _)| store);
        let store = self.store.or(by_url).unwrap_or(Store::Memory);
        let name = store.name();
        if !store.is_compiled_in() {
            bail!(
                "--store {name} needs the feature `{name}`: \
                 cargo run --release -p lock-examples --features {name} --bin flash-sale -- --store {name}"
            );
        }
        let (schemes, example) = store.url();
        let begins = |url: &str| schemes.iter().any(|scheme| url.starts_with(scheme));
        if !self.url().is_none_or(begins) {
            bail!("--{name} needs a URL such as {example}");
        }
        if store == Store::Memory && self.processes > 1 {
            bail!(
                "{} processes need a shared store, but locks in memory are local to one process; \
                 add --redis URL, or --store postgres, etcd or zookeeper",
                self.processes
            );
        }
        Ok(store)
    }

    /// Returns the place of the stock and of its lock, in words.
    pub(crate) fn place(&self) -> anyhow::Result<&'static str> {
        Ok(match self.store()? {
            Store::Memory => "in memory",
            Store::Redis => "in Redis",
            Store::Postgres => "in PostgreSQL",
            Store::Etcd => "in a file and in etcd",
            Store::ZooKeeper => "in a file and in ZooKeeper",
        })
    }

    /// Returns the shared store that has a URL.
    fn shared(&self) -> impl Iterator<Item = (Store, &str)> {
        let urls = [
            (Store::Redis, &self.redis),
            (Store::Postgres, &self.postgres),
            (Store::Etcd, &self.etcd),
            (Store::ZooKeeper, &self.zookeeper),
        ];
        let urls = urls.into_iter();
        urls.filter_map(|(store, url)| Some((store, url.as_deref()?)))
    }

    /// Returns the URL of a shared store.
    pub(crate) fn url(&self) -> Option<&str> {
        self.shared().next().map(|(_, url)| url)
    }

    /// Returns the command line of a server process of this run.
    pub(crate) fn for_server(&self, run: &str) -> Vec<String> {
        let mut args = vec![
            format!("--child-of={run}"),
            format!("--concurrency={}", self.concurrency),
            format!("--stock={}", self.stock),
        ];
        let shared = self.shared();
        args.extend(shared.map(|(store, url)| format!("--{}={url}", store.name())));
        args.extend(self.no_lock.then(|| "--no-lock".to_owned()));
        args
    }
}
