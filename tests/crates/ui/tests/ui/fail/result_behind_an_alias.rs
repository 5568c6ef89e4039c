use lock_runtime::distributed_lock;

struct PayError;
type Paid<T> = Result<T, PayError>;

#[distributed_lock(key = "order:{order_id}")]
async fn pay(order_id: u64) -> Paid<u64> {
    Ok(order_id)
}

fn main() {}
