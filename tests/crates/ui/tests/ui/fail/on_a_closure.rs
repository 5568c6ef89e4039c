use lock_runtime::distributed_lock;

fn main() {
    let _pay = #[distributed_lock(key = "order:{order_id}")]
    async |order_id: u64| println!("{order_id}");
}
