use lock_runtime::{LockError, distributed_lock};

#[distributed_lock(key = "shop:{shop}")]
async fn pay(shop: u64, orders: Vec<u64>) -> Result<usize, LockError> {
    orders.push(1);
    Ok(orders.len())
}

fn main() {}
