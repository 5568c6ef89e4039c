//! How fast locks are, measured against the limit of the wire in the same run.
//!
//! `cargo bench -p lock-tests --bench locks -- [--only NAME] [--seconds N] [--json FILE]` starts its own servers, prints a
//! table and, if asked, writes a JSON array of rows. The subjects of a scenario take turns, three rounds after one that
//! warms them up, and the figures are the medians.
//!
//! | subject | what it is |
//! |---|---|
//! | `lock-runtime` | ours |
//! | `limit` | the least that could do the same: the scripts sent raw, or a map of mutexes in this process |
//! | `rslock` | the best peer in Rust, over one server. Its scripts do less than the limit's: no fencing tokens; and it has no line |

mod cluster;
mod contest;
mod freed;
mod handoff;
mod heap;
mod held;
mod hot;
mod layer;
mod memory;
mod overhead;
mod raw;
mod redlock;
mod report;
mod sentinel;
mod subject;
mod turns;
mod uncontended;
mod wait;

use std::{path::PathBuf, time::Duration};

use clap::{Parser, ValueEnum};

use self::report::Report;

#[derive(Parser)]
#[command(about = "How fast locks are, measured against the limit of the wire in the same run")]
struct Options {
    /// Write the rows to this file, as a JSON array.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Run only this scenario.
    #[arg(long)]
    only: Option<Scenario>,
    /// How long each subject is measured in each round.
    #[arg(long, default_value = "3")]
    seconds: u64,
    /// Cargo says so; it means nothing here.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Scenario {
    /// Tasks that each have a key of their own, over one connection.
    Uncontended,
    /// Clients that hand one key to each other.
    Handoff,
    /// Tasks of one client that hand one key to each other.
    Hot,
    /// How late the next one starts.
    Wait,
    /// How late a waiter is granted a lock, by the way in which it became free.
    Freed,
    /// Leases that are held and renewed.
    Held,
    /// The store in this process.
    Memory,
    /// What the macro and the layer add.
    Overhead,
    /// Requests that wait for one lock in the layer.
    Layer,
    /// Five servers, of which a majority has to agree.
    Redlock,
    /// A primary that Sentinels watch.
    Sentinel,
    /// Three masters that share the keys.
    Cluster,
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
            Scenario::Memory => memory::measure(slice).await,
            Scenario::Overhead => overhead::measure(slice).await,
            Scenario::Layer => layer::measure().await,
            Scenario::Redlock => redlock::measure(slice).await,
            Scenario::Sentinel => sentinel::measure(slice).await,
            Scenario::Cluster => cluster::measure(slice).await,
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
