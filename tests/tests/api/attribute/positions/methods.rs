//! Methods with every receiver, and associated functions.

use std::{marker::PhantomData, pin::Pin, rc::Rc, sync::Arc};

use lock_runtime::{LockClient, LockError, distributed_lock};

use super::{assert_excludes, assert_excludes_with, visit};

#[derive(Clone, Debug, Default, PartialEq)]
struct Order {
    id: u64,
    paid: u64,
}

impl Order {
    #[distributed_lock(key("order:{}", self.id))]
    async fn by_value(self) -> Result<Self, LockError> {
        visit("order:7").await;
        Ok(self)
    }

    #[distributed_lock(key("order:{}", self.id))]
    async fn by_mutable_value(mut self) -> Result<Self, LockError> {
        visit("order:7").await;
        self.paid += 1;
        Ok(self)
    }

    #[distributed_lock(key("order:{}", self.id))]
    async fn by_reference(&self) -> Result<&u64, LockError> {
        visit("order:7").await;
        Ok(&self.paid)
    }

    #[distributed_lock(key("order:{}", self.id))]
    async fn by_mutable_reference(&mut self) -> Result<&mut Self, LockError> {
        visit("order:7").await;
        self.paid += 1;
        Ok(self)
    }

    #[distributed_lock(key("order:{}", self.id))]
    #[expect(clippy::needless_arbitrary_self_type, reason = "somebody may write so")]
    async fn typed(self: &Self) -> Result<u64, LockError> {
        visit("order:7").await;
        Ok(self.paid)
    }

    #[distributed_lock(key("order:{}", self.id))]
    async fn by_box(mut self: Box<Self>) -> Result<Box<Self>, LockError> {
        visit("order:7").await;
        self.paid += 1;
        Ok(self)
    }

    #[distributed_lock(key("order:{}", self.id))]
    async fn by_arc(self: Arc<Self>) -> Result<Arc<Self>, LockError> {
        visit("order:7").await;
        Ok(self)
    }

    #[distributed_lock(key("order:{}", self.id))]
    async fn by_rc_reference(self: &Rc<Self>) -> Result<Rc<Self>, LockError> {
        visit("order:7").await;
        Ok(self.clone())
    }

    #[distributed_lock(key("order:{}", self.id))]
    async fn pinned(mut self: Pin<&mut Self>) -> Result<u64, LockError> {
        visit("order:7").await;
        self.paid += 1;
        Ok(self.paid)
    }

    #[distributed_lock(key = "order:{id}")]
    async fn associated(id: u64) -> Result<Self, LockError>
    where
        Self: Sized,
    {
        visit("order:7").await;
        Ok(Self {
            id,
            ..Self::default()
        })
    }
}

struct Service<S> {
    locks: LockClient,
    store: PhantomData<S>,
}

impl<S: Default> Service<S> {
    const KEY: &'static str = "order:7";

    #[distributed_lock(key = Self::KEY, client = self.locks, wait = "1s")]
    async fn own_client(&self) -> Result<S, LockError> {
        visit("order:7").await;
        Ok(S::default())
    }
}

#[tokio::test(start_paused = true)]
async fn receivers_by_value() {
    let order = Order { id: 7, paid: 0 };
    assert_excludes("order:7", async || order.clone().by_value().await).await;
    assert_excludes("order:7", async || order.clone().by_mutable_value().await).await;
    assert_excludes("order:7", async || Box::new(order.clone()).by_box().await).await;
    assert_excludes("order:7", async || Arc::new(order.clone()).by_arc().await).await;
}

#[tokio::test(start_paused = true)]
async fn receivers_by_reference() {
    let order = Order { id: 7, paid: 0 };
    assert_excludes("order:7", async || order.by_reference().await).await;
    assert_excludes("order:7", async || order.typed().await).await;
    assert_excludes("order:7", async || {
        Rc::new(order.clone()).by_rc_reference().await
    })
    .await;
    assert_excludes("order:7", async || {
        let mut order = order.clone();
        assert_eq!(order.by_mutable_reference().await?.paid, 1);
        assert_eq!(order.paid, 1);
        Ok::<_, LockError>(())
    })
    .await;
    assert_excludes("order:7", async || {
        let mut order = std::pin::pin!(order.clone());
        assert_eq!(order.as_mut().pinned().await?, 1);
        assert_eq!(order.paid, 1);
        Ok::<_, LockError>(())
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn associated_functions() {
    assert_excludes("order:7", async || Order::associated(7).await).await;
}

#[tokio::test(start_paused = true)]
async fn methods_of_generic_types_with_a_client_of_their_own() {
    assert_excludes_with("order:7", async |locks| {
        let service = Service::<u8> {
            locks: locks.clone(),
            store: PhantomData,
        };
        service.own_client().await
    })
    .await;
}
