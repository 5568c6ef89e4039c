//! Turns of the subjects of a scenario, so that other load on the machine affects all of them.

use std::time::Duration;

use futures_util::future::{FutureExt, LocalBoxFuture};
use hdrhistogram::Histogram;

use crate::{
    cpu::{Server, cpu_of_all},
    report::Row,
    subject::Subject,
    turns::each,
    wire::WIRE,
};

/// Number of rounds that count, after a shorter one for warm-up.
pub(crate) const ROUNDS: usize = 3;

/// The subject that the others are compared with, where there is no [`WIRE`].
pub(crate) const LIMIT: &str = "limit";

/// The same where it is SQL that needs no library.
pub(crate) const BARE: &str = "bare";

/// Measurements of one subject during one round.
pub(crate) struct Tally {
    /// Nanoseconds.
    taken: Histogram<u64>,
    holder: Option<usize>,
    grants: u64,
    /// Grants to another client than the previous one.
    handed_on: u64,
}

impl Tally {
    pub(crate) fn new() -> Self {
        let taken = Histogram::new(3).expect("three digits are within what a histogram allows");
        Self {
            taken,
            holder: None,
            grants: 0,
            handed_on: 0,
        }
    }

    pub(crate) fn record(&mut self, each: Duration, times: u64) {
        self.taken
            .record_n(each.as_nanos() as u64, times)
            .expect("the histogram grows");
    }

    pub(crate) fn granted(&mut self, client: usize) {
        self.grants += 1;
        self.handed_on += u64::from(self.holder.replace(client) != Some(client));
    }

    /// Sums up a round; `served` has the number of turns of each client.
    pub(crate) fn round(&self, took: Duration, served: &[u64]) -> Round {
        let micros = |nanos: u64| nanos as f64 / 1e3;
        Round {
            ops: served.iter().sum(),
            cpu: Vec::new(),
            ops_per_s: served.iter().sum::<u64>() as f64 / took.as_secs_f64(),
            p50_us: micros(self.taken.value_at_quantile(0.5)),
            p99_us: micros(self.taken.value_at_quantile(0.99)),
            longest_us: micros(self.taken.max()),
            served: served
                .iter()
                .copied()
                .min()
                .zip(served.iter().copied().max())
                .filter(|_| served.len() > 1),
            handed_on_percent: (self.grants > 0)
                .then(|| 100.0 * self.handed_on as f64 / self.grants as f64),
            handed_on_per_s: (self.grants > 0).then(|| self.handed_on as f64 / took.as_secs_f64()),
        }
    }
}

/// Result of one subject in one round.
#[derive(Clone, Debug)]
pub(crate) struct Round {
    ops: u64,
    /// CPU time of this process and of each server, if it was measured.
    cpu: Vec<Duration>,
    ops_per_s: f64,
    p50_us: f64,
    p99_us: f64,
    longest_us: f64,
    /// The fewest and the most turns of one client, where there are several.
    served: Option<(u64, u64)>,
    /// Share of grants to another client; only where clients wait for each other.
    handed_on_percent: Option<f64>,
    handed_on_per_s: Option<f64>,
}

type Measure<'a> = Box<dyn Fn(usize, Duration) -> LocalBoxFuture<'a, Round> + 'a>;

pub(crate) struct Contest<'a> {
    scenario: &'static str,
    clients: usize,
    slice: Duration,
    servers: Vec<u32>,
    subjects: Vec<(&'static str, Measure<'a>)>,
}

impl<'a> Contest<'a> {
    /// Each subject is measured for a `slice` of each round.
    pub(crate) fn new(scenario: &'static str, clients: usize, slice: Duration) -> Self {
        Self {
            scenario,
            clients,
            slice,
            servers: Vec::new(),
            subjects: Vec::new(),
        }
    }

    /// The processes whose CPU time is measured beside that of this one.
    pub(crate) fn servers<'s, S: Server + 's>(
        mut self,
        servers: impl IntoIterator<Item = &'s S>,
    ) -> Self {
        self.servers = servers.into_iter().map(S::pid).collect();
        self
    }

    /// Adds a subject. `measure` takes the number of the round and its slice. Where clients wait
    /// for each other, every round needs a new key: requests that the end of the last round has cut
    /// off may still be on its key.
    pub(crate) fn subject<F: Future<Output = Round> + 'a>(
        mut self,
        name: &'static str,
        measure: impl Fn(usize, Duration) -> F + 'a,
    ) -> Self {
        self.subjects.push((
            name,
            Box::new(move |round, slice| measure(round, slice).boxed_local()),
        ));
        self
    }

    /// Adds a subject whose tasks each acquire and release a separate lock, repeatedly.
    pub(crate) fn each<S: Subject>(
        self,
        name: &'static str,
        subject: impl Fn(usize) -> S + Copy + 'a,
    ) -> Self {
        let tasks = self.clients;
        self.subject(name, move |_, slice| each(slice, tasks, subject))
    }

    pub(crate) async fn run(self) -> Vec<Row> {
        let mut measured: Vec<_> = self
            .subjects
            .iter()
            .map(|&(name, _)| (name, Vec::new()))
            .collect();
        for round in 0..=ROUNDS {
            eprintln!(
                "{}, {} clients, round {round} of {ROUNDS}",
                self.scenario, self.clients
            );
            let slice = if round == 0 {
                self.slice / 4
            } else {
                self.slice
            };
            for ((_, measure), (_, rounds)) in self.subjects.iter().zip(&mut measured) {
                let before = cpu_of_all(&self.servers);
                let mut one = measure(round, slice).await;
                let after = cpu_of_all(&self.servers).into_iter();
                one.cpu = after
                    .zip(before)
                    .map(|(now, then)| now.saturating_sub(then))
                    .collect();
                if round > 0 {
                    rounds.push(one);
                }
            }
        }
        rows(self.scenario, self.clients, &measured)
    }
}

/// A row for each subject, in the given order.
pub(crate) fn rows(
    scenario: &'static str,
    clients: usize,
    measured: &[(&'static str, Vec<Round>)],
) -> Vec<Row> {
    let limit = measured
        .iter()
        .find(|&&(name, _)| [WIRE, LIMIT, BARE].contains(&name));
    let of_limit = |name, rounds: &[Round]| {
        let (_, limit) = limit.filter(|&&(limit, _)| name != limit)?;
        Some(median(
            rounds
                .iter()
                .zip(limit)
                .map(|(round, limit)| round.ops_per_s / limit.ops_per_s),
        ))
    };
    let row = |&(name, ref rounds): &(&'static str, Vec<Round>)| {
        let of = |field: fn(&Round) -> f64| Some(median(rounds.iter().map(field)));
        let served = |end: fn((u64, u64)) -> u64| {
            let ends: Option<Vec<_>> = rounds.iter().map(|round| round.served.map(end)).collect();
            Some(median(ends?))
        };
        let handed_on = |field: fn(&Round) -> Option<f64>| {
            let handed_on: Option<Vec<_>> = rounds.iter().map(field).collect();
            handed_on.map(median)
        };
        let processes = rounds.first().map_or(0, |round| round.cpu.len());
        let cpu_us = |process: usize| {
            let each =
                |round: &Round| round.cpu[process].as_secs_f64() * 1e6 / round.ops.max(1) as f64;
            median(rounds.iter().map(each))
        };
        Row {
            cpu_us: (0..processes).map(cpu_us).collect(),
            ops_per_s: of(|round| round.ops_per_s),
            p50_us: of(|round| round.p50_us),
            p99_us: of(|round| round.p99_us),
            longest_us: of(|round| round.longest_us),
            served_min: served(|(min, _)| min),
            served_max: served(|(_, max)| max),
            handed_on_percent: handed_on(|round| round.handed_on_percent),
            handed_on_per_s: handed_on(|round| round.handed_on_per_s),
            ratio_to_limit: of_limit(name, rounds),
            ..Row::new(scenario, name, clients)
        }
    };
    measured.iter().map(row).collect()
}

fn median<T: Copy + PartialOrd>(values: impl IntoIterator<Item = T>) -> T {
    let mut values: Vec<_> = values.into_iter().collect();
    values.sort_by(|one, other| one.partial_cmp(other).expect("no figure is NaN"));
    values[values.len() / 2]
}
