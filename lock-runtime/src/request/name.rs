//! [`RequestName`]: the name of a request in metrics, traces and logs.

use std::{borrow::Borrow, fmt, hash, ops::Deref, sync::Arc};

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
    #[cfg(feature = "metrics")]
    pub(crate) fn to_label(&self) -> metrics::SharedString {
        match &self.0 {
            Repr::Static(name) => metrics::SharedString::const_str(name),
            Repr::Shared(name) => metrics::SharedString::from_shared(name.clone()),
        }
    }
}

impl Deref for RequestName {
    type Target = str;

    fn deref(&self) -> &str {
        match &self.0 {
            Repr::Static(name) => name,
            Repr::Shared(name) => name,
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

impl Borrow<str> for RequestName {
    fn borrow(&self) -> &str {
        self
    }
}

impl PartialEq for RequestName {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl Eq for RequestName {}

impl hash::Hash for RequestName {
    fn hash<H: hash::Hasher>(&self, state: &mut H) {
        (**self).hash(state);
    }
}

impl fmt::Display for RequestName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self)
    }
}

impl fmt::Debug for RequestName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}
