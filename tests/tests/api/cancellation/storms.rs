//! Many tasks that acquire, give up and release repeatedly.

use std::{collections::HashMap, time::Duration};

use lock_runtime::LockClient;
use lock_tests::{
    RedisServer,
    place::{LONG, Place, in_time, no_key_left},
    unique,
};
use tokio::{
    task::JoinSet,
    time::{Instant, sleep, timeout},
};

const LEASE: Duration = Duration::from_secs(2);
/// Returns the remaining lease of a lock, and its holders.
const HELD: &str = "
local kind = redis.call('TYPE', KEYS[1]).ok
local holders = {}
if kind == 'string' then holders = { redis.call('GET', KEYS[1]) } end
if kind == 'zset' then holders = redis.call('ZRANGE', KEYS[1], 0, -1) table.sort(holders) end
return { redis.call('PTTL', KEYS[1]), holders }
";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_storm_no_key_is_left_and_no_lease_ever_grows() {
    in_time(async {
        let server = RedisServer::start().await;
        let namespace = unique("storm");
        let builder = LockClient::builder().namespace(&namespace);
        let clients = [
            builder.clone().connect(&server.url()).await.unwrap(),
            builder.connect(&server.url()).await.unwrap(),
        ];
        let mut tasks = JoinSet::new();
        for task in 0..200 {
            let locks = clients[task % 2].clone();
            tasks.spawn(storm(locks, task));
        }
        tasks.join_all().await;

        // Remaining locks must only expire: a renewal without a guard would extend them. A request
        // that was given up may be granted the lock by its queue entry, and that grant expires as
        // well.
        let mut left: HashMap<String, (i64, Vec<String>)> = HashMap::new();
        let until = Instant::now() + LEASE * 2;
        let mut calm_since = Instant::now();
        while Instant::now() < until && calm_since.elapsed() < LEASE {
            let mut now = HashMap::new();
            for key in server.keys(&format!("{namespace}:*")).await {
                let (ttl, holders): (i64, Vec<String>) =
                    server.query(&["EVAL", HELD, "1", &key]).await;
                if let Some((before, same)) = left.get(&key)
                    && holders == *same
                {
                    assert!(ttl <= *before, "{key} was renewed without a holder");
                }
                now.insert(key, (ttl, holders));
            }
            if !now.is_empty() {
                calm_since = Instant::now();
            }
            left = now;
            sleep(Duration::from_millis(20)).await;
        }
        no_key_left(&server, &namespace).await;
        for number in 0..8 {
            clients[0]
                .exclusive(format!("k{number}"))
                .try_acquire()
                .await
                .unwrap()
                .expect("free")
                .release()
                .await
                .unwrap();
        }
    })
    .await;
}

async fn storm(locks: LockClient, task: usize) {
    for round in 0..8 {
        let key = format!("k{}", (task + round) % 8);
        let patience = Duration::from_micros(rand::random_range(0..30_000));
        let request = match rand::random_range(0..4) {
            0 => locks.shared(&key),
            1 => locks.all([key.clone(), format!("k{}", (task + round * 3) % 8)]),
            _ => locks.exclusive(&key),
        };
        let request = request.lease(LEASE).wait(LONG);
        // Every step may be cut off by the time-out: the acquire, the body, the release.
        let _ = timeout(patience, async {
            match rand::random_range(0..4) {
                0 => drop(request.acquire().await?),
                1 => request.acquire().await?.release().await?,
                2 => drop(request.try_acquire().await?),
                _ => request.run(async |_| sleep(patience / 4).await).await?,
            }
            Ok::<_, lock_runtime::LockError>(())
        })
        .await;
    }
}

/// A request that does not give up is served, however many others do.
#[tokio::test]
async fn waiters_that_give_up_cost_no_turn() {
    in_time(async {
        for place in [Place::memory(), Place::redis().await] {
            let locks = place.client().await;
            let mut tasks = JoinSet::new();
            for task in 0..60 {
                let locks = locks.clone();
                tasks.spawn(async move {
                    if task % 3 == 0 {
                        locks
                            .exclusive("a")
                            .wait(LONG)
                            .acquire()
                            .await
                            .unwrap()
                            .release()
                            .await
                            .unwrap();
                    } else {
                        let patience = Duration::from_micros(rand::random_range(0..20_000));
                        let _ = timeout(patience, locks.exclusive("a").wait(LONG).acquire()).await;
                    }
                });
            }
            let begin = Instant::now();
            tasks.join_all().await;
            assert!(begin.elapsed() < LONG / 2, "{:?}", begin.elapsed());
        }
    })
    .await;
}
