//! The random faults of a storm over all modes.

use std::{mem, sync::Mutex, time::Duration};

use lock_tests::{
    Proxy,
    proxy::{Direction, DropReply},
    storm::{Fault, Nanos, nanos},
};
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use tokio::time::{Instant, sleep};

use super::{processes::Processes, server::Server};

/// The longest pause between two faults of one kind.
const PAUSE: Duration = Duration::from_millis(150);

/// Everything that can fail.
pub(super) struct Struck<'a> {
    pub(super) servers: &'a [Server],
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
    pub(super) fn ended(&self, name: String, since: Nanos, loses: bool) {
        self.0.lock().unwrap().push(Fault {
            name,
            time: since..nanos(),
            loses,
        });
    }

    pub(super) fn take(&self) -> Vec<Fault> {
        mem::take(&mut self.0.lock().unwrap())
    }
}

/// A fault of a server, or of a connection to it.
#[derive(Clone, Copy, Debug)]
enum Strike {
    Cut,
    Stall,
    LoseReplies,
    NoReplies,
    BlackHole,
    Stop,
    RestartFromLog,
    Redis(OfRedis),
}

/// A fault that needs a Redis server, or knows its protocol.
#[derive(Clone, Copy, Debug)]
enum OfRedis {
    LoseRepliesSilently,
    Pause,
    FlushScripts,
    RestartEmpty,
}

impl Strike {
    const OF_ANY_SERVER: [Self; 7] = [
        Self::Cut,
        Self::Stall,
        Self::LoseReplies,
        Self::NoReplies,
        Self::BlackHole,
        Self::Stop,
        Self::RestartFromLog,
    ];
    const OF_REDIS: [Self; 4] = [
        Self::Redis(OfRedis::LoseRepliesSilently),
        Self::Redis(OfRedis::Pause),
        Self::Redis(OfRedis::FlushScripts),
        Self::Redis(OfRedis::RestartEmpty),
    ];

    /// All faults of a server.
    fn of(server: &Server) -> Vec<Self> {
        let others: &[Self] = match server {
            Server::Redis(_) => &Self::OF_REDIS,
            _ => &[],
        };
        [&Self::OF_ANY_SERVER, others].concat()
    }
}

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
                strikes = Strike::of(&self.servers[0]);
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
            let empties = matches!(strike, Strike::Redis(OfRedis::RestartEmpty));
            if (empties || matches!(strike, Strike::RestartFromLog)) && several {
                stays_until = Instant::now() + self.quarantine;
            }
            let loses = empties && !several;
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
            Strike::Cut => return proxy.cut(),
            Strike::RestartFromLog => return server.restart_from_log().await,
            Strike::Stop => {
                server.stop();
                sleep(lasts).await;
                return server.resume();
            }
            Strike::Stall => {
                for direction in [Direction::ToServer, Direction::ToClient] {
                    proxy.delay(direction, lasts / 4);
                }
            }
            Strike::LoseReplies => proxy.drop_reply(DropReply::next().times(3)),
            Strike::NoReplies => proxy.drop_all_replies(),
            Strike::BlackHole => proxy.black_hole(),
            Strike::Redis(strike) => {
                let Server::Redis(server) = server else {
                    unreachable!("it is no strike of this server");
                };
                match strike {
                    OfRedis::LoseRepliesSilently => {
                        proxy.drop_reply(DropReply::next().to("EVALSHA").silently());
                    }
                    OfRedis::Pause => {
                        let millis = lasts.as_millis().to_string();
                        server.command(&["CLIENT", "PAUSE", &millis, "ALL"]).await;
                    }
                    OfRedis::FlushScripts => {
                        server.command(&["SCRIPT", "FLUSH"]).await;
                        return;
                    }
                    OfRedis::RestartEmpty => return server.restart_empty().await,
                }
            }
        }
        sleep(lasts).await;
        proxy.let_through().await;
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
