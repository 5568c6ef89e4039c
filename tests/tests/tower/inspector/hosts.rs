//! Requests over TCP that name another host than that of the pages, and revocations that another
//! page sends: none is answered, and the log summarises them.

use axum::Router;
use lock_runtime::LockClient;
use lock_tests::{Captured, place::in_time};
use lock_tower::inspector::Inspector;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};

/// A page that the browser of an operator has loaded from `evil.example`, a name which resolves to
/// the address of this service now, sends these headers.
const REBOUND: &str =
    "host: evil.example\r\norigin: http://evil.example\r\nsec-fetch-site: same-origin\r\n";

/// The response to a request with these headers, as text.
async fn ask(port: u16, request: &str, headers: &str, body: &str) -> String {
    let mut connection = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    let length = body.len();
    let request = format!(
        "{request} HTTP/1.1\r\n{headers}content-type: application/x-www-form-urlencoded\r\ncontent-length: \
         {length}\r\nconnection: close\r\n\r\n{body}"
    );
    connection.write_all(request.as_bytes()).await.unwrap();
    let mut response = String::new();
    connection.read_to_string(&mut response).await.unwrap();
    response
}

/// Serves the pages, below a path or not. Returns the port.
async fn serve(inspector: impl FnOnce(u16) -> Inspector, path: &str) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let app = match path {
        "" => Router::new().fallback_service(inspector(port)),
        path => Router::new().nest_service(path, inspector(port)),
    };
    tokio::spawn(async move { axum::serve(listener, app).await });
    port
}

#[tokio::test]
async fn no_request_that_names_another_host_reads_or_revokes_a_lock() {
    in_time(async {
        let locks = LockClient::in_memory();
        let guard = locks.exclusive("order:42").acquire().await.unwrap();
        let holder = locks.inspect("order:42").await.unwrap().holders[0].id;
        let form = format!("key=order:42&kind=lock&holder={holder}");
        let origin = |port: u16| format!("http://127.0.0.1:{port}");
        let read_only = Inspector::new(locks.clone());
        for (port, path) in [
            (serve(|_| read_only.clone(), "/locks").await, "/locks"),
            (
                serve(|port| read_only.clone().allow_revoke(&origin(port)), "").await,
                "/",
            ),
            (
                serve(
                    |port| {
                        let inspector = read_only.clone().allow_host("ops.example.com");
                        inspector.allow_revoke(&origin(port))
                    },
                    "/locks",
                )
                .await,
                "/locks",
            ),
        ] {
            for query in [
                "",
                "?format=json",
                "?format=events",
                "?key=order:42",
                "?asset=script",
            ] {
                let response = ask(port, &format!("GET {path}{query}"), REBOUND, "").await;
                assert!(response.starts_with("HTTP/1.1 421 "), "{query}: {response}");
                assert!(!response.contains("order:42"), "{query}: {response}");
            }
            let response = ask(port, &format!("POST {path}"), REBOUND, &form).await;
            assert!(response.starts_with("HTTP/1.1 421 "), "{response}");
            for hosts in ["", "host: evil.example\r\nhost: localhost\r\n"] {
                let response = ask(port, &format!("GET {path}"), hosts, "").await;
                assert!(response.starts_with("HTTP/1.1 4"), "{hosts:?}: {response}");
            }
            let whole = format!("GET http://evil.example{path}");
            let response = ask(port, &whole, "host: localhost\r\n", "").await;
            assert!(response.starts_with("HTTP/1.1 421 "), "{response}");
            for host in [&*format!("127.0.0.1:{port}"), "localhost", "[::1]:80"] {
                let host = format!("host: {host}\r\n");
                let response = ask(port, &format!("GET {path}"), &host, "").await;
                assert!(response.contains("order:42"), "{response}");
            }
        }
        guard.verify().await.unwrap();

        // HTTP/2 has the host in the URI.
        let port = serve(|_| read_only.clone(), "/locks").await;
        let address = ([127, 0, 0, 1], port).into();
        let client = reqwest::Client::builder()
            .no_proxy()
            .http2_prior_knowledge();
        let client = client
            .resolve("evil.example", address)
            .resolve("localhost", address);
        let client = client.build().unwrap();
        for (host, status) in [("evil.example", 421), ("localhost", 200)] {
            let response = client
                .get(format!("http://{host}:{port}/locks"))
                .send()
                .await;
            let response = response.unwrap();
            assert_eq!(response.version(), http::Version::HTTP_2);
            assert_eq!(response.status(), status, "{host}");
        }

        // The origin with which revoking is allowed, and no other.
        let port = serve(|port| read_only.allow_revoke(&origin(port)), "/locks").await;
        let host = format!("host: 127.0.0.1:{port}\r\n");
        for origin in [
            "",
            "origin: http://evil.example\r\n",
            "origin: http://localhost\r\n",
        ] {
            let response = ask(port, "POST /locks", &format!("{host}{origin}"), &form).await;
            assert!(response.starts_with("HTTP/1.1 403 "), "{response}");
        }
        guard.verify().await.unwrap();
        let own = format!("{host}origin: {}\r\n", origin(port));
        let response = ask(port, "POST /locks", &own, &form).await;
        assert!(response.starts_with("HTTP/1.1 200 "), "{response}");
        guard.lost().await;
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn refused_requests_are_summarised_in_the_log() {
    let traces = Captured::new();
    let _here = traces.set_default();
    let inspector = Inspector::new(LockClient::in_memory()).allow_revoke("http://127.0.0.1");
    for number in 0..1000 {
        if number == 999 {
            tokio::time::sleep(std::time::Duration::from_secs(11)).await;
        }
        let origin = ("origin", "http://evil.example");
        let headers = [super::FORM, ("host", "127.0.0.1"), origin];
        assert_eq!(super::post(&inspector, "", &headers).await.status, 403);
        let headers = [super::FORM, ("host", "evil\u{202e}.example"), origin];
        assert_eq!(super::post(&inspector, "", &headers).await.status, 421);
    }
    for message in ["another origin", "its host is not allowed"] {
        let events = traces.events().into_iter();
        let refusals: Vec<_> = events
            .filter(|event| event.message.contains(message))
            .collect();
        let left_out: Vec<_> = refusals
            .iter()
            .map(|event| event.field("left_out"))
            .collect();
        assert_eq!(left_out, [None, Some("998")], "{refusals:?}");
        for refusal in refusals {
            assert!(refusal.field("origin").unwrap().contains("evil.example"));
            assert!(!format!("{:?}", refusal.fields).contains('\u{202e}'));
        }
    }
}
