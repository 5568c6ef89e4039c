//! Several keys at once.

use lock_runtime::{LockError, LockErrorKind, LockKey, distributed_lock, is_held};
use tokio::task::yield_now;

use super::{holders, with_client};

struct Account {
    id: u64,
}

impl Account {
    fn lock_key(&self) -> LockKey {
        LockKey::new(format!("account:{}", self.id)).unwrap()
    }
}

fn held(id: u64) -> bool {
    is_held(&Account { id }.lock_key())
}

#[distributed_lock(keys("account:{from}", "account:{to}"), held = lock)]
async fn transfer(from: u64, to: u64) -> Result<usize, LockError> {
    assert!(held(from) && held(to));
    yield_now().await;
    Ok(lock.fences().count())
}

#[distributed_lock(keys(from.lock_key(), key("account:{}", to.id), "audit"), global, no_wait)]
async fn mixed(from: &Account, to: &Account) -> Result<(), LockError> {
    assert!(held(from.id) && held(to.id) && is_held(&LockKey::new("audit").unwrap()));
    Ok(())
}

#[distributed_lock(keys = accounts.iter().map(Account::lock_key), held = lock, shared)]
async fn sum(accounts: &[Account]) -> Result<usize, LockError> {
    assert!(accounts.iter().all(|account| held(account.id)));
    Ok(lock.fences().count())
}

#[tokio::test(start_paused = true)]
async fn all_keys_are_held_together() {
    with_client(async |locks| {
        let (one, two) = (Account { id: 1 }, Account { id: 2 });
        assert_eq!(transfer(1, 2).await.unwrap(), 2);
        assert_eq!(
            transfer(1, 1).await.unwrap(),
            1,
            "the same key twice is one"
        );
        mixed(&one, &two).await.unwrap();
        assert_eq!(sum(&[one, two, Account { id: 3 }]).await.unwrap(), 3);
        for key in ["account:1", "account:2", "account:3", "audit"] {
            assert_eq!(holders(locks, key).await, 0, "{key}");
        }
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn each_key_excludes() {
    with_client(async |locks| {
        for key in ["account:1", "account:2", "audit"] {
            let guard = locks.exclusive(key).acquire().await.unwrap();
            let error = mixed(&Account { id: 1 }, &Account { id: 2 })
                .await
                .unwrap_err();
            assert_eq!(error.kind(), LockErrorKind::Contended, "{key}");
            guard.release().await.unwrap();
            mixed(&Account { id: 1 }, &Account { id: 2 }).await.unwrap();
        }
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn transfers_in_both_directions_do_not_wait_for_each_other() {
    with_client(async |_| {
        let there = async {
            for _ in 0..20 {
                transfer(1, 2).await.unwrap();
            }
        };
        let back = async {
            for _ in 0..20 {
                transfer(2, 1).await.unwrap();
            }
        };
        tokio::join!(there, back);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn no_key_at_all_is_refused() {
    with_client(async |_| {
        assert_eq!(
            sum(&[]).await.unwrap_err().kind(),
            LockErrorKind::InvalidKey
        )
    })
    .await;
}
