//! Forged push messages, of a user that may read and publish and has no right to write.

use std::time::Duration;

use futures_util::future::join_all;
use lock_runtime::{LockClient, LockClientBuilder, LockGuard, RedisOptions};
use lock_tests::{
    RedisServer,
    place::{LONG, cluster_url, eventually, in_time, redlock_url},
    shared_cluster, shared_server, unique,
};
use redis::AsyncCommands as _;
use tokio::time::{sleep, timeout};

/// Longer than a waiter takes to act on a message, and shorter than the pause between two polls.
const QUIET: Duration = Duration::from_millis(300);
const LONGEST_LEASE: Duration = Duration::from_secs(2);

/// A store, and a user of each of its servers that reads and publishes.
struct Place {
    namespace: String,
    urls: Vec<String>,
    monitors: Vec<redis::Client>,
    publish: &'static str,
}

impl Place {
    async fn of(
        servers: &[&RedisServer],
        nodes: &[&RedisServer],
        urls: Vec<String>,
        publish: &'static str,
    ) -> Self {
        let user = unique("mon");
        let rules = ["on", ">pw", "~*", "&*", "-@all", "+@read", "+@connection"];
        for server in nodes {
            let command = ["ACL", "SETUSER", &user].into_iter().chain(rules);
            let command: Vec<_> = command.chain(["+publish", "+spublish"]).collect();
            server.command(&command).await;
        }
        let monitor = |server: &&RedisServer| redis::Client::open(server.url_as(&user, "pw"));
        let monitors = servers.iter().map(|server| monitor(server).unwrap());
        Self {
            namespace: unique("ns"),
            urls,
            monitors: monitors.collect(),
            publish,
        }
    }

    async fn client(&self, builder: LockClientBuilder) -> LockClient {
        let builder = builder.namespace(&self.namespace);
        match &self.urls[..] {
            [url] => builder.connect(url).await.unwrap(),
            urls => {
                let options = RedisOptions::new().longest_lease(LONGEST_LEASE);
                builder
                    .redis(options)
                    .connect(&redlock_url(urls))
                    .await
                    .unwrap()
            }
        }
    }

    /// Grants the lock to its first waiter, as the message of a server would.
    async fn forge(&self, key: &str, fence: u64) {
        let lock = format!("{}:{key}", self.namespace);
        for monitor in &self.monitors {
            let mut monitor = monitor.get_multiplexed_async_connection().await.unwrap();
            let queue = format!("{{{lock}}}:q");
            // Of a cluster, one node has the key.
            let Ok(Some::<String>(entry)) = monitor.hget(&queue, 1).await else {
                continue;
            };
            let [_, mode, _, _, member, channel] = entry.split(' ').collect::<Vec<_>>()[..] else {
                panic!("{entry}")
            };
            let message = format!("{mode} {member} {fence} 3000 0 {lock}");
            let mut publish = redis::cmd(self.publish);
            publish.arg(channel).arg(message);
            publish.exec_async(&mut monitor).await.unwrap();
        }
    }
}

/// Returns whether a waiter got the lock by a forged message beside its holder.
async fn is_deceived(place: &Place, builder: LockClientBuilder, fence: u64) -> bool {
    is_deceived_for(Duration::ZERO, place, builder, fence).await
}

/// Returns the same for a waiter that asks for this `min_hold`.
async fn is_deceived_for(
    min_hold: Duration,
    place: &Place,
    builder: LockClientBuilder,
    fence: u64,
) -> bool {
    let (one, other) = tokio::join!(
        place.client(LockClient::builder()),
        place.client(builder.clone())
    );
    let key = unique("k");
    let request = |locks: &LockClient| locks.exclusive(&key).lease(LONGEST_LEASE).wait(LONG);
    let held = request(&one).acquire().await.unwrap();
    // The request may need more than one attempt to be queued.
    let mut waiting = tokio::spawn(request(&other).min_hold(min_hold).acquire());
    eventually("a request waits", async || {
        one.inspect(&*key)
            .await
            .is_ok_and(|found| found.waiters.len() == 1)
    })
    .await;
    // The reply to the waiter arrives after the entry can be seen.
    sleep(Duration::from_millis(50)).await;
    let after = |held: &LockGuard| held.fence().number() + 1;
    place.forge(&key, fence.max(after(&held))).await;
    let forged: Option<LockGuard> = timeout(QUIET, &mut waiting)
        .await
        .ok()
        .map(|joined| joined.unwrap().unwrap());
    if let Some(forged) = forged {
        forged.release().await.unwrap_err();
        // Its place in the queue does not stay, where it would be granted the lock for 3 s.
        sleep(Duration::from_millis(100)).await;
        held.release().await.unwrap();
        let next = timeout(Duration::from_secs(1), request(&one).acquire()).await;
        let next = next.expect("the lock is free").unwrap();
        next.release().await.unwrap();
        return true;
    }
    held.release().await.unwrap();
    let next = waiting.await.unwrap().unwrap();
    assert!(next.fence().number() < u64::MAX / 4, "{}", next.fence());
    next.release().await.unwrap();
    false
}

async fn places() -> (Place, Place, Place, Vec<RedisServer>) {
    let (one, cluster) = tokio::join!(shared_server(), shared_cluster());
    let three = RedisServer::builder().start_all(3).await;
    let nodes: Vec<_> = cluster.nodes().iter().collect();
    let single = Place::of(&[one], &[one], vec![one.url()], "PUBLISH").await;
    let masters = cluster.masters().await;
    let sharded = Place::of(&masters, &nodes, vec![cluster_url(cluster)], "SPUBLISH").await;
    let servers: Vec<_> = three.iter().collect();
    let urls = three.iter().map(RedisServer::url).collect();
    let majority = Place::of(&servers, &servers, urls, "PUBLISH").await;
    (single, sharded, majority, three)
}

/// Its fencing token would be the last one that any resource accepts.
#[tokio::test]
async fn a_message_with_a_token_of_the_far_future_is_no_grant() {
    in_time(async {
        let (single, sharded, majority, _servers) = places().await;
        let deceived = |place| is_deceived(place, LockClient::builder(), i64::MAX as u64);
        let deceived = join_all([&single, &sharded, &majority].map(deceived)).await;
        assert_eq!(deceived, [false; 3]);
    })
    .await;
}

/// Without the option it does, until the first renewal: SECURITY.md names that. A client of several
/// servers asks them.
#[tokio::test]
async fn a_forged_message_deceives_a_client_that_does_not_confirm_grants() {
    in_time(async {
        let (single, _, majority, _servers) = places().await;
        for min_hold in [0, 200, 20_000].map(Duration::from_millis) {
            assert!(is_deceived_for(min_hold, &single, LockClient::builder(), 0).await);
        }
        assert!(!is_deceived(&majority, LockClient::builder(), 0).await);
    })
    .await;
}

#[tokio::test]
async fn a_forged_message_deceives_no_client_that_confirms_grants() {
    in_time(async {
        let (single, sharded, majority, _servers) = places().await;
        let deceived = |place| is_deceived(place, LockClient::builder().confirm_grants(), 0);
        let deceived = join_all([&single, &sharded, &majority].map(deceived)).await;
        assert_eq!(deceived, [false; 3]);
    })
    .await;
}
