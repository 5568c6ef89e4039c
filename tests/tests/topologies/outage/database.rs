//! Outages of PostgreSQL: the same promises as for Redis, as stores of records share the circuit
//! breaker.

use std::sync::Arc;

use futures_util::future::join_all;
use lock_runtime::{LockClient, LockErrorKind, PostgresOptions, store::postgres::PostgresRecords};
use lock_tests::{
    Lateness, PostgresServer, Proxy, RedisServer,
    place::{LONG, Stopwatch, begun, in_time},
    postgres,
};
use tokio::{
    join,
    net::TcpListener,
    task::JoinSet,
    time::{Instant, sleep, timeout},
};

use super::{Duration, SOON, once, until_refused_at_once, until_served};

const AFTER: Duration = Duration::from_millis(400);

async fn connect(url: &str) -> LockClient {
    let builder = LockClient::builder().unavailable_after(AFTER);
    builder.connect(url).await.unwrap()
}

async fn put_out(server: &PostgresServer, silently: bool) {
    match silently {
        true => server.stop(),
        false => server.kill(),
    }
}

async fn put_back(server: &PostgresServer, silently: bool) {
    match silently {
        true => server.resume(),
        false => server.restart().await,
    }
}

#[tokio::test]
async fn waiting_requests_are_refused_once_the_breaker_is_open() {
    in_time(async {
        let server = PostgresServer::start().await;
        let locks = connect(&server.url()).await;
        once(&locks, "k").await.unwrap();
        for silently in [false, true] {
            let held = locks.exclusive("held").acquire().await.unwrap();
            put_out(&server, silently).await;
            let (down, clock) = (Instant::now(), Stopwatch::start());
            let mut waiting = Vec::new();
            for number in 0..60 {
                let key = format!("k{}", number % 3);
                waiting.push(tokio::spawn(
                    begun(locks.exclusive(key).wait(LONG).acquire()).await,
                ));
            }
            for request in waiting {
                let error = request.await.unwrap().unwrap_err();
                assert_eq!(error.kind(), LockErrorKind::Unavailable);
                assert!(format!("{error:#}").contains("without a call"), "{error:#}");
            }
            assert!(down.elapsed() >= AFTER);
            assert!(clock.elapsed() < AFTER + SOON, "{:?}", down.elapsed());
            // The next ones do not wait at all, whatever their kind.
            for _ in 0..5 {
                let (begin, late) = (Instant::now(), Lateness::start());
                let requests = [
                    locks.exclusive("new"),
                    locks.shared("new"),
                    locks.all(["a", "b"]),
                ];
                for request in requests {
                    let error = request.wait(LONG).acquire().await.unwrap_err();
                    assert!(format!("{error:#}").contains("without a call"), "{error:#}");
                }
                let longest = late.allows(Duration::from_millis(100));
                assert!(begin.elapsed() < longest, "{:?}", begin.elapsed());
            }
            assert!(!held.is_lost(), "a held lock lasts as long as its lease");
            put_back(&server, silently).await;
            until_served(&locks, "k").await;
            held.release().await.unwrap();
        }
    })
    .await;
}

#[tokio::test]
async fn a_held_lock_is_renewed_and_released_through_an_outage() {
    in_time(async {
        let server = PostgresServer::start().await;
        let locks = connect(&server.url()).await;
        let lease = Duration::from_secs(6);
        let kept = locks
            .exclusive("kept")
            .lease(lease)
            .acquire()
            .await
            .unwrap();
        let dropped = locks.exclusive("dropped").acquire().await.unwrap();
        server.stop();
        drop(dropped);
        until_refused_at_once(&locks, "k").await;
        sleep(Duration::from_millis(1500)).await;
        server.resume();
        until_served(&locks, "dropped").await;
        // Longer than the lease without a renewal.
        sleep(lease).await;
        assert!(!kept.is_lost());
        kept.release().await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn without_the_setting_only_requests_that_do_not_wait_are_refused() {
    in_time(async {
        let server = PostgresServer::start().await;
        for silently in [false, true] {
            let locks = LockClient::connect(&server.url()).await.unwrap();
            once(&locks, "k").await.unwrap();
            put_out(&server, silently).await;
            until_refused_at_once(&locks, "k").await;
            assert!(locks.exclusive("k").try_acquire().await.is_err());
            let waiting = tokio::spawn(begun(locks.exclusive("k").wait(LONG).acquire()).await);
            sleep(AFTER * 3).await;
            assert!(!waiting.is_finished(), "it rides out the outage");
            put_back(&server, silently).await;
            waiting.await.unwrap().unwrap().release().await.unwrap();
        }
    })
    .await;
}

#[tokio::test]
async fn a_breaker_that_flaps_forgets_no_waiter() {
    in_time(async {
        let server = PostgresServer::start().await;
        let proxy = Proxy::to_url(&server.url()).await;
        let locks = connect(&proxy.url()).await;
        let workers: Vec<_> = (0..8)
            .map(|number| {
                let locks = locks.clone();
                tokio::spawn(async move {
                    let begin = Instant::now();
                    let mut served = 0;
                    while begin.elapsed() < Duration::from_secs(6) {
                        let request = locks.exclusive(format!("k{}", number % 2));
                        match request.wait(LONG).acquire().await {
                            Ok(guard) => {
                                served += 1;
                                sleep(Duration::from_millis(5)).await;
                                let _ = guard.release().await;
                            }
                            Err(error) => assert_eq!(error.kind(), LockErrorKind::Unavailable),
                        }
                        sleep(Duration::from_millis(2)).await;
                    }
                    served
                })
            })
            .collect();
        for _ in 0..3 {
            sleep(Duration::from_secs(1)).await;
            proxy.refuse().await;
            proxy.cut();
            sleep(Duration::from_secs(1)).await;
            proxy.let_through().await;
        }
        for worker in workers {
            let served = worker.await.unwrap();
            assert!(served > 5, "{served}");
        }
        until_served(&locks, "k0").await;
    })
    .await;
}

/// A session that has locked the row of a lock delays the requests for that lock alone.
#[tokio::test]
async fn a_row_that_stays_locked_is_no_outage() {
    in_time(async {
        let server = PostgresServer::start().await;
        let locks = connect(&server.url()).await;
        once(&locks, "a").await.unwrap();
        let admin = postgres::connect(&server.url()).await;
        admin
            .batch_execute("begin; select from lock_runtime.record for update")
            .await
            .unwrap();
        let waiting = tokio::spawn(begun(locks.exclusive("a").wait(LONG).acquire()).await);
        let begin = Instant::now();
        while begin.elapsed() < AFTER * 4 {
            let error = once(&locks, "a").await.unwrap_err();
            assert!(
                !format!("{error:#}").contains("without a call"),
                "{error:#}"
            );
            once(&locks, "b").await.unwrap();
        }
        assert!(!waiting.is_finished());
        admin.batch_execute("rollback").await.unwrap();
        waiting.await.unwrap().unwrap().release().await.unwrap();
    })
    .await;
}

/// A database that replies with errors answers: requests end with its error, and are served as soon
/// as it has none.
#[tokio::test]
async fn errors_that_the_database_replies_are_no_outage() {
    in_time(async {
        let server = PostgresServer::start().await;
        let locks = connect(&server.url()).await;
        once(&locks, "a").await.unwrap();
        let admin = postgres::connect(&server.url()).await;
        admin
            .batch_execute(
                "create function full_disk() returns trigger language plpgsql as $$ begin \
                 raise 'no space left' using errcode = 'disk_full'; end $$; \
                 create trigger full_disk before insert or update on lock_runtime.record \
                 for each row execute function full_disk()",
            )
            .await
            .unwrap();
        let waiting = tokio::spawn(begun(locks.exclusive("a").wait(LONG).acquire()).await);
        let begin = Instant::now();
        while begin.elapsed() < AFTER * 4 {
            let error = format!("{:#}", once(&locks, "a").await.unwrap_err());
            assert!(error.contains("no space left"), "{error}");
            assert!(!error.contains("without a call"), "{error}");
        }
        let remedy = "drop trigger full_disk on lock_runtime.record";
        admin.batch_execute(remedy).await.unwrap();
        until_served(&locks, "b").await;
        // A waiting request ends with the error, or is granted the lock.
        if let Ok(guard) = waiting.await.unwrap() {
            guard.release().await.unwrap();
        }
    })
    .await;
}

/// A client that knows of a locked row refuses requests for that lock without a call.
#[tokio::test]
async fn an_outage_while_a_row_is_locked_is_noticed() {
    in_time(async {
        let server = PostgresServer::start().await;
        let locks = connect(&server.url()).await;
        once(&locks, "a").await.unwrap();
        let admin = postgres::connect(&server.url()).await;
        let lock = "begin; select from lock_runtime.record for update";
        admin.batch_execute(lock).await.unwrap();
        let error = once(&locks, "a").await.unwrap_err();
        assert_eq!(error.kind(), LockErrorKind::Blocked, "{error:#}");
        server.stop();
        let (late, clock) = (Lateness::start(), Stopwatch::start());
        let refused = async |key: &str| {
            let error = once(&locks, key).await.unwrap_err();
            format!("{error:#}").contains("without a call")
        };
        while !refused("a").await || !refused("b").await {
            assert!(clock.elapsed() < late.allows(AFTER + SOON), "no outage");
            sleep(Duration::from_millis(20)).await;
        }
        server.resume();
        admin.batch_execute("rollback").await.unwrap();
        until_served(&locks, "a").await;
    })
    .await;
}

/// The connections that a server, or a balancer before it, accepts and ends in each of two
/// intervals, of a client with this many waiting requests.
async fn attempts(scheme: &str, waiters: usize, interval: Duration) -> [u32; 2] {
    let port = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("{scheme}://{}", port.local_addr().unwrap());
    // Requests that wait would be refused.
    let locks = match waiters {
        0 => LockClient::builder().unavailable_after(AFTER),
        _ => LockClient::builder(),
    };
    let locks = locks.connect_lazy(&url).unwrap();
    once(&locks, "k").await.unwrap_err();
    let mut waiting = JoinSet::new();
    for waiter in 0..waiters {
        let locks = locks.clone();
        waiting.spawn(async move {
            let request = locks.exclusive(format!("k{waiter}")).wait(LONG);
            request.acquire().await.map(drop)
        });
    }
    let mut counts = [0; 2];
    for count in &mut counts {
        let _ = timeout(interval, async {
            loop {
                drop(port.accept().await.unwrap());
                *count += 1;
            }
        })
        .await;
    }
    counts
}

#[tokio::test]
async fn attempts_to_connect_become_rare_in_a_long_outage() {
    in_time(async {
        let schemes = ["postgres", "redis", "redis+cluster"];
        let clients = schemes
            .iter()
            .flat_map(|scheme| [(*scheme, 0), (*scheme, 50)]);
        let interval = Duration::from_secs(6);
        let counts = clients
            .clone()
            .map(|(scheme, waiters)| attempts(scheme, waiters, interval));
        for (client, [early, late]) in clients.zip(join_all(counts).await) {
            // Without a growing pause 8 a second, and 100 where requests wait; else 1.3 to 2.5.
            assert!(early >= 6 && late <= 18, "{client:?}: {early}, then {late}");
        }
    })
    .await;
}

/// Long enough that the calls of a busy client share the error of one attempt. The probes come as
/// rarely by then; the parts are tested in `outage.rs`.
#[tokio::test]
async fn a_busy_client_is_served_soon_after_a_long_outage() {
    async fn served(server: impl AsyncFnOnce(), locks: LockClient) {
        let mut waiting = JoinSet::new();
        for waiter in 0..50 {
            let request = locks.exclusive(format!("k{waiter}")).wait(LONG * 3);
            waiting.spawn(async move { request.acquire().await.map(drop) });
        }
        sleep(Duration::from_secs(20)).await;
        server().await;
        let (late, clock) = (Lateness::start(), Stopwatch::start());
        let served = async {
            until_served(&locks, "k").await;
            while let Some(request) = waiting.join_next().await {
                request.unwrap().unwrap();
            }
        };
        served.await;
        let (took, allowed) = (clock.elapsed(), late.allows(Duration::from_secs(2)));
        assert!(took < allowed, "{took:?} of {allowed:?}");
    }
    in_time(async {
        let (redis, database) = join!(RedisServer::start(), PostgresServer::start());
        let on_redis = LockClient::connect(&redis.url()).await.unwrap();
        let on_postgres = LockClient::connect(&database.url()).await.unwrap();
        redis.kill();
        database.kill();
        join!(
            served(async || redis.restart_empty().await, on_redis),
            served(async || database.restart().await, on_postgres),
        );
    })
    .await;
}

#[tokio::test]
async fn a_store_of_records_has_the_setting_too() {
    in_time(async {
        let server = PostgresServer::start().await;
        let url = server.url();
        let records = PostgresRecords::connect(&url, "ns", PostgresOptions::new());
        let store = records.await.unwrap().into_store();
        let store = Arc::new(store.unavailable_after(AFTER));
        let builder = LockClient::builder().unavailable_after(AFTER);
        let error = builder.build_with_store(store.clone()).unwrap_err();
        assert_eq!(error.kind(), LockErrorKind::InvalidSpec);
        assert!(error.to_string().contains("unavailable_after"), "{error}");
        let locks = LockClient::with_store(store);
        server.kill();
        let error = locks.exclusive("k").wait(LONG).acquire().await.unwrap_err();
        assert!(format!("{error:#}").contains("without a call"), "{error:#}");
        server.restart().await;
        until_served(&locks, "k").await;
    })
    .await;
}

#[tokio::test]
async fn a_custom_store_refuses_the_settings_of_a_server() {
    use lock_runtime::{RedisOptions, store::MemoryStore};
    let builder = LockClient::builder;
    let replicas = RedisOptions::new().min_replicas(std::num::NonZeroU32::MIN, AFTER);
    for (builder, option) in [
        (builder().unavailable_after(AFTER), "unavailable_after"),
        (builder().confirm_grants(), "confirm_grants"),
        (builder().namespace("orders"), "namespace"),
        (builder().keep_fences_for(LONG * 2), "keep_fences_for"),
        (builder().redis(replicas), "min_replicas"),
        (builder().identity(""), "identity"),
    ] {
        let store = Arc::new(MemoryStore::new());
        let error = builder.build_with_store(store).unwrap_err();
        assert_eq!(error.kind(), LockErrorKind::InvalidSpec);
        assert!(error.to_string().contains(option), "{option}: {error}");
    }
}
