//! The format of a namespace: clients of different formats never share one, and clients of
//! different versions with the same format do.

mod done;
mod old_client;
mod permits;
mod retained;
mod together;

use lock_runtime::{
    LockClient, LockError, LockErrorKind, RedisOptions, store::redis::RedisStore, web::GrpcCode,
};
use lock_tests::{
    Captured, RedisCluster, RedisServer, SentinelSet,
    access::{allow, rules},
    chain,
    place::{LONG, cluster_url, eventually, in_time},
    shared_cluster, shared_sentinels, unique,
};

use super::{Duration, HOUR, assert_says, within};

const KEY: &str = "f:lock:format";

fn key_of(namespace: &str) -> String {
    format!("f:{namespace}:format")
}

/// A client in this namespace, or the error, in the time that a connect may take.
async fn connect(url: &str, namespace: &str) -> Result<LockClient, LockError> {
    let builder = LockClient::builder().namespace(namespace);
    within(Duration::ZERO, builder.connect(url)).await
}

#[track_caller]
fn assert_refused(connected: Result<LockClient, LockError>, namespace: &str) {
    let words = [
        &format!("namespace {namespace:?} has format 2"),
        "format 1: choose another",
    ];
    assert_says(
        &connected.unwrap_err(),
        LockErrorKind::IncompatibleFormat,
        &words,
    );
}

async fn use_lock(locks: &LockClient, key: &str) -> Result<(), LockError> {
    let request = locks
        .exclusive(key)
        .lease(Duration::from_secs(2))
        .wait(LONG);
    request.acquire().await?.release().await
}

/// Closes all connections but its own.
async fn disconnect_all(server: &RedisServer) {
    for kind in ["normal", "pubsub"] {
        server.command(&["CLIENT", "KILL", "TYPE", kind]).await;
    }
}

#[tokio::test]
async fn connect_refuses_a_namespace_of_another_format() {
    let server = RedisServer::start().await;
    let newer = [
        "\"lock\" has format 2 (key f:lock:format)",
        "format 1",
        "upgrade or stop",
    ];
    let foreign = ["the key f:lock:format", "\"lock\"", "other data"];
    for (command, words) in [
        (["SET", KEY, "2"], newer),
        (["SET", KEY, "two"], foreign),
        (["SET", KEY, ""], foreign),
        (["RPUSH", KEY, "1"], foreign),
    ] {
        server.command(&["DEL", KEY]).await;
        server.command(&command).await;
        let error = connect(&server.url(), "lock").await.unwrap_err();
        assert_says(&error, LockErrorKind::IncompatibleFormat, &words);
        assert_says(&error, error.kind(), &["choose another namespace"]);
        assert_eq!(error.code(), "incompatible_format");
        assert!(!error.store_error().unwrap().is_transient());
        let class = error.class();
        assert_eq!(
            (class.http_status(), class.grpc_code()),
            (500, GrpcCode::Internal)
        );
        use_lock(&connect(&server.url(), "other").await.unwrap(), "k")
            .await
            .unwrap();
    }
    server.command(&["SET", KEY, "1"]).await;
    use_lock(&connect(&server.url(), "lock").await.unwrap(), "k")
        .await
        .unwrap();
}

#[tokio::test]
async fn connect_writes_no_format() {
    let server = RedisServer::start().await;
    let builder = LockClient::builder().without_identity();
    let locks = builder.connect(&server.url()).await.unwrap();
    assert_eq!(server.keys("*").await, [""; 0]);
    use_lock(&locks, "k").await.unwrap();
    assert_eq!(server.keys("*").await, ["{lock:k}:f"]);
}

#[tokio::test]
async fn reconnect_refuses_a_namespace_of_another_format() {
    in_time(async {
        let server = RedisServer::start().await;
        let locks = connect(&server.url(), "lock").await.unwrap();
        server.command(&["SET", KEY, "2"]).await;
        use_lock(&locks, "k")
            .await
            .expect("this connection was made before");
        let guard = locks.exclusive("held").acquire().await.unwrap();
        disconnect_all(&server).await;
        // It does not wait for a change that only an operator makes.
        let request = locks.exclusive("k").wait(HOUR).acquire();
        assert_refused(
            within(Duration::ZERO, request).await.map(|_| locks.clone()),
            "lock",
        );
        let error = guard.verify().await.unwrap_err();
        assert_eq!(error.kind(), LockErrorKind::IncompatibleFormat, "{error}");
        server.command(&["DEL", KEY]).await;
        guard.release().await.unwrap();
        use_lock(&locks, "k").await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn connect_skips_a_format_that_the_access_rules_hide() {
    let server = RedisServer::builder()
        .user("ann", "hunter2", "")
        .start()
        .await;
    server.command(&["SET", KEY, "2"]).await;
    let url = server.url_as("ann", "hunter2");
    let line = RedisStore::acl_line("lock");
    for missing in ["~f:lock:*", "+get"] {
        let mut rules = rules(&line);
        rules.retain(|rule| *rule != missing);
        rules.splice(0..0, ["reset", "on", ">hunter2"]);
        allow(&server, "ann", &rules).await;
        let traces = Captured::new();
        let _guard = traces.set_default();
        let locks = connect(&url, "lock").await.unwrap();
        let events = traces.events();
        let skipped = events
            .iter()
            .find(|event| event.message.contains("format"))
            .unwrap();
        assert_eq!(skipped.level, tracing::Level::DEBUG);
        match (missing, use_lock(&locks, "k").await) {
            ("+get", used) => assert_says(&used.unwrap_err(), LockErrorKind::Forbidden, &[&line]),
            (_, used) => used.unwrap(),
        }
    }
}

#[tokio::test]
async fn connect_by_sentinels_checks_the_format_of_the_primary() {
    in_time(async {
        let set = shared_sentinels().await;
        let hosts = set
            .sentinels()
            .each_ref()
            .map(|sentinel| sentinel.addr().to_string());
        let url = format!(
            "redis+sentinel://{}/{}",
            hosts.join(","),
            SentinelSet::SERVICE
        );
        let [namespace, other] = [unique("ns"), unique("ns")];
        set.master()
            .await
            .command(&["SET", &key_of(&namespace), "2"])
            .await;
        assert_refused(connect(&url, &namespace).await, &namespace);
        use_lock(&connect(&url, &other).await.unwrap(), "k")
            .await
            .unwrap();
    })
    .await;
}

#[tokio::test]
async fn connect_to_a_cluster_checks_the_format_where_it_is_kept() {
    in_time(async {
        let cluster = shared_cluster().await;
        let [namespace, other] = [unique("ns"), unique("ns")];
        let key = key_of(&namespace);
        cluster
            .owner_of(&key)
            .await
            .command(&["SET", &key, "2"])
            .await;
        // Each seed alone, replicas as well: only one of them keeps the key.
        for node in cluster.nodes() {
            let url = format!("redis+cluster://{}", node.addr());
            assert_refused(connect(&url, &namespace).await, &namespace);
        }
        use_lock(&connect(&cluster_url(cluster), &other).await.unwrap(), "k")
            .await
            .unwrap();
        assert_eq!(
            cluster
                .owner_of(&key_of(&other))
                .await
                .keys(&key_of(&other))
                .await,
            [""; 0]
        );
    })
    .await;
}

#[tokio::test]
async fn reconnect_in_a_cluster_checks_the_format_at_its_node() {
    in_time(async {
        let cluster = RedisCluster::start().await;
        let owner = cluster.owner_of(KEY).await;
        let locks = connect(&cluster_url(&cluster), "lock").await.unwrap();
        let mut keys = [None, None];
        for number in 0.. {
            let key = format!("k{number}");
            let here = cluster.owner_of(&format!("lock:{key}")).await.port() == owner.port();
            keys[usize::from(here)].get_or_insert(key);
            if keys.iter().all(Option::is_some) {
                break;
            }
        }
        let [elsewhere, here] = keys.map(Option::unwrap);
        for key in [&elsewhere, &here] {
            use_lock(&locks, key).await.unwrap();
        }
        owner.command(&["SET", KEY, "2"]).await;
        for node in cluster.nodes() {
            disconnect_all(node).await;
        }
        let error = use_lock(&locks, &here).await.unwrap_err();
        assert_eq!(error.kind(), LockErrorKind::IncompatibleFormat, "{error}");
        use_lock(&locks, &elsewhere).await.unwrap();
        owner.command(&["DEL", KEY]).await;
        use_lock(&locks, &here).await.unwrap();

        // A slot on its way to another node refuses nothing.
        let masters = cluster.masters().await;
        let to = masters
            .iter()
            .find(|master| master.port() != owner.port())
            .unwrap();
        let migration = cluster.begin_migration(KEY, to).await;
        use_lock(
            &connect(&cluster_url(&cluster), "lock").await.unwrap(),
            &elsewhere,
        )
        .await
        .unwrap();
        migration.finish().await;
    })
    .await;
}

#[tokio::test]
async fn connect_to_redlock_checks_the_format_of_each_server() {
    in_time(async {
        let servers = RedisServer::builder().start_all(3).await;
        let urls: Vec<_> = servers.iter().map(RedisServer::url).collect();
        let url = format!("redlock:{}", urls.join(","));
        let builder = || {
            LockClient::builder().redis(RedisOptions::new().longest_lease(Duration::from_secs(2)))
        };
        let locks = builder().connect(&url).await.unwrap();
        use_lock(&locks, "k").await.unwrap();

        servers[2].command(&["SET", KEY, "2"]).await;
        let error = builder().connect(&url).await.unwrap_err();
        let words = [&*servers[2].addr().to_string(), "has format 2"];
        assert_says(&error, LockErrorKind::IncompatibleFormat, &words);
        // To a client that is connected it is a server that does not vote.
        disconnect_all(&servers[2]).await;
        use_lock(&locks, "k").await.unwrap();
        servers[1].command(&["SET", KEY, "2"]).await;
        disconnect_all(&servers[1]).await;
        eventually("two servers are refused", async || {
            let error = locks.exclusive("k").no_wait().acquire().await.unwrap_err();
            chain(&error).matches("has format 2").count() == 2
        })
        .await;
        for server in &servers[1..] {
            server.command(&["DEL", KEY]).await;
        }
        use_lock(&locks, "k").await.unwrap();
    })
    .await;
}
