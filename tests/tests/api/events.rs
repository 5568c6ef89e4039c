//! Log events of a lock: they have its key and its fencing token, and never the holder's token.

use std::time::Duration;

use lock_runtime::{LockClient, LockErrorKind};
use lock_tests::{
    Captured, RedisServer,
    place::{LONG, begun, in_time},
    traces::Event,
};

fn about(event: &Event, message: &str, key: &str) -> bool {
    event.message == message && event.field("key") == Some(key)
}

#[tokio::test]
async fn acquire_to_release_emit_events_with_the_key_and_no_token() {
    in_time(async {
        let traces = Captured::new();
        let _collecting = traces.set_default();
        let server = RedisServer::start().await;
        let (locks, others) = (client(&server).await, client(&server).await);
        let mut secrets = Vec::new();
        let mut printed = Vec::new();

        // A wait in this process and at the store, a grant, a renewal and a release.
        let first = others
            .exclusive("a")
            .lease(Duration::from_secs(2))
            .acquire()
            .await
            .unwrap();
        secrets.push(server.query::<String>(&["GET", "lock:a"]).await);
        let head = tokio::spawn(begun(locks.exclusive("a").wait(LONG).acquire()).await);
        let behind = tokio::spawn(begun(locks.exclusive("a").wait(LONG).acquire()).await);
        traces
            .wait_for(|event| about(event, "waiting for its holder", "a"))
            .await;
        traces
            .wait_for(|event| about(event, "waiting behind others in this process", "a"))
            .await;
        traces.wait_for(|event| about(event, "renewed", "a")).await;
        let fence = first.fence().to_string();
        printed.push(format!("{first:?} {:?} {:?}", first.held(), first.lost()));
        first.release().await.unwrap();
        traces.wait_for(|event| about(event, "released", "a")).await;
        let granted = traces.wait_for(|event| about(event, "acquired", "a")).await;
        assert_eq!(granted.field("fence"), Some(fence.as_str()));
        assert!(granted.field("waited").is_some());
        let guard = head.await.unwrap().unwrap();
        secrets.push(server.query::<String>(&["GET", "lock:a"]).await);
        guard.release().await.unwrap();
        drop(behind.await.unwrap().unwrap());

        // A wait that times out.
        let reader = locks.shared("b").acquire().await.unwrap();
        secrets.extend(
            server
                .query::<Vec<String>>(&["ZRANGE", "lock:b", "0", "-1"])
                .await,
        );
        let error = others
            .exclusive("b")
            .wait(Duration::from_millis(50))
            .acquire()
            .await
            .unwrap_err();
        traces
            .wait_for(|event| about(event, "wait timed out", "b"))
            .await;
        printed.push(format!("{error} {error:?} {reader:?}"));

        // A loss.
        let lost = locks
            .exclusive("c")
            .lease(Duration::from_secs(2))
            .acquire()
            .await
            .unwrap();
        secrets.push(server.query::<String>(&["GET", "lock:c"]).await);
        server.command(&["DEL", "lock:c"]).await;
        let error = lost.lost().await;
        let event = traces.wait_for(|event| about(event, "lost", "c")).await;
        assert_eq!(
            event.field("fence"),
            Some(lost.fence().to_string().as_str())
        );
        assert_eq!(event.field("loss"), Some("Taken"));
        assert!(event.level == tracing::Level::WARN);
        printed.push(format!(
            "{error} {error:?} {lost:?} {:?} {:?}",
            locks,
            locks.exclusive("a")
        ));

        // A renewal and a release while the server is down.
        let held = locks
            .exclusive("d")
            .lease(Duration::from_secs(2))
            .acquire()
            .await
            .unwrap();
        secrets.push(server.query::<String>(&["GET", "lock:d"]).await);
        server.stop();
        traces
            .wait_for(|event| event.message.starts_with("renewal failed"))
            .await;
        let error = held.release().await.unwrap_err();
        assert!(
            matches!(
                error.kind(),
                LockErrorKind::ReleaseUnknown | LockErrorKind::Lost(_)
            ),
            "{error}"
        );
        printed.push(format!("{error} {error:?}"));
        server.resume();
        reader.release().await.unwrap();
        others.shutdown().await;
        locks.shutdown().await;

        printed.extend(traces.events().iter().map(|event| format!("{event:?}")));
        assert!(
            secrets.iter().all(|secret| secret.len() == 32),
            "{secrets:?}"
        );
        for text in printed {
            for secret in &secrets {
                assert!(!text.contains(secret.as_str()), "a token is shown: {text}");
            }
        }
    })
    .await;
}

async fn client(server: &RedisServer) -> LockClient {
    LockClient::connect(&server.url()).await.unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_lock_held_for_ten_leases_is_warned_of() {
    let traces = Captured::new();
    let _collecting = traces.set_default();
    let guard = LockClient::in_memory()
        .exclusive("a")
        .lease(Duration::from_secs(1))
        .acquire()
        .await
        .unwrap();
    let warning =
        in_time(traces.wait_for(|event| event.message.starts_with("held for ten leases"))).await;
    assert_eq!(
        (warning.level, warning.field("key")),
        (tracing::Level::WARN, Some("a"))
    );
    assert!(!guard.is_lost());
    drop(guard);
}
