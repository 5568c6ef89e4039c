use std::rc::Rc;

use lock_runtime::{LockError, distributed_lock};

#[distributed_lock(key = "order:{order_id}")]
async fn pay(order_id: u64) -> Result<u64, LockError> {
    let order = Rc::new(order_id);
    std::future::ready(()).await;
    Ok(*order)
}

#[tokio::main]
async fn main() {
    tokio::spawn(pay(7));
}
