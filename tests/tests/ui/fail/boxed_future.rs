use lock_runtime::{LockError, distributed_lock};

use std::pin::Pin;

#[distributed_lock(key = "order:{order_id}")]
fn pay(order_id: u64) -> Pin<Box<dyn Future<Output = Result<u64, LockError>> + Send>> {
    Box::pin(async move { Ok(order_id) })
}

fn main() {}
