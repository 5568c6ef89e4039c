async fn withdraw(pool: &PgPool, amount: i64, fence: FencingToken) -> Result<(), sqlx::Error> {
    let mut transaction = pool.begin().await?;
    sqlx::query("select lock_runtime.fenced($1, $2)")
        .bind("account:7")
        .bind(i64::from(fence))
        .execute(&mut *transaction)
        .await?;
    sqlx::query("update account set balance = balance - $1 where id = 7")
        .bind(amount)
        .execute(&mut *transaction)
        .await?;
    transaction.commit().await
}

fn is_stale(error: &sqlx::Error) -> bool {
    let code = error.as_database_error().and_then(|error| error.code());
    code.as_deref() == Some(lock_runtime::fencing::STALE)
}
