//! The routes of a policy file, and the lookup of a policy by method and path.

use std::{
    borrow::Cow,
    collections::{HashMap, HashSet},
    sync::Arc,
};

use http::Method;
use matchit::Router;
use percent_encoding::percent_decode_str;

use super::{mistake::Mistakes, route::Route};
use crate::{
    key::{KeyError, KeyTemplate, Routed},
    policy::Policy,
};

/// All policies of a file.
#[derive(Default)]
pub(super) struct Table {
    entries: Vec<Entry>,
    /// The routers for the methods that are named by at least one route.
    of_method: HashMap<Method, Router<usize>>,
    of_any: Router<usize>,
}

/// A route with its policy.
pub(super) struct Entry {
    pub(super) route: Route,
    /// The offset of the route in the file.
    pub(super) at: usize,
    /// `None` if the route has `skip = true`.
    pub(super) lock: Option<(KeyTemplate, Arc<Policy>)>,
    /// Another route, of which the path differs by a slash at the end, has text where this one has
    /// a parameter.
    pub(super) has_literal_twin: bool,
}

impl Table {
    /// Builds the routers. Entries that no request can reach are mistakes.
    pub(super) fn new(mut entries: Vec<Entry>, mistakes: &mut Mistakes<'_>) -> Self {
        let paths: Vec<_> = entries.iter().map(|it| it.route.path.clone()).collect();
        for entry in &mut entries {
            let own = &entry.route.path;
            entry.has_literal_twin = paths.iter().any(|path| is_literal_twin(path, own));
        }
        let mut named: HashSet<_> = entries
            .iter()
            .flat_map(|entry| &entry.route.methods)
            .cloned()
            .collect();
        // axum serves HEAD with the handler of GET, so HEAD has the same lock. A handler of any
        // method serves WebSockets, which are a GET, or over HTTP/2 a CONNECT.
        if named.contains(&Method::GET) {
            named.extend([Method::HEAD, Method::CONNECT]);
        }
        let of_any = reached(&entries, None, mistakes);
        let of_method = named.into_iter().map(|method| {
            let routes = reached(&entries, Some(&method), mistakes);
            (method, routes)
        });
        Self {
            of_method: of_method.collect(),
            of_any,
            entries,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns whether a router that is nested as a service, or a layer further in that rewrites
    /// paths, might serve the request by another route than the one found here. axum strips one
    /// slash when it nests a service, so that `/api/` and `/api//orders` are served like `/api` and
    /// `/api/orders`. A path without a slash in front matches no route.
    pub(super) fn is_ambiguous(
        &self,
        found: Option<&Found<'_, '_>>,
        method: &Method,
        path: &str,
    ) -> bool {
        // `OPTIONS *` and `CONNECT`, which no route can name and a fallback serves.
        if !path.starts_with('/') || path.contains("//") {
            return true;
        }
        let is_explicit = |found: &Found<'_, '_>| !found.entry.route.path.contains("{*");
        let explicit = found.filter(|found| is_explicit(found));
        if explicit.is_some_and(|found| !found.entry.has_literal_twin) {
            return false;
        }
        let other = path
            .strip_suffix('/')
            .map_or(format!("{path}/"), str::to_owned);
        let other = self.find(method, &other);
        other.is_some_and(|other| {
            let is_twin = |found: &Found<'_, '_>| {
                is_literal_twin(&other.entry.route.path, &found.entry.route.path)
            };
            is_explicit(&other) && other.lock().is_some() && explicit.is_none_or(is_twin)
        })
    }

    /// Returns the most specific route for a request: literal text precedes parameters, and of
    /// two routes with the same path the one that names the method precedes the one without
    /// methods.
    pub(super) fn find<'t, 'p>(&'t self, method: &Method, path: &'p str) -> Option<Found<'t, 'p>> {
        let routes = self.of_method.get(method).unwrap_or(&self.of_any);
        let found = routes.at(path).ok()?;
        let entry = self.entries.get(*found.value)?;
        Some(Found {
            entry,
            values: found.params,
        })
    }
}

/// Returns whether the path of a route has text where that of `other` has a parameter, and both
/// match paths that differ by a slash at the end only.
fn is_literal_twin(path: &str, other: &str) -> bool {
    let [(one, ends_one), (two, ends_two)] =
        [path, other].map(|it| it.strip_suffix('/').map_or((it, false), |it| (it, true)));
    let is_parameter = |segment: &str| segment.contains('{');
    let mut both = one.split('/').zip(two.split('/'));
    ends_one != ends_two
        && one.split('/').count() == two.split('/').count()
        && both.any(|(one, two)| !is_parameter(one) && is_parameter(two))
}

/// Builds the router of the routes that a request of the method can reach. Of two routes that
/// match the same paths, only the more specific is added.
fn reached(
    entries: &[Entry],
    method: Option<&Method>,
    mistakes: &mut Mistakes<'_>,
) -> Router<usize> {
    let mut of_shape: HashMap<&str, (u8, usize)> = HashMap::new();
    for (index, entry) in entries.iter().enumerate() {
        let Some(rank) = rank(&entry.route.methods, method) else {
            continue;
        };
        match of_shape.get(entry.route.shape.as_str()) {
            Some((other, first)) if *other == rank => {
                let line = mistakes.line(entries[*first].at);
                mistakes.add(entry.at, twice(&entry.route, &entries[*first].route, line));
            }
            Some((other, _)) if *other < rank => {}
            _ => {
                of_shape.insert(&entry.route.shape, (rank, index));
            }
        }
    }
    let mut reachable: Vec<_> = of_shape
        .into_iter()
        .map(|(shape, (_, index))| (index, shape))
        .collect();
    reachable.sort_unstable();
    let mut router = Router::new();
    for (index, shape) in reachable {
        if let Err(error) = router.insert(shape, index) {
            let other = match &error {
                matchit::InsertError::Conflict { with } => entries[..index]
                    .iter()
                    .find(|entry| entry.route.shape == *with),
                _ => None,
            };
            let message = match other {
                Some(other) => format!(
                    "neither this route nor {:?} in line {} is more specific, so a request could match both; axum \
                     rejects such routes as well",
                    other.route.path,
                    mistakes.line(other.at)
                ),
                None => format!("this route conflicts with another one: {error}"),
            };
            mistakes.add(entries[index].at, message);
        }
    }
    router
}

/// Describes the conflict of `route` with `first` in line `line`, which matches the same paths.
fn twice(route: &Route, first: &Route, line: usize) -> String {
    let both: Vec<_> = route
        .methods
        .iter()
        .filter(|method| first.methods.contains(method))
        .map(Method::as_str)
        .collect();
    if both.len() == route.methods.len() {
        format!(
            "this route can never match: the one in line {line} matches the same requests; leave one of them out"
        )
    } else {
        format!(
            "the route in line {line} matches the same {} requests: name the method in one of them only",
            both.join(" and ")
        )
    }
}

/// Returns how well a route of `methods` matches a request of `method`; lower is better. If
/// `method` is `None`, it stands for all methods that no route names.
fn rank(methods: &[Method], method: Option<&Method>) -> Option<u8> {
    match method {
        _ if methods.is_empty() => Some(2),
        Some(method) if methods.contains(method) => Some(0),
        Some(&Method::HEAD) if methods.contains(&Method::GET) => Some(1),
        Some(&Method::CONNECT) if methods.contains(&Method::GET) => Some(3),
        _ => None,
    }
}

/// The matched route of a request, with the values of its parameters.
pub(super) struct Found<'t, 'p> {
    entry: &'t Entry,
    values: matchit::Params<'t, 'p>,
}

impl<'t> Found<'t, '_> {
    pub(super) fn lock(&self) -> Option<&'t (KeyTemplate, Arc<Policy>)> {
        self.entry.lock.as_ref()
    }
}

impl Routed for Found<'_, '_> {
    fn param(&self, name: &str) -> Result<Cow<'_, str>, KeyError> {
        let route = &self.entry.route;
        let mut values = route.params.iter().zip(self.values.iter());
        let Some((_, (_, value))) = values.find(|(param, _)| ***param == *name) else {
            // Unreachable, because the parameters were validated when the file was loaded.
            return Err(KeyError::NoSuchParameter {
                name: name.into(),
                route: route.path.clone(),
            });
        };
        percent_decode_str(value).decode_utf8().map_err(|_| {
            KeyError::bad_request(format!("The path parameter {name:?} is not UTF-8."))
        })
    }

    fn pattern(&self) -> Result<&str, KeyError> {
        Ok(&self.entry.route.path)
    }
}
