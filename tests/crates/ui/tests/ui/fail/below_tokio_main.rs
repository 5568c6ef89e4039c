use lock_runtime::{LockError, distributed_lock};

#[tokio::main]
#[distributed_lock(key = "migration", global)]
async fn main() -> Result<(), LockError> {
    Ok(())
}
