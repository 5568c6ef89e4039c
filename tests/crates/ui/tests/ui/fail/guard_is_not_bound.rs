#![deny(unused_must_use)]

use lock_runtime::{LockClient, LockError};

async fn pay(locks: &LockClient) -> Result<(), LockError> {
    locks.exclusive("order:42").acquire();
    locks.exclusive("order:42").acquire().await?;
    locks.exclusive("order:42").acquire().await?.while_held(async {});
    Ok(())
}

fn main() {}
