use lock_runtime::distributed_lock;

#[distributed_lock(key = "order:{order_id}", on_busy = skip, map_err = |_| 0)]
async fn pay(order_id: u64) -> u64 {
    order_id
}

fn main() {}
