//! The owner of a lock: a function under a layer, under another function, beside one, and in a
//! spawned task.

use axum::{Router, body::Body, extract::Path, routing::post};
use http::{Request, StatusCode};
use lock_runtime::{FencingToken, LockClient, LockError, LockErrorKind, distributed_lock};
use lock_tower::LockLayer;
use tokio::task::yield_now;
use tower::ServiceExt;

use super::{holders, with_client};

#[distributed_lock(key = "order:{id}", reentrant, held = lock)]
async fn charge(id: u64) -> Result<FencingToken, LockError> {
    yield_now().await;
    Ok(lock.fence())
}

#[distributed_lock(key = "order:{id}", wait = "50ms")]
async fn charge_once(id: u64) -> Result<u64, LockError> {
    yield_now().await;
    Ok(id)
}

#[distributed_lock(key = "order:{id}", held = lock)]
async fn pay(id: u64) -> Result<(FencingToken, FencingToken), LockError> {
    Ok((lock.fence(), charge(id).await?))
}

async fn handler(Path(id): Path<u64>, lock: lock_runtime::HeldLock) -> Result<String, LockError> {
    assert_eq!(
        charge_once(id).await.unwrap_err().kind(),
        LockErrorKind::WouldDeadlock
    );
    assert_eq!(charge(id).await?, lock.fence());
    Ok("paid".to_owned())
}

#[tokio::test(start_paused = true)]
async fn a_function_under_a_layer_enters_the_lock_of_the_route() {
    with_client(async |locks| {
        let layer = LockLayer::new(locks.clone(), "order:{id}").unwrap();
        let app: Router = Router::new().route("/orders/{id}/pay", post(handler).layer(layer));
        let request = Request::post("/orders/7/pay").body(Body::empty()).unwrap();
        assert_eq!(app.oneshot(request).await.unwrap().status(), StatusCode::OK);
        assert_eq!(holders(locks, "order:7").await, 0);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_function_under_a_function_enters_its_lock_under_its_token() {
    with_client(async |locks| {
        let (outer, inner) = pay(7).await.unwrap();
        assert_eq!(outer, inner);
        assert_eq!(holders(locks, "order:7").await, 0);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn functions_side_by_side_are_strangers() {
    with_client(async |locks| {
        // Re-entrant or not, they run one after the other, under different tokens.
        let (one, two) = tokio::join!(charge(7), charge(7));
        assert_ne!(one.unwrap(), two.unwrap());
        let within = locks.exclusive("order:7").run(async |held| {
            let (one, two) = tokio::join!(charge(7), charge(7));
            (held.fence(), one.unwrap(), two.unwrap())
        });
        let (outer, one, two) = within.await.unwrap();
        assert_eq!((one, two), (outer, outer), "within a lock both enter it");
    })
    .await;
}

#[distributed_lock(key = "order:{id}", held = lock, client = locks)]
async fn spawning(locks: LockClient, id: u64) -> Result<(), LockError> {
    // A spawned task has neither the client of the scope nor the lock.
    let error = tokio::spawn(charge(id)).await.unwrap().unwrap_err();
    assert_eq!(error.kind(), LockErrorKind::NoClient);
    let stranger = locks.clone();
    let stranger = tokio::spawn(async move { stranger.as_default(charge_once(id)).await });
    assert_eq!(
        stranger.await.unwrap().unwrap_err().kind(),
        LockErrorKind::WaitTimeout
    );

    // A task whose future is scoped to both has them.
    let (child, held) = (locks.clone(), lock.clone());
    let child = tokio::spawn(async move { child.as_default(held.scope(charge(id))).await });
    assert_eq!(child.await.unwrap()?, lock.fence());
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_spawned_task_has_no_part_in_the_hold_by_default() {
    with_client(async |locks| {
        spawning(locks.clone(), 7).await.unwrap();
        assert_eq!(holders(locks, "order:7").await, 0);
    })
    .await;
}

#[distributed_lock(key = "order:{id}", held = lock, client = locks)]
async fn leaving_a_child(
    locks: LockClient,
    id: u64,
) -> Result<tokio::task::JoinHandle<()>, LockError> {
    let (child, held) = (locks.clone(), lock.clone());
    let (entered, is_in) = tokio::sync::oneshot::channel();
    let child = tokio::spawn(async move {
        let work = locks.reentrant(held.key()).run(async |_| {
            entered.send(()).unwrap();
            for _ in 0..10 {
                yield_now().await;
            }
            assert_eq!(
                holders(&child, "order:7").await,
                1,
                "it keeps the lock of its parent"
            );
        });
        held.scope(work).await.unwrap();
    });
    is_in.await.unwrap();
    Ok(child)
}

#[tokio::test(start_paused = true)]
async fn a_child_that_has_entered_keeps_the_lock_until_it_is_done() {
    with_client(async |locks| {
        let child = leaving_a_child(locks.clone(), 7).await.unwrap();
        let next = locks.exclusive("order:7").acquire();
        tokio::join!(async { child.await.unwrap() }, async {
            next.await.unwrap().release().await.unwrap()
        });
    })
    .await;
}
