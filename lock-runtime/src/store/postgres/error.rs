//! Errors of PostgreSQL as errors of a store.

use std::error::Error as _;

use tokio_postgres::{Error, error::SqlState};

use super::failure::ends_connections;
use crate::store::{StoreError, StoreErrorKind, error::Shows};

/// The SQLSTATE of a swap of several records that conflicts.
pub(super) const CONFLICT: &str = "LK010";
/// The SQLSTATE of a grant that has to wait for a transaction of the user.
pub(super) const GUARDED: &str = "LK011";

/// The remedy for a row that another session has locked.
pub(super) const UNBLOCK: &str = "end the transaction that has locked it, or its session by \
    pg_terminate_backend; inspect and health name the process";

/// Turns an error of the driver into the error of a store.
pub(super) fn failed(error: &Error) -> StoreError {
    let kind = match error.code() {
        Some(code) => kind_of(code),
        // The server has another port, or speaks another protocol.
        None => StoreErrorKind::Unavailable,
    };
    let mut message = text(error);
    if let Some(remedy) = remedy(kind, error.code()) {
        message = format!("{message}; {remedy}");
    }
    let is_answer = error.code().is_some_and(|code| !ends_connections(code));
    StoreError::new(kind, message).showing(match is_answer {
        true => Shows::Answer,
        false => Shows::ByKind,
    })
}

fn kind_of(code: &SqlState) -> StoreErrorKind {
    use StoreErrorKind as Kind;
    let code = code.code();
    // A server may send a code of any length.
    match (code, code.get(..2).unwrap_or_default()) {
        ("42501", _) => Kind::Forbidden,
        ("3D000", _) => Kind::InvalidUrl,
        ("25006", _) => Kind::ReadOnly,
        // The schema, its table or its function is missing or has other columns.
        ("3F000" | "42P01" | "42883" | "42703", _) => Kind::IncompatibleFormat,
        ("55P03", _) => Kind::Blocked,
        (_, "28") => Kind::Unauthenticated,
        _ => Kind::Unavailable,
    }
}

fn remedy(kind: StoreErrorKind, code: Option<&SqlState>) -> Option<&'static str> {
    use StoreErrorKind as Kind;
    match (kind, code.map(SqlState::code)) {
        (Kind::Forbidden, _) => Some(
            "as the owner of the schema: grant usage on schema lock_runtime to <user>; \
             grant select on lock_runtime.format to <user>; \
             grant select, insert, update, delete on lock_runtime.record to <user>; \
             grant execute on all functions in schema lock_runtime to <user>",
        ),
        (Kind::ReadOnly, _) => {
            Some("connect to the primary, or add target_session_attrs=read-write and its address")
        }
        (Kind::IncompatibleFormat, _) => Some(
            "execute lock_runtime::store::postgres::MIGRATION as a user that may create a schema",
        ),
        (Kind::Blocked, _) => Some(UNBLOCK),
        (_, Some("53300")) => {
            Some("raise max_connections, or use fewer connections for each client")
        }
        (_, Some("53100")) => Some("make room on the disk of the server"),
        _ => None,
    }
}

/// Returns the message with its causes; that of the server with its detail.
fn text(error: &Error) -> String {
    if let Some(refused) = error.as_db_error() {
        let detail = refused.detail().map(|detail| format!(" ({detail})"));
        let (message, code) = (refused.message(), refused.code().code());
        return format!("{message}{} [{code}]", detail.unwrap_or_default());
    }
    match error.source() {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_code_of_any_length_has_a_kind() {
        let kind = |code| kind_of(&SqlState::from_code(code));
        assert_eq!(kind("28P01"), StoreErrorKind::Unauthenticated);
        for code in ["", "2", "\u{e9}", "2\u{e9}"] {
            assert_eq!(kind(code), StoreErrorKind::Unavailable, "{code}");
        }
    }
}
