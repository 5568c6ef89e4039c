//! Extractors without a template: [`header`], [`global`], [`from_extension`].

use std::{any::type_name, fmt, marker::PhantomData};

use http::{HeaderName, Request};
use lock_runtime::{IntoLockKey, KeyWriter, LockError, LockKey};

use super::{IntoTarget, KeyError, KeyExtractor, Target, template::source};

/// Creates an extractor with a key for each value of a header, such as `idempotency-key:42`. A
/// request without the header is refused with 400. A header of gRPC in base64 (`-bin`) is not fit
/// for it, as it writes one value in several ways.
///
/// ```
/// # use lock_tower::{LockLayer, key, runtime::LockClient};
/// let name = http::HeaderName::from_static("idempotency-key");
/// let layer = LockLayer::with_key(LockClient::in_memory(), key::header(name));
/// ```
pub fn header(name: HeaderName) -> Header {
    Header { name }
}

/// Key extractor returned by [`header`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    name: HeaderName,
}

impl<B> KeyExtractor<Request<B>> for Header {
    fn target(&self, req: &mut Request<B>) -> Result<Target, KeyError> {
        let value = source::header(req, &self.name)?;
        let mut key = KeyWriter::new();
        key.lit(self.name.as_str())
            .lit(":")
            .arg(format_args!("{value}"));
        Ok(key.finish()?.into())
    }
}

/// Creates an extractor with one key for all requests: they are served one at a time, across all
/// processes.
///
/// ```
/// # use lock_tower::{LockLayer, key, runtime::LockClient};
/// # fn main() -> Result<(), lock_tower::runtime::LockError> {
/// let key = key::global("migrations")?;
/// let layer = LockLayer::with_key(LockClient::in_memory(), key).no_wait();
/// # Ok(()) }
/// ```
///
/// # Errors
/// `InvalidKey` if the key is invalid.
pub fn global(key: impl IntoLockKey) -> Result<Global, LockError> {
    Ok(Global {
        key: key.into_lock_key()?,
    })
}

/// Key extractor returned by [`global`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Global {
    key: LockKey,
}

impl<Req> KeyExtractor<Req> for Global {
    fn target(&self, _req: &mut Req) -> Result<Target, KeyError> {
        Ok(self.key.clone().into())
    }
}

/// Creates an extractor that reads the key from a request extension of type `T`, which an outer
/// middleware has inserted: a [`LockKey`], a [`Target`], or a custom type that implements
/// [`IntoTarget`]. A request without the extension is refused with 500, and an error event is
/// emitted.
///
/// ```
/// # use lock_tower::{IntoTarget, KeyError, LockLayer, Target, key};
/// # use lock_tower::runtime::{KeyWriter, LockClient};
/// /// Inserted by the authentication middleware.
/// #[derive(Clone)]
/// struct Tenant(u64);
///
/// impl IntoTarget for Tenant {
///     fn into_target(self) -> Result<Target, KeyError> {
///         let mut key = KeyWriter::new();
///         key.lit("tenant:").arg(format_args!("{}", self.0));
///         Ok(key.finish()?.into())
///     }
/// }
///
/// let layer = LockLayer::with_key(LockClient::in_memory(), key::from_extension::<Tenant>());
/// ```
pub fn from_extension<T: IntoTarget + Clone + Send + Sync + 'static>() -> FromExtension<T> {
    FromExtension { of: PhantomData }
}

/// Key extractor returned by [`from_extension`].
pub struct FromExtension<T> {
    of: PhantomData<fn() -> T>,
}

impl<B, T: IntoTarget + Clone + Send + Sync + 'static> KeyExtractor<Request<B>>
    for FromExtension<T>
{
    fn target(&self, req: &mut Request<B>) -> Result<Target, KeyError> {
        match req.extensions().get::<T>() {
            Some(value) => value.clone().into_target(),
            None => Err(KeyError::misconfigured(format!(
                "the request has no extension `{}`; put the layer that adds it further out",
                type_name::<T>()
            ))),
        }
    }
}

impl<T> Clone for FromExtension<T> {
    fn clone(&self) -> Self {
        Self { of: PhantomData }
    }
}

impl<T> fmt::Debug for FromExtension<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FromExtension")
            .field("of", &format_args!("{}", type_name::<T>()))
            .finish()
    }
}
