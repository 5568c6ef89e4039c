use lock_runtime::{LockError, distributed_lock};

struct Receipt;

#[distributed_lock(key = "order:{order_id}", on_busy = skip)]
async fn pay(order_id: u64) -> Result<Receipt, LockError> {
    println!("{order_id}");
    Ok(Receipt)
}

fn main() {}
