//! Faults of the server and of the network: every request gets a reply, no lock has two holders,
//! and service recovers by itself.

use std::{num::NonZeroUsize, sync::Arc, time::Duration};

use futures_util::future::{join, join_all};
use lock_runtime::{LockClient, LockErrorKind, LockGuard, LockSpec, Loss, PostgresOptions};
use lock_tests::{
    FencedResource, PostgresServer, Proxy, chain,
    place::{HANGS, LONG, Stopwatch, begun, eventually, in_time},
    postgres,
    proxy::DropReply,
};
use tokio::{
    task::JoinSet,
    time::{Instant, sleep, timeout},
};
use tokio_postgres::Client;

use super::{client_of_new_database, held, once, one_waits, outlive, server, waiters};

/// Much less than a lease of 30 s, much more than a busy machine needs.
const SOON: Duration = Duration::from_secs(10);
const EXPIRED: LockErrorKind = LockErrorKind::Lost(Loss::Expired);

async fn connect(url: &str) -> LockClient {
    LockClient::connect(url).await.unwrap()
}

async fn clients(url: &str, count: usize) -> Vec<LockClient> {
    join_all((0..count).map(|_| connect(url))).await
}

async fn held_for(locks: &LockClient, key: &str, lease: Duration) -> LockGuard {
    locks.exclusive(key).lease(lease).acquire().await.unwrap()
}

async fn is_free(locks: &LockClient, key: &str) -> bool {
    locks.exclusive(key).try_acquire().await.unwrap().is_some()
}

/// Changes a setting for the new connections to the database.
async fn set(admin: &Client, url: &str, setting: &str) {
    let (_, database) = url.rsplit_once('/').unwrap();
    let set = format!("alter database \"{database}\" set {setting}");
    admin.batch_execute(&set).await.unwrap();
}

/// Asserts that no two holders were in the resource at once.
#[track_caller]
fn assert_clean(resource: &FencedResource) {
    let report = resource.report();
    assert!(report.is_clean(), "{report}");
}

#[tokio::test]
async fn the_time_limit_of_the_server_is_an_outage() {
    in_time(async {
        let (url, _, admin) = client_of_new_database().await;
        set(&admin, &url, "statement_timeout = '100ms'").await;
        // A busy machine may not do it within the limit.
        let locks = loop {
            match LockClient::connect(&url).await {
                Ok(locks) => break locks,
                Err(error) => assert!(chain(&error).contains("57014"), "{error}"),
            }
        };
        let serves = async |key| once(locks.exclusive(key).wait(SOON)).await.is_ok();
        eventually("the record exists", async || serves("a").await).await;

        // An operator looks at the lock, and forgets to end the transaction.
        let look = "begin; select from lock_runtime.record for update";
        admin.batch_execute(look).await.unwrap();
        for wait in [Duration::ZERO, Duration::from_secs(1)] {
            let error = once(locks.exclusive("a").wait(wait)).await.unwrap_err();
            assert_eq!(error.kind(), LockErrorKind::Unavailable);
            // A request that does not wait is given up before that.
            let message = chain(&error);
            assert!(wait.is_zero() || message.contains("57014"), "{message}");
        }
        eventually("other locks are served", async || serves("b").await).await;
        admin.batch_execute("rollback").await.unwrap();
        eventually("the lock is served again", async || serves("a").await).await;
        eventually("none of the requests has left anything", async || {
            let found = locks.inspect("a").await;
            found.is_ok_and(|it| it.holders.is_empty() && it.waiters.is_empty())
        })
        .await;
    })
    .await;
}

/// Clients that contend for some locks, each with its own tokens.
async fn contend(clients: &[LockClient], turns: usize) {
    let resources: Arc<[FencedResource; 3]> = Arc::default();
    let mut tasks = JoinSet::new();
    for (number, locks) in clients.iter().enumerate() {
        let (locks, resources) = (locks.clone(), resources.clone());
        tasks.spawn(async move {
            for turn in 0..turns {
                let which = (number + turn) % 4;
                let keys = ["a", "b", "c"];
                let guard = match keys.get(which) {
                    Some(key) => locks.exclusive(*key).wait(LONG).acquire().await,
                    None => locks.all(keys).wait(LONG).acquire().await,
                };
                let guard = guard.unwrap();
                for (key, fence) in guard.fences() {
                    let index = keys.iter().position(|it| *it == key.as_str()).unwrap();
                    resources[index].increment(fence).await.unwrap();
                }
                guard.release().await.unwrap();
            }
        });
    }
    tasks.join_all().await;
    resources.iter().for_each(assert_clean);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn serialization_failures_are_no_errors() {
    in_time(async {
        for isolation in ["read committed", "repeatable read", "serializable"] {
            println!("{isolation}");
            let (url, _, admin) = client_of_new_database().await;
            let setting = format!("default_transaction_isolation = '{isolation}'");
            set(&admin, &url, &setting).await;
            contend(&clients(&url, 6).await, 15).await;
        }
    })
    .await;
}

/// The backends of the client may not write beyond a size, as on a full disk.
#[tokio::test]
async fn a_full_disk_refuses_new_locks_and_keeps_the_others() {
    in_time(async {
        let (url, locks, admin) = client_of_new_database().await;
        let guard = held(&locks, "a").await;
        // The log has segments of 16 MiB, and the table must be larger.
        let fill = "insert into lock_runtime.record \
            select 'lock:fill:' || i, 1, 0, 0, 9e15, decode(repeat(md5(i::text), 58), 'hex') \
            from generate_series(1, 10000) i";
        admin.batch_execute(fill).await.unwrap();
        let size = "select pg_relation_size('lock_runtime.record')";
        let size = super::number(&admin, size).await;
        assert!(size >= 18 << 20, "the table is too small: {size}");
        let limit = async |bytes: Option<u64>| {
            let backends = "select pid from pg_stat_activity \
                where application_name = 'lock-runtime' and datname = current_database()";
            for row in admin.query(backends, &[]).await.unwrap() {
                lock_tests::postgres::limit_files(row.get(0), bytes);
            }
        };
        limit(Some(17 << 20)).await;
        let mut refused = 0;
        for number in 0..200 {
            let request = locks.exclusive(format!("new:{number}")).no_wait();
            if let Err(error) = once(request).await {
                assert_eq!(error.kind(), LockErrorKind::Unavailable);
                let message = chain(&error);
                assert!(message.contains("File too large"), "{message}");
                refused += 1;
                if refused == 3 {
                    break;
                }
            }
        }
        assert_eq!(refused, 3, "there was room");
        guard.verify().await.unwrap();
        limit(None).await;
        once(locks.exclusive("new")).await.unwrap();
        assert!(!is_free(&connect(&url).await, "a").await);
        guard.release().await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn a_stopped_server_is_noticed_and_used_again() {
    in_time(async {
        let server = server().await;
        let url = server.url();
        let (locks, others) = (connect(&url).await, connect(&url).await);
        let short = held_for(&locks, "short", Duration::from_millis(600)).await;
        let long = held(&locks, "long").await;
        server.stop();
        let began = Stopwatch::start();
        let error = once(locks.exclusive("b").no_wait()).await.unwrap_err();
        assert_eq!(error.kind(), LockErrorKind::Unavailable);
        let took = began.elapsed();
        assert!(took < Duration::from_secs(2), "{took:?}");
        let health = locks.health().await;
        assert!(!health.servers()[0].reachable, "{health}");
        // By its own clock.
        assert_eq!(short.lost().await.kind(), EXPIRED);
        let waiting = tokio::spawn(begun(locks.exclusive("b").wait(LONG).acquire()).await);
        server.resume();
        waiting.await.unwrap().unwrap().release().await.unwrap();
        long.verify().await.unwrap();
        assert!(!is_free(&others, "long").await);
        once(others.exclusive("short").wait(SOON)).await.unwrap();
        long.release().await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn a_killed_server_loses_no_lock_and_no_waiter() {
    in_time(async {
        let server = server().await;
        let url = server.url();
        let (one, other) = (connect(&url).await, connect(&url).await);
        let third = connect(&url).await;
        let failures = async || {
            for _ in 0..2 {
                server.kill();
                let error = once(third.exclusive("outlives").no_wait()).await;
                assert_eq!(error.unwrap_err().kind(), LockErrorKind::Unavailable);
                sleep(Duration::from_millis(300)).await;
                server.restart().await;
            }
        };
        outlive(&one, &other, failures).await;
    })
    .await;
}

/// The reply to a request is lost, with its connection or without.
#[tokio::test]
async fn a_lost_reply_leaves_one_holder() {
    in_time(async {
        let (url, others, _) = client_of_new_database().await;
        let proxy = Proxy::to_url(&url).await;
        let locks = connect(&proxy.url()).await;
        once(locks.exclusive("warm")).await.unwrap();
        for (operation, with, lost) in [
            ("acquire", "with its connection", DropReply::next()),
            ("release", "with its connection", DropReply::next()),
            ("acquire", "without", DropReply::next().silently()),
            ("release", "without", DropReply::next().silently()),
        ] {
            let what = format!("the reply to {operation}, {with}");
            println!("{what}");
            if operation == "acquire" {
                proxy.drop_reply(lost);
                let guard = locks.exclusive("a").wait(SOON).acquire().await.unwrap();
                let found = others.inspect("a").await.unwrap();
                assert_eq!(found.holders.len(), 1, "{what}");
                // A new connection may take longer than one call waits.
                eventually("it is still held", async || guard.verify().await.is_ok()).await;
                guard.release().await.unwrap();
            } else {
                let guard = locks.exclusive("a").wait(SOON).acquire().await.unwrap();
                // Some of them may be those of background calls.
                proxy.drop_reply(lost.times(1000));
                let error = guard.release().await.unwrap_err();
                let kind = error.kind();
                assert_eq!(kind, LockErrorKind::ReleaseUnknown, "{what}: {error:#}");
                proxy.let_through().await;
            }
            once(others.exclusive("a").wait(SOON)).await.unwrap();
            proxy.let_through().await;
        }
    })
    .await;
}

/// Half-open connections: the network swallows all packets.
#[tokio::test]
async fn a_holder_behind_a_black_hole_notices_its_loss_and_the_next_one_is_served() {
    in_time(async {
        let (url, others, _) = client_of_new_database().await;
        let proxy = Proxy::to_url(&url).await;
        let locks = connect(&proxy.url()).await;
        let lease = Duration::from_secs(1);
        let guard = held_for(&locks, "a", lease).await;
        let waiting = tokio::spawn(begun(others.exclusive("a").wait(LONG).acquire()).await);
        waiters(&others, "a", 1).await;
        proxy.black_hole();
        assert_eq!(guard.lost().await.kind(), EXPIRED);
        let fence = guard.fence();
        let next = waiting.await.unwrap().unwrap();
        assert!(next.fence() > fence);
        next.release().await.unwrap();
        proxy.let_through().await;
        once(locks.exclusive("a").wait(SOON)).await.unwrap();
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_that_are_cut_during_hand_offs_cost_no_lock() {
    in_time(async {
        let (url, ..) = client_of_new_database().await;
        let proxy = Proxy::to_url(&url).await;
        let clients = clients(&proxy.url(), 4).await;
        let until = Instant::now() + Duration::from_secs(4);
        let cutting = async {
            while Instant::now() < until {
                sleep(Duration::from_millis(rand::random_range(20..120))).await;
                proxy.cut();
            }
        };
        let resource = FencedResource::new();
        let turns = clients.iter().map(async |locks| {
            let mut turns = 0;
            // On a busy machine, connecting may take longer than until the next cut.
            while turns == 0 || Instant::now() < until {
                let Ok(guard) = locks.exclusive("a").wait(SOON).acquire().await else {
                    continue;
                };
                // A failed renewal may have ended the lock.
                if resource.increment(guard.fence()).await.is_ok() {
                    turns += 1;
                }
                drop(guard.release().await);
            }
        });
        join(join_all(turns), cutting).await;
        assert_clean(&resource);
    })
    .await;
}

/// Also while another client has locked the row and does not go on.
#[tokio::test]
async fn a_client_that_is_paused_within_a_change_delays_the_others_for_a_second() {
    in_time(async {
        let (url, locks, _) = client_of_new_database().await;
        once(locks.exclusive("a")).await.unwrap();
        let paused = postgres::connect(&url).await;
        paused.batch_execute("begin").await.unwrap();
        let lock = "select from lock_runtime.lock(array['lock:a'])";
        paused.execute(lock, &[]).await.unwrap();
        let began = Instant::now();
        once(locks.exclusive("a").wait(SOON)).await.unwrap();
        let took = began.elapsed();
        let (least, most) = (Duration::from_millis(500), Duration::from_secs(4));
        assert!((least..most).contains(&took), "{took:?}");
        assert!(paused.batch_execute("commit").await.is_err());
        // Others are not delayed at all.
        let again = postgres::connect(&url).await;
        again.batch_execute("begin").await.unwrap();
        again.execute(lock, &[]).await.unwrap();
        let mut waiting = std::pin::pin!(once(locks.exclusive("a").wait(SOON)));
        let early = timeout(Duration::from_millis(50), &mut waiting).await;
        early.expect_err("the row is locked");
        one_waits(&again).await;
        for number in 0..20 {
            once(locks.exclusive(format!("b{number}"))).await.unwrap();
        }
        drop(again);
        waiting.await.unwrap();
    })
    .await;
}

/// Swaps and renewals that share a transaction with that of a record that is locked.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_locked_record_delays_no_other_lock() {
    in_time(async {
        let (url, holder, admin) = client_of_new_database().await;
        let locks = connect(&url).await;
        let lease = Duration::from_secs(3);
        let mut held = Vec::new();
        for number in 0..20 {
            held.push(held_for(&holder, &format!("held:{number}"), lease).await);
        }
        once(locks.exclusive("locked")).await.unwrap();
        let lock = "begin; select from lock_runtime.record \
            where name in ('lock:locked', 'lock:held:7') for update";
        admin.batch_execute(lock).await.unwrap();
        let locked = tokio::spawn(begun(locks.exclusive("locked").wait(LONG).acquire()).await);
        let began = Instant::now();
        while began.elapsed() < lease * 2 {
            let requests = (0..30).map(|number| once(locks.exclusive(format!("free:{number}"))));
            let busy = once(locks.exclusive("locked").no_wait());
            let (results, busy) = tokio::join!(join_all(requests), busy);
            results.into_iter().for_each(Result::unwrap);
            busy.unwrap_err();
        }
        for (number, guard) in held.iter().enumerate() {
            assert_eq!(guard.is_lost(), number == 7, "{number}");
        }
        admin.batch_execute("rollback").await.unwrap();
        locked.await.unwrap().unwrap().release().await.unwrap();
    })
    .await;
}

/// More records than a client has connections, each with calls that wait for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_locked_records_take_no_other_lock() {
    in_time(async {
        let (url, holder, admin) = client_of_new_database().await;
        let locks = connect(&url).await;
        let lease = Duration::from_secs(3);
        let (mut held, mut waiting) = (Vec::new(), Vec::new());
        for kind in ["held", "locked"] {
            for number in 0..5 {
                let key = format!("{kind}:{number}");
                held.push(held_for(&holder, &key, lease).await);
                let request = locks.exclusive(key).wait(LONG);
                waiting.push(tokio::spawn(begun(request.acquire()).await));
            }
        }
        let lock =
            "begin; select from lock_runtime.record where name like 'lock:locked:%' for update";
        admin.batch_execute(lock).await.unwrap();
        sleep(lease * 4).await;
        admin.batch_execute("rollback").await.unwrap();
        let lost: Vec<_> = held[..5].iter().map(LockGuard::is_lost).collect();
        assert_eq!(lost, [false; 5]);
        drop(held);
        for waiting in waiting {
            waiting.await.unwrap().unwrap().release().await.unwrap();
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_waiters_are_served() {
    in_time(async {
        let (url, locks, _) = client_of_new_database().await;
        let clients = clients(&url, 10).await;
        let guard = held(&locks, "a").await;
        let resource = Arc::new(FencedResource::new());
        let mut tasks = JoinSet::new();
        for number in 0..10_000 {
            let (locks, resource) = (clients[number % 10].clone(), resource.clone());
            tasks.spawn(async move {
                let guard = locks.exclusive("a").wait(HANGS).acquire().await.unwrap();
                resource.increment(guard.fence()).await.unwrap();
                guard.release().await.unwrap();
            });
        }
        waiters(&locks, "a", 10).await;
        guard.release().await.unwrap();
        tasks.join_all().await;
        let report = resource.report();
        assert!(report.is_clean() && report.value == 10_000, "{report}");
    })
    .await;
}

/// Many processes that wait for one lock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hundred_processes_take_turns_also_while_the_server_is_killed() {
    in_time(async {
        let builder = PostgresServer::builder().in_memory();
        let server = builder.setting("max_connections", "600").start().await;
        let url = server.url();
        let options = PostgresOptions::new().connections(NonZeroUsize::MIN);
        let builder = LockClient::builder().postgres(options);
        let clients = join_all((0..100).map(|_| builder.clone().connect(&url))).await;
        let clients: Vec<_> = clients.into_iter().map(Result::unwrap).collect();
        let guard = held(&clients[0], "a").await;
        let resource = Arc::new(FencedResource::new());
        let mut tasks = JoinSet::new();
        for locks in &clients[1..] {
            let (locks, resource) = (locks.clone(), resource.clone());
            tasks.spawn(async move {
                let guard = locks.exclusive("a").wait(HANGS).acquire().await.unwrap();
                resource.increment(guard.fence()).await.unwrap();
                // A restart may come in between.
                drop(guard.release().await);
            });
        }
        waiters(&clients[0], "a", 99).await;
        // It may last longer than its time-out, as all the others begin to wait.
        drop(guard.release().await);
        while resource.report().value < 30 {
            sleep(LockSpec::MIN_LEASE / 10).await;
        }
        server.restart().await;
        tasks.join_all().await;
        let report = resource.report();
        assert!(report.is_clean() && report.value == 99, "{report}");
    })
    .await;
}
