//! Disconnects up to the head of the response.

use lock_tower::HoldUntil;

use super::{Scene, dropped};
use crate::layer::client::{Http, over_both_versions};
use lock_tests::place::eventually;

over_both_versions!(
    in_line_a_place_is_given_up,
    before_the_inner_service_is_ready_the_lock_is_freed,
    in_the_handler_the_lock_is_freed,
    a_release_that_is_under_way_goes_on,
    all_at_once_leave_nothing,
);

async fn in_line_a_place_is_given_up(http: Http) {
    let mut scene = Scene::of(http, HoldUntil::Response).await;
    let held = scene.locks.exclusive("order:7").acquire().await.unwrap();
    let (call, end) = scene.call("/orders/7").await;
    let (behind, _) = scene.call("/orders/7").await;
    call.hang_up().await;
    dropped(end).await;
    held.release().await.unwrap();
    scene.ends_with(behind).await;
}

async fn before_the_inner_service_is_ready_the_lock_is_freed(http: Http) {
    let mut scene = Scene::of(http, HoldUntil::Response).await;
    let (other, _) = scene.call("/orders/1").await;
    let takes_the_capacity = scene.entered().await;
    let (call, end) = scene.call("/orders/7").await;
    eventually("the lock is granted", || scene.is_held("order:7")).await;
    let (behind, _) = scene.call("/orders/7").await;
    call.hang_up().await;
    dropped(end).await;
    takes_the_capacity.answer("");
    assert_eq!(other.response().await.unwrap().status(), 200);
    scene.ends_with(behind).await;
}

async fn in_the_handler_the_lock_is_freed(http: Http) {
    let mut scene = Scene::of(http, HoldUntil::Response).await;
    let (call, end) = scene.call("/orders/7").await;
    let entry = scene.entered().await;
    let (behind, _) = scene.call("/orders/7").await;
    call.hang_up().await;
    dropped(end).await;
    dropped(entry.end).await;
    scene.ends_with(behind).await;
}

async fn a_release_that_is_under_way_goes_on(http: Http) {
    for (hold, body) in [
        (HoldUntil::Response, "paid"),
        (HoldUntil::Body, "paid"),
        (HoldUntil::Body, ""),
    ] {
        let mut scene = Scene::of(http, hold).await;
        scene.stop_releases(true);
        let (call, end) = scene.call("/orders/7").await;
        scene.entered().await.answer(body);
        scene.releases(1).await;
        let (behind, _) = scene.call("/orders/7").await;
        match (hold, body) {
            // The head has arrived, and the only frame of the body waits for the release.
            (HoldUntil::Body, "paid") => drop(call.response().await.unwrap()),
            _ => {
                call.hang_up().await;
                dropped(end).await;
            }
        }
        // The dropped request no longer awaits its release; the lock client repeats it.
        scene.releases(2).await;
        assert!(scene.is_held("order:7").await);
        scene.stop_releases(false);
        scene.ends_with(behind).await;
    }
}

/// Several requests at each stage disconnect at the same time.
async fn all_at_once_leave_nothing(http: Http) {
    let mut scene = Scene::of(http, HoldUntil::Response).await;
    let mut calls = vec![scene.call("/orders/7").await];
    let entry = scene.entered().await;
    for path in ["/orders/7", "/orders/7", "/orders/8", "/orders/8"] {
        calls.push(scene.call(path).await);
    }
    eventually("the other lock is granted", || scene.is_held("order:8")).await;
    let ends = calls.into_iter().map(|(call, end)| async {
        call.hang_up().await;
        dropped(end).await;
    });
    futures_util::future::join_all(ends).await;
    dropped(entry.end).await;
    // Requests that reached their handler just before they disconnected.
    while scene.entries.try_recv().is_ok() {}
    scene.ends().await;
}
