//! Turns of one key with many clients.

use std::{collections::HashSet, pin::Pin, time::Duration};

use futures_util::future::join_all;
use lock_runtime::{LockClient, LockRequest, RedisOptions, future::AcquireFuture};
use lock_tests::{
    Proxy, RedisServer, Worker,
    place::{LONG, redlock_url},
    proxy::Direction,
};
use tokio::{
    runtime,
    time::{Instant, sleep, timeout},
};

use super::{LONGEST_LEASE, QUARANTINE, Servers};
use crate::topologies::storm::Storm;

const CLIENTS: usize = 32;
const LEASE: Duration = Duration::from_secs(1);
/// Service is back when the votes for a waiter that is gone have ended and the others have noticed
/// it. Two hand-offs in a row may fail.
const BACK: Duration = Duration::from_secs(3);

/// Waits until this number of requests is queued.
async fn until_queued(locks: &LockClient, waiters: usize) {
    while locks.inspect("a").await.unwrap().waiters.len() != waiters {
        sleep(Duration::from_millis(5)).await;
    }
}

/// Makes a request, and polls it until it is one of `waiters`. It makes no call after that until it
/// is polled again: without its coordinator, a majority does not observe the order of the waiters.
async fn queued(
    request: LockRequest,
    locks: &LockClient,
    waiters: usize,
) -> Pin<Box<AcquireFuture>> {
    let mut request = Box::pin(request.acquire());
    tokio::select! {
        acquired = &mut request => panic!("it did not wait: {acquired:?}"),
        () = until_queued(locks, waiters) => request,
    }
}

fn request(locks: &LockClient) -> LockRequest {
    locks.exclusive("a").lease(LONGEST_LEASE).wait(LONG)
}

impl Servers {
    /// The channels of clients with a connection to a server that receives their messages.
    async fn channels(&self) -> HashSet<String> {
        let pattern = format!("{}:[^r]*", self.namespace);
        let of = async |server: &RedisServer| -> Vec<String> {
            server.query(&["PUBSUB", "CHANNELS", &pattern]).await
        };
        let channels = join_all(self.all().iter().map(of)).await;
        channels.into_iter().flatten().collect()
    }

    /// Starts a process that competes for the key "a", and kills it while it holds the lock, waits
    /// for it.
    async fn killed_at_any_time(&self) {
        let urls: Vec<_> = self.all().iter().map(RedisServer::url).collect();
        let mut arguments = vec!["storm", "--namespace", &self.namespace];
        urls.iter().for_each(|url| arguments.extend(["--url", url]));
        arguments.extend(["--longest-lease-ms", "2000", "--lease-ms", "1000"]);
        arguments.extend(["--tasks", "8", "--seed", "1"]);
        let mut process = Worker::spawn(env!("CARGO_BIN_EXE_lock-worker"), &arguments);
        process.line().await.expect("it is ready");
        process.say("go").await;
        let life = Duration::from_millis(rand::random_range(100..400));
        let output = async { while process.line().await.is_some() {} };
        let _ = timeout(life, output).await;
        process.kill().await;
    }
}

/// All faults, one after the other. At most two servers are away at a time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_key_of_many_clients_under_every_fault() {
    let servers = Servers::start().await;
    let proxies = servers.proxies().await;
    let clients = servers.clients_through(&proxies, CLIENTS).await;
    let storm = Storm::of(clients)
        .tasks(1)
        .named(["a".to_owned()])
        .lease(LEASE);
    let report = storm.run(async |faults| {
        let [a, b, c, d, e] = servers.all();
        faults.begin("one is killed, and one stops");
        a.kill();
        b.stop();
        sleep(LEASE).await;
        b.resume();
        a.restart_empty().await;
        faults.begin("connections break, and messages are lost");
        for round in 0..20 {
            let proxy = &proxies[2 + round % 3];
            match round % 2 {
                0 => proxy.cut(),
                _ => proxy.drop_next_reply(),
            }
            sleep(Duration::from_millis(rand::random_range(0..100))).await;
        }
        // Until the one that was killed votes again.
        sleep(QUARANTINE - LEASE).await;
        faults.begin("the data of one are deleted, and one is slow");
        c.command(&["FLUSHALL"]).await;
        proxies[3].delay(Direction::ToClient, Duration::from_millis(300));
        sleep(LEASE).await;
        proxies[3].delay(Direction::ToClient, Duration::ZERO);
        sleep(QUARANTINE).await;
        faults.begin("two cannot be reached");
        proxies[3].black_hole();
        proxies[4].black_hole();
        sleep(LEASE).await;
        join_all(proxies[3..].iter().map(Proxy::let_through)).await;
        faults.begin("two come back empty");
        join_all([d, e].map(RedisServer::restart_empty)).await;
        sleep(QUARANTINE).await;
        faults.begin("one comes back with what it had before");
        let snapshot = b.save_snapshot().await;
        sleep(LEASE).await;
        b.restart_from(&snapshot).await;
        faults.begin("processes are killed that hold the lock or wait for it");
        for _ in 0..8 {
            servers.killed_at_any_time().await;
        }
        sleep(QUARANTINE).await;
    });
    let report = report.await;
    report.assert_fenced();
    report.assert_exclusive();
    report.assert_service_within(LEASE + BACK);
}

/// A waiter dies before its turn. The coordinator votes for it all the same, and the waiter behind
/// it wins with the votes of the others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn release_to_a_waiter_that_is_dead_delays_no_other() {
    let servers = Servers::shared().await;
    let [first, second, last] = servers.clients(3).await.try_into().expect("three");
    for after in [0, 100, 400].map(Duration::from_millis) {
        // A dead process may have left a vote, with which the next request is queued as well.
        until_queued(&first, 0).await;
        let guard = request(&first).acquire().await.unwrap();
        until_queued(&first, 0).await;
        let second = queued(request(&second), &first, 1).await;
        let others = servers.channels().await;
        // Its process is a runtime that ends without a farewell.
        let process = runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let urls: Vec<_> = servers.all().iter().map(RedisServer::url).collect();
        let builder = LockClient::builder().namespace(&servers.namespace);
        process.spawn(async move {
            let options = RedisOptions::new().longest_lease(LONGEST_LEASE);
            let doomed = builder
                .redis(options)
                .connect(&redlock_url(urls))
                .await
                .unwrap();
            let request = doomed.exclusive("a").lease(LONGEST_LEASE);
            drop(request.wait(LONG).acquire().await);
        });
        until_queued(&first, 2).await;
        let waiting = queued(request(&last), &first, 3).await;
        guard.release().await.unwrap();
        let guard = timeout(LONGEST_LEASE, second).await.unwrap().unwrap();
        let listen = &servers.channels().await - &others;
        process.shutdown_background();
        // Its connections end later where the machine is busy. Until then, a server that grants it
        // the lock finds a connection for the message.
        while !servers.channels().await.is_disjoint(&listen) {
            sleep(Duration::from_millis(5)).await;
        }
        sleep(after).await;
        let since = Instant::now();
        guard.release().await.unwrap();
        let guard = waiting.await.unwrap();
        let took = since.elapsed();
        assert!(took < LONGEST_LEASE / 2, "{took:?} after {after:?}");
        guard.release().await.unwrap();
    }
}

/// Two servers are free for the next waiter. The other three keep the votes of the releaser until
/// its lease has ended.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn release_that_reaches_a_minority_is_over_with_its_lease() {
    let servers = Servers::shared().await;
    let proxies = servers.proxies().await;
    let cut_off = servers.clients_through(&proxies, 1).await;
    let [second, last] = servers.clients(2).await.try_into().expect("two");
    for silent in [&proxies[..3], &proxies[2..]] {
        let guard = request(&cut_off[0]).acquire().await.unwrap();
        let first = guard.fence();
        until_queued(&cut_off[0], 0).await;
        let second = queued(request(&second), &cut_off[0], 1).await;
        let last = queued(request(&last), &cut_off[0], 2).await;
        silent.iter().for_each(Proxy::black_hole);
        let since = Instant::now();
        let released = guard.release().await;
        assert!(released.is_err(), "only a minority has confirmed it");
        let guard = second.await.unwrap();
        let took = since.elapsed();
        assert!(took < LONGEST_LEASE + BACK, "{took:?}");
        assert!(guard.fence() > first);
        let second = guard.fence();
        guard.release().await.unwrap();
        let guard = last.await.unwrap();
        assert!(guard.fence() > second);
        guard.release().await.unwrap();
        join_all(silent.iter().map(Proxy::let_through)).await;
    }
}
