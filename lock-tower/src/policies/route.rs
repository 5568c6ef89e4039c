//! The route of a policy as it is written: methods and a path, `"POST /orders/{id}"`.

use http::{Method, uri::PathAndQuery};

/// Those that axum routes by. Another one is more likely a slip than meant.
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
    /// None for any.
    pub(super) methods: Vec<Method>,
    /// As it was written: `/orders/{id}`.
    pub(super) path: Box<str>,
    /// The names of its parameters, in their order.
    pub(super) params: Vec<Box<str>>,
    /// The path with its parameters called by their numbers: the same for routes that match the same paths.
    pub(super) shape: String,
    /// A path that it matches.
    sample: String,
}

impl Route {
    /// Reads `text`; otherwise what to write.
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
                format!("no path starts like that: write {:?}", format!("/{path}"))
            } else {
                format!(
                    "{text:?} is no route: write a path such as \"/orders/{{id}}\", or methods and a path, \"PUT|POST /orders/{{id}}\""
                )
            });
        }
        let route = Self {
            methods,
            ..path_of(path)?
        };
        // What no URI can have, no request has either.
        match PathAndQuery::try_from(route.sample.as_str()) {
            Ok(uri) if uri.path() == route.sample => Ok(route),
            _ => Err(format!(
                "no path of a request looks like {path:?}: it has no query and no fragment, and blanks and the like are \
                 percent-encoded in it"
            )),
        }
    }

    /// Could it be that of a gRPC method, `/package.Service/Method`?
    pub(super) fn may_be_grpc(&self) -> bool {
        let posts = self.methods.is_empty() || self.methods.contains(&Method::POST);
        // What a parameter for the rest of the path matches may have any number of parts.
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
                "{text:?} is no method: write one of {}, several with \"|\", or none for all",
                known.join(", ")
            ))
        }
    }
}

/// matchit names them by letters, and panics when it runs out of them.
const MOST_PARAMS: usize = 25;

/// Reads a path as matchit does, which says whether it is one.
fn path_of(path: &str) -> Result<Route, String> {
    use matchit::InsertError as E;
    if path.replace("{{", "").matches('{').count() > MOST_PARAMS {
        return Err(format!(
            "a path has {MOST_PARAMS} parameters at most: write \"{{*rest}}\" at its end for many"
        ));
    }
    matchit::Router::new().insert(path, ()).map_err(|error| match error {
        E::InvalidParamSegment => {
            format!("a segment of {path:?} has something after its parameter: only what comes before may stand beside it, as in \"/order-{{id}}\"")
        }
        E::InvalidCatchAll => format!("in {path:?} the parameter with the star is not the last segment: write it at the end"),
        _ => format!("the braces of {path:?} enclose no name: write \"{{id}}\", \"{{*rest}}\" at the end, or \"{{{{\" for a brace"),
    })?;
    // axum refuses it as well.
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
        // matchit takes braces for a part of the name.
        if name.contains('{') || after.starts_with('}') {
            return Err(format!(
                "a parameter of {path:?} has a brace in its name: write a plain one, \"{{id}}\""
            ));
        }
        if let Some((plain, _)) = name.split_once(':') {
            return Err(format!(
                "a kind is said in the key: write {{{star}{plain}}} in the route"
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
