//! [`Selector`]: chooses the policy and the key of a request.

use std::{
    any::type_name,
    collections::HashMap,
    fmt,
    sync::{Arc, PoisonError, RwLock},
};

use crate::{
    key::{IntoTarget, KeyError, KeyExtractor, Target},
    policy::Policy,
};

/// Trait for choosing the policy and the key of each request, for a
/// [`PolicyLayer`](crate::PolicyLayer).
///
/// It is sealed. It is implemented for `LockPolicies` (feature `policy`), and for closures that
/// return a policy and anything that a [`KeyExtractor`] closure returns. Their argument needs a
/// type annotation.
///
/// ```
/// use std::sync::Arc;
/// use http::{Method, Request};
/// use lock_tower::{Policy, PolicyLayer, runtime::{LockClient, LockKey, LockSpec}};
///
/// let read = Arc::new(Policy::new("catalog-read").with_spec(LockSpec::shared()));
/// let write = Arc::new(Policy::new("catalog-write"));
/// let layer = PolicyLayer::new(LockClient::in_memory(), move |request: &Request<()>| {
///     let policy = if request.method() == Method::GET { &read } else { &write };
///     (policy.clone(), LockKey::new("catalog"))
/// });
/// ```
pub trait Selector<Req>: sealed::Sealed<Req> {
    /// Returns the policy of `req`, and its key under that policy. `route` returns the route of a
    /// request.
    #[doc(hidden)]
    fn select(&self, req: &mut Req, route: RouteOf<Req>) -> Selection;

    /// Returns the policy and the key of a request that is served once. Others are skipped.
    #[doc(hidden)]
    fn select_once(&self, req: &mut Req) -> Selection {
        self.select(req, |_| None)
    }
}

pub(crate) mod sealed {
    pub trait Sealed<Req> {}
}

/// The policy of a request, and its key or the reason why it is refused under that policy.
pub(crate) type Selection = (Arc<Policy>, Result<Target, KeyError>);

/// Returns the route of a request, if it has one.
pub(crate) type RouteOf<Req> = fn(&Req) -> Option<&str>;

impl<F, Req, T> sealed::Sealed<Req> for F
where
    F: Fn(&Req) -> (Arc<Policy>, T),
    T: IntoTarget,
{
}

impl<F, Req, T> Selector<Req> for F
where
    F: Fn(&Req) -> (Arc<Policy>, T),
    T: IntoTarget,
{
    fn select(&self, req: &mut Req, _route: RouteOf<Req>) -> Selection {
        let (policy, target) = self(req);
        (policy, target.into_target())
    }
}

/// The most routes that a layer without a name distinguishes. Clients can invent gRPC methods,
/// and each name has metrics of its own. Half of the names that a process distinguishes are left to
/// others.
const MAX_ROUTES: usize = 128;

type Routes = HashMap<Box<str>, Arc<Policy>>;

/// [`Selector`] of a [`LockLayer`](crate::LockLayer): one policy, and the key that `K` extracts.
#[derive(Clone)]
pub struct Keyed<K> {
    key: K,
    pub(crate) policy: Arc<Policy>,
    /// The policies by route, if they have no other name.
    routes: Option<Arc<RwLock<Routes>>>,
}

impl<K> Keyed<K> {
    /// Creates a selector whose policy is named after the route of each request.
    pub(crate) fn new(key: K) -> Self {
        Self {
            key,
            policy: Arc::new(Policy::unrouted()),
            routes: Some(Arc::default()),
        }
    }

    /// Changes the policy, but not its name.
    pub(crate) fn set(self, set: impl FnOnce(Policy) -> Policy) -> Self {
        Self {
            policy: Arc::new(set(Arc::unwrap_or_clone(self.policy))),
            // The former ones have the former policy, and may be in use by a clone.
            routes: self.routes.map(|_| Arc::default()),
            ..self
        }
    }

    /// Changes the policy, and keeps its name for all requests.
    pub(crate) fn set_named(self, set: impl FnOnce(Policy) -> Policy) -> Self {
        Self {
            routes: None,
            ..self.set(set)
        }
    }

    /// Returns the policy that is named after the route, if there is one.
    fn named_after<'r>(&self, route: impl FnOnce() -> Option<&'r str>) -> Option<Arc<Policy>> {
        let routes = self.routes.as_deref()?;
        let route = route()?;
        let known = routes.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(policy) = known.get(route) {
            return Some(policy.clone());
        }
        drop(known);
        let mut known = routes.write().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= MAX_ROUTES {
            return None;
        }
        let named = || Arc::new(Policy::clone(&self.policy).with_name(route.to_owned()));
        Some(known.entry(route.into()).or_insert_with(named).clone())
    }
}

impl<Req, K: KeyExtractor<Req>> sealed::Sealed<Req> for Keyed<K> {}

impl<Req, K: KeyExtractor<Req>> Selector<Req> for Keyed<K> {
    fn select(&self, req: &mut Req, route: RouteOf<Req>) -> Selection {
        let policy = self.named_after(|| route(req));
        let policy = policy.unwrap_or_else(|| self.policy.clone());
        (policy, self.key.target(req))
    }
}

impl<K> fmt::Debug for Keyed<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keyed")
            .field("key", &format_args!("{}", type_name::<K>()))
            .field("policy", &self.policy)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use http::{Request, Response, StatusCode};
    use lock_runtime::{ErrorClass, LockClient, LockKey, LockSpec};
    use tower::{Layer, ServiceExt, service_fn};

    use super::*;
    use crate::{PolicyLayer, Refusal};

    #[tokio::test]
    async fn select_by_closure_applies_the_chosen_policy() {
        let read = Arc::new(Policy::new("read").with_spec(LockSpec::shared()));
        let write =
            Arc::new(Policy::new("write").status(ErrorClass::BadRequest, StatusCode::IM_A_TEAPOT));
        let locks = LockClient::in_memory();
        let layer = PolicyLayer::new(
            locks.clone(),
            move |request: &Request<String>| match request.uri().path() {
                "/read" => (read.clone(), LockKey::new("a").map_err(KeyError::from)),
                _ => (
                    write.clone(),
                    Err(KeyError::bad_request("nothing to write")),
                ),
            },
        );
        let layer = layer.on_reject(|refusal: &Refusal<'_>| {
            let mut response = refusal.to_response();
            *response.body_mut() = refusal.policy().name().to_owned().into();
            response
        });
        let inner = service_fn(async |_| Ok::<_, Infallible>(Response::new(String::new())));
        let service = layer.layer(inner);
        let _reader = locks.shared("a").acquire().await.unwrap();
        for (path, status, policy) in [("/read", 200, ""), ("/write", 418, "write")] {
            let request = Request::post(path).body(String::new()).unwrap();
            let Ok(response) = service.clone().oneshot(request).await;
            assert_eq!(response.status(), status);
            let body = http_body_util::BodyExt::collect(response.into_body()).await;
            assert_eq!(body.unwrap().to_bytes(), policy);
        }
    }

    #[test]
    fn set_applies_to_routes_that_are_known() {
        let known = |keyed: &Keyed<()>| keyed.named_after(|| Some("/a")).unwrap();
        let one = Keyed::new(());
        assert!(Arc::ptr_eq(&known(&one), &known(&one.clone())));
        let other = one.clone().set(Policy::fail_open);
        assert!(known(&other).fails_open() && !known(&one).fails_open());
        assert_eq!(known(&other).name(), "/a");
        let named = one.set_named(|policy| policy.with_name("b"));
        assert!(named.named_after(|| Some("/a")).is_none());
        assert_eq!(named.policy.name(), "b");
    }

    #[test]
    fn select_distinguishes_a_limited_number_of_routes() {
        let keyed = Keyed::new(());
        let name_of = |route: usize| {
            let route = format!("/a.B/{route}");
            let policy = keyed.named_after(|| Some(&route));
            policy.map(|policy| policy.name().to_owned())
        };
        for route in 0..MAX_ROUTES {
            assert_eq!(name_of(route), Some(format!("/a.B/{route}")));
        }
        assert_eq!(name_of(MAX_ROUTES), None);
        assert_eq!(name_of(0).as_deref(), Some("/a.B/0"));
    }
}
