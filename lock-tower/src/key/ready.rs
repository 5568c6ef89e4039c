//! Extractors that need no template: [`header`], [`global`], [`from_extension`].

use std::{any::type_name, fmt, marker::PhantomData};

use http::{HeaderName, Request};
use lock_runtime::{IntoLockKey, KeyWriter, LockError, LockKey};

use super::{IntoTarget, KeyError, KeyExtractor, Target, template::source};

/// A lock for each value of a header: `idempotency-key:42`. A request that lacks it is answered with 400.
///
/// ```
/// # use lock_tower::{LockLayer, key, runtime::LockClient};
/// let layer = LockLayer::with_key(LockClient::in_memory(), key::header(http::HeaderName::from_static("idempotency-key")));
/// ```
pub fn header(name: HeaderName) -> Header {
    Header { name }
}

/// The extractor of [`header`].
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

/// One lock for all requests: they are served one at a time, in the whole fleet.
///
/// ```
/// # use lock_tower::{LockLayer, key, runtime::LockClient};
/// # fn main() -> Result<(), lock_tower::runtime::LockError> {
/// let layer = LockLayer::with_key(LockClient::in_memory(), key::global("migrations")?).no_wait();
/// # Ok(()) }
/// ```
///
/// # Errors
/// `InvalidKey`.
pub fn global(key: impl IntoLockKey) -> Result<Global, LockError> {
    Ok(Global {
        key: key.into_lock_key()?,
    })
}

/// The extractor of [`global`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Global {
    key: LockKey,
}

impl<Req> KeyExtractor<Req> for Global {
    fn target(&self, _req: &mut Req) -> Result<Target, KeyError> {
        Ok(self.key.clone().into())
    }
}

/// The lock that a layer further out has put into the request's extensions, as a `T`: a [`LockKey`], a [`Target`], or a type
/// of your own that is [`IntoTarget`]. A request without one is answered with 500 and an event.
///
/// ```
/// # use lock_tower::{IntoTarget, KeyError, LockLayer, Target, key, runtime::{KeyWriter, LockClient}};
/// /// Put there by the layer that authenticates.
/// #[derive(Clone)]
/// struct Tenant(u64);
///
/// impl IntoTarget for Tenant {
///     fn into_target(self) -> Result<Target, KeyError> {
///         Ok(KeyWriter::new().lit("tenant:").arg(format_args!("{}", self.0)).finish()?.into())
///     }
/// }
///
/// let layer = LockLayer::with_key(LockClient::in_memory(), key::from_extension::<Tenant>());
/// ```
pub fn from_extension<T: IntoTarget + Clone + Send + Sync + 'static>() -> FromExtension<T> {
    FromExtension { of: PhantomData }
}

/// The extractor of [`from_extension`].
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
