//! The conformance tests, on the stores of lock-runtime.

mod model;
pub(crate) mod noticed;

mod in_memory {
    use std::sync::Arc;

    use lock_runtime::store::{MemoryStore, Store};

    lock_conformance::conformance!({
        let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
        async move || store.clone()
    });
}

mod on_redis {
    use std::sync::Arc;

    use lock_runtime::store::{Store, redis::RedisStore};
    use lock_tests::shared_server;

    lock_conformance::conformance!(async || {
        let url = shared_server().await.url();
        Arc::new(RedisStore::connect(&url, "conformance").await.unwrap()) as Arc<dyn Store>
    });
}

mod on_redis_by_polls_alone {
    use std::sync::Arc;

    use lock_runtime::store::{Store, redis::RedisStore};
    use lock_tests::shared_server;

    lock_conformance::conformance!(async || {
        let url = format!("{}?protocol=resp2", shared_server().await.url());
        Arc::new(RedisStore::connect(&url, "conformance").await.unwrap()) as Arc<dyn Store>
    });
}

mod on_postgres {
    use std::sync::Arc;

    use lock_runtime::{
        PostgresOptions,
        store::{Records, Store, postgres::PostgresRecords},
    };
    use lock_tests::shared_postgres;

    lock_conformance::conformance!(async || {
        let url = shared_postgres().await.url();
        let options = PostgresOptions::default();
        let records = PostgresRecords::connect(&url, "conformance", options).await;
        Arc::new(records.unwrap().into_store()) as Arc<dyn Store>
    });

    lock_conformance::conformance!(records: async || {
        let url = shared_postgres().await.url();
        let options = PostgresOptions::default();
        let records = PostgresRecords::connect(&url, "conformance", options).await;
        Arc::new(records.unwrap()) as Arc<dyn Records>
    });
}

mod on_etcd {
    use std::sync::Arc;

    use lock_runtime::{
        EtcdOptions,
        store::{Records, Store, etcd::EtcdRecords},
    };
    use lock_tests::shared_etcd;

    async fn records() -> EtcdRecords {
        let url = shared_etcd().await.url();
        let records = EtcdRecords::connect(&url, "conformance", EtcdOptions::new());
        records.await.unwrap()
    }

    lock_conformance::conformance!(async || {
        Arc::new(records().await.into_store()) as Arc<dyn Store>
    });

    lock_conformance::conformance!(records: async || {
        Arc::new(records().await) as Arc<dyn Records>
    });
}

mod on_zookeeper {
    use std::sync::Arc;

    use lock_runtime::store::{Records, Store, zookeeper::ZooKeeperRecords};
    use lock_tests::shared_zookeeper;

    async fn records() -> ZooKeeperRecords {
        let url = shared_zookeeper().await.url();
        let records = ZooKeeperRecords::connect(&url, "conformance").await;
        records.unwrap()
    }

    lock_conformance::conformance!(async || {
        Arc::new(records().await.into_store()) as Arc<dyn Store>
    });

    lock_conformance::conformance!(records: async || {
        Arc::new(records().await) as Arc<dyn Records>
    });
}

mod on_a_server_of_a_quorum {
    use std::{sync::Arc, time::Duration};

    use lock_runtime::store::{Store, redis::RedisStore};
    use lock_tests::{RedisServer, shared_five};
    use tokio::{sync::OnceCell, time::sleep};

    lock_conformance::conformance!(async || {
        static VOTES: OnceCell<()> = OnceCell::const_new();
        let urls: Vec<_> = shared_five().await.iter().map(RedisServer::url).collect();
        let urls: Vec<_> = urls.iter().map(String::as_str).collect();
        // A server reports its uptime, during which it may not vote, in whole seconds.
        VOTES
            .get_or_init(|| sleep(Duration::from_millis(1100)))
            .await;
        let members = RedisStore::members(&urls, "conformance", Duration::ZERO).await;
        let (_, member) = members.unwrap().swap_remove(0);
        member as Arc<dyn Store>
    });
}

mod on_a_cluster {
    use std::sync::Arc;

    use lock_runtime::store::{Store, redis::RedisStore};
    use lock_tests::shared_cluster;

    use lock_tests::place::cluster_url;

    lock_conformance::conformance!(async || {
        let url = cluster_url(shared_cluster().await);
        Arc::new(RedisStore::connect(&url, "conformance").await.unwrap()) as Arc<dyn Store>
    });
}
