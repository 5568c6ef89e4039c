use lock_runtime::{LockError, distributed_lock};

#[distributed_lock(key("order:{}", order_id, shop))]
async fn pay(order_id: u64, shop: &str) -> Result<usize, LockError> {
    Ok(shop.len())
}

fn main() {}
