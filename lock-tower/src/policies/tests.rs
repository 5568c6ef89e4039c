//! Tests of valid and invalid policy files, and of the lookup of routes.

use std::{num::NonZeroU32, time::Duration};

use http::StatusCode;
use lock_runtime::{ErrorClass, LockKey, LockSpec, OnLost};

use super::*;
use crate::policy::HoldUntil;

fn policies(text: &str) -> LockPolicies {
    LockPolicies::from_toml_str(text).unwrap_or_else(|error| panic!("{error}"))
}

fn complaints(text: &str) -> Vec<String> {
    let error = LockPolicies::from_toml_str(text).unwrap_err();
    assert_eq!(error.to_string().lines().count(), error.all().len());
    error
        .all()
        .iter()
        .map(|mistake| format!("{}:{} {}", mistake.line, mistake.column, mistake.message))
        .collect()
}

/// Returns the only complaint about a route with the fields `said`, without its position.
fn complaint(route: &str, said: &str) -> String {
    let text = format!("routes.{route:?} = {{ {said} }}");
    match &complaints(&text)[..] {
        [one] => one.split_once(' ').unwrap().1.to_owned(),
        several => panic!("{said}: {several:?}"),
    }
}

fn name(policies: &LockPolicies, method: &Method, path: &str) -> Option<String> {
    policies
        .find(method, path)
        .map(|policy| policy.name().to_owned())
}

fn key(policies: &LockPolicies, method: &Method, uri: &str) -> Result<Target, KeyError> {
    let mut request = Request::builder().method(method).uri(uri).body(()).unwrap();
    policies.select(&mut request, |_| None).1
}

#[test]
fn a_file_can_set_everything_that_a_layer_can() {
    let policies = policies(
        r#"
        [defaults]
        lease = "10s"
        status = { busy = 423, lost = 502 }

        [groups.slow]
        wait = "5s"
        hold_until = "body"
        status = { busy = 429 }

        [routes."POST /all"]
        name = "all"
        group = "slow"
        key = "{header.x}"
        permits = 3
        reentrant = true
        min_hold = "1s"
        max_hold = "1m"
        retain = "50ms"
        renew = false
        strict_order = true
        max_waiters = 7
        on_lost = "error"
        retry_after = "3s"
        fail_open = true

        [routes."/none"]
        group = "slow"
        key = "constant"
        global = true
        mode = "shared"
        no_wait = true
        hold_until = "response"
        reentrant = false
        strict_order = false
        renew = true
        fail_open = false

        [routes]
        "/open" = { key = "{header.x}" }
        "#,
    );
    let seconds = Duration::from_secs;
    let spec = LockSpec::permits(NonZeroU32::new(3).unwrap())
        .lease(seconds(10))
        .wait(seconds(5))
        .reentrant()
        .min_hold(seconds(1))
        .max_hold(seconds(60))
        .retain(Duration::from_millis(50))
        .no_renew()
        .strict_order()
        .max_waiters(7)
        .on_lost(OnLost::Error);
    let all = Policy::new("all")
        .with_spec(spec)
        .hold_until(HoldUntil::Body)
        .retry_after(seconds(3))
        .fail_open()
        .status(ErrorClass::Busy, StatusCode::TOO_MANY_REQUESTS)
        .status(ErrorClass::Lost, StatusCode::BAD_GATEWAY);
    assert_eq!(*policies.find(&Method::POST, "/all").unwrap(), all);
    let spec = LockSpec::shared()
        .lease(seconds(10))
        .no_wait()
        .no_reentrant()
        .no_strict_order()
        .renew();
    let none = Policy::new("/none")
        .with_spec(spec)
        .status(ErrorClass::Busy, StatusCode::TOO_MANY_REQUESTS)
        .status(ErrorClass::Lost, StatusCode::BAD_GATEWAY);
    assert_eq!(*policies.find(&Method::PUT, "/none").unwrap(), none);
    let open = policies.find(&Method::PUT, "/open").unwrap();
    assert_eq!(
        *open.spec(),
        LockSpec::exclusive().lease(seconds(10)).wait(seconds(2))
    );
    assert_eq!(open.status_of(ErrorClass::Busy), StatusCode::LOCKED);
    assert_eq!(
        open.status_of(ErrorClass::Overloaded),
        StatusCode::SERVICE_UNAVAILABLE
    );
}

macro_rules! specs {
    (
        options { $( $(#[$doc:meta])* $option:ident($($arg:ident: $of:ty)?) { $($set:tt)* } )* }
        modes { $( $mode:ident($($count:ident: $of_count:ty)?) { $($text:tt)* } )* }
    ) => {
        [
            $( LockSpec::exclusive().$option($(<$of as Sample>::SAMPLE)?), )*
            $( LockSpec::$mode($(<$of_count as Sample>::SAMPLE)?), )*
        ]
    };
}

trait Sample {
    const SAMPLE: Self;
}

impl Sample for Duration {
    const SAMPLE: Self = Duration::from_secs(7);
}

impl Sample for usize {
    const SAMPLE: Self = 7;
}

impl Sample for OnLost {
    const SAMPLE: Self = Self::Ignore;
}

impl Sample for NonZeroU32 {
    const SAMPLE: Self = NonZeroU32::MAX;
}

#[test]
fn policy_file_has_each_option_of_a_spec() {
    for spec in lock_runtime::__lock_options!(specs) {
        let fields = serde_json::to_value(&spec).unwrap();
        let fields = fields.as_object().unwrap().iter();
        let fields: String = fields
            .map(|(name, value)| format!("{name} = {value}\n"))
            .collect();
        let policies = policies(&format!("[routes.'/a']\nkey = '{{header.x}}'\n{fields}"));
        let policy = policies.find(&Method::GET, "/a").unwrap();
        assert_eq!(
            policy,
            Arc::new(Policy::new("/a").with_spec(spec)),
            "{fields}"
        );
    }
}

#[test]
fn policy_file_accepts_all_spellings() {
    let open = LockSpec::exclusive;
    for (fields, spec) in [
        ("mode = 'exclusive'", open()),
        ("mode = 'shared'", LockSpec::shared()),
        ("renew = false", open().no_renew()),
        ("renew = true", open().renew()),
    ] {
        let policies = policies(&format!("[routes.'/a']\nkey = '{{header.x}}'\n{fields}"));
        let policy = policies.find(&Method::GET, "/a").unwrap();
        assert_eq!(
            policy,
            Arc::new(Policy::new("/a").with_spec(spec)),
            "{fields}"
        );
    }
}

#[test]
fn the_most_specific_route_is_that_of_a_request() {
    let policies = policies(
        r#"
        [defaults]
        key = "{header.x}"
        [routes]
        "/{*rest}" = { name = "rest" }
        "/orders/{id}" = { name = "any" }
        "POST /orders/{order}" = { name = "post" }
        "GET /orders/{id}" = { name = "get" }
        "PUT|PATCH /orders/{id}" = { name = "change" }
        "GET /orders/export" = { name = "export" }
        "/orders/export/{id}" = { name = "one export" }
        "DELETE /orders/health" = { skip = true }
        "/orders/a-{id}" = { name = "prefix" }
        "HEAD /head" = { name = "head" }
        "GET /head" = { name = "got" }
        "#,
    );
    for (method, path, expected) in [
        (Method::POST, "/orders/7", Some("post")),
        (Method::GET, "/orders/7", Some("get")),
        (Method::HEAD, "/orders/7", Some("get")),
        // A WebSocket over HTTP/2.
        (Method::CONNECT, "/orders/7", Some("any")),
        (Method::CONNECT, "/head", Some("got")),
        (Method::PUT, "/orders/7", Some("change")),
        (Method::PATCH, "/orders/7", Some("change")),
        (Method::DELETE, "/orders/7", Some("any")),
        (
            Method::from_bytes(b"PURGE").unwrap(),
            "/orders/7",
            Some("any"),
        ),
        // A route of another method does not hide those that match.
        (Method::POST, "/orders/export", Some("post")),
        (Method::GET, "/orders/export", Some("export")),
        (Method::HEAD, "/orders/export", Some("export")),
        (Method::GET, "/orders/export/1", Some("one export")),
        (Method::DELETE, "/orders/health", None),
        (Method::POST, "/orders/health", Some("post")),
        (Method::POST, "/orders/a-7", Some("prefix")),
        (Method::GET, "/orders/", Some("rest")),
        (Method::GET, "/elsewhere", Some("rest")),
        (Method::GET, "/", None),
        (Method::HEAD, "/head", Some("head")),
        (Method::GET, "/head", Some("got")),
        (Method::POST, "/head", Some("rest")),
    ] {
        assert_eq!(
            name(&policies, &method, path).as_deref(),
            expected,
            "{method} {path}"
        );
    }
}

#[test]
fn the_parameters_of_a_policy_are_those_of_its_own_route() {
    let policies = policies(
        r#"
        [routes]
        "/a/{x}/{y}" = { key = "a:{y}:{x}" }
        "POST /a/{y}/{x}" = { key = "a:{y}:{x}" }
        "/files/{*rest}" = { key = "file:{rest}" }
        "/shop.Orders/{method}" = { key = "{grpc.service}:{grpc.method}:{matched_path}" }
        "/skipped" = { skip = true }
        "#,
    );
    let key = |method, uri| key(&policies, &method, uri);
    let locked = |method, uri| match key(method, uri) {
        Ok(Target::Lock(key)) => key,
        other => panic!("{uri}: {other:?}"),
    };
    let plain = |name: &str| LockKey::new(name).unwrap();
    assert_eq!(locked(Method::GET, "/a/1/2"), plain("a:2:1"));
    assert_eq!(locked(Method::POST, "/a/1/2"), plain("a:1:2"));
    assert_eq!(
        locked(Method::GET, "/a/1/%32"),
        locked(Method::GET, "/a/1/2")
    );
    assert_ne!(
        locked(Method::GET, "/a/1%3A2/3"),
        locked(Method::GET, "/a/1/3%3A2")
    );
    assert_eq!(locked(Method::GET, "/files/a/b").to_string(), "file:a%2Fb");
    assert_eq!(
        locked(Method::POST, "/shop.Orders/Pay").to_string(),
        "shop.Orders:Pay:%2Fshop.Orders%2F%7Bmethod%7D"
    );
    for uri in ["/a/%FF/2", "/a/1/2/", "/a//1/2"] {
        let error = key(Method::GET, uri).unwrap_err();
        assert_eq!(
            (error.class(), error.code()),
            (ErrorClass::BadRequest, "bad_request")
        );
    }
    for uri in ["/skipped", "/nowhere", "/a/1"] {
        assert_eq!(key(Method::GET, uri).unwrap(), Target::Skip, "{uri}");
    }
}

#[test]
fn all_mistakes_are_reported_at_once_each_at_its_place() {
    let text = r#"[default]
[defaults]
lease = "5"
leasee = "é"

[groups.slow]
skip = true
wait = "90h"

[routes."post /orders/{id}"]
key = "order:{id}"

[routes."POST /orders/{id}"]
group = "fast"
key = "é:{order_id}"
mode = "readers"
permits = 0

[routes."POST /orders/{other}"]
key = "order:{other"

[routes."GET /x"]
"#;
    assert_eq!(
        complaints(text),
        [
            "1:2 unknown table `default`: did you mean `defaults`?",
            "3:9 \"5\" is not a duration (time unit needed, for example 5sec or 5ms): write lease = \"5s\", \"500ms\" or the like",
            "4:1 unknown field `leasee`: did you mean `lease`?",
            "7:1 `skip` is a field of routes only",
            "8:8 a wait of 90h is too long; give at most 24 h",
            "10:9 no request has the method \"post\": write POST",
            "14:9 there is no group \"fast\": write [groups.fast]",
            "15:10 the route \"POST /orders/{id}\" has no parameter {order_id}: it has {id}",
            "16:8 `mode` must be \"exclusive\" or \"shared\", not \"readers\"",
            "17:1 `mode` and `permits` set the same option: leave one out",
            "17:11 `permits` is out of range (1 to 4294967295): write permits = 3",
            "20:14 invalid key: this \"{\" is not closed; write \"{name}\" for a path parameter, \"{{\" for a brace",
            "22:9 the route has no key: write one, such as key = \"order:{id}\", or skip = true",
        ]
    );
}

#[test]
fn toml_errors_are_reported_with_the_other_mistakes() {
    let text = "[routes.\"/a\"]\nkey = \"a:{id}\nlease = \"1s\"\nlease = \"2s\"\nwait = [1,\n";
    let complaints = complaints(text);
    assert!(
        complaints
            .iter()
            .any(|line| line.starts_with("2:14 TOML syntax error, invalid basic string")),
        "{complaints:?}"
    );
    assert!(
        complaints
            .iter()
            .any(|line| line.starts_with("4:1 TOML syntax error, duplicate key")),
        "{complaints:?}"
    );
    // Errors about a value that could not be parsed would only confuse.
    assert!(
        !complaints.iter().any(|line| line.contains("parameter")),
        "{complaints:?}"
    );
}

#[test]
fn a_duplicate_table_is_reported_once() {
    let text = "[routes.'/a']\nkey = '{header.x}'\n\n[routes.'/a']\nkey = '{header.x}'\nkey = 'b'\n\n\
                [routes.'/b']\nkey = '{header.x}'\nkey = '{header.y}'\n";
    let message = "TOML syntax error, duplicate key: leave one of them out";
    assert_eq!(
        complaints(text),
        [format!("4:9 {message}"), format!("10:1 {message}")]
    );
}

#[test]
fn value_without_quotes_is_shown_with_quotes() {
    let message = "TOML syntax error, string values must be quoted: write";
    assert_eq!(
        complaints("[defaults]\nlease = 3s\nwait=1m 30s # each\n[routes]\n\"/a\" = { key = '{header.x}', max_hold = 5m }")
            .into_iter()
            .filter(|line| line.contains(message))
            .collect::<Vec<_>>(),
        [
            format!("2:9 {message} lease = \"3s\""),
            format!("3:6 {message} wait = \"1m 30s\""),
            format!("5:41 {message} max_hold = \"5m\""),
        ]
    );
}

#[test]
fn a_value_that_cannot_be_meant_is_refused_with_what_to_write() {
    let key = |said: &str| format!("key = \"{{header.x}}\", {said}");
    for (said, words) in [
        ("lease = 30", "write lease = \"30s\""),
        ("lease = 1.5", "found a fraction: write lease = \"2s\""),
        ("lease = \"1ms\"", "100 ms to 24 h"),
        ("lease = \"soon\"", "not a duration"),
        ("wait = true", "expected a string"),
        ("wait = \"1s\", no_wait = true", "leave one out"),
        ("no_wait = false", "wait = \"2s\""),
        ("no_wait = \"yes\"", "no_wait = true"),
        (
            "min_hold = \"2s\", max_hold = \"1s\"",
            "longer than the max_hold",
        ),
        ("max_hold = \"0s\"", "holds nothing"),
        (
            "permits = -1",
            "out of range (1 to 4294967295): write permits = 3",
        ),
        ("permits = 5_000_000_000", "4294967295"),
        ("permits = \"3\"", "expected a whole number"),
        ("permits = 2.5", "found a fraction"),
        ("mode = \"readers\"", "\"shared\""),
        ("no_renew = true", "did you mean `renew`"),
        ("no_reentrant = true", "did you mean `reentrant`"),
        ("no_strict_order = true", "did you mean `strict_order`"),
        ("shared = true", "did you mean `mode`"),
        ("hold_until = \"stream\"", "\"body\""),
        (
            "max_waiters = -1",
            "out of range (0 to 18446744073709551615): write max_waiters = 100",
        ),
        ("status = { busy = -1 }", "(400 to 599)"),
        ("status = 423", "status is a table"),
        ("status = { busy = 200 }", "400 to 599"),
        ("status = { busy = 70000 }", "400 to 599"),
        ("status = { contended = 423 }", "busy"),
        ("ttl = \"1s\"", "did you mean `lease`"),
        ("leese = \"1s\"", "did you mean `lease`"),
        ("something = 1", "expected one of key"),
        ("group = 1", "expected a string"),
        ("name = 1979-05-27", "found a date"),
        ("skip = true", "leave `key` out"),
    ] {
        let complaint = complaint("/a", &key(said));
        assert!(complaint.contains(words), "{said}: {complaint}");
    }
}

#[test]
fn a_route_that_can_never_match_is_refused() {
    for (route, words) in [
        ("", "not a route"),
        ("orders", "not a route"),
        ("orders/{id}", "write \"/orders/{id}\""),
        ("shop.Orders/Pay", "write \"/shop.Orders/Pay\""),
        ("POST", "not a route"),
        ("POST  /x", "not a route"),
        ("PSOT /x", "not a method"),
        ("Get /x", "write GET"),
        ("POST|GET|POST /x", "named twice"),
        ("/x?y=1", "no request has the path"),
        ("/x#y", "no request has the path"),
        ("/a b", "not a method"),
        ("GET /a b", "no request has the path"),
        ("/a\tb", "no request has the path"),
        ("/{id", "braces"),
        ("/{}", "braces"),
        ("/id}", "braces"),
        ("/{*rest}/x", "at the end"),
        ("/{a}{b}", "only a prefix"),
        ("/{a}/{a}", "rename one"),
        ("/{id:int}", "write {id} in the route"),
        ("/{*rest:int}", "write {*rest} in the route"),
        ("/orders/:id", "write \"{id}\""),
        ("/orders/{id} POST", "write \"POST /orders/{id}\""),
        ("/{a}}}", "brace in its name"),
        ("/{a{b}", "brace in its name"),
        (&"/{x}".repeat(26), "25 parameters"),
    ] {
        let complaint = complaint(route, "key = \"{header.x}\"");
        assert!(complaint.contains(words), "{route}: {complaint}");
    }
    for (routes, words) in [
        (["/a/{x}", "/a/{y}"], "line 1 matches the same"),
        (["GET|POST /a", "POST|PUT /a"], "line 1 matches the same"),
        (["/a/{x}", "/a/{*rest}"], "neither"),
        (["GET /a/{x}", "/a/{*rest}"], "neither"),
    ] {
        let said = routes
            .map(|route| format!("routes.{route:?} = {{ key = \"{{header.x}}\" }}\n"))
            .concat();
        let complaints = complaints(&said);
        assert_eq!(complaints.len(), 1, "{complaints:?}");
        assert!(
            complaints[0].starts_with("2:8 ") && complaints[0].contains(words),
            "{complaints:?}"
        );
    }
}

#[test]
fn policy_file_refuses_keys_that_no_request_can_fill() {
    for (route, key, words) in [
        ("/orders/{order}", "order:{ordr}", "did you mean {order}?"),
        ("/orders", "order:{id}", "it has none"),
        ("/orders/{a}/{b}", "order:{id}", "it has {a}, {b}"),
        ("/orders/{id}", "order:id", "such as {id}"),
        ("/orders", "{method}:{matched_path}", "global = true"),
        ("/a/b/{c}", "{grpc.method}", "gRPC"),
        ("GET /a/b", "{grpc.method}", "gRPC"),
        ("/shop-api/b", "{grpc.method}", "gRPC"),
        ("/a", "{header.}", "{header.x-tenant}"),
        ("/a", "permits:{header.x}", "reserved"),
    ] {
        let complaint = complaint(route, &format!("key = {key:?}"));
        assert!(complaint.contains(words), "{route} {key}: {complaint}");
    }
    for (route, key) in [
        ("/a/{b}", "{grpc.method}"),
        ("/{*all}", "{grpc.service}"),
        ("POST /a.B/{*m}", "{grpc.method}"),
    ] {
        policies(&format!("routes.{route:?} = {{ key = {key:?} }}"));
    }
}

#[test]
fn a_mistake_within_a_key_is_reported_at_its_place() {
    for (key, column) in [
        ("\"k:{id}\"", 25),
        ("'k:{id}'", 25),
        ("\"\\u006B:{id}\"", 22),
    ] {
        let found = complaints(&format!("[routes]\n\"/a\" = {{       key = {key} }}"));
        assert!(found[0].starts_with(&format!("2:{column} ")), "{found:?}");
    }
}

#[test]
fn an_unused_template_is_checked_as_well() {
    let text = "[groups.unused]\nkey = \"k:{id\"\n[groups.two]\nkey = \"k:{x\"\n[routes]\n\"/a/{b}\" = { key = \"{b:int}\" }\n\"/c\" = { group = \"two\" }";
    let found = complaints(text);
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(
        found[0].starts_with("2:10 ") && found[1].starts_with("4:10 "),
        "{found:?}"
    );
}

#[test]
fn names_are_of_one_route_each() {
    let found = complaints(
        "[defaults]\nkey = \"{header.x}\"\n[routes]\n\"/a\" = {}\n\"/b\" = { name = \"/a\" }\n\"/c\" = { name = \"/a\" }",
    );
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(
        found[0].starts_with("5:17 ") && found[0].contains("line 4"),
        "{found:?}"
    );
}

#[test]
fn long_names_that_do_not_exist_are_refused_at_once() {
    let [group, other] = ["a", "b"].map(|it| it.repeat(300_000));
    let all = complaints(&format!(
        "[groups.{group}]\n[routes.'/a']\nkey = '{{header.x}}'\ngroup = '{other}'"
    ));
    assert!(all.len() == 1 && all[0].len() < 8100, "{all:?}");
}

#[test]
fn a_file_without_routes_is_refused() {
    for text in ["", "# nothing", "[routes]", "[defaults]\nlease = \"1s\""] {
        assert!(complaints(text)[0].contains("there is no route"), "{text}");
    }
}

#[test]
fn a_bad_file_changes_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("locks.toml");
    let write = |text: &str| fs::write(&file, text).unwrap();
    write("routes.\"/a\" = { name = \"one\", key = \"{header.x}\" }");
    let policies = LockPolicies::from_file(&file).unwrap();
    let clone = policies.clone();
    let named = || name(&clone, &Method::GET, "/a");
    assert_eq!(named().as_deref(), Some("one"));

    write("routes.\"/a\" = { name = \"two\", key = \"{header.x}\", ttl = 1 }");
    let error = policies.reload().unwrap_err().to_string();
    assert_eq!(
        error,
        format!(
            "{}:1:51: unknown field `ttl`: did you mean `lease`?",
            file.display()
        )
    );
    assert_eq!(named().as_deref(), Some("one"));

    write("routes.\"/a\" = { name = \"two\", key = \"{header.x}\" }");
    policies.reload().unwrap();
    assert_eq!(named().as_deref(), Some("two"));

    fs::remove_file(&file).unwrap();
    let error = policies.reload().unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with(&format!("cannot read policies from {}: ", file.display())),
        "{error}"
    );
    assert!(error.all().is_empty());
    assert_eq!(format!("{error:?}"), format!("PolicyError({error})"));
    assert_eq!(named().as_deref(), Some("two"));

    assert!(LockPolicies::from_file(&file).is_err());
    policies
        .replace("routes.\"/a\" = { name = \"three\", key = \"{header.x}\" }")
        .unwrap();
    assert_eq!(named().as_deref(), Some("three"));
    let of_no_file =
        LockPolicies::from_toml_str("routes.\"/a\" = { key = \"{header.x}\" }").unwrap();
    assert!(
        of_no_file
            .reload()
            .unwrap_err()
            .to_string()
            .contains("replace")
    );
}
