//! gRPC calls under their lock: one at a time, and with the lock in the extensions.

use std::sync::Arc;

use futures_util::future::join_all;
use http::uri::PathAndQuery;
use lock_examples::inventory::{
    Item, inventory_client::InventoryClient, inventory_server::InventoryServer,
};
use lock_runtime::{
    FencingToken, HeldLock, LockClient, LockError, LockKey, distributed_lock, is_held,
};
use lock_tests::FencedResource;
use lock_tower::{HoldUntil, LockLayer};
use tonic::{
    Code, Status,
    service::{LayerExt, Routes},
    transport::Server,
};
use tonic_prost::ProstCodec;
use tower::{Layer, ServiceBuilder};

use super::{
    PROMPTLY,
    hall::{Served, hall, hall_with, item, pieces, reserve},
    is_free, items,
};

#[tokio::test]
async fn calls_for_one_key_are_served_one_after_another() {
    const CLIENTS: usize = 4;
    const CALLS: usize = 25;
    for hold in [HoldUntil::Response, HoldUntil::Body] {
        let locks = LockClient::in_memory();
        let stock = Arc::new(FencedResource::new());
        let increment = {
            let stock = stock.clone();
            move |held: HeldLock| {
                let stock = stock.clone();
                async move {
                    stock
                        .increment(held.fence())
                        .await
                        .map_err(|stale| Status::internal(stale.to_string()))
                }
            }
        };
        let (service, _entries) = hall_with(increment);
        let server = Served::under(items(&locks).hold_until(hold), service);
        let clients = join_all((0..CLIENTS).map(|_| server.client())).await;
        let calls = clients.iter().flat_map(|client| {
            (0..CALLS).map(|_| {
                let mut client = client.clone();
                async move { client.release(pieces("bolt")).await }
            })
        });
        for answer in join_all(calls).await {
            answer.unwrap();
        }
        let report = stock.report();
        assert!(report.is_clean(), "{report}");
        assert_eq!((report.value, report.peak), ((CLIENTS * CALLS) as u64, 1));
    }
}

#[tokio::test]
async fn calls_for_different_keys_are_served_at_the_same_time() {
    let locks = LockClient::in_memory();
    let (service, mut entries) = hall();
    let server = Served::under(items(&locks), service);
    let client = server.client().await;
    let calls = [reserve(&client, "bolt"), reserve(&client, "nut")];
    let (one, other) = (entries.reserve().await, entries.reserve().await);
    one.answer.send(Ok(())).unwrap();
    other.answer.send(Ok(())).unwrap();
    for call in calls {
        call.await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn the_lock_is_free_when_the_answer_is_there() {
    let locks = LockClient::in_memory();
    for hold in [HoldUntil::Response, HoldUntil::Body] {
        let lock = items(&locks).hold_until(hold);
        let (service, _entries) = hall();
        // Without a socket, no other task runs between the response and the next attempt.
        let mut here = InventoryClient::new(lock.layer(service.clone()));
        let server = Served::under(lock, service);
        let mut client = server.client().await;
        for _ in 0..100 {
            client.release(pieces("bolt")).await.unwrap();
            assert!(
                locks
                    .exclusive("item:bolt")
                    .try_acquire()
                    .await
                    .unwrap()
                    .is_some()
            );
            here.release(pieces("bolt")).await.unwrap();
            assert!(
                locks
                    .exclusive("item:bolt")
                    .try_acquire()
                    .await
                    .unwrap()
                    .is_some()
            );
        }
    }
}

#[distributed_lock(key = "item:{item}", reentrant, no_wait, client = locks)]
async fn inside(locks: &LockClient, item: &str) -> Result<FencingToken, LockError> {
    assert!(is_held(&LockKey::new(format!("item:{item}"))?));
    Ok(locks
        .reentrant(format!("item:{item}"))
        .no_wait()
        .acquire()
        .await?
        .fence())
}

#[tokio::test]
async fn a_handler_enters_the_lock_of_its_call_again() {
    let locks = LockClient::in_memory();
    let again = {
        let locks = locks.clone();
        move |held: HeldLock| {
            let locks = locks.clone();
            async move {
                assert_eq!(held.key().as_str(), "item:bolt");
                assert_eq!(inside(&locks, "bolt").await.unwrap(), held.fence());
                // The release of a re-entered guard did not release the lock.
                held.verify().await.unwrap();
                Ok(())
            }
        }
    };
    let (service, _entries) = hall_with(again);
    let server = Served::under(items(&locks), service);
    server.client().await.release(pieces("bolt")).await.unwrap();
    assert!(is_free(&locks, "bolt").await);
}

#[tokio::test]
async fn service_and_method_make_a_key() {
    let locks = LockClient::in_memory();
    let lock = LockLayer::new(locks.clone(), "{grpc.service}:{grpc.method}")
        .unwrap()
        .wait(PROMPTLY)
        .hold_until(HoldUntil::Body);
    let (service, mut entries) = hall();
    let server = Served::under(lock, service);
    let mut client = server.client().await;
    let reserving = reserve(&client, "bolt");
    let entry = entries.reserve().await;
    assert_eq!(
        entry.held.unwrap().key().as_str(),
        "inventory.v1.Inventory:Reserve"
    );
    // Another method has another lock, even for the same item.
    let places = client.count_stock(item("bolt")).await.unwrap();
    assert_eq!(
        entries.count().await.held.unwrap().key().as_str(),
        "inventory.v1.Inventory:CountStock"
    );
    drop(places);
    entry.answer.send(Ok(())).unwrap();
    reserving.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_layer_goes_around_one_service_and_not_the_others() {
    let locks = LockClient::in_memory();
    let lock = items(&locks).no_wait();
    let (service, _entries) = hall();
    let around_one = ServiceBuilder::new()
        .layer(lock.clone())
        .named_layer(service.clone());
    let routes = Routes::new(lock.named_layer(service));
    let _held = locks.exclusive("item:bolt").acquire().await.unwrap();
    for server in [
        Served::by(|incoming| {
            Server::builder()
                .add_service(around_one)
                .serve_with_incoming(incoming)
        }),
        Served::by(|incoming| {
            Server::builder()
                .add_routes(routes)
                .serve_with_incoming(incoming)
        }),
    ] {
        let mut client = server.client().await;
        assert_eq!(
            client.release(pieces("bolt")).await.unwrap_err().code(),
            Code::Aborted
        );
        client.release(pieces("nut")).await.unwrap();
        // Calls to other services do not acquire the lock.
        let mut stranger = tonic::client::Grpc::new(server.channel().await);
        stranger.ready().await.unwrap();
        let codec = ProstCodec::<Item, Item>::default();
        let path = PathAndQuery::from_static("/another.Service/Method");
        let status = stranger.unary(item("bolt"), path, codec).await.unwrap_err();
        assert_eq!(status.code(), Code::Unimplemented);
    }
}

#[tokio::test]
async fn a_service_under_its_lock_is_served_by_a_router_of_axum() {
    let locks = LockClient::in_memory();
    let (service, _entries) = hall();
    let router = Routes::new(service)
        .into_axum_router()
        .layer(items(&locks).no_wait());
    let server = Served::by(|incoming| {
        Server::builder().serve_with_incoming(Routes::from(router), incoming)
    });
    let mut client = server.client().await;
    let held = locks.exclusive("item:bolt").acquire().await.unwrap();
    assert_eq!(
        client.release(pieces("bolt")).await.unwrap_err().code(),
        Code::Aborted
    );
    held.release().await.unwrap();
    client.release(pieces("bolt")).await.unwrap();
}

/// The service and its future satisfy tonic's bounds without boxing: this compiles.
#[test]
fn a_locked_service_is_one_that_tonic_serves() {
    fn is_served<
        S: tonic::codegen::Service<http::Request<tonic::body::Body>> + Clone + Send + Sync + 'static,
    >(
        _: &S,
    ) where
        S::Response: axum::response::IntoResponse,
        S::Future: Send + 'static,
    {
    }
    let (service, _entries): (InventoryServer<_>, _) = hall();
    is_served(&items(&LockClient::in_memory()).layer(service));
}
