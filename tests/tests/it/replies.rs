//! The replies of a batch of renewals as one result, for tests in which none is to fail on its own.

use lock_runtime::store::{RenewReply, StoreError};

pub(crate) trait Replies {
    /// All replies, or the first error.
    fn all(self) -> Result<Vec<RenewReply>, StoreError>;
}

impl Replies for Vec<Result<RenewReply, StoreError>> {
    fn all(self) -> Result<Vec<RenewReply>, StoreError> {
        self.into_iter().collect()
    }
}
