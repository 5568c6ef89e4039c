use lock_runtime::{LockError, distributed_lock};

#[distributed_lock(key = "order:{order_id}")]
fn pay(order_id: u64) -> impl Future<Output = Result<u64, LockError>> {
    println!("{order_id}");
    async move { Ok(order_id) }
}

fn main() {}
