use lock_runtime::distributed_lock;

#[distributed_lock(key = "order", global)]
struct Order {
    id: u64,
}

fn main() {}
