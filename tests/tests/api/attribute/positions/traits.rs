//! Traits: native async methods, `#[async_trait]`, defaults.

use std::sync::Arc;

use async_trait::async_trait;
use axum::extract::Path;
use lock_runtime::{HeldLock, LockClient, LockError, distributed_lock};

use super::{assert_excludes, assert_excludes_with, is_send, visit};

trait Native {
    const SHOP: &'static str;

    fn id(&self) -> u64;

    async fn pay(&mut self, amount: u64) -> Result<u64, LockError>;

    #[distributed_lock(key("order:{}:{}", Self::SHOP, self.id()))]
    async fn default(&self) -> Result<u64, LockError> {
        visit("order:north:7").await;
        Ok(self.id())
    }
}

struct Order(u64);

impl Native for Order {
    const SHOP: &'static str = "north";

    fn id(&self) -> u64 {
        self.0
    }

    #[distributed_lock(key("order:{}", self.0))]
    async fn pay(&mut self, amount: u64) -> Result<u64, LockError> {
        visit("order:7").await;
        self.0 += amount;
        Ok(self.0)
    }
}

#[async_trait]
trait Dynamic: Send + Sync {
    async fn by_reference(&self, id: u64) -> Result<u64, LockError>;
    async fn by_mutable_reference(&mut self, name: &str) -> Result<u64, LockError>;
    async fn by_arc(self: Arc<Self>, Path(id): Path<u64>, _: u8) -> Result<u64, LockError>;
    async fn patterns(&self, pair: (u64, u64), mut rest: Vec<u64>) -> anyhow::Result<u64>;
    async fn nothing(&self);

    #[distributed_lock(key("order:{}:{id}", self.shop()), client = self.locks())]
    async fn default(&self, id: u64) -> Result<u64, LockError> {
        visit("order:north:7").await;
        Ok(id)
    }

    fn locks(&self) -> &LockClient;

    fn shop(&self) -> &str {
        "north"
    }
}

#[derive(Clone)]
struct Service {
    locks: LockClient,
    id: u64,
}

#[async_trait]
impl Dynamic for Service {
    #[distributed_lock(key = "order:{id}", held = lock)]
    async fn by_reference(&self, id: u64) -> Result<u64, LockError> {
        visit("order:7").await;
        assert_eq!((lock.key().as_str(), self.id), ("order:7", id));
        Ok(id)
    }

    #[distributed_lock(key("order:{}:{name}", self.id), client = self.locks)]
    async fn by_mutable_reference(&mut self, name: &str) -> Result<u64, LockError> {
        visit("order:7:a").await;
        self.id += 1;
        Ok(self.id)
    }

    #[distributed_lock(key("order:{id}:{}", self.id), client = self.locks)]
    async fn by_arc(self: Arc<Self>, Path(id): Path<u64>, _: u8) -> Result<u64, LockError> {
        visit("order:7:7").await;
        Ok(self.id + id)
    }

    #[distributed_lock(key = "order:{a}:{b}")]
    async fn patterns(&self, (a, mut b): (u64, u64), mut rest: Vec<u64>) -> anyhow::Result<u64> {
        visit("order:7:8").await;
        if a == 0 {
            return Ok(0);
        }
        b += a;
        rest.push(b);
        Ok(rest.into_iter().sum())
    }

    #[distributed_lock(key = "nothing", global, no_wait, on_busy = skip, map_err = report)]
    async fn nothing(&self) {
        visit("nothing").await;
    }

    fn locks(&self) -> &LockClient {
        &self.locks
    }
}

fn report(error: LockError) {
    panic!("{error}");
}

#[async_trait(?Send)]
trait Local {
    async fn pay<T: Clone>(&self, id: u64, paid: T) -> Result<T, LockError>
    where
        T: 'static;
}

#[async_trait(?Send)]
impl Local for Service {
    #[distributed_lock(key = "order:{id}")]
    async fn pay<T: Clone>(&self, id: u64, paid: T) -> Result<T, LockError>
    where
        T: 'static,
    {
        let paid = std::rc::Rc::new(paid);
        visit("order:7").await;
        Ok((*paid).clone())
    }
}

/// The return type that `#[async_trait]` generates, written by hand.
type Boxed<'a, T> = std::pin::Pin<Box<dyn Future<Output = T> + Send + 'a>>;

#[distributed_lock(key = "order:{id}", held = lock)]
fn by_hand(id: u64) -> Boxed<'static, Result<u64, LockError>> {
    Box::pin(async move {
        visit("order:7").await;
        let _: &HeldLock = lock;
        Ok(id)
    })
}

#[distributed_lock(key = "order:{id}", on_busy = Ok(0))]
#[expect(clippy::manual_async_fn, reason = "somebody may write so")]
fn impl_future(id: u64) -> impl Future<Output = Result<u64, LockError>> + Send {
    async move {
        visit("order:7").await;
        Ok(id)
    }
}

/// A `let total = total;` in the body is not mistaken for an argument that `#[async_trait]` binds
/// again.
#[distributed_lock(key = "order:{id}")]
#[expect(clippy::manual_async_fn, reason = "somebody may write so")]
fn own_rebinding(id: u64) -> impl Future<Output = Result<u64, LockError>> + Send {
    async move {
        let mut total = 0;
        total += id;
        let total = total;
        visit("order:7").await;
        Ok(total)
    }
}

#[tokio::test(start_paused = true)]
async fn native_methods() {
    assert_excludes("order:7", async || Order(7).pay(1).await).await;
    assert_excludes("order:north:7", async || Order(7).default().await).await;
}

#[tokio::test(start_paused = true)]
async fn methods_of_async_trait() {
    assert_excludes_with("order:7", async |locks| {
        let service: Box<dyn Dynamic> = Box::new(Service {
            locks: locks.clone(),
            id: 7,
        });
        let call = service.by_reference(7);
        assert!(is_send!(call));
        call.await
    })
    .await;
    assert_excludes_with("order:7:a", async |locks| {
        let mut service = Service {
            locks: locks.clone(),
            id: 7,
        };
        assert_eq!(service.by_mutable_reference("a").await?, 8);
        Ok::<_, LockError>(())
    })
    .await;
    assert_excludes_with("order:7:7", async |locks| {
        Arc::new(Service {
            locks: locks.clone(),
            id: 7,
        })
        .by_arc(Path(7), 0)
        .await
    })
    .await;
    assert_excludes_with("order:7:8", async |locks| {
        assert_eq!(
            Service {
                locks: locks.clone(),
                id: 7
            }
            .patterns((7, 8), vec![1])
            .await?,
            16
        );
        Ok::<_, anyhow::Error>(())
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn default_methods_of_async_trait() {
    assert_excludes_with("order:north:7", async |locks| {
        Service {
            locks: locks.clone(),
            id: 7,
        }
        .default(7)
        .await
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn methods_of_async_trait_that_return_nothing() {
    super::with_client(async |locks| {
        let service = Service {
            locks: locks.clone(),
            id: 7,
        };
        let room = super::Room::default();
        let visits = super::ROOM.scope(room, async {
            tokio::join!(service.nothing(), service.nothing());
            super::ROOM.with(|room| room.visits.load(std::sync::atomic::Ordering::Relaxed))
        });
        assert_eq!(visits.await, 1, "the second was skipped");
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn methods_of_async_trait_that_are_not_send() {
    assert_excludes_with("order:7", async |locks| {
        Service {
            locks: locks.clone(),
            id: 7,
        }
        .pay(7, "paid")
        .await
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn futures_by_hand() {
    assert_excludes("order:7", async || by_hand(7).await).await;
    assert_excludes("order:7", async || own_rebinding(7).await).await;
    assert_excludes("order:7", async || match impl_future(7).await? {
        0 => Err(std::io::Error::other("somebody else holds it")),
        _ => Ok(()),
    })
    .await;
}
