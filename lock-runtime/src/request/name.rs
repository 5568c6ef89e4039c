//! [`RequestName`]: the name of a request in metrics, traces and logs.

use std::{borrow::Borrow, fmt, hash, sync::Arc};

/// The name of a request in metrics, traces and logs, such as the path of a function or a route.
///
/// It is not the key: all requests for `order:1`, `order:2` and so on have one name. A static name
/// allocates nothing, a shared one is counted.
#[derive(Clone)]
pub struct RequestName(Repr);

#[derive(Clone)]
enum Repr {
    Static(&'static str),
    Shared(Arc<str>),
}

impl RequestName {
    /// Returns the name.
    pub fn as_str(&self) -> &str {
        match &self.0 {
            Repr::Static(name) => name,
            Repr::Shared(name) => name,
        }
    }

    #[cfg(feature = "metrics")]
    pub(crate) fn to_label(&self) -> metrics::SharedString {
        match &self.0 {
            Repr::Static(name) => metrics::SharedString::const_str(name),
            Repr::Shared(name) => metrics::SharedString::from_shared(name.clone()),
        }
    }
}

impl From<&'static str> for RequestName {
    fn from(name: &'static str) -> Self {
        Self(Repr::Static(name))
    }
}

impl From<Arc<str>> for RequestName {
    fn from(name: Arc<str>) -> Self {
        Self(Repr::Shared(name))
    }
}

impl From<String> for RequestName {
    fn from(name: String) -> Self {
        Self(Repr::Shared(name.into()))
    }
}

impl AsRef<str> for RequestName {
    fn as_ref(&self) -> &str {
        self.as_str()
    }
}

impl Borrow<str> for RequestName {
    fn borrow(&self) -> &str {
        self.as_str()
    }
}

impl PartialEq for RequestName {
    fn eq(&self, other: &Self) -> bool {
        self.as_str() == other.as_str()
    }
}

impl Eq for RequestName {}

impl hash::Hash for RequestName {
    fn hash<H: hash::Hasher>(&self, state: &mut H) {
        self.as_str().hash(state);
    }
}

impl fmt::Display for RequestName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl fmt::Debug for RequestName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_str().fmt(f)
    }
}

#[cfg(feature = "serde")]
impl serde::Serialize for RequestName {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}
