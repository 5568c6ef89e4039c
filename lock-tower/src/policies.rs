//! [`LockPolicies`]: which routes are locked and how, from a file that can be read again while requests are served.

mod layer;
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
    key::{KeyError, KeyExtractor, Target},
    policy::Policy,
};
use arc_swap::ArcSwap;
use http::{Method, Request};

pub use layer::PolicyLayer;
pub use mistake::{PolicyError, PolicyMistake};

/// Lock policies per route, written as TOML.
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
///     mode = "read"
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
/// Each is a table of `routes`, called by the methods and the path that it is for: `"POST /orders/{id}"`, `"PUT|PATCH
/// /orders/{id}"`, or `"/orders/{id}"` for any method. The path is written as for axum's router, and as a caller says it,
/// with all that routers nest it in; that of a gRPC method is `"/package.Service/Method"`. `{id}` stands for a segment,
/// `{*rest}` at the end for the rest of the path.
///
/// The most specific route that fits a request is its own: literal text comes before parameters, and of the same path the
/// one that names the method before the one that names none. A route for `GET` is that of `HEAD` too, unless there is
/// one. A request that fits none is served without a lock, as is one whose route says `skip = true`.
///
/// # Fields
///
/// What a route leaves open comes from its `group`, then from `[defaults]`, then from the client's defaults.
///
/// | field | meaning |
/// |---|---|
/// | `key = "order:{id:int}"` | the [template](crate::KeyTemplate) of the key, over the parameters of the route (as text, `:int`, `:uuid`), headers, query, method, gRPC service and method; `{matched_path}` is the path of the route |
/// | `global = true` | said with a key that is the same for every request |
/// | `lease = "30s"` | how long the store keeps the lock without a renewal: [`LockSpec::lease`] |
/// | `wait = "2s"`, `no_wait = true` | how long to wait for it; 2 s where nothing else is said |
/// | `mode = "exclusive"`, `"read"`, `"write"`; `permits = 3` | one holder; many readers and one writer; at most three holders |
/// | `reentrant = true` | enters the lock of a layer further out again |
/// | `min_hold = "5s"`, `max_hold = "5m"` | keeps it at least so long; loses it after so long |
/// | `no_renew = true`, `strict_order = true` | the lock ends with its lease; processes take strict turns |
/// | `max_waiters = 100` | more requests for one key are refused at once: [`LockSpec::max_waiters`] |
/// | `hold = "body"` | keeps the lock until the body is sent: [`Hold`](crate::Hold) |
/// | `retry_after = "1s"` | the longest `Retry-After` |
/// | `fail_open = true` | serves without the lock when the store is out of reach: [`LockLayer::fail_open`](crate::LockLayer::fail_open) |
/// | `status = { busy = 423 }` | other HTTP statuses: `busy`, `overloaded`, `unavailable`, `lost`, `bad_request`, `internal` |
///
/// Only of a route: `name`, by which metrics and refusals call it (the route as it is written, where nothing else is
/// said), `group`, `skip`.
///
/// A file is checked as a whole, and [`PolicyError`] tells all mistakes at once, with line and column: fields that there
/// are not, values that cannot be meant, parameters that a route does not have, routes that can never match.
///
/// # Where to put the layer
///
/// Around a finished axum router, on a `Router::layer`, within a nested one, on a tonic server: it routes by itself, by
/// the path that axum's outermost router has got, or the request's own. Other routers, and axum of another version than
/// this crate's, hide what they strip: put it around those. Layers that rewrite paths, such as tower-http's
/// `NormalizePath`, belong outside of it; otherwise they let a request pass under a path that no policy has.
///
/// axum's `nest_service("/api", ..)` serves more paths than one by a route, of which a policy file knows nothing:
/// `/api//orders` as `/api/orders`, and `/api/` as `/api`. The former is refused with 400 (`bad_request`) where a lock
/// depends on it; for the latter write both routes, or `nest` the router.
///
/// [`LockSpec::lease`]: lock_runtime::LockSpec::lease
/// [`LockSpec::max_waiters`]: lock_runtime::LockSpec::max_waiters
#[derive(Clone)]
pub struct LockPolicies {
    shared: Arc<Shared>,
}

struct Shared {
    table: ArcSwap<Table>,
    file: Option<PathBuf>,
    /// Whoever replaces the table: of two at once, the one that has read later is the last.
    replacing: Mutex<()>,
}

impl LockPolicies {
    /// The policies of a text.
    ///
    /// # Errors
    /// With every mistake in the text.
    pub fn from_toml_str(text: &str) -> Result<Self, PolicyError> {
        Ok(Self::over(read::read(text)?, None))
    }

    /// The policies of a file. It is read before this returns.
    ///
    /// # Errors
    /// If the file cannot be read, or with every mistake in it.
    pub fn from_file(file: impl Into<PathBuf>) -> Result<Self, PolicyError> {
        let file = file.into();
        Ok(Self::over(read_file(&file)?, Some(file)))
    }

    fn over(table: Table, file: Option<PathBuf>) -> Self {
        Self {
            shared: Arc::new(Shared {
                table: ArcSwap::from_pointee(table),
                file,
                replacing: Mutex::default(),
            }),
        }
    }

    /// Reads the file again. Requests that come from now on, to any clone, are served as it says now; those that have
    /// begun go on under the policy that they began with.
    ///
    /// The file is read before this returns, which blocks the thread for so long. Write a new file beside the old one and
    /// rename it: what is cut off between two routes may be a good file with fewer of them. An event tells how many there
    /// were and are.
    ///
    /// # Errors
    /// As [`from_file`](Self::from_file); nothing has changed then. Also if there is no file.
    pub fn reload(&self) -> Result<(), PolicyError> {
        let file = self
            .shared
            .file
            .as_deref()
            .ok_or_else(PolicyError::no_file)?;
        self.shared.replace(|| read_file(file))
    }

    /// As [`reload`](Self::reload), from a text.
    ///
    /// # Errors
    /// With every mistake in the text; nothing has changed then.
    pub fn replace(&self, text: &str) -> Result<(), PolicyError> {
        self.shared.replace(|| read::read(text))
    }

    /// The policy that a request to `path` is served under, if it is not served without a lock. For tests of policy files.
    ///
    /// ```
    /// # use http::Method;
    /// # use lock_tower::LockPolicies;
    /// # fn main() -> Result<(), lock_tower::PolicyError> {
    /// let policies = LockPolicies::from_toml_str(r#"routes."POST /orders/{id}" = { name = "pay", key = "order:{id}" }"#)?;
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
        // Whoever listens may replace them again.
        drop(replacing);
        tracing::info!(before, after, "lock policies replaced; so many routes");
        Ok(())
    }
}

fn read_file(file: &Path) -> Result<Table, PolicyError> {
    let text = fs::read_to_string(file).map_err(PolicyError::unreadable);
    text.and_then(|text| read::read(&text))
        .map_err(|error| error.of_file(file))
}

/// For a layer of its own: what the setters of a `LockLayer` say counts for nothing under these targets. See [`PolicyLayer`].
impl<B> KeyExtractor<Request<B>> for LockPolicies {
    fn target(&self, req: &mut Request<B>) -> Result<Target, KeyError> {
        let table = self.shared.table.load();
        let path = whole_path(req);
        if table.is_ambiguous(req.method(), path) {
            return Err(KeyError::bad_request(
                "The path has an empty segment, so it does not say what is meant.",
            ));
        }
        let Some(found) = table.find(req.method(), path) else {
            tracing::debug!("no policy has matched; passed on without a lock");
            return Ok(Target::Skip);
        };
        let Some((key, policy)) = found.lock() else {
            return Ok(Target::Skip);
        };
        match key.of_routed(req, &found) {
            Ok(key) => Ok(Target::LockAs(key, policy.clone())),
            Err(error) => Err(error.under(policy.clone())),
        }
    }
}

/// The path that the caller has said, of which nested routers strip a part.
fn whole_path<B>(req: &Request<B>) -> &str {
    #[cfg(feature = "axum")]
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
