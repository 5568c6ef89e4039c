use lock_runtime::{LockError, distributed_lock};

trait Payments {
    #[distributed_lock(key = "order:{order_id}")]
    async fn pay(&self, order_id: u64) -> Result<u64, LockError>;
}

fn main() {}
