use lock_runtime::{LockError, distributed_lock};

#[distributed_lock(key = "order:{order_id}", reentrant)]
async fn pay(order_id: u64) -> Result<u64, LockError> {
    if order_id == 0 { Ok(0) } else { pay(order_id - 1).await }
}

fn main() {}
