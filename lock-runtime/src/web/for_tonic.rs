//! Integration with tonic.

use tonic::{Code, Status};

use super::{ErrorClass, public_detail, retry_info};
use crate::error::LockError;

/// Converts the error as in the [table](crate::web), with `google.rpc.RetryInfo` if the caller
/// may retry. The error itself is emitted as an event.
///
/// With this conversion, a locked handler can return tonic's `Result<Response<T>, Status>`.
impl From<LockError> for Status {
    fn from(error: LockError) -> Self {
        let class = error.class();
        class.trace_of(error.name(), error.code(), &error);
        let (code, message) = (class.grpc_code(), public_detail(error.kind()));
        let details = class
            .retry_after(ErrorClass::DEFAULT_RETRY_AFTER, error.free_in())
            .map(|after| retry_info(code, message, after))
            .unwrap_or_default();
        Self::with_details(Code::from_i32(code.into()), message, details.into())
    }
}
