//! Connections to a server, and the keys left there: one connection, and no key that stays for
//! ever.

use lock_runtime::LockClient;
use lock_tests::RedisServer;
use redis::Client;

use super::{Duration, HOUR, permits};

#[tokio::test]
async fn connect_uses_the_user_and_the_database_of_the_url() {
    let server = RedisServer::builder()
        .user("ann", "hunter2", "~* &* +@all")
        .start()
        .await;
    server.command(&["ACL", "SETUSER", "default", "off"]).await;
    let url = format!("{}/2?protocol=resp2", server.url_as("ann", "hunter2"));
    let builder = LockClient::builder().namespace("mine");
    let locks = builder.connect(&url).await.unwrap();
    let guard = locks.exclusive("k").acquire().await.unwrap();
    let client = Client::open(url).unwrap();
    let mut own = client.get_multiplexed_async_connection().await.unwrap();
    let exists: i64 = redis::cmd("EXISTS")
        .arg("mine:k")
        .query_async(&mut own)
        .await
        .unwrap();
    assert_eq!(exists, 1, "the same user and database");
    guard.release().await.unwrap();
}

#[cfg(unix)]
#[tokio::test]
async fn a_unix_socket_will_do() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("redis.sock");
    let socket = socket.to_str().unwrap();
    let server = RedisServer::builder()
        .arg("--unixsocket", socket)
        .start()
        .await;
    let locks = LockClient::connect(&format!("unix://{socket}"))
        .await
        .unwrap();
    let guard = locks.exclusive("k").acquire().await.unwrap();
    assert_eq!(server.query::<i64>(&["EXISTS", "lock:k"]).await, 1);
    guard.release().await.unwrap();
}

// Failure 11 seen in other libraries.
#[tokio::test]
async fn acquire_uses_one_connection_and_one_subscription() {
    let server = RedisServer::start().await;
    let locks = LockClient::connect(&server.url()).await.unwrap();
    let mut guards = Vec::new();
    for number in 0..100 {
        guards.push(
            locks
                .exclusive(format!("k{number}"))
                .lease(HOUR)
                .acquire()
                .await
                .unwrap(),
        );
        guards.push(
            locks
                .shared(format!("r{number}"))
                .lease(HOUR)
                .acquire()
                .await
                .unwrap(),
        );
    }
    let waiting: Vec<_> = (0..50)
        .map(|number| tokio::spawn(locks.exclusive(format!("k{number}")).wait(HOUR).acquire()))
        .collect();
    locks.inspect("k0").await.unwrap();
    let ours = server.clients().await;
    assert_eq!(ours.len(), 1, "{ours:?}");
    // The channel of the client, and that of the namespace for revocations.
    assert!(ours[0].contains(" sub=2 psub=0 ssub=0 "), "{ours:?}");
    drop(guards);
    for guard in waiting {
        guard.await.unwrap().unwrap().release().await.unwrap();
    }
    locks.shutdown().await;
    assert_eq!(server.keys("lock:*").await, [""; 0]);
}

// Failure 15 seen in other libraries.
#[tokio::test]
async fn nothing_that_a_lock_leaves_behind_stays_for_ever() {
    let server = RedisServer::start().await;
    let locks = LockClient::connect(&server.url()).await.unwrap();
    for number in 0..50 {
        let name = format!("k{number}");
        locks
            .exclusive(name.as_str())
            .acquire()
            .await
            .unwrap()
            .release()
            .await
            .unwrap();
        locks
            .shared(name.as_str())
            .acquire()
            .await
            .unwrap()
            .release()
            .await
            .unwrap();
        locks
            .permits(name.as_str(), permits(2))
            .acquire()
            .await
            .unwrap()
            .release()
            .await
            .unwrap();
        drop(
            locks
                .exclusive(name.as_str())
                .min_hold(Duration::from_secs(60))
                .acquire()
                .await
                .unwrap(),
        );
    }
    locks.shutdown().await;
    for key in server.keys("*").await {
        let ttl: i64 = server.query(&["TTL", &key]).await;
        let is_fence_or_name = key.ends_with("}:f") || key.starts_with("f:lock:client:");
        let longest = if is_fence_or_name { 86_400 } else { 60 };
        // The name of a client that was shut down ends in a moment.
        let is_gone = ttl == -2 && key.starts_with("f:lock:client:");
        assert!(is_gone || (0..=longest).contains(&ttl), "{key}: {ttl}");
    }
}
