//! Bidirectional streams under one lock, until the trailers.

use std::convert::Infallible;

use http::uri::PathAndQuery;
use lock_examples::inventory::Item;
use lock_runtime::LockClient;
use lock_tower::HoldUntil;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Request, Response, Status, Streaming, body::Body, transport::Server};
use tonic_prost::ProstCodec;
use tower::service_fn;

use super::{
    freed,
    hall::{Served, of},
    is_free, items,
};
use lock_tests::place::in_time;

/// A server that returns each message of a stream.
fn echo(locks: &LockClient) -> Served {
    let echo = |request: Request<Streaming<Item>>| async {
        Ok::<_, Status>(Response::new(request.into_inner()))
    };
    let service = service_fn(move |request: http::Request<Body>| async move {
        let mut grpc = tonic::server::Grpc::new(ProstCodec::default());
        Ok::<_, Infallible>(grpc.streaming(service_fn(echo), request).await)
    });
    let lock = items(locks).hold_until(HoldUntil::Body);
    Served::by(|incoming| {
        Server::builder()
            .layer(lock)
            .serve_with_incoming(service, incoming)
    })
}

async fn call(server: &Served) -> (mpsc::Sender<Item>, Streaming<Item>) {
    let (say, said) = mpsc::channel(1);
    let mut client = tonic::client::Grpc::new(server.channel().await);
    client.ready().await.unwrap();
    let path = PathAndQuery::from_static("/test.Echo/Echo");
    let codec = ProstCodec::<Item, Item>::default();
    let heard = client
        .streaming(of("bolt", ReceiverStream::new(said)), path, codec)
        .await
        .unwrap();
    (say, heard.into_inner())
}

async fn says(say: &mpsc::Sender<Item>, heard: &mut Streaming<Item>, text: &str) {
    say.send(Item {
        item: text.to_owned(),
    })
    .await
    .unwrap();
    assert_eq!(in_time(heard.message()).await.unwrap().unwrap().item, text);
}

#[tokio::test]
async fn a_call_keeps_its_lock_while_both_sides_speak() {
    let locks = LockClient::in_memory();
    let server = echo(&locks);
    let (say, mut heard) = call(&server).await;
    for text in ["one", "two"] {
        says(&say, &mut heard, text).await;
        assert!(!is_free(&locks, "bolt").await);
    }
    drop(say);
    assert!(in_time(heard.message()).await.unwrap().is_none());
    assert!(is_free(&locks, "bolt").await);
}

#[tokio::test]
async fn a_lost_lock_ends_a_call_both_ways() {
    let locks = LockClient::in_memory();
    let server = echo(&locks);
    let (say, mut heard) = call(&server).await;
    says(&say, &mut heard, "one").await;
    locks.revoke("item:bolt").await.unwrap();
    assert_eq!(
        in_time(heard.message()).await.unwrap_err().code(),
        Code::Aborted
    );
    in_time(say.closed()).await;
}

#[tokio::test]
async fn a_caller_that_hangs_up_while_it_speaks_frees_the_lock() {
    let locks = LockClient::in_memory();
    let server = echo(&locks);
    let (say, mut heard) = call(&server).await;
    says(&say, &mut heard, "one").await;
    // The client resets the stream once both halves are dropped.
    drop((say, heard));
    freed(&locks, "bolt").await;
}
