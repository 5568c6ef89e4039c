//! Random routers of axum, the policy file of the same routes, and random requests: no handler is
//! reached without its lock.
//!
//! Builds twenty times as many routers with
//! `LOCK_TESTS_STORM=20 cargo test -p lock-tests --all-features --test tower any_router`.

use std::fmt;

use axum::{
    Extension, Router,
    body::Body,
    extract::Request,
    http::{Method, StatusCode, Uri},
    routing::{MethodFilter, MethodRouter, on},
};
use lock_runtime::{HeldLock, LockClient};
use lock_tower::{LockPolicies, PolicyLayer};
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng, seq::IndexedRandom as _};
use tower::{Layer as _, ServiceExt as _};

use lock_tests::place::times_as_long;

/// Each router gets this many requests.
const REQUESTS: usize = 60;
const ROUTERS: usize = 150;

const METHODS: [Method; 4] = [Method::GET, Method::POST, Method::PATCH, Method::TRACE];
const NAMES: [&str; 4] = ["a", "b", "p", "q"];

type Lock = PolicyLayer<LockPolicies>;

/// A part of a router.
enum Branch {
    Route {
        methods: Vec<Method>,
        path: String,
    },
    Nested {
        prefix: String,
        is_service: bool,
        inner: Vec<Branch>,
    },
}

/// The place of the layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    Router,
    AroundTheRouter,
    NestedRouters,
    Handlers,
}

/// A generator of routers and requests.
struct Random {
    rng: StdRng,
    params: usize,
}

impl Random {
    fn chance(&mut self, percent: u32) -> bool {
        self.rng.random_range(0..100) < percent
    }

    fn param(&mut self) -> String {
        self.params += 1;
        format!("/{{x{}}}", self.params)
    }

    fn segment(&mut self) -> String {
        if self.chance(50) {
            return self.param();
        }
        format!("/{}", NAMES.choose(&mut self.rng).unwrap())
    }

    /// Branches that begin with different segments, of which one may be a parameter.
    fn branches(&mut self, depth: usize) -> Vec<Branch> {
        let mut heads: Vec<_> = (NAMES.iter())
            .filter(|_| self.rng.random_bool(0.4))
            .map(|name| format!("/{name}"))
            .collect();
        if heads.is_empty() || self.chance(50) {
            heads.push(self.param());
        }
        let mut branches: Vec<_> = heads
            .into_iter()
            .map(|head| self.branch(head, depth))
            .collect();
        if depth > 0 && self.chance(20) {
            branches.push(self.route("/".into()));
        }
        branches
    }

    fn branch(&mut self, mut path: String, depth: usize) -> Branch {
        for _ in 0..self.rng.random_range(0..2) {
            path += &self.segment();
        }
        if depth < 2 && self.chance(60) {
            return Branch::Nested {
                prefix: path,
                is_service: self.chance(60),
                inner: self.branches(depth + 1),
            };
        }
        if self.chance(20) {
            path += &self.param().replace('{', "{*");
        }
        self.route(path)
    }

    fn route(&mut self, path: String) -> Branch {
        let mut methods = METHODS.to_vec();
        methods.retain(|_| self.rng.random_bool(0.6));
        if methods.is_empty() {
            methods.push(Method::POST);
        }
        Branch::Route { methods, path }
    }

    /// A path that one of the routes matches, or nearly.
    fn path(&mut self, routes: &[(Vec<Method>, String)]) -> String {
        let (_, route) = routes.choose(&mut self.rng).unwrap();
        let mut path = String::new();
        for segment in route.split('/').skip(1) {
            let values = ["7", "a", "p", "q", "+", "%2F", "..", "", "a/b"];
            let segment = match segment.starts_with('{') {
                true => *values.choose(&mut self.rng).unwrap(),
                false if self.chance(3) => "x",
                false => segment,
            };
            path.push('/');
            path += segment;
        }
        if self.chance(20) {
            path.push('/');
        }
        if self.chance(30) {
            for _ in 0..self.rng.random_range(1..4) {
                let places: Vec<_> = path.match_indices('/').map(|(at, _)| at).collect();
                path.insert(*places.choose(&mut self.rng).unwrap(), '/');
            }
        }
        if self.chance(5) {
            path.insert_str(0, "http://host");
        }
        path
    }
}

/// The routes with all their prefixes, as a policy file has them.
fn routes(branches: &[Branch], prefix: &str) -> Vec<(Vec<Method>, String)> {
    let routes = branches.iter().flat_map(|branch| match branch {
        Branch::Route { methods, path } => {
            let path = match &**path {
                "/" if prefix.is_empty() => "/",
                "/" => "",
                path => path,
            };
            vec![(methods.clone(), format!("{prefix}{path}"))]
        }
        Branch::Nested {
            prefix: below,
            inner,
            ..
        } => routes(inner, &format!("{prefix}{below}")),
    });
    routes.collect()
}

fn file(routes: &[(Vec<Method>, String)]) -> String {
    let lines = routes.iter().enumerate().map(|(number, (methods, path))| {
        let methods: Vec<_> = methods.iter().map(Method::as_str).collect();
        let methods = methods.join("|");
        format!("routes.'{methods} {path}' = {{ key = 'r{number}', global = true }}\n")
    });
    lines.collect()
}

/// Whether the handler that was reached had its lock.
#[derive(Clone, Copy)]
struct WasLocked(bool);

fn handlers(methods: &[Method]) -> MethodRouter {
    let handler = async |lock: Option<HeldLock>| Extension(WasLocked(lock.is_some()));
    methods
        .iter()
        .fold(MethodRouter::new(), |handlers, method| {
            handlers.merge(on(MethodFilter::try_from(method.clone()).unwrap(), handler))
        })
}

fn router(branches: &[Branch], lock: &Lock, at: At, depth: usize) -> Router {
    let router = branches
        .iter()
        .fold(Router::new(), |router, branch| match branch {
            Branch::Route { methods, path } => {
                let handlers = handlers(methods);
                let is_locked = at == At::Handlers || at == At::NestedRouters && depth == 0;
                router.route(
                    path,
                    if is_locked {
                        handlers.layer(lock.clone())
                    } else {
                        handlers
                    },
                )
            }
            Branch::Nested {
                prefix,
                is_service,
                inner,
            } => {
                let inner = self::router(inner, lock, at, depth + 1);
                match is_service {
                    true => router.nest_service(prefix, inner),
                    false => router.nest(prefix, inner),
                }
            }
        });
    match (at, depth) {
        (At::Router, 0) | (At::NestedRouters, 1) => router.layer(lock.clone()),
        (At::AroundTheRouter, 0) => Router::new().fallback_service(lock.layer(router)),
        _ => router,
    }
}

impl fmt::Display for Branch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Route { methods, path } => write!(f, "{methods:?} {path}; "),
            Self::Nested {
                prefix,
                is_service,
                inner,
            } => {
                let service = if *is_service { "_service" } else { "" };
                write!(f, "nest{service} {prefix} ( ")?;
                inner.iter().try_for_each(|branch| branch.fmt(f))?;
                f.write_str("); ")
            }
        }
    }
}

#[derive(Debug, Default)]
struct Tally {
    served: usize,
    refused: usize,
}

async fn ask(seed: u64, tally: &mut Tally) {
    let mut random = Random {
        rng: StdRng::seed_from_u64(seed),
        params: 0,
    };
    let branches = random.branches(0);
    let routes = routes(&branches, "");
    let file = file(&routes);
    let shown = || {
        let branches: String = branches.iter().map(Branch::to_string).collect();
        format!("seed {seed}: {branches}\n{file}")
    };
    let policies = LockPolicies::from_toml_str(&file);
    let policies = policies.unwrap_or_else(|error| panic!("{error}\n{}", shown()));
    let lock = PolicyLayer::new(LockClient::in_memory(), policies);
    let at = [
        At::Router,
        At::AroundTheRouter,
        At::NestedRouters,
        At::Handlers,
    ];
    let at = at[random.rng.random_range(0..at.len())];
    let app = router(&branches, &lock, at, 0);
    for _ in 0..REQUESTS {
        let method = METHODS.choose(&mut random.rng).unwrap();
        let method = if random.chance(5) {
            &Method::HEAD
        } else {
            method
        };
        let path = random.path(&routes);
        let Ok(uri) = path.parse::<Uri>() else {
            continue;
        };
        let request = Request::builder().method(method).uri(uri);
        let request = request.body(Body::empty()).unwrap();
        let response = app.clone().oneshot(request).await.unwrap();
        match response.extensions().get() {
            Some(WasLocked(true)) => tally.served += 1,
            Some(WasLocked(false)) => panic!("{method} {path}, layer at {at:?}, {}", shown()),
            None => {}
        }
        tally.refused += usize::from(response.status() == StatusCode::BAD_REQUEST);
    }
}

#[tokio::test]
async fn no_handler_of_any_router_is_reached_without_the_lock_of_its_route() {
    let mut tally = Tally::default();
    for seed in 0..(ROUTERS * times_as_long()) as u64 {
        ask(seed, &mut tally).await;
    }
    println!("{tally:?}");
    assert!(
        tally.served > ROUTERS && tally.refused > ROUTERS,
        "{tally:?}"
    );
}
