//! The replies of a batch as one result, for tests in which none is to fail on its own.

use lock_runtime::store::{Hold, PollReply, Store, StoreError};

/// Replies, one for each call of a batch.
pub trait Replies<T> {
    /// All replies, or the first error.
    fn all(self) -> Result<Vec<T>, StoreError>;
}

impl<T> Replies<T> for Vec<Result<T, StoreError>> {
    fn all(self) -> Result<Vec<T>, StoreError> {
        self.into_iter().collect()
    }
}

/// Polls one queue entry.
pub async fn poll(store: &dyn Store, hold: &Hold) -> Result<PollReply, StoreError> {
    let mut replies = store.poll(std::slice::from_ref(hold)).await;
    assert_eq!(replies.len(), 1);
    replies.remove(0)
}
