//! Connections to several servers: requirements, refusals, and servers that do not vote yet.

use std::time::Duration;

use futures_util::future::join_all;
use lock_runtime::{
    LockClient, LockClientBuilder, LockErrorKind, RedisOptions, store::redis::RedisStore,
};
use lock_tests::{
    Proxy, RedisServer,
    access::rules,
    chain,
    place::{LONG, eventually, in_time, redlock_url},
    proxy::Direction,
    unique,
};
use tokio::time::{Instant, sleep};

use super::{LONGEST_LEASE, QUARANTINE, Servers};

fn url(servers: &[RedisServer]) -> String {
    let urls: Vec<_> = servers.iter().map(RedisServer::url).collect();
    format!("redlock:{}", urls.join(","))
}

#[tokio::test]
async fn a_new_server_votes_when_no_lock_can_be_forgotten_any_more() {
    let servers = RedisServer::builder().start_all(3).await;
    let builder = || {
        LockClient::builder()
            .namespace(unique("ns"))
            .redis(RedisOptions::new().longest_lease(LONGEST_LEASE))
    };
    let locks = builder().connect(&url(&servers)).await.unwrap();
    let since = Instant::now();
    let error = locks
        .exclusive("a")
        .lease(LONGEST_LEASE)
        .no_wait()
        .acquire()
        .await
        .unwrap_err();
    assert_eq!(error.kind(), LockErrorKind::Unavailable);
    assert!(
        chain(&error).contains("may have forgotten a lock: it votes in"),
        "{error}"
    );
    // A request that waits is granted the lock then.
    let guard = locks
        .exclusive("a")
        .lease(LONGEST_LEASE)
        .wait(LONG)
        .acquire()
        .await
        .unwrap();
    assert!(
        since.elapsed() >= LONGEST_LEASE / 2 && since.elapsed() < QUARANTINE * 2,
        "{:?}",
        since.elapsed()
    );
    guard.release().await.unwrap();
    // In a namespace that is new to it, a server cannot rule out that its data were deleted.
    let locks = builder().connect(&url(&servers)).await.unwrap();
    let error = locks
        .exclusive("a")
        .lease(LONGEST_LEASE)
        .no_wait()
        .acquire()
        .await
        .unwrap_err();
    assert_eq!(error.kind(), LockErrorKind::Unavailable);
}

/// The server reads the age of its data after the handshake was sent, here 400 ms later.
#[tokio::test]
async fn a_slow_handshake_does_not_shorten_the_time_without_a_vote() {
    let longest_lease = Duration::from_secs(3);
    let servers = RedisServer::builder().start_all(3).await;
    // From now on the servers keep away only because the namespace is new to them.
    sleep(longest_lease + Duration::from_secs(2)).await;
    let builder = LockClient::builder()
        .namespace(unique("ns"))
        .redis(RedisOptions::new().longest_lease(longest_lease));
    let proxies = join_all(servers.iter().map(Proxy::to)).await;
    let since = Instant::now();
    let _first = builder.clone().connect(&url(&servers)).await.unwrap();
    for proxy in &proxies {
        proxy.delay(Direction::ToServer, Duration::from_millis(400));
    }
    let urls: Vec<_> = proxies.iter().map(Proxy::url).collect();
    let locks = builder.connect(&redlock_url(&urls)).await.unwrap();
    for proxy in &proxies {
        proxy.delay(Direction::ToServer, Duration::ZERO);
    }
    assert!(since.elapsed() < longest_lease, "{:?}", since.elapsed());
    let granted = locks.exclusive("a").lease(longest_lease).wait(LONG);
    let guard = granted.acquire().await.unwrap();
    assert!(since.elapsed() >= longest_lease, "{:?}", since.elapsed());
    guard.release().await.unwrap();
}

#[tokio::test]
async fn two_that_do_not_answer_are_found_later() {
    let servers = Servers::start().await;
    let [a, b, ..] = servers.all();
    a.kill();
    b.stop();
    let since = Instant::now();
    let locks = servers.client().await;
    assert!(
        since.elapsed() < Duration::from_secs(1),
        "{:?}",
        since.elapsed()
    );
    locks
        .exclusive("a")
        .lease(LONGEST_LEASE)
        .acquire()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
    a.restart_empty().await;
    b.resume();
    sleep(QUARANTINE).await;
    let [.., d, e] = servers.all();
    d.kill();
    e.kill();
    locks
        .exclusive("a")
        .lease(LONGEST_LEASE)
        .wait(LONG)
        .acquire()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
}

#[tokio::test]
async fn the_error_of_too_few_answers_names_each_server() {
    let servers = RedisServer::builder().start_all(3).await;
    let url = url(&servers);
    servers[0].kill();
    servers[1].stop();
    let error = LockClient::connect(&url).await.unwrap_err();
    assert_eq!(error.kind(), LockErrorKind::Unavailable);
    let text = chain(&error);
    assert!(text.contains("2 of 3 servers are needed"), "{text}");
    assert!(
        text.contains("Connection refused") && text.contains("timed out"),
        "{text}"
    );
    assert!(
        text.contains(&format!("{}: answers", servers[2].addr())),
        "{text}"
    );
}

#[tokio::test]
async fn a_server_that_cannot_keep_locks_is_named() {
    let servers = RedisServer::builder().start_all(2).await;
    let secret = RedisServer::builder().password("secret").start().await;
    let list = |third: String| format!("redlock:{},{},{third}", servers[0].url(), servers[1].url());
    let wrong = list(secret.url().replace("secret", "wrong"));
    let error = LockClient::connect(&wrong).await.unwrap_err();
    assert_eq!(error.kind(), LockErrorKind::Unauthenticated);
    assert!(
        chain(&error).contains(&secret.addr().to_string()),
        "{error}"
    );

    let other = RedisServer::start().await;
    let error = LockClient::connect(&list(format!("{}/1000", other.url())))
        .await
        .unwrap_err();
    assert_eq!(error.kind(), LockErrorKind::InvalidUrl, "{error}");
    assert!(chain(&error).contains(&other.addr().to_string()), "{error}");

    let replica = RedisServer::builder().replica_of(&servers[0]).start().await;
    let error = LockClient::connect(&list(replica.url())).await.unwrap_err();
    assert_eq!(error.kind(), LockErrorKind::ReadOnly);
    assert!(
        chain(&error).contains(&replica.addr().to_string()),
        "{error}"
    );
}

#[tokio::test]
async fn one_server_has_one_vote() {
    let servers = RedisServer::builder().start_all(2).await;
    let again = servers[0].url().replace("127.0.0.1", "localhost");
    for third in [servers[0].url(), again] {
        let urls = format!("redlock:{},{},{third}", servers[0].url(), servers[1].url());
        // Once a majority is connected, the others have 300 ms to report an error. On a busy
        // machine that may be too short, and the client leaves its settings in the namespace.
        let error = in_time(async {
            loop {
                let builder = LockClient::builder().namespace(unique("ns"));
                if let Err(error) = builder.connect(&urls).await {
                    break error;
                }
            }
        });
        let error = error.await;
        assert_eq!(error.kind(), LockErrorKind::InvalidUrl, "{error}");
        assert!(
            chain(&error).contains("the same server, which would have two votes"),
            "{error}"
        );
    }
}

#[tokio::test]
async fn an_even_number_of_servers_is_refused_with_the_reason() {
    for urls in [&["redis://a", "redis://b"][..], &["redis://a"; 4]] {
        let error = LockClient::builder()
            .connect(&redlock_url(urls))
            .await
            .unwrap_err();
        assert_eq!(error.kind(), LockErrorKind::InvalidUrl);
        assert!(
            chain(&error).contains("three or five") || chain(&error).contains("odd number"),
            "{error}"
        );
    }
    let error = LockClient::builder()
        .redis(RedisOptions::new().longest_lease(Duration::ZERO))
        .connect(&redlock_url(["redis://a"; 3]))
        .await
        .unwrap_err();
    assert_eq!(error.kind(), LockErrorKind::InvalidSpec);
}

#[tokio::test]
async fn the_line_of_the_readme_suffices() {
    let namespace = unique("ns");
    let line = RedisStore::acl_line(&namespace)
        .replace("<user>", "app")
        .replace("<password>", "secret");
    let rules = line.strip_prefix("ACL SETUSER app on >secret ").unwrap();
    let servers = RedisServer::builder()
        .user("app", "secret", rules)
        .start_all(3)
        .await;
    let urls: Vec<_> = servers
        .iter()
        .map(|server| server.url_as("app", "secret"))
        .collect();
    let builder = || {
        LockClient::builder()
            .namespace(&namespace)
            .redis(RedisOptions::new().longest_lease(LONGEST_LEASE))
    };
    let (locks, others) = (
        builder().connect(&redlock_url(&urls)).await.unwrap(),
        builder().connect(&redlock_url(&urls)).await.unwrap(),
    );
    let guard = locks
        .exclusive("a")
        .lease(LONGEST_LEASE)
        .wait(LONG)
        .acquire()
        .await
        .unwrap();
    let waiting = tokio::spawn(others.shared("a").lease(LONGEST_LEASE).wait(LONG).acquire());
    sleep(LONGEST_LEASE).await;
    guard.downgrade().await.unwrap().release().await.unwrap();
    waiting.await.unwrap().unwrap().release().await.unwrap();
    for server in &servers {
        let denied: Vec<redis::Value> = server.query(&["ACL", "LOG"]).await;
        assert!(denied.is_empty(), "{denied:?}");
    }
}

/// Five servers with TLS, of one authority, with a user of the documented line.
async fn five_with_tls(namespace: &str) -> Vec<RedisServer> {
    // It fails only if another test has installed it before.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let line = RedisStore::acl_line(namespace);
    RedisServer::builder()
        .tls()
        .user("ann", "hunter2", &rules(&line).join(" "))
        .start_all(5)
        .await
}

fn trusting(namespace: &str, authority: &str) -> LockClientBuilder {
    LockClient::builder().namespace(namespace).redis(
        RedisOptions::new()
            .longest_lease(LONGEST_LEASE)
            .root_certificate(authority),
    )
}

#[tokio::test]
async fn connect_reaches_a_majority_over_tls_with_the_documented_acl() {
    let namespace = unique("ns");
    let servers = five_with_tls(&namespace).await;
    let urls: Vec<_> = servers
        .iter()
        .map(|server| server.tls_url_as("ann", "hunter2"))
        .collect();
    let builder = trusting(&namespace, servers[0].ca_pem());
    let url = redlock_url(&urls);
    let locks = builder.clone().connect(&url).await.unwrap();
    let others = builder.connect(&url).await.unwrap();
    let guard = locks
        .exclusive("a")
        .lease(LONGEST_LEASE)
        .wait(LONG)
        .acquire()
        .await
        .unwrap();
    // Notifications and votes go over TLS, and so does a connection that replaces a lost one.
    let waiting = tokio::spawn(
        others
            .exclusive("a")
            .lease(LONGEST_LEASE)
            .wait(LONG)
            .acquire(),
    );
    for server in &servers {
        server.command(&["CLIENT", "KILL", "USER", "ann"]).await;
    }
    eventually("it stands in line", async || {
        locks
            .inspect("a")
            .await
            .is_ok_and(|found| found.holders.len() == 1 && found.waiters.len() == 1)
    })
    .await;
    guard.verify().await.unwrap();
    guard.release().await.unwrap();
    waiting.await.unwrap().unwrap().release().await.unwrap();
    for server in &servers {
        let clients: String = server.query(&["CLIENT", "LIST"]).await;
        let ours: Vec<_> = clients
            .lines()
            .filter(|line| line.contains(" user=ann "))
            .collect();
        let port = format!(" laddr=127.0.0.1:{} ", server.tls_port());
        assert!(
            !ours.is_empty() && ours.iter().all(|line| line.contains(&port)),
            "{clients}"
        );
        let denied: Vec<redis::Value> = server.query(&["ACL", "LOG"]).await;
        assert!(
            denied.is_empty(),
            "nothing was denied behind our back: {denied:?}"
        );
    }
}

/// A server that is not trusted has no vote: any process may answer in its place.
#[tokio::test]
async fn a_server_that_is_not_trusted_does_not_vote() {
    let namespace = unique("ns");
    let (servers, strangers) = tokio::join!(five_with_tls(&namespace), five_with_tls(&namespace));
    let urls = |trusted: usize| -> Vec<_> {
        let servers = servers[..trusted].iter().chain(&strangers[trusted..]);
        servers
            .map(|server| server.tls_url_as("ann", "hunter2"))
            .collect()
    };
    let builder = || trusting(&namespace, servers[0].ca_pem());
    let locks = builder().connect(&redlock_url(urls(3))).await.unwrap();
    locks
        .exclusive("a")
        .lease(LONGEST_LEASE)
        .wait(LONG)
        .acquire()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
    let error = builder().connect(&redlock_url(urls(2))).await.unwrap_err();
    assert_eq!(error.kind(), LockErrorKind::Unavailable, "{error}");
    let text = chain(&error);
    assert!(
        text.contains("3 of 5 servers are needed") && text.contains("certificate"),
        "{text}"
    );
    for stranger in &strangers[2..] {
        assert!(
            text.contains(&format!("127.0.0.1:{}", stranger.tls_port())),
            "{text}"
        );
    }
    assert!(!text.contains("hunter2"), "{text}");
}

/// Each refused request makes the client connect again, also while it is connecting. An attempt
/// that ends late must not count as an outage of the connection that has replaced it.
#[test]
fn attempts_to_connect_that_overtake_each_other_are_no_outage() {
    let (over, is_over) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        runtime.unwrap().block_on(async {
            let servers = RedisServer::builder().start_all(3).await;
            let proxies = join_all(servers.iter().map(Proxy::to)).await;
            let urls: Vec<_> = proxies.iter().map(Proxy::url).collect();
            let lease = Duration::from_secs(1);
            let options = RedisOptions::new().longest_lease(lease);
            let builder = LockClient::builder()
                .redis(options)
                .unavailable_after(lease);
            let locks = builder.connect(&redlock_url(&urls)).await.unwrap();
            let request = |key: String| locks.exclusive(key).lease(lease);
            let acquire = async || request("first".into()).wait(10 * lease).acquire().await;
            acquire().await.unwrap().release().await.unwrap();
            for round in 0..3 {
                for (server, proxy) in servers.iter().zip(&proxies) {
                    proxy.delay(Direction::ToClient, Duration::from_millis(5));
                    server.command(&["FLUSHALL"]).await;
                }
                let refused = (0..100).map(async |number: u32| {
                    sleep(number * Duration::from_millis(1)).await;
                    request(format!("{round}:{number}"))
                        .no_wait()
                        .acquire()
                        .await
                });
                let refused = join_all(refused).await.into_iter().filter(Result::is_err);
                assert!(refused.count() > 0, "{round}");
                // Until the servers vote again, which they do at once if nothing is in the way.
                acquire().await.unwrap().release().await.unwrap();
            }
        });
        over.send(()).unwrap();
    });
    is_over
        .recv_timeout(2 * LONG)
        .expect("a task occupies the runtime");
}

/// Two versions of a program with other settings would rely on different quarantines, or ask other
/// coordinators first.
#[tokio::test]
async fn clients_with_other_settings_are_refused_at_the_start() {
    let servers = RedisServer::builder().start_all(3).await;
    let namespace = unique("ns");
    let connect = async |order: [usize; 3], longest_lease| {
        let urls = order.map(|index| servers[index].url());
        LockClient::builder()
            .namespace(&namespace)
            .redis(RedisOptions::new().longest_lease(longest_lease))
            .connect(&format!("redlock:{}", urls.join(",")))
            .await
    };
    let in_order = [0, 1, 2];
    let locks = connect(in_order, LONGEST_LEASE).await.unwrap();
    let request = |locks: &LockClient| {
        let request = locks.exclusive("a").lease(LONGEST_LEASE / 2);
        request.wait(LONG).acquire()
    };
    // Also while the servers do not vote yet, as the first client would not learn of it.
    let error = connect(in_order, LONGEST_LEASE * 2).await.unwrap_err();
    assert_eq!(error.kind(), LockErrorKind::InvalidSpec, "{error}");
    let guard = request(&locks).await.unwrap();

    // Both longer and shorter: one of the two would be too short for the other's leases.
    let key = format!("f:{namespace}:settings");
    for (order, longest_lease) in [
        (in_order, LONGEST_LEASE * 2),
        (in_order, LONGEST_LEASE / 2),
        ([2, 1, 0], LONGEST_LEASE),
    ] {
        let error = connect(order, longest_lease).await.unwrap_err();
        assert_eq!(error.kind(), LockErrorKind::InvalidSpec, "{error}");
        let text = chain(&error);
        for words in [
            &*key,
            " of 3, and this client ",
            "stop all clients, delete the key",
        ] {
            assert!(text.contains(words), "{text}");
        }
    }
    guard.verify().await.unwrap();
    let again = connect(in_order, LONGEST_LEASE).await.unwrap();
    guard.release().await.unwrap();
    request(&again).await.unwrap().release().await.unwrap();

    // The remedy.
    drop((locks, again));
    for server in &servers {
        server.command(&["DEL", &key]).await;
    }
    let reversed = connect([2, 1, 0], LONGEST_LEASE * 2).await.unwrap();
    request(&reversed).await.unwrap().release().await.unwrap();
}
