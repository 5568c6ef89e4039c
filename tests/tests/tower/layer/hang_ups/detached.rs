//! Disconnects under a [`DetachLayer`](lock_tower::DetachLayer): a request that has begun continues
//! without its client.

use lock_tower::HoldUntil;

use super::{Scene, dropped};
use crate::layer::{
    client::{Http, over_both_versions},
    frames::{body_of, data},
};
use lock_tests::place::eventually;

over_both_versions!(
    in_line_it_waits_and_is_served,
    before_the_inner_service_is_ready_it_waits_and_is_served,
    in_the_handler_it_goes_on_under_its_lock,
    a_release_that_is_under_way_goes_on,
    a_body_ends_with_its_client,
);

async fn in_line_it_waits_and_is_served(http: Http) {
    let mut scene = Scene::detached(http, HoldUntil::Response).await;
    let held = scene.locks.exclusive("order:7").acquire().await.unwrap();
    let (call, end) = scene.call("/orders/7").await;
    let (behind, _) = scene.call("/orders/7").await;
    call.hang_up().await;
    dropped(end).await;
    held.release().await.unwrap();
    scene.entered().await.answer("unsent");
    scene.ends_with(behind).await;
}

async fn before_the_inner_service_is_ready_it_waits_and_is_served(http: Http) {
    let mut scene = Scene::detached(http, HoldUntil::Response).await;
    let (other, _) = scene.call("/orders/1").await;
    let takes_the_capacity = scene.entered().await;
    let (call, end) = scene.call("/orders/7").await;
    eventually("the lock is granted", || scene.is_held("order:7")).await;
    let (behind, _) = scene.call("/orders/7").await;
    call.hang_up().await;
    dropped(end).await;
    takes_the_capacity.answer("");
    assert_eq!(other.response().await.unwrap().status(), 200);
    scene.entered().await.answer("unsent");
    scene.ends_with(behind).await;
}

async fn in_the_handler_it_goes_on_under_its_lock(http: Http) {
    // With `HoldUntil::Body`, the lock is released when the unsent response is dropped.
    for hold in [HoldUntil::Response, HoldUntil::Body] {
        let mut scene = Scene::detached(http, hold).await;
        let (call, end) = scene.call("/orders/7").await;
        let mut entry = scene.entered().await;
        let (behind, _) = scene.call("/orders/7").await;
        call.hang_up().await;
        dropped(end).await;
        assert!(
            entry
                .end
                .try_recv()
                .is_err_and(|error| error == tokio::sync::oneshot::error::TryRecvError::Empty)
        );
        assert!(!entry.lock.is_lost() && scene.is_held("order:7").await);
        let (_frames, body) = body_of();
        entry.answer(body);
        scene.ends_with(behind).await;
    }
}

async fn a_release_that_is_under_way_goes_on(http: Http) {
    let mut scene = Scene::detached(http, HoldUntil::Response).await;
    scene.stop_releases(true);
    let (call, end) = scene.call("/orders/7").await;
    scene.entered().await.answer("paid");
    scene.releases(1).await;
    let (behind, _) = scene.call("/orders/7").await;
    call.hang_up().await;
    dropped(end).await;
    assert!(scene.is_held("order:7").await);
    scene.stop_releases(false);
    scene.ends_with(behind).await;
}

async fn a_body_ends_with_its_client(http: Http) {
    let mut scene = Scene::detached(http, HoldUntil::Body).await;
    let (call, _) = scene.call("/orders/7").await;
    let (frames, body) = body_of();
    scene.entered().await.answer(body);
    let (behind, _) = scene.call("/orders/7").await;
    let mut response = call.response().await.unwrap();
    frames.send(data("a")).await.unwrap();
    assert_eq!(response.chunk().await.unwrap().unwrap(), "a");
    drop(response);
    frames.closed().await;
    scene.ends_with(behind).await;
}
