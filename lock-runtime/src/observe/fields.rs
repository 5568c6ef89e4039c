//! Parts of serialized forms (feature `serde`).

use std::time::Duration;

use serde::{Serialize, Serializer};

use crate::error::LockError;

/// Writes whole milliseconds.
pub(crate) fn millis<S: Serializer>(time: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    known_millis(&Some(*time), serializer)
}

/// Writes whole milliseconds, or null.
pub(crate) fn known_millis<S: Serializer>(
    time: &Option<Duration>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    let millis = time.map(|time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX));
    millis.serialize(serializer)
}

/// Writes the code and the text of each error.
pub(crate) fn errors<S: Serializer>(
    errors: &[LockError],
    serializer: S,
) -> Result<S::Ok, S::Error> {
    #[derive(Serialize)]
    struct Fields {
        code: &'static str,
        error: String,
    }
    serializer.collect_seq(errors.iter().map(|error| Fields {
        code: error.code(),
        error: format!("{error:#}"),
    }))
}
