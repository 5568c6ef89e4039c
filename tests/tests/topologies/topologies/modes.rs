//! A storm with all modes and options: exclusive and re-entrant locks, readers, downgraded writers,
//! permits, several keys, requests that do not wait, minimum and maximum hold times, leases that
//! are not renewed, strict order, extended leases, revoked holders, dropped futures and dropped
//! guards, in several clients of this process and in other processes; on PostgreSQL transactions
//! with `lock_runtime.guard` as well.
//!
//! The records are checked as a whole:
//!
//! - Fencing tokens of a key are unique and increase, in all modes together.
//! - A claim lasts from the return of a guard to its release, or to the end of its validity. Claims
//!   that exclude each other do not overlap, except for a lease after the only store has lost its
//!   data.
//! - No lock is free for longer than the faults explain while a request of a live process waits for
//!   it (see [`Chronicle`]).
//! - No request is answered much later than its wait ends.
//! - Nothing is left in the stores but fences and the marker of their data.
//!
//! `LOCK_TESTS_STORM=70 cargo test -p lock-tests --test topologies modes:: -- --nocapture` takes
//! ten minutes. `LOCK_TESTS_SEED=n` repeats the faults and choices of the storm that printed that
//! seed, but not their times.

mod faults;
mod guarded;
mod noticed;
mod processes;
mod server;

use std::{
    env, fs,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use futures_util::TryStreamExt as _;
use futures_util::future::{OptionFuture, join_all};
use lock_runtime::{
    LockClient, RedisOptions,
    operator::Inspection,
    store::{AcquireReply, MemoryStore},
};
use lock_tests::{
    FaultyStore, Proxy, RedisServer, SentinelSet,
    faulty_store::Operation,
    place::{LONG, cluster_url, eventually, redlock_url, times_as_long},
    shared_cluster, shared_postgres, shared_sentinels,
    storm::{Chronicle, HANDOVER, KEYS, Plan, RECOVERY, Report, nanos},
    unique,
};
use tokio::time::{Instant, sleep, timeout};

use self::{
    faults::{Faults, Struck},
    guarded::Guarded,
    processes::{Place, Processes, Records},
    server::Server,
};

const WORKER: &str = env!("CARGO_BIN_EXE_lock-worker");
/// The variable with the path of a worker of another build. It replaces every other worker, to show
/// that both builds work together.
const OLD_WORKER: &str = "LOCK_TESTS_OLD_WORKER";
const SEED: &str = "LOCK_TESTS_SEED";
/// The variable with a directory for the histories of the storms, which `tests/judge` reads.
const HISTORY: &str = "LOCK_TESTS_HISTORY";

const LEASE: Duration = Duration::from_secs(1);
/// The longest lease of any client. A restarted server of a quorum is quarantined for this time.
const LONGEST_LEASE: Duration = Duration::from_secs(2);
/// The observed length of a quarantine. A server reports its uptime in whole seconds.
const QUARANTINE: Duration = Duration::from_millis(3100);
/// The part of a round without faults.
const CALM: Duration = Duration::from_millis(1500);
/// The part of a round with faults.
const STRUCK: Duration = Duration::from_secs(3);
/// The longest time for which a lock in a store of records may be free while a request waits for
/// it. Its processes share the processors with those of the storm, so that a call takes a multiple
/// of one on Redis. Less than the interval of polls, so that a message that is never sent is
/// noticed.
const HANDOVER_OF_RECORDS: Duration = Duration::from_millis(750);
/// The number of clients in this process, and of the workers beside them.
const CLIENTS: usize = 2;
const WORKERS: usize = 2;
/// The number of tasks in each process.
const TASKS: usize = 6;

fn seed() -> u64 {
    let given = env::var(SEED).ok().and_then(|seed| seed.parse().ok());
    let seed = given.unwrap_or_else(|| rand::random::<u32>().into());
    println!("{SEED}={seed}");
    seed
}

/// Writes the history of a storm, an operation in each line.
fn keep(report: &Report, name: &str) {
    let Some(directory) = env::var_os(HISTORY) else {
        return;
    };
    let lines = report.operations.iter().map(serde_json::to_string);
    let lines: Vec<_> = lines.collect::<Result<_, _>>().unwrap();
    let file = Path::new(&directory).join(format!("{}.jsonl", name.replace(' ', "-")));
    fs::write(file, lines.join("\n")).unwrap();
}

/// A store, and the connections of each client to it.
struct Site {
    /// The servers that fail. Empty if the store is shared with other tests.
    servers: Vec<Server>,
    /// For each client, a proxy to each of these servers.
    proxies: Vec<Vec<Proxy>>,
    /// The URL of a store whose servers do not fail.
    shared: Option<String>,
    namespace: String,
    workers: Vec<String>,
}

impl Site {
    /// Uses one server, or several of which a majority has to agree.
    async fn start(servers: Vec<Server>, workers: Vec<String>) -> Self {
        let mut proxies = Vec::new();
        for _ in 0..CLIENTS + workers.len() {
            proxies.push(join_all(servers.iter().map(Server::proxy)).await);
        }
        let site = Self {
            servers,
            proxies,
            shared: None,
            namespace: unique("ns"),
            workers,
        };
        site.serve().await;
        site
    }

    /// A store shared with other tests. Only processes fail.
    fn shared(url: String) -> Self {
        let workers = vec![WORKER.to_owned(); WORKERS];
        Self {
            servers: Vec::new(),
            proxies: Vec::new(),
            shared: Some(url),
            namespace: unique("ns"),
            workers,
        }
    }

    fn urls(&self, client: usize) -> Vec<String> {
        match &self.shared {
            Some(url) => vec![url.clone()],
            None => self.proxies[client].iter().map(Proxy::url).collect(),
        }
    }

    async fn client(&self, client: usize) -> LockClient {
        let builder = LockClient::builder().namespace(&self.namespace);
        let client = match &self.urls(client)[..] {
            [url] => builder.connect(url).await,
            urls => {
                builder
                    .redis(RedisOptions::new().longest_lease(LONGEST_LEASE))
                    .connect(&redlock_url(urls))
                    .await
            }
        };
        client.expect("a client of servers that run")
    }

    /// Waits until new servers vote.
    async fn serve(&self) {
        let locks = self.client(0).await;
        let votes = async || match locks
            .exclusive("vote")
            .lease(LEASE)
            .no_wait()
            .acquire()
            .await
        {
            Ok(guard) => guard.release().await.is_ok(),
            Err(_) => false,
        };
        eventually("the servers grant a lock", votes).await;
        locks.shutdown().await;
        if self.servers.len() > 1 {
            // The other servers started in the same second.
            sleep(QUARANTINE - LONGEST_LEASE).await;
        }
    }

    fn places(&self) -> Vec<Place> {
        let place = |(number, path): (usize, &String)| {
            let text = |time: Duration| time.as_millis().to_string();
            let mut arguments = vec!["storm".to_owned()];
            let mut option = |name: &str, value: String| arguments.extend([name.to_owned(), value]);
            self.urls(CLIENTS + number)
                .into_iter()
                .for_each(|url| option("--url", url));
            option("--namespace", self.namespace.clone());
            option("--longest-lease-ms", text(LONGEST_LEASE));
            option("--lease-ms", text(self.lease()));
            if let Some(brief) = self.brief_lease() {
                option("--brief-lease-ms", text(brief));
            }
            option("--tasks", TASKS.to_string());
            Place {
                path: path.clone(),
                arguments,
            }
        };
        self.workers.iter().enumerate().map(place).collect()
    }

    /// The URL of the server itself, if it is PostgreSQL.
    fn postgres_url(&self) -> Option<String> {
        match (&self.servers[..], &self.shared) {
            ([Server::Postgres(server)], _) => Some(server.url()),
            (_, Some(url)) if url.starts_with("postgres") => Some(url.clone()),
            _ => None,
        }
    }

    /// The lease of requests that do not renew it, if not the usual one: the shortest lease of a
    /// store with a shared clock.
    fn brief_lease(&self) -> Option<Duration> {
        match &self.servers[..] {
            [Server::Etcd(_) | Server::ZooKeeper(_)] => Some(LEASE),
            _ => None,
        }
    }

    /// The lease of the others. Some ask for two thirds of it.
    fn lease(&self) -> Duration {
        self.brief_lease().map_or(LEASE, |brief| brief * 3 / 2)
    }

    fn is_of_records(&self) -> bool {
        let is_redis = |server: &Server| matches!(server, Server::Redis(_));
        self.postgres_url().is_some() || !self.servers.iter().all(is_redis)
    }

    fn name(&self) -> String {
        match &self.shared {
            Some(url) => url
                .split_once(':')
                .map_or(url.clone(), |(scheme, _)| scheme.to_owned()),
            None => match &self.servers[..] {
                [Server::Postgres(_)] => "a server of PostgreSQL".to_owned(),
                [Server::Etcd(_)] => "a member of etcd".to_owned(),
                [Server::ZooKeeper(_)] => "a server of ZooKeeper".to_owned(),
                servers => format!("{} servers", servers.len()),
            },
        }
    }

    async fn storm(&self) -> Report {
        let clients = join_all((0..CLIENTS).map(|client| self.client(client))).await;
        let (seed, records, log, begin) = (
            seed(),
            Records::default(),
            Arc::new(Faults::default()),
            Instant::now(),
        );
        let usual = Plan::new(nanos);
        let plan = Plan {
            tasks: TASKS,
            lease: self.lease(),
            brief_lease: self.brief_lease().unwrap_or(usual.brief_lease),
            permits: self.servers.len() <= 1,
            retains: self.servers.len() <= 1,
            seed,
            ..usual
        };
        let working = plan.start(&clients, &records.log());
        let processes = Processes::start_all(self.places(), seed, records.clone());
        let over = Arc::new(AtomicBool::new(false));
        let guarded = match self.postgres_url() {
            Some(url) => {
                let guarded = Guarded {
                    locks: self.client(0).await,
                    namespace: self.namespace.clone(),
                    url,
                    seed,
                    records: records.clone(),
                    faults: log.clone(),
                };
                Some(tokio::spawn(guarded.work(over.clone())))
            }
            None => None,
        };
        let storm = async {
            let struck = Struck {
                servers: &self.servers,
                proxies: &self.proxies,
                processes: &processes,
                lease: LEASE,
                quarantine: QUARANTINE,
                log: &log,
            };
            for round in 0..times_as_long() as u64 {
                if round > 0 {
                    sleep(LEASE + RECOVERY).await;
                }
                sleep(CALM).await;
                struck.strike_for(STRUCK, seed.wrapping_add(round)).await;
            }
            over.store(true, Ordering::Relaxed);
            timeout(LONG, async {
                let (killed, (), guarded) = tokio::join!(
                    processes.finish(),
                    working.finish(),
                    OptionFuture::from(guarded)
                );
                if let Some(committed) = guarded {
                    let (committed, outlasted) = committed.expect("a task with transactions");
                    println!(
                        "{committed} guarded transactions, {outlasted} of them after the lease"
                    );
                    let is_short = times_as_long() == 1;
                    assert!(
                        is_short || outlasted > 0,
                        "no transaction outlasts the lease"
                    );
                }
                killed
            })
            .await
            .expect("a process of the storm hangs")
        };
        let killed = match &self.servers[..] {
            [server] => tokio::select! {
                killed = storm => killed,
                () = records.watch(server) => unreachable!("it has no end"),
            },
            _ => storm.await,
        };
        join_all(clients.iter().map(LockClient::shutdown)).await;
        let chronicle = Chronicle::new(records.take(), killed, log.take(), self.lease());
        let chronicle = match self.is_of_records() {
            true => chronicle.handover(HANDOVER_OF_RECORDS),
            false => chronicle,
        };
        let report = Report::new(self.name(), &chronicle, begin.elapsed(), seed);
        println!("{report}");
        keep(&report, &self.name());
        report
    }

    /// Asserts that the servers that may fail keep nothing of this storm but fences and the marker
    /// of their data.
    async fn assert_nothing_left(&self) {
        for server in &self.servers {
            match server {
                Server::Redis(server) => self.assert_nothing_left_at([server]).await,
                _ => self.assert_nothing_listed().await,
            }
        }
    }

    /// Asserts that no lock is held and no request waits.
    async fn assert_nothing_listed(&self) {
        let locks = self.client(0).await;
        let left = async || matches!(locks.list("").try_next().await, Ok(None));
        eventually("no lock is listed", left).await;
    }

    /// Asserts that the servers keep nothing of this storm but fences and the marker of their data.
    async fn assert_nothing_left_at(&self, servers: impl IntoIterator<Item = &RedisServer>) {
        let pattern = format!("*{}:*", self.namespace);
        for server in servers {
            let left = async || left_over(&server.keys(&pattern).await).is_empty();
            eventually("no lock and no wait queue is left", left).await;
        }
    }
}

/// The keys that should have been deleted with the last lock.
fn left_over(keys: &[String]) -> Vec<&String> {
    let stays = |key: &str| key.ends_with(":f") || key.starts_with("f:");
    keys.iter().filter(|key| !stays(key)).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_memory() {
    let store = Arc::new(MemoryStore::new());
    let clients: Vec<_> = (0..CLIENTS + WORKERS)
        .map(|_| LockClient::with_store(store.clone()))
        .collect();
    let report = storm_of(&clients, (CALM + STRUCK) / 2 * times_as_long() as u32).await;
    keep(&report, "memory");
    report.assert_all();
    for key in KEYS {
        let free = async || {
            let (lock, permits) =
                tokio::join!(clients[0].inspect(key), clients[0].inspect(key).permits());
            let is_empty = |found: Inspection| found.holders.is_empty() && found.waiters.is_empty();
            is_empty(lock.unwrap()) && is_empty(permits.unwrap())
        };
        eventually(&format!("{key} is free, and no request waits for it"), free).await;
    }
}

/// A store that grants some of the requests that it has refused: a store without holders answers
/// them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_grants_a_lock_twice_is_found() {
    let store = FaultyStore::new(Arc::new(MemoryStore::new()), async |call| {
        let reply = call.execute().await?;
        match (&call.operation, reply.downcast_ref::<AcquireReply>()) {
            (Operation::Acquire(_), Some(AcquireReply::Granted(_))) => Ok(reply),
            (Operation::Acquire(request), Some(_)) if call.nth % 4 == 0 => {
                call.inner.abandon(&request.hold).await?;
                call.operation.execute(&MemoryStore::new()).await
            }
            _ => Ok(reply),
        }
    });
    let clients: Vec<_> = (0..CLIENTS)
        .map(|_| LockClient::with_store(store.clone()))
        .collect();
    let report = storm_of(&clients, CALM).await;
    keep(&report, "planted");
    assert!(!report.overlaps.is_empty(), "{report}");
}

/// Runs a storm with clients of this process only, and without faults.
async fn storm_of(clients: &[LockClient], length: Duration) -> Report {
    let plan = Plan {
        tasks: 3 * TASKS,
        lease: LEASE,
        seed: seed(),
        ..Plan::new(nanos)
    };
    let report = plan.run(clients, length, HANDOVER).await;
    println!("{report}");
    report
}

async fn on_servers(servers: Vec<Server>) {
    let site = Site::start(servers, vec![WORKER.to_owned(); WORKERS]).await;
    site.storm().await.assert_all();
    site.assert_nothing_left().await;
}

/// One storm begins while the servers of the other are in quarantine.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_servers_and_processes_that_fail() {
    let (one, three) = (Server::redis(1).await, Server::redis(3).await);
    tokio::join!(on_servers(one), on_servers(three));
}

mod on_postgres {
    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn on_a_server_and_processes_that_fail() {
        on_servers(vec![Server::postgres().await]).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn acquire_excludes_between_clients_of_two_builds() {
        of_two_builds(vec![Server::postgres().await]).await;
    }

    /// Without restarts, the storm is faster.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn on_processes_that_fail() {
        let site = Site::shared(shared_postgres().await.url());
        site.storm().await.assert_all();
        site.assert_nothing_listed().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_etcd_and_processes_that_fail() {
    on_servers(vec![Server::etcd().await]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_zookeeper_and_processes_that_fail() {
    on_servers(vec![Server::zookeeper().await]).await;
}

async fn on_a_primary_that_sentinels_name() {
    let set = shared_sentinels().await;
    let sentinels = set
        .sentinels()
        .each_ref()
        .map(|sentinel| sentinel.addr().to_string());
    let site = Site::shared(format!(
        "redis+sentinel://{}/{}",
        sentinels.join(","),
        SentinelSet::SERVICE
    ));
    site.storm().await.assert_all();
    site.assert_nothing_left_at([set.master().await]).await;
}

async fn on_a_cluster() {
    let cluster = shared_cluster().await;
    let site = Site::shared(cluster_url(cluster));
    site.storm().await.assert_all();
    site.assert_nothing_left_at(cluster.masters().await).await;
}

/// The servers of these stores fail in other storms, which are made for that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_shared_servers_and_processes_that_fail() {
    tokio::join!(on_a_primary_that_sentinels_name(), on_a_cluster());
}

/// Clients of another build and of this one on the same keys, if there is a worker of another
/// build.
async fn of_two_builds(servers: Vec<Server>) {
    let Ok(old) = env::var(OLD_WORKER) else {
        println!("{OLD_WORKER} names no worker of another build");
        return;
    };
    // Readers of other builds may share the token of a majority.
    let is_fenced = servers.len() == 1;
    let workers = [WORKER, &old].repeat(WORKERS);
    let workers = workers.into_iter().map(str::to_owned).collect();
    let site = Site::start(servers, workers).await;
    let report = site.storm().await;
    if is_fenced {
        report.assert_fenced()
    } else {
        report.assert_ordered()
    }
    report.assert_exclusive();
    report.assert_answered();
    site.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acquire_excludes_between_clients_of_two_builds() {
    for servers in [1, 3] {
        of_two_builds(Server::redis(servers).await).await;
    }
}
