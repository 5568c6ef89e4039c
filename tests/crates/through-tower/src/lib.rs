//! A crate that has lock-runtime only through lock-tower, with its default features:
//! `#[distributed_lock]` is there, and works under that path.

#![cfg(test)]

#[path = "../../promises.rs"]
mod promises;

use std::{num::NonZeroU32, time::Duration};

use lock_tower::runtime::{
    LockClient, LockError, LockErrorKind, LockKey, LockSpec, Mode, distributed_lock, is_held,
};

struct Shop {
    name: String,
    locks: LockClient,
    spec: LockSpec,
}

impl Shop {
    fn new(name: &str) -> Self {
        Self {
            name: name.into(),
            locks: LockClient::in_memory(),
            spec: LockSpec::exclusive().no_wait(),
        }
    }

    #[distributed_lock(
        key("order:{}:{id}", self.name),
        client = self.locks,
        spec = self.spec,
        lease = Duration::from_secs(7),
        held = lock,
        on_busy = Ok(None),
        on_lost = ignore,
        map_err = kind,
        crate = lock_tower::runtime,
    )]
    async fn pay(&self, id: u64) -> Result<Option<String>, LockErrorKind> {
        assert!(is_held(lock.key()));
        Ok(Some(format!("{} {id}", lock.key())))
    }
}

fn kind<T>(error: LockError) -> Result<T, LockErrorKind> {
    Err(error.kind())
}

#[distributed_lock(keys("account:{from}", key("account:{}", to), spare), no_wait, on_busy = skip, crate = lock_tower::runtime)]
async fn transfer(from: u64, to: u64, spare: &LockKey) -> Result<usize, LockError> {
    Ok(["account:1", "account:2", "spare"]
        .iter()
        .filter(|key| is_held(&LockKey::new(**key).unwrap()))
        .count())
}

#[distributed_lock(keys = names, min_hold = "0s", max_hold = "1m", crate = ::lock_tower::runtime)]
async fn all(names: [&str; 2]) -> Result<bool, LockError> {
    Ok(names
        .iter()
        .all(|name| is_held(&LockKey::new(*name).unwrap())))
}

#[distributed_lock(key = "report", global, shared, wait = "1s", reentrant, strict_order, crate = lock_tower::runtime)]
async fn reading(locks: &LockClient) -> Result<Mode, LockError> {
    Ok(locks.inspect("report").await?.holders[0].mode)
}

#[distributed_lock(key = name, permits = 2, no_renew, crate = lock_tower::runtime)]
async fn counted(name: String, locks: &LockClient) -> Result<Mode, LockError> {
    Ok(locks.inspect("job").permits().await?.holders[0].mode)
}

// Without the features of other packages.
#[cfg(not(feature = "others"))]
#[tokio::test]
async fn a_url_for_tls_is_right_and_names_the_missing_feature() {
    let mut refused = Vec::new();
    for url in [
        "rediss://:hunter2@127.0.0.1:6379/0",
        "valkeys://127.0.0.1",
        "rediss+sentinel://127.0.0.1/mymaster",
        "redis+sentinel://127.0.0.1/mymaster?sentinel_tls=true",
        "rediss+cluster://127.0.0.1",
        "redlock:rediss://10.0.0.1,redis://10.0.0.2,redis://10.0.0.3",
    ] {
        refused.push(LockClient::connect(url).await);
    }
    for refused in refused {
        let error = refused.unwrap_err();
        assert_eq!(error.kind(), LockErrorKind::InvalidUrl);
        let message = "the URL asks for TLS, which is not compiled in; enable the feature `redis-rustls` of lock-runtime";
        assert_eq!(error.to_string(), message);
    }
}

#[cfg(not(feature = "others"))]
#[tokio::test]
async fn a_store_that_is_not_compiled_in_names_its_feature() {
    for (url, feature) in [
        ("postgres://127.0.0.1/shop", "postgres"),
        ("etcd://127.0.0.1", "etcd"),
        ("zookeeper://127.0.0.1", "zookeeper"),
    ] {
        let error = LockClient::connect(url).await.unwrap_err();
        assert_eq!(error.kind(), LockErrorKind::InvalidUrl, "{error}");
        let remedy = format!("enable the feature `{feature}` of lock-runtime");
        assert!(error.to_string().contains(&remedy), "{error}");
    }
}
