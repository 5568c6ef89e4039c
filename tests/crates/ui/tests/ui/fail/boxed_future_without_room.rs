use std::pin::Pin;

use lock_runtime::distributed_lock;

#[distributed_lock(key = "order:{order_id}")]
fn pay(order_id: u64) -> Pin<Box<dyn Future<Output = u64> + Send>> {
    Box::pin(async move { order_id })
}

fn main() {}
