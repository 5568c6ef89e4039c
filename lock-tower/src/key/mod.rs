//! Keys of requests: [`KeyExtractor`], which closures, [`KeyTemplate`]s and custom types
//! implement, and the extractors [`header`], [`global`] and [`from_extension`].

mod ready;
#[cfg(feature = "axum-08")]
mod route;
mod template;

use std::{borrow::Cow, error::Error, fmt};

use http::{HeaderName, Request};
use lock_runtime::{ErrorClass, LockError, LockKey};

pub use ready::{FromExtension, Global, Header, from_extension, global, header};
pub use template::{KeyTemplate, TemplateError};

/// The result of a [`KeyExtractor`] for a request.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Target {
    /// The request is served under this lock.
    Lock(LockKey),
    /// The request is served without a lock.
    Skip,
    /// The same, as no route has matched the request: the inner service has to answer it with 404
    /// or 405.
    #[doc(hidden)]
    Unrouted,
}

impl From<LockKey> for Target {
    fn from(key: LockKey) -> Self {
        Self::Lock(key)
    }
}

/// Trait for extracting the key of a lock from a request.
///
/// Closures implement it: `|request: &Request<_>| ..`. Their argument needs a type annotation.
/// They return a [`LockKey`], a [`Target`], or a `Result` of either with a [`LockError`] or a
/// [`KeyError`].
///
/// ```
/// use http::{Method, Request};
/// use lock_tower::{KeyError, LockLayer, Target, runtime::{KeyWriter, LockClient}};
///
/// let layer = LockLayer::with_key(LockClient::in_memory(), |request: &Request<()>| {
///     if request.method() == Method::GET {
///         return Ok(Target::Skip);
///     }
///     let tenant: Option<&u64> = request.extensions().get();
///     let tenant = tenant.ok_or(KeyError::misconfigured("the request has no tenant"))?;
///     let mut key = KeyWriter::new();
///     key.lit("tenant:").arg(format_args!("{tenant}"));
///     Ok::<_, KeyError>(key.finish()?.into())
/// });
/// ```
///
/// Write all values of a request through a [`KeyWriter`](lock_runtime::KeyWriter), so that no
/// request can reach the key of another. Do not use the raw path: nested routers strip parts of
/// it, and the same path can be written in many ways.
pub trait KeyExtractor<Req> {
    /// Returns the lock of `req`.
    ///
    /// # Errors
    /// If the request lacks a value that the key needs, or the configuration of the server makes
    /// the extraction impossible.
    fn target(&self, req: &mut Req) -> Result<Target, KeyError>;
}

impl<F, Req, T> KeyExtractor<Req> for F
where
    F: Fn(&Req) -> T,
    T: IntoTarget,
{
    fn target(&self, req: &mut Req) -> Result<Target, KeyError> {
        self(req).into_target()
    }
}

/// Trait for the return types of closures that implement [`KeyExtractor`].
///
/// It is not implemented for `Option`: a request without a lock is an explicit [`Target::Skip`].
pub trait IntoTarget {
    /// Converts `self` into a [`Target`].
    ///
    /// # Errors
    /// Those of the closure.
    fn into_target(self) -> Result<Target, KeyError>;
}

impl IntoTarget for Target {
    fn into_target(self) -> Result<Target, KeyError> {
        Ok(self)
    }
}

impl IntoTarget for LockKey {
    fn into_target(self) -> Result<Target, KeyError> {
        Ok(self.into())
    }
}

impl<T: Into<Target>, E: Into<KeyError>> IntoTarget for Result<T, E> {
    fn into_target(self) -> Result<Target, KeyError> {
        self.map(Into::into).map_err(Into::into)
    }
}

/// The reason why a [`KeyExtractor`] found no key in a request.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum KeyError {
    /// The request lacks a header: 400.
    MissingHeader(HeaderName),
    /// The request has a header more than once, so its value is ambiguous: 400.
    RepeatedHeader(HeaderName),
    /// A header is empty or not UTF-8: 400.
    InvalidHeader(HeaderName),
    /// The query lacks a parameter: 400.
    MissingQuery(Box<str>),
    /// The query has a parameter more than once, so its value is ambiguous: 400.
    RepeatedQuery(Box<str>),
    /// A query parameter is empty or not UTF-8: 400.
    InvalidQuery(Box<str>),
    /// Another error in the request: 400. The text is sent to the caller.
    BadRequest(Cow<'static, str>),
    /// The key is invalid, for example too long. The status is that of the [`LockError`].
    Lock(LockError),
    /// The matched route has no such parameter: 500 and an error event.
    NoSuchParameter {
        /// The name in the template.
        name: Box<str>,
        /// The route, such as `/orders/{order_id}`.
        route: Box<str>,
    },
    /// The matched route has the parameter twice, once in the path of a `nest_service`: 500 and
    /// an error event.
    RepeatedParameter {
        /// The name in the template.
        name: Box<str>,
        /// The route.
        route: Box<str>,
    },
    /// The template needs path parameters, but no router has matched the request yet: 500 and an
    /// error event.
    NotRouted,
    /// Another error in the configuration of the server: 500 and an error event with the text.
    Misconfigured(Cow<'static, str>),
}

impl KeyError {
    /// Creates an error of the request: 400. The text is sent to the caller.
    pub fn bad_request(text: impl Into<Cow<'static, str>>) -> Self {
        Self::BadRequest(text.into())
    }

    /// Creates an error of the server: 500. The text is recorded in an event and not sent to the
    /// caller.
    pub fn misconfigured(text: impl Into<Cow<'static, str>>) -> Self {
        Self::Misconfigured(text.into())
    }

    /// Returns the class of this error: a row of the table of refusals.
    pub fn class(&self) -> ErrorClass {
        match self {
            Self::MissingHeader(_)
            | Self::RepeatedHeader(_)
            | Self::InvalidHeader(_)
            | Self::MissingQuery(_)
            | Self::RepeatedQuery(_)
            | Self::InvalidQuery(_)
            | Self::BadRequest(_) => ErrorClass::BadRequest,
            Self::Lock(error) => error.class(),
            Self::NoSuchParameter { .. }
            | Self::RepeatedParameter { .. }
            | Self::NotRouted
            | Self::Misconfigured(_) => ErrorClass::Internal,
        }
    }

    /// Returns a stable code for programs, such as `missing_header`.
    pub fn code(&self) -> &'static str {
        match self {
            Self::MissingHeader(_) => "missing_header",
            Self::RepeatedHeader(_) => "repeated_header",
            Self::InvalidHeader(_) => "invalid_header",
            Self::MissingQuery(_) => "missing_query_parameter",
            Self::RepeatedQuery(_) => "repeated_query_parameter",
            Self::InvalidQuery(_) => "invalid_query_parameter",
            Self::BadRequest(_) => "bad_request",
            Self::Lock(error) => error.code(),
            Self::NoSuchParameter { .. }
            | Self::RepeatedParameter { .. }
            | Self::NotRouted
            | Self::Misconfigured(_) => "misconfigured",
        }
    }
}

impl From<LockError> for KeyError {
    fn from(error: LockError) -> Self {
        Self::Lock(error)
    }
}

impl fmt::Display for KeyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::MissingHeader(name) => write!(f, "The header \"{name}\" is missing."),
            Self::RepeatedHeader(name) => write!(f, "The header \"{name}\" occurs more than once."),
            Self::InvalidHeader(name) => write!(f, "The header \"{name}\" is empty or not UTF-8."),
            Self::MissingQuery(name) => write!(f, "The query parameter {name:?} is missing."),
            Self::RepeatedQuery(name) => write!(f, "The query parameter {name:?} occurs more than once."),
            Self::InvalidQuery(name) => write!(f, "The query parameter {name:?} is empty or not UTF-8."),
            Self::BadRequest(text) | Self::Misconfigured(text) => f.write_str(text),
            Self::Lock(error) => error.fmt(f),
            Self::NoSuchParameter { name, route } => {
                write!(f, "the key template has {{{name}}}, and the route {route:?} has no such parameter: ")?;
                match params(route).as_slice() {
                    [] => f.write_str("it has none"),
                    params => write!(f, "it has {{{}}}", params.join("}, {")),
                }
            }
            Self::RepeatedParameter { name, route } => {
                write!(f, "the key template has {{{name}}}, and the route {route:?} has it twice; rename one")
            }
            Self::NotRouted => f.write_str(
                "the key template needs path parameters, and no axum router has seen the request; put the layer on the \
                 route, `post(handler).layer(lock)`, not around the router",
            ),
        }
    }
}

/// The names of the parameters of a route.
fn params(route: &str) -> Vec<&str> {
    route
        .split('/')
        // Doubled braces are literal.
        .filter(|segment| !segment.contains("{{"))
        .filter_map(|segment| Some(segment.split_once('{')?.1.split_once('}')?.0))
        .map(|name| name.trim_start_matches('*'))
        .collect()
}

impl Error for KeyError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Lock(error) => error.source(),
            _ => None,
        }
    }
}

/// Returns axum's matched path, if it has matched the request.
pub(crate) fn matched_path<B>(req: &Request<B>) -> Option<&str> {
    route::matched_path(req)
}

/// Returns the path of a gRPC method, if the request has one.
pub(crate) fn grpc_method<B>(req: &Request<B>) -> Option<&str> {
    template::source::grpc(req).ok().map(|_| req.uri().path())
}

/// Returns whether the route of the request can be that of a gRPC method. If axum has matched it,
/// its pattern decides, which no caller chooses: tonic's are `/package.Service/{*rest}`. Otherwise
/// its path does.
pub(crate) fn is_grpc_route<B>(req: &Request<B>) -> bool {
    let pattern = matched_path(req);
    let path = pattern.unwrap_or_else(|| req.uri().path());
    let mut parts = path.rsplit('/');
    let (Some(method), Some(service)) = (parts.next(), parts.next()) else {
        return false;
    };
    let has_package = service.contains('.');
    let is_method = match pattern {
        // Others are usual over HTTP, such as `/Users/{id}`.
        Some(_) => has_package || method.starts_with("{*"),
        None => is_identifier(method) && parts.next() == Some("") && parts.next().is_none(),
    };
    // Services without a package are distinguished from other paths by the style guide of Protobuf.
    is_method
        && service.split('.').all(is_identifier)
        && (has_package || service.starts_with(|first: char| first.is_ascii_uppercase()))
}

/// Returns whether the text is an identifier of Protobuf, unlike the parts of `v1.0`.
fn is_identifier(text: &str) -> bool {
    let named = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    text.bytes().all(named) && text.starts_with(|first: char| !first.is_ascii_digit())
}

/// The route that matched a request.
pub(crate) trait Routed {
    /// The value of the parameter `name`, percent-decoded.
    fn param(&self, name: &str) -> Result<Cow<'_, str>, KeyError>;
    /// The pattern of the route.
    fn pattern(&self) -> Result<&str, KeyError>;
}

/// Without axum there are no routes, and templates cannot refer to them.
#[cfg(not(feature = "axum-08"))]
mod route {
    use std::borrow::Cow;

    use http::Request;

    use super::{KeyError, Routed, template::source::Source};

    pub(super) fn matched_path<B>(_req: &Request<B>) -> Option<&str> {
        None
    }

    pub(super) enum Route {}

    impl Route {
        pub(super) fn of<'n, B>(
            _req: &mut Request<B>,
            _sources: impl Iterator<Item = &'n Source>,
        ) -> Result<Option<Self>, KeyError> {
            Ok(None)
        }
    }

    impl Routed for Route {
        fn param(&self, _name: &str) -> Result<Cow<'_, str>, KeyError> {
            match *self {}
        }

        fn pattern(&self) -> Result<&str, KeyError> {
            match *self {}
        }
    }
}
