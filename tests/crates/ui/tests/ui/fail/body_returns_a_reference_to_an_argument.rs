use lock_runtime::{LockError, distributed_lock};

#[distributed_lock(key = "order:{order}")]
async fn pay(order: String) -> Result<&'static str, LockError> {
    Ok(&order)
}

fn main() {}
