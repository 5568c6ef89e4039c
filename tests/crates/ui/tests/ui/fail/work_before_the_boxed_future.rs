use std::pin::Pin;

use lock_runtime::{LockError, distributed_lock};

#[distributed_lock(key = "order:{order_id}")]
fn pay(order_id: u64) -> Pin<Box<dyn Future<Output = Result<u64, LockError>> + Send>> {
    println!("{order_id}");
    Box::pin(async move { Ok(order_id) })
}

fn main() {}
