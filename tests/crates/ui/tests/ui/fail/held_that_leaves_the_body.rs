use lock_runtime::{HeldLock, LockError, distributed_lock};

#[distributed_lock(key = "order:{order_id}", held = lock)]
async fn pay<'a>(order_id: u64) -> Result<&'a HeldLock, LockError> {
    Ok(lock)
}

fn main() {}
