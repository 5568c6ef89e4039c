//! Calls to a store and their replies, each as one type, so that the code that performs a call
//! need not know its purpose.

use std::time::Duration;

use crate::store::{
    AcquireReply, ConvertReply, Hold, KeyRequest, PollReply, Release, ReleaseReply, RenewReply,
    Renewal, StoreError,
};

/// A request to a store.
#[derive(Clone, Debug)]
pub(crate) enum Request {
    Acquire(KeyRequest),
    Poll(Hold),
    Renew(Renewal),
    /// Boxed: it is the largest by far, and no task that acquires a lock makes it.
    Release(Box<Release>),
    Abandon(Hold),
    Convert(Hold),
}

/// A reply of a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Reply {
    Acquire(AcquireReply),
    Poll(PollReply),
    Renew(RenewReply),
    Release(ReleaseReply),
    Abandoned,
    Convert(ConvertReply),
}

impl Reply {
    /// Returns the reply without its grant, which has been revoked since.
    pub(super) fn revoked(self) -> Self {
        match self {
            Self::Acquire(AcquireReply::Granted(_)) => Self::Acquire(AcquireReply::Busy {
                holder_ttl: None,
                has_waiters: false,
            }),
            Self::Poll(PollReply::Granted(_)) => Self::Poll(PollReply::Gone),
            Self::Renew(RenewReply::Renewed { .. }) => Self::Renew(RenewReply::Gone),
            other => other,
        }
    }
}

/// The reply to a request, or the reason why there is none.
pub(crate) type Answer = Result<Reply, StoreError>;

/// A request to send now. After `timeout` its reply is no longer awaited.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub(crate) request: Request,
    pub(crate) timeout: Duration,
}

impl Call {
    pub(crate) fn new(request: Request, timeout: Duration) -> Self {
        Self { request, timeout }
    }
}
