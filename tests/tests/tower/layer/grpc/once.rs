//! Unary calls that are served once for each key, and whose response is repeated.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use futures_util::future::join_all;
use lock_examples::inventory::Pieces;
use lock_runtime::LockClient;
use lock_tower::OnceLayer;
use tonic::{Code, Request, Status, metadata::MetadataValue, transport::Server};

use super::hall::{Served, hall, hall_with, item};
use lock_tests::place::in_time;

fn keyed(key: &'static str, quantity: u64) -> Request<Pieces> {
    let mut request = Request::new(Pieces {
        item: "bolt".to_owned(),
        quantity,
    });
    let metadata = request.metadata_mut();
    metadata.insert("x-user", MetadataValue::from_static("7"));
    metadata.insert("idempotency-key", MetadataValue::from_static(key));
    request
}

fn layered(layer: OnceLayer, service: super::hall::Service) -> Served {
    Served::by(move |incoming| {
        let server = Server::builder().layer(layer).add_service(service);
        server.serve_with_incoming(incoming)
    })
}

/// tonic repeats the trailers of an error for as long as it is polled.
#[tokio::test]
async fn a_stream_of_errors_ends_with_the_first() {
    let (service, mut entries) = hall();
    let key = "count:{header.x-item}";
    let layer = OnceLayer::new(LockClient::in_memory(), key).unwrap();
    let server = layered(layer, service);
    let client = server.client().await;
    let counting = tokio::spawn({
        let mut client = client.clone();
        async move {
            client
                .count_stock(item("bolt"))
                .await
                .map(|it| it.into_inner())
        }
    });
    let entry = entries.count().await;
    let places = entry.places;
    tokio::spawn(async move {
        while places
            .send(Err(Status::not_found("no place")))
            .await
            .is_ok()
        {}
    });
    let mut stream = in_time(counting).await.unwrap().unwrap();
    let error = in_time(stream.message()).await.unwrap_err();
    assert_eq!(
        (error.code(), error.message()),
        (Code::NotFound, "no place")
    );
    // The status is a part of the result.
    let mut client = client.clone();
    let again = client.count_stock(item("bolt"));
    let mut again = in_time(again).await.unwrap().into_inner();
    let error = in_time(again.message()).await.unwrap_err();
    assert_eq!(
        (error.code(), error.message()),
        (Code::NotFound, "no place")
    );
}

#[tokio::test]
async fn calls_with_one_key_run_once() {
    let runs = Arc::new(AtomicUsize::new(0));
    let counted = runs.clone();
    let (service, _entries) = hall_with(move |_held| {
        let run = counted.fetch_add(1, Ordering::Relaxed);
        async move {
            match run {
                0 => Ok(()),
                1 => Err(Status::failed_precondition("sold out")),
                _ => Err(Status::unavailable("later")),
            }
        }
    });
    let key = "release:{header.x-user}:{header.idempotency-key}";
    let layer = OnceLayer::new(LockClient::in_memory(), key).unwrap();
    let layer = layer.max_request(64);
    let server = layered(layer, service);
    let client = server.client().await;
    let call = async |key, quantity| client.clone().release(keyed(key, quantity)).await;

    let answers = join_all((0..10).map(|_| call("a", 1))).await;
    let replays = answers.into_iter().map(|answer| {
        let answer = answer.unwrap();
        answer.metadata().contains_key("idempotent-replayed")
    });
    assert_eq!(replays.filter(|is_replay| *is_replay).count(), 9);
    assert_eq!(runs.load(Ordering::Relaxed), 1);
    let reused = call("a", 2).await.unwrap_err();
    assert_eq!(reused.code(), Code::InvalidArgument, "{reused}");

    // An error is a response as well, unless another attempt may end differently.
    for _ in 0..2 {
        let error = call("b", 1).await.unwrap_err();
        assert_eq!(
            (error.code(), error.message()),
            (Code::FailedPrecondition, "sold out")
        );
        assert_eq!(runs.load(Ordering::Relaxed), 2);
    }
    for run in 3..5 {
        let error = call("c", 1).await.unwrap_err();
        assert_eq!(
            (error.code(), runs.load(Ordering::Relaxed)),
            (Code::Unavailable, run)
        );
    }

    let mut long = keyed("d", 1);
    long.get_mut().item = "x".repeat(100);
    let error = client.clone().release(long).await.unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument, "{error}");
    // Without the metadata there is no key.
    let error = client.clone().count_stock(item("bolt")).await.unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument, "{error}");
}
