//! The connections of a client: few of them, one for messages while a request waits, and those of
//! a pooler.

use std::{
    num::NonZeroUsize,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures_util::future::join_all;
use lock_runtime::{
    LockClient, PostgresOptions,
    operator::ClientId,
    store::{
        postgres::PostgresRecords,
        records::{Inbox, Records},
    },
};
use lock_tests::{
    PgBouncer, PostgresServer,
    place::{LONG, Stopwatch, begun, eventually, in_time},
    shared_postgres,
};
use tokio::time::{sleep, timeout};

use super::{client_of_new_database, connections, held, number, once, waiters};
use crate::waiting::pushes::fastest_hand_off;

const LISTENS: &str = "query like 'listen %'";

#[tokio::test]
async fn a_client_has_no_more_connections_than_its_option_says() {
    in_time(async {
        let (url, locks, admin) = client_of_new_database().await;
        drop(locks);
        for most in [1, 2, 4] {
            let options = PostgresOptions::new().connections(NonZeroUsize::new(most).unwrap());
            let builder = LockClient::builder().postgres(options);
            let locks = builder.connect(&url).await.unwrap();
            eventually("the others have ended", async || {
                connections(&admin, "true").await == 1
            })
            .await;
            loop {
                // Requests that wait would hide a connection that seemed to hang on a busy machine:
                // it is replaced, and the server closes it later.
                let request = |number: usize| once(locks.exclusive(format!("k{number}")).no_wait());
                let requests = join_all((0..50).map(request));
                tokio::pin!(requests);
                let mut seen = 0;
                let results = loop {
                    tokio::select! {
                        results = &mut requests => break results,
                        count = connections(&admin, "true") => seen = seen.max(count),
                    }
                };
                if results.iter().all(Result::is_ok) {
                    assert!(seen >= 1 && seen <= most as i64, "{seen} of {most}");
                    break;
                }
                eventually("the server has closed the others", async || {
                    connections(&admin, "true").await <= most as i64
                })
                .await;
            }
        }
    })
    .await;
}

#[tokio::test]
async fn a_client_listens_only_while_a_request_waits() {
    in_time(async {
        let (url, one, admin) = client_of_new_database().await;
        let other = LockClient::connect(&url).await.unwrap();
        let guard = held(&one, "a").await;
        once(other.exclusive("b")).await.unwrap();
        assert_eq!(connections(&admin, LISTENS).await, 0);
        let waiting = tokio::spawn(begun(other.exclusive("a").wait(LONG).acquire()).await);
        waiters(&one, "a", 1).await;
        eventually("the waiter listens", async || {
            connections(&admin, LISTENS).await == 1
        })
        .await;
        guard.release().await.unwrap();
        waiting.await.unwrap().unwrap().release().await.unwrap();
        let idle = Stopwatch::start();
        eventually("it no longer listens", async || {
            connections(&admin, LISTENS).await == 0
        })
        .await;
        assert!(
            idle.elapsed() < Duration::from_secs(20),
            "{:?}",
            idle.elapsed()
        );
        // And again.
        let guard = held(&one, "a").await;
        let waiting = tokio::spawn(begun(other.exclusive("a").wait(LONG).acquire()).await);
        eventually("it listens again", async || {
            connections(&admin, LISTENS).await == 1
        })
        .await;
        guard.release().await.unwrap();
        waiting.await.unwrap().unwrap().release().await.unwrap();
    })
    .await;
}

/// Counts the interruptions that a store is to tell its waiters.
#[derive(Default)]
struct Interruptions(AtomicUsize);

impl Inbox for Interruptions {
    fn deliver(&self, _message: &[u8]) {}

    fn connected(&self, is_connected: bool) {
        let interrupted = usize::from(!is_connected);
        self.0.fetch_add(interrupted, Ordering::Relaxed);
    }
}

/// Waiters poll at once, and again when messages are received.
#[tokio::test]
async fn every_loss_of_the_connection_for_messages_is_reported() {
    in_time(async {
        let (url, _, admin) = client_of_new_database().await;
        let options = PostgresOptions::default();
        let records = PostgresRecords::connect(&url, "ns", options).await.unwrap();
        let interruptions = Arc::new(Interruptions::default());
        let inbox: Arc<dyn Inbox> = interruptions.clone();
        records.listen(Arc::downgrade(&inbox));
        let client = ClientId::random();
        records.expect_messages(client).await;
        let backend = format!(
            "select coalesce(max(pid), 0)::bigint from pg_stat_activity \
             where datname = current_database() and {LISTENS}"
        );
        for losses in 1..=3 {
            let listening = number(&admin, &backend).await;
            assert_ne!(listening, 0);
            let kill = format!("select pg_terminate_backend({listening}::int)::int::bigint");
            assert_eq!(number(&admin, &kill).await, 1);
            let seen = || interruptions.0.load(Ordering::Relaxed);
            eventually("it listens on another connection", async || {
                let now = number(&admin, &backend).await;
                now != 0 && now != listening
            })
            .await;
            records.expect_messages(client).await;
            eventually("both ends of the interruption are reported", async || {
                seen() >= 2 * losses
            })
            .await;
            assert_eq!(seen(), 2 * losses);
        }
    })
    .await;
}

#[tokio::test]
async fn a_lost_connection_for_messages_is_made_again() {
    in_time(async {
        let (url, one, admin) = client_of_new_database().await;
        let other = LockClient::connect(&url).await.unwrap();
        let kill = format!(
            "select count(pg_terminate_backend(pid)) from pg_stat_activity \
             where datname = current_database() and {LISTENS}"
        );
        let soon = Duration::from_millis(100);
        let fastest = fastest_hand_off(&one, &other).await;
        assert!(fastest < soon, "{fastest:?}");
        for _ in 0..3 {
            let guard = held(&one, "a").await;
            let waiting = tokio::spawn(begun(other.exclusive("a").wait(LONG).acquire()).await);
            waiters(&one, "a", 1).await;
            assert!(number(&admin, &kill).await >= 1);
            guard.release().await.unwrap();
            let released = Stopwatch::start();
            waiting.await.unwrap().unwrap().release().await.unwrap();
            assert!(
                released.elapsed() < Duration::from_secs(2),
                "{:?}",
                released.elapsed()
            );
            eventually("it listens again", async || {
                connections(&admin, LISTENS).await >= 1
            })
            .await;
            let fastest = fastest_hand_off(&one, &other).await;
            assert!(fastest < soon, "{fastest:?}");
        }
    })
    .await;
}

/// A client that is dropped leaves no connection, also while its requests wait.
#[tokio::test]
async fn a_client_that_is_dropped_leaves_no_connection() {
    in_time(async {
        let (url, one, admin) = client_of_new_database().await;
        let guard = held(&one, "a").await;
        for _ in 0..3 {
            let other = LockClient::connect(&url).await.unwrap();
            let waiting = begun(other.exclusive("a").wait(LONG).acquire()).await;
            waiters(&one, "a", 1).await;
            drop(waiting);
            other.shutdown().await;
        }
        waiters(&one, "a", 0).await;
        guard.release().await.unwrap();
        one.shutdown().await;
        drop(one);
        eventually("all connections have ended", async || {
            connections(&admin, "true").await == 0
        })
        .await;
    })
    .await;
}

/// Its connections end with the runtime that has made them, also within a call.
#[test]
fn a_client_outlives_its_runtime() {
    let runtime = || {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        builder.worker_threads(2).enable_all().build().unwrap()
    };
    let (server, first) = (runtime(), runtime());
    let url = server.block_on(async { shared_postgres().await.new_database().await });
    let locks = first.block_on(async { LockClient::connect(&url).await.unwrap() });
    for _ in 0..3 {
        let runtime = runtime();
        let busy = locks.clone();
        runtime.spawn(async move {
            let lease = Duration::from_secs(2);
            let request =
                |number: usize| once(busy.exclusive(format!("k{}", number % 50)).lease(lease));
            loop {
                join_all((0..200).map(request)).await;
            }
        });
        runtime.block_on(async {
            once(locks.exclusive("a").wait(LONG)).await.unwrap();
            sleep(Duration::from_millis(50)).await;
        });
        drop(runtime);
    }
    drop(first);
    let last = runtime();
    last.block_on(in_time(async {
        let requests = (0..200).map(|number| locks.exclusive(format!("n{number}")).wait(LONG));
        for result in join_all(requests.map(once)).await {
            result.unwrap();
        }
        for number in 0..50 {
            // A lock of an ended runtime is left to its lease, and its release may be repeated.
            let key = format!("k{number}");
            eventually("it is free", async || {
                locks
                    .exclusive(&key)
                    .try_acquire()
                    .await
                    .is_ok_and(|it| it.is_some())
            })
            .await;
        }
    }));
    last.block_on(locks.shutdown());
}

/// Behind a pooler, the name of a prepared statement may be that of another one.
#[tokio::test]
async fn statements_are_prepared_only_without_a_pooler() {
    in_time(async {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let server = PostgresServer::builder()
            .in_memory()
            .tls()
            .setting("log_statement", "all")
            .start()
            .await;
        let pooler = PgBouncer::to(&server).await;
        let mut seen = 0;
        let tls = PostgresOptions::new().root_certificate(server.ca_pem());
        for (url, options, is_prepared) in [
            (server.url(), PostgresOptions::new(), true),
            (server.url(), tls, true),
            (pooler.url_of("postgres"), PostgresOptions::new(), false),
        ] {
            let builder = LockClient::builder().postgres(options);
            let locks = builder.connect(&url).await.unwrap();
            // One by one, as others may share a statement.
            for _ in 0..10 {
                once(locks.exclusive("a")).await.unwrap();
            }
            locks.shutdown().await;
            let end = lock_tests::unique("end");
            let query = format!("select '{end}'");
            server.connect().await.batch_execute(&query).await.unwrap();
            eventually("its statements are in the log", async || {
                server.log().contains(&end)
            })
            .await;
            let log = server.log();
            let lines: Vec<_> = log[seen..]
                .lines()
                .filter(|line| {
                    line.contains("execute ") && line.contains("from lock_runtime.swap(")
                })
                .collect();
            assert!(lines.len() >= 10, "{lines:?}");
            let unnamed = lines
                .iter()
                .filter(|line| line.contains("execute <unnamed>"));
            assert_eq!(
                unnamed.count(),
                if is_prepared { 0 } else { lines.len() },
                "{lines:?}"
            );
            seen = log.len();
        }
    })
    .await;
}

/// A connection of the pooler that listens would do so for its other clients, too.
#[tokio::test]
async fn a_waiter_listens_only_without_a_pooler() {
    in_time(async {
        let server = PostgresServer::builder()
            .in_memory()
            .setting("log_statement", "all")
            .start()
            .await;
        let pooler = PgBouncer::to(&server).await;
        for (url, listens) in [
            (pooler.url_of("postgres"), false),
            (server.url_of("postgres"), true),
        ] {
            let (one, other) = (
                LockClient::connect(&url).await.unwrap(),
                LockClient::connect(&url).await.unwrap(),
            );
            let guard = held(&one, "a").await;
            let waiting = tokio::spawn(begun(other.exclusive("a").wait(LONG).acquire()).await);
            waiters(&one, "a", 1).await;
            guard.release().await.unwrap();
            waiting.await.unwrap().unwrap().release().await.unwrap();
            let has_listened = async || server.log().contains(": listen lock_runtime_");
            if listens {
                eventually("a connection listens", has_listened).await;
            } else {
                assert!(!has_listened().await);
            }
        }
    })
    .await;
}

#[tokio::test]
async fn a_pooler_in_transaction_mode_works_with_polls() {
    in_time(async {
        let server = shared_postgres().await;
        let (url, direct, _) = client_of_new_database().await;
        let (_, database) = url.rsplit_once('/').unwrap();
        let pooler = PgBouncer::to(server).await;
        let pooled = pooler.url_of(database);
        let (one, other) = (
            LockClient::connect(&pooled).await.unwrap(),
            LockClient::connect(&pooled).await.unwrap(),
        );
        // They exclude each other and a client without the pooler, and hand the lock on.
        let mut last = None;
        for (from, to) in [(&one, &other), (&direct, &one), (&other, &direct)] {
            let guard = held(from, "a").await;
            assert!(to.exclusive("a").try_acquire().await.unwrap().is_none());
            assert!(last < Some(guard.fence()));
            let waiting = tokio::spawn(begun(to.exclusive("a").wait(LONG).acquire()).await);
            waiters(from, "a", 1).await;
            guard.release().await.unwrap();
            let released = Stopwatch::start();
            let next = waiting.await.unwrap().unwrap();
            assert!(
                released.elapsed() < Duration::from_secs(2),
                "{:?}",
                released.elapsed()
            );
            last = Some(next.fence());
            next.release().await.unwrap();
        }
        let request = |number: usize| {
            let locks = [&one, &other, &direct][number % 3];
            once(locks.exclusive(format!("k{}", number % 20)).wait(LONG))
        };
        for result in join_all((0..200).map(request)).await {
            result.unwrap();
        }
        let guard = one.exclusive("b").lease(Duration::from_secs(2));
        let guard = guard.acquire().await.unwrap();
        timeout(Duration::from_secs(3), guard.lost())
            .await
            .expect_err("it is renewed");
        once(one.all(["a", "c"])).await.unwrap();
        guard.release().await.unwrap();
    })
    .await;
}
