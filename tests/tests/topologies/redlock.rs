//! Locks on several servers with agreement by majority (rules 28 to 31 of docs/PROTOCOL.md).

mod contention;
mod environment;
mod fences;
mod promises;
mod reserved;
mod several;
mod storms;
mod turns;
mod votes;

use std::time::Duration;

use futures_util::future::join_all;
use lock_runtime::{LockClient, LockErrorKind, RedisOptions};
use lock_tests::{
    Proxy, RedisServer,
    place::{LONG, redlock_url},
    shared_five, unique,
};
use tokio::{
    sync::Mutex,
    time::{Instant, sleep},
};

const LONGEST_LEASE: Duration = Duration::from_secs(2);
/// `LONGEST_LEASE` and a second for the rounding of the uptime.
const QUARANTINE: Duration = Duration::from_millis(3100);

/// Five servers, and a namespace on them.
struct Servers {
    servers: Five,
    namespace: String,
}

enum Five {
    Own(Vec<RedisServer>),
    Everybodys(&'static [RedisServer]),
}

/// The uptime that a server reports.
async fn uptime(server: &RedisServer) -> Duration {
    let info: String = server.query(&["INFO", "server"]).await;
    let mut lines = info.lines();
    let seconds = lines.find_map(|line| line.strip_prefix("uptime_in_seconds:"));
    Duration::from_secs(seconds.expect("a server reports it").parse().unwrap())
}

impl Servers {
    /// Five servers that vote, for a test that stops, kills or fills them.
    async fn start() -> Self {
        let servers = RedisServer::builder().start_all(5).await;
        Self::voting(Five::Own(servers)).await
    }

    /// The shared five servers, for all other tests, and a namespace in which they vote. The votes
    /// take a while, so a dozen namespaces are prepared at once.
    async fn shared() -> Self {
        static VOTING: Mutex<Vec<Servers>> = Mutex::const_new(Vec::new());
        let mut voting = VOTING.lock().await;
        if voting.is_empty() {
            let servers = shared_five().await;
            *voting = join_all((0..12).map(|_| Self::voting(Five::Everybodys(servers)))).await;
        }
        voting.pop().expect("a dozen")
    }

    async fn voting(servers: Five) -> Self {
        let this = Self {
            servers,
            namespace: unique("ns"),
        };
        this.vote().await;
        this
    }

    fn all(&self) -> &[RedisServer; 5] {
        let servers = match &self.servers {
            Five::Own(servers) => servers,
            Five::Everybodys(servers) => *servers,
        };
        servers.try_into().expect("five")
    }

    async fn client(&self) -> LockClient {
        self.client_of(self.all().iter().map(RedisServer::url))
            .await
    }

    async fn client_of(&self, urls: impl IntoIterator<Item = String>) -> LockClient {
        let builder = LockClient::builder()
            .namespace(&self.namespace)
            .redis(RedisOptions::new().longest_lease(LONGEST_LEASE));
        builder
            .connect(&redlock_url(urls))
            .await
            .expect("clients of servers that run")
    }

    async fn clients(&self, count: usize) -> Vec<LockClient> {
        join_all((0..count).map(|_| self.client())).await
    }

    /// Clients of the first three servers.
    async fn clients_of_three(&self, count: usize) -> Vec<LockClient> {
        let servers = &self.all()[..3];
        // The server list of the namespace changes, and no client of the old one goes on.
        let settings = format!("f:{}:settings", self.namespace);
        for server in servers {
            server.command(&["DEL", &settings]).await;
        }
        let urls = || servers.iter().map(RedisServer::url);
        join_all((0..count).map(|_| self.client_of(urls()))).await
    }

    async fn proxies(&self) -> Vec<Proxy> {
        join_all(self.all().iter().map(Proxy::to)).await
    }

    async fn clients_through(&self, proxies: &[Proxy], count: usize) -> Vec<LockClient> {
        join_all((0..count).map(|_| self.client_of(proxies.iter().map(Proxy::url)))).await
    }

    /// Waits until new servers vote.
    async fn vote(&self) {
        let locks = self.client().await;
        let since = Instant::now();
        loop {
            match locks
                .exclusive("vote")
                .lease(LONGEST_LEASE)
                .no_wait()
                .acquire()
                .await
            {
                Ok(guard) => {
                    // The release may not be confirmed in time on a busy machine.
                    drop(guard.release().await);
                    // The quarantine of the other servers began in the same second. Each client
                    // counts it from the uptime in whole seconds, so that of the next one may end
                    // later.
                    for server in self.all() {
                        while uptime(server).await < LONGEST_LEASE + Duration::from_secs(1) {
                            sleep(Duration::from_millis(50)).await;
                        }
                    }
                    return sleep(Duration::from_millis(300)).await;
                }
                Err(error) => {
                    // With `Contended`, the votes of the last attempt are still on their way back.
                    assert!(
                        matches!(
                            error.kind(),
                            LockErrorKind::Unavailable | LockErrorKind::Contended
                        ),
                        "{error}"
                    );
                }
            }
            assert!(since.elapsed() < LONG, "they never vote");
            sleep(Duration::from_millis(50)).await;
        }
    }
}
