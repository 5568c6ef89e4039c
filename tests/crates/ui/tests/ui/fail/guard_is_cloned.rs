use lock_runtime::{LockClient, LockError};

async fn pay(locks: &LockClient) -> Result<(), LockError> {
    let guard = locks.exclusive("order:42").acquire().await?;
    let another = guard.clone();
    drop(guard);
    another.release().await
}

fn main() {}
