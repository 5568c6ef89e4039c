use lock_runtime::{LockError, distributed_lock};

const LEASE_SECONDS: u64 = 30;

#[distributed_lock(key = "order:{order_id}", lease = LEASE_SECONDS)]
async fn pay(order_id: u64) -> Result<u64, LockError> {
    Ok(order_id)
}

fn main() {}
