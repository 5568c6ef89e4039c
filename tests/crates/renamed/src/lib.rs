//! A crate that knows lock-runtime under another name only. Every path that `#[distributed_lock]`
//! writes has to begin with that name: one that does not is an error here, and in no crate that has
//! `lock_runtime` in scope.

#![cfg(test)]

#[path = "../../promises.rs"]
mod promises;

use std::{num::NonZeroU32, time::Duration};

use my_locks::{
    distributed_lock, is_held, LockClient, LockError, LockErrorKind, LockKey, LockSpec, Mode,
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
        crate = my_locks,
    )]
    async fn pay(&self, id: u64) -> Result<Option<String>, LockErrorKind> {
        assert!(is_held(lock.key()));
        Ok(Some(format!("{} {id}", lock.key())))
    }
}

fn kind<T>(error: LockError) -> Result<T, LockErrorKind> {
    Err(error.kind())
}

#[distributed_lock(keys("account:{from}", key("account:{}", to), spare), no_wait, on_busy = skip, crate = my_locks)]
async fn transfer(from: u64, to: u64, spare: &LockKey) -> Result<usize, LockError> {
    Ok(["account:1", "account:2", "spare"]
        .iter()
        .filter(|key| is_held(&LockKey::new(**key).unwrap()))
        .count())
}

#[distributed_lock(keys = names, min_hold = "0s", max_hold = "1m", crate = ::my_locks)]
async fn all(names: [&str; 2]) -> Result<bool, LockError> {
    Ok(names
        .iter()
        .all(|name| is_held(&LockKey::new(*name).unwrap())))
}

#[distributed_lock(key = "report", global, shared, wait = "1s", reentrant, strict_order, crate = my_locks)]
async fn reading(locks: &LockClient) -> Result<Mode, LockError> {
    Ok(locks.inspect("report").await?.holders[0].mode)
}

#[distributed_lock(key = name, permits = 2, no_renew, crate = my_locks)]
async fn counted(name: String, locks: &LockClient) -> Result<Mode, LockError> {
    Ok(locks.inspect("job").permits().await?.holders[0].mode)
}

// Without the features of other packages.
#[cfg(not(feature = "others"))]
#[tokio::test]
async fn redis_that_is_not_compiled_in_names_its_feature() {
    for url in [
        "redis://127.0.0.1",
        "rediss://127.0.0.1",
        "redis+cluster://127.0.0.1",
    ] {
        let error = LockClient::connect(url).await.unwrap_err();
        assert_eq!(error.kind(), LockErrorKind::InvalidUrl, "{error}");
        let remedy = "enable the feature `redis` of lock-runtime";
        assert!(error.to_string().contains(remedy), "{error}");
    }
}
