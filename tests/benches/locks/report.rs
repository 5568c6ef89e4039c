//! The figures: rows, the table and the JSON file.

use std::{io, path::Path};

use comfy_table::Table;
use serde::Serialize;

use crate::contest::ROUNDS;

/// Figures of one subject in one scenario. Figures that a scenario does not have are `null`, or
/// left out if they are among the extra ones at the end.
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
    /// CPU time for each operation, of this process and then of each server.
    pub(crate) cpu_us: Vec<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) p999_us: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) longest_us: Option<f64>,
    /// Turns that went to another client than the previous one. Without a wait queue, the client
    /// that has just released is the first to request the lock again.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) handed_on_percent: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) handed_on_per_s: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) core_percent: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) bytes_per_lease: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) bytes_per_waiter: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) added_ns: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) added_allocations: Option<f64>,
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
            cpu_us: Vec::new(),
            p999_us: None,
            longest_us: None,
            handed_on_percent: None,
            handed_on_per_s: None,
            core_percent: None,
            bytes_per_lease: None,
            bytes_per_waiter: None,
            added_ns: None,
            added_allocations: None,
        }
    }

    /// The extra figures, in words.
    fn besides(&self) -> String {
        let figures = [
            self.p999_us.map(|us| format!("p99.9 {us:.0} µs")),
            self.handed_on_percent
                .map(|percent| format!("{percent:.1} % handed on")),
            self.handed_on_per_s
                .map(|rate| format!("{rate:.0} hand-offs/s")),
            self.core_percent
                .map(|percent| format!("{percent:.1} % of a core")),
            self.bytes_per_lease
                .map(|bytes| format!("{bytes:.0} bytes/lease")),
            self.bytes_per_waiter
                .map(|bytes| format!("{bytes:.0} bytes/waiter")),
            self.added_ns.map(|nanos| format!("adds {nanos:.0} ns")),
            self.added_allocations
                .map(|count| format!("{count:.0} allocations")),
        ];
        figures.into_iter().flatten().collect::<Vec<_>>().join(", ")
    }
}

#[derive(Debug, Default)]
pub(crate) struct Report {
    rows: Vec<Row>,
}

impl Report {
    pub(crate) fn add(&mut self, rows: Vec<Row>) {
        self.rows.extend(rows);
    }

    pub(crate) fn print(&self) {
        let mut table = Table::new();
        table.set_header([
            "scenario",
            "subject",
            "clients",
            "ops/s",
            "of limit",
            "p50 µs",
            "p99 µs",
            "longest µs",
            "CPU µs",
            "served",
            "besides",
        ]);
        for row in &self.rows {
            let show = |value: Option<f64>, digits: usize| {
                value.map_or(String::new(), |value| format!("{value:.digits$}"))
            };
            let served = match (row.served_min, row.served_max) {
                (Some(min), Some(max)) => format!("{min} to {max}"),
                _ => String::new(),
            };
            let cpu_us: Vec<_> = row.cpu_us.iter().map(|us| format!("{us:.2}")).collect();
            table.add_row([
                row.scenario.to_owned(),
                row.subject.to_owned(),
                row.clients.to_string(),
                show(row.ops_per_s, 0),
                show(row.ratio_to_limit, 3),
                show(row.p50_us, 2),
                show(row.p99_us, 2),
                show(row.longest_us, 0),
                cpu_us.join(" + "),
                served,
                row.besides(),
            ]);
        }
        let cores = std::thread::available_parallelism().map_or(0, usize::from);
        println!(
            "{table}\n{cores} cores; medians of {ROUNDS} rounds; CPU: for each operation, of this process + each server; \
             served: the fewest and the most turns of one client"
        );
    }

    pub(crate) fn write(&self, path: &Path) -> io::Result<()> {
        std::fs::write(path, serde_json::to_vec_pretty(&self.rows)?)
    }
}
