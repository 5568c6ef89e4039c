//! Messages of a role that may neither read the records nor call a function.

use std::{
    collections::HashSet,
    future::poll_fn,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::Duration,
};

use futures_util::future::join_all;
use lock_runtime::{
    LockClient,
    operator::{ClientId, Identity},
    store::Instant,
};
use rand::RngExt as _;
use tokio::{
    sync::mpsc,
    time::{sleep, timeout},
};
use tokio_postgres::{AsyncMessage, NoTls};

use super::{
    super::{role, url_as},
    client_of_new_database, held,
};
use lock_tests::place::{LONG, in_time};

const TURNS: Duration = Duration::from_secs(8);
const LEASE: Duration = Duration::from_secs(1);

async fn id(locks: &LockClient, key: &str) -> ClientId {
    let _guard = held(locks, key).await;
    match locks.inspect(key).await.unwrap().holders[0].client {
        Identity::Client { id, .. } => id,
        _ => unreachable!("a client of this library"),
    }
}

/// The message with another character somewhere, or as it is.
fn altered(message: &str) -> String {
    const DIGITS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut bytes = message.as_bytes().to_vec();
    let place = rand::random_range(0..bytes.len() * 2);
    if let Some(byte) = bytes.get_mut(place) {
        *byte = DIGITS[rand::random_range(0..DIGITS.len())];
    }
    String::from_utf8(bytes).unwrap()
}

/// Listens to the channels of clients, and repeats each message to all of them, some altered, at
/// once and later. Returns the number of messages that it has received.
async fn deceive(url: String, clients: Vec<ClientId>, until: Instant) -> usize {
    let (stranger, mut connection) = tokio_postgres::connect(&url, NoTls).await.unwrap();
    let (received, mut messages) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Some(message) = poll_fn(|cx| connection.poll_message(cx)).await {
            if let Ok(AsyncMessage::Notification(message)) = message {
                let _ = received.send(message);
            }
        }
    });
    let stranger = Arc::new(stranger);
    let channels: Vec<_> = clients
        .iter()
        .map(|id| format!("lock_runtime_{id}"))
        .collect();
    for channel in &channels {
        stranger
            .batch_execute(&format!("listen {channel}"))
            .await
            .unwrap();
    }
    let (mut seen, mut sent) = (0, HashSet::new());
    while Instant::now() < until {
        let next = timeout(Duration::from_millis(100), messages.recv());
        let Ok(Some(message)) = next.await else {
            continue;
        };
        // Its own messages come back as well.
        if sent.contains(message.payload()) {
            continue;
        }
        seen += 1;
        for channel in channels.clone() {
            let (one, other) = (altered(message.payload()), altered(message.payload()));
            sent.extend([one.clone(), other.clone()]);
            let stranger = stranger.clone();
            let later = Duration::from_millis(rand::rng().random_range(0..200));
            tokio::spawn(async move {
                for (text, pause) in [(one, Duration::ZERO), (other, later)] {
                    sleep(pause).await;
                    let notify = "select pg_notify($1, $2)";
                    let _ = stranger.execute(notify, &[&channel, &text]).await;
                }
            });
        }
    }
    seen
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn repeated_and_altered_messages_let_no_two_clients_in() {
    in_time(async {
        let (url, _locks, admin) = client_of_new_database().await;
        let stranger = role(&admin).await;
        let usage = format!("grant usage on schema lock_runtime to {stranger}");
        admin.batch_execute(&usage).await.unwrap();
        let mut clients = Vec::new();
        let mut ids = Vec::new();
        for _ in 0..4 {
            let client = LockClient::connect(&url).await.unwrap();
            ids.push(id(&client, "other").await);
            clients.push(client);
        }
        let until = Instant::now() + TURNS;
        let url = url_as(&stranger, &url).await;
        let deceiver = tokio::spawn(deceive(url, ids, until));
        let is_inside = AtomicBool::new(false);
        let turns = clients.iter().map(|client| async {
            let mut turns = 0;
            while Instant::now() < until {
                let request = client.exclusive("k").lease(LEASE).wait(LONG);
                let guard = request.acquire().await.unwrap();
                assert!(!is_inside.swap(true, SeqCst), "two holders");
                sleep(Duration::from_millis(2)).await;
                is_inside.store(false, SeqCst);
                let _ = guard.release().await;
                turns += 1;
            }
            turns
        });
        let turns: usize = join_all(turns).await.into_iter().sum();
        let seen = deceiver.await.unwrap();
        println!("{turns} turns, {seen} messages repeated");
        assert!(turns > 50 && seen > 20, "{turns} turns, {seen} messages");
    })
    .await;
}
