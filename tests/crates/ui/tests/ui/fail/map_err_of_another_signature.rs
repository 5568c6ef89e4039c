use lock_runtime::distributed_lock;

#[distributed_lock(key = "order:{order_id}", map_err = explain)]
async fn pay(order_id: u64) -> Result<u64, String> {
    Ok(order_id)
}

fn explain(code: u16) -> Result<u64, String> {
    Err(code.to_string())
}

fn main() {}
