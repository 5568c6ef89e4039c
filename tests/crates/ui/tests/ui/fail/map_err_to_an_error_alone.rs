use lock_runtime::{LockError, distributed_lock};

#[distributed_lock(key = "order:{order_id}", map_err = explain)]
async fn pay(order_id: u64) -> Result<u64, String> {
    Ok(order_id)
}

fn explain(error: LockError) -> String {
    error.to_string()
}

fn main() {}
