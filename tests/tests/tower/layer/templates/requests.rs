//! Templates on the routes of a real axum router, with arbitrary requests.

use std::collections::HashMap;

use axum::{
    Router,
    body::{Body, to_bytes},
    http::{HeaderName, HeaderValue, Method, Request, Uri},
    response::Response,
    routing::any as any_method,
};
use lock_runtime::{HeldLock, LockClient};
use lock_tower::{KeyExtractor, KeyTemplate, LockLayer};
use proptest::{
    collection::vec,
    prelude::*,
    test_runner::{Config, TestRunner},
};
use tokio::runtime::Runtime;
use tower::ServiceExt;

use super::{
    config,
    written::{Token, Written, value, written},
};

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
}

/// Responds with the key of the lock of the request.
async fn named(lock: Option<HeldLock>) -> String {
    lock.map_or_else(String::new, |lock| lock.key().to_string())
}

async fn said(response: Response) -> String {
    String::from_utf8(
        to_bytes(response.into_body(), usize::MAX)
            .await
            .unwrap()
            .into(),
    )
    .unwrap()
}

/// The key under which a route with the template serves the values, or the code of the refusal.
/// `choices` selects the encoding of the values.
async fn served(locks: &LockClient, written: &Written, choices: &[u8]) -> Result<String, String> {
    // `LockLayer::new` refuses templates without a placeholder.
    let template = KeyTemplate::new(&written.template()).unwrap();
    let layer = LockLayer::with_key(locks.clone(), template).no_wait();
    let app: Router = Router::new().route(&written.route(), any_method(named).layer(layer));
    let response = app.oneshot(written.request(choices)).await.unwrap();
    match response.status().as_u16() {
        200 => Ok(said(response).await),
        400 => {
            let document: serde_json::Value = serde_json::from_str(&said(response).await).unwrap();
            Err(document["code"].as_str().unwrap().to_owned())
        }
        status => panic!("{status}: {written:?}"),
    }
}

/// Valid templates with values.
fn readable() -> impl Strategy<Value = Written> {
    written().prop_filter("a template that can be read", |written| {
        KeyTemplate::new(&written.template()).is_ok()
    })
}

#[test]
fn the_same_values_give_the_same_key_however_they_are_encoded() {
    let (runtime, locks) = (runtime(), LockClient::in_memory());
    let run = TestRunner::new(config()).run(
        &(readable(), vec(vec(any::<u8>(), 1..40), 3)),
        |(written, encodings)| {
            // The layer and `KeyWriter` refuse the same values, such as one that completes the
            // reserved prefix.
            let expected = written
                .key()
                .map(|key| key.to_string())
                .map_err(|error| error.code().to_owned());
            for choices in encodings {
                prop_assert_eq!(
                    &runtime.block_on(served(&locks, &written, &choices)),
                    &expected
                );
            }
            Ok(())
        },
    );
    run.unwrap();
}

#[test]
fn what_does_not_read_the_same_has_another_key() {
    let (runtime, locks) = (runtime(), LockClient::in_memory());
    let run = TestRunner::new(config()).run(&vec(readable(), 2..60), |many| {
        let mut keys: HashMap<String, (Vec<Token>, Written)> = HashMap::new();
        let mut readings: HashMap<Vec<Token>, String> = HashMap::new();
        for written in many {
            let Ok(key) = runtime.block_on(served(&locks, &written, &[0])) else {
                continue;
            };
            let reading = written.reading();
            if let Some((other, of)) = keys.insert(key.clone(), (reading.clone(), written.clone()))
            {
                prop_assert_eq!(
                    &other,
                    &reading,
                    "{} is the key of {:?} and {:?}",
                    key,
                    of,
                    written
                );
            }
            if let Some(other) = readings.insert(reading, key.clone()) {
                prop_assert_eq!(other, key, "{:?} reads as another", written);
            }
        }
        Ok(())
    });
    run.unwrap();
}

#[test]
fn different_values_of_one_template_have_different_keys() {
    let (runtime, locks) = (runtime(), LockClient::in_memory());
    let cases = (readable(), vec(value(), 5), "[%.A3]{0,3}");
    let run = TestRunner::new(config()).run(&cases, |(written, values, text)| {
        // The text may contain `%` here.
        let part = |part: &super::written::Part| match part {
            super::written::Part::Text(own) => super::written::Part::Text(format!("{own}{text}")),
            value => value.clone(),
        };
        let written = Written(written.0.iter().map(part).collect());
        let other = written.with_values(&values);
        let of = |written: &Written| runtime.block_on(served(&locks, written, &[0]));
        prop_assume!(KeyTemplate::new(&written.template()).is_ok());
        if let (Ok(key), Ok(other_key)) = (of(&written), of(&other)) {
            let same = format!("{written:?}") == format!("{other:?}");
            prop_assert_eq!(key == other_key, same, "{:?} and {:?}", written, other);
        }
        Ok(())
    });
    run.unwrap();
}

#[test]
fn no_value_leaves_the_place_that_the_text_has_for_it() {
    let (runtime, locks) = (runtime(), LockClient::in_memory());
    let marks = |text: &str| {
        text.chars()
            .filter(|c| matches!(c, ':' | '/' | '{' | '}'))
            .collect::<String>()
    };
    let run = TestRunner::new(config()).run(&readable(), |written| {
        let Ok(key) = runtime.block_on(served(&locks, &written, &[0])) else {
            return Ok(());
        };
        // Only the text determines the segments, hash tag, namespace and kind.
        let of_text = written
            .with_values(&["x"; 5].map(String::from))
            .key()
            .unwrap();
        prop_assert_eq!(marks(&key), marks(of_text.as_str()));
        prop_assert!(!key.starts_with("permits:"));
        prop_assert!(!key.contains(char::is_control));
        let tag = |key: &str| key.find('{').zip(key.find('}')).is_some();
        prop_assert_eq!(tag(&key), of_text.hash_tag().is_some());
        Ok(())
    });
    run.unwrap();
}

#[test]
fn a_key_is_never_longer_than_a_key_may_be() {
    let (runtime, locks) = (runtime(), LockClient::in_memory());
    let cases = (
        readable(),
        vec((value(), 1..400usize), 5),
        vec(any::<u8>(), 1..40),
    );
    let run = TestRunner::new(config()).run(&cases, |(written, values, choices)| {
        let values: Vec<_> = values
            .iter()
            .map(|(value, times)| value.repeat(*times))
            .collect();
        let written = written.with_values(&values);
        let long = written.key();
        match runtime.block_on(served(&locks, &written, &choices)) {
            Ok(key) => {
                prop_assert!(key.len() <= lock_runtime::LockKey::MAX_BYTES);
                prop_assert_eq!(key, long.unwrap().to_string());
            }
            Err(code) => prop_assert_eq!((code.as_str(), long.is_err()), ("invalid_key", true)),
        }
        Ok(())
    });
    run.unwrap();
}

/// Every kind of placeholder, alone and combined.
const TEMPLATES: &[&str] = &[
    "k",
    "{a}",
    "{rest}",
    "{a}:{b}",
    "{header.host}",
    "{header.grpc-timeout}",
    "{query.a}",
    "{query.%41}",
    "{method}",
    "{matched_path}",
    "{grpc.service}",
    "{grpc.method}",
    "{{{a}}}:{query.a}:{method}:{matched_path}",
    "{grpc.service}/{grpc.method}:{header.a}",
];

fn arbitrary_request() -> impl Strategy<Value = Request<()>> {
    let method = prop_oneof![
        "(GET|POST|HEAD|OPTIONS|CONNECT|TRACE)",
        "[A-Za-z0-9!#$%&'*+.^_`|~-]{1,20}"
    ];
    let uri = prop_oneof![
        4 => "/[a-z.%0-9A-F+&=:/?\u{e9}-]{0,30}",
        2 => "/(shop\\.Orders|[a-z_.]{0,5}|%[0-9A-F]{2})/[A-Za-z_%0-9]{0,6}(/[a-z]{0,3}){0,2}(\\?a=[a-z%+0-9A-F=&]{0,12})?",
        1 => "http://[a-z]{1,5}(:[0-9]{1,5})?/[!-~]{0,20}",
        1 => "[!-~]{1,20}",
        1 => Just("*".to_owned()),
    ];
    let name = proptest::sample::select(&["a", "host", "grpc-timeout", "content-type"][..]);
    let bytes = prop_oneof![
        Just(b"application/grpc".to_vec()),
        "[0-9]{0,10}[HMSmun]?".prop_map(String::into_bytes),
        vec(any::<u8>(), 0..20),
    ];
    (method, uri, vec((name, bytes), 0..4)).prop_filter_map(
        "a request that http takes",
        |(method, uri, headers)| {
            let mut request = Request::new(());
            *request.method_mut() = Method::from_bytes(method.as_bytes()).ok()?;
            *request.uri_mut() = Uri::try_from(uri).ok()?;
            for (name, value) in headers {
                let value = HeaderValue::from_bytes(&value).ok()?;
                request
                    .headers_mut()
                    .append(HeaderName::from_static(name), value);
            }
            Some(request)
        },
    )
}

#[test]
fn any_request_is_served_or_refused() {
    let runtime = runtime();
    let apps: Vec<(&str, Router)> = TEMPLATES
        .iter()
        .map(|template| {
            let key = KeyTemplate::new(template).unwrap();
            let layer = LockLayer::with_key(LockClient::in_memory(), key).no_wait();
            let routes = Router::new()
                .route("/", any_method(named))
                .route("/{a}", any_method(named))
                .route("/{a}/{b}", any_method(named))
                .route("/w/{*rest}", any_method(named));
            let app = routes
                .clone()
                .nest("/nested/{a}", routes.clone())
                .nest_service("/hidden/{a}", routes);
            (*template, app.fallback(named).layer(layer))
        })
        .collect();
    // Each case sends a request to all apps.
    let config = Config {
        cases: config().cases * 2,
        ..config()
    };
    let run = TestRunner::new(config).run(&arbitrary_request(), |request| {
        for (template, app) in &apps {
            let routed = runtime
                .block_on(app.clone().oneshot(request.clone().map(|()| Body::empty())))
                .unwrap();
            // 500 means that the route lacks a part of the template.
            let can_be = [200, 400, 500].contains(&routed.status().as_u16());
            prop_assert!(can_be, "{template}: {routed:?}");
            // The template without a router must not panic either.
            let _ = KeyTemplate::new(template)
                .unwrap()
                .target(&mut request.clone());
        }
        Ok(())
    });
    run.unwrap();
}
