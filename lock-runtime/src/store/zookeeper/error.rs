//! The errors of ZooKeeper.

use std::fmt;

use crate::store::{StoreError, StoreErrorKind};

pub(super) const NO_NODE: i32 = -101;
pub(super) const NO_RIGHT: i32 = -102;
pub(super) const BAD_VERSION: i32 = -103;
pub(super) const NODE_EXISTS: i32 = -110;

/// Returns the error of a call to `server` by its code.
pub(super) fn of_call(server: &str, code: i32) -> StoreError {
    use StoreErrorKind as Kind;
    let (kind, text) = match code {
        NO_RIGHT => (
            Kind::Forbidden,
            "no right to a node: the user needs `cdrwa` on all nodes of the namespace, which are those of the \
             user that has created them",
        ),
        NO_NODE => (Kind::Unavailable, "a node of the namespace was removed"),
        -6 => (Kind::WrongServer, "the server does not know a request"),
        -8 => (Kind::Unsupported, "the server does not accept a request"),
        -115 => (Kind::Unauthenticated, "the user was refused"),
        -119 => (Kind::ReadOnly, "the server only reads: it has no quorum"),
        -125 => (
            Kind::Full,
            "the quota of the namespace is used up: raise it (`setquota`)",
        ),
        -112 | -118 => (Kind::Unavailable, "the session has ended"),
        -127 => (Kind::Unavailable, "the server has too many requests"),
        _ => (Kind::Unavailable, "the server has failed"),
    };
    let text = format!("ZooKeeper at {server}: {text} ({code})");
    let is_refused = matches!(
        code,
        NO_NODE | NO_RIGHT | BAD_VERSION | NODE_EXISTS | -8 | -115
            ..=-112 | -118 | -119 | -125 | -127
    );
    StoreError::new(kind, text).with_unsent(is_refused)
}

/// Returns the error of a call without a reply.
pub(super) fn lost(server: &str) -> StoreError {
    let text = format!("ZooKeeper at {server}: the connection was lost");
    StoreError::new(StoreErrorKind::Unavailable, text)
}

pub(super) fn unconnected(server: &str, cause: impl fmt::Display) -> StoreError {
    let text = format!("ZooKeeper at {server}: {cause}");
    StoreError::new(StoreErrorKind::Unavailable, text).with_unsent(true)
}

/// Returns the error of a malformed reply.
pub(super) fn no_reply() -> StoreError {
    let message = "ZooKeeper: a reply is incomplete, or of another server";
    StoreError::new(StoreErrorKind::WrongServer, message)
}
