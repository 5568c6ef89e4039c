//! Locks in PostgreSQL, on a server that waits for the disk and on one that does not. Each figure
//! has its own database.

mod payment;
mod peers;

use std::{io, time::Duration};

use futures_util::future::{join_all, try_join};
use lock_runtime::{LockClient, PostgresOptions};
use lock_tests::PostgresServer;

use self::{
    payment::{Check, Function, Payment, Trips},
    peers::{BareLock, Poller, Pool, Sharing},
};
use crate::{
    contest::{BARE, Contest, LIMIT, Round},
    held,
    report::Row,
    subject::{Ours, Subject as _, connect},
    turns::{contend, repeat, together},
};

const TASKS: [usize; 2] = [1, 64];
const CLIENTS: [usize; 2] = [2, 32];
const CONNECTIONS: usize = PostgresOptions::DEFAULT_CONNECTIONS.get();
const IDLE: usize = 100;
const LEASES: usize = 10_000;

/// # Errors
/// When PostgreSQL is not installed.
pub(crate) async fn measure(slice: Duration) -> io::Result<Vec<Row>> {
    let on_disk = PostgresServer::builder();
    let in_memory = on_disk.clone().in_memory();
    let mut rows = Vec::new();
    for (medium, settings) in [("on disk", on_disk), ("in memory", in_memory)] {
        // The default is not enough for 32 clients.
        let settings = settings.setting("max_connections", "300");
        let (server, crowded) =
            try_join(settings.clone().try_start(), settings.try_start()).await?;
        let bench = Bench {
            medium,
            slice,
            server,
        };
        for tasks in TASKS {
            rows.extend(bench.uncontended(tasks).await);
        }
        for clients in CLIENTS {
            rows.extend(bench.handoff(clients).await);
        }
        rows.extend(bench.idle(&crowded).await);
        rows.extend(bench.payment().await);
        rows.extend(bench.held().await);
    }
    Ok(rows)
}

struct Bench {
    medium: &'static str,
    slice: Duration,
    server: PostgresServer,
}

impl Bench {
    /// Returns the name of a scenario. There are few of them, so they need not be freed.
    fn scenario(&self, figure: &str) -> &'static str {
        format!("postgres {figure}, {}", self.medium).leak()
    }

    fn contest(&self, figure: &str, clients: usize) -> Contest<'_> {
        Contest::new(self.scenario(figure), clients, self.slice).servers([&self.server])
    }

    /// A new database and a client.
    async fn client(&self) -> (String, LockClient) {
        let url = self.server.new_database().await;
        let locks = connect(&url, 1).await.remove(0);
        (url, locks)
    }

    /// Acquire and release, every task its own key, over the same number of connections.
    async fn uncontended(&self, tasks: usize) -> Vec<Row> {
        let (url, locks) = self.client().await;
        let pool = Pool::connect(&url, CONNECTIONS).await;
        let contest = self.contest("uncontended", tasks);
        let contest = contest.each("lock-runtime", |task| {
            Ours::new(&locks, format!("bench:{task}"))
        });
        let contest = contest.each(BARE, |task| {
            BareLock::new(&pool, Sharing::Lent, format!("bare:{task}"))
        });
        let contest = contest.each("bare pipelined", |task| {
            BareLock::new(&pool, Sharing::Pipelined, format!("pipelined:{task}"))
        });
        let rows = contest.run().await;
        locks.shutdown().await;
        rows
    }

    /// Clients that hand one key to each other.
    async fn handoff(&self, clients: usize) -> Vec<Row> {
        let url = self.server.new_database().await;
        let ours = connect(&url, clients).await;
        let pollers = Poller::connect(&url, clients).await;
        let contest = self
            .contest("handoff", clients)
            .subject("lock-runtime", |round, slice| hand_off(&ours, round, slice))
            .subject("poller", |round, slice| {
                let subject = move |poller: &Poller| poller.of(format!("poller:{round}"));
                together(slice, pollers.iter().map(subject), contend)
            });
        let rows = contest.run().await;
        shut_down(&ours).await;
        rows
    }

    /// The same beside clients without requests, on the server `crowded`. The limit is without.
    async fn idle(&self, crowded: &PostgresServer) -> Vec<Row> {
        let quiet = connect(&self.server.new_database().await, 2).await;
        let url = crowded.new_database().await;
        let busy = connect(&url, 2).await;
        let idle = connect(&url, IDLE).await;
        for (client, locks) in idle.iter().enumerate() {
            let lock = Ours::new(locks, format!("idle:{client}"));
            lock.release(lock.acquire().await).await;
        }
        let contest = self
            .contest("idle clients", 2)
            .servers([&self.server, crowded])
            .subject("100 idle", |round, slice| hand_off(&busy, round, slice))
            .subject(LIMIT, |round, slice| hand_off(&quiet, round, slice));
        let rows = contest.run().await;
        for clients in [quiet, busy, idle] {
            shut_down(&clients).await;
        }
        rows
    }

    /// Transactions of one row, each connection its own. The lock is held all the time.
    async fn payment(&self) -> Vec<Row> {
        let (url, locks) = self.client().await;
        let payments = Payment::prepare(&url, &locks, CONNECTIONS).await;
        let mut rows = Vec::new();
        for (figure, trips) in [
            ("transaction", Trips::Each),
            ("transaction in one message", Trips::One),
        ] {
            let mut contest = self.contest(figure, CONNECTIONS);
            for (name, check) in [
                (BARE, Check::None),
                ("guard", Check::Statement(Function::Guard)),
                ("fenced", Check::Statement(Function::Fenced)),
                ("select 1", Check::Query),
                ("guard as a condition", Check::Condition(Function::Guard)),
                ("fenced as a condition", Check::Condition(Function::Fenced)),
            ] {
                let payments = &payments;
                contest = contest.subject(name, move |_, slice| {
                    let payments = payments.iter().map(move |it| it.with(check, trips));
                    together(slice, payments, |payment, watch| repeat(payment, 1, watch))
                });
            }
            rows.extend(contest.run().await);
        }
        drop(payments);
        locks.shutdown().await;
        rows
    }

    /// Leases that are held and renewed.
    async fn held(&self) -> Vec<Row> {
        let (_, locks) = self.client().await;
        let server = ("postgres", &self.server);
        let rows = held::watch(self.scenario("held"), &locks, LEASES, server).await;
        locks.shutdown().await;
        rows
    }
}

fn hand_off(clients: &[LockClient], round: usize, slice: Duration) -> impl Future<Output = Round> {
    let subject = move |locks| Ours::new(locks, format!("bench:{round}"));
    together(slice, clients.iter().map(subject), contend)
}

async fn shut_down(clients: &[LockClient]) {
    join_all(clients.iter().map(LockClient::shutdown)).await;
}
