use lock_runtime::{LockError, distributed_lock};

#[distributed_lock(key("order:{}", order_id, shop))]
async fn pay(order_id: usize, shop: &str) -> Result<usize, LockError> {
    Ok(order_id + shop.len())
}

fn main() {}
