use std::pin::Pin;

use lock_runtime::{LockError, distributed_lock};

#[distributed_lock(key = "order:{order_id}")]
fn pay(order_id: &u64) -> Pin<Box<dyn Future<Output = Result<u64, LockError>> + '_>> {
    Box::pin(async { Ok(*order_id) })
}

fn main() {}
