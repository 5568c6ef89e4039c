//! Faults of a server and of the network during requests: every request gets a reply, and service
//! recovers by itself.

use std::{error::Error as _, time::Duration};

use lock_runtime::{LockClient, LockError, LockErrorKind};
use lock_tests::{
    Captured, Proxy, RedisServer,
    place::{LONG, Place, begun, eventually, in_time},
    proxy::DropReply,
    shared_server,
};
use tokio::{
    task::JoinSet,
    time::{Instant, sleep},
};

/// Much less than a lease of 30 s, much more than a busy machine needs.
const SOON: Duration = Duration::from_secs(10);

/// A client through a proxy, with its scripts loaded on the server, and one with a direct
/// connection.
async fn by_proxy(server: &RedisServer) -> (Proxy, LockClient, LockClient) {
    let proxy = Proxy::to(server).await;
    let Place::Redis { namespace, .. } = Place::redis().await else {
        unreachable!("it is on Redis")
    };
    let client = async |url: String| {
        let locks = LockClient::builder()
            .namespace(&namespace)
            .connect(&url)
            .await
            .unwrap();
        locks
            .exclusive("warm")
            .acquire()
            .await
            .unwrap()
            .release()
            .await
            .unwrap();
        locks
    };
    let (locks, others) = (client(proxy.url()).await, client(server.url()).await);
    (proxy, locks, others)
}

#[tokio::test]
async fn acquire_with_a_lost_reply_retries_and_leaves_one_holder() {
    in_time(async {
        let server = shared_server().await;
        for drop_reply in [
            DropReply::next().to("EVALSHA"),
            DropReply::next().to("EVALSHA").silently(),
        ] {
            let (proxy, locks, others) = by_proxy(server).await;
            proxy.drop_reply(drop_reply);
            let start = Instant::now();
            // A silent connection is given up.
            let guard = locks.exclusive("a").wait(SOON).acquire().await.unwrap();
            assert!(proxy.dropped_replies() >= 1);
            assert_eq!(others.inspect("a").await.unwrap().holders.len(), 1);
            assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
            guard.verify().await.unwrap();
            guard.release().await.unwrap();
            others
                .exclusive("a")
                .wait(SOON)
                .acquire()
                .await
                .unwrap()
                .release()
                .await
                .unwrap();
        }
    })
    .await;
}

#[tokio::test]
async fn acquire_shared_with_a_lost_reply_leaves_no_second_share() {
    in_time(async {
        let (proxy, locks, others) = by_proxy(shared_server().await).await;
        proxy.drop_reply(DropReply::next().to("EVALSHA"));
        let reader = locks.shared("a").wait(SOON).acquire().await.unwrap();
        proxy.drop_reply(DropReply::next().to("EVALSHA"));
        let permit = locks
            .permits("a", 2.try_into().unwrap())
            .wait(SOON)
            .acquire()
            .await
            .unwrap();
        assert_eq!(proxy.dropped_replies(), 2);
        // Shares whose grant reached no client are released soon.
        eventually("one reader", || async {
            others.inspect("a").await.unwrap().holders.len() == 1
        })
        .await;
        eventually("one permit", || async {
            others.inspect("a").permits().await.unwrap().holders.len() == 1
        })
        .await;
        reader.release().await.unwrap();
        permit.release().await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn a_try_whose_reply_is_lost_leaves_no_key() {
    in_time(async {
        let (proxy, locks, others) = by_proxy(shared_server().await).await;
        for request in [locks.exclusive("a"), locks.all(["a", "b"])] {
            // The request is sent twice, and the commands that abandon the first tokens may come in
            // between.
            proxy.drop_reply(DropReply::next().to("EVALSHA").times(5));
            assert_eq!(
                request.try_acquire().await.unwrap_err().kind(),
                LockErrorKind::Unavailable
            );
            others
                .all(["a", "b"])
                .wait(SOON)
                .acquire()
                .await
                .unwrap()
                .release()
                .await
                .unwrap();
        }
    })
    .await;
}

#[tokio::test]
async fn a_release_whose_reply_is_lost_says_so_and_frees_the_lock() {
    in_time(async {
        for drop_reply in [
            DropReply::next().to("EVALSHA"),
            DropReply::next().to("EVALSHA").silently(),
        ] {
            let (proxy, locks, others) = by_proxy(shared_server().await).await;
            let guard = locks.exclusive("a").acquire().await.unwrap();
            proxy.drop_reply(drop_reply);
            assert_eq!(
                guard.release().await.unwrap_err().kind(),
                LockErrorKind::ReleaseUnknown
            );
            others
                .exclusive("a")
                .wait(SOON)
                .acquire()
                .await
                .unwrap()
                .release()
                .await
                .unwrap();
        }
    })
    .await;
}

#[tokio::test]
async fn a_release_that_never_reached_the_server_is_made_up_for() {
    in_time(async {
        let (proxy, locks, others) = by_proxy(shared_server().await).await;
        let guards = [
            locks.exclusive("a").acquire().await.unwrap(),
            locks.exclusive("b").acquire().await.unwrap(),
        ];
        proxy.black_hole();
        let [released, dropped] = guards;
        assert_eq!(
            released.release().await.unwrap_err().kind(),
            LockErrorKind::ReleaseUnknown
        );
        drop(dropped);
        assert_eq!(
            others.inspect("a").await.unwrap().holders.len(),
            1,
            "nothing has passed"
        );
        proxy.let_through().await;
        for key in ["a", "b"] {
            others
                .exclusive(key)
                .wait(SOON)
                .acquire()
                .await
                .unwrap()
                .release()
                .await
                .unwrap();
        }
    })
    .await;
}

/// A released lock may have another holder by the time the release is repeated.
#[tokio::test]
async fn a_repeated_release_does_not_free_the_lock_of_another_holder() {
    in_time(async {
        let (proxy, locks, others) = by_proxy(shared_server().await).await;
        let guard = locks.exclusive("a").acquire().await.unwrap();
        proxy.drop_all_replies();
        let release = tokio::spawn(guard.release());
        let next = others.exclusive("a").wait(SOON).acquire().await.unwrap();
        assert_eq!(
            release.await.unwrap().unwrap_err().kind(),
            LockErrorKind::ReleaseUnknown
        );
        let dropped = proxy.dropped_replies();
        proxy.wait_for_dropped_replies(dropped + 1).await;
        proxy.let_through().await;
        locks.shutdown().await;
        next.verify().await.unwrap();
        next.release().await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn scripts_that_the_server_forgets_are_sent_again() {
    in_time(async {
        let server = RedisServer::start().await;
        let locks = LockClient::connect(&server.url()).await.unwrap();
        let held = locks
            .exclusive("held")
            .lease(Duration::from_secs(2))
            .acquire()
            .await
            .unwrap();
        let mut tasks = JoinSet::new();
        for task in 0..8 {
            let locks = locks.clone();
            tasks.spawn(async move {
                for round in 0..20 {
                    let guard = match (task + round) % 3 {
                        0 => locks.shared("a"),
                        1 => locks.permits("a", 3.try_into().unwrap()),
                        _ => locks.exclusive(format!("a{task}")),
                    };
                    let guard = guard.wait(LONG).acquire().await.unwrap();
                    guard.extend(LONG * 2).await.unwrap();
                    guard.release().await.unwrap();
                }
            });
        }
        while !tasks.is_empty() {
            server.command(&["SCRIPT", "FLUSH"]).await;
            tokio::select! {
                task = tasks.join_next() => task.unwrap().unwrap(),
                () = sleep(Duration::from_millis(1)) => {}
            }
        }
        sleep(Duration::from_secs(2)).await;
        server.command(&["SCRIPT", "FLUSH"]).await;
        held.verify().await.unwrap();
        server.command(&["SCRIPT", "FLUSH"]).await;
        held.downgrade().await.unwrap().release().await.unwrap();
        assert!(server.keys("lock:*").await.is_empty());
    })
    .await;
}

#[tokio::test]
async fn acquire_replies_in_time_when_the_server_stops() {
    in_time(async {
        let server = RedisServer::start().await;
        let (locks, others) = (
            LockClient::connect(&server.url()).await.unwrap(),
            LockClient::connect(&server.url()).await.unwrap(),
        );
        let guard = locks.exclusive("a").acquire().await.unwrap();
        let wait = Duration::from_millis(1500);
        let start = Instant::now();
        let mut tasks = JoinSet::new();
        for task in 0..100 {
            // Half of them are in one wait queue, the others at the head of separate queues.
            let request = match task % 4 {
                0 | 1 => locks.exclusive("a"),
                2 => others.exclusive(format!("b{task}")),
                _ => others.all([format!("b{task}"), format!("c{task}")]),
            };
            tasks.spawn(async move { request.wait(wait).acquire().await });
        }
        server.stop();
        for result in tasks.join_all().await {
            match result {
                Ok(guard) => drop(guard),
                Err(error) => {
                    assert!(
                        matches!(
                            error.kind(),
                            LockErrorKind::WaitTimeout | LockErrorKind::Unavailable
                        ),
                        "{error}"
                    )
                }
            }
        }
        assert!(
            start.elapsed() < wait + Duration::from_secs(5),
            "{:?}",
            start.elapsed()
        );
        // Requests that do not wait get a reply in time too.
        for request in [others.exclusive("d"), others.all(["d", "e"])] {
            let start = Instant::now();
            assert_eq!(
                request.try_acquire().await.unwrap_err().kind(),
                LockErrorKind::Unavailable
            );
            assert!(
                start.elapsed() < Duration::from_secs(5),
                "{:?}",
                start.elapsed()
            );
        }
        drop(guard);
        server.resume();
        // Locks that the server grants late are released.
        for key in ["a", "b2", "b3", "c3", "d", "e"] {
            others
                .exclusive(key)
                .wait(SOON)
                .acquire()
                .await
                .unwrap()
                .release()
                .await
                .unwrap();
        }
    })
    .await;
}

#[tokio::test]
async fn a_waiter_keeps_waiting_when_the_connection_is_cut() {
    in_time(async {
        let traces = Captured::new();
        let _collecting = traces.set_default();
        let (proxy, locks, others) = by_proxy(shared_server().await).await;
        let guard = others.exclusive("a").acquire().await.unwrap();
        let waiting = tokio::spawn(begun(locks.exclusive("a").wait(LONG).acquire()).await);
        traces
            .wait_for(|event| event.message == "waiting for its holder")
            .await;
        for _ in 0..3 {
            proxy.cut();
            sleep(Duration::from_millis(200)).await;
        }
        guard.release().await.unwrap();
        let released = Instant::now();
        waiting.await.unwrap().unwrap().release().await.unwrap();
        assert!(released.elapsed() < SOON, "{:?}", released.elapsed());
    })
    .await;
}

#[tokio::test]
async fn service_comes_back_by_itself_when_the_server_does() {
    in_time(async {
        let server = RedisServer::start().await;
        let locks = LockClient::connect(&server.url()).await.unwrap();
        locks
            .exclusive("a")
            .acquire()
            .await
            .unwrap()
            .release()
            .await
            .unwrap();
        server.kill();
        let error = locks.exclusive("a").no_wait().acquire().await.unwrap_err();
        assert_eq!(error.kind(), LockErrorKind::Unavailable, "{error}");
        let waiting = tokio::spawn(locks.exclusive("a").wait(LONG).acquire());
        sleep(Duration::from_secs(1)).await;
        server.restart_empty().await;
        let back = Instant::now();
        waiting.await.unwrap().unwrap().release().await.unwrap();
        assert!(
            back.elapsed() < Duration::from_secs(5),
            "{:?}",
            back.elapsed()
        );
        locks
            .exclusive("a")
            .try_acquire()
            .await
            .unwrap()
            .unwrap()
            .release()
            .await
            .unwrap();
        assert!(server.keys("lock:*").await.is_empty());
    })
    .await;
}

/// Checks the error of a request in an outage. The message has the time waited and the number of
/// attempts. The source is the last error of the store, never a time-out at the end of the
/// request's own wait; on a busy machine a refusal may take longer than the time-out of a call.
#[track_caller]
fn assert_tells_of_an_outage(error: &LockError, key: &str, attempts: &str, causes: &[&str]) {
    assert_eq!(error.kind(), LockErrorKind::Unavailable, "{error}");
    let text = error.to_string();
    assert!(
        text.starts_with(&format!("lock {key}: the store is unavailable: waited ")),
        "{text}"
    );
    assert!(text.contains(attempts), "{text}");
    let last = error.source().expect("the last cause").to_string();
    assert!(causes.iter().any(|cause| last.contains(cause)), "{last}");
    // Rounded: 1.2s, 345.6ms.
    let waited = text
        .split("waited ")
        .nth(1)
        .and_then(|rest| rest.split([',', ' ']).next())
        .unwrap();
    let tenths = waited
        .split_once('.')
        .map(|(_, rest)| rest.trim_end_matches(char::is_alphabetic));
    assert!(tenths.is_some_and(|tenths| tenths.len() == 1), "{text}");
}

const REFUSED: &str = "no connection: Connection refused";
/// Error after the full time-out of a call.
const SILENT: &str = "no answer within 500.0ms";

#[tokio::test]
async fn acquire_in_an_outage_reports_wait_attempts_and_last_cause() {
    in_time(async {
        let server = RedisServer::start().await;
        let locks = LockClient::connect(&server.url()).await.unwrap();
        server.kill();
        // The first request finds the connection broken; later ones are refused.
        locks.exclusive("a").no_wait().acquire().await.unwrap_err();
        let causes = [REFUSED, SILENT];
        // These waits cut off the last attempt at different points.
        for wait in (700..1300).step_by(90).map(Duration::from_millis) {
            let error = locks.exclusive("a").wait(wait).acquire().await.unwrap_err();
            assert_tells_of_an_outage(&error, "a", " attempt", &causes);
            let error = locks
                .all(["b", "c"])
                .wait(wait)
                .acquire()
                .await
                .unwrap_err();
            assert_tells_of_an_outage(&error, "b", " attempt", &causes);
        }
        let wait = Duration::from_secs(2);
        let first = tokio::spawn(begun(locks.exclusive("a").wait(wait).acquire()).await);
        let behind = tokio::spawn(begun(locks.exclusive("a").wait(wait * 3 / 4).acquire()).await);
        let error = behind.await.unwrap().unwrap_err();
        assert_tells_of_an_outage(
            &error,
            "a",
            " behind other requests of this process",
            &causes,
        );
        assert_tells_of_an_outage(&first.await.unwrap().unwrap_err(), "a", " attempt", &causes);
        let error = locks.exclusive("d").no_wait().acquire().await.unwrap_err();
        assert_tells_of_an_outage(&error, "d", " attempt", &causes);
        let error = locks.all(["d", "e"]).try_acquire().await.unwrap_err();
        assert_tells_of_an_outage(&error, "d", " attempt", &causes);
    })
    .await;
}

#[tokio::test]
async fn the_error_of_a_silent_server_has_its_time_out() {
    in_time(async {
        let server = RedisServer::start().await;
        let locks = LockClient::connect(&server.url()).await.unwrap();
        server.stop();
        // The end of the wait cuts off the second attempt.
        let error = locks
            .exclusive("a")
            .wait(Duration::from_millis(700))
            .acquire()
            .await
            .unwrap_err();
        assert_tells_of_an_outage(&error, "a", " attempt", &[SILENT]);
        server.resume();
    })
    .await;
}
