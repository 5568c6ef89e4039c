use lock_runtime::distributed_lock;

#[distributed_lock(key = "order:{order_id}")]
async fn pay(order_id: u64) -> Result<u64, String> {
    Ok(order_id)
}

fn main() {}
