use lock_runtime::distributed_lock;

#[distributed_lock(key = "order:{order_id}")]
async fn pay(order_id: u64) -> Option<u64> {
    Some(order_id)
}

fn main() {}
