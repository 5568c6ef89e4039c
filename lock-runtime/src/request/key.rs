//! The name of a lock, and the writer that builds names from values.
//!
//! The macro and the layer both write through [`KeyWriter`], so equal values give equal keys, and
//! no value can produce the key of another.

use std::{
    fmt::{self, Write as _},
    str::FromStr,
    sync::Arc,
};

use arrayvec::ArrayString;

use crate::{
    error::{LockError, LockErrorKind},
    observe::text,
};

/// The reserved first segment, which would collide with the keys of permits.
const PERMITS: &str = "permits";

/// The name of a lock: 1 to 512 bytes without control characters, unique within the client's
/// namespace.
///
/// Cloning is cheap. Create a key from a literal with [`LockKey::new`] or from values with
/// [`KeyWriter`]. The macro and the layer create theirs from templates.
///
/// A name may have a Redis Cluster hash tag, `{orders}:42`. Any other use of `}` is refused,
/// because the lock and its side keys would lie in different slots. The prefix `permits:` is
/// reserved.
///
/// ```
/// use lock_runtime::LockKey;
/// assert_eq!(LockKey::new("order:42")?.as_str(), "order:42");
/// assert!(LockKey::new("").is_err());
/// assert_eq!("order:42".parse::<LockKey>()?, LockKey::new("order:42")?);
/// # Ok::<(), lock_runtime::LockError>(())
/// ```
///
/// With the feature `serde`, a key is serialized as text.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Deserialize),
    serde(try_from = "String")
)]
pub struct LockKey(Arc<str>);

impl LockKey {
    /// The longest name of a lock, in bytes.
    pub const MAX_BYTES: usize = 512;

    /// Creates a key from a name as it is. For values from outside, use a [`KeyWriter`].
    ///
    /// # Errors
    /// `InvalidKey` if the name is empty, is longer than [`LockKey::MAX_BYTES`], contains a control
    /// character or a `}` outside a hash tag, or begins with `permits:`.
    pub fn new(name: impl Into<Arc<str>>) -> Result<Self, LockError> {
        let name = name.into();
        match complaint(&name) {
            None => Ok(Self(name)),
            Some(complaint) => Err(invalid(&name, complaint)),
        }
    }

    /// Returns the name, without the namespace.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the hash tag, which decides the Redis Cluster slot, if the name has one: the text
    /// within the first `{..}`.
    pub fn hash_tag(&self) -> Option<&str> {
        hash_tag(&self.0)
    }
}

fn hash_tag(name: &str) -> Option<&str> {
    let (_, rest) = name.split_once('{')?;
    let (tag, _) = rest.split_once('}')?;
    (!tag.is_empty()).then_some(tag)
}

fn complaint(name: &str) -> Option<&'static str> {
    Some(if name.is_empty() {
        "is empty; a lock needs a name such as \"order:42\""
    } else if name.len() > LockKey::MAX_BYTES {
        TOO_LONG
    } else if name.chars().any(char::is_control) {
        "contains a control character; write values through a placeholder, which escapes them"
    } else if name.contains('}') && hash_tag(name).is_none() {
        "contains '}' outside of a hash tag; write \"{tag}\" whole, or leave the brace out"
    } else if name.split_once(':').map(|(first, _)| first) == Some(PERMITS) {
        "begins with \"permits:\", which is reserved; choose another first word"
    } else {
        return None;
    })
}

fn invalid(name: &str, complaint: &str) -> LockError {
    const SHOWN: usize = 64;
    let shown: String = name.chars().take(SHOWN).collect();
    let more = if shown.len() < name.len() { ".." } else { "" };
    let message = format!("the key {shown:?}{more} {complaint}");
    LockError::new(LockErrorKind::InvalidKey, message)
}

impl fmt::Debug for LockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl LockKey {
    /// The key for a line of a log or a message: quoted and escaped where it is not plain.
    #[doc(hidden)]
    pub fn shown(&self) -> text::InLine<'_> {
        text::in_line(&self.0)
    }
}

impl fmt::Display for LockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl AsRef<str> for LockKey {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

impl FromStr for LockKey {
    type Err = LockError;

    fn from_str(name: &str) -> Result<Self, LockError> {
        Self::new(name)
    }
}

impl TryFrom<&str> for LockKey {
    type Error = LockError;

    fn try_from(name: &str) -> Result<Self, LockError> {
        Self::new(name)
    }
}

impl TryFrom<String> for LockKey {
    type Error = LockError;

    fn try_from(name: String) -> Result<Self, LockError> {
        Self::new(name)
    }
}

#[cfg(feature = "serde")]
impl serde::Serialize for LockKey {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

/// A type that can name a lock. An invalid name is reported when the lock is acquired.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not the name of a lock",
    label = "not a name",
    note = "a name is text: in the attribute write `key = \"order:{{id}}\"`, elsewhere `format!(\"order:{{id}}\")` or a `LockKey`"
)]
pub trait IntoLockKey {
    /// Converts the value into a key.
    ///
    /// # Errors
    /// Same as [`LockKey::new`].
    fn into_lock_key(self) -> Result<LockKey, LockError>;
}

impl IntoLockKey for LockKey {
    fn into_lock_key(self) -> Result<LockKey, LockError> {
        Ok(self)
    }
}

impl IntoLockKey for &LockKey {
    fn into_lock_key(self) -> Result<LockKey, LockError> {
        Ok(self.clone())
    }
}

impl IntoLockKey for &str {
    fn into_lock_key(self) -> Result<LockKey, LockError> {
        LockKey::new(self)
    }
}

impl IntoLockKey for String {
    fn into_lock_key(self) -> Result<LockKey, LockError> {
        LockKey::new(self)
    }
}

impl IntoLockKey for &String {
    fn into_lock_key(self) -> Result<LockKey, LockError> {
        LockKey::new(self.as_str())
    }
}

impl IntoLockKey for Result<LockKey, LockError> {
    fn into_lock_key(self) -> Result<LockKey, LockError> {
        self
    }
}

/// Builds a [`LockKey`] from literal text and values.
///
/// Values are escaped (`:` `/` `%` `{` `}` and control characters as `%XX`), so that no value can
/// be mistaken for the text around it: `("1:2", "3")` and `("1", "2:3")` give different keys. If
/// the text between two values contains neither `:` nor `/`, it could be mistaken for a part of
/// the values, so the writer puts `%.` in front of the second value.
///
/// ```
/// use lock_runtime::KeyWriter;
/// let mut key = KeyWriter::new();
/// key.lit("order:").arg(format_args!("{}", "a:b"));
/// assert_eq!(key.finish()?.as_str(), "order:a%3Ab");
/// # Ok::<(), lock_runtime::LockError>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct KeyWriter {
    /// On the stack, so that a key is allocated once, when its length is known.
    name: ArrayString<{ LockKey::MAX_BYTES }>,
    /// A value was written, and no `:` or `/` since.
    open: bool,
    /// The reason why `finish` refuses the key, regardless of later writes.
    complaint: Option<&'static str>,
}

const TOO_LONG: &str = "is longer than 512 bytes; use a digest of the long part";

impl KeyWriter {
    /// Creates an empty writer.
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends literal text of the program, as it is.
    pub fn lit(&mut self, text: &str) -> &mut Self {
        if text.contains([':', '/']) {
            self.open = false;
        }
        let _ = self.push(text);
        self
    }

    /// Appends a value, escaped.
    pub fn arg(&mut self, value: fmt::Arguments<'_>) -> &mut Self {
        if self.open {
            let _ = self.push("%.");
        }
        self.open = true;
        let start = self.name.len();
        if Escape(self).write_fmt(value).is_err() {
            self.complaint
                .get_or_insert("is incomplete: a value could not be formatted");
        }
        // A value must not be able to produce the reserved prefix.
        if start == 0 && self.name.as_str() == PERMITS {
            self.name.clear();
            let _ = self.push("%70ermits");
        }
        self
    }

    /// Appends text. Fails if it does not fit, which stops the formatting of a value at the limit,
    /// so that a huge value costs no time.
    fn push(&mut self, text: &str) -> fmt::Result {
        self.name.try_push_str(text).map_err(|_| {
            self.complaint = Some(TOO_LONG);
            fmt::Error
        })
    }

    /// Returns the key.
    ///
    /// # Errors
    /// `InvalidKey` under the conditions of [`LockKey::new`], or if a value could not be
    /// formatted.
    pub fn finish(&self) -> Result<LockKey, LockError> {
        match self.complaint {
            Some(complaint) => Err(invalid(&self.name, complaint)),
            None => LockKey::new(self.name.as_str()),
        }
    }
}

fn needs_escape(c: char) -> bool {
    matches!(c, ':' | '/' | '%' | '{' | '}') || c.is_control()
}

/// Appends a value to the name, escaped.
struct Escape<'a>(&'a mut KeyWriter);

impl fmt::Write for Escape<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for part in text.split_inclusive(needs_escape) {
            let plain = part.trim_end_matches(needs_escape);
            self.0.push(plain)?;
            for byte in part[plain.len()..].bytes() {
                let mut escaped = ArrayString::<3>::new();
                write!(escaped, "%{byte:02X}")?;
                self.0.push(&escaped)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn key(parts: &[(&str, &str)]) -> Result<LockKey, LockError> {
        let mut writer = KeyWriter::new();
        for (lit, arg) in parts {
            writer.lit(lit).arg(format_args!("{arg}"));
        }
        writer.finish()
    }

    #[test]
    fn a_bad_name_is_refused_with_the_reason() {
        for (name, reason) in [
            ("", "empty"),
            (&"x".repeat(513), "512"),
            ("a\nb", "control"),
            ("x}y", "hash tag"),
            ("x{}y", "hash tag"),
            ("permits:x", "reserved"),
        ] {
            for refused in [
                LockKey::new(name),
                name.parse(),
                LockKey::try_from(name),
                LockKey::try_from(name.to_owned()),
            ] {
                let error = refused.unwrap_err();
                assert_eq!(error.kind(), LockErrorKind::InvalidKey);
                assert!(error.to_string().contains(reason), "{error}");
            }
        }
        assert!(LockKey::new("x".repeat(512)).is_ok());
        assert_eq!(LockKey::new("a{b}c").unwrap().hash_tag(), Some("b"));
        assert_eq!(LockKey::new("a{b").unwrap().hash_tag(), None);
    }

    #[test]
    fn a_value_cannot_make_up_the_reserved_beginning() {
        let written = key(&[("", "permits"), (":", "x")]).unwrap();
        assert_eq!(written.as_str(), "%70ermits:x");
    }

    #[test]
    fn an_overlong_value_is_refused_without_being_written_whole() {
        let mut writer = KeyWriter::new();
        writer.arg(format_args!("{}", "x".repeat(10_000_000)));
        assert!(writer.name.len() <= LockKey::MAX_BYTES);
        assert!(writer.finish().is_err());
    }

    proptest! {
        #[test]
        fn different_values_give_different_keys(
            lits in proptest::collection::vec("[a:/_-]{0,3}", 3),
            a in proptest::collection::vec("[1:%/{}.\n]{0,3}|permits", 3),
            b in proptest::collection::vec("[1:%/{}.\n]{0,3}|permits", 3),
        ) {
            let build = |values: &[String]| {
                let mut writer = KeyWriter::new();
                writer.lit("k");
                for (lit, value) in lits.iter().zip(values) {
                    writer.lit(lit).arg(format_args!("{value}"));
                }
                writer.finish().unwrap()
            };
            prop_assert_eq!(build(&a) == build(&b), a == b);
        }

        #[test]
        fn a_value_never_makes_a_key_invalid_or_sets_its_hash_tag(value in "\\PC{1,20}") {
            let written = key(&[("k:", &value)]).unwrap();
            prop_assert_eq!(written.hash_tag(), None);
        }
    }
}
