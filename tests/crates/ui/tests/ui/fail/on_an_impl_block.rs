use lock_runtime::{LockError, distributed_lock};

struct Service;

#[distributed_lock(key = "order:{order_id}")]
impl Service {
    async fn pay(order_id: u64) -> Result<u64, LockError> {
        Ok(order_id)
    }
}

fn main() {}
