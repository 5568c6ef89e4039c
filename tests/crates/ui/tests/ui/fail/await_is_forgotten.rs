use lock_runtime::{LockError, distributed_lock};

#[distributed_lock(key = "order:{order_id}")]
async fn pay(order_id: u64) -> Result<u64, LockError> {
    let amount: u64 = amount(order_id);
    Ok(amount)
}

async fn amount(order_id: u64) -> u64 {
    order_id
}

fn main() {}
