//! Servers whose replies and messages are damaged on their way: no call hangs or panics, and the
//! client serves again once the replies are whole.

use std::{
    io,
    panic::{set_hook, take_hook},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use lock_runtime::LockClient;
use lock_tests::{
    place::{eventually, in_time, times_as_long},
    shared_postgres, shared_server, unique,
};
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
};
use url::Url;

const STRUCK: Duration = Duration::from_secs(3);
const KEYS: [&str; 3] = ["a", "b", "c"];

/// A way to a server, on which what the server sends is damaged.
struct Garbler {
    url: String,
    is_on: Arc<AtomicBool>,
    damaged: Arc<AtomicUsize>,
}

impl Garbler {
    async fn to(url: &str, seed: u64) -> Self {
        let mut url = Url::parse(url).unwrap();
        let server = (url.host_str().unwrap().to_owned(), url.port().unwrap());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        url.set_port(Some(listener.local_addr().unwrap().port()))
            .unwrap();
        let (is_on, damaged) = (Arc::<AtomicBool>::default(), Arc::<AtomicUsize>::default());
        let (on, count) = (is_on.clone(), damaged.clone());
        tokio::spawn(async move {
            let mut random = StdRng::seed_from_u64(seed);
            while let Ok((client, _)) = listener.accept().await {
                let Ok(server) = TcpStream::connect(&server).await else {
                    continue;
                };
                let (from_client, to_client) = client.into_split();
                let (from_server, mut to_server) = server.into_split();
                let (on, count) = (on.clone(), count.clone());
                let random = StdRng::seed_from_u64(random.random());
                tokio::spawn(async move {
                    let mut from_client = from_client;
                    let there = tokio::io::copy(&mut from_client, &mut to_server);
                    let back = garble(from_server, to_client, random, &on, &count);
                    // The end of one direction is that of both.
                    tokio::select! {
                        _ = there => {}
                        _ = back => {}
                    }
                });
            }
        });
        Self {
            url: url.into(),
            is_on,
            damaged,
        }
    }
}

async fn garble(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    mut random: StdRng,
    is_on: &AtomicBool,
    damaged: &AtomicUsize,
) -> io::Result<()> {
    let mut buffer = vec![0; 16 * 1024];
    loop {
        let read = from.read(&mut buffer).await?;
        if read == 0 {
            return Ok(());
        }
        let mut bytes = buffer[..read].to_vec();
        if is_on.load(Ordering::Relaxed) && random.random_bool(0.15) {
            damaged.fetch_add(1, Ordering::Relaxed);
            damage(&mut bytes, &mut random);
        }
        to.write_all(&bytes).await?;
    }
}

fn damage(bytes: &mut Vec<u8>, random: &mut StdRng) {
    let at = random.random_range(0..bytes.len());
    match random.random_range(0..6) {
        0 => bytes[at] = random.random(),
        1 => drop(bytes.remove(at)),
        2 => bytes.insert(at, random.random()),
        3 => bytes.truncate(at),
        // Another number, of lengths, times and tokens as well.
        4 => {
            let digits = bytes.iter_mut().filter(|byte| byte.is_ascii_digit());
            digits.for_each(|byte| *byte = b'0' + random.random_range(0..10));
        }
        _ => {
            let again = bytes[at..].to_vec();
            bytes.extend(again);
        }
    }
}

/// Counts the panics of the threads with this name.
fn panics_of(name: &'static str) -> Arc<AtomicUsize> {
    let (count, before) = (Arc::<AtomicUsize>::default(), take_hook());
    let counter = count.clone();
    set_hook(Box::new(move |info| {
        if thread::current().name() == Some(name) {
            counter.fetch_add(1, Ordering::Relaxed);
        }
        before(info);
    }));
    count
}

/// Makes requests of all kinds, of which each has to end.
async fn work(locks: &LockClient, prefix: &str, until: Instant) -> usize {
    let mut ended = 0;
    for number in 0.. {
        if Instant::now() >= until {
            break;
        }
        let key = format!("{prefix}{}", KEYS[number % KEYS.len()]);
        let two = 2.try_into().unwrap();
        let request = match number % 4 {
            0 | 1 => locks.exclusive(&key),
            2 => locks.shared(&key),
            _ => locks.permits(&key, two),
        };
        let request = request.lease(Duration::from_secs(1));
        let request = request.wait(Duration::from_millis(100));
        in_time(async {
            if let Ok(guard) = request.acquire().await {
                _ = guard.verify().await;
                _ = guard.release().await;
            }
            _ = locks.inspect(&key).await;
            _ = locks.all([&key, &format!("{key}2")]).try_acquire().await;
        })
        .await;
        ended += 1;
    }
    ended
}

async fn survives(url: &str, name: &'static str) {
    let panics = panics_of(name);
    let seed: u64 = rand::random::<u32>().into();
    println!("seed {seed}");
    let garbler = Garbler::to(url, seed).await;
    let locks = LockClient::connect(&garbler.url).await.unwrap();
    let (prefix, other) = (unique("k"), locks.clone());
    garbler.is_on.store(true, Ordering::Relaxed);
    let until = Instant::now() + STRUCK * times_as_long() as u32;
    let ended = tokio::join!(work(&locks, &prefix, until), work(&other, &prefix, until));
    garbler.is_on.store(false, Ordering::Relaxed);
    let damaged = garbler.damaged.load(Ordering::Relaxed);
    println!("{ended:?} rounds, {damaged} damaged replies");
    assert!(damaged > 0);
    eventually("it serves again", async || {
        let request = locks.exclusive(unique("k"));
        match request.acquire().await {
            Ok(guard) => guard.release().await.is_ok(),
            Err(_) => false,
        }
    })
    .await;
    locks.shutdown().await;
    assert_eq!(panics.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn damaged_replies_of_redis_end_in_errors() {
    let url = shared_server().await.url();
    survives(
        &url,
        "malice::garbled::damaged_replies_of_redis_end_in_errors",
    )
    .await;
}

mod on_postgres {
    use super::*;

    #[tokio::test]
    async fn damaged_replies_of_postgresql_end_in_errors() {
        let url = shared_postgres().await.new_database().await;
        let name = "malice::garbled::on_postgres::damaged_replies_of_postgresql_end_in_errors";
        survives(&url, name).await;
    }
}
