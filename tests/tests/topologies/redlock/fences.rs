//! Fencing tokens grow over any sequence of majorities.

use std::collections::HashSet;

use futures_util::future::join_all;
use lock_runtime::LockClient;
use lock_tests::{
    Proxy, RedisServer,
    place::{LONG, Place, on_every_store},
};
use redis::Value;
use tokio::task::JoinSet;

use super::{LONGEST_LEASE, Servers};

async fn token(locks: &LockClient) -> u64 {
    let guard = locks
        .exclusive("a")
        .lease(LONGEST_LEASE)
        .acquire()
        .await
        .unwrap();
    let token = guard.fence().number();
    guard.release().await.unwrap();
    token
}

/// Three servers at a time, and each three have one or two in common with the last.
#[tokio::test]
async fn tokens_grow_whichever_servers_agree() {
    let servers = Servers::shared().await;
    let proxies = servers.proxies().await;
    let [locks, others] = servers
        .clients_through(&proxies, 2)
        .await
        .try_into()
        .unwrap();
    let mut last = 0;
    for round in 0..10_usize {
        let away = [round % 5, (round * 3 + 1) % 5];
        join_all(away.iter().map(|index| proxies[*index].refuse())).await;
        for locks in [&locks, &others, &locks] {
            let next = token(locks).await;
            assert!(next > last, "{next} after {last}");
            last = next;
        }
        join_all(proxies.iter().map(Proxy::let_through)).await;
    }
}

/// A granted number came from a server that was ahead and is gone now: the others must know the
/// number.
#[tokio::test]
async fn a_number_that_only_one_server_knew_is_written_back() {
    let servers = Servers::start().await;
    let locks = servers.client().await;
    let fence = format!("{{{}:a}}:f", servers.namespace);
    for (index, ahead) in servers.all().iter().enumerate() {
        let first = token(&locks).await;
        let far = (first + 1_000_000_000 * (index as u64 + 1)).to_string();
        ahead.command(&["SET", &fence, &far, "EX", "1000"]).await;
        // Two of the others are away, so the one that is ahead has to agree.
        let away = [(index + 1) % 5, (index + 2) % 5].map(|index| &servers.all()[index]);
        away.iter().for_each(|server| server.stop());
        let with_it = token(&locks).await;
        assert!(with_it > first + 1_000_000_000, "{with_it} after {first}");
        away.iter().for_each(|server| server.resume());
        ahead.stop();
        // From a client that has not seen it, and a server that has.
        let kept = join_all(
            servers
                .all()
                .iter()
                .filter(|server| server.port() != ahead.port())
                .map(|server| async {
                    match server.command(&["GET", &fence]).await {
                        Value::BulkString(number) => {
                            String::from_utf8(number).unwrap().parse::<u64>().unwrap()
                        }
                        other => panic!("{other:?}"),
                    }
                }),
        );
        let kept = kept.await;
        assert!(
            kept.iter().filter(|number| **number >= with_it).count() >= 2,
            "{with_it}: {kept:?}"
        );
        let without_it = token(&servers.client().await).await;
        assert!(without_it > with_it, "{without_it} after {with_it}");
        ahead.resume();
    }
}

/// In step, they agree in one round trip, and nothing is written back.
#[tokio::test]
async fn servers_in_step_agree_at_once() {
    let servers = Servers::shared().await;
    let locks = servers.client().await;
    for _ in 0..10 {
        token(&locks).await;
    }
    let fence = format!("{{{}:a}}:f", servers.namespace);
    let read = async |server: &RedisServer| server.query::<String>(&["GET", &fence]).await;
    let reads = join_all(servers.all().iter().map(read)).await;
    assert!(reads.iter().all(|number| *number == reads[0]), "{reads:?}");
}

/// The tokens of all grants that tasks of each of the clients get, four of each at a time.
async fn tokens_of<Fut>(clients: &[LockClient], grants: impl Fn(LockClient) -> Fut) -> Vec<u64>
where
    Fut: Future<Output = Vec<u64>> + Send + 'static,
{
    let tasks: JoinSet<_> = clients
        .iter()
        .flat_map(|locks| [locks; 4])
        .map(|locks| grants(locks.clone()))
        .collect();
    tasks.join_all().await.concat()
}

fn assert_unique(tokens: &[u64]) {
    let others = tokens.len() - tokens.iter().collect::<HashSet<_>>().len();
    assert_eq!(
        others,
        0,
        "grants of {} that have the token of another one",
        tokens.len()
    );
}

async fn read(locks: LockClient) -> Vec<u64> {
    let mut tokens = Vec::new();
    for _ in 0..150 {
        let guard = locks
            .shared("a")
            .lease(LONGEST_LEASE)
            .wait(LONG)
            .acquire()
            .await
            .unwrap();
        tokens.push(guard.fence().number());
        // It may not be confirmed in time on a machine that does much else.
        drop(guard.release().await);
    }
    tokens
}

async fn write_and_read(locks: LockClient) -> Vec<u64> {
    let mut tokens = Vec::new();
    for _ in 0..60 {
        let guard = locks
            .exclusive("a")
            .lease(LONGEST_LEASE)
            .wait(LONG)
            .acquire()
            .await
            .unwrap();
        tokens.push(guard.fence().number());
        if let Ok(guard) = guard.downgrade().await {
            tokens.push(guard.fence().number());
            drop(guard.release().await);
        }
    }
    tokens
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_of_three_servers_have_tokens_of_their_own() {
    let servers = Servers::shared().await;
    let clients = servers.clients_of_three(8).await;
    assert_unique(&tokens_of(&clients, read).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writers_that_become_readers_have_tokens_of_their_own() {
    let servers = Servers::shared().await;
    let clients = servers.clients_of_three(6).await;
    let (readers, writers) = clients.split_at(3);
    let (some, others) = tokio::join!(tokens_of(readers, read), tokens_of(writers, write_and_read));
    assert_unique(&[some, others].concat());
}

async fn readers_have_tokens_of_their_own(place: Place) {
    let clients = join_all((0..4).map(|_| place.client())).await;
    assert_unique(&tokens_of(&clients, read).await);
}

on_every_store!(readers_have_tokens_of_their_own);
