use futures_util::future::join_all;
use lock_runtime::LockClient;
use lock_tests::{FencedResource, RedisServer, unique};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep};

async fn five() -> Vec<RedisServer> {
    join_all((0..5).map(|_| RedisServer::start())).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn smoke() {
    let servers = five().await;
    let ns = unique("ns");
    let connect = || async {
        LockClient::builder()
            .namespace(&ns)
            .longest_lease(Duration::from_secs(2))
            .redlock(servers.iter().map(RedisServer::url))
            .await
            .unwrap()
    };
    let locks = connect().await;
    let error = locks.exclusive("a").lease(Duration::from_secs(2)).no_wait().acquire().await.unwrap_err();
    println!("{error}");
    sleep(Duration::from_secs(3)).await;
    let t = Instant::now();
    let guard = locks.exclusive("a").lease(Duration::from_secs(2)).acquire().await.unwrap();
    println!("{:?} {}", t.elapsed(), guard.fence());
    let t = Instant::now();
    guard.release().await.unwrap();
    println!("{:?}", t.elapsed());
    let t = Instant::now();
    for _ in 0..1000 {
        let guard = locks.exclusive("a").lease(Duration::from_secs(2)).acquire().await.unwrap();
        guard.release().await.unwrap();
    }
    println!("1000 {:?}", t.elapsed());
    // contention
    let clients = join_all((0..32).map(|_| connect())).await;
    let resource = Arc::new(FencedResource::new());
    let until = Instant::now() + Duration::from_secs(3);
    let t = Instant::now();
    let turns = join_all(clients.into_iter().map(|c| {
        let resource = resource.clone();
        tokio::spawn(async move {
            let mut turns = 0;
            while Instant::now() < until {
                match c.exclusive("hot").lease(Duration::from_secs(2)).acquire().await {
                    Ok(guard) => {
                        resource.increment(guard.fence().number()).await.unwrap();
                        guard.release().await.unwrap();
                        turns += 1;
                    }
                    Err(e) => println!("{e}"),
                }
            }
            turns
        })
    }))
    .await;
    let turns: Vec<u64> = turns.into_iter().map(|t| t.unwrap()).collect();
    println!("{} turns in {:?}: {turns:?} {}", turns.iter().sum::<u64>(), t.elapsed(), resource.report());
}
