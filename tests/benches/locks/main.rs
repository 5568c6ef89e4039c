//! How fast locks are, measured against the limit of the wire in the same run.
//!
//! `cargo bench -p lock-tests --bench locks -- [--only NAME] [--seconds N] [--json FILE]` starts its own servers, prints a
//! table and, if asked, writes a JSON array of rows. Ours and the limit take turns within a scenario, three rounds, and the
//! figures are the medians.

mod held;
mod memory;
mod report;
mod uncontended;

use std::{path::PathBuf, time::Duration};

use clap::Parser;

use self::report::Report;

#[derive(Parser)]
#[command(about = "How fast locks are, measured against the limit of the wire in the same run")]
struct Options {
    /// Write the rows to this file, as a JSON array.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Run only this scenario.
    #[arg(long, value_parser = ["uncontended", "memory", "held"])]
    only: Option<String>,
    /// How long each subject is measured in each round.
    #[arg(long, default_value = "3")]
    seconds: u64,
    /// Cargo says so; it means nothing here.
    #[arg(long, hide = true)]
    bench: bool,
}

/// Rounds in which the subjects of a scenario take turns.
const ROUNDS: usize = 3;

#[tokio::main]
async fn main() {
    let options = Options::parse();
    let wanted = |name: &str| options.only.as_deref().is_none_or(|only| only == name);
    let slice = Duration::from_secs(options.seconds.max(1));
    let mut report = Report::new();
    if wanted("uncontended") {
        uncontended::measure(&mut report, slice).await;
    }
    if wanted("memory") {
        memory::measure(&mut report, slice).await;
    }
    if wanted("held") {
        held::measure(&mut report).await;
    }
    report.print();
    if let Some(path) = options.json
        && let Err(error) = report.write(&path)
    {
        eprintln!("cannot write {}: {error}", path.display());
        std::process::exit(1);
    }
}
