//! Servers that cannot serve: an address without a server, a server of another kind, a server that
//! requires a password, a replica.

use std::net::SocketAddr;

use futures_util::TryStreamExt as _;
use lock_runtime::{LockClient, LockErrorKind, health::Verdict};
use lock_tests::{
    Captured, RedisServer, chain,
    place::{LONG, begun, eventually, in_time},
    shared_server, unique,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpSocket, TcpStream},
};

use super::{CONNECT, Duration, HOUR, assert_says, within};

fn url_of(address: SocketAddr) -> String {
    format!("redis://user:hunter2@{address}")
}

/// A server that sends `text` after it has received a request, or at once if `unasked`.
async fn saying(text: &'static [u8], unasked: bool) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let answer = move |mut stream: TcpStream| async move {
        if !unasked && stream.read(&mut [0; 1024]).await.is_err() {
            return;
        }
        // The client may have closed the connection already.
        if stream.write_all(text).await.is_ok() {
            let _ = stream.shutdown().await;
            let _ = stream.read_to_end(&mut Vec::new()).await;
        }
    };
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(answer(stream));
        }
    });
    address
}

#[tokio::test]
async fn a_closed_port_is_unavailable() {
    // The socket is bound and does not listen: no other process gets the port, and connections are
    // refused.
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = socket.local_addr().unwrap();
    let error = within(CONNECT, LockClient::connect(&url_of(address)))
        .await
        .unwrap_err();
    assert_says(
        &error,
        LockErrorKind::Unavailable,
        &[&address.to_string(), "refused"],
    );
    assert!(!chain(&error).contains("hunter2"), "{error}");
    // Failure 15 seen in other libraries: a hidden cause.
    assert!(error.store_error().is_some());
}

#[tokio::test]
async fn a_host_that_does_not_exist_is_unavailable() {
    let error = within(
        CONNECT,
        LockClient::connect("redis://user:hunter2@no.such.host.invalid"),
    )
    .await
    .unwrap_err();
    assert_says(
        &error,
        LockErrorKind::Unavailable,
        &["no.such.host.invalid:6379"],
    );
    assert!(!chain(&error).contains("hunter2"), "{error}");
}

#[tokio::test]
async fn a_mute_server_is_unavailable_within_the_time_for_connecting() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let error = within(CONNECT, LockClient::connect(&url_of(address)))
        .await
        .unwrap_err();
    assert_says(
        &error,
        LockErrorKind::Unavailable,
        &[&address.to_string(), "timed out"],
    );
}

#[tokio::test]
async fn a_server_of_another_kind_is_not_redis() {
    for (text, unasked) in [
        (
            &b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"[..],
            false,
        ),
        (
            b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<html></html>",
            false,
        ),
        (b"SSH-2.0-OpenSSH_9.2p1\r\n", true),
        (b"220 mail.example.com ESMTP\r\n", true),
        (b"J\0\0\0\n8.0.36\0\x08\0\0\0", true),
        (b"\x15\x03\x01\0\x02\x02\x32", false),
    ] {
        let address = saying(text, unasked).await;
        let error = within(CONNECT, LockClient::connect(&url_of(address)))
            .await
            .unwrap_err();
        assert_says(
            &error,
            LockErrorKind::WrongServer,
            &[&address.to_string(), "host and port", "rediss://"],
        );
    }
}

#[tokio::test]
async fn a_server_that_hangs_up_is_unavailable() {
    let address = saying(b"", false).await;
    let error = within(CONNECT, LockClient::connect(&url_of(address)))
        .await
        .unwrap_err();
    assert_says(&error, LockErrorKind::Unavailable, &[&address.to_string()]);
}

#[tokio::test]
async fn a_server_that_asks_for_a_password_says_where_to_put_it() {
    let server = RedisServer::builder().password("pass word/#").start().await;
    let right = ["redis://user:password@host:6379"];
    for wrong in [
        format!("redis://{}", server.addr()),
        format!("redis://:hunter2@{}", server.addr()),
        format!("redis://nobody:hunter2@{}", server.addr()),
    ] {
        let error = within(CONNECT, LockClient::connect(&wrong))
            .await
            .unwrap_err();
        assert_says(
            &error,
            LockErrorKind::Unauthenticated,
            &[&server.addr().to_string(), right[0]],
        );
        assert!(!chain(&error).contains("hunter2"), "{error}");
    }
    let locks = LockClient::connect(&server.url())
        .await
        .expect("percent-encoded, it is accepted");
    locks
        .exclusive("k")
        .acquire()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
    assert!(!format!("{locks:?}").contains("pass"), "{locks:?}");
}

#[tokio::test]
async fn who_is_no_longer_let_in_is_told_so() {
    let server = RedisServer::builder()
        .user("ann", "hunter2", "~* &* +@all")
        .start()
        .await;
    let locks = LockClient::connect(&server.url_as("ann", "hunter2"))
        .await
        .unwrap();
    locks
        .exclusive("k")
        .acquire()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
    // Its connections are closed, and new ones are refused.
    server.command(&["ACL", "DELUSER", "ann"]).await;
    let wait = Duration::from_millis(300);
    let kind = async || {
        let error = within(wait, locks.exclusive("k").wait(wait).acquire())
            .await
            .unwrap_err();
        assert!(!chain(&error).contains("hunter2"), "{error}");
        assert_eq!(error.key().unwrap().as_str(), "k");
        error.kind()
    };
    // The call that finds the connection broken may not show the reason.
    let mut kinds = vec![kind().await];
    if kinds == [LockErrorKind::Unavailable] {
        kinds.push(kind().await);
    }
    assert_eq!(
        kinds.last(),
        Some(&LockErrorKind::Unauthenticated),
        "{kinds:?}"
    );
    server
        .command(&[
            "ACL", "SETUSER", "ann", "on", ">hunter2", "~*", "&*", "+@all",
        ])
        .await;
    locks
        .exclusive("k")
        .wait(super::SLACK)
        .acquire()
        .await
        .expect("it recovers")
        .release()
        .await
        .unwrap();
}

#[tokio::test]
async fn a_replica_keeps_no_locks() {
    let primary = RedisServer::start().await;
    let replica = RedisServer::builder().replica_of(&primary).start().await;
    let error = within(CONNECT, LockClient::connect(&replica.url()))
        .await
        .unwrap_err();
    assert_says(
        &error,
        LockErrorKind::ReadOnly,
        &[
            &replica.addr().to_string(),
            "read-only replica",
            "its primary",
        ],
    );
}

#[tokio::test]
async fn acquire_waits_for_a_primary_that_became_a_replica() {
    let server = RedisServer::start().await;
    let locks = LockClient::connect(&server.url()).await.unwrap();
    locks
        .exclusive("k")
        .acquire()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
    server.command(&["REPLICAOF", "127.0.0.1", "1"]).await;
    let wait = Duration::from_millis(200);
    let error = within(wait, locks.exclusive("k").wait(wait).acquire())
        .await
        .unwrap_err();
    assert_says(
        &error,
        LockErrorKind::ReadOnly,
        &["lock k: ", "read-only replica", "its primary"],
    );
    let error = within(Duration::ZERO, locks.all(["k", "l"]).no_wait().acquire())
        .await
        .unwrap_err();
    assert_says(
        &error,
        LockErrorKind::ReadOnly,
        &["lock k: ", "read-only replica", "its primary"],
    );
    let waiting = tokio::spawn(locks.exclusive("k").wait(super::SLACK).acquire());
    server.command(&["REPLICAOF", "NO", "ONE"]).await;
    waiting.await.unwrap().unwrap().release().await.unwrap();
    assert_eq!(server.keys("lock:*").await, [""; 0]);
}

#[tokio::test]
async fn acquire_on_a_silent_server_takes_no_longer_than_the_wait() {
    let server = RedisServer::start().await;
    let locks = LockClient::connect(&server.url()).await.unwrap();
    let guard = locks.exclusive("held").lease(HOUR).acquire().await.unwrap();
    server.stop();
    let wait = Duration::from_millis(200);
    let call = Duration::from_millis(500);
    let unavailable = |error: &lock_runtime::LockError, key| {
        assert_says(
            error,
            LockErrorKind::Unavailable,
            &[key, "no answer within"],
        )
    };
    unavailable(
        &within(wait, locks.exclusive("k").wait(wait).acquire())
            .await
            .unwrap_err(),
        "lock k: ",
    );
    unavailable(
        &within(call, locks.exclusive("k").no_wait().acquire())
            .await
            .unwrap_err(),
        "lock k: ",
    );
    unavailable(
        &within(call, locks.all(["a", "b"]).no_wait().acquire())
            .await
            .unwrap_err(),
        "lock a: ",
    );
    unavailable(
        &within(call, locks.inspect("k").into_future())
            .await
            .unwrap_err(),
        "lock k: ",
    );
    unavailable(
        &within(call, guard.verify()).await.unwrap_err(),
        "lock held: ",
    );
    unavailable(
        &within(call, guard.extend(HOUR)).await.unwrap_err(),
        "lock held: ",
    );
    let error = within(call, guard.release()).await.unwrap_err();
    assert_says(
        &error,
        LockErrorKind::ReleaseUnknown,
        &["lock held: ", "background", "lease"],
    );
    within(CONNECT, locks.shutdown()).await;
    server.resume();
}

#[tokio::test]
async fn a_database_is_a_world_of_its_own() {
    let server = shared_server().await;
    let name = unique("db");
    let url = |db: &str| format!("{}/{db}", server.url());
    let third = LockClient::connect(&url("3")).await.unwrap();
    let guard = third.exclusive(name.as_str()).acquire().await.unwrap();
    assert_eq!(
        server
            .query::<i64>(&["EXISTS", &format!("lock:{name}")])
            .await,
        0
    );
    for db in ["", "0", "4"] {
        let locks = LockClient::connect(&url(db)).await.unwrap();
        locks
            .exclusive(name.as_str())
            .no_wait()
            .acquire()
            .await
            .unwrap()
            .release()
            .await
            .unwrap();
    }
    let beside = LockClient::connect(&url("3")).await.unwrap();
    assert_eq!(
        beside.inspect(name.as_str()).await.unwrap().holders.len(),
        1
    );
    guard.release().await.unwrap();

    // More than this server has, and more than any server can have.
    for db in ["1000", "99999999999"] {
        let error = within(CONNECT, LockClient::connect(&url(db)))
            .await
            .unwrap_err();
        assert_says(
            &error,
            LockErrorKind::InvalidUrl,
            &["no database of that number", "/0"],
        );
    }
}

/// In the words of proxies, whose refusal holds for good: a client that connects in the background
/// does not wait for it to pass.
#[tokio::test]
async fn a_proxy_that_does_not_know_hello_is_named() {
    for words in [
        &b"-ERR unsupported command 'hello'\r\n"[..],
        b"-ERR unknown command 'HELLO'\r\n",
        b"-ERR command not supported: HELLO\r\n",
        b"-NOPROTO unsupported protocol version\r\n",
    ] {
        let url = url_of(saying(words, false).await);
        let says = ["HELLO 3", "Envoy", "connect to the server itself"];
        let error = within(CONNECT, LockClient::connect(&url))
            .await
            .unwrap_err();
        assert_says(&error, LockErrorKind::WrongServer, &says);
        let locks = LockClient::connect_lazy(&url).unwrap();
        let waiting = locks.exclusive("k").wait(HOUR).acquire();
        let error = within(CONNECT, waiting).await.unwrap_err();
        assert_says(&error, LockErrorKind::WrongServer, &says);
    }
}

#[tokio::test]
async fn a_server_with_another_name_for_hello_serves_polls_alone() {
    in_time(async {
        let server = RedisServer::builder().args(["--rename-command", "HELLO", "SALUTE"]);
        let server = server.start().await;
        let url = server.url();
        let error = LockClient::connect(&url).await.unwrap_err();
        let says = ["HELLO 3", "renamed", "?protocol=resp2"];
        assert_says(&error, LockErrorKind::WrongServer, &says);

        let traces = Captured::new();
        let _guard = traces.set_default();
        let url = format!("{url}?protocol=resp2");
        let one = LockClient::connect(&url).await.unwrap();
        let two = LockClient::connect(&url).await.unwrap();
        let said = traces.events();
        let of_silence = said
            .iter()
            .filter(|event| event.message.contains("waiters only poll"));
        assert_eq!(of_silence.count(), 2, "once for each client: {said:?}");
        assert_eq!(one.health().await.verdict(), Verdict::Healthy);

        // A waiter finds by a poll that it has been granted the lock.
        let held = one.exclusive("k").acquire().await.unwrap();
        let waiting = tokio::spawn(begun(two.exclusive("k").wait(LONG).acquire()).await);
        eventually("it waits", async || {
            !one.inspect("k").await.unwrap().waiters.is_empty()
        })
        .await;
        let listed: Vec<_> = two.list("k").try_collect().await.unwrap();
        assert_eq!(listed.len(), 1, "{listed:?}");
        let earlier = held.fence();
        held.release().await.unwrap();
        let next = waiting.await.unwrap().unwrap();
        assert!(next.fence() > earlier);

        // A revoked holder learns of it at its next renewal.
        one.revoke("k").await.unwrap();
        next.lost().await;

        // The end of the connection is noticed at the next call.
        server.restart_empty().await;
        let guard = one.exclusive("k").acquire().await.unwrap();
        guard.release().await.unwrap();
    })
    .await;
}
