//! Where a test's locks live: in this process, on a Redis server, or on a cluster. A test body stands once and runs on all, by
//! `on_every_store!`.

use std::{
    fmt,
    future::{Future, poll_fn},
    pin::Pin,
    sync::Arc,
    task::Poll,
    time::Duration,
};

use lock_runtime::{
    LockClient, LockClientBuilder, MAX_LEASE,
    store::{MemoryStore, QuorumMember, QuorumStore, Store, redis::RedisStore},
};
use lock_tests::{RedisCluster, RedisServer, shared_cluster, shared_server, unique};
use tokio::time::{Instant, sleep, timeout};

/// Longer than anything takes that does not hang, on a machine that does much else.
pub(crate) const LONG: Duration = Duration::from_secs(30);

/// Makes a test of each function, which takes a [`Place`], on every store; those behind `with permits:` where there are some. In
/// memory the clock is paused.
macro_rules! on_every_store {
    ($($name:ident),* $(,)? $(; with permits: $($counted:ident),+ $(,)?)?) => {
        mod in_memory {
            crate::place::on_every_store!(@ tokio::test(start_paused = true), crate::place::Place::memory(), $($name)* $($($counted)+)?);
        }
        mod by_majority {
            crate::place::on_every_store!(@ tokio::test(start_paused = true), crate::place::Place::majority(), $($name)*);
        }
        mod on_redis {
            crate::place::on_every_store!(@ tokio::test, crate::place::Place::redis().await, $($name)* $($($counted)+)?);
        }
        mod on_a_cluster {
            crate::place::on_every_store!(@ tokio::test, crate::place::Place::cluster().await, $($name)* $($($counted)+)?);
        }
    };
    (@ $test:meta, $place:expr, $($name:ident)*) => {$(
        #[$test]
        async fn $name() {
            use crate::place::in_time;
            in_time(super::$name($place)).await;
        }
    )*};
}
pub(crate) use on_every_store;

/// One set of locks, seen by as many clients as a test makes.
#[derive(Clone)]
pub(crate) enum Place {
    Memory(Arc<MemoryStore>),
    /// Several stores, of which a majority has to agree.
    Majority([Arc<MemoryStore>; 5]),
    Redis {
        url: String,
        namespace: String,
    },
}

impl Place {
    pub(crate) fn memory() -> Self {
        Self::Memory(Arc::default())
    }

    pub(crate) fn majority() -> Self {
        Self::Majority(Default::default())
    }

    /// A namespace of its own on everybody's server.
    pub(crate) async fn redis() -> Self {
        Self::at(shared_server().await.url())
    }

    /// A namespace of its own on everybody's cluster.
    pub(crate) async fn cluster() -> Self {
        Self::at(cluster_url(shared_cluster().await))
    }

    /// A namespace of its own behind a URL.
    pub(crate) fn at(url: String) -> Self {
        Self::Redis {
            url,
            namespace: unique("ns"),
        }
    }

    /// A client of its own: to the store, another process.
    pub(crate) async fn client(&self) -> LockClient {
        self.client_of(LockClient::builder()).await
    }

    pub(crate) async fn client_of(&self, builder: LockClientBuilder) -> LockClient {
        match self {
            Self::Memory(_) | Self::Majority(_) => builder.build_with_store(self.store().await),
            Self::Redis { url, namespace } => builder
                .namespace(namespace)
                .connect(url)
                .await
                .expect("a client of a server that runs"),
        }
    }

    /// A store without a client: what a process left there that is gone.
    pub(crate) async fn store(&self) -> Arc<dyn Store> {
        match self {
            Self::Memory(store) => store.clone(),
            Self::Majority(stores) => {
                let servers = stores.iter().enumerate();
                let servers = servers.map(|(number, store)| {
                    (number.to_string(), store.clone() as Arc<dyn QuorumMember>)
                });
                Arc::new(QuorumStore::new(servers, MAX_LEASE).expect("five are an odd number"))
            }
            Self::Redis { url, namespace } => Arc::new(
                RedisStore::connect(url, namespace)
                    .await
                    .expect("a server that runs"),
            ),
        }
    }

    /// A majority of stores cannot count permits.
    pub(crate) fn has_permits(&self) -> bool {
        !matches!(self, Self::Majority(_))
    }

    pub(crate) fn namespace(&self) -> &str {
        match self {
            Self::Memory(_) | Self::Majority(_) => "",
            Self::Redis { namespace, .. } => namespace,
        }
    }
}

/// A URL that names all nodes of a cluster.
pub(crate) fn cluster_url(cluster: &RedisCluster) -> String {
    let nodes: Vec<_> = cluster
        .nodes()
        .iter()
        .map(|node| node.addr().to_string())
        .collect();
    format!("redis+cluster://{}", nodes.join(","))
}

/// A test that hangs fails.
pub(crate) async fn in_time<T>(future: impl Future<Output = T>) -> T {
    timeout(LONG * 2, future).await.expect("the test hangs")
}

/// A future that has begun, and waits: what it does first is done.
pub(crate) async fn begun<F: Future>(future: F) -> Pin<Box<F>>
where
    F::Output: fmt::Debug,
{
    let mut future = Box::pin(future);
    poll_fn(|cx| match future.as_mut().poll(cx) {
        Poll::Pending => Poll::Ready(()),
        Poll::Ready(output) => panic!("it did not wait: {output:?}"),
    })
    .await;
    future
}

/// Asks until it is so; for what tells nobody when it happens.
pub(crate) async fn eventually<Fut: Future<Output = bool>>(
    what: &str,
    mut is_so: impl FnMut() -> Fut,
) {
    let deadline = Instant::now() + LONG;
    while !is_so().await {
        assert!(Instant::now() < deadline, "not within {LONG:?}: {what}");
        sleep(Duration::from_millis(5)).await;
    }
}

/// Nobody holds any of the keys, nor will in a moment.
pub(crate) async fn all_free(client: &LockClient, keys: &[&str]) {
    for key in keys {
        eventually(&format!("{key} is free"), || async {
            client.inspect(*key).await.unwrap().holders.is_empty()
        })
        .await;
    }
}

/// No lock and no line is left in a namespace of the server; the fences may.
pub(crate) async fn no_key_left(server: &RedisServer, namespace: &str) {
    for pattern in [
        format!("{namespace}:*"),
        format!("{{{namespace}:*}}:q"),
        format!("q:{namespace}:*"),
    ] {
        let what = format!("no {pattern} is left");
        eventually(&what, || async { server.keys(&pattern).await.is_empty() }).await;
    }
}
