//! Values that can be written in more than one way: one lock for each thing.

use std::{
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use axum::{
    Router,
    body::Body,
    extract::Path,
    http::{Request, StatusCode},
    response::Response,
    routing::post,
};
use http_body_util::BodyExt;
use lock_runtime::{LockClient, LockKey};
use lock_tower::{KeyExtractor, KeyTemplate, LockLayer, Target};
use tokio::sync::Notify;
use tower::ServiceExt;

async fn send(app: &Router, method: &str, path: &str) -> (StatusCode, String) {
    let request = Request::builder()
        .method(method)
        .uri(path)
        .body(Body::empty())
        .unwrap();
    let response: Result<Response, Infallible> = app.clone().oneshot(request).await;
    let response = response.unwrap();
    let status = response.status();
    let body = response.into_body().collect().await.unwrap().to_bytes();
    (status, String::from_utf8_lossy(&body).into_owned())
}

#[tokio::test]
async fn one_order_has_one_lock_however_its_number_is_written() {
    for path in ["/orders/07/pay", "/orders/+7/pay", "/orders/%37/pay"] {
        let (inside, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (entered, leave) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let pay = {
            let (inside, most, entered, leave) =
                (inside.clone(), most.clone(), entered.clone(), leave.clone());
            async move |Path(id): Path<u64>| {
                assert_eq!(id, 7);
                most.fetch_max(inside.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                entered.notify_one();
                leave.notified().await;
                inside.fetch_sub(1, Ordering::SeqCst);
            }
        };
        let layer = LockLayer::new(LockClient::in_memory(), "order:{id:int}")
            .unwrap()
            .no_wait();
        let app = Router::new().route("/orders/{id}/pay", post(pay).layer(layer));
        let first = tokio::spawn({
            let app = app.clone();
            async move { send(&app, "POST", "/orders/7/pay").await }
        });
        entered.notified().await;
        let second = tokio::spawn(async move { send(&app, "POST", path).await });
        tokio::select! {
            () = entered.notified() => leave.notify_one(),
            () = async { while !second.is_finished() { tokio::task::yield_now().await } } => {}
        }
        leave.notify_waiters();
        leave.notify_one();
        first.await.unwrap();
        assert_eq!(
            most.load(Ordering::SeqCst),
            1,
            "{path}: two requests paid order 7 at the same time"
        );
    }
}

#[test]
fn a_kind_has_one_key_for_each_value() {
    let key = |template: &str, value: &str| {
        let request = Request::post(format!("/?v={value}"))
            .header("v", value)
            .body(());
        KeyTemplate::new(template)
            .unwrap()
            .target(&mut request.unwrap())
    };
    for (kind, same, key_of_all) in [
        ("int", &["7", "07", "%2B7", "0000000000000007"][..], "k:7"),
        ("int", &["-7", "-007"], "k:-7"),
        ("int", &["0", "-0", "00"], "k:0"),
        (
            "int",
            &["18446744073709551615", "018446744073709551615"],
            "k:18446744073709551615",
        ),
        (
            "uuid",
            &[
                "67E55044-10B1-426F-9247-BB680E5FE0C8",
                "67e5504410b1426f9247bb680e5fe0c8",
            ],
            "k:67e55044-10b1-426f-9247-bb680e5fe0c8",
        ),
    ] {
        for value in same {
            let target = key(&format!("k:{{query.v:{kind}}}"), value).unwrap();
            assert_eq!(
                target,
                Target::Lock(LockKey::new(key_of_all).unwrap()),
                "{value}"
            );
        }
    }
    for (kind, value) in [
        ("int", "7.0"),
        ("int", "0x7"),
        ("int", "seven"),
        ("int", "7-"),
        ("uuid", "7"),
        ("uuid", "x"),
    ] {
        for of in ["query", "header"] {
            let error = key(&format!("k:{{{of}.v:{kind}}}"), value).unwrap_err();
            assert_eq!(
                (error.class().http_status(), error.code()),
                (400, "bad_request")
            );
            assert!(error.to_string().contains("\"v\""), "{error}");
        }
    }
}

#[tokio::test]
async fn a_path_parameter_of_another_kind_is_the_callers_mistake() {
    let layer = LockLayer::new(LockClient::in_memory(), "order:{id:int}").unwrap();
    let app = Router::new().route("/orders/{id}", post(async || "paid").layer(layer));
    let (status, problem) = send(&app, "POST", "/orders/seven").await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    assert!(problem.contains("whole number"), "{problem}");
    assert_eq!(send(&app, "POST", "/orders/07").await.0, StatusCode::OK);
}
