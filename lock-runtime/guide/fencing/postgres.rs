use lock_runtime::{LockClient, LockGuard, fencing};
use tokio_postgres::{Client, NoTls};

async fn withdraw(
    db: &mut Client, guard: &LockGuard, amount: i64,
) -> Result<(), fencing::FencingError> {
    let transaction = db.transaction().await?;
    fencing::fenced(&transaction, "account:7", guard.fence()).await?;
    let update = "update account set balance = balance - $1 where id = 7";
    transaction.execute(update, &[&amount]).await?;
    Ok(transaction.commit().await?)
}

# #[tokio::main]
# async fn main() -> Result<(), Box<dyn std::error::Error>> {
let locks = LockClient::connect("redis://127.0.0.1/").await?;
let (mut db, connection) = tokio_postgres::connect("postgres://127.0.0.1/shop", NoTls).await?;
tokio::spawn(connection);
fencing::install(&db).await?; // once; its comment names the rights of other roles

let guard = locks.exclusive("account:7").acquire().await?;
match withdraw(&mut db, &guard, 10).await {
    Err(error) if error.is_stale() => println!("the lock was lost: {error:#}"),
    result => result?,
}
# Ok(()) }
