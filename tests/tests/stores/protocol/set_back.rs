//! The clock of a server is set back by an hour: nothing is kept for longer than it was asked
//! for (rule 39).

use lock_runtime::{LockSpec, RedisOptions};
use lock_tests::{
    PostgresServer, ServerClock, Worker,
    place::{Place, eventually, in_time},
};

use super::{
    Arc, Duration, HOUR, Hold, KeyRequest, LONG, LockClient, LockKey, LockKind, Mode, RedisServer,
    Store, TWO_PERMITS, Token, in_a_minute, key, unique,
};

const LEASE: Duration = Duration::from_millis(1500);

/// A server, or several, with a clock that is set.
struct Site {
    clock: ServerClock,
    place: Place,
    servers: Vec<RedisServer>,
    /// It ends with the test.
    _postgres: Option<PostgresServer>,
}

impl Site {
    async fn redis(servers: usize) -> Self {
        let clock = ServerClock::new();
        let servers = RedisServer::builder()
            .clock(&clock)
            .start_all(servers)
            .await;
        let urls: Vec<_> = servers.iter().map(RedisServer::url).collect();
        let url = match &urls[..] {
            [url] => url.clone(),
            urls => format!("redlock:{}", urls.join(",")),
        };
        Self {
            clock,
            place: Place::at(url),
            servers,
            _postgres: None,
        }
    }

    async fn postgres() -> Self {
        let clock = ServerClock::new();
        let server = PostgresServer::builder().in_memory().clock(&clock);
        let server = server.start().await;
        let (url, namespace) = (server.url(), unique("ns"));
        Self {
            clock,
            place: Place::Postgres { url, namespace },
            servers: Vec::new(),
            _postgres: Some(server),
        }
    }

    async fn client(&self) -> LockClient {
        let builder = LockClient::builder()
            .redis(RedisOptions::new().longest_lease(LEASE))
            .defaults(LockSpec::exclusive().lease(LEASE));
        self.place.client_of(builder).await
    }
}

/// The longest time for which a holder or a waiter of the key is kept.
async fn longest(locks: &LockClient, key: &LockKey, kind: LockKind) -> Option<Duration> {
    let found = match kind {
        LockKind::Lock => locks.inspect(key).await,
        _ => locks.inspect(key).permits().await,
    };
    let holders = found.unwrap().holders;
    holders.iter().filter_map(|holder| holder.ttl).max()
}

/// A holder renews its lease, and ends without a release.
async fn a_renewal_corrects_the_lease(site: Site, modes: &[Mode]) {
    in_time(async {
        let (locks, other) = (site.client().await, site.client().await);
        let mut held = Vec::new();
        for (number, mode) in modes.iter().enumerate() {
            let key = key(&format!("k{number}"));
            let request = match *mode {
                Mode::Exclusive => locks.exclusive(&key),
                Mode::Permits(count) => locks.permits(&key, count),
                _ => locks.shared(&key),
            };
            let guard = request.wait(LONG).acquire().await.unwrap();
            held.push((guard, key, mode.kind()));
        }
        site.clock.set_back(HOUR);
        for (_, key, kind) in &held {
            let left = longest(&other, key, *kind).await;
            assert!(left > Some(HOUR / 2), "{left:?}: the clock was set back");
        }
        for (guard, key, kind) in held {
            eventually("the lease is as long as it was asked for", async || {
                longest(&other, &key, kind).await <= Some(LEASE)
            })
            .await;
            guard.verify().await.unwrap();
            assert!(guard.validity() <= LEASE, "{:?}", guard.validity());
            guard.extend(LEASE).await.unwrap();
            guard.release().await.unwrap();
        }
    })
    .await;
}

#[tokio::test]
async fn a_renewal_corrects_the_lease_at_a_server() {
    let modes = [Mode::Exclusive, Mode::Exclusive, Mode::Shared, TWO_PERMITS];
    a_renewal_corrects_the_lease(Site::redis(1).await, &modes).await;
}

#[tokio::test]
async fn a_renewal_corrects_the_lease_at_a_majority() {
    let modes = [Mode::Exclusive, Mode::Shared];
    a_renewal_corrects_the_lease(Site::redis(3).await, &modes).await;
}

#[tokio::test]
async fn a_renewal_corrects_the_lease_in_postgres() {
    let modes = [Mode::Exclusive, Mode::Shared, TWO_PERMITS];
    a_renewal_corrects_the_lease(Site::postgres().await, &modes).await;
}

#[tokio::test]
async fn the_lock_of_a_killed_holder_is_granted_soon() {
    in_time(async {
        let site = Site::redis(1).await;
        let lease = LEASE.as_millis().to_string();
        let url = site.servers[0].url();
        let mut holder = Worker::spawn(
            env!("CARGO_BIN_EXE_lock-worker"),
            &[
                "hold",
                "--url",
                &url,
                "--namespace",
                site.place.namespace(),
                "--resource",
                &unique("resource"),
                "--lease-ms",
                &lease,
            ],
        );
        holder.line().await.unwrap();
        let locks = site.client().await;
        let waiting = tokio::spawn(locks.exclusive("a").wait(LONG).acquire());
        site.clock.set_back(HOUR);
        eventually("it has renewed the lease", async || {
            longest(&locks, &key("a"), LockKind::Lock).await <= Some(LEASE)
        })
        .await;
        holder.kill().await;
        waiting.await.unwrap().unwrap().release().await.unwrap();
    })
    .await;
}

/// The queue entry of a process that has ended is not served, and not kept.
async fn a_dead_waiter_leaves_the_queue(site: Site) {
    in_time(async {
        let locks = site.client().await;
        let store: Arc<dyn Store> = site.place.store().await;
        let guard = locks.exclusive("a").acquire().await.unwrap();
        let hold = Hold::new(key("a"), Mode::Exclusive, Token::random());
        let request = KeyRequest::new(hold, LEASE, in_a_minute()).queued();
        store.acquire(&request).await.unwrap();
        let waiters = async || locks.inspect("a").await.unwrap().waiters.len();
        assert_eq!(waiters().await, 1);
        site.clock.set_back(HOUR);
        assert_eq!(waiters().await, 0);
        let others = site.client().await;
        let waiting = tokio::spawn(others.exclusive("a").wait(LONG).acquire());
        eventually("the live waiter is queued", async || waiters().await == 1).await;
        let fence = guard.fence();
        guard.release().await.unwrap();
        let next = waiting.await.unwrap().unwrap();
        assert!(next.fence() > fence);
        next.release().await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn a_dead_waiter_leaves_the_queue_of_a_server() {
    a_dead_waiter_leaves_the_queue(Site::redis(1).await).await;
}

#[tokio::test]
async fn a_dead_waiter_leaves_the_queue_in_postgres() {
    a_dead_waiter_leaves_the_queue(Site::postgres().await).await;
}
