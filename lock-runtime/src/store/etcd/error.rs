//! The errors of etcd.

use std::error::Error;

use tonic::{Code, ConnectError, Status};

use crate::store::{StoreError, StoreErrorKind};

const LONGER: &str = ": the record of a lock is longer than etcd accepts; make the result shorter, or raise \
                      --max-request-bytes";

/// Returns the error of a call to `member`. A call that was refused has certainly not been
/// executed.
pub(super) fn of_call(member: &str, status: &Status) -> StoreError {
    use StoreErrorKind as Kind;
    let message = status.message();
    let (kind, is_unsent, remedy) = match status.code() {
        Code::PermissionDenied => (
            Kind::Forbidden,
            true,
            ": grant the role of the user `readwrite` on the prefix of the namespace",
        ),
        Code::Unauthenticated => (Kind::Unauthenticated, true, ""),
        Code::InvalidArgument if names_the_user(message) => (
            Kind::Unauthenticated,
            true,
            ": write the user and the password into the URL",
        ),
        Code::FailedPrecondition if message.contains("authentication is not enabled") => {
            (Kind::InvalidUrl, true, ": leave the user out of the URL")
        }
        Code::ResourceExhausted if message.contains("space exceeded") => (
            Kind::Full,
            true,
            ": compact and defragment the members, or raise --quota-backend-bytes, and then \
             `etcdctl alarm disarm`; set --auto-compaction-retention",
        ),
        // The reply to a change is short, so it is the request. It would be refused again.
        Code::ResourceExhausted if message.contains("message larger than max") => {
            (Kind::Unsupported, false, LONGER)
        }
        Code::InvalidArgument if message.contains("request is too large") => {
            (Kind::Unsupported, true, LONGER)
        }
        Code::ResourceExhausted => (Kind::Unavailable, is_of_etcd(message), ""),
        Code::DataLoss => (
            Kind::WrongServer,
            false,
            ": the cluster has raised the alarm CORRUPT; restore the member",
        ),
        Code::InvalidArgument if message.contains("too many operations") => (
            Kind::Unsupported,
            true,
            ": request fewer keys at once, or raise --max-txn-ops",
        ),
        _ if is_unable(status) => (Kind::Unavailable, true, ""),
        Code::Unimplemented => (Kind::WrongServer, true, ""),
        Code::InvalidArgument => (Kind::Unsupported, is_of_etcd(message), ""),
        _ => (Kind::Unavailable, was_not_connected(status), ""),
    };
    let text = format!("etcd at {member}: {}{remedy}", said(status));
    StoreError::new(kind, text).with_unsent(is_unsent)
}

/// Returns whether etcd itself has refused a call, which it does before the change; not the library
/// on either side, of which one refuses a reply that is too long.
fn is_of_etcd(message: &str) -> bool {
    message.starts_with("etcdserver: ")
}

fn names_the_user(message: &str) -> bool {
    message.contains("user name is empty") || message.contains("authentication failed")
}

/// Returns whether the member has refused the token of the user, before it did anything. It may
/// have ended, be of another member, or be older than the latest change of rights.
pub(super) fn is_token_refused(status: &Status) -> bool {
    status.code() == Code::Unauthenticated && !status.message().contains("authentication failed")
        || status.message().contains("invalid auth token")
        || status.message().contains("revision of auth store is old")
        || status.message().contains("revision in header is old")
        || status.message().contains("user name is empty")
}

/// Returns whether the etcd lease of the written keys has ended. Nothing was done.
pub(super) fn is_lease_gone(error: &StoreError) -> bool {
    error.to_string().contains("requested lease not found")
}

/// Returns whether another member may serve the call.
pub(super) fn is_of_member(status: &Status) -> bool {
    is_unable(status)
        || matches!(
            status.code(),
            Code::Unavailable
                | Code::Unknown
                | Code::Cancelled
                | Code::DeadlineExceeded
                | Code::Internal
        )
}

/// Returns whether the member is a learner, or of an older version than the call.
fn is_unable(status: &Status) -> bool {
    let message = status.message();
    message.contains("not supported for learner") || message.contains("not capable")
}

fn sources(status: &Status) -> impl Iterator<Item = &(dyn Error + 'static)> {
    std::iter::successors(status.source(), |error| (*error).source())
}

/// Returns whether the member has closed a connection, for a reason that it need not have given.
pub(super) fn was_closed(status: &Status) -> bool {
    let closes = |text: &str| text.contains("closed") || text.contains("received fatal alert");
    closes(status.message()) || sources(status).any(|error| closes(&error.to_string()))
}

fn was_not_connected(status: &Status) -> bool {
    sources(status).any(|error| error.is::<ConnectError>())
}

/// The message of the server, or the causes of a failure on the way to it.
fn said(status: &Status) -> String {
    let mut text = status.message().to_owned();
    for error in sources(status).map(ToString::to_string) {
        if !text.contains(&error) {
            text = format!("{text}: {error}");
        }
    }
    text
}

pub(super) fn no_reply() -> StoreError {
    let message = "etcd: a reply has no content for a part of the call";
    StoreError::new(StoreErrorKind::WrongServer, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_replaced_if_it_has_ended_or_the_rights_have_changed() {
        for (code, message, is_refused) in [
            (
                Code::Unauthenticated,
                "etcdserver: invalid auth token",
                true,
            ),
            (Code::Unavailable, "etcdserver: invalid auth token", true),
            (
                Code::InvalidArgument,
                "etcdserver: revision of auth store is old",
                true,
            ),
            (
                Code::InvalidArgument,
                "etcdserver: user name is empty",
                true,
            ),
            (
                Code::Unauthenticated,
                "etcdserver: authentication failed, invalid user ID or password",
                false,
            ),
            (
                Code::PermissionDenied,
                "etcdserver: permission denied",
                false,
            ),
        ] {
            let status = Status::new(code, message);
            assert_eq!(is_token_refused(&status), is_refused, "{message}");
        }
    }

    #[test]
    fn a_learner_is_left_for_another_member() {
        let message = "etcdserver: rpc not supported for learner";
        for code in [Code::Unavailable, Code::FailedPrecondition] {
            let status = Status::new(code, message);
            assert!(is_of_member(&status));
            let error = of_call("a:2379", &status);
            assert_eq!(error.kind(), StoreErrorKind::Unavailable);
            assert!(error.is_unsent());
        }
    }

    #[test]
    fn an_error_has_its_kind_and_remedy() {
        use StoreErrorKind::{
            Forbidden, Full, InvalidUrl, Unauthenticated, Unavailable, Unsupported,
        };
        for (code, message, kind, remedy) in [
            (
                Code::PermissionDenied,
                "permission denied",
                Forbidden,
                "readwrite",
            ),
            (
                Code::InvalidArgument,
                "etcdserver: user name is empty",
                Unauthenticated,
                "URL",
            ),
            (
                Code::FailedPrecondition,
                "etcdserver: authentication is not enabled",
                InvalidUrl,
                "leave",
            ),
            (
                Code::ResourceExhausted,
                "etcdserver: mvcc: database space exceeded",
                Full,
                "disarm",
            ),
            (
                Code::ResourceExhausted,
                "etcdserver: too many requests",
                Unavailable,
                "",
            ),
            (
                Code::InvalidArgument,
                "etcdserver: request is too large",
                Unsupported,
                "max-request-bytes",
            ),
            (
                Code::ResourceExhausted,
                "grpc: received message larger than max (3000325 vs. 2097152)",
                Unsupported,
                "max-request-bytes",
            ),
            (
                Code::InvalidArgument,
                "etcdserver: too many operations in txn request",
                Unsupported,
                "fewer",
            ),
            (Code::Unavailable, "etcdserver: no leader", Unavailable, ""),
            (Code::Unknown, "etcdserver: leader changed", Unavailable, ""),
        ] {
            let error = of_call("a:2379", &Status::new(code, message));
            assert_eq!(error.kind(), kind, "{error}");
            assert!(error.to_string().contains(remedy), "{error}");
            let may_be_executed =
                matches!(code, Code::Unavailable | Code::Unknown) || message.starts_with("grpc: ");
            assert_eq!(error.is_unsent(), !may_be_executed, "{error}");
        }
    }
}
