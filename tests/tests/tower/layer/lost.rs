//! Services that respond after their lock was lost: no success, unless the layer says so.

use std::{sync::Arc, thread, time::Duration};

use axum::{
    Router,
    body::{Body, Bytes},
    http::{HeaderMap, HeaderValue, Request, StatusCode, Version, header::CONTENT_TYPE},
    response::{IntoResponse as _, Response},
    routing::post,
};
use futures_util::{FutureExt as _, StreamExt as _, stream};
use http_body::Frame;
use http_body_util::{BodyExt as _, StreamBody};
use lock_runtime::{
    HeldLock, LockClient, LockKey, OnLost,
    store::{MemoryStore, ReleaseReply},
};
use lock_tests::{FaultyStore, faulty_store::Operation, place::Place};
use lock_tower::{HoldUntil, LockLayer, LockPolicies, PolicyLayer, ServiceError};
use tokio::time::{advance, sleep};
use tower::{Layer as _, ServiceExt as _, service_fn};

use super::server::Server;

const SETTINGS: [OnLost; 3] = [OnLost::Cancel, OnLost::Error, OnLost::Ignore];

fn layer(locks: &LockClient, on_lost: OnLost) -> LockLayer {
    let layer = LockLayer::new(locks.clone(), "order:{id}").unwrap();
    layer.on_lost(on_lost)
}

fn request() -> Request<Body> {
    Request::post("/shop.Orders/7").body(Body::empty()).unwrap()
}

fn grpc() -> Request<Body> {
    let mut request = request();
    *request.version_mut() = Version::HTTP_2;
    let grpc = HeaderValue::from_static("application/grpc");
    request.headers_mut().insert(CONTENT_TYPE, grpc);
    request
}

/// Lets the lock expire without an await point.
fn outlive(lock: &HeldLock) {
    let _ = advance(lock.validity() + Duration::from_secs(1)).now_or_never();
    assert!(lock.is_lost());
}

async fn text(response: Response) -> String {
    let body = response.into_body().collect().await.unwrap().to_bytes();
    String::from_utf8(body.to_vec()).unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_handler_that_responds_after_the_loss_does_not_succeed() {
    for on_lost in SETTINGS {
        for status in [StatusCode::OK, StatusCode::NOT_FOUND] {
            let locks = LockClient::in_memory();
            let handler = async move |lock: HeldLock| {
                outlive(&lock);
                (status, "done")
            };
            let app: Router = Router::new().route(
                "/shop.Orders/{id}",
                post(handler).layer(layer(&locks, on_lost)),
            );
            let response = app.oneshot(request()).await.unwrap();
            if on_lost == OnLost::Ignore || status != StatusCode::OK {
                assert_eq!(response.status(), status, "{on_lost:?}");
                assert_eq!(text(response).await, "done");
            } else {
                assert_eq!(response.status(), 500, "{on_lost:?}");
                let text = text(response).await;
                assert!(text.contains("lost_expired"), "{text}");
                assert!(text.contains("may have had effects"), "{text}");
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_grpc_service_that_responds_after_the_loss_does_not_succeed() {
    for on_lost in SETTINGS {
        for status in [None, Some("5")] {
            let locks = LockClient::in_memory();
            let handler = async move |lock: HeldLock| {
                outlive(&lock);
                let mut headers = HeaderMap::new();
                headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
                if let Some(status) = status {
                    headers.insert("grpc-status", HeaderValue::from_static(status));
                }
                headers
            };
            let app: Router = Router::new().route(
                "/shop.Orders/{id}",
                post(handler).layer(layer(&locks, on_lost)),
            );
            let response = app.oneshot(grpc()).await.unwrap();
            let expected = match status {
                None if on_lost != OnLost::Ignore => Some("10"),
                status => status,
            };
            let found = response.headers().get("grpc-status");
            let found = found.map(|status| status.to_str().unwrap());
            assert_eq!(found, expected, "{on_lost:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_service_without_http_that_succeeds_after_the_loss_fails() {
    let locks = LockClient::in_memory();
    let key = LockKey::new("order:7").unwrap();
    for on_lost in SETTINGS {
        for result in [Ok("done"), Err("declined")] {
            let service = service_fn(move |()| async move {
                let _ = advance(Duration::from_secs(60)).now_or_never();
                result
            });
            let key = key.clone();
            let layer = LockLayer::plain(locks.clone(), move |_: &()| key.clone());
            let found = layer.on_lost(on_lost).layer(service).oneshot(()).await;
            match (result, on_lost) {
                (Ok(_), OnLost::Ignore) => assert_eq!(found.unwrap(), "done"),
                (Ok(_), _) => assert!(matches!(found, Err(ServiceError::Lock(_))), "{found:?}"),
                (Err(_), _) => {
                    assert!(
                        matches!(found, Err(ServiceError::Inner("declined"))),
                        "{found:?}"
                    );
                }
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_release_that_finds_the_lock_gone_is_no_success() {
    for on_lost in SETTINGS {
        for hold_until in [HoldUntil::Response, HoldUntil::Body] {
            let store = FaultyStore::new(Arc::new(MemoryStore::new()), |call| async move {
                match &call.operation {
                    Operation::Release(_) => Ok(Box::new(ReleaseReply::NotHeld) as _),
                    _ => call.execute().await,
                }
            });
            let locks = LockClient::with_store(store);
            let layer = layer(&locks, on_lost).hold_until(hold_until);
            let handler = async || Body::from_stream(stream::iter([Ok::<_, String>("done")]));
            let app: Router = Router::new().route("/shop.Orders/{id}", post(handler).layer(layer));
            let response = app.oneshot(request()).await.unwrap();
            let is_response = hold_until == HoldUntil::Response;
            if on_lost == OnLost::Ignore {
                assert_eq!(text(response).await, "done");
            } else if is_response {
                assert_eq!(response.status(), 500, "{on_lost:?}");
                assert!(text(response).await.contains("lost_taken"));
            } else {
                assert_eq!(response.status(), 200);
                assert!(response.into_body().collect().await.is_err(), "{on_lost:?}");
            }
        }
    }
}

/// A body of two frames. The lock is lost with the first one.
fn two_frames(lock: HeldLock, locks: LockClient, trailers: Option<HeaderMap>) -> Body {
    let first = async move {
        locks.revoke(lock.key()).await.unwrap();
        lock.lost().await;
        Frame::data(Bytes::from_static(b"one"))
    };
    let second = async move {
        sleep(Duration::from_secs(1)).await;
        trailers.map_or_else(|| Frame::data(Bytes::from_static(b"two")), Frame::trailers)
    };
    let frames = stream::once(first).chain(stream::once(second));
    Body::new(StreamBody::new(frames.map(Ok::<_, String>)))
}

#[tokio::test(start_paused = true)]
async fn a_body_whose_lock_was_lost_is_sent_to_its_end_if_the_layer_says_so() {
    for on_lost in SETTINGS {
        let locks = LockClient::in_memory();
        let layer = layer(&locks, on_lost).hold_until(HoldUntil::Body);
        let handler = async move |lock: HeldLock| two_frames(lock, locks, None);
        let app: Router = Router::new().route("/shop.Orders/{id}", post(handler).layer(layer));
        let mut body = app.oneshot(request()).await.unwrap().into_body();
        let (mut sent, mut failed) = (String::new(), false);
        while let Some(frame) = body.frame().await {
            match frame {
                Ok(frame) => sent += str::from_utf8(frame.data_ref().unwrap()).unwrap(),
                Err(_) => failed = true,
            }
        }
        let expected = match on_lost {
            // The first frame was ready with the loss.
            OnLost::Cancel => ("one", true),
            OnLost::Error => ("onetwo", true),
            _ => ("onetwo", false),
        };
        assert_eq!((&*sent, failed), expected, "{on_lost:?}");
    }
}

/// The trailers of the service carry its own status.
#[tokio::test(start_paused = true)]
async fn a_grpc_stream_keeps_its_own_error_and_not_its_success() {
    for (own, on_lost, expected) in [
        ("0", OnLost::Error, "10"),
        ("5", OnLost::Error, "5"),
        ("0", OnLost::Ignore, "0"),
    ] {
        let locks = LockClient::in_memory();
        let layer = layer(&locks, on_lost).hold_until(HoldUntil::Body);
        let handler = async move |lock: HeldLock| {
            let status = (
                "grpc-status".parse().unwrap(),
                HeaderValue::from_static(own),
            );
            let trailers = HeaderMap::from_iter([status]);
            let mut response = two_frames(lock, locks, Some(trailers)).into_response();
            let grpc = HeaderValue::from_static("application/grpc");
            response.headers_mut().insert(CONTENT_TYPE, grpc);
            response
        };
        let app: Router = Router::new().route("/shop.Orders/{id}", post(handler).layer(layer));
        let body = app.oneshot(grpc()).await.unwrap().into_body();
        let trailers = body.collect().await.unwrap();
        assert_eq!(trailers.trailers().unwrap()["grpc-status"], expected);
    }
}

#[tokio::test(start_paused = true)]
async fn a_policy_file_sets_what_a_loss_does() {
    for (setting, status) in [
        ("", 500),
        ("on_lost = 'error'", 500),
        ("on_lost = 'ignore'", 200),
    ] {
        let policies = format!("[routes.'/shop.Orders/{{id}}']\nkey = 'order:{{id}}'\n{setting}");
        let policies = LockPolicies::from_toml_str(&policies).unwrap();
        let layer = PolicyLayer::new(LockClient::in_memory(), policies);
        let handler = async |lock: HeldLock| outlive(&lock);
        let app: Router = Router::new()
            .route("/shop.Orders/{id}", post(handler))
            .layer(layer);
        assert_eq!(
            app.oneshot(request()).await.unwrap().status(),
            status,
            "{setting}"
        );
    }
}

/// A worker of the server that is busy for longer than the lease, which is not renewed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handler_that_blocks_for_longer_than_its_lease_does_not_succeed() {
    const LEASE: Duration = Duration::from_millis(500);
    let locks = Place::redis().await.client().await;
    let layer = layer(&locks, OnLost::default()).lease(LEASE).no_renew();
    let handler = async || thread::sleep(LEASE);
    let app = Router::new().route("/shop.Orders/{id}", post(handler).layer(layer));
    let server = Server::start(app).await;
    let response = server.post("/shop.Orders/7").await;
    assert_eq!(
        (response.status, response.problem().as_str()),
        (500, "lost_expired")
    );
}
