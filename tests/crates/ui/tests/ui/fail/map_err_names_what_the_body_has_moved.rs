use lock_runtime::{LockError, distributed_lock};

#[distributed_lock(key = "order:{order}", map_err = |error| explain(order, error))]
async fn pay(order: String) -> Result<String, String> {
    Ok(order)
}

fn explain(order: String, error: LockError) -> Result<String, String> {
    Err(format!("{order}: {error}"))
}

fn main() {}
