use lock_runtime::{LockError, distributed_lock};

const CASHIERS: u32 = 3;

#[distributed_lock(key = "order:{order_id}", permits = CASHIERS)]
async fn pay(order_id: u64) -> Result<u64, LockError> {
    Ok(order_id)
}

fn main() {}
