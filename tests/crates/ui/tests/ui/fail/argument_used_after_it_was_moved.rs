use lock_runtime::{LockError, distributed_lock};

#[distributed_lock(key = "order:{order}")]
async fn pay(order: String) -> Result<usize, LockError> {
    drop(order);
    Ok(order.len())
}

fn main() {}
