//! Streams that are sent under the lock.

use lock_examples::inventory::Place;
use lock_runtime::LockClient;
use lock_tower::{HoldUntil, LockLayer, Policy};
use tokio::time::{Instant, pause};
use tonic::{Code, Status, Streaming};
use tonic_types::StatusExt;

use super::{
    PROMPTLY, freed,
    hall::{Counting, Entries, Served, hall, item},
    is_free, items,
};
use lock_tests::place::in_time;

fn streams(locks: &LockClient) -> LockLayer {
    items(locks).hold_until(HoldUntil::Body)
}

/// Starts a stream.
async fn begin(server: &Served, entries: &mut Entries) -> (Streaming<Place>, Counting) {
    let places = server
        .client()
        .await
        .count_stock(item("bolt"))
        .await
        .unwrap()
        .into_inner();
    (places, entries.count().await)
}

fn place(name: impl Into<String>) -> Result<Place, Status> {
    Ok(Place {
        name: name.into(),
        quantity: 0,
    })
}

async fn next(places: &mut Streaming<Place>) -> Result<Option<String>, Status> {
    let message = tokio::time::timeout(PROMPTLY, places.message())
        .await
        .expect("the stream goes on");
    message.map(|place| place.map(|place| place.name))
}

#[tokio::test]
async fn a_stream_keeps_the_lock_until_its_trailers() {
    let locks = LockClient::in_memory();
    let (service, mut entries) = hall();
    let server = Served::under(streams(&locks), service);
    let (mut places, counting) = begin(&server, &mut entries).await;
    let held = counting.held.unwrap();
    for name in ["shelf", "box"] {
        counting.places.send(place(name)).await.unwrap();
        assert_eq!(next(&mut places).await.unwrap().unwrap(), name);
        assert!(!is_free(&locks, "bolt").await, "the stream has not ended");
        assert!(!held.validity().is_zero());
    }
    drop(counting.places);
    assert_eq!(next(&mut places).await.unwrap(), None);
    assert!(
        is_free(&locks, "bolt").await,
        "the release was awaited before the trailers"
    );
}

#[tokio::test]
async fn a_stream_that_fails_frees_the_lock_and_says_why() {
    let locks = LockClient::in_memory();
    let (service, mut entries) = hall();
    let server = Served::under(streams(&locks), service);
    let (mut places, counting) = begin(&server, &mut entries).await;
    counting
        .places
        .send(Err(Status::data_loss("a box is gone")))
        .await
        .unwrap();
    let status = next(&mut places).await.unwrap_err();
    assert_eq!(
        (status.code(), status.message()),
        (Code::DataLoss, "a box is gone")
    );
    assert!(
        is_free(&locks, "bolt").await,
        "the release was awaited before the trailers"
    );
}

#[tokio::test]
async fn by_default_a_stream_is_sent_without_the_lock() {
    let locks = LockClient::in_memory();
    let (service, mut entries) = hall();
    let server = Served::under(items(&locks), service);
    let (mut places, counting) = begin(&server, &mut entries).await;
    assert!(is_free(&locks, "bolt").await);
    counting.places.send(place("shelf")).await.unwrap();
    assert_eq!(next(&mut places).await.unwrap().unwrap(), "shelf");
}

/// A client that reads slowly keeps the lock until the last message has been sent.
#[tokio::test]
async fn a_slow_reader_is_read_out_under_the_lock() {
    /// Messages of 1 MiB each. Half of them are larger than the client's window and all buffers.
    const PLACES: usize = 32;
    let locks = LockClient::in_memory();
    let (service, mut entries) = hall();
    let server = Served::under(streams(&locks), service);
    let (mut places, counting) = begin(&server, &mut entries).await;
    let held = counting.held.unwrap();
    let name = "x".repeat(1 << 20);
    let sending = tokio::spawn(async move {
        for _ in 0..PLACES {
            counting.places.send(place(name.clone())).await.unwrap();
        }
    });
    for number in 1..=PLACES {
        assert!(next(&mut places).await.unwrap().is_some());
        if number <= PLACES / 2 {
            assert!(!sending.is_finished(), "the server waits for the reader");
            assert!(!held.validity().is_zero());
        }
    }
    assert_eq!(next(&mut places).await.unwrap(), None);
    assert!(is_free(&locks, "bolt").await);
}

/// Nothing is said about `max_hold`.
#[tokio::test]
async fn a_stream_that_goes_on_for_a_minute_ends_with_aborted() {
    let locks = LockClient::in_memory();
    let (service, mut entries) = hall();
    let server = Served::under(streams(&locks), service);
    let (mut places, counting) = begin(&server, &mut entries).await;
    pause();
    let since = Instant::now();
    let status = in_time(places.message()).await.unwrap_err();
    assert_eq!(status.code(), Code::Aborted, "{status:?}");
    let took = since.elapsed();
    assert!(
        Policy::DEFAULT_MAX_HOLD - PROMPTLY < took && took < Policy::DEFAULT_MAX_HOLD + PROMPTLY,
        "{took:?}"
    );
    assert!(counting.places.is_closed(), "the stream is dropped");
    freed(&locks, "bolt").await;
}

#[tokio::test]
async fn layer_ends_a_stream_whose_lock_is_lost_with_aborted() {
    let locks = LockClient::in_memory();
    let (service, mut entries) = hall();
    let server = Served::under(streams(&locks), service);
    for begun in [false, true] {
        let (mut places, counting) = begin(&server, &mut entries).await;
        if begun {
            counting.places.send(place("shelf")).await.unwrap();
            assert_eq!(next(&mut places).await.unwrap().unwrap(), "shelf");
        }
        locks.revoke("item:bolt").await.unwrap();
        let status = next(&mut places).await.unwrap_err();
        assert_eq!(status.code(), Code::Aborted, "{status:?}");
        assert!(
            status.message().contains("may have had effects") && !status.message().contains("bolt"),
            "{status:?}"
        );
        assert!(
            status.get_details_retry_info().is_none(),
            "a retry is suggested: {status:?}"
        );
        in_time(counting.places.closed()).await;
        assert_eq!(
            next(&mut places).await.unwrap_or_default(),
            None,
            "nothing comes after it"
        );
        freed(&locks, "bolt").await;
    }
}
