//! The pages for operators, without a browser: their content, and the requests that they refuse.

mod events;
mod hosts;

use axum::body::{Body, to_bytes};
use http::{HeaderMap, Request, StatusCode};
use lock_runtime::{LockClient, LockClientBuilder, LockErrorKind, Loss};
use lock_tests::{
    Captured, RedisServer,
    place::{LONG, Place, begun, eventually, on_every_store},
    unique,
};
use lock_tower::inspector::Inspector;
use serde_json::Value;
use tower::ServiceExt as _;

on_every_store! {
    a_held_lock_is_shown_with_its_holder_and_waiter,
    only_the_holder_that_was_shown_is_revoked,
    many_locks_have_pages,
    ; with permits:
    one_permit_is_revoked,
}

struct Page {
    status: StatusCode,
    headers: HeaderMap,
    text: String,
}

impl Page {
    fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {}", self.text))
    }
}

async fn send(inspector: &Inspector, request: Request<Body>) -> Page {
    let response = inspector.clone().oneshot(request).await.unwrap();
    let (parts, body) = response.into_parts();
    let body = to_bytes(Body::new(body), usize::MAX).await.unwrap();
    Page {
        status: parts.status,
        headers: parts.headers,
        text: String::from_utf8(body.to_vec()).unwrap(),
    }
}

async fn get(inspector: &Inspector, query: &str) -> Page {
    let request = Request::get(format!("/locks{query}")).header(HOST.0, HOST.1);
    send(inspector, request.body(Body::empty()).unwrap()).await
}

const FORM: (&str, &str) = ("content-type", "application/x-www-form-urlencoded");
const HOST: (&str, &str) = ("host", "ops.example.com");
const ORIGIN: (&str, &str) = ("origin", "https://ops.example.com");

async fn post(inspector: &Inspector, form: &str, headers: &[(&str, &str)]) -> Page {
    let mut request = Request::post("/locks?");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    send(inspector, request.body(form.to_owned().into()).unwrap()).await
}

async fn revoke(inspector: &Inspector, form: &str) -> Page {
    post(inspector, form, &[FORM, HOST, ORIGIN]).await
}

/// The form that the page of a lock has.
async fn form(inspector: &Inspector, query: &str) -> String {
    let page = get(inspector, query).await.text;
    let field = |name: &str| {
        let (_, rest) = page
            .split_once(&format!(r#"name="{name}" value=""#))
            .unwrap();
        rest.split_once('"').unwrap().0
    };
    format!(
        "key={}&kind={}&holder={}",
        field("key"),
        field("kind"),
        field("holder")
    )
}

fn named(name: &str) -> LockClientBuilder {
    LockClient::builder().identity(name)
}

#[tokio::test]
async fn a_title_is_on_each_page_and_on_none_by_default() {
    let plain = Inspector::new(LockClient::in_memory()).allow_host(HOST.1);
    let titled = plain.clone().title("orders <\u{202e}production>");
    for view in ["", "?view=activity", "?view=health", "?key=a"] {
        let page = get(&titled, view).await.text;
        let shown = "orders &lt;\\u{202e}production&gt;";
        assert!(page.contains(&format!(" - {shown}</title>")), "{page}");
        assert!(page.contains(&format!("<strong><bdi>{shown}</bdi></strong>")));
        assert!(!get(&plain, view).await.text.contains("<strong>"));
    }
}

async fn a_held_lock_is_shown_with_its_holder_and_waiter(place: Place) {
    let locks = place.client_of(named("orders@web-1")).await;
    let other = place.client_of(named("orders@web-2")).await;
    let inspector = Inspector::new(place.client().await).allow_host(HOST.1);
    assert!(get(&inspector, "").await.text.contains("No lock is held"));

    let guard = locks.exclusive("order:42").acquire().await.unwrap();
    let waiting = begun(other.exclusive("order:42").wait(LONG).acquire()).await;
    let fence = guard.fence().to_string();

    eventually("both names are shown", || async {
        let page = get(&inspector, "?key=order:42").await.text;
        page.contains("orders@web-1") && page.contains("orders@web-2")
    })
    .await;
    let list = get(&inspector, "?prefix=order:").await;
    assert_eq!(list.status, StatusCode::OK);
    for shown in ["order:42", "orders@web-1", "exclusive", &fence, "1, up to "] {
        assert!(list.text.contains(shown), "{shown}: {}", list.text);
    }
    assert!(
        !get(&inspector, "?prefix=item:")
            .await
            .text
            .contains("order:42")
    );

    let json = async || get(&inspector, "?prefix=order:&format=json").await.json();
    eventually("it has waited for a while", || async {
        let waited = &json().await["locks"][0]["waiters"][0]["waited_ms"];
        (40..30_000).contains(&waited.as_u64().unwrap())
    })
    .await;
    let json = json().await;
    assert_eq!(json["total"], 1);
    let lock = &json["locks"][0];
    assert_eq!(lock["key"], "order:42");
    assert_eq!(lock["fence"].to_string(), fence);
    assert_eq!(lock["holders"][0]["client"], "orders@web-1");
    assert_eq!(lock["waiters"][0]["client"], "orders@web-2");
    let one = get(&inspector, "?key=order:42&format=json").await.json();
    assert_eq!(one["waiters"][0]["mode"], "exclusive");

    guard.release().await.unwrap();
    waiting.await.unwrap().release().await.unwrap();
    assert!(get(&inspector, "").await.text.contains("No lock is held"));
    assert!(
        get(&inspector, "?key=order:42")
            .await
            .text
            .contains("Free.")
    );
}

async fn only_the_holder_that_was_shown_is_revoked(place: Place) {
    let locks = place.client().await;
    let inspector = Inspector::new(place.client().await).allow_revoke(ORIGIN.1);
    let guard = locks.exclusive("a").acquire().await.unwrap();
    let seen = form(&inspector, "?key=a").await;
    let page = revoke(&inspector, &seen).await;
    assert_eq!(page.status, StatusCode::OK, "{}", page.text);
    assert!(page.text.contains("Revoked."), "{}", page.text);
    assert_eq!(
        guard.lost().await.kind(),
        LockErrorKind::Lost(Loss::Revoked)
    );

    // The button of an older page.
    let page = revoke(&inspector, &seen).await;
    assert_eq!(page.status, StatusCode::CONFLICT);
    assert!(page.text.contains("not held any more"), "{}", page.text);
    let guard = locks.exclusive("a").acquire().await.unwrap();
    let page = revoke(&inspector, &seen).await;
    assert_eq!(page.status, StatusCode::CONFLICT);
    assert!(
        page.text.contains("no longer had the lock"),
        "{}",
        page.text
    );
    guard.verify().await.unwrap();
    guard.release().await.unwrap();
}

async fn one_permit_is_revoked(place: Place) {
    let locks = place.client().await;
    let inspector = Inspector::new(place.client().await).allow_revoke(ORIGIN.1);
    let permits = 3.try_into().unwrap();
    let one = locks.permits("p", permits).acquire().await.unwrap();
    let seen = form(&inspector, "?key=p&kind=permits").await;
    let other = locks.permits("p", permits).acquire().await.unwrap();
    let list = get(&inspector, "").await.text;
    assert!(
        list.contains("2 of 3 permits") && list.contains("and 1 more"),
        "{list}"
    );
    assert_eq!(revoke(&inspector, &seen).await.status, StatusCode::OK);
    assert_eq!(one.lost().await.kind(), LockErrorKind::Lost(Loss::Revoked));
    other.verify().await.unwrap();
    other.release().await.unwrap();
}

async fn many_locks_have_pages(place: Place) {
    let locks = place.client().await;
    let inspector = Inspector::new(place.client().await).allow_host(HOST.1);
    let mut guards = Vec::new();
    for number in 0..230 {
        let key = format!("k:{number:04}");
        guards.push(locks.exclusive(key).acquire().await.unwrap());
    }
    let (mut query, mut seen, mut pages) = (String::from("?prefix=k:"), Vec::new(), 0);
    loop {
        let page = get(&inspector, &query).await.text;
        pages += 1;
        assert!(page.contains(" of 230 names"), "{page}");
        let rows = page.split(r#"<th scope="row""#).skip(1);
        let keys = rows.map(|row| {
            row.split("<bdi>")
                .nth(1)
                .unwrap()
                .split('<')
                .next()
                .unwrap()
        });
        seen.extend(keys.map(str::to_owned));
        let Some((before, _)) = page.split_once(r#"" rel="next""#) else {
            break;
        };
        let link = before.rsplit_once(r#"href=""#).unwrap().1;
        query = link.replace("&amp;", "&");
    }
    let expected: Vec<_> = (0..230).map(|number| format!("k:{number:04}")).collect();
    assert_eq!((seen, pages), (expected, 3));
}

/// Key names come from users of the service, and names of clients from any program.
#[tokio::test]
async fn hostile_names_are_text() {
    let place = Place::memory();
    let script = "<script>alert(1)</script>";
    let locks = place
        .client_of(named(&format!("{script}\u{202e}\"'")))
        .await;
    let inspector = Inspector::new(place.client().await).allow_revoke(ORIGIN.1);
    let keys = [
        script.to_owned(),
        "\"><img src=x onerror=alert(1)>'".to_owned(),
        "a\u{202e}b\u{200b}c\u{2066}".to_owned(),
        "&lt;b&amp;?#%00%0d%0a+ =".to_owned(),
        "é".repeat(256),
    ];
    let mut guards = Vec::new();
    for key in &keys {
        let request = locks.exclusive(key.as_str());
        guards.push(request.acquire().await.unwrap());
    }
    eventually("the name is shown", || async {
        get(&inspector, "")
            .await
            .text
            .contains("&lt;script&gt;alert(1)&lt;/script&gt;\\u{202e}")
    })
    .await;
    let list = get(&inspector, "").await.text;
    let links = list
        .split("<tr id=\"")
        .skip(1)
        .map(|row| row.split('"').next().unwrap());
    let links: Vec<_> = links.map(|link| link.replace("&amp;", "&")).collect();
    assert_eq!(links.len(), keys.len());
    let mut pages = vec![list.clone()];
    for link in &links {
        let page = get(&inspector, link).await;
        assert_eq!(page.status, StatusCode::OK, "{link}");
        let seen = form(&inspector, link).await;
        assert!(seen.contains("holder="), "{seen}");
        pages.push(page.text);
    }
    for page in pages {
        for raw in ["<script>", "<img", "\u{202e}", "\u{200b}", "\u{2066}"] {
            // The field of the form has the key itself: no browser shows it.
            let shown =
                page.split(r#"name="key" value=""#)
                    .map(|part| match part.split_once("\">") {
                        Some((_, rest)) if part.starts_with(['a', '&', '"', 'é']) => rest,
                        _ => part,
                    });
            assert!(
                !shown.collect::<String>().contains(raw),
                "{raw:?} in {page}"
            );
        }
    }
}

#[tokio::test]
async fn a_revocation_has_to_be_allowed_and_sent_by_the_page_itself() {
    let traces = Captured::new();
    let _here = traces.set_default();
    let locks = LockClient::in_memory();
    let guard = locks.exclusive("a").acquire().await.unwrap();
    let read_only = Inspector::new(locks.clone()).allow_host(HOST.1);
    let inspector = read_only.clone().allow_revoke(ORIGIN.1).caller(|parts| {
        let user = parts.headers.get("x-user")?;
        Some(user.to_str().ok()?.to_owned())
    });
    let seen = form(&inspector, "?key=a").await;
    assert!(
        !get(&read_only, "?key=a")
            .await
            .text
            .contains("method=\"post\"")
    );
    let page = revoke(&read_only, &seen).await;
    assert_eq!(page.status, StatusCode::FORBIDDEN, "{}", page.text);

    let user = ("x-user", "alice");
    for headers in [
        &[FORM, HOST, ("origin", "https://evil.example"), user][..],
        &[FORM, HOST],
        &[FORM, HOST, ("origin", "null")],
    ] {
        let page = post(&inspector, &seen, headers).await;
        assert_eq!(page.status, StatusCode::FORBIDDEN, "{}", page.text);
    }
    let refusals = traces.events();
    let refusal = refusals
        .iter()
        .find(|event| event.field("caller") == Some("alice"));
    assert!(
        refusal.unwrap().message.contains("another origin"),
        "{refusals:?}"
    );

    let text = ("content-type", "text/plain");
    let long = format!("{seen}&x={}", "y".repeat(5000));
    for (form, kind) in [
        (seen.as_str(), text),
        ("key=a", FORM),
        ("key=a&holder=xyz", FORM),
        ("key=&holder=0123456789abcdef", FORM),
        ("key=a&kind=all&holder=0123456789abcdef", FORM),
        (&long, FORM),
    ] {
        let page = post(&inspector, form, &[kind, HOST, ORIGIN]).await;
        assert_eq!(
            page.status,
            StatusCode::BAD_REQUEST,
            "{form}: {}",
            page.text
        );
    }
    guard.verify().await.unwrap();

    let json = ("accept", "application/json");
    let page = post(&inspector, &seen, &[FORM, HOST, ORIGIN, json, user]).await;
    assert_eq!(
        (page.status, page.json()["outcome"].as_str()),
        (StatusCode::OK, Some("revoked"))
    );
    let events = traces.events();
    let logged = events
        .iter()
        .find(|event| event.message == "revocation by an operator")
        .unwrap();
    let fields = ["lock.key", "caller", "outcome"].map(|name| logged.field(name).unwrap());
    assert_eq!(fields, ["a", "alice", "revoked"]);
    assert_eq!(logged.level, tracing::Level::WARN);
}

#[tokio::test]
async fn every_response_has_the_headers_that_confine_it() {
    let inspector = Inspector::new(LockClient::in_memory()).allow_revoke(ORIGIN.1);
    let asset = |page: &Page, before: &str| {
        let (_, rest) = page.text.split_once(before).unwrap();
        rest.split('"').next().unwrap().replace("&amp;", "&")
    };
    let page = get(&inspector, "").await;
    let (style, script) = (
        asset(&page, "stylesheet\" href=\""),
        asset(&page, "script src=\""),
    );
    for (query, status, content_type) in [
        ("", 200, "text/html; charset=utf-8"),
        ("?view=activity", 200, "text/html; charset=utf-8"),
        ("?view=health", 200, "text/html; charset=utf-8"),
        ("?view=health&format=json", 200, "application/json"),
        ("?key=a", 200, "text/html; charset=utf-8"),
        (&*style, 200, "text/css; charset=utf-8"),
        (&*script, 200, "text/javascript; charset=utf-8"),
        ("?view=x", 400, "text/plain; charset=utf-8"),
    ] {
        let page = get(&inspector, query).await;
        assert_eq!(page.status, status, "{query}");
        assert_eq!(page.headers["content-type"], content_type, "{query}");
        let csp = page.headers["content-security-policy"].to_str().unwrap();
        assert!(csp.contains("default-src 'none'") && csp.contains("frame-ancestors 'none'"));
        assert!(!csp.contains("unsafe") && !csp.contains('*'), "{csp}");
        assert_eq!(page.headers["x-content-type-options"], "nosniff");
        for policy in ["cross-origin-resource-policy", "cross-origin-opener-policy"] {
            assert_eq!(page.headers[policy], "same-origin");
        }
        assert_eq!(page.headers["document-policy"], "force-load-at-top");
        assert_eq!(page.headers["cache-control"], "no-store");
        // The digest of this one is in the policy, as the tests in a browser see.
        let style = page
            .text
            .split_once("<style>details:not([open])>form{display:none}");
        let text = match style.and_then(|(head, rest)| Some((head, rest.split_once("</style>")?))) {
            Some((head, (_, rest))) => format!("{head}{rest}"),
            None => page.text,
        };
        for inline in ["style=", "onclick", "<style", "javascript:"] {
            assert!(
                !text.contains(inline) || query == script,
                "{inline} in {query}"
            );
        }
    }
    let put = Request::put("/locks").header(HOST.0, HOST.1);
    let put = put.body(Body::empty()).unwrap();
    let refused = send(&inspector, put).await;
    assert_eq!(refused.status, StatusCode::METHOD_NOT_ALLOWED);
    assert_eq!(refused.headers["allow"], "GET, HEAD, POST");
}

#[tokio::test]
async fn no_view_shows_a_token() {
    let server = RedisServer::builder().start().await;
    let namespace = unique("ns");
    let locks = LockClient::builder()
        .namespace(&namespace)
        .connect(&server.url())
        .await
        .unwrap();
    let foreign = "secret-of-another-program";
    server
        .query::<String>(&["SET", &format!("{namespace}:f"), foreign, "PX", "60000"])
        .await;
    let guard = locks.exclusive("a").acquire().await.unwrap();
    let waiting = begun(locks.exclusive("f").wait(LONG).acquire()).await;
    let token: String = server.query(&["GET", &format!("{namespace}:a")]).await;
    let inspector = Inspector::new(locks.clone()).allow_revoke(ORIGIN.1);
    let mut is_foreign_shown = false;
    for query in ["?", "?key=a", "?key=f", "?view=activity", "?view=health"] {
        for format in ["", "&format=json"] {
            let page = get(&inspector, &format!("{query}{format}")).await.text;
            is_foreign_shown |= page.contains("a foreign client");
            for secret in [&token[..], &token[10..], foreign] {
                assert!(!page.contains(secret), "{query}{format}: {page}");
            }
        }
    }
    assert!(is_foreign_shown);
    drop(waiting);
    guard.release().await.unwrap();
}

#[tokio::test]
async fn while_the_store_is_away_the_page_says_so() {
    let server = RedisServer::builder().start().await;
    let locks = LockClient::connect(&server.url()).await.unwrap();
    let guard = locks.exclusive("a").acquire().await.unwrap();
    let inspector = Inspector::new(locks.clone()).allow_revoke(ORIGIN.1);
    let seen = form(&inspector, "?key=a").await;
    server.kill();
    eventually("the store is away", || async {
        get(&inspector, "").await.status == StatusCode::SERVICE_UNAVAILABLE
    })
    .await;
    for query in ["", "?key=a"] {
        let page = get(&inspector, query).await;
        assert_eq!(page.status, StatusCode::SERVICE_UNAVAILABLE);
        assert!(page.text.contains("role=\"alert\"") && page.text.contains("view=health"));
    }
    let page = get(&inspector, "?view=health").await;
    assert_eq!(page.status, StatusCode::OK);
    assert!(
        page.text.contains("unavailable") && page.text.contains("Remedy: "),
        "{}",
        page.text
    );
    let page = revoke(&inspector, &seen).await;
    assert_eq!(page.status, StatusCode::SERVICE_UNAVAILABLE);
    assert!(
        page.text.contains("not known whether it was revoked"),
        "{}",
        page.text
    );
    drop(guard);
}

#[tokio::test]
async fn contention_and_losses_of_this_process_are_shown() {
    let locks = LockClient::in_memory();
    let inspector = Inspector::new(locks.clone()).allow_revoke(ORIGIN.1);
    let page = get(&inspector, "?view=activity").await.text;
    assert!(page.contains("no lock was lost"), "{page}");
    let guard = locks
        .exclusive("order:7")
        .name("pay")
        .acquire()
        .await
        .unwrap();
    let refused = locks.exclusive("order:7").name("ship").no_wait().acquire();
    refused.await.unwrap_err();
    revoke(&inspector, &form(&inspector, "?key=order:7").await).await;
    guard.lost().await;
    let page = get(&inspector, "?view=activity").await.text;
    for shown in ["pay", "ship", "order:7", "lost_revoked"] {
        assert!(page.contains(shown), "{shown}: {page}");
    }
    let json = get(&inspector, "?view=activity&format=json").await.json();
    assert_eq!(json["losses"][0]["loss"], "revoked");
    assert_eq!(
        json["losses"][0]["fence"].to_string(),
        guard.fence().to_string()
    );
}
