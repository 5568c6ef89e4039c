use lock_runtime::{LockError, distributed_lock};

#[distributed_lock(key = order)]
async fn pay(order: String) -> Result<usize, LockError> {
    Ok(order.len())
}

fn main() {}
