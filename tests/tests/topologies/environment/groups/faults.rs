//! Servers, connections, callers and runtimes that end while groups are in flight.

use std::{sync::mpsc, thread};

use futures_util::{FutureExt as _, future::join_all};
use lock_runtime::{LockClient, LockError, LockErrorKind};
use lock_tests::{Lateness, Proxy, RedisServer};
use tokio::{
    runtime::Builder,
    time::{Instant, sleep, timeout},
};

use super::{ALONE, Duration, GROUP, HOUR, acquire, one_server, requests};

/// Waits until no lock is held.
async fn expect_free(server: &RedisServer, within: Duration) {
    let until = Instant::now() + within;
    loop {
        let held = server.keys("lock:*").await;
        let Some(first) = held.first() else { return };
        let count = held.len();
        assert!(Instant::now() < until, "{count} locks, such as {first}");
        sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_dropped_in_a_group_leave_no_lock() {
    let server = RedisServer::start().await;
    let locks = LockClient::connect(&server.url()).await.unwrap();
    for _ in 0..3 {
        server.stop();
        let tasks: Vec<_> = (0..10_000)
            .map(|number| tokio::spawn(locks.exclusive(format!("k{number}")).lease(HOUR).acquire()))
            .collect();
        sleep(Duration::from_millis(100)).await;
        tasks.iter().for_each(|task| task.abort());
        server.resume();
        join_all(tasks).await;
    }
    expect_free(&server, Duration::from_secs(20)).await;
    locks.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn broken_connections_among_groups_leave_no_lock() {
    let server = RedisServer::start().await;
    let proxy = Proxy::to(&server).await;
    let locks = LockClient::connect(&proxy.url()).await.unwrap();
    let until = Instant::now() + Duration::from_secs(3);
    let task = async |number: usize| -> Result<u32, LockError> {
        let mut turns = 0;
        while Instant::now() < until {
            let request = locks.exclusive(format!("k{number}")).lease(HOUR);
            let guard = request.wait(Duration::from_secs(30)).acquire().await?;
            turns += 1;
            if let Err(error) = guard.release().await {
                // Its outcome is unknown, and it is repeated.
                assert_eq!(error.kind(), LockErrorKind::ReleaseUnknown, "{error}");
            }
        }
        Ok(turns)
    };
    let breaks = async {
        while Instant::now() < until {
            sleep(Duration::from_millis(40)).await;
            proxy.cut();
        }
    };
    let (turns, ()) = tokio::join!(join_all((0..200).map(task)), breaks);
    for turns in turns {
        assert!(turns.unwrap() > 0);
    }
    expect_free(&server, Duration::from_secs(20)).await;
    locks.shutdown().await;
}

/// The runtime whose task sends the groups is kept, and no longer driven.
#[test]
fn a_runtime_that_stands_still_does_not_hold_up_others() {
    let runtime = || {
        let builder = &mut Builder::new_current_thread();
        builder.enable_all().build().unwrap()
    };
    let (idle, busy) = (runtime(), runtime());
    let (server, locks) = busy.block_on(async {
        let server = RedisServer::start().await;
        let locks = LockClient::connect(&server.url()).await.unwrap();
        drop(locks.exclusive("k").acquire().await.unwrap());
        (server, locks)
    });
    server.stop();
    let acquires = (0..GROUP).map(|number| locks.exclusive(format!("k{number}")).acquire());
    let waits = async { timeout(Duration::from_millis(20), join_all(acquires)).await };
    assert!(idle.block_on(waits).is_err());
    server.resume();
    busy.block_on(async {
        sleep(Duration::from_millis(1_100)).await;
        for _ in 0..GROUP {
            let (since, late) = (Instant::now(), Lateness::start());
            let guards =
                (0..2 * ALONE).map(|number| locks.exclusive(format!("b{number}")).acquire());
            for guard in join_all(guards).await {
                guard.unwrap().release().await.unwrap();
            }
            let longest = late.allows(Duration::from_secs(1));
            assert!(since.elapsed() < longest, "{:?}", since.elapsed());
        }
    });
}

/// A runtime that is no longer driven after its last request leaves no group behind.
#[test]
fn a_runtime_that_is_left_does_not_hold_up_others() {
    let runtime = || {
        let builder = &mut Builder::new_current_thread();
        builder.enable_all().build().unwrap()
    };
    let (left, busy) = (runtime(), runtime());
    let turn = async |locks: &LockClient, number: usize| {
        let guard = locks.exclusive(format!("k{number}")).acquire().await;
        guard.unwrap().release().await.unwrap();
    };
    let (_server, locks) = busy.block_on(async {
        let server = RedisServer::start().await;
        let locks = LockClient::connect(&server.url()).await.unwrap();
        turn(&locks, 0).await;
        (server, locks)
    });
    for _ in 0..20 {
        // The connection is driven by the other runtime.
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        thread::scope(|scope| {
            scope.spawn(|| busy.block_on(stopped));
            left.block_on(join_all((0..20).map(|number| turn(&locks, number))));
            stop.send(()).unwrap();
        });
        let (since, late) = (Instant::now(), Lateness::start());
        busy.block_on(turn(&locks, 0));
        assert!(since.elapsed() < late.allows(Duration::from_millis(400)));
    }
}

#[tokio::test]
async fn requests_learn_at_once_that_there_is_no_server() {
    let (server, store) = one_server().await;
    server.kill();
    let requests: Vec<_> = (0..40)
        .flat_map(|round| requests(&format!("{round}")))
        .collect();
    let (since, late) = (Instant::now(), Lateness::start());
    // The connection is found to be broken, and cannot be established again.
    acquire(&store, &requests).await;
    for reply in acquire(&store, &requests).await {
        let error = reply.unwrap_err();
        assert!(error.is_unsent(), "{error}");
    }
    let longest = late.allows(Duration::from_secs(2));
    assert!(since.elapsed() < longest, "{:?}", since.elapsed());
}

/// Kills the server while 200 tasks acquire and release, and starts it again with the data of its
/// log, which it writes before each reply.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_killed_among_groups_keeps_no_lock_past_its_lease() {
    const LEASE: Duration = Duration::from_secs(3);
    let always = ["--appendonly", "yes", "--appendfsync", "always"];
    let server = RedisServer::builder().args(always).start().await;
    let locks = LockClient::connect(&server.url()).await.unwrap();
    let until = Instant::now() + Duration::from_secs(3);
    let task = async |number: usize| {
        let (mut turns, mut latest) = (0, None);
        while Instant::now() < until {
            let request = locks.exclusive(format!("k{number}")).lease(LEASE);
            let acquired = request.wait(Duration::from_secs(10)).acquire().await;
            let Ok(guard) = acquired else { continue };
            assert!(latest.replace(guard.fence()) < Some(guard.fence()));
            turns += 1;
            match guard.release().await.map_err(|error| error.kind()) {
                Ok(()) | Err(LockErrorKind::ReleaseUnknown | LockErrorKind::Lost(_)) => {}
                Err(kind) => panic!("{kind:?}"),
            }
        }
        turns
    };
    let kills = async {
        for _ in 0..3 {
            sleep(Duration::from_millis(500)).await;
            server.kill();
            server.restart_from_log().await;
        }
    };
    let (turns, ()) = tokio::join!(join_all((0..200).map(task)), kills);
    assert!(turns.iter().all(|turns| *turns > 0), "{turns:?}");
    assert!(turns.iter().sum::<u32>() > 400, "{turns:?}");
    // No renewal keeps a lock that no task holds.
    expect_free(&server, LEASE + Duration::from_secs(2)).await;
    locks.shutdown().await;
}

/// Acquires while it is dropped, as a runtime that shuts down drops its tasks.
struct AcquiresOnDrop(LockClient);

impl Drop for AcquiresOnDrop {
    fn drop(&mut self) {
        for number in 0..ALONE + 2 {
            let _ = Box::pin(self.0.exclusive(format!("k{number}")).acquire()).now_or_never();
        }
    }
}

#[test]
fn a_runtime_that_shuts_down_among_requests_ends() {
    let (done, ended) = mpsc::channel();
    thread::spawn(move || {
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let server = runtime.block_on(async {
            let server = RedisServer::start().await;
            let locks = LockClient::connect(&server.url()).await.unwrap();
            drop(locks.exclusive("k").acquire().await.unwrap());
            server.stop();
            let held = AcquiresOnDrop(locks);
            tokio::spawn(async move {
                std::future::pending::<()>().await;
                drop(held);
            });
            sleep(Duration::from_millis(50)).await;
            server
        });
        drop(runtime);
        server.resume();
        drop(server);
        done.send(()).unwrap();
    });
    let ended = ended.recv_timeout(Duration::from_secs(20));
    assert!(ended.is_ok(), "the runtime does not end");
}
