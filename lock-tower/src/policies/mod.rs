//! [`LockPolicies`]: lock policies of routes, from a file that can be reloaded while requests are
//! served.

#[cfg(test)]
#[path = "../../fuzz/policies.rs"]
mod fuzz;
mod mistake;
mod read;
mod route;
mod settings;
mod table;

use std::{
    fmt, fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use self::table::Table;
use crate::{
    key::{KeyError, Target},
    policy::Policy,
    selector::{RouteOf, Selection, Selector, sealed::Sealed},
};
use arc_swap::ArcSwap;
use http::{Method, Request};

pub use mistake::{PolicyError, PolicyMistake};

/// Lock policies of routes, written as TOML.
///
/// ```
/// use lock_tower::{LockPolicies, PolicyLayer, runtime::LockClient};
///
/// # fn main() -> Result<(), lock_tower::PolicyError> {
/// let policies = LockPolicies::from_toml_str(r#"
///     [defaults]
///     lease = "10s"
///
///     [groups.reports]
///     mode = "shared"
///     wait = "5s"
///
///     [routes."POST /orders/{id}/pay"]
///     name = "pay"
///     key = "order:{id:int}"
///     status = { busy = 423 }
///
///     [routes."GET /orders/{id}"]
///     group = "reports"
///     key = "order:{id:int}"
///
///     [routes."/shop.Inventory/Reserve"]
///     key = "item:{header.x-item}"
///     no_wait = true
///
///     [routes]
///     "/orders/health" = { skip = true }
/// "#)?;
/// let layer = PolicyLayer::new(LockClient::in_memory(), policies);
/// # Ok(()) }
/// ```
///
/// # Routes
///
/// Each route is a table in `routes`. Its name consists of methods and a path:
/// `"POST /orders/{id}"`, `"PUT|PATCH /orders/{id}"`, or `"/orders/{id}"` for any method. The
/// path has the syntax of axum's router and includes all prefixes of nested routers. The path of
/// a gRPC method is `"/package.Service/Method"`. `{id}` matches one segment, `{*rest}` at the end
/// matches the rest of the path.
///
/// The most specific route that matches a request applies: literal text precedes parameters, and
/// of two routes with the same path the one that names the method precedes the one without
/// methods. A route for `GET` also applies to `HEAD`, unless there is one for `HEAD`, and to
/// the `CONNECT` of a WebSocket over HTTP/2, unless another one of the same path applies to it.
///
/// *A request that matches no route is served without a lock*, like one whose route has
/// `skip = true`, which exempts a path from a less specific route. Take a `HeldLock` in each
/// handler that needs its lock: if the path in the file is wrong, the request then fails, unless
/// another layer around this one has locked it.
///
/// # Fields
///
/// Fields that a route leaves unset come from its `group`, then from `[defaults]`, then from the
/// client's defaults.
///
/// | field | meaning |
/// |---|---|
/// | `key = "order:{id:int}"` | the [template](crate::KeyTemplate) of the key |
/// | `global = true` | required if the key is the same for all requests |
/// | `lease = "30s"` | how long the store keeps the lock without a renewal: [`LockSpec::lease`] |
/// | `wait = "2s"`, `no_wait = true` | how long a request waits for the lock; 2 s by default |
/// | `mode = "exclusive"` | one holder, as a writer |
/// | `mode = "shared"` | many holders, as readers |
/// | `permits = 3` | at most three holders |
/// | `reentrant = true` | re-enters the lock of an outer layer |
/// | `min_hold = "5s"` | keeps the lock for at least this long |
/// | `max_hold = "5m"` | ends renewal after this long; the lock is then lost; a minute by default |
/// | `no_max_hold = true` | no `max_hold`; a mistake with `hold_until = "body"` |
/// | `renew = false` | the lock ends with its lease |
/// | `strict_order = true` | processes take strict turns |
/// | `retain = "50ms"` | keeps the lock for its next use in this process: [`LockSpec::retain`] |
/// | `max_waiters = 100` | more waiting requests are refused at once: [`LockSpec::max_waiters`] |
/// | `on_lost = "error"` | the effect of a loss, `"cancel"` by default, or `"ignore"`: [`OnLost`] |
/// | `hold_until = "body"` | releases the lock after the body: [`HoldUntil`](crate::HoldUntil) |
/// | `retry_after = "1s"` | the longest `Retry-After` |
/// | `fail_open = true` | serves without lock if the store is down: [`LockLayer::fail_open`] |
/// | `status = { busy = 423 }` | other HTTP statuses for refusals |
/// | `once = { keep = "24h" }` | serves a request once for each key: `OnceLayer::with_policies` |
///
/// `reentrant`, `renew` and `strict_order` are `true` or `false`, so that a route can override
/// its group, `[defaults]` and the client's defaults in both directions. `wait` and `no_wait`
/// override each other, and so do `max_hold` and `no_max_hold`.
///
/// The key may contain the parameters of the route (as text, `:int` or `:uuid`), headers, query
/// parameters, the method, and the gRPC service and method; `{matched_path}` is the path of the
/// route. `status` may contain `busy`, `overloaded`, `unavailable`, `lost`, `bad_request` and
/// `internal`.
///
/// `once` may contain `keep`, the time for which a response is kept, and the longest bodies:
/// `result = "64KiB"`, `request = "1MiB"`. `once = "24h"` sets `keep` alone.
///
/// Three fields belong to routes only: `group`, `skip`, and `name`, the name of the policy in
/// metrics and refusals. The name defaults to the route as it is written.
///
/// A file is validated as a whole, and [`PolicyError`] lists all mistakes with line and column:
/// unknown fields, invalid values, parameters that a route does not have, routes that can never
/// match. A TOML syntax error may hide other mistakes until it is corrected.
///
/// # Placement
///
/// The layer may be placed around a finished axum router, in a `Router::layer`, within a nested
/// router, or on a tonic server. It has a router of its own, which uses the path that axum's
/// outermost router received, or else the path of the request. Other routers, and axum in another
/// version than that of this crate, hide the prefixes that they strip: place the layer around
/// them. Layers that rewrite paths or methods, such as tower-http's `NormalizePath`, belong outside
/// of it *and* of axum's outermost router. A request that a handler makes for another route must
/// not get the `Extensions` of the handler's own request. Otherwise a request can pass under a path
/// that has no policy. So can one to a service within `nest_service` that decodes paths, such as a
/// proxy: to it, `/files/r%65port` is `/files/report`.
///
/// axum's `nest_service("/api", ..)` serves several paths by one route, which a policy file
/// cannot express: `/api//orders` like `/api/orders`, and `/api/` like `/api`. Each path with an
/// empty segment, `//`, is therefore refused with 400 (`bad_request`). So is a path that has a lock
/// only with, or without, a slash at its end, where the file has no route for it but a
/// `{*rest}`; to serve both, write both routes. So are `OPTIONS *` and the `CONNECT` of a proxy,
/// which have no path that a route could name.
/// [`allow_empty_segments`](Self::allow_empty_segments) accepts all of them.
///
/// [`OnLost`]: lock_runtime::OnLost
/// [`LockLayer::fail_open`]: crate::LockLayer::fail_open
/// [`LockSpec::lease`]: lock_runtime::LockSpec::lease
/// [`LockSpec::max_waiters`]: lock_runtime::LockSpec::max_waiters
/// [`LockSpec::retain`]: lock_runtime::LockSpec::retain
#[derive(Clone)]
pub struct LockPolicies {
    shared: Arc<Shared>,
    allows_empty_segments: bool,
}

struct Shared {
    table: ArcSwap<Table>,
    file: Option<PathBuf>,
    /// The policy of requests that no route has.
    unrouted: Arc<Policy>,
    /// Serializes replacements: of two concurrent ones, the one that reads its source later wins.
    replacing: Mutex<()>,
}

impl LockPolicies {
    /// Parses policies from a string.
    ///
    /// # Errors
    /// If the text has mistakes. The error lists all of them.
    pub fn from_toml_str(text: &str) -> Result<Self, PolicyError> {
        Ok(Self::over(read::read(text)?, None))
    }

    /// Reads policies from a file. This blocks until the file has been read.
    ///
    /// # Errors
    /// If the file cannot be read or has mistakes. The error lists all of them.
    pub fn from_file(file: impl Into<PathBuf>) -> Result<Self, PolicyError> {
        let file = file.into();
        Ok(Self::over(read_file(&file)?, Some(file)))
    }

    fn over(table: Table, file: Option<PathBuf>) -> Self {
        Self {
            shared: Arc::new(Shared {
                table: ArcSwap::from_pointee(table),
                file,
                unrouted: Arc::new(Policy::unrouted()),
                replacing: Mutex::default(),
            }),
            allows_empty_segments: false,
        }
    }

    /// Accepts paths with empty segments, such as `/files//a`, and serves `/orders/7/` without the
    /// lock of `/orders/7` if the file has no route for it. They are refused with 400 by default.
    ///
    /// Only for applications without axum's `nest_service`, or another router that strips slashes:
    /// such a router serves `/api//orders` like `/api/orders`, and a request can reach its handler
    /// without the lock. It applies to this value and to clones of it that are made later.
    #[must_use]
    pub fn allow_empty_segments(self) -> Self {
        Self {
            allows_empty_segments: true,
            ..self
        }
    }

    /// Reads the file again. The new policies apply to all clones, from the next request on.
    /// Requests that have already begun keep their policy.
    ///
    /// This blocks the thread until the file has been read. Replace the file atomically: write a
    /// new file next to it and rename it. A file that is cut off between two routes may be valid,
    /// with fewer routes. An event records the number of routes before and after.
    ///
    /// # Errors
    /// As for [`from_file`](Self::from_file), or if the policies were not read from a file. The
    /// previous policies then stay in use.
    pub fn reload(&self) -> Result<(), PolicyError> {
        let file = self
            .shared
            .file
            .as_deref()
            .ok_or_else(PolicyError::no_file)?;
        self.shared.replace(|| read_file(file))
    }

    /// Replaces the policies, like [`reload`](Self::reload), with those of a string.
    ///
    /// # Errors
    /// If the text has mistakes. The error lists all of them, and the previous policies stay in
    /// use.
    pub fn replace(&self, text: &str) -> Result<(), PolicyError> {
        self.shared.replace(|| read::read(text))
    }

    /// Returns the policy for a request to `path`, or `None` if it is served without a lock.
    /// Intended for tests of policy files.
    ///
    /// ```
    /// # use http::Method;
    /// # use lock_tower::LockPolicies;
    /// # fn main() -> Result<(), lock_tower::PolicyError> {
    /// let policies = LockPolicies::from_toml_str(r#"
    ///     routes."POST /orders/{id}" = { name = "pay", key = "order:{id}" }
    /// "#)?;
    /// assert_eq!(policies.find(&Method::POST, "/orders/42").unwrap().name(), "pay");
    /// assert!(policies.find(&Method::GET, "/orders/42").is_none());
    /// # Ok(()) }
    /// ```
    pub fn find(&self, method: &Method, path: &str) -> Option<Arc<Policy>> {
        let table = self.shared.table.load();
        let (_, policy) = table.find(method, path)?.lock()?;
        Some(policy.clone())
    }
}

impl Shared {
    fn replace(
        &self,
        read: impl FnOnce() -> Result<Table, PolicyError>,
    ) -> Result<(), PolicyError> {
        let replacing = self
            .replacing
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let table = read()?;
        let (before, after) = (self.table.load().len(), table.len());
        self.table.store(Arc::new(table));
        // Unlocked before the event, because a `tracing` subscriber may replace the policies
        // again.
        drop(replacing);
        tracing::info!(before, after, "lock policies replaced; fields count routes");
        Ok(())
    }
}

fn read_file(file: &Path) -> Result<Table, PolicyError> {
    let text = fs::read_to_string(file).map_err(PolicyError::unreadable);
    text.and_then(|text| read::read(&text))
        .map_err(|error| error.of_file(file))
}

impl LockPolicies {
    /// Chooses the policy of a request. `takes` returns whether a request under a policy takes its
    /// lock here.
    fn selected<B>(&self, req: &Request<B>, takes: impl FnOnce(&Policy) -> bool) -> Selection {
        let unrouted = |target| (self.shared.unrouted.clone(), target);
        let table = self.shared.table.load();
        let path = whole_path(req);
        let found = table.find(req.method(), path);
        if !self.allows_empty_segments && table.is_ambiguous(found.as_ref(), req.method(), path) {
            let detail = "The path has an empty segment, or lacks a slash, or has one at its end.";
            return unrouted(Err(KeyError::bad_request(detail)));
        }
        let Some(found) = found else {
            tracing::debug!("no policy matched; request served without a lock");
            return unrouted(Ok(Target::Skip));
        };
        match found.lock() {
            Some((key, policy)) => {
                let target = match takes(policy) {
                    true => key.of_routed(req, &found).map(Target::Lock),
                    false => Ok(Target::Skip),
                };
                (policy.clone(), target)
            }
            None => unrouted(Ok(Target::Skip)),
        }
    }
}

impl<B> Sealed<Request<B>> for LockPolicies {}

impl<B> Selector<Request<B>> for LockPolicies {
    fn select(&self, req: &mut Request<B>, _route: RouteOf<Request<B>>) -> Selection {
        let selection = self.selected(req, |_| true);
        #[cfg(feature = "once")]
        if let (policy, Ok(Target::Lock(key))) = &selection
            && policy.once().is_some()
        {
            use crate::once::ServedOnce;
            let served = req.extensions().get::<ServedOnce>();
            let missing = KeyError::misconfigured(
                "a route with `once` needs a `OnceLayer` with the same policies around this layer",
            );
            let is_served = served.is_some_and(|ServedOnce(served)| served == key);
            return (
                policy.clone(),
                is_served.then_some(Target::Skip).ok_or(missing),
            );
        }
        selection
    }

    #[cfg(feature = "once")]
    fn select_once(&self, req: &mut Request<B>) -> Selection {
        self.selected(req, |policy| policy.once().is_some())
    }
}

/// The path that the client requested, without the changes of nested routers.
fn whole_path<B>(req: &Request<B>) -> &str {
    #[cfg(feature = "axum-08")]
    if let Some(uri) = req.extensions().get::<axum::extract::OriginalUri>() {
        return uri.path();
    }
    req.uri().path()
}

impl fmt::Debug for LockPolicies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockPolicies")
            .field("file", &self.shared.file)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
