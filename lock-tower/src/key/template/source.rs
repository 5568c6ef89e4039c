//! The sources of key values: the contents of a placeholder.

use std::{borrow::Cow, str};

use http::{HeaderName, Request};
use percent_encoding::percent_decode;
use uuid::Uuid;

use crate::key::{KeyError, Routed};

/// A part of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::key) enum Source {
    Path(Box<str>, Kind),
    Header(HeaderName, Kind),
    Query(Box<str>, Kind),
    Method,
    MatchedPath,
    GrpcService,
    GrpcMethod,
}

/// The kind of a value. Values of a kind other than text are normalized, so that all spellings of
/// a value give the same key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::key) enum Kind {
    Text,
    Int,
    Uuid,
}

impl Source {
    /// Parses the contents of a placeholder. The error describes the correct form.
    pub(super) fn parse(name: &str) -> Result<Self, Cow<'static, str>> {
        let (named, kind) = Kind::split(name);
        let of_itself = match named {
            "" => {
                return Err(
                    "the braces are empty; write \"{name}\" for a path parameter, \"{header.name}\" for a header"
                        .into(),
                );
            }
            "method" => Some(Self::Method),
            "matched_path" => Some(Self::MatchedPath),
            "grpc.service" => Some(Self::GrpcService),
            "grpc.method" => Some(Self::GrpcMethod),
            _ => None,
        };
        match of_itself {
            Some(source) if kind == Some(Kind::Text) => return Ok(source),
            Some(_) => {
                return Err(format!("this value is always text; write \"{{{named}}}\"").into());
            }
            None => {}
        }
        let kind = kind.ok_or_else(|| {
            let of = &name[named.len()..];
            Cow::Owned(format!(
                "{of:?} is not a kind of value; write \"{{{named}}}\" for text, \"{{{named}:int}}\" for a whole number, \
                 \"{{{named}:uuid}}\" for a UUID"
            ))
        });
        if let Some(query) = named.strip_prefix("query.") {
            if query.is_empty() || query.contains(char::is_whitespace) {
                return Err(format!(
                    "{query:?} is not a valid name of a query parameter; write one such as \"{{query.tenant}}\""
                )
                .into());
            }
            return Ok(Self::Query(query.into(), kind?));
        }
        if let Some(header) = named.strip_prefix("header.") {
            let Ok(header) = HeaderName::from_bytes(header.as_bytes()) else {
                return Err(format!(
                    "{header:?} is not a valid name of a header; write one such as \"{{header.x-tenant}}\""
                )
                .into());
            };
            if header.as_str().ends_with("-bin") {
                return Err(format!(
                    "{header:?} is a header of gRPC in base64, which writes one value in several ways; decode it in a key \
                     extractor of your own, or send text"
                )
                .into());
            }
            return Ok(Self::Header(header, kind?));
        }
        if let Some(name) = name.strip_prefix('*') {
            return Err(format!("the star belongs in the route only; write \"{{{name}}}\"").into());
        }
        if named.starts_with("grpc.") {
            return Err(format!(
                "unknown placeholder {named:?}; write \"{{grpc.service}}\" or \"{{grpc.method}}\""
            )
            .into());
        }
        if named.contains('.') {
            return Err(format!(
                "unknown placeholder {named:?}; write \"{{name}}\" for a path parameter, \"{{header.name}}\" for a header, \
                 \"{{query.name}}\" for a query parameter"
            )
            .into());
        }
        if named
            .contains(|c: char| c.is_whitespace() || c.is_control() || matches!(c, '{' | '/' | '*'))
        {
            return Err(format!(
                "{named:?} is not a valid name of a path parameter; write the name in the route, as in \"{{id}}\""
            )
            .into());
        }
        Ok(Self::Path(named.into(), kind?))
    }

    /// Returns whether the value requires a matched route.
    pub(super) fn is_of_the_route(&self) -> bool {
        matches!(self, Self::Path(..) | Self::MatchedPath)
    }

    /// Returns the value of a request. `route` is the route that it has matched; it must be
    /// present if the source [is of the route](Self::is_of_the_route).
    pub(super) fn value<'v, B>(
        &'v self,
        req: &'v Request<B>,
        route: Option<&'v impl Routed>,
    ) -> Result<Cow<'v, str>, KeyError> {
        let route = || route.ok_or(KeyError::NotRouted);
        match self {
            Self::Path(name, kind) => {
                kind.read(route()?.param(name)?, || format!("path parameter {name:?}"))
            }
            Self::MatchedPath => route()?.pattern().map(Cow::Borrowed),
            Self::Header(name, kind) => kind.read(Cow::Borrowed(header(req, name)?), || {
                format!("header \"{name}\"")
            }),
            Self::Query(name, kind) => {
                kind.read(query(req, name)?, || format!("query parameter {name:?}"))
            }
            Self::Method => Ok(Cow::Borrowed(req.method().as_str())),
            Self::GrpcService => grpc(req).map(|(service, _)| Cow::Borrowed(service)),
            Self::GrpcMethod => grpc(req).map(|(_, method)| Cow::Borrowed(method)),
        }
    }
}

impl Kind {
    /// Splits a placeholder into the name and the kind. The kind is `None` if it is unknown.
    fn split(name: &str) -> (&str, Option<Self>) {
        match name.split_once(':') {
            None => (name, Some(Self::Text)),
            Some((named, "int")) => (named, Some(Self::Int)),
            Some((named, "uuid")) => (named, Some(Self::Uuid)),
            Some((named, _)) => (named, None),
        }
    }

    /// Returns the canonical form of `value`. `of` describes the value in errors.
    fn read(self, value: Cow<'_, str>, of: impl Fn() -> String) -> Result<Cow<'_, str>, KeyError> {
        let (canonical, expected) = match self {
            Self::Text => return Ok(value),
            Self::Int => (
                value.parse::<i128>().ok().map(|number| number.to_string()),
                "a whole number",
            ),
            Self::Uuid => (
                Uuid::try_parse(&value).ok().map(|uuid| uuid.to_string()),
                "a UUID",
            ),
        };
        canonical
            .map(Cow::Owned)
            .ok_or_else(|| KeyError::bad_request(format!("The {} is not {expected}.", of())))
    }
}

pub(in crate::key) fn header<'r, B>(
    req: &'r Request<B>,
    name: &HeaderName,
) -> Result<&'r str, KeyError> {
    let mut values = req.headers().get_all(name).iter();
    match (values.next(), values.next()) {
        (None, _) => Err(KeyError::MissingHeader(name.clone())),
        (Some(_), Some(_)) => Err(KeyError::RepeatedHeader(name.clone())),
        (Some(value), None) => match str::from_utf8(value.as_bytes()) {
            Ok(value) if !value.is_empty() => Ok(value),
            _ => Err(KeyError::InvalidHeader(name.clone())),
        },
    }
}

/// A query parameter, parsed as `application/x-www-form-urlencoded`. Unlike most parsers, this
/// one rejects values that are not UTF-8: a replacement character would stand for many values.
fn query<'r, B>(req: &'r Request<B>, name: &str) -> Result<Cow<'r, str>, KeyError> {
    let pairs = req.uri().query().unwrap_or_default().split('&');
    let pairs = pairs.map(|pair| pair.split_once('=').unwrap_or((pair, "")));
    let mut values = pairs
        .filter(|(key, _)| decoded(key).is_some_and(|key| key == name))
        .map(|(_, value)| value);
    match (values.next(), values.next()) {
        (None, _) => Err(KeyError::MissingQuery(name.into())),
        (Some(_), Some(_)) => Err(KeyError::RepeatedQuery(name.into())),
        (Some(value), None) => match decoded(value) {
            Some(value) if !value.is_empty() => Ok(value),
            _ => Err(KeyError::InvalidQuery(name.into())),
        },
    }
}

/// Decodes form data; `None` if it is not UTF-8.
fn decoded(text: &str) -> Option<Cow<'_, str>> {
    if text.contains('+') {
        // A literal `+` is written as `%2B`.
        let blanks = text.replace('+', " ");
        return percent_decode(blanks.as_bytes())
            .decode_utf8()
            .ok()
            .map(|text| Cow::Owned(text.into_owned()));
    }
    percent_decode(text.as_bytes()).decode_utf8().ok()
}

/// The service and the method of a [gRPC path].
///
/// [gRPC path]: https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md#requests
pub(in crate::key) fn grpc<B>(req: &Request<B>) -> Result<(&str, &str), KeyError> {
    let path = req.uri().path().strip_prefix('/').unwrap_or_default();
    match path.split_once('/') {
        // Protobuf names only: percent-encoding would give one method several keys.
        Some((service, method)) if is_name(service) && is_name(method) => Ok((service, method)),
        _ => Err(KeyError::bad_request(
            "The path is not that of a gRPC method, \"/package.Service/Method\".",
        )),
    }
}

fn is_name(text: &str) -> bool {
    !text.is_empty()
        && text
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.'))
}
