use lock_runtime::{LockError, distributed_lock};

struct Service;

impl Service {
    #[distributed_lock(key = "order:{order_id}", client = self.locks)]
    async fn pay(&self, order_id: u64) -> Result<u64, LockError> {
        Ok(order_id)
    }
}

fn main() {}
