//! Every way to write a key locks the key that it says.

use std::fmt::Display;

use lock_runtime::{
    IntoLockKey, KeyWriter, LockClient, LockError, LockErrorKind, LockKey, distributed_lock,
    is_held,
};

use super::{holders, with_client};

struct Order {
    id: u64,
    shop: String,
}

impl Order {
    fn lock_key(&self) -> LockKey {
        LockKey::new(format!("order:{}:{}", self.shop, self.id)).unwrap()
    }

    #[distributed_lock(key = self.lock_key())]
    async fn method(&self) -> Result<bool, LockError> {
        Ok(held("order:north:7"))
    }

    #[distributed_lock(key("order:{}:{}", self.shop, self.id))]
    async fn consuming(self) -> Result<bool, LockError> {
        Ok(held("order:north:7"))
    }

    #[distributed_lock(key("order:{shop}:{}", self.id, shop = self.shop))]
    async fn mutable(&mut self) -> Result<bool, LockError> {
        self.id += 1;
        Ok(held("order:north:7"))
    }
}

fn held(key: &str) -> bool {
    is_held(&LockKey::new(key).unwrap())
}

const SHOP: &str = "north";

#[distributed_lock(key = "order", global)]
async fn plain() -> Result<bool, LockError> {
    Ok(held("order"))
}

#[distributed_lock(key = "order:{id}")]
async fn captured(id: u64) -> Result<bool, LockError> {
    Ok(held("order:7") && id == 7)
}

#[distributed_lock(key = "order:{SHOP}:{id:04}:{{x}}")]
async fn formatted(id: u64) -> Result<bool, LockError> {
    Ok(held("order:north:0007:{x}") && id == 7)
}

#[distributed_lock(key("order:{}:{1}:{0}", id, name.trim()))]
async fn positional(id: u64, name: &str) -> Result<bool, LockError> {
    Ok(held("order:7:a:7") && name == " a ")
}

#[distributed_lock(key = name)]
async fn expression(name: String) -> Result<bool, LockError> {
    Ok(held("whatever"))
}

#[distributed_lock(key = &name)]
async fn borrowed(name: String) -> Result<bool, LockError> {
    Ok(held(&name))
}

#[distributed_lock(key = "pair:{a}:{b}")]
async fn pair(a: &str, b: &str) -> Result<LockKey, LockError> {
    let key = KeyWriter::new()
        .lit("pair:")
        .arg(format_args!("{a}"))
        .lit(":")
        .arg(format_args!("{b}"))
        .finish()?;
    assert!(is_held(&key));
    Ok(key)
}

#[distributed_lock(key = "generic:{value}")]
async fn generic<T, const N: usize>(value: T, rest: [u8; N]) -> Result<(T, usize), LockError>
where
    T: Display + Clone,
{
    assert!(held(&format!("generic:{value}")));
    Ok((value.clone(), rest.len()))
}

#[distributed_lock(key = key)]
async fn any_key(key: impl IntoLockKey) -> Result<bool, LockError> {
    Ok(true)
}

#[tokio::test(start_paused = true)]
async fn every_form_of_a_key_locks_what_it_says() {
    with_client(async |locks| {
        assert!(plain().await.unwrap());
        assert!(captured(7).await.unwrap());
        assert!(formatted(7).await.unwrap());
        assert!(positional(7, " a ").await.unwrap());
        assert!(expression("whatever".into()).await.unwrap());
        assert!(borrowed("whatever".into()).await.unwrap());
        let mut order = Order {
            id: 7,
            shop: "north".into(),
        };
        assert!(order.method().await.unwrap());
        assert!(order.mutable().await.unwrap());
        assert_eq!(order.id, 8);
        order.id = 7;
        assert!(order.consuming().await.unwrap());
        assert_eq!(generic("a", [0; 3]).await.unwrap(), ("a", 3));
        assert_eq!(generic(7, []).await.unwrap(), (7, 0));
        assert!(any_key("a").await.unwrap() && any_key(LockKey::new("a").unwrap()).await.unwrap());
        for key in ["order", "order:7", "order:north:7", "whatever"] {
            assert_eq!(holders(locks, key).await, 0, "{key}");
        }
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn different_values_never_meet() {
    with_client(async |_| {
        assert_ne!(
            pair("1:2", "3").await.unwrap(),
            pair("1", "2:3").await.unwrap()
        );
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_key_that_is_not_valid_is_refused_and_the_body_does_not_run() {
    with_client(async |_| {
        for name in [
            String::new(),
            "x".repeat(513),
            "a\nb".into(),
            "permits:a".into(),
        ] {
            assert_eq!(
                expression(name).await.unwrap_err().kind(),
                LockErrorKind::InvalidKey
            );
        }
        assert_eq!(
            pair(&"x".repeat(600), "").await.unwrap_err().kind(),
            LockErrorKind::InvalidKey
        );
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn the_same_key_excludes_and_another_does_not() {
    with_client(async |locks: &LockClient| {
        let guard = locks.exclusive("order:7").acquire().await.unwrap();
        assert!(
            captured(7)
                .await
                .is_err_and(|error| error.kind() == LockErrorKind::WaitTimeout)
        );
        assert!(!captured(8).await.unwrap());
        guard.release().await.unwrap();
        assert!(captured(7).await.unwrap());
    })
    .await;
}
