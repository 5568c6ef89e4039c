//! gRPC callers that reset a stream or close the connection, at every stage of a call.

use std::{convert::Infallible, fmt::Debug};

use lock_runtime::LockClient;
use lock_tower::{DetachLayer, HoldUntil};
use tokio::{
    sync::{mpsc, oneshot},
    task::JoinHandle,
};
use tonic::transport::Server;
use tower::util::MapFutureLayer;

use super::{
    freed,
    hall::{Client, Served, hall, item, reserve},
    is_free, items,
};
use lock_tests::place::{begun, in_time};

/// The ways to disconnect.
const WAYS: [Way; 2] = [Way::Resets, Way::Disconnects];

#[derive(Clone, Copy)]
enum Way {
    Resets,
    Disconnects,
}

impl Way {
    /// Cancels `call`, and drops its client and so the connection for [`Way::Disconnects`].
    async fn hang_up<T>(self, call: JoinHandle<T>, client: Client) -> Option<Client> {
        call.abort();
        assert!(
            call.await.is_err_and(|error| error.is_cancelled()),
            "the call has ended"
        );
        match self {
            Self::Resets => Some(client),
            Self::Disconnects => None,
        }
    }
}

/// Resolves when the server has dropped a request.
type Gone = oneshot::Receiver<Infallible>;

/// Runs `request`, and reports it once it has begun to wait.
async fn watched<F: Future<Output: Debug>>(
    requests: mpsc::UnboundedSender<Gone>,
    request: F,
) -> F::Output {
    let request = begun(request).await;
    let (_alive, gone) = oneshot::channel();
    requests.send(gone).unwrap();
    request.await
}

#[tokio::test]
async fn a_caller_that_hangs_up_in_the_line_gives_up_its_place() {
    for way in WAYS {
        let locks = LockClient::in_memory();
        let (service, mut entries) = hall();
        let (waiting, mut requests) = mpsc::unbounded_channel();
        let watch = MapFutureLayer::new(move |request| watched(waiting.clone(), request));
        let server = Server::builder()
            .layer(watch)
            .layer(items(&locks))
            .add_service(service);
        let server = Served::by(|incoming| server.serve_with_incoming(incoming));
        let held = locks.exclusive("item:bolt").acquire().await.unwrap();
        let client = server.client().await;
        let call = reserve(&client, "bolt");
        let gone = in_time(requests.recv()).await.unwrap();
        let client = way.hang_up(call, client).await;
        assert!(in_time(gone).await.is_err());
        held.release().await.unwrap();
        freed(&locks, "bolt").await;
        assert!(entries.entered().is_none());
        if let Some(client) = client {
            let call = reserve(&client, "bolt");
            entries.reserve().await.answer.send(Ok(())).unwrap();
            call.await.unwrap().unwrap();
        }
    }
}

#[tokio::test]
async fn a_caller_that_hangs_up_frees_the_lock_of_its_handler() {
    for way in WAYS {
        let locks = LockClient::in_memory();
        let (service, mut entries) = hall();
        let server = Served::under(items(&locks), service);
        let client = server.client().await;
        let call = reserve(&client, "bolt");
        let mut entry = entries.reserve().await;
        assert!(!is_free(&locks, "bolt").await);
        let _client = way.hang_up(call, client).await;
        in_time(entry.answer.closed()).await;
        freed(&locks, "bolt").await;
        assert!(!entry.held.unwrap().is_lost());
    }
}

#[tokio::test]
async fn a_caller_that_drops_a_stream_frees_its_lock() {
    for way in WAYS {
        let locks = LockClient::in_memory();
        let (service, mut entries) = hall();
        let server = Served::under(items(&locks).hold_until(HoldUntil::Body), service);
        let mut client = server.client().await;
        let places = client.count_stock(item("bolt")).await.unwrap().into_inner();
        let counting = entries.count().await;
        assert!(!is_free(&locks, "bolt").await);
        let reading = tokio::spawn(async move {
            let mut places = places;
            places.message().await
        });
        let _client = way.hang_up(reading, client).await;
        in_time(counting.places.closed()).await;
        freed(&locks, "bolt").await;
        assert!(!counting.held.unwrap().is_lost());
    }
}

#[tokio::test]
async fn layer_detached_finishes_under_its_lock_without_its_caller() {
    for way in WAYS {
        let locks = LockClient::in_memory();
        let (service, mut entries) = hall();
        let (waiting, mut requests) = mpsc::unbounded_channel();
        let watch = MapFutureLayer::new(move |request| watched(waiting.clone(), request));
        let server = Server::builder()
            .layer(watch)
            .layer(DetachLayer::new())
            .layer(items(&locks))
            .add_service(service);
        let server = Served::by(|incoming| server.serve_with_incoming(incoming));
        let client = server.client().await;
        let call = reserve(&client, "bolt");
        let gone = in_time(requests.recv()).await.unwrap();
        let entry = entries.reserve().await;
        let _client = way.hang_up(call, client).await;
        assert!(in_time(gone).await.is_err());
        assert!(!entry.answer.is_closed());
        assert!(!is_free(&locks, "bolt").await);
        entry.answer.send(Ok(())).unwrap();
        freed(&locks, "bolt").await;
    }
}
