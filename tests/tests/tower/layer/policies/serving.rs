//! The options of a policy file, on real servers.

use std::{pin::pin, sync::Arc, time::Duration};

use axum::{
    Router,
    body::{Body, Bytes},
    http::Response as HttpResponse,
    routing::{any, get, post},
};
use futures_util::{StreamExt, future, stream};
use lock_runtime::{HeldLock, LockClient};
use lock_tests::RedisServer;
use lock_tower::{LockLayer, LockPolicies, PolicyLayer, Refusal};
use tokio::{
    sync::{Barrier, Notify},
    time::timeout,
};
use tower::Layer;

use crate::layer::server::{Response, Server};

/// Longer than any of these tests takes, and shorter than the default lease.
const PROMPTLY: Duration = Duration::from_secs(10);

/// Responds with the key of the lock of the request.
async fn named(lock: Option<HeldLock>) -> String {
    lock.map_or("none".into(), |lock| lock.key().to_string())
}

fn layer(locks: &LockClient, text: &str) -> PolicyLayer<LockPolicies> {
    PolicyLayer::new(locks.clone(), LockPolicies::from_toml_str(text).unwrap())
}

/// A server that responds to every path with the key of the lock.
async fn serve(locks: &LockClient, text: &str) -> Server {
    Server::start(Router::new().fallback(named).layer(layer(locks, text))).await
}

/// The title of a problem document.
fn title(response: &Response) -> String {
    let document: serde_json::Value = serde_json::from_str(&response.body).unwrap();
    document["title"].as_str().unwrap().to_owned()
}

/// Asserts that a POST is refused, with the status and the code of a problem document.
async fn refused(server: &Server, path: &str, status: u16, code: &str) -> Response {
    let response = server.post(path).await;
    let found = (response.status, response.problem());
    assert_eq!(found, (status, code.to_owned()), "{path}");
    response
}

/// Asserts the HTTP status and the gRPC status of a call.
async fn grpc_refused(server: &Server, path: &str, headers: &[(&str, &str)], status: &str) {
    let response = server.grpc(path, headers).await;
    let found = (response.status, response.header("grpc-status"));
    assert_eq!(found, (200, Some(status)), "{path}");
}

/// In place of a key: the path is refused, as its lock would depend on how it is served.
const REFUSED: &str = "refused";

/// Asserts for each path by which key a POST is locked, or that it is refused.
async fn assert_keys(server: &Server, paths: &[(&str, &str)]) {
    for &(path, key) in paths {
        if key == REFUSED {
            refused(server, path, 400, "bad_request").await;
        } else {
            assert_eq!(server.post(path).await.body, key, "{path}");
        }
    }
}

async fn is_free(locks: &LockClient, key: &str) -> bool {
    locks.exclusive(key).try_acquire().await.unwrap().is_some()
}

#[tokio::test]
async fn a_refusal_has_the_status_of_its_policy() {
    let locks = LockClient::in_memory();
    let text = r#"
        [defaults]
        key = "order:{id}"
        no_wait = true
        [routes]
        "/plain/{id}" = {}
        "/locked/{id}" = { status = { busy = 423 } }
        "/many/{id}" = { status = { busy = 429, bad_request = 422 }, retry_after = "7s" }
        "/tenant/{id}" = { key = "{header.x-tenant}", status = { bad_request = 422 } }
        "/shop.Orders/Pay" = { key = "order:7", global = true, status = { busy = 423 } }
    "#;
    let server = serve(&locks, text).await;
    let _held = locks.exclusive("order:7").acquire().await.unwrap();
    for (path, status, phrase, after) in [
        ("/plain/7", 409, "Conflict", "1"),
        ("/locked/7", 423, "Locked", "1"),
        ("/many/7", 429, "Too Many Requests", "7"),
    ] {
        let response = refused(&server, path, status, "contended").await;
        assert_eq!(title(&response), phrase, "{path}");
        assert_eq!(response.header("retry-after"), Some(after), "{path}");
    }
    // The status of a gRPC response does not change.
    grpc_refused(&server, "/shop.Orders/Pay", &[], "10").await;
    // The policy applies even if the request lacks a part of its key.
    refused(&server, "/tenant/7", 422, "missing_header").await;
}

#[tokio::test]
async fn a_request_without_wait_and_one_too_many_are_refused_at_once() {
    let locks = LockClient::in_memory();
    let text = r#"
        [defaults]
        key = "order:{id}"
        wait = "1h"
        [routes]
        "/waits/{id}" = { max_waiters = 0 }
        "/not/{id}" = { no_wait = true }
        "/short/{id}" = { wait = "20ms" }
    "#;
    let server = serve(&locks, text).await;
    let held = locks.exclusive("order:7").acquire().await.unwrap();
    let response = timeout(PROMPTLY, server.post("/not/7")).await;
    assert_eq!(response.expect("refused at once").problem(), "contended");
    assert_eq!(server.post("/short/7").await.problem(), "wait_timeout");
    // The request at the head of the queue does not count, so `max_waiters = 0` admits one.
    let (first, second) = (pin!(server.post("/waits/7")), pin!(server.post("/waits/7")));
    let one = timeout(PROMPTLY, future::select(first, second)).await;
    let (response, waiting) = one.expect("one is refused at once").factor_first();
    assert_eq!((response.status, &*response.problem()), (503, "overloaded"));
    // The waiters of one key do not affect another.
    assert_eq!(server.post("/waits/8").await.body, "order:8");
    held.release().await.unwrap();
    assert_eq!(waiting.await.body, "order:7");
}

#[tokio::test]
async fn readers_and_permits_are_served_together() {
    let locks = LockClient::in_memory();
    let text = r#"
        [routes]
        "/read/{id}" = { key = "read:{id}", mode = "shared" }
        "/permits/{id}" = { key = "some:{id}", permits = 2 }
        "/write/{id}" = { key = "read:{id}", mode = "exclusive", no_wait = true }
    "#;
    let both = Arc::new(Barrier::new(3));
    let leave = Arc::new(Notify::new());
    let handler = {
        let (both, leave) = (both.clone(), leave.clone());
        async move || {
            let left = leave.notified();
            both.wait().await;
            left.await;
        }
    };
    let app = Router::new()
        .route("/read/{id}", post(handler.clone()))
        .route("/permits/{id}", post(handler))
        .route("/write/{id}", post(async || "written"))
        .layer(layer(&locks, text));
    let server = Server::start(app).await;
    for path in ["/read/7", "/permits/7"] {
        let (one, other) = (
            server.send("POST", path, &[]).await,
            server.send("POST", path, &[]).await,
        );
        // Both requests are in the handler; a writer is refused meanwhile.
        let together = timeout(PROMPTLY, both.wait()).await;
        together.expect("they are served together");
        if path == "/read/7" {
            assert_eq!(server.post("/write/7").await.problem(), "contended");
        }
        leave.notify_waiters();
        for sent in [one, other] {
            assert_eq!(sent.response().await.unwrap().status, 200, "{path}");
        }
    }
    assert_eq!(server.post("/write/7").await.body, "written");
}

#[tokio::test]
async fn policy_file_hold_body_keeps_the_lock_until_the_last_frame() {
    let locks = LockClient::in_memory();
    let text = r#"
        [defaults]
        key = "report:{id}"
        [routes]
        "/body/{id}" = { hold_until = "body" }
        "/response/{id}" = { hold_until = "response" }
    "#;
    let (half, rest) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let handler = {
        let (half, rest) = (half.clone(), rest.clone());
        async move || {
            let second = stream::once(async move {
                half.notify_one();
                rest.notified().await;
                Ok::<_, std::convert::Infallible>(Bytes::from("second"))
            });
            Body::from_stream(stream::iter([Ok(Bytes::from("first"))]).chain(second))
        }
    };
    let app = Router::new()
        .route("/body/{id}", get(handler.clone()))
        .route("/response/{id}", get(handler))
        .layer(layer(&locks, text));
    let server = Server::start(app).await;
    for (path, is_held) in [("/body/7", true), ("/response/7", false)] {
        let sent = server.send("GET", path, &[]).await;
        half.notified().await;
        assert_eq!(is_free(&locks, "report:7").await, !is_held, "{path}");
        rest.notify_one();
        assert!(sent.response().await.unwrap().body.contains("second"));
        let free = locks.exclusive("report:7").wait(PROMPTLY).acquire().await;
        assert!(free.is_ok(), "{path}: {free:?}");
    }
}

#[tokio::test]
async fn policy_file_serves_without_the_store_only_with_fail_open() {
    let redis = RedisServer::start().await;
    let locks = LockClient::connect(&redis.url()).await.unwrap();
    let text = r#"
        [defaults]
        key = "order:{id}"
        lease = "1s"
        wait = "100ms"
        [groups.open]
        fail_open = true
        [routes]
        "/open/{id}" = { group = "open" }
        "/shut/{id}" = {}
        "/again/{id}" = { group = "open", fail_open = false, status = { unavailable = 502 } }
    "#;
    let server = serve(&locks, text).await;
    for path in ["/open/7", "/shut/7", "/again/7"] {
        assert_eq!(server.post(path).await.body, "order:7");
    }
    redis.kill();
    assert_eq!(server.post("/open/7").await.body, "none");
    refused(&server, "/shut/7", 503, "unavailable").await;
    let response = refused(&server, "/again/7", 502, "unavailable").await;
    assert_eq!(title(&response), "Bad Gateway");
}

#[tokio::test]
async fn a_reentrant_policy_enters_the_lock_of_a_layer_further_out() {
    let locks = LockClient::in_memory();
    let text = r#"
        [defaults]
        key = "order:{id}"
        no_wait = true
        [routes]
        "/again/{id}" = { reentrant = true }
        "/once/{id}" = {}
    "#;
    let outer = LockLayer::new(locks.clone(), "order:{id}").unwrap();
    let app = Router::new()
        .route("/again/{id}", post(named))
        .route("/once/{id}", post(named))
        .route_layer(layer(&locks, text))
        .route_layer(outer);
    let server = Server::start(app).await;
    assert_eq!(server.post("/again/7").await.body, "order:7");
    refused(&server, "/once/7", 500, "would_deadlock").await;
    assert!(is_free(&locks, "order:7").await);
}

#[tokio::test]
async fn a_refusal_in_other_words_knows_the_policy() {
    let locks = LockClient::in_memory();
    let text = r#"
        [defaults]
        no_wait = true
        status = { busy = 423 }
        [routes]
        "POST /orders/{id}" = { name = "pay", key = "order:{id}" }
        "/orders/{id}" = { key = "order:{id}" }
    "#;
    let layer = layer(&locks, text).on_reject(|refusal: &Refusal<'_>| {
        let body = Bytes::from(format!("{}: {}", refusal.policy().name(), refusal.code()));
        let response = HttpResponse::builder().status(refusal.status());
        response.body(body).unwrap()
    });
    let server = Server::start(Router::new().fallback(named).layer(layer)).await;
    let _held = locks.exclusive("order:7").acquire().await.unwrap();
    for (method, body) in [
        ("POST", "pay: contended"),
        ("PUT", "/orders/{id}: contended"),
    ] {
        let sent = server.send(method, "/orders/7", &[]).await;
        let response = sent.response().await.unwrap();
        assert_eq!((response.status, &*response.body), (423, body), "{method}");
    }
}

#[tokio::test]
async fn a_lock_ends_when_its_policy_says() {
    let locks = LockClient::in_memory();
    let text = r#"
        [routes]
        "/short/{id}" = { key = "order:{id}", max_hold = "50ms", status = { lost = 504 } }
        "/long/{id}" = { key = "order:{id}", min_hold = "1h", no_wait = true }
    "#;
    let forever = async || std::future::pending::<()>().await;
    let app = Router::new()
        .route("/short/{id}", post(forever))
        .route("/long/{id}", post(named))
        .layer(layer(&locks, text));
    let server = Server::start(app).await;
    let ended = timeout(PROMPTLY, refused(&server, "/short/7", 504, "lost_max_hold")).await;
    ended.expect("the lock ends");
    assert_eq!(server.post("/long/7").await.body, "order:7");
    assert_eq!(server.post("/long/7").await.problem(), "contended");
}

#[tokio::test]
async fn a_method_of_grpc_has_its_policy() {
    let locks = LockClient::in_memory();
    let text = r#"
        [defaults]
        no_wait = true
        [routes]
        "/shop.Inventory/Reserve" = { key = "item:{header.x-item}" }
        "/shop.Inventory/{method}" = { key = "{grpc.service}:{grpc.method}" }
        "/shop.Inventory/Watch" = { skip = true }
    "#;
    let app = Router::new()
        .route("/shop.Inventory/{method}", any(named))
        .layer(layer(&locks, text));
    let server = Server::start(app).await;
    let item = [("x-item", "42")];
    for (path, headers, key) in [
        ("/shop.Inventory/Reserve", &item[..], "item:42"),
        ("/shop.Inventory/Release", &[], "shop.Inventory:Release"),
        ("/shop.Inventory/Watch", &[], "none"),
    ] {
        assert_eq!(server.grpc(path, headers).await.body, key, "{path}");
    }
    // INVALID_ARGUMENT.
    grpc_refused(&server, "/shop.Inventory/Reserve", &[], "3").await;
    let _held = locks.exclusive("item:42").acquire().await.unwrap();
    // ABORTED.
    grpc_refused(&server, "/shop.Inventory/Reserve", &item, "10").await;
}

/// No spelling of a path reaches a handler without a lock, however the routers are nested.
#[tokio::test]
async fn policy_file_locks_a_path_however_it_is_written() {
    let text = r#"
        [routes]
        "GET /api/orders/{id}" = { key = "order:{id}", name = "look" }
        "/api/files/{*rest}" = { key = "file:{rest}" }
        "/api" = { key = "root", global = true }
    "#;
    let locks = LockClient::in_memory();
    let lock = layer(&locks, text);
    let told = async |lock: Option<HeldLock>| [("x-lock", named(lock).await)];
    let inner = || {
        Router::new()
            .route("/orders/{id}", get(told))
            .route("/files/{*rest}", any(told))
            .route("/", get(told))
    };
    let nest = |app: Router| Router::new().nest("/api", app);
    let nest_service = |app: Router| Router::new().nest_service("/api", app);
    let layered = |app: Router| app.layer(lock.clone());
    let service = |app: Router| Router::new().fallback_service(lock.layer(app));
    let nested = lock.layer(inner());
    let apps = [
        ("layered(nest)", layered(nest(inner()))),
        ("nest(layered)", nest(layered(inner()))),
        ("layered(nest_service)", layered(nest_service(inner()))),
        ("nest_service(layered)", nest_service(layered(inner()))),
        (
            "nest_service(service)",
            Router::new().nest_service("/api", nested),
        ),
        ("service(nest)", service(nest(inner()))),
        ("service(nest_service)", service(nest_service(inner()))),
    ];
    let paths = "
        /api/orders/7 /api/orders/%37 /api/%6Frders/7 /api/orders/7/ /api//orders/7 //api/orders/7
        /api/orders//7 /api///orders/7 //api//orders/7 //api//orders//7
        /api/./orders/7 /api/../api/orders/7 /api/orders/.. /api/orders/%2E%2E
        /api/orders/%2F /api%2Forders/7 /api/orders/7?x=/api/health /api/orders/7;a=b
        /API/orders/7 /api/orders/ /api/orders /api/orders/%00 /api/orders/7%20
        http://test/api/orders/7 http://test//api/orders/7 http://test/api//orders/7
        /api/files/a /api/files//a /api//files/a /api/files/a//b /api/files/
        /api/files/../orders/7
        /api /api/ /api// //api / *
    ";
    for (name, app) in apps {
        let server = Server::start(app).await;
        for method in ["GET", "HEAD", "POST", "OPTIONS", "PURGE"] {
            for path in paths.split_whitespace() {
                let Some(response) = server.send(method, path, &[]).await.response().await else {
                    continue;
                };
                assert_ne!(
                    response.header("x-lock"),
                    Some("none"),
                    "{name}: {method} {path}: {response:?}"
                );
            }
        }
        let sent = server.send("GET", "/api/orders/%37", &[]).await;
        let response = sent.response().await.expect(name);
        assert_eq!(response.header("x-lock"), Some("order:7"), "{name}");
    }
}

/// Also where no route of the file matches: a nested service may serve the path by another one.
#[tokio::test]
async fn policy_file_refuses_empty_segments_unless_they_are_allowed() {
    let text = r#"
        [routes]
        "/files/{*rest}" = { key = "file:{rest}" }
        "/health" = { skip = true }
    "#;
    let locks = LockClient::in_memory();
    let policies = LockPolicies::from_toml_str(text).unwrap();
    let serve = async |policies| {
        let layer = PolicyLayer::new(locks.clone(), policies);
        Server::start(Router::new().fallback(named).layer(layer)).await
    };
    let (strict, lenient) = (
        serve(policies.clone()).await,
        serve(policies.clone().allow_empty_segments()).await,
    );
    for (path, body) in [
        ("/files//a", "file:%2Fa"),
        ("/files/a//", "file:a%2F%2F"),
        ("/nowhere//", "none"),
        ("//health", "none"),
        ("//", "none"),
        ("http://test//files/a", "none"),
        ("*", "none"),
    ] {
        refused(&strict, path, 400, "bad_request").await;
        assert_eq!(lenient.post(path).await.body, body, "{path}");
    }
    for path in "/files/a /files/a/ /nowhere/ / /health?to=// /health/".split(' ') {
        assert_eq!(strict.post(path).await.status, 200, "{path}");
    }
    // The policies themselves are shared.
    policies
        .replace("[routes.'/a']\nkey = '{header.x}'")
        .unwrap();
    assert_eq!(lenient.post("/files//a").await.body, "none");
}

/// A nested service serves both forms by one route, and so does a layer that removes the slash.
#[tokio::test]
async fn policy_file_refuses_a_path_whose_lock_depends_on_a_slash_at_its_end() {
    let text = r#"
        [routes]
        "POST /orders/{id}" = { key = "order:{id}" }
        "/shops/" = { key = "shops", global = true }
        "/both" = { key = "both", global = true, name = "both" }
        "/both/" = { key = "both", global = true, name = "and both" }
        "/free" = { skip = true }
        "/wide/{*rest}" = { skip = true }
        "/wide/all" = { key = "all", global = true }
    "#;
    let locks = LockClient::in_memory();
    let server = serve(&locks, text).await;
    let paths = [
        ("/orders/7", "order:7"),
        ("/orders/7/", REFUSED),
        ("/shops", REFUSED),
        ("/shops/", "shops"),
        ("/both", "both"),
        ("/both/", "both"),
        ("/free", "none"),
        ("/free/", "none"),
        ("/wide/all", "all"),
        ("/wide/all/", REFUSED),
        ("/wide/7/", "none"),
        ("/nowhere", "none"),
        ("/nowhere/", "none"),
    ];
    assert_keys(&server, &paths).await;
    let other = server.send("GET", "/orders/7/", &[]).await.response().await;
    assert_eq!(other.unwrap().body, "none", "another method");
    let policies = LockPolicies::from_toml_str(text).unwrap();
    let lenient = PolicyLayer::new(locks, policies.allow_empty_segments());
    let server = Server::start(Router::new().fallback(named).layer(lenient)).await;
    assert_eq!(server.post("/orders/7/").await.body, "none");
}

/// Also where the file has a route for each of the two, but only one of them by a parameter.
#[tokio::test]
async fn policy_file_refuses_a_path_that_is_literal_in_another_route() {
    let text = r#"
        [routes]
        "/api/" = { key = "api", global = true }
        "/{page}" = { key = "page:{page}" }
        "/svc" = { key = "svc", global = true }
        "/{org}/" = { key = "org:{org}" }
    "#;
    let server = serve(&LockClient::in_memory(), text).await;
    let paths = [
        ("/api", REFUSED),
        ("/api/", "api"),
        ("/svc", "svc"),
        ("/svc/", REFUSED),
        ("/x", "page:x"),
        ("/x/", "org:x"),
    ];
    assert_keys(&server, &paths).await;
}
