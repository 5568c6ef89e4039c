//! A stock in PostgreSQL, whose sales are transactions of the holder of the lock.

use anyhow::Context;
use deadpool_postgres::{Manager, Object, Pool, Runtime, Timeouts};
use lock_runtime::HeldLock;
use tokio::task::yield_now;
use tokio_postgres::{
    Config, GenericClient, NoTls,
    types::{ToSql, Type},
};

use super::{PATIENCE, lock_namespace, locks_in_use};
use crate::shop::{Refusal, Sale};

/// The SQLSTATE with which `guard` refuses a holder that has lost its lock.
const LOST: &str = "LK001";

/// Values with their types, so that a statement is one round trip.
type Values<'a> = [(&'a (dyn ToSql + Sync), Type)];

/// A stock in a table of this run.
#[derive(Clone)]
pub(crate) struct PostgresStock {
    connections: Pool,
    url: String,
    run: String,
}

impl PostgresStock {
    /// The largest number of connections of one process, besides those of its locks.
    pub(crate) const CONNECTIONS: usize = 4;

    /// Connects when the first call is made.
    pub(super) fn new(url: &str, run: &str) -> anyhow::Result<Self> {
        let mut config: Config = url
            .parse()
            .context("cannot keep the stock in PostgreSQL at this URL")?;
        config.application_name("flash-sale");
        let timeouts = Timeouts {
            create: Some(PATIENCE),
            ..Timeouts::default()
        };
        let connections = Pool::builder(Manager::new(config, NoTls))
            .max_size(Self::CONNECTIONS)
            .runtime(Runtime::Tokio1)
            .timeouts(timeouts)
            .build()?;
        Ok(Self {
            connections,
            url: url.to_owned(),
            run: run.to_owned(),
        })
    }

    async fn connection(&self) -> anyhow::Result<Object> {
        let connection = self.connections.get().await;
        connection.context("no connection to PostgreSQL")
    }

    pub(super) async fn create(&self) -> anyhow::Result<()> {
        let create = format!(
            "create table \"{}\" (item text primary key, pieces bigint not null)",
            self.run
        );
        Ok(self.connection().await?.batch_execute(&create).await?)
    }

    pub(super) async fn left(&self, item: &str) -> anyhow::Result<Option<u64>> {
        self.left_in(&**self.connection().await?, item).await
    }

    pub(super) async fn write(&self, item: &str, left: u64) -> anyhow::Result<()> {
        self.write_in(&**self.connection().await?, item, left).await
    }

    /// Sells one piece: a read, a pause and a write, in a transaction that only the holder of the
    /// lock can commit.
    ///
    /// The transaction ends before the function returns, and so before the lock is released.
    pub(crate) async fn sell(&self, item: &str, lock: &HeldLock) -> Result<Sale, Refusal> {
        let mut connection = self.connection().await?;
        let sale = connection.transaction().await;
        let sale = sale.context("cannot begin")?;
        self.guard(&*sale, lock).await?;
        let left = self.left_in(&*sale, item).await?;
        let left = left.ok_or(Refusal::UnknownItem)?;
        yield_now().await;
        let sold = match left.checked_sub(1) {
            Some(left) => {
                self.write_in(&*sale, item, left).await?;
                Sale::Sold
            }
            None => Sale::SoldOut,
        };
        sale.commit().await.context("cannot commit")?;
        Ok(sold)
    }

    /// Ensures that no other client gets the lock before the end of the transaction.
    async fn guard(&self, sale: &impl GenericClient, lock: &HeldLock) -> Result<(), Refusal> {
        let name = format!("{}:{}", lock_namespace(&self.run), lock.key());
        let token = i64::from(lock.fence());
        let arguments: &Values<'_> = &[(&name, Type::TEXT), (&token, Type::INT8)];
        let guard = sale.query_typed("select lock_runtime.guard($1, $2)", arguments);
        guard.await.map_err(|error| {
            let is_lost = error.code().is_some_and(|code| code.code() == LOST);
            let refusal = if is_lost {
                Refusal::Guard
            } else {
                Refusal::Stock
            };
            refusal(error.into())
        })?;
        Ok(())
    }

    async fn left_in(&self, to: &impl GenericClient, item: &str) -> anyhow::Result<Option<u64>> {
        let select = format!("select pieces from \"{}\" where item = $1", self.run);
        let row = to.query_typed_opt(&select, &[(&item, Type::TEXT)]).await?;
        let left = row.map(|row| row.try_get::<_, i64>(0)).transpose()?;
        Ok(left.map(i64::cast_unsigned))
    }

    async fn write_in(&self, to: &impl GenericClient, item: &str, left: u64) -> anyhow::Result<()> {
        let write = format!(
            "insert into \"{}\" values ($1, $2) on conflict (item) do update set pieces = excluded.pieces",
            self.run
        );
        let left = left.cast_signed();
        let values: &Values<'_> = &[(&item, Type::TEXT), (&left, Type::INT8)];
        to.execute_typed(&write, values).await?;
        Ok(())
    }

    /// Counts the locks that are held or that requests wait for.
    pub(super) async fn leftover_locks(&self) -> anyhow::Result<u64> {
        locks_in_use(&self.url, &self.run).await
    }

    /// Removes the table and the records of the locks.
    pub(super) async fn clear(&self) -> anyhow::Result<()> {
        let connection = self.connection().await?;
        let drop = format!("drop table if exists \"{}\"", self.run);
        connection.batch_execute(&drop).await?;
        let records = format!("{}:", lock_namespace(&self.run));
        let delete = "delete from lock_runtime.record where starts_with(name, $1)";
        connection
            .execute_typed(delete, &[(&records, Type::TEXT)])
            .await?;
        Ok(())
    }
}

// A module, as `tests/run.sh` skips those of this name where PostgreSQL is not asked for.
#[cfg(test)]
mod stores {
    use lock_runtime::LockClient;
    use lock_tests::shared_postgres;

    use super::*;

    const KEY: &str = "stock:sneaker";

    #[tokio::test]
    async fn a_sale_whose_lock_was_lost_is_refused_and_changes_nothing() {
        let url = shared_postgres().await.new_database().await;
        let client = LockClient::builder().namespace(lock_namespace("sale"));
        let locks = client.connect(&url).await.unwrap();
        let stock = PostgresStock::new(&url, "sale").unwrap();
        stock.create().await.unwrap();
        stock.write("sneaker", 10).await.unwrap();

        let lost = locks.exclusive(KEY).acquire().await.unwrap();
        let sale = stock.sell("sneaker", &lost.held()).await;
        assert!(matches!(sale, Ok(Sale::Sold)), "{sale:?}");
        locks.revoke(KEY).await.unwrap();
        let next = locks.exclusive(KEY).acquire().await.unwrap();
        let sale = stock.sell("sneaker", &lost.held()).await;
        assert!(matches!(sale, Err(Refusal::Guard(_))), "{sale:?}");
        assert_eq!(stock.left("sneaker").await.unwrap(), Some(9));

        assert_eq!(stock.leftover_locks().await.unwrap(), 1);
        next.release().await.unwrap();
        assert_eq!(stock.leftover_locks().await.unwrap(), 0);
    }
}
