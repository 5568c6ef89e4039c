//! The route of a policy: methods and a path, `"POST /orders/{id}"`.

use http::{Method, uri::PathAndQuery};

/// The methods of axum's router. Any other is more likely a mistake than intended.
const METHODS: [Method; 9] = [
    Method::GET,
    Method::HEAD,
    Method::POST,
    Method::PUT,
    Method::PATCH,
    Method::DELETE,
    Method::OPTIONS,
    Method::CONNECT,
    Method::TRACE,
];

/// A route that can match.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Route {
    /// Empty for any method.
    pub(super) methods: Vec<Method>,
    /// The path as it was written: `/orders/{id}`.
    pub(super) path: Box<str>,
    /// The names of the parameters, in order.
    pub(super) params: Vec<Box<str>>,
    /// The path with the parameters numbered. It is equal for routes that match the same paths.
    pub(super) shape: String,
    /// A path that the route matches.
    sample: String,
}

impl Route {
    /// Parses a route. The error describes the correct form.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        if let Some((path, methods)) = text.split_once(' ')
            && path.starts_with('/')
            && method(methods).is_ok()
        {
            return Err(format!(
                "methods come first: write {:?}",
                format!("{methods} {path}")
            ));
        }
        let (methods, path) = match text.split_once(' ') {
            Some((methods, path)) => (
                methods.split('|').map(method).collect::<Result<_, _>>()?,
                path,
            ),
            None => (Vec::new(), text),
        };
        if let Some((_, twice)) = methods
            .iter()
            .enumerate()
            .find(|(at, method)| methods[..*at].contains(method))
        {
            return Err(format!("the method {twice} is named twice"));
        }
        if !path.starts_with('/') {
            return Err(if path.contains('/') && !path.contains(' ') {
                format!("a path starts with a slash: write {:?}", format!("/{path}"))
            } else {
                format!(
                    "{text:?} is not a route: write a path such as \"/orders/{{id}}\", or methods and a path, \"PUT|POST /orders/{{id}}\""
                )
            });
        }
        let route = Self {
            methods,
            ..path_of(path)?
        };
        // A path that is not valid in a URI cannot occur in a request.
        match PathAndQuery::try_from(route.sample.as_str()) {
            Ok(uri) if uri.path() == route.sample => Ok(route),
            _ => Err(format!(
                "no request has the path {path:?}: a path has no query and no fragment, and spaces and the like are \
                 percent-encoded"
            )),
        }
    }

    /// Returns whether the route can match a gRPC method, `/package.Service/Method`.
    pub(super) fn may_be_grpc(&self) -> bool {
        let posts = self.methods.is_empty() || self.methods.contains(&Method::POST);
        // A parameter for the rest of the path matches any number of segments.
        let open = self.shape.contains("{*");
        let mut parts = self.sample[1..].split('/');
        let named = |part: &str| {
            !part.is_empty()
                && part
                    .bytes()
                    .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.'))
        };
        let two = parts.clone().count() == 2 || (open && parts.clone().count() <= 2);
        posts && two && parts.all(named)
    }
}

fn method(text: &str) -> Result<Method, String> {
    if let Some(method) = METHODS.iter().find(|method| method.as_str() == text) {
        return Ok(method.clone());
    }
    match METHODS
        .iter()
        .find(|method| method.as_str().eq_ignore_ascii_case(text))
    {
        Some(method) => Err(format!(
            "no request has the method {text:?}: write {method}"
        )),
        None => {
            let known: Vec<_> = METHODS.iter().map(Method::as_str).collect();
            Err(format!(
                "{text:?} is not a method: write one of {}, several with \"|\", or none for all",
                known.join(", ")
            ))
        }
    }
}

/// matchit names parameters by letters, and panics if there are none left.
const MOST_PARAMS: usize = 25;

/// Parses a path with the syntax of matchit, which validates it.
fn path_of(path: &str) -> Result<Route, String> {
    use matchit::InsertError as E;
    if path.replace("{{", "").matches('{').count() > MOST_PARAMS {
        return Err(format!(
            "a path has {MOST_PARAMS} parameters at most: write \"{{*rest}}\" at its end for many"
        ));
    }
    matchit::Router::new().insert(path, ()).map_err(|error| match error {
        E::InvalidParamSegment => {
            format!("a segment of {path:?} has text after its parameter: only a prefix is allowed, as in \"/order-{{id}}\"")
        }
        E::InvalidCatchAll => format!("in {path:?} the parameter with the star is not the last segment: write it at the end"),
        _ => format!("the braces of {path:?} enclose no name: write \"{{id}}\", \"{{*rest}}\" at the end, or \"{{{{\" for a brace"),
    })?;
    // axum rejects it as well.
    if let Some(old) = path
        .split('/')
        .find(|segment| segment.starts_with([':', '*']))
    {
        let name = if old.len() > 1 { &old[1..] } else { "id" };
        let star = if old.starts_with('*') { "*" } else { "" };
        return Err(format!(
            "a parameter is not written {old:?}: write \"{{{star}{}}}\"",
            name.escape_debug()
        ));
    }
    let mut route = Route {
        methods: Vec::new(),
        path: path.into(),
        params: Vec::new(),
        shape: String::new(),
        sample: String::new(),
    };
    let mut rest = path;
    while let Some(at) = rest.find(['{', '}']) {
        let (text, brace) = rest.split_at(at);
        route.shape.push_str(text);
        route.sample.push_str(text);
        let doubled = ["{{", "}}"]
            .into_iter()
            .find(|doubled| brace.starts_with(doubled));
        if let Some(doubled) = doubled {
            route.shape.push_str(doubled);
            route.sample.push_str(&doubled[1..]);
            rest = &brace[2..];
            continue;
        }
        let Some((name, after)) = brace[1..].split_once('}') else {
            break;
        };
        let (star, name) = name
            .strip_prefix('*')
            .map_or(("", name), |name| ("*", name));
        // matchit accepts braces in a parameter name.
        if name.contains('{') || after.starts_with('}') {
            return Err(format!(
                "a parameter of {path:?} has a brace in its name: write a plain one, \"{{id}}\""
            ));
        }
        if let Some((plain, _)) = name.split_once(':') {
            return Err(format!(
                "the kind of a parameter belongs in the key: write {{{star}{plain}}} in the route"
            ));
        }
        if route.params.iter().any(|other| **other == *name) {
            return Err(format!(
                "{path:?} has two parameters {{{name}}}: rename one"
            ));
        }
        route
            .shape
            .push_str(&format!("{{{star}{}}}", route.params.len()));
        route.sample.push('x');
        route.params.push(name.into());
        rest = after;
    }
    route.shape.push_str(rest);
    route.sample.push_str(rest);
    Ok(route)
}
