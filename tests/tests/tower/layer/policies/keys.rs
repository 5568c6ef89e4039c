//! Keys of policies: requests of different routes or values have different locks, and a policy, a
//! [`LockLayer`], a [`KeyWriter`] and the attribute build the same key.

use std::{collections::HashMap, sync::LazyLock};

use axum::{
    Extension, Router,
    body::Body,
    extract::{Path, Request},
    http::Method,
    response::Response,
    routing,
};
use lock_runtime::{HeldLock, KeyWriter, LockClient, LockError, LockKey, distributed_lock};
use lock_tower::{KeyTemplate, LockLayer, LockPolicies, PolicyLayer, Selector, Target};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use proptest::{prelude::*, sample::select};
use tokio::runtime::Runtime;
use tower::ServiceExt;

use super::file::{Part, Route, quoted, routes};

static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| Runtime::new().unwrap());

/// A value of a key that is not from the path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Beside {
    Header,
    Query,
    Method,
}

/// The key of a route: its prefix, the text before each value, and the values beside the path.
#[derive(Clone, Debug)]
struct Key {
    by_path: bool,
    between: Vec<&'static str>,
    beside: Vec<Beside>,
}

/// The values of a request: path parameters, header, query and method.
#[derive(Clone, Debug)]
struct Values {
    path: Vec<String>,
    header: String,
    query: String,
    method: Method,
}

fn key() -> impl Strategy<Value = Key> {
    let between = select(vec!["", "", ":", "/", "-", "x", "%", "{{", "%.", "%2F"]);
    let beside =
        proptest::sample::subsequence(vec![Beside::Header, Beside::Query, Beside::Method], 0..=3);
    (any::<bool>(), proptest::collection::vec(between, 8), beside).prop_map(
        |(by_path, between, beside)| Key {
            by_path,
            between,
            beside,
        },
    )
}

/// Values that a wrong encoding would confuse with each other or with the text between them.
fn value() -> impl Strategy<Value = String> {
    prop_oneof![
        3 => "[1x:/%.{}-]{1,3}",
        1 => select(vec!["1", "%31", "%2F", "/", "%", "permits", "é", "e\u{301}", "\u{1}", "a b", "+", "&=#?", "..", "."]).prop_map(str::to_owned),
    ]
}

fn values() -> impl Strategy<Value = Values> {
    // Header values have no spaces at the ends and no control characters.
    let header = "[1x:/%.{}-]{1,3}";
    let method = select(vec![Method::GET, Method::POST, Method::HEAD]);
    (
        proptest::collection::vec(value(), 5),
        header,
        value(),
        method,
    )
        .prop_map(|(path, header, query, method)| Values {
            path,
            header,
            query,
            method,
        })
}

impl Key {
    /// The template: the prefix, the path parameters, and the values beside the path.
    fn template(&self, number: usize, route: &Route) -> String {
        let mut template = if self.by_path {
            "{matched_path}:".to_owned()
        } else {
            format!("r{number}:")
        };
        let mut between = self.between.iter();
        let params = route.params().into_iter();
        let beside = self.beside.iter().map(|beside| match beside {
            Beside::Header => "header.x-tenant".to_owned(),
            Beside::Query => "query.tenant".to_owned(),
            Beside::Method => "method".to_owned(),
        });
        for name in params.chain(beside) {
            template += &format!("{}{{{name}}}", between.next().unwrap());
        }
        template
    }

    /// The values of a request that the key contains.
    fn of(&self, route: &Route, values: &Values) -> Vec<String> {
        let beside = self.beside.iter().map(|beside| match beside {
            Beside::Header => values.header.clone(),
            Beside::Query => values.query.clone(),
            Beside::Method => values.method.to_string(),
        });
        values.path[..route.params().len()]
            .iter()
            .cloned()
            .chain(beside)
            .collect()
    }

    /// The same key, built with [`KeyWriter`].
    fn written(&self, number: usize, route: &Route, values: &Values) -> LockKey {
        let mut writer = KeyWriter::new();
        if self.by_path {
            writer.arg(format_args!("{}", route.path())).lit(":");
        } else {
            writer.lit(&format!("r{number}:"));
        }
        for (between, value) in self.between.iter().zip(self.of(route, values)) {
            writer
                .lit(&between.replace("{{", "{"))
                .arg(format_args!("{value}"));
        }
        writer.finish().unwrap()
    }
}

/// All bytes but letters and digits, and the digit 1 as well.
const ALL_BUT_X: &AsciiSet = &NON_ALPHANUMERIC.add(b'1');

/// A request for the route. The bytes of `encoded` are percent-encoded in its values.
fn request(route: &Route, values: &Values, encoded: &'static AsciiSet) -> Request {
    let mut path = String::new();
    let mut value = values.path.iter();
    for part in &route.parts {
        match part {
            Part::Text(text) => path += &format!("/{text}"),
            Part::Param(before) | Part::Rest(before) => {
                path += &format!(
                    "/{before}{}",
                    utf8_percent_encode(value.next().unwrap(), encoded)
                );
            }
        }
    }
    let query = utf8_percent_encode(&values.query, encoded);
    Request::builder()
        .method(&values.method)
        .uri(format!("{path}?tenant={query}"))
        .header("x-tenant", &values.header)
        .body(Body::empty())
        .unwrap()
}

/// Sends a request and returns the key of the lock that a layer acquired for it.
async fn locked(app: &Router, request: Request) -> Option<LockKey> {
    let response: Response = app.clone().oneshot(request).await.unwrap();
    response
        .extensions()
        .get::<Option<LockKey>>()
        .cloned()
        .flatten()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn different_routes_or_values_have_different_locks(
        routes in routes(),
        keys in proptest::collection::vec(key(), 10),
        requests in proptest::collection::vec((any::<prop::sample::Index>(), values()), 2..40),
    ) {
        // Each path once, for all methods: the choice of the route is not tested here.
        let mut all: Vec<Route> = Vec::new();
        for route in routes {
            if !all.iter().any(|other| other.parts == route.parts) {
                all.push(Route { methods: Vec::new(), ..route });
            }
        }
        let lines = all.iter().enumerate().map(|(number, route)| {
            let template = keys[number].template(number, route);
            format!("routes.{} = {{ name = 'r{number}', key = {}, global = true }}\n", quoted(&route.written()), quoted(&template))
        });
        let text: String = lines.collect();
        let policies = LockPolicies::from_toml_str(&text).unwrap_or_else(|error| panic!("{error}\n{text}"));
        let policies = policies.allow_empty_segments();
        let app = all.iter().enumerate().fold(Router::new(), |app, (number, route)| {
            let template = keys[number].template(number, route);
            // `LockLayer::new` refuses templates without a placeholder.
            let template = KeyTemplate::new(&template).unwrap();
            let layer = LockLayer::with_key(LockClient::in_memory(), template);
            let handler = routing::any(async |lock: Option<HeldLock>| Extension(lock.map(|lock| lock.key().clone())));
            app.route(&route.path(), handler.layer(layer))
        });

        let mut met: HashMap<LockKey, (usize, Vec<String>)> = HashMap::new();
        for (which, values) in &requests {
            let asked = which.index(all.len());
            let mut of_both = Vec::new();
            for encoded in [NON_ALPHANUMERIC, ALL_BUT_X] {
                let mut request = request(&all[asked], values, encoded);
                let Some(policy) = policies.find(&values.method, request.uri().path()) else { panic!("{request:?}") };
                if policy.name() != format!("r{asked}") {
                    // A more specific route matches.
                    continue;
                }
                let (found, target) = policies.select(&mut request, |_| None);
                let Ok(Target::Lock(key)) = target else { panic!("{request:?}: {target:?}") };
                prop_assert_eq!(found, policy);
                prop_assert_eq!(&key, &keys[asked].written(asked, &all[asked], values));
                let by_layer = RUNTIME.block_on(locked(&app, request));
                prop_assert_eq!(by_layer.as_ref(), Some(&key));
                let said = (asked, keys[asked].of(&all[asked], values));
                let before = met.insert(key.clone(), said.clone());
                prop_assert!(before.as_ref().is_none_or(|before| *before == said), "{key}: {before:?}, {said:?}");
                of_both.push(key);
            }
            prop_assert!(of_both.windows(2).all(|both| both[0] == both[1]), "{:?}", of_both);
        }
    }
}

#[distributed_lock(key = "order:{id}:{tenant}-{part}x{kind}", client = locks, held = lock)]
async fn by_attribute(
    locks: &LockClient,
    id: &str,
    tenant: &str,
    part: &str,
    kind: &str,
) -> Result<LockKey, LockError> {
    Ok(lock.key().clone())
}

proptest! {
    #[test]
    fn a_policy_and_the_attribute_name_the_same_lock(id in value(), tenant in value(), part in value(), kind in value()) {
        let policies = LockPolicies::from_toml_str(
            r#"routes."/orders/{id}/{tenant}/{part}/{kind}" = { key = "order:{id}:{tenant}-{part}x{kind}" }"#,
        ).unwrap();
        let values = [&id, &tenant, &part, &kind].map(|value| utf8_percent_encode(value, NON_ALPHANUMERIC).to_string());
        let path = format!("/orders/{}", values.join("/"));
        let mut request = Request::post(path).body(Body::empty()).unwrap();
        let (_, Ok(Target::Lock(key))) = policies.select(&mut request, |_| None) else { panic!("no lock") };
        let locks = LockClient::in_memory();
        let other = RUNTIME.block_on(by_attribute(&locks, &id, &tenant, &part, &kind)).unwrap();
        prop_assert_eq!(key, other);
    }
}

/// The handler and the policy read the same values from the path.
#[tokio::test]
async fn a_handler_gets_the_values_of_its_lock() {
    let policies =
        LockPolicies::from_toml_str(r#"routes."/a/{x}/{*rest}" = { key = "{x}:{rest}" }"#).unwrap();
    let handler = async |Path((x, rest)): Path<(String, String)>, lock: HeldLock| {
        let mut key = KeyWriter::new();
        key.arg(format_args!("{x}"))
            .lit(":")
            .arg(format_args!("{rest}"));
        assert_eq!(*lock.key(), key.finish().unwrap());
        Extension(Some(lock.key().clone()))
    };
    let app = Router::new().route("/a/{x}/{*rest}", routing::any(handler));
    let policies = policies.allow_empty_segments();
    let app = app.layer(PolicyLayer::new(LockClient::in_memory(), policies));
    for path in [
        "/a/1/2",
        "/a/%31/2",
        "/a/1%2F2/3",
        "/a//x",
        "/a/%2F/%2F",
        "/a/./../b",
        "/a/+/%20",
        "/a/%25/%2525",
        "/a/1//",
    ] {
        let request = Request::post(path).body(Body::empty()).unwrap();
        assert!(locked(&app, request).await.is_some(), "{path}");
    }
}
