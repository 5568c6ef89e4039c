//! [`KeyTemplate`]: a key with placeholders for parts of a request.

#[cfg(test)]
#[path = "../../../fuzz/templates.rs"]
mod fuzz;
pub(super) mod source;

use std::{borrow::Cow, error::Error, fmt, str::FromStr, sync::Arc};

use http::Request;
use lock_runtime::{KeyWriter, LockError, LockKey, text};

use self::source::Source;
use super::{KeyError, KeyExtractor, Target, route::Route};

/// The name of a lock as text with placeholders for parts of a request, such as
/// `"order:{id}:{header.idempotency-key}"`.
///
/// | placeholder | value |
/// |---|---|
/// | `{id}` | the parameter `id` of axum's route, percent-decoded |
/// | `{header.x-tenant}` | the header `x-tenant` |
/// | `{query.tenant}` | the query parameter `tenant`, decoded as form data (`+` is a space) |
/// | `{id:int}`, `{header.x-shop:int}`, `{query.shop:int}` | the value, as a whole number |
/// | `{id:uuid}`, `{header.x-order:uuid}`, `{query.order:uuid}` | the value, as a UUID |
/// | `{method}` | the HTTP method |
/// | `{matched_path}` | the pattern of axum's route with all its prefixes, such as `/orders/{id}` |
/// | `{grpc.service}`, `{grpc.method}` | the parts of a gRPC path, `/shop.Orders/Pay` |
///
/// - Write `{rest}` for the parameter `{*rest}` of a route. If the route does not have the
///   parameter, the server is misconfigured: the response is 500, and an error event is emitted.
/// - If a header or query parameter is missing, empty, not UTF-8 or present more than once, the
///   response is 400 and names it.
/// - A whole number has at most 127 bits; 7, 07 and +7 give the same key. A UUID may have any of
///   its forms: in either case, without hyphens, in braces, or with `urn:uuid:`. For any other
///   value the response is 400.
/// - axum serves `HEAD` requests with the handler of `GET`, but their `{method}` differs, and with
///   it the key.
/// - If a gRPC path is malformed or has a prefix, the response is 400.
///
/// *Values without a kind are text.* A handler with a `Path<u64>` serves the order 7 as
/// `/orders/7`, `/orders/07` and `/orders/+7`. Under `{id}` these are three locks, which
/// can be held at the same time. If a value can be written in more than one way, use `{id:int}` or
/// `{id:uuid}`, or lock the parsed value with `#[distributed_lock]`. Use the same kind on all
/// routes of a resource: for 07, `order:{id}` and `order:{id:int}` are different locks.
///
/// A path parameter that is named `method` or `matched_path` cannot be used. `{{` and `}}` stand
/// for literal braces. [`KeyWriter`] escapes the values, as in `#[distributed_lock]`: the same
/// texts give the same key in both, and no value can reach the key of another. A value that makes
/// the key longer than 512 bytes is refused with 400.
///
/// With a template of path parameters or `{matched_path}`, a request that has matched no route
/// passes without a lock, so that a 404 stays a 404. (If the router is itself a service behind a
/// route of another router, the request counts as routed and the response is 500 instead.) The
/// key of a route does not depend on how the routers are nested or merged. A layer *around* a
/// `nest_service` cannot see the inner route: with a template that needs parameters of that
/// route, or `{matched_path}`, it treats the request as a 404 and does not lock. If the response is
/// neither 404 nor 405, an error event is emitted, once for each name of a layer. Put the layer on
/// the route itself.
#[derive(Clone)]
pub struct KeyTemplate {
    text: Arc<str>,
    parts: Arc<[Part]>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    Text(Box<str>),
    /// The source, and the offset of the placeholder in the template, in bytes.
    Value(Source, usize),
}

impl KeyTemplate {
    /// Parses and validates a template.
    ///
    /// # Errors
    /// If no request could fill the template. The message explains the correct form.
    pub fn new(template: &str) -> Result<Self, TemplateError> {
        let key = Self::parse(template)?;
        let routed = key
            .values()
            .find(|(source, _)| source.is_of_the_route())
            .map(|(_, at)| at);
        match routed.filter(|_| !cfg!(feature = "axum-08")) {
            Some(at) => Err(TemplateError::new(
                template,
                at,
                "routes need the feature `axum` of lock-tower; or use `LockLayer::with_key`",
            )),
            None => Ok(key),
        }
    }

    /// Parses the template of a layer. It must have a placeholder.
    pub(crate) fn not_constant(template: &str) -> Result<Self, TemplateError> {
        let key = Self::new(template)?;
        if key.values().next().is_some() {
            return Ok(key);
        }
        let complaint = format!(
            "this key is the same for every request: name a part of the request, such as {{id}} or \
             {{header.x-tenant}}, or write `with_key(locks, key::global({template:?})?)` in place of `new` for one lock in all"
        );
        Err(TemplateError::new(template, 0, complaint))
    }

    /// Parses a template for requests that may be routed by something other than axum.
    pub(crate) fn parse(template: &str) -> Result<Self, TemplateError> {
        let key = Self {
            text: template.into(),
            parts: parse(template)?.into(),
        };
        // Whether the surrounding text is valid does not depend on the values.
        let trial = key.write(|_| Ok::<_, LockError>("x".into()));
        match trial {
            Ok(_) => Ok(key),
            Err(error) => Err(TemplateError::new(template, 0, error.to_string())),
        }
    }

    fn write<'v, E: From<LockError>>(
        &'v self,
        value: impl Fn(&'v Source) -> Result<Cow<'v, str>, E>,
    ) -> Result<LockKey, E> {
        let mut writer = KeyWriter::new();
        for part in self.parts.iter() {
            match part {
                Part::Text(text) => writer.lit(text),
                Part::Value(source, _) => writer.arg(format_args!("{}", value(source)?)),
            };
        }
        Ok(writer.finish()?)
    }

    /// Warns if the key names no part of the request but the header that its caller invents: a key
    /// that another caller can name shows that caller the response.
    #[cfg(feature = "once")]
    pub(crate) fn warn_without_caller(&self, name: &str) {
        let is_of_any_caller = |source: &Source| match source {
            Source::Method | Source::MatchedPath | Source::GrpcService | Source::GrpcMethod => true,
            Source::Header(name, _) => name == "idempotency-key",
            _ => false,
        };
        if self.sources().all(is_of_any_caller) {
            let key = &*self.text;
            tracing::warn!(
                name,
                key,
                "the key names no caller, so that each caller receives the responses of others that send the same idempotency key"
            );
        }
    }

    fn values(&self) -> impl Iterator<Item = (&Source, usize)> {
        self.parts.iter().filter_map(|part| match part {
            Part::Value(source, at) => Some((source, *at)),
            Part::Text(_) => None,
        })
    }

    fn sources(&self) -> impl Iterator<Item = &Source> {
        self.values().map(|(source, _)| source)
    }
}

/// For policies, which have a router of their own.
#[cfg(feature = "policy")]
impl KeyTemplate {
    /// Returns the key of a request that has matched `route`.
    pub(crate) fn of_routed<B>(
        &self,
        req: &Request<B>,
        route: &impl super::Routed,
    ) -> Result<LockKey, KeyError> {
        self.write(|source| source.value(req, Some(route)))
    }

    /// Returns the path parameters, with their offsets.
    pub(crate) fn params(&self) -> impl Iterator<Item = (&str, usize)> {
        self.values().filter_map(|(source, at)| match source {
            Source::Path(name, _) => Some((&**name, at)),
            _ => None,
        })
    }

    /// Returns the offset of the first placeholder for a part of a gRPC path.
    pub(crate) fn asks_for_grpc(&self) -> Option<usize> {
        let of_grpc = |source: &Source| matches!(source, Source::GrpcService | Source::GrpcMethod);
        self.values()
            .find(|(source, _)| of_grpc(source))
            .map(|(_, at)| at)
    }

    /// Returns whether the key is the same for all requests of a route with the same method.
    pub(crate) fn is_constant(&self) -> bool {
        self.sources()
            .all(|source| matches!(source, Source::Method | Source::MatchedPath))
    }
}

impl<B> KeyExtractor<Request<B>> for KeyTemplate {
    fn target(&self, req: &mut Request<B>) -> Result<Target, KeyError> {
        let route = if self.sources().any(Source::is_of_the_route) {
            match Route::of(req, self.sources())? {
                None => return Ok(Target::Unrouted),
                route => route,
            }
        } else {
            None
        };
        self.write(|source| source.value(req, route.as_ref()))
            .map(Target::Lock)
    }
}

fn parse(template: &str) -> Result<Vec<Part>, TemplateError> {
    let mut parts = Vec::new();
    let mut text = String::new();
    let mut rest = template;
    while let Some(found) = rest.find(['{', '}']) {
        let at = template.len() - rest.len() + found;
        let wrong = |complaint: &'static str| TemplateError::new(template, at, complaint);
        text.push_str(&rest[..found]);
        let brace = &rest[found..];
        if let Some(after) = brace.strip_prefix("{{") {
            text.push('{');
            rest = after;
        } else if let Some(after) = brace.strip_prefix("}}") {
            text.push('}');
            rest = after;
        } else if let Some(open) = brace.strip_prefix('{') {
            let (name, after) = open.split_once('}').ok_or_else(|| wrong(UNCLOSED))?;
            if !text.is_empty() {
                parts.push(Part::Text(std::mem::take(&mut text).into()));
            }
            let source = Source::parse(name)
                .map_err(|complaint| TemplateError::new(template, at, complaint))?;
            parts.push(Part::Value(source, at));
            rest = after;
        } else {
            return Err(wrong("this \"}\" closes nothing; write \"}}\" for a brace"));
        }
    }
    text.push_str(rest);
    if !text.is_empty() {
        parts.push(Part::Text(text.into()));
    }
    Ok(parts)
}

const UNCLOSED: &str =
    "this \"{\" is not closed; write \"{name}\" for a path parameter, \"{{\" for a brace";

impl FromStr for KeyTemplate {
    type Err = TemplateError;

    fn from_str(template: &str) -> Result<Self, TemplateError> {
        Self::new(template)
    }
}

impl fmt::Display for KeyTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl fmt::Debug for KeyTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("KeyTemplate").field(&self.text).finish()
    }
}

/// An invalid key template. The message contains the position and the correct form. `Debug` prints
/// it as well.
#[derive(Clone, PartialEq, Eq)]
pub struct TemplateError {
    template: Box<str>,
    at: usize,
    complaint: Cow<'static, str>,
}

impl TemplateError {
    fn new(template: &str, at: usize, complaint: impl Into<Cow<'static, str>>) -> Self {
        Self {
            template: template.into(),
            at,
            complaint: complaint.into(),
        }
    }

    #[cfg(feature = "policy")]
    pub(crate) fn complaint(&self) -> &str {
        &self.complaint
    }

    /// The position of the error, in bytes from the start of the template.
    pub fn at(&self) -> usize {
        self.at
    }
}

impl fmt::Display for TemplateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            template,
            at,
            complaint,
        } = self;
        // Each on its own, as the end of a long template matters less than the complaint.
        let (template, complaint) = (format!("{template:?}"), text::message(&**complaint));
        let template = text::message(template);
        write!(f, "key template {template}, byte {at}: {complaint}")
    }
}

impl fmt::Debug for TemplateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TemplateError({self})")
    }
}

impl Error for TemplateError {}

#[cfg(test)]
mod tests {
    use http::HeaderName;
    use lock_runtime::{ErrorClass, LockClient};

    use crate::LockLayer;

    use super::*;

    fn key(template: &str, headers: &[(&str, &[u8])]) -> Result<Target, KeyError> {
        let mut req = Request::new(());
        for (name, value) in headers {
            let name = HeaderName::from_bytes(name.as_bytes()).unwrap();
            req.headers_mut()
                .append(name, http::HeaderValue::from_bytes(value).unwrap());
        }
        KeyTemplate::new(template).unwrap().target(&mut req)
    }

    fn locked(template: &str, headers: &[(&str, &[u8])]) -> String {
        match key(template, headers) {
            Ok(Target::Lock(key)) => key.to_string(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_bad_template_is_refused_with_what_to_write() {
        for (template, at, words) in [
            ("", 0, "empty"),
            ("order:{id", 6, "{{"),
            ("order:id}", 8, "}}"),
            ("order:{}", 6, "{name}"),
            ("order:{header.}", 6, "{header.x-tenant}"),
            ("order:{header.x y}", 6, "{header.x-tenant}"),
            ("order:{*rest}", 6, "{rest}"),
            ("order:{id:05}", 6, "{id:int}"),
            ("order:{id:Int}", 6, "{id:int}"),
            ("order:{id:}", 6, "{id:int}"),
            ("order:{:int}", 6, "{name}"),
            ("order:{method:int}", 6, "{method}"),
            ("order:{grpc.method:uuid}", 6, "{grpc.method}"),
            ("order:{header.x:int:int}", 6, "{header.x:int}"),
            ("order:{*rest:int}", 6, "{rest:int}"),
            ("order:{query.a:Int}", 6, "{query.a:int}"),
            ("order:{query.a:b:int}", 6, "{query.a:int}"),
            ("order:{ id:05}", 6, "{id}"),
            ("order:{query.}", 6, "{query.tenant}"),
            ("order:{query. tenant}", 6, "{query.tenant}"),
            ("order:{cookie.tenant}", 6, "{header.name}"),
            ("order:{grpc.name}", 6, "{grpc.service}"),
            ("order:{ id }", 6, "{id}"),
            ("permits:{header.a}", 0, "reserved"),
            ("order\n:{header.a}", 0, "control"),
            ("a}}:{header.a}", 0, "hash tag"),
        ] {
            let error = KeyTemplate::new(template).unwrap_err();
            assert!(error.to_string().contains(words), "{error}");
            assert_eq!(error.at(), at, "{error}");
        }
    }

    #[test]
    fn a_refusal_is_one_line_of_bounded_length() {
        for template in ["{\u{1b}[2J:x}", "{*a\nb}", &"{".repeat(100_000)] {
            let error = KeyTemplate::new(template).unwrap_err().to_string();
            assert!(
                !error.contains(char::is_control) && error.len() < 16_200,
                "{error}"
            );
        }
    }

    #[test]
    fn layer_refuses_a_template_without_placeholder() {
        for template in ["order", "order::id", "order:{{id}}"] {
            let error = LockLayer::new(LockClient::in_memory(), template).unwrap_err();
            let remedy = format!("key::global({template:?})");
            for words in ["the same for every request", "{id}", &remedy] {
                assert!(error.to_string().contains(words), "{error}");
            }
            assert!(KeyTemplate::new(template).is_ok());
        }
        for template in ["order:{header.a}", "{method}"] {
            assert!(LockLayer::new(LockClient::in_memory(), template).is_ok());
        }
    }

    #[test]
    fn template_error_prints_its_message_as_debug() {
        let error = KeyTemplate::new("order:id}").unwrap_err();
        assert_eq!(format!("{error:?}"), format!("TemplateError({error})"));
    }

    #[test]
    fn doubled_braces_are_braces() {
        assert_eq!(
            locked("{{orders}}:{header.a}", &[("a", b"7")]),
            "{orders}:7"
        );
    }

    #[test]
    fn values_cannot_pass_for_the_text_around_them() {
        let template = "k:{header.a}:{header.b}";
        let one = locked(template, &[("a", b"1:2"), ("b", b"3")]);
        let other = locked(template, &[("a", b"1"), ("b", b"2:3")]);
        assert_ne!(one, other);
        assert_ne!(
            locked("{header.a}{header.b}", &[("a", b"1"), ("b", b"23")]),
            locked("{header.a}{header.b}", &[("a", b"12"), ("b", b"3")])
        );
    }

    #[test]
    fn a_header_that_does_not_name_one_value_is_the_callers_mistake() {
        let template = "k:{header.x-tenant}";
        for (headers, code) in [
            (&[][..], "missing_header"),
            (
                &[("x-tenant", &b"1"[..]), ("x-tenant", b"2")],
                "repeated_header",
            ),
            (&[("x-tenant", b"")], "invalid_header"),
            (&[("x-tenant", b"\xff")], "invalid_header"),
        ] {
            let error = key(template, headers).unwrap_err();
            assert_eq!(
                (error.class(), error.code()),
                (ErrorClass::BadRequest, code)
            );
            assert!(error.to_string().contains("x-tenant"), "{error}");
        }
        let error = key(template, &[("x-tenant", "x".repeat(600).as_bytes())]).unwrap_err();
        assert_eq!(
            (error.class(), error.code()),
            (ErrorClass::BadRequest, "invalid_key")
        );
    }

    fn of_uri(template: &str, uri: &str) -> Result<Target, KeyError> {
        let mut req = Request::post(uri).body(()).unwrap();
        KeyTemplate::new(template).unwrap().target(&mut req)
    }

    #[test]
    fn a_query_is_read_as_a_form_is() {
        for (query, key) in [
            ("tenant=acme", "k:acme"),
            ("a=1&tenant=acme&b", "k:acme"),
            ("tenant=a+b%2Bc", "k:a b+c"),
            ("ten%61nt=%C3%A9", "k:\u{e9}"),
            ("tenant=1:2/3=4", "k:1%3A2%2F3=4"),
        ] {
            let target = of_uri("k:{query.tenant}", &format!("/x?{query}")).unwrap();
            assert_eq!(
                target,
                Target::Lock(lock_runtime::LockKey::new(key).unwrap()),
                "{query}"
            );
        }
        for (query, code) in [
            ("", "missing_query_parameter"),
            ("tenan=1", "missing_query_parameter"),
            ("Tenant=1", "missing_query_parameter"),
            ("tenant=1&tenant=1", "repeated_query_parameter"),
            ("tenant=1&t%65nant=1", "repeated_query_parameter"),
            ("tenant", "invalid_query_parameter"),
            ("tenant=", "invalid_query_parameter"),
            ("tenant=%FF", "invalid_query_parameter"),
        ] {
            let error = of_uri("k:{query.tenant}", &format!("/x?{query}")).unwrap_err();
            assert_eq!(
                (error.class(), error.code()),
                (ErrorClass::BadRequest, code),
                "{query}"
            );
            assert!(error.to_string().contains("tenant"), "{error}");
        }
    }

    #[test]
    fn a_method_is_a_value_and_so_are_the_parts_of_a_grpc_path() {
        let named = |template, uri| match of_uri(template, uri) {
            Ok(Target::Lock(key)) => Ok(key.to_string()),
            Ok(other) => panic!("{other:?}"),
            Err(error) => Err(error.code()),
        };
        assert_eq!(named("{method}:x", "/").unwrap(), "POST:x");
        assert_eq!(
            named("{grpc.service}:{grpc.method}", "/shop.Orders/Pay").unwrap(),
            "shop.Orders:Pay"
        );
        for path in [
            "/",
            "/shop.Orders",
            "/shop.Orders/",
            "//Pay",
            "/a/b/c",
            "/a/P%61y",
            "/a/P+y",
        ] {
            assert_eq!(named("{grpc.method}", path), Err("bad_request"), "{path}");
        }
    }

    #[cfg(feature = "axum-08")]
    #[test]
    fn path_parameters_without_a_router_are_our_mistake() {
        let error = key("order:{id}", &[]).unwrap_err();
        assert!(matches!(error, KeyError::NotRouted));
        assert_eq!(error.class(), ErrorClass::Internal);
    }
}
