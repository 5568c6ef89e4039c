use lock_runtime::{LockError, LockSpec, distributed_lock};

const PAYMENT: Option<LockSpec> = None;

#[distributed_lock(key = "order:{order_id}", spec = PAYMENT)]
async fn pay(order_id: u64) -> Result<u64, LockError> {
    Ok(order_id)
}

fn main() {}
