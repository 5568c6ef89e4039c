//! Speed of locks, measured against the limit of the wire in the same run.
//!
//! `cargo bench -p lock-tests --bench locks -- [--only NAME] [--seconds N] [--json FILE]` starts
//! its own servers, prints a table and optionally writes a JSON array of rows. The subjects of a
//! scenario take turns, in three rounds after one for warm-up, and the figures are the medians.
//!
//! | subject | meaning |
//! |---|---|
//! | `lock-runtime` | ours |
//! | `wire` | bare `SET NX PX`, and a script that deletes, over one plain socket |
//! | `wire redis-rs` | the same over a connection of that crate |
//! | `scripts` | our own scripts, sent directly: what the client adds to them |
//! | `limit` | where there is no `wire`: a hand-off in one script, or a map of mutexes |
//! | `bare` | PostgreSQL: the statements without a library |
//! | `poller` | PostgreSQL: a lock that waiters request again every 50 ms, as ShedLock's |
//! | `etcd's own` | the lock service of etcd, over as many connections |
//! | `rslock` | the best Rust peer, over one server; it has no fencing tokens and no wait queue |

mod cluster;
mod contest;
mod cpu;
mod etcd;
mod freed;
mod handoff;
mod heap;
mod held;
mod hot;
mod layer;
mod list;
mod memory;
mod once;
mod overhead;
mod page;
mod postgres;
mod raw;
mod redlock;
mod report;
mod retained;
mod sentinel;
mod subject;
mod turns;
mod uncontended;
mod wait;
mod wire;

use std::{io, path::PathBuf, time::Duration};

use clap::{Parser, ValueEnum};

use self::report::{Report, Row};

#[derive(Parser)]
#[command(about = "How fast locks are, measured against the limit of the wire in the same run")]
struct Options {
    /// Write the rows to this file, as a JSON array.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Run only this scenario.
    #[arg(long)]
    only: Option<Scenario>,
    /// Seconds for each subject in each round.
    #[arg(long, default_value = "3")]
    seconds: u64,
    /// Passed by Cargo; without effect.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Scenario {
    /// Tasks that each have a separate key, over one connection.
    Uncontended,
    /// Clients that hand one key to each other.
    Handoff,
    /// Tasks of one client that hand one key to each other.
    Hot,
    /// Delay of the next holder.
    Wait,
    /// Delay of a grant to a waiter, by the way in which the lock became free.
    Freed,
    /// Leases that are held and renewed.
    Held,
    /// Locks that are retained for their next use.
    Retained,
    /// The store in this process.
    Memory,
    /// Work that is done once for a key, beside a plain lock and a `GET`.
    Once,
    /// Cost that the macro and the layer add.
    Overhead,
    /// Requests that wait for one lock in the layer.
    Layer,
    /// The list of many locks, and the calls beside it.
    List,
    /// A page of the inspector with many locks.
    Page,
    /// Five servers with agreement by majority.
    Redlock,
    /// A primary monitored by Sentinels.
    Sentinel,
    /// Three primaries that share the keys.
    Cluster,
    /// Locks and fencing in PostgreSQL, which is skipped where it is not installed.
    Postgres,
    /// Locks in etcd, which is skipped where it is not installed.
    Etcd,
}

/// Skips a server that is not installed, unless it is the only one.
fn installed(rows: io::Result<Vec<Row>>, only: Option<Scenario>) -> Vec<Row> {
    match rows {
        Ok(rows) => rows,
        Err(error) if only.is_none() => {
            eprintln!("skipped: {error}");
            Vec::new()
        }
        Err(error) => panic!("{error}"),
    }
}

#[tokio::main]
async fn main() {
    let options = Options::parse();
    let slice = Duration::from_secs(options.seconds.max(1));
    let mut report = Report::default();
    for &scenario in Scenario::value_variants() {
        if options.only.is_some_and(|only| only != scenario) {
            continue;
        }
        report.add(match scenario {
            Scenario::Uncontended => uncontended::measure(slice).await,
            Scenario::Handoff => handoff::measure(slice).await,
            Scenario::Hot => hot::measure(slice).await,
            Scenario::Wait => wait::measure(slice).await,
            Scenario::Freed => freed::measure(slice).await,
            Scenario::Held => held::measure().await,
            Scenario::Retained => retained::measure(slice).await,
            Scenario::Memory => memory::measure(slice).await,
            Scenario::Once => once::measure(slice).await,
            Scenario::Overhead => overhead::measure(slice).await,
            Scenario::Layer => layer::measure().await,
            Scenario::List => list::measure().await,
            Scenario::Page => page::measure().await,
            Scenario::Redlock => redlock::measure(slice).await,
            Scenario::Sentinel => sentinel::measure(slice).await,
            Scenario::Cluster => cluster::measure(slice).await,
            Scenario::Postgres => installed(postgres::measure(slice).await, options.only),
            Scenario::Etcd => installed(etcd::measure(slice).await, options.only),
        });
    }
    report.print();
    if let Some(path) = options.json
        && let Err(error) = report.write(&path)
    {
        eprintln!("cannot write {}: {error}", path.display());
        std::process::exit(1);
    }
}
