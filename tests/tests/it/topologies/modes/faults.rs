//! The random faults of a storm over all modes.

use std::{sync::Mutex, time::Duration};

use lock_tests::{
    Proxy, RedisServer,
    proxy::{Direction, DropReply},
    storm::{Fault, Nanos, nanos},
};
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use tokio::time::{Instant, sleep};

use super::processes::Processes;

/// The longest pause between two faults of one kind.
const PAUSE: Duration = Duration::from_millis(150);

/// Everything that can fail.
pub(super) struct Struck<'a> {
    pub(super) servers: &'a [RedisServer],
    /// For each client, a proxy to each server.
    pub(super) proxies: &'a [Vec<Proxy>],
    pub(super) processes: &'a Processes,
    pub(super) lease: Duration,
    /// The time after a restart for which a server of a quorum does not vote, so that the others
    /// must.
    pub(super) quarantine: Duration,
    pub(super) log: &'a Faults,
}

/// The faults so far.
#[derive(Debug, Default)]
pub(super) struct Faults(Mutex<Vec<Fault>>);

impl Faults {
    fn ended(&self, name: String, since: Nanos, loses: bool) {
        self.0.lock().unwrap().push(Fault {
            name,
            time: since..nanos(),
            loses,
        });
    }

    pub(super) fn into_inner(self) -> Vec<Fault> {
        self.0.into_inner().unwrap()
    }
}

/// A fault of a server, or of a connection to it.
#[derive(Clone, Copy, Debug)]
enum Strike {
    Cut,
    Stall,
    LoseReplies,
    LoseRepliesSilently,
    NoReplies,
    BlackHole,
    Stop,
    Pause,
    FlushScripts,
    RestartFromLog,
    RestartEmpty,
}

const STRIKES: [Strike; 11] = [
    Strike::Cut,
    Strike::Stall,
    Strike::LoseReplies,
    Strike::LoseRepliesSilently,
    Strike::NoReplies,
    Strike::BlackHole,
    Strike::Stop,
    Strike::Pause,
    Strike::FlushScripts,
    Strike::RestartFromLog,
    Strike::RestartEmpty,
];

impl Struck<'_> {
    /// Makes servers, the network and processes fail for the given time. All faults are over at the
    /// end.
    pub(super) async fn strike_for(&self, time: Duration, seed: u64) {
        let until = Instant::now() + time;
        let (wire, processes) = (
            StdRng::seed_from_u64(seed),
            StdRng::seed_from_u64(seed.wrapping_add(1)),
        );
        tokio::join!(
            self.strike_servers(until, wire),
            self.strike_processes(until, processes)
        );
    }

    async fn strike_servers(&self, until: Instant, mut random: StdRng) {
        // Each fault occurs once before any occurs again.
        let mut strikes = Vec::new();
        // A majority of the servers works at any time.
        let (mut server, mut stays_until) = (0, Instant::now());
        while Instant::now() < until && !self.servers.is_empty() {
            if strikes.is_empty() {
                strikes = STRIKES.to_vec();
            }
            let strike = strikes.swap_remove(random.random_range(0..strikes.len()));
            if Instant::now() >= stays_until {
                server = random.random_range(0..self.servers.len());
            }
            let client = random.random_range(0..self.proxies.len());
            let lasts = self.lease.mul_f64(random.random_range(0.05..0.6));
            let since = nanos();
            self.strike(strike, server, client, lasts).await;
            let several = self.servers.len() > 1;
            if matches!(strike, Strike::RestartFromLog | Strike::RestartEmpty) && several {
                stays_until = Instant::now() + self.quarantine;
            }
            let loses = matches!(strike, Strike::RestartEmpty) && !several;
            self.log.ended(
                format!("{strike:?} server {server}, client {client}"),
                since,
                loses,
            );
            sleep(PAUSE.mul_f64(random.random())).await;
        }
    }

    async fn strike(&self, strike: Strike, server: usize, client: usize, lasts: Duration) {
        let (proxy, server) = (&self.proxies[client][server], &self.servers[server]);
        match strike {
            Strike::Cut => proxy.cut(),
            Strike::Stall => {
                for direction in [Direction::ToServer, Direction::ToClient] {
                    proxy.delay(direction, lasts / 4);
                }
            }
            Strike::LoseReplies => proxy.drop_reply(DropReply::next().times(3)),
            Strike::LoseRepliesSilently => {
                proxy.drop_reply(DropReply::next().to("EVALSHA").silently())
            }
            Strike::NoReplies => proxy.drop_all_replies(),
            Strike::BlackHole => proxy.black_hole(),
            Strike::Stop => server.stop(),
            Strike::Pause => {
                let millis = lasts.as_millis().to_string();
                server.command(&["CLIENT", "PAUSE", &millis, "ALL"]).await;
            }
            Strike::FlushScripts => _ = server.command(&["SCRIPT", "FLUSH"]).await,
            Strike::RestartFromLog => server.restart_from_log().await,
            Strike::RestartEmpty => server.restart_empty().await,
        }
        match strike {
            Strike::Cut | Strike::FlushScripts | Strike::RestartFromLog | Strike::RestartEmpty => {}
            Strike::Pause => sleep(lasts).await,
            Strike::Stop => {
                sleep(lasts).await;
                server.resume();
            }
            _ => {
                sleep(lasts).await;
                proxy.let_through().await;
            }
        }
    }

    async fn strike_processes(&self, until: Instant, mut random: StdRng) {
        // The storm cannot end before the queue entries of killed processes have expired.
        let kills_until = Instant::now() + (until - Instant::now()) / 3;
        while Instant::now() < until && !self.processes.is_empty() {
            sleep(PAUSE.mul_f64(random.random())).await;
            let index = random.random_range(0..self.processes.len());
            let lasts = self.lease.mul_f64(random.random_range(0.1..1.3));
            let since = nanos();
            let kills = random.random_bool(0.7) && Instant::now() < kills_until;
            if !kills {
                self.processes.stop(index);
                sleep(lasts).await;
                self.processes.resume(index);
                self.log
                    .ended(format!("stop of worker {index}"), since, false);
            } else {
                self.processes.kill(index).await;
                sleep(lasts / 3).await;
                self.processes.start(index);
                self.log
                    .ended(format!("kill of worker {index}"), since, false);
            }
        }
    }
}
