//! The policy of a request: it follows the documented rules, and is always that of the route by
//! which axum serves the request.

use std::{convert::Infallible, sync::LazyLock};

use axum::{
    Extension, Router,
    body::Body,
    extract::Request,
    http::{Method, Uri},
    response::{IntoResponse, Response},
    routing::{self, MethodFilter, MethodRouter, on},
};
use lock_runtime::{HeldLock, LockClient};
use lock_tower::{LockPolicies, PolicyLayer};
use proptest::prelude::*;
use tokio::runtime::Runtime;
use tower::{Layer, Service, ServiceBuilder, ServiceExt, util::BoxCloneSyncService};

use super::file::{Route, meant, method, path, quoted, routes};

static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| Runtime::new().unwrap());

type App = BoxCloneSyncService<Request, Response, Infallible>;

/// A file in which each route has its name as its key, or is skipped.
fn file(prefix: &str, routes: &[Route], skipped: &[bool]) -> LockPolicies {
    let lines = routes
        .iter()
        .zip(skipped)
        .enumerate()
        .map(|(index, (route, skipped))| {
            let written = route.written().replacen('/', &format!("{prefix}/"), 1);
            let says = if *skipped {
                "skip = true".into()
            } else {
                format!("name = 'r{index}', key = 'r{index}', global = true")
            };
            format!("routes.{} = {{ {says} }}\n", quoted(&written))
        });
    let text: String = lines.collect();
    LockPolicies::from_toml_str(&text).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

/// Routes, and requests for them.
fn cases() -> impl Strategy<Value = (Vec<Route>, Vec<(Method, String)>)> {
    routes().prop_flat_map(|routes| {
        let requests = proptest::collection::vec((method(), path(&routes)), 1..24);
        (Just(routes), requests)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    #[test]
    fn the_policy_of_a_request_is_that_of_the_most_specific_route(
        (routes, requests) in cases(),
        skipped in proptest::collection::vec(prop::bool::weighted(0.2), 10),
        order in any::<u64>(),
    ) {
        let policies = file("", &routes, &skipped);
        // The order of the routes in the file has no effect.
        let mut turned: Vec<_> = routes.iter().cloned().zip(skipped.iter().copied()).collect();
        turned.rotate_left(usize::try_from(order % routes.len() as u64).unwrap());
        let (turned, turned_skipped): (Vec<_>, Vec<_>) = turned.into_iter().unzip();
        let other = file("", &turned, &turned_skipped);
        for (method, path) in &requests {
            let found = policies.find(method, path).map(|policy| policy.name().to_owned());
            let expected = meant(&routes, method, path).filter(|index| !skipped[*index]).map(|index| format!("r{index}"));
            prop_assert_eq!(&found, &expected, "{} {} of {:?}", method, path, routes.iter().map(Route::written).collect::<Vec<_>>());
            let found = other.find(method, path).map(|policy| policy.name().to_owned());
            let expected = meant(&turned, method, path).filter(|index| !turned_skipped[*index]).map(|index| format!("r{index}"));
            prop_assert_eq!(found, expected);
        }
    }
}

/// The response of a handler: the index of its route, and the key of its lock.
#[derive(Clone)]
struct Served {
    route: usize,
    key: Option<String>,
}

fn handlers(routes: &[Route], of: &[usize]) -> MethodRouter {
    let mut handlers = MethodRouter::new();
    for index in of.iter().copied() {
        let handler = async move |lock: Option<HeldLock>| {
            Extension(Served {
                route: index,
                key: lock.map(|lock| lock.key().to_string()),
            })
        };
        handlers = match &routes[index].methods[..] {
            [] => handlers.merge(routing::any(handler)),
            methods => methods.iter().fold(handlers, |handlers, method| {
                handlers.merge(on(MethodFilter::try_from(method.clone()).unwrap(), handler))
            }),
        };
    }
    handlers
}

/// The distinct paths, each with the indices of its routes.
fn paths(routes: &[Route]) -> Vec<(String, Vec<usize>)> {
    let mut paths: Vec<(String, Vec<usize>)> = Vec::new();
    for (index, route) in routes.iter().enumerate() {
        match paths.iter_mut().find(|(path, _)| *path == route.path()) {
            Some((_, of)) => of.push(index),
            None => paths.push((route.path(), vec![index])),
        }
    }
    paths
}

/// A router for the paths that `with` selects by number, below the prefix `below`. `each` wraps the
/// handlers of a path.
fn router(
    routes: &[Route],
    below: &str,
    each: impl Fn(MethodRouter) -> MethodRouter,
    with: impl Fn(usize) -> bool,
) -> Router {
    let paths = paths(routes)
        .into_iter()
        .enumerate()
        .filter(|(number, _)| with(*number));
    paths.fold(Router::new(), |router, (_, (path, of))| {
        router.route(&format!("{below}{path}"), each(handlers(routes, &of)))
    })
}

fn boxed<S>(service: S) -> App
where
    S: Service<Request, Error = Infallible, Future: Send + 'static> + Clone + Send + Sync + 'static,
    S::Response: IntoResponse,
{
    BoxCloneSyncService::new(service.map_response(IntoResponse::into_response))
}

/// All ways to put together the same routes below `/n` with the policies of one file.
fn apps(routes: &[Route], lock: &PolicyLayer<LockPolicies>) -> Vec<(&'static str, App)> {
    let plain = |handlers| handlers;
    let all = |_| true;
    let even = |number: usize| number.is_multiple_of(2);
    let odd = move |number| !even(number);
    let flat = || router(routes, "/n", plain, all);
    let inner = || router(routes, "", plain, all);
    let service = |app: Router| boxed(app.into_service());
    vec![
        ("layer", service(flat().layer(lock.clone()))),
        ("route_layer", service(flat().route_layer(lock.clone()))),
        ("around the finished router", boxed(lock.layer(flat()))),
        (
            "in a ServiceBuilder",
            boxed(ServiceBuilder::new().layer(lock.clone()).service(flat())),
        ),
        (
            "on each path",
            service(router(
                routes,
                "/n",
                |handlers| handlers.layer(lock.clone()),
                all,
            )),
        ),
        (
            "nested, outside",
            service(Router::new().nest("/n", inner()).layer(lock.clone())),
        ),
        (
            "nested, inside",
            service(Router::new().nest("/n", inner().layer(lock.clone()))),
        ),
        (
            "nested, around",
            boxed(lock.layer(Router::new().nest("/n", inner()))),
        ),
        (
            "nested service, outside",
            service(
                Router::new()
                    .nest_service("/n", inner())
                    .layer(lock.clone()),
            ),
        ),
        (
            "nested service, inside",
            service(Router::new().nest_service("/n", inner().layer(lock.clone()))),
        ),
        (
            "nested service, around",
            boxed(lock.layer(Router::new().nest_service("/n", lock.clone().layer(inner())))),
        ),
        (
            "nested service of a layer",
            service(Router::new().nest_service("/n", lock.layer(inner()))),
        ),
        (
            "merged",
            service(
                router(routes, "/n", plain, even)
                    .merge(router(routes, "/n", plain, odd))
                    .layer(lock.clone()),
            ),
        ),
        (
            "merged, each by itself",
            service(
                router(routes, "/n", plain, even)
                    .layer(lock.clone())
                    .merge(router(routes, "/n", plain, odd).layer(lock.clone())),
            ),
        ),
        (
            "fallback service",
            service(Router::new().fallback_service(flat().layer(lock.clone()))),
        ),
        (
            "fallback service, outside",
            service(Router::new().fallback_service(flat()).layer(lock.clone())),
        ),
        (
            "fallback",
            service(flat().fallback(async || "404").layer(lock.clone())),
        ),
    ]
}

/// Sends a request. Returns the route and the lock of its handler, or `None` without a handler.
async fn asked(app: &App, method: &Method, path: &str) -> Option<Served> {
    let request = Request::builder()
        .method(method)
        .uri(path.parse::<Uri>().unwrap())
        .body(Body::empty())
        .unwrap();
    let response = app.clone().oneshot(request).await.unwrap();
    response.extensions().get().cloned()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// A request that reaches the handler of a route is served under the policy of that route,
    /// however the router is put together and wherever the layer is.
    #[test]
    fn what_axum_serves_by_a_route_is_served_under_its_policy(
        (routes, requests) in cases(),
        skipped in proptest::collection::vec(prop::bool::weighted(0.2), 10),
    ) {
        let policies = file("/n", &routes, &skipped);
        let lock = PolicyLayer::new(LockClient::in_memory(), policies.clone());
        let apps = apps(&routes, &lock);
        RUNTIME.block_on(async {
            for (method, path) in &requests {
                let path = format!("/n{path}");
                for (way, app) in &apps {
                    let Some(Served { route, key }) = asked(app, method, &path).await else { continue };
                    let locked = policies.find(method, &path).map(|policy| policy.name().to_owned());
                    let expected = (!skipped[route]).then(|| format!("r{route}"));
                    let shown = || routes.iter().map(Route::written).collect::<Vec<_>>();
                    prop_assert_eq!(&locked, &expected, "{}: {} {} of {:?}", way, method, &path, shown());
                    prop_assert_eq!(&key, &expected, "{}: {} {} of {:?}", way, method, &path, shown());
                }
            }
            Ok(())
        })?;
    }
}
