//! While the store does not answer and others of this process wait, a request that does not wait
//! gets the store's error: whether the lock is held is not known.

use std::sync::atomic::{AtomicBool, Ordering};

use axum::{Router, body::Body, routing::get};
use http::{Request, StatusCode};
use lock_runtime::{LockClient, LockError, LockErrorKind, distributed_lock};
use lock_tests::{
    Captured, RedisServer,
    place::{begun, in_time},
};
use lock_tower::{LockLayer, key};
use tower::ServiceExt as _;

use super::LONG;

static RAN: AtomicBool = AtomicBool::new(false);

#[distributed_lock(key = "job", global, no_wait, on_busy = skip)]
async fn job() -> Result<(), LockError> {
    RAN.store(true, Ordering::Relaxed);
    Ok(())
}

#[tokio::test]
async fn a_request_that_does_not_wait_gets_the_error_of_the_store() {
    in_time(async {
        let server = RedisServer::start().await;
        let traces = Captured::new();
        let _collecting = traces.set_default();
        let locks = LockClient::connect(&server.url()).await.unwrap();
        let route = get(|| async { "served" })
            .layer(LockLayer::with_key(locks.clone(), key::global("route").unwrap()).no_wait());
        let app = Router::new().route("/", route);
        server.stop();
        let mut waiting = Vec::new();
        for name in ["a", "job", "route"] {
            waiting.push(tokio::spawn(
                begun(locks.exclusive(name).wait(LONG).acquire()).await,
            ));
            traces
                .wait_for(|event| {
                    event.message == "waiting for the store" && event.fields["key"] == name
                })
                .await;
        }

        let a = || locks.exclusive("a");
        for result in [
            a().try_acquire().await.map(|guard| guard.is_some()),
            locks
                .shared("a")
                .try_acquire()
                .await
                .map(|guard| guard.is_some()),
            a().no_wait().acquire().await.map(|_| true),
            locks
                .all(["a", "b"])
                .try_acquire()
                .await
                .map(|guard| guard.is_some()),
            locks
                .all(["a", "b"])
                .no_wait()
                .acquire()
                .await
                .map(|_| true),
            a().no_wait().run(async |_| true).await,
        ] {
            assert_eq!(result.unwrap_err().kind(), LockErrorKind::Unavailable);
        }
        let skipped = locks.as_default(job()).await;
        assert_eq!(
            skipped.expect_err("the job is not skipped").kind(),
            LockErrorKind::Unavailable
        );
        let response = app
            .oneshot(Request::get("/").body(Body::empty()).unwrap())
            .await
            .unwrap();
        assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);

        server.resume();
        for task in waiting {
            task.await.unwrap().unwrap().release().await.unwrap();
        }
        locks.as_default(job()).await.unwrap();
        assert!(RAN.load(Ordering::Relaxed));
    })
    .await;
}
