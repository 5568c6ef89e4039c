//! Guarantees of a function under the attribute, with any path to lock-runtime. The functions are
//! those of the surrounding crate.

use super::*;

#[tokio::test(start_paused = true)]
async fn a_locked_method_runs_once_at_a_time() {
    let shop = Shop::new("north");
    assert_eq!(shop.pay(7).await, Ok(Some("order:north:7 7".into())));
    let guard = shop
        .locks
        .exclusive("order:north:7")
        .acquire()
        .await
        .unwrap();
    assert_eq!(shop.pay(7).await, Ok(None));
    assert_eq!(shop.pay(8).await, Ok(Some("order:north:8 8".into())));
    guard.release().await.unwrap();
    assert_eq!(shop.pay(7).await, Ok(Some("order:north:7 7".into())));
    assert_eq!(
        Shop::new(&"x".repeat(600)).pay(7).await,
        Err(LockErrorKind::InvalidKey)
    );
}

#[tokio::test(start_paused = true)]
async fn a_locked_function_holds_all_of_its_keys() {
    let locks = LockClient::in_memory();
    let spare = LockKey::new("spare").unwrap();
    locks
        .as_default(async {
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
        .as_default(async {
            assert_eq!(reading(&locks).await.unwrap(), Mode::Shared);
            let permits = Mode::Permits(NonZeroU32::new(2).unwrap());
            assert_eq!(counted("job".into(), &locks).await.unwrap(), permits);
        })
        .await;
}
