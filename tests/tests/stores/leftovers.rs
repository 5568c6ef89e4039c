//! What a client leaves in the store, and for how long.

use std::{collections::BTreeMap, time::Duration};

use lock_runtime::{LockClient, LockClientBuilder, LockErrorKind};
use lock_tests::{
    RedisServer,
    place::{cluster_url, eventually, in_time},
    postgres, shared_postgres,
};
use tokio::time::sleep;

const MINUTE: Duration = Duration::from_secs(60);
const DAY: Duration = Duration::from_secs(24 * 60 * 60);
/// The longest life of the name of a client that is gone.
const NAMED: Duration = Duration::from_secs(15 * 60);

/// The settings of a client, and the life of its fencing tokens.
fn settings() -> [(LockClientBuilder, Duration); 2] {
    let builder = LockClient::builder;
    [
        (builder(), DAY),
        (builder().keep_fences_for(MINUTE), MINUTE),
    ]
}

/// Uses locks of all modes, and several keys, with a hand-off to another process.
async fn uses(locks: &LockClient, other: &LockClient) {
    let guard = locks.exclusive("a").acquire().await.unwrap();
    let waiting = other.exclusive("a").wait(MINUTE).acquire();
    let waiting = tokio::spawn(waiting);
    eventually("it waits", async || {
        !locks.inspect("a").await.unwrap().waiters.is_empty()
    })
    .await;
    guard.release().await.unwrap();
    waiting.await.unwrap().unwrap().release().await.unwrap();
    let permits = 2.try_into().unwrap();
    for request in [
        locks.shared("r"),
        locks.exclusive("w"),
        locks.permits("p", permits),
        locks.all(["x", "y"]),
    ] {
        request.acquire().await.unwrap().release().await.unwrap();
    }
}

/// The keys of a server, with their remaining lives.
async fn keys(server: &RedisServer) -> BTreeMap<String, Duration> {
    let client = redis::Client::open(server.url()).unwrap();
    let mut connection = client.get_multiplexed_async_connection().await.unwrap();
    let mut keys = redis::cmd("KEYS");
    let names: Vec<String> = keys.arg("*").query_async(&mut connection).await.unwrap();
    let mut found = BTreeMap::new();
    for name in names {
        let mut life = redis::cmd("PTTL");
        let life: i64 = life.arg(&name).query_async(&mut connection).await.unwrap();
        assert!(life >= 0 || life == -2, "{name} has no expiry");
        if let Ok(life) = u64::try_from(life) {
            found.insert(name, Duration::from_millis(life));
        }
    }
    found
}

#[tokio::test]
async fn a_client_that_is_shut_down_leaves_fencing_tokens_in_redis() {
    in_time(async {
        for (builder, life) in settings() {
            let server = RedisServer::start().await;
            let locks = builder.clone().connect(&server.url()).await.unwrap();
            let other = builder.connect(&server.url()).await.unwrap();
            uses(&locks, &other).await;
            let names = async || {
                let keys = keys(&server).await.into_iter();
                keys.filter(|(name, _)| name.starts_with("f:lock:client:"))
                    .collect::<Vec<_>>()
            };
            eventually("they have names", async || names().await.len() == 2).await;
            assert!(names().await.iter().all(|(_, left)| *left <= NAMED));
            locks.shutdown().await;
            eventually("one has none", async || names().await.len() == 1).await;
            other.shutdown().await;
            eventually("the other has none", async || names().await.is_empty()).await;
            let left = keys(&server).await;
            for (name, left) in &left {
                let is_fence = name.ends_with("}:f");
                assert!(is_fence, "{name} is left");
                let is_kept = life - Duration::from_secs(30) < *left && *left <= life;
                assert!(is_kept, "{name}: {left:?} of {life:?}");
            }
            assert_eq!(left.len(), 6, "{left:?}");
        }
    })
    .await;
}

#[tokio::test]
async fn the_times_of_readers_and_permits_in_redis_end_with_their_client() {
    in_time(async {
        let server = RedisServer::start().await;
        let locks = LockClient::connect(&server.url()).await.unwrap();
        let reader = locks.shared("a").acquire().await.unwrap();
        let permit = locks.permits("a", 2.try_into().unwrap());
        let permit = permit.acquire().await.unwrap();
        sleep(Duration::from_secs(1)).await;
        // A client whose connection broke introduces itself again.
        for kind in ["normal", "pubsub"] {
            server.command(&["CLIENT", "KILL", "TYPE", kind]).await;
        }
        eventually("its grants are known", async || {
            let seen = [locks.inspect("a").await, locks.inspect("a").permits().await];
            seen.into_iter().flatten().all(|seen| {
                let held_for = seen.holders[0].held_for;
                held_for.is_some_and(|time| time >= Duration::from_secs(1) && time < MINUTE)
            })
        })
        .await;
        let grants = async || {
            let keys = keys(&server).await.into_iter();
            let mut grants = keys.filter(|(name, _)| name.starts_with("f:lock:grants:"));
            grants.next().map(|(_, left)| left)
        };
        assert!(grants().await.is_some_and(|left| left <= NAMED));
        reader.release().await.unwrap();
        drop(permit);
        locks.shutdown().await;
        eventually("they are gone", async || grants().await.is_none()).await;
    })
    .await;
}

#[tokio::test]
async fn a_client_that_is_shut_down_leaves_records_in_postgres() {
    in_time(async {
        for (builder, life) in settings() {
            let url = shared_postgres().await.new_database().await;
            let locks = builder.clone().connect(&url).await.unwrap();
            let other = builder.connect(&url).await.unwrap();
            uses(&locks, &other).await;
            let admin = postgres::connect(&url).await;
            let records = async || {
                let query =
                    "select name, needed_until - lock_runtime.micros() from lock_runtime.record";
                let query = format!("{query} where name <> 'upkeep'");
                let rows = admin.query(&query, &[]).await.unwrap();
                let record = |row: &tokio_postgres::Row| (row.get::<_, String>(0), row.get(1));
                rows.iter().map(record).collect::<Vec<(String, i64)>>()
            };
            let named = async || {
                let records = records().await.into_iter();
                let names = records.filter(|(name, _)| name.starts_with("lock:client\t"));
                names.filter(|(_, left)| *left > 0).count()
            };
            eventually("they have names", async || named().await == 2).await;
            locks.shutdown().await;
            other.shutdown().await;
            eventually("they have none", async || named().await == 0).await;
            for (name, left) in records().await {
                let (usual, most) = (life.as_micros() as i64, NAMED.as_micros() as i64);
                match name.starts_with("lock:client\t") {
                    true => assert!(left <= most, "{name}: {left}"),
                    // A reader's or waiter's entry counts until its end.
                    false => {
                        let expected = usual - 30_000_000..=usual + 41_000_000;
                        assert!(expected.contains(&left), "{name}: {left} of {usual}");
                    }
                }
            }
        }
    })
    .await;
}

/// As of a job of cron: none lives until its first clean-up.
#[tokio::test]
async fn brief_clients_remove_each_others_names_from_postgres() {
    in_time(async {
        let url = shared_postgres().await.new_database().await;
        let admin = postgres::connect(&url).await;
        let names = async || {
            let query = "select count(*) from lock_runtime.record where name like 'lock:client%'";
            admin.query_one(query, &[]).await.unwrap().get::<_, i64>(0)
        };
        let is_brief = async || {
            let locks = LockClient::connect(&url).await.unwrap();
            let guard = locks.exclusive("a").acquire().await.unwrap();
            guard.release().await.unwrap();
            eventually("it has its name", async || names().await > 0).await;
            locks.shutdown().await;
        };
        // On a busy machine a shutdown ends before its removal, which the next one makes good.
        eventually("it has removed its own", async || {
            is_brief().await;
            names().await == 0
        })
        .await;
        let killed = "insert into lock_runtime.record values ('lock:client' || chr(9) || 'a', 1, 0, 0, 0, '')";
        admin.batch_execute(killed).await.unwrap();
        eventually("it has removed that of another", async || {
            is_brief().await;
            names().await == 0
        })
        .await;
        let fences = "select count(*) from lock_runtime.record where name = 'lock:a'";
        let row = admin.query_one(fences, &[]).await.unwrap();
        assert_eq!(row.get::<_, i64>(0), 1);
    })
    .await;
}

/// The digests of the scripts differ, and the latest client decides.
#[tokio::test]
async fn clients_with_different_lives_share_a_lock() {
    in_time(async {
        let cluster = lock_tests::shared_cluster().await;
        for cluster in [None, Some(cluster_url(cluster))] {
            let server = RedisServer::start().await;
            let url = cluster.clone().unwrap_or_else(|| server.url());
            let namespace = lock_tests::unique("ns");
            let [(usual, day), (short, minute)] = settings();
            let usual = usual.namespace(&namespace).connect(&url).await.unwrap();
            let short = short.namespace(&namespace).connect(&url).await.unwrap();
            let mut latest = None;
            for (locks, life) in [
                (&usual, day),
                (&short, minute),
                (&usual, day),
                (&short, minute),
            ] {
                let guard = locks.exclusive("k").acquire().await.unwrap();
                let other = if std::ptr::eq(locks, &usual) {
                    &short
                } else {
                    &usual
                };
                let refused = other.exclusive("k").try_acquire().await.unwrap();
                assert!(refused.is_none());
                assert!(latest < Some(guard.fence()));
                latest = Some(guard.fence());
                guard.release().await.unwrap();
                if cluster.is_none() {
                    let fence = format!("{{{namespace}:k}}:f");
                    let left: i64 = server.query(&["PTTL", &fence]).await;
                    let left = Duration::from_millis(left.try_into().unwrap());
                    assert!(left <= life && left + MINUTE / 2 > life, "{left:?}");
                }
            }
        }
    })
    .await;
}

#[tokio::test]
async fn a_life_that_is_too_short_or_too_long_is_refused() {
    for time in [Duration::ZERO, MINUTE / 2, 2 * DAY] {
        let builder = LockClient::builder().keep_fences_for(time);
        let error = builder.connect_lazy("redis://127.0.0.1:1").unwrap_err();
        assert_eq!(error.kind(), LockErrorKind::InvalidSpec);
        assert!(error.to_string().contains("keep_fences_for"), "{error}");
    }
}
