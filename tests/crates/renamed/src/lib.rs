//! A crate that knows lock-runtime under another name only. Every path that `#[distributed_lock]` writes has to begin with
//! that name: one that does not is an error here, and in no crate that has `lock_runtime` in scope.

#![cfg(test)]

use std::{num::NonZeroU32, time::Duration};

use my_locks::{distributed_lock, is_held, LockClient, LockError, LockErrorKind, LockKey, LockSpec, Mode};

struct Shop {
    name: String,
    locks: LockClient,
    spec: LockSpec,
}

impl Shop {
    fn new(name: &str) -> Self {
        Self { name: name.into(), locks: LockClient::in_memory(), spec: LockSpec::exclusive().no_wait() }
    }

    #[distributed_lock(
        key("order:{}:{id}", self.name),
        client = self.locks,
        spec = self.spec,
        lease = Duration::from_secs(7),
        guard = lock,
        on_busy = Ok(None),
        on_lost = finish,
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
    Ok(["account:1", "account:2", "spare"].iter().filter(|key| is_held(&LockKey::new(**key).unwrap())).count())
}

#[distributed_lock(keys = names, min_hold = "0s", max_hold = "1m", crate = ::my_locks)]
async fn all(names: [&str; 2]) -> Result<bool, LockError> {
    Ok(names.iter().all(|name| is_held(&LockKey::new(*name).unwrap())))
}

#[distributed_lock(key = "report", global, read, wait = "1s", reentrant, strict_order, crate = my_locks)]
async fn reading(locks: &LockClient) -> Result<Mode, LockError> {
    Ok(locks.inspect("report").await?.holders[0].mode)
}

#[distributed_lock(key = name, permits = 2, no_renew, crate = my_locks)]
async fn counted(name: String, locks: &LockClient) -> Result<Mode, LockError> {
    Ok(locks.inspect_permits("job").await?.holders[0].mode)
}

#[tokio::test(start_paused = true)]
async fn a_locked_method_runs_once_at_a_time() {
    let shop = Shop::new("north");
    assert_eq!(shop.pay(7).await, Ok(Some("order:north:7 7".into())));
    let guard = shop.locks.exclusive("order:north:7").acquire().await.unwrap();
    assert_eq!(shop.pay(7).await, Ok(None));
    assert_eq!(shop.pay(8).await, Ok(Some("order:north:8 8".into())));
    guard.release().await.unwrap();
    assert_eq!(shop.pay(7).await, Ok(Some("order:north:7 7".into())));
    assert_eq!(Shop::new(&"x".repeat(600)).pay(7).await, Err(LockErrorKind::InvalidKey));
}

#[tokio::test(start_paused = true)]
async fn a_locked_function_holds_all_of_its_keys() {
    let locks = LockClient::in_memory();
    let spare = LockKey::new("spare").unwrap();
    locks
        .scope(async {
            assert_eq!(transfer(1, 2, &spare).await.unwrap(), 3);
            let guard = locks.exclusive("account:2").acquire().await.unwrap();
            assert_eq!(transfer(1, 2, &spare).await.unwrap(), 0);
            guard.release().await.unwrap();
            assert!(all(["a", "b"]).await.unwrap());
        })
        .await;
}

#[tokio::test(start_paused = true)]
async fn every_mode_is_asked_for() {
    let locks = LockClient::in_memory();
    locks
        .scope(async {
            assert_eq!(reading(&locks).await.unwrap(), Mode::Shared);
            let permits = Mode::Permits(NonZeroU32::new(2).unwrap());
            assert_eq!(counted("job".into(), &locks).await.unwrap(), permits);
        })
        .await;
}
