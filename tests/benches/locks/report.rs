//! The figures: rows, the table, the JSON file.

use std::{io, path::Path, time::Duration};

use comfy_table::Table;
use hdrhistogram::Histogram;
use serde::Serialize;

/// What one subject did in one scenario.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) scenario: &'static str,
    pub(crate) subject: &'static str,
    pub(crate) clients: usize,
    pub(crate) ops_per_s: Option<f64>,
    pub(crate) p50_us: Option<f64>,
    pub(crate) p99_us: Option<f64>,
    pub(crate) served_min: Option<u64>,
    pub(crate) served_max: Option<u64>,
    pub(crate) ratio_to_limit: Option<f64>,
    pub(crate) core_percent: Option<f64>,
    pub(crate) bytes_per_lease: Option<f64>,
}

impl Row {
    pub(crate) fn new(scenario: &'static str, subject: &'static str, clients: usize) -> Self {
        Self {
            scenario,
            subject,
            clients,
            ops_per_s: None,
            p50_us: None,
            p99_us: None,
            served_min: None,
            served_max: None,
            ratio_to_limit: None,
            core_percent: None,
            bytes_per_lease: None,
        }
    }
}

/// What one subject did in one round.
#[derive(Clone, Debug)]
pub(crate) struct Round {
    pub(crate) ops_per_s: f64,
    pub(crate) p50_us: f64,
    pub(crate) p99_us: f64,
}

impl Round {
    pub(crate) fn new(took: Duration, latencies: &Histogram<u64>) -> Self {
        let micros = |quantile| latencies.value_at_quantile(quantile) as f64 / 1e3;
        Self { ops_per_s: latencies.len() as f64 / took.as_secs_f64(), p50_us: micros(0.5), p99_us: micros(0.99) }
    }
}

/// A histogram of nanoseconds.
pub(crate) fn latencies() -> Histogram<u64> {
    Histogram::new(3).expect("three digits are within what a histogram allows")
}

pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

#[derive(Debug, Default)]
pub(crate) struct Report {
    rows: Vec<Row>,
}

impl Report {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    pub(crate) fn add(&mut self, row: Row) {
        self.rows.push(row);
    }

    /// Adds a subject and, where there is one, the limit it took turns with; the ratio is the median of the rounds' ratios.
    pub(crate) fn compare(
        &mut self,
        scenario: &'static str,
        clients: usize,
        ours: &[Round],
        limit: Option<(&'static str, &[Round])>,
    ) {
        let row = |subject, rounds: &[Round]| {
            let of = |field: fn(&Round) -> f64| Some(median(rounds.iter().map(field).collect()));
            Row {
                ops_per_s: of(|round| round.ops_per_s),
                p50_us: of(|round| round.p50_us),
                p99_us: of(|round| round.p99_us),
                ..Row::new(scenario, subject, clients)
            }
        };
        let ratio = limit.map(|(_, limit)| {
            median(ours.iter().zip(limit).map(|(ours, limit)| ours.ops_per_s / limit.ops_per_s).collect())
        });
        self.add(Row { ratio_to_limit: ratio, ..row("lock-runtime", ours) });
        if let Some((subject, limit)) = limit {
            self.add(row(subject, limit));
        }
    }

    pub(crate) fn print(&self) {
        let mut table = Table::new();
        table.set_header([
            "scenario",
            "subject",
            "clients",
            "ops/s",
            "p50 µs",
            "p99 µs",
            "of limit",
            "core",
            "bytes/lease",
        ]);
        for row in &self.rows {
            let show =
                |value: Option<f64>, digits: usize| value.map_or(String::new(), |value| format!("{value:.digits$}"));
            table.add_row([
                row.scenario.to_owned(),
                row.subject.to_owned(),
                row.clients.to_string(),
                show(row.ops_per_s, 0),
                show(row.p50_us, 2),
                show(row.p99_us, 2),
                show(row.ratio_to_limit, 3),
                row.core_percent.map_or(String::new(), |percent| format!("{percent:.1} %")),
                show(row.bytes_per_lease, 0),
            ]);
        }
        let cores = std::thread::available_parallelism().map_or(0, usize::from);
        println!("{table}\n{cores} cores; medians of {} rounds", super::ROUNDS);
    }

    pub(crate) fn write(&self, path: &Path) -> io::Result<()> {
        std::fs::write(path, serde_json::to_vec_pretty(&self.rows)?)
    }
}
