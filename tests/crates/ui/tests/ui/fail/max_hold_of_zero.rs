use lock_runtime::{LockError, distributed_lock};

#[distributed_lock(key = "order:{order_id}", max_hold = "0s")]
async fn pay(order_id: u64) -> Result<u64, LockError> {
    Ok(order_id)
}

fn main() {}
