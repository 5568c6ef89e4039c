use lock_runtime::{LockError, distributed_lock};

#[distributed_lock(key = "order:{order_id}", leese = "30s")]
async fn pay(order_id: u64) -> Result<u64, LockError> {
    Ok(order_id)
}

#[tokio::main]
async fn main() {
    let paid = pay(7).await.map(|paid| paid + 1);
    println!("{paid:?}");
}
