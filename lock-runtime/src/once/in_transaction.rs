//! Results that are recorded by a transaction of the application.

use std::sync::Arc;

use tokio_postgres::Transaction;

use super::OnceGuard;
use crate::{
    error::{LockError, LockErrorKind, Loss},
    request::spec::Mode,
    store::{Hold, RecordStore, Release, ReleaseReply, StoreError},
};

impl OnceGuard {
    /// Records the result in a transaction on the database of the locks, PostgreSQL: the work is
    /// done if and only if the transaction commits. Its role needs the rights of a client.
    ///
    /// Call it last in the transaction, and end that before the lease ends: the transaction locks
    /// the record of the lock, so that no renewal succeeds. Release or drop this guard when the
    /// transaction has ended, in either way. In it the effect of the work is exact as well, as far
    /// as it is in this database.
    ///
    /// ```no_run
    /// # use lock_runtime::{OnceEntry, LockClient};
    /// # async fn pay(
    /// #     locks: LockClient, database: &mut tokio_postgres::Client,
    /// # ) -> Result<(), Box<dyn std::error::Error>> {
    /// if let OnceEntry::Vacant(mut guard) = locks.once("invoice:42").begin().await? {
    ///     let transaction = database.transaction().await?;
    ///     transaction.execute("update account set amount = amount - 5", &[]).await?;
    ///     guard.complete_in(&transaction, b"receipt 7").await?;
    ///     transaction.commit().await?;
    ///     guard.release().await?;
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `Lost` if the lock is no longer held, `InvalidResult` for a result that is too long,
    /// `Unavailable` if the record changes too often, and errors of the transaction, such as
    /// `Forbidden`. A lock in another store is refused as `InvalidSpec`. After any error roll the
    /// transaction back.
    ///
    /// # Cancellation
    /// If the future is dropped, the result may or may not be a part of the transaction.
    pub async fn complete_in(
        &mut self,
        transaction: &Transaction<'_>,
        result: &[u8],
    ) -> Result<(), LockError> {
        let (key, fence) = (self.guard.key().clone(), self.guard.fence());
        let named = |error: LockError| error.with_key(&key);
        self.check_length(result).map_err(named)?;
        let view = self.guard.views()[0].clone();
        let held = |hold: &Hold| (hold.mode == Mode::Exclusive).then(|| hold.clone());
        let hold = view
            .core
            .visit(|state, _| state.session.hold_of(view.id).and_then(held));
        let lost = || {
            let message = "it is no longer held, and its result was not recorded";
            let loss = view.loss().unwrap_or(Loss::Taken);
            named(LockError::new(LockErrorKind::Lost(loss), message))
        };
        let release = Release::new(hold.ok_or_else(lost)?).keep_for(Some(self.keep));
        let release = release.result(Some((fence, Arc::from(result))));
        let store = view.core.store.as_any();
        let store = store.and_then(|store| store.downcast_ref::<RecordStore>());
        let reply = match store {
            Some(store) => store.release_in(release, transaction).await,
            None => Err(StoreError::elsewhere()),
        };
        match reply.map_err(|error| named(LockError::from_store(error)))? {
            ReleaseReply::NotHeld => Err(lost()),
            _ => {
                self.run.recorded = Some(result.len());
                Ok(())
            }
        }
    }
}
