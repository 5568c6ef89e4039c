//! The content of a view, before it is written as HTML or JSON.

use std::time::Duration;

use futures_util::future::join;
use http::StatusCode;
use lock_runtime::{
    ErrorClass, LockClient, LockError, LockErrorKind, LockKind,
    health::Health,
    operator::{Activity, Inspection, LockPage},
};
use serde_json::{Value, json};

use super::query::{View, kind_name};

/// The number of locks on a page.
const PER_PAGE: usize = 100;
/// The time for which the names of the locks are read.
const PATIENCE: Duration = Duration::from_secs(5);

pub(super) enum Content {
    Locks(LockPage),
    /// The state of the lock, and the number of holders of the other lock of this name, with or
    /// without permits.
    Lock(Result<Inspection, LockError>, usize),
    Activity(Activity),
    Health(Health),
}

impl Content {
    pub(super) async fn load(locks: &LockClient, view: &View) -> Self {
        match view {
            View::Locks { prefix, after } => {
                let page = locks.list_page(prefix).after(after.clone());
                Self::Locks(page.limit(PER_PAGE).timeout(PATIENCE).await)
            }
            View::Lock { key, kind } => {
                let both = join(
                    locks.inspect(key).into_future(),
                    locks.inspect(key).permits().into_future(),
                );
                let (lock, permits) = both.await;
                let (shown, other) = match kind {
                    LockKind::Permits => (permits, lock),
                    _ => (lock, permits),
                };
                Self::Lock(shown, other.map_or(0, |other| other.holders.len()))
            }
            View::Activity => Self::Activity(locks.activity()),
            View::Health => Self::Health(locks.health().await),
        }
    }

    /// An error of the store, unless a part of the content could be read.
    pub(super) fn status(&self) -> StatusCode {
        let error = match self {
            Self::Locks(page) if page.locks.is_empty() => page.errors.first(),
            // The answer is that it is no lock.
            Self::Lock(Err(error), _) if error.kind() == LockErrorKind::ForeignKey => {
                return StatusCode::CONFLICT;
            }
            Self::Lock(Err(error), _) => Some(error),
            _ => None,
        };
        error.map_or(StatusCode::OK, status_of)
    }

    pub(super) fn json(&self, view: &View) -> Value {
        let written = match self {
            Self::Locks(page) => serde_json::to_value(page),
            Self::Lock(Ok(state), _) => serde_json::to_value(state),
            Self::Lock(Err(error), _) => Ok(error_json(error)),
            Self::Activity(activity) => serde_json::to_value(activity),
            Self::Health(health) => serde_json::to_value(health),
        };
        let mut value = written.unwrap_or_else(|error| json!({ "error": error.to_string() }));
        match (self, view) {
            // As in the link to the next page.
            (Self::Locks(page), _) => {
                let next = page.next.as_ref();
                let next = next.map(|(key, kind)| format!("{}:{key}", kind_name(*kind)));
                value["next"] = next.into();
            }
            (_, View::Lock { key, kind }) => {
                value["key"] = key.as_str().into();
                value["kind"] = kind_name(*kind).into();
            }
            _ => {}
        }
        value
    }
}

pub(super) fn status_of(error: &LockError) -> StatusCode {
    let status = ErrorClass::from(error.kind()).http_status();
    StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
}

pub(super) fn error_json(error: &LockError) -> Value {
    json!({ "code": error.code(), "error": format!("{error:#}") })
}
