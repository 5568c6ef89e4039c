#![deny(unused_must_use)]

use lock_runtime::{LockClient, LockError};

async fn pay(locks: &LockClient) -> Result<(), LockError> {
    let guard = locks.exclusive("order:7").acquire().await?;
    guard.release();
    locks.exclusive("order:8").run(async |_| {});
    Ok(())
}

fn main() {}
