use lock_runtime::distributed_lock;

struct PayError;

#[distributed_lock(key = "order:{order_id}")]
async fn pay(order_id: u64) -> Result<u64, PayError> {
    Ok(order_id)
}

fn main() {}
