//! Which lock a request is served under.

use axum::{
    Extension, Router,
    extract::Request,
    http::{HeaderName, Method},
    routing::{MethodRouter, post},
};
use lock_runtime::{HeldLock, KeyWriter, LockClient, LockError, LockKey};
use lock_tower::{IntoTarget, KeyError, LockLayer, Target, key};

use super::server::Server;

/// Answers with the name of the lock it is served under.
fn named() -> MethodRouter {
    post(async |lock: Option<HeldLock>| lock.map_or("none".into(), |lock| lock.key().to_string()))
}

fn layer(template: &str) -> LockLayer {
    LockLayer::new(LockClient::in_memory(), template).unwrap()
}

#[tokio::test]
async fn a_route_has_the_same_key_however_it_is_nested() {
    let order = || Router::new().route("/orders/{id}", named());
    let template = "order:{id}";
    let apps = [
        Router::new().route("/orders/{id}", named().layer(layer(template))),
        Router::new().route("/orders/{id}", named().route_layer(layer(template))),
        order().route_layer(layer(template)),
        order().layer(layer(template)),
        Router::new().merge(order().route_layer(layer(template))),
        Router::new().merge(order()).layer(layer(template)),
    ];
    for app in apps {
        let nested_outside = Router::new().nest("/api", app.clone());
        let twice = Router::new().nest("/v1", Router::new().nest("/api", app.clone()));
        let as_a_service = Router::new().nest_service("/api", app.clone());
        for (app, path) in [
            (app, "/orders/7"),
            (nested_outside, "/api/orders/7"),
            (twice, "/v1/api/orders/7"),
            (as_a_service, "/api/orders/7"),
        ] {
            let server = Server::start(app).await;
            assert_eq!(server.post(path).await.body, "order:7", "{path}");
        }
    }
}

#[tokio::test]
async fn a_layer_around_nested_routers_sees_the_parameters_of_all() {
    let inner = Router::new().route("/orders/{id}", named());
    let app = Router::new()
        .nest("/shops/{shop}", inner)
        .layer(layer("shop:{shop}:{id}"));
    let server = Server::start(app).await;
    assert_eq!(server.post("/shops/3/orders/7").await.body, "shop:3:7");
}

#[tokio::test]
async fn a_nested_service_is_not_served_without_the_lock_of_its_path() {
    let inner = Router::new().route("/orders/{id}", named());
    let app = Router::new()
        .nest_service("/shops/{shop}", inner)
        .layer(layer("shop:{shop}"));
    let server = Server::start(app).await;
    assert_eq!(server.post("/shops/3/orders/7").await.body, "shop:3");
}

#[tokio::test]
async fn values_cannot_reach_the_key_of_others() {
    let app = Router::new()
        .route("/{a}/{b}", named().layer(layer("k:{a}:{b}")))
        .route("/files/at/{*rest}", named().layer(layer("file:{rest}")));
    let server = Server::start(app).await;
    let keys = [
        server.post("/1:2/3").await.body,
        server.post("/1/2:3").await.body,
        server.post("/1%3A2/3").await.body,
        server.post("/1%253A2/3").await.body,
    ];
    assert_eq!(keys, ["k:1%3A2:3", "k:1:2%3A3", "k:1%3A2:3", "k:1%253A2:3"]);
    assert_eq!(server.post("/files/at/a/b").await.body, "file:a%2Fb");
}

#[tokio::test]
async fn parts_of_the_path_and_headers_make_a_key_together() {
    let app = Router::new().route(
        "/orders/{id}",
        named().layer(layer("{{t}}:{id}:{header.x-tenant}")),
    );
    let server = Server::start(app).await;
    let response = server
        .post_with("/orders/a%20b", &[("X-Tenant", "acme/eu")])
        .await;
    assert_eq!(response.body, "{t}:a b:acme%2Feu");
}

#[tokio::test]
async fn query_method_and_matched_path_make_a_key() {
    let template = "{method}:{matched_path}:{query.tenant}:{id}";
    let inner = Router::new()
        .route("/orders/{id}", named())
        .layer(layer(template));
    let server = Server::start(Router::new().nest("/api", inner)).await;
    let response = server.post("/api/orders/7?tenant=acme%2Feu").await;
    assert_eq!(response.body, "POST:%2Fapi%2Forders%2F%7Bid%7D:acme%2Feu:7");
    let response = server.post("/api/orders/7").await;
    assert_eq!(
        (response.status, response.problem().as_str()),
        (400, "missing_query_parameter")
    );
    assert_eq!(server.post("/api/nothing").await.status, 404);
}

#[tokio::test]
async fn ready_extractors_name_keys() {
    #[derive(Clone)]
    struct Tenant(u64);
    impl IntoTarget for Tenant {
        fn into_target(self) -> Result<Target, KeyError> {
            Ok(KeyWriter::new()
                .lit("tenant:")
                .arg(format_args!("{}", self.0))
                .finish()?
                .into())
        }
    }

    let locks = LockClient::in_memory();
    let header = LockLayer::with_key(
        locks.clone(),
        key::header(HeaderName::from_static("idempotency-key")),
    );
    let global = LockLayer::with_key(locks.clone(), key::global("migrations").unwrap());
    let tenant = || LockLayer::with_key(locks.clone(), key::from_extension::<Tenant>());
    let app = Router::new()
        .route("/header", named().layer(header))
        .route("/global", named().layer(global))
        .route("/tenant", named().layer((Extension(Tenant(7)), tenant())))
        .route("/stranger", named().layer(tenant()));
    let server = Server::start(app).await;
    let response = server
        .post_with("/header", &[("idempotency-key", "4:2")])
        .await;
    assert_eq!(response.body, "idempotency-key:4%3A2");
    let response = server.post("/header").await;
    assert_eq!(
        (response.status, response.problem().as_str()),
        (400, "missing_header")
    );
    assert_eq!(server.post("/global").await.body, "migrations");
    assert_eq!(server.post("/tenant").await.body, "tenant:7");
    let response = server.post("/stranger").await;
    assert_eq!(
        (response.status, response.problem().as_str()),
        (500, "misconfigured")
    );
    assert!(key::global("").is_err());
}

#[tokio::test]
async fn closures_name_keys() {
    let locks = LockClient::in_memory();
    let key = LockLayer::with_key(locks.clone(), |_: &Request| LockKey::new("one").unwrap());
    let result = LockLayer::with_key(
        locks.clone(),
        |req: &Request| -> Result<LockKey, LockError> {
            let mut key = KeyWriter::new();
            key.lit("m:").arg(format_args!("{}", req.method()));
            key.finish()
        },
    );
    let target = LockLayer::with_key(locks.clone(), |req: &Request| -> Result<Target, KeyError> {
        match req.method() {
            &Method::POST => Ok(Target::Skip),
            _ => Err(KeyError::bad_request("only POST")),
        }
    });
    let app = Router::new()
        .route("/key", named().layer(key))
        .route("/result", named().layer(result))
        .route("/target", named().get(async || "not reached").layer(target));
    let server = Server::start(app).await;
    for (path, name) in [("/key", "one"), ("/result", "m:POST"), ("/target", "none")] {
        assert_eq!(server.post(path).await.body, name);
    }
    let response = server
        .send("GET", "/target", &[])
        .await
        .response()
        .await
        .unwrap();
    assert_eq!(
        (response.status, response.problem().as_str()),
        (400, "bad_request")
    );
    assert!(response.body.contains("only POST"));
}

#[tokio::test]
async fn what_is_skipped_does_not_wait_for_the_lock_of_others() {
    let locks = LockClient::in_memory();
    let _held = locks.exclusive("one").acquire().await.unwrap();
    let layer = LockLayer::with_key(locks, |req: &Request| {
        match req.headers().contains_key("dry-run") {
            true => Ok(Target::Skip),
            false => LockKey::new("one").map(Target::Lock),
        }
    });
    let server = Server::start(Router::new().route("/", named().layer(layer.no_wait()))).await;
    assert_eq!(
        server.post_with("/", &[("dry-run", "yes")]).await.body,
        "none"
    );
    assert_eq!(server.post("/").await.status, 409);
}
