use lock_runtime::{LockError, distributed_lock};

#[distributed_lock(key = "shop:{shop}")]
async fn pay(shop: u64, mut orders: Vec<u64>) -> Result<usize, LockError> {
    let first = &mut orders;
    let second = &mut orders;
    first.push(1);
    second.push(2);
    Ok(orders.len())
}

fn main() {}
