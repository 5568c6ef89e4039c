use lock_runtime::distributed_lock;

type Paid = u64;

#[distributed_lock(key = "order:{order_id}")]
async fn pay(order_id: u64) -> Paid {
    order_id
}

fn main() {}
