//! Parts of serialized forms (feature `serde`).

use std::{ops::Deref, time::Duration};

use serde::{Serialize, Serializer};

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

/// Writes a text.
pub(crate) fn text<S: Serializer>(
    text: &impl Deref<Target = str>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(text)
}

/// Writes a text, or null.
pub(crate) fn known_text<S: Serializer>(
    text: &Option<impl Deref<Target = str>>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    text.as_deref().serialize(serializer)
}

/// Writes a list of texts.
pub(crate) fn texts<S: Serializer>(
    texts: &[impl std::fmt::Display],
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(texts.iter().map(ToString::to_string))
}
