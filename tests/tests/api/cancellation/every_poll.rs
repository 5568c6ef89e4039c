//! Futures dropped at each of their polls over a slow connection, and the drops of clients.

use std::{sync::Arc, time::Duration};

use lock_conformance::cancelled;
use lock_runtime::store::{Store, redis::RedisStore};
use lock_tests::{
    Proxy,
    place::{LONG, Place, begun, in_time},
    proxy::Direction::{ToClient, ToServer},
    shared_server, unique,
};

/// Less than the lease of 30 s: a lock acquired within it was released and has not expired.
const BEFORE_THE_LEASE: Duration = Duration::from_secs(15);

/// A server whose replies take long enough for a drop at each stage of a call.
struct Distant {
    proxy: Proxy,
    namespace: String,
}

impl Distant {
    async fn server() -> Self {
        let proxy = Proxy::to_url(&shared_server().await.url()).await;
        for direction in [ToServer, ToClient] {
            proxy.delay(direction, Duration::from_millis(2));
        }
        let namespace = unique("ns");
        Self { proxy, namespace }
    }

    async fn store(&self) -> Arc<dyn Store> {
        let store = RedisStore::connect(&self.proxy.url(), &self.namespace).await;
        Arc::new(store.unwrap())
    }
}

#[tokio::test]
async fn a_dropped_acquire_leaves_nothing_on_a_distant_server() {
    let server = Distant::server().await;
    lock_conformance::dropped_acquires_leave_nothing(&async || server.store().await).await;
}

#[tokio::test]
async fn a_dropped_release_frees_the_lock_on_a_distant_server() {
    let server = Distant::server().await;
    lock_conformance::dropped_releases_free_the_lock(&async || server.store().await).await;
}

#[tokio::test]
async fn any_other_dropped_call_leaves_the_lock_held_on_a_distant_server() {
    let server = Distant::server().await;
    lock_conformance::dropped_calls_leave_the_lock_held(&async || server.store().await).await;
}

#[tokio::test]
async fn a_dropped_call_can_be_abandoned_on_a_distant_server() {
    let server = Distant::server().await;
    lock_conformance::dropped_calls_can_be_abandoned(&async || server.store().await).await;
    lock_conformance::abandoned_requests_have_no_effect(&async || server.store().await).await;
}

/// Shutdown is final, so each number of polls needs a new client.
#[tokio::test]
async fn a_dropped_shutdown_still_shuts_down() {
    in_time(async {
        let place = Place::redis().await;
        let others = place.client().await;
        for polls in 1..4 {
            let locks = place.client().await;
            let key = format!("a{polls}");
            drop(locks.exclusive(&key).acquire().await.unwrap());
            let waiting_for = others.exclusive("held").acquire().await.unwrap();
            let waiting = begun(locks.exclusive("held").wait(LONG).acquire()).await;
            cancelled(polls, locks.shutdown()).await;
            assert_eq!(
                waiting.await.unwrap_err().kind(),
                lock_runtime::LockErrorKind::ShuttingDown
            );
            waiting_for.release().await.unwrap();
            others
                .exclusive(&key)
                .wait(BEFORE_THE_LEASE)
                .acquire()
                .await
                .unwrap()
                .release()
                .await
                .unwrap();
        }
    })
    .await;
}

/// The drop of a guard is one step; the background task does the rest, and goes on without its
/// client.
#[tokio::test]
async fn a_guard_dropped_after_its_client_is_given_back() {
    in_time(async {
        for place in [Place::memory(), Place::redis().await] {
            let (locks, others) = (place.client().await, place.client().await);
            let guard = locks.exclusive("a").acquire().await.unwrap();
            drop(locks);
            guard.verify().await.unwrap();
            drop(guard);
            others
                .exclusive("a")
                .wait(BEFORE_THE_LEASE)
                .acquire()
                .await
                .unwrap()
                .release()
                .await
                .unwrap();
        }
    })
    .await;
}
