//! The pages for operators in Chromium, which `tests/run.sh --browser` installs.

#![allow(
    clippy::unwrap_used,
    reason = "clippy.toml allows it in test functions only, and not in what they share"
)]

mod browser;

use std::{net::SocketAddr, time::Duration};

use axum::{
    Router,
    extract::Request,
    http::StatusCode,
    middleware::{Next, from_fn},
    response::{Html, IntoResponse},
    routing::get,
};
use fantoccini::{Client, Locator, key::Key};
use lock_runtime::{LockClient, LockErrorKind, Loss};
use lock_tests::RedisServer;
use lock_tower::inspector::Inspector;
use serde_json::json;
use tokio::{
    net::TcpListener,
    sync::mpsc,
    time::{Instant, sleep, timeout},
};

use self::browser::{Browser, REBOUND, WIDTHS};

/// Longer than the 20 s and 8 s after which a page opens a silent stream of events again.
const LONG: Duration = Duration::from_secs(60);

/// Serves the app for its origin until the process ends. Returns the origin.
async fn serve(app: impl FnOnce(&str) -> Router) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let origin = format!("http://{}", listener.local_addr().unwrap());
    let app = app(&origin).into_make_service_with_connect_info::<SocketAddr>();
    tokio::spawn(async move { axum::serve(listener, app).await });
    origin
}

/// Serves the pages, which may revoke. Returns their URL.
async fn pages(inspector: Inspector) -> String {
    let app = |origin: &str| Router::new().nest_service("/locks", inspector.allow_revoke(origin));
    format!("{}/locks", serve(app).await)
}

/// The text of the page, at one moment: an element that is found may be gone when it is read.
async fn text(page: &Client) -> String {
    let shown = "return document.body ? document.body.innerText : ''";
    let shown = page.execute(shown, Vec::new()).await;
    shown.map_or_else(
        |_| String::new(),
        |shown| shown.as_str().unwrap_or_default().to_owned(),
    )
}

/// Clicks an element once it is there.
async fn click(page: &Client, element: Locator<'_>) {
    let found = page.wait().at_most(LONG).for_element(element).await;
    found.unwrap().click().await.unwrap();
}

async fn becomes(page: &Client, what: &str, is_so: impl Fn(&str) -> bool) {
    let until = Instant::now() + LONG;
    loop {
        let shown = text(page).await;
        if is_so(&shown) {
            return;
        }
        assert!(
            Instant::now() < until,
            "not within {LONG:?}: {what}: {shown}"
        );
        sleep(Duration::from_millis(50)).await;
    }
}

async fn evaluate(page: &Client, script: &str) -> serde_json::Value {
    page.execute(script, Vec::new()).await.unwrap()
}

/// Waits until the script returns the value: after a change of its width, a page is laid out again.
async fn becomes_equal(page: &Client, script: &str, wanted: serde_json::Value, what: &str) {
    let until = Instant::now() + LONG;
    loop {
        let value = evaluate(page, script).await;
        if value == wanted {
            return;
        }
        assert!(Instant::now() < until, "{what}: {value}, not {wanted}");
        sleep(Duration::from_millis(50)).await;
    }
}

/// Opens the button of the first holder, and presses it.
async fn revoke(page: &Client) {
    click(page, Locator::Css("summary")).await;
    click(page, Locator::Css("details button")).await;
}

fn named(name: &str) -> LockClient {
    let builder = LockClient::builder().identity(name);
    builder.build_in_memory().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_held_lock_appears_and_disappears_without_a_reload() {
    let locks = named("orders@web-1:4711");
    let url = pages(Inspector::new(locks.clone())).await;
    Browser::run(async |page| {
        page.goto(&url).await.unwrap();
        becomes(page, "nothing is held", |shown| {
            shown.contains("No lock is held")
        })
        .await;
        evaluate(page, "window.isTheSamePage = true").await;
        let guard = locks.exclusive("order:42").acquire().await.unwrap();
        becomes(page, "the lock appears", |shown| {
            shown.contains("order:42") && shown.contains("orders@web-1:4711")
        })
        .await;
        guard.release().await.unwrap();
        becomes(page, "it disappears", |shown| !shown.contains("order:42")).await;
        assert_eq!(
            evaluate(page, "return window.isTheSamePage").await,
            json!(true)
        );

        // The service ends its streams after five seconds, and the browser opens the next one.
        sleep(Duration::from_secs(7)).await;
        let _guard = locks.exclusive("order:43").acquire().await.unwrap();
        becomes(page, "it is still live", |shown| shown.contains("order:43")).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn hostile_names_are_harmless() {
    let attack =
        "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>";
    let locks = named(attack);
    let url = pages(Inspector::new(locks.clone())).await;
    let keys = [
        attack.to_owned(),
        "</title><script>document.title='owned'</script>".to_owned(),
        "'\"><svg onload=document.title='owned'>".to_owned(),
        "safe\u{202e}evil\u{2066}".to_owned(),
        "W".repeat(512),
    ];
    let mut guards = Vec::new();
    for key in &keys {
        guards.push(locks.exclusive(key.as_str()).acquire().await.unwrap());
    }
    Browser::run(async |page| {
        for key in &keys {
            page.goto(&url).await.unwrap();
            // Also written by the script of the page.
            becomes(page, "it is live", |shown| shown.contains("Live")).await;
            let shown = key
                .replace('\u{202e}', "\\u{202e}")
                .replace('\u{2066}', "\\u{2066}");
            let mut link = None;
            for one in page.find_all(Locator::Css("tbody a")).await.unwrap() {
                if one.text().await.unwrap() == shown {
                    link = Some(one);
                }
            }
            link.unwrap_or_else(|| panic!("{shown} is not shown"))
                .click()
                .await
                .unwrap();
            becomes(page, "the lock is live", |shown| shown.contains("Live")).await;
            assert_ne!(page.title().await.unwrap(), "owned");
            let elements =
                "return document.querySelectorAll('img, svg, script:not([src]), iframe').length";
            assert_eq!(evaluate(page, elements).await, json!(0));
            // The form sends exactly this key.
            revoke(page).await;
            becomes(page, "it is revoked", |shown| shown.contains("Revoked.")).await;
        }
    })
    .await;
    for guard in guards {
        assert_eq!(
            guard.lost().await.kind(),
            LockErrorKind::Lost(Loss::Revoked)
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_revocation_of_an_older_page_is_refused() {
    let locks = named("orders");
    // Without streams, the page stays as it is.
    let url = pages(Inspector::new(locks.clone()).max_streams(0)).await;
    let guard = locks.exclusive("order:42").acquire().await.unwrap();
    Browser::run(async |page| {
        page.goto(&format!("{url}?key=order%3A42")).await.unwrap();
        becomes(page, "it says so", |shown| shown.contains("Not live")).await;
        guard.release().await.unwrap();
        let guard = locks.exclusive("order:42").acquire().await.unwrap();
        revoke(page).await;
        becomes(page, "refused", |shown| {
            shown.contains("no longer had the lock")
        })
        .await;
        guard.verify().await.unwrap();
        // The page shows the present holder now.
        revoke(page).await;
        becomes(page, "revoked", |shown| shown.contains("Revoked.")).await;
        assert_eq!(
            guard.lost().await.kind(),
            LockErrorKind::Lost(Loss::Revoked)
        );
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_of_another_origin_cannot_revoke_nor_frame() {
    let locks = named("orders");
    let url = pages(Inspector::new(locks.clone())).await;
    let guard = locks.exclusive("order:42").acquire().await.unwrap();
    let seen = locks.inspect("order:42").await.unwrap().holders[0].id;
    let attack = format!(
        "<form method=post action='{url}?'><input name=key value='order:42'><input name=holder value='{seen}'>\
         <button>Win a prize</button></form><iframe src='{url}'></iframe>"
    );
    let evil = serve(|_| Router::new().route("/", get(async move || Html(attack)))).await;
    Browser::run(async |page| {
        page.goto(&evil).await.unwrap();
        let frame = page.find(Locator::Css("iframe")).await.unwrap();
        frame.enter_frame().await.unwrap();
        assert!(!text(page).await.contains("No lock is held"));
        assert!(
            page.find(Locator::Css("#live")).await.is_err(),
            "it is framed"
        );
        page.enter_parent_frame().await.unwrap();
        click(page, Locator::Css("button")).await;
        becomes(page, "refused", |shown| shown.contains("has to be one")).await;
        guard.verify().await.unwrap();
    })
    .await;
}

/// Other sites can send requests over the browser of an operator, without reading the responses.
#[tokio::test(flavor = "multi_thread")]
async fn a_page_of_another_site_may_only_link_to_a_view() {
    let locks = named("orders");
    let (answered, mut answers) = mpsc::unbounded_channel();
    let note = move |request: Request, next: Next| {
        let (answered, uri) = (answered.clone(), request.uri().to_string());
        async move {
            let response = next.run(request).await;
            let _ = answered.send((uri, response.status().as_u16()));
            response
        }
    };
    let inspector = Inspector::new(locks.clone());
    let app = |_: &str| {
        Router::new()
            .nest_service("/locks", inspector)
            .layer(from_fn(note))
    };
    let url = format!("{}/locks", serve(app).await);
    let _guard = locks.exclusive("order:42").acquire().await.unwrap();
    let rule =
        json!({ "prefetch": [{ "urls": [format!("{url}?prefix=p")], "eagerness": "immediate" }] });
    let link = format!("<a href='{url}'>locks</a><script type=speculationrules>{rule}</script>");
    let evil = serve(|_| Router::new().route("/", get(async move || Html(link)))).await;
    let evil = evil.replace("127.0.0.1", "localhost");
    Browser::run(async |page| {
        page.goto(&evil).await.unwrap();
        let open = "const [url, done] = arguments;
            new EventSource(`${url}?format=events`);
            new WebSocket(url.replace('http', 'ws'));
            const ask = (query) => fetch(`${url}?${query}`, { mode: 'no-cors' });
            const asked = ['format=events', 'format=json', 'view=health'].map(ask);
            Promise.allSettled(asked).then(done)";
        page.execute_async(open, vec![json!(url)]).await.unwrap();
        // Those of the script, and the one that the browser makes in advance.
        for _ in 0..6 {
            let (uri, status) = timeout(LONG, answers.recv()).await.unwrap().unwrap();
            assert_eq!(status, 403, "{uri}");
        }
        click(page, Locator::Css("a")).await;
        becomes(page, "shown", |shown| shown.contains("order:42")).await;
    })
    .await;
}

/// A link may name text that the browser is to show, and opens what hides it. Another site may be
/// able to keep the style sheet from being loaded, as by a path that is too long with its query.
#[tokio::test(flavor = "multi_thread")]
async fn a_link_of_another_site_does_not_show_the_button() {
    for has_style in [true, false] {
        does_not_show_the_button(has_style).await;
    }
}

/// Serves an inspector that may revoke, with its style sheet or without.
async fn revocable(has_style: bool) -> (LockClient, String) {
    let locks = named("orders");
    let inspector = Inspector::new(locks.clone());
    let answer = move |request: Request, next: Next| async move {
        let query = request.uri().query().unwrap_or_default();
        match query.contains("asset=style") && !has_style {
            true => StatusCode::URI_TOO_LONG.into_response(),
            false => next.run(request).await,
        }
    };
    let app = |origin: &str| {
        let router = Router::new().nest_service("/locks", inspector.allow_revoke(origin));
        router.layer(from_fn(answer))
    };
    let url = format!("{}/locks", serve(app).await);
    (locks, url)
}

async fn does_not_show_the_button(has_style: bool) {
    let (locks, url) = revocable(has_style).await;
    let _guard = locks.exclusive("order:42").acquire().await.unwrap();
    let texts = [
        "The%20holder%20may%20still",
        "Revoke%20from",
        "once.,Revoke",
    ];
    let link = |text| format!("<a href='{url}?key=order:42#:~:text={text}'>{text}</a> ");
    let links: String = texts.into_iter().map(link).collect();
    let evil = serve(|_| Router::new().route("/", get(async move || Html(links)))).await;
    let evil = evil.replace("127.0.0.1", REBOUND);
    Browser::run(async |page| {
        for text in texts {
            page.goto(&evil).await.unwrap();
            click(page, Locator::LinkText(text)).await;
            becomes(page, "shown", |shown| shown.contains("Revoke")).await;
            // The browser looks for the text after it has shown the page.
            sleep(Duration::from_millis(500)).await;
            let button = page.find(Locator::Css("details button")).await.unwrap();
            assert!(!button.is_displayed().await.unwrap(), "{text}");
        }
        revoke(page).await;
        becomes(page, "revoked", |shown| shown.contains("Revoked.")).await;
    })
    .await;
}

/// A link may name an element to which the browser scrolls, half a second later if it names text
/// that does not exist as well. Something else is then where the viewer is about to press.
#[tokio::test(flavor = "multi_thread")]
async fn a_link_of_another_site_does_not_scroll_a_view() {
    let locks = named("orders");
    let inspector = Inspector::new(locks.clone());
    let app = |origin: &str| Router::new().nest_service("/locks", inspector.allow_revoke(origin));
    let url = format!("{}/locks", serve(app).await);
    let mut guards = Vec::new();
    for number in 0..100 {
        let request = locks.exclusive(format!("order:{number}"));
        guards.push(request.acquire().await.unwrap());
    }
    let fragments = ["state", "state:~:text=zzzqq", ":~:text=order:99"];
    let link = |fragment| format!("<a href='{url}#{fragment}'>{fragment}</a> ");
    let links: String = fragments.into_iter().map(link).collect();
    let evil = serve(|_| Router::new().route("/", get(async move || Html(links)))).await;
    let evil = evil.replace("127.0.0.1", REBOUND);
    Browser::run(async |page| {
        for fragment in fragments {
            page.goto(&evil).await.unwrap();
            click(page, Locator::LinkText(fragment)).await;
            becomes(page, "shown", |shown| shown.contains("order:99")).await;
            sleep(Duration::from_millis(1_200)).await;
            let top = evaluate(page, "return window.scrollY").await;
            assert_eq!(top, json!(0), "{fragment}");
        }
    })
    .await;
}

/// Opening the button moves nothing sideways, and puts it beside what has opened it.
#[tokio::test(flavor = "multi_thread")]
async fn two_presses_at_one_place_do_not_revoke_wherever_the_page_is_scrolled() {
    const SIDES: &str = "
        const sides = (of) => (({ left, right }) => [left, right])(of.getBoundingClientRect());
        const details = document.querySelector('details');
        const summary = details.querySelector('summary');
        details.open = false;
        const closed = sides(summary);
        details.open = true;
        const [open, button] = [summary, details.querySelector('button')].map(sides);
        return { moved: closed.join() !== open.join(), beside: open[1] < button[0] };";
    for has_style in [true, false] {
        let (locks, url) = revocable(has_style).await;
        let _guard = locks.exclusive("order:42").acquire().await.unwrap();
        Browser::run(async |page| {
            for width in [WIDTHS[0], 700, WIDTHS[1]] {
                page.goto(&format!("{url}?key=order:42")).await.unwrap();
                browser::resize(page, width).await;
                let place = format!("the button at {width}, with the style sheet: {has_style}");
                let wanted = json!({ "moved": false, "beside": true });
                becomes_equal(page, SIDES, wanted, &place).await;
                let is_cut = "return document.documentElement.scrollWidth > window.innerWidth";
                let is_cut = evaluate(page, is_cut).await;
                assert!(is_cut == json!(false) || !has_style, "{place} is cut off");
            }
        })
        .await;
    }
}

/// DNS rebinding: to the browser, the pages are those of the other site.
#[tokio::test(flavor = "multi_thread")]
async fn a_site_whose_name_resolves_to_the_pages_reads_and_revokes_nothing() {
    let locks = named("orders");
    let url = pages(Inspector::new(locks.clone())).await;
    let guard = locks.exclusive("order:42").acquire().await.unwrap();
    let seen = locks.inspect("order:42").await.unwrap().holders[0].id;
    let rebound = url.replace("127.0.0.1", REBOUND);
    Browser::run(async |page| {
        page.goto(&rebound).await.unwrap();
        becomes(page, "refused", |shown| {
            shown.contains("this host is not allowed")
        })
        .await;
        let origin = evaluate(page, "return origin").await;
        assert!(origin.as_str().unwrap().contains(REBOUND), "{origin}");
        // What a script of the site can send: to the browser, it is the page itself.
        let ask = "const [method, form, done] = arguments;
            const body = form && new URLSearchParams(form);
            fetch('?format=json', { method, body }).then(async (it) => done([it.status, await it.text()]))";
        let form = format!("key=order:42&holder={seen}");
        for (method, form) in [("GET", json!(null)), ("POST", json!(form))] {
            let answer = page.execute_async(ask, vec![json!(method), form]).await;
            let answer = answer.unwrap();
            assert_eq!(answer[0], 421, "{method}: {answer}");
            assert!(!answer.to_string().contains("order:42"), "{answer}");
        }
        guard.verify().await.unwrap();
        page.goto(&url).await.unwrap();
        becomes(page, "shown", |shown| shown.contains("order:42")).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_thousand_locks_have_pages() {
    let server = RedisServer::builder().start().await;
    let locks = LockClient::connect(&server.url()).await.unwrap();
    // A hundred calls at a time: the answers of all come in time, also beside other browsers.
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..100 {
        let locks = locks.clone();
        tasks.spawn(async move {
            let mut guards = Vec::new();
            for number in (task * 100)..(task * 100 + 100) {
                let lock = locks.exclusive(format!("order:{number:05}"));
                guards.push(lock.acquire().await.unwrap());
            }
            guards
        });
    }
    let guards = tasks.join_all().await;
    let url = pages(Inspector::new(locks.clone())).await;
    Browser::run(async |page| {
        page.goto(&url).await.unwrap();
        assert!(text(page).await.contains("1 to 100 of 10000 names"));
        click(page, Locator::LinkText("Next page")).await;
        becomes(page, "the second page", |shown| {
            shown.contains("101 to 200 of 10000 names") && shown.contains("order:00199")
        })
        .await;
        becomes(page, "it is live", |shown| shown.contains("Live")).await;
        let search = page.find(Locator::Css("#prefix")).await.unwrap();
        search.send_keys("order:0999").await.unwrap();
        search.send_keys(&Key::Enter.to_string()).await.unwrap();
        becomes(page, "the search", |shown| {
            shown.contains("1 to 10 of 10 names")
        })
        .await;
    })
    .await;
    drop(guards);
}

/// A page that is written anew each second must not take the focus away, nor close a button.
#[tokio::test(flavor = "multi_thread")]
async fn a_lock_is_revoked_by_keyboard_while_the_page_changes() {
    let locks = named("orders");
    let url = pages(Inspector::new(locks.clone())).await;
    let guard = locks.shared("order:42").acquire().await.unwrap();
    Browser::run(async |page| {
        page.goto(&format!("{url}?key=order%3A42")).await.unwrap();
        becomes(page, "it is live", |shown| shown.contains("Live")).await;
        let press = async |key: Key| {
            let active = page.active_element().await.unwrap();
            active.send_keys(&key.to_string()).await.unwrap();
        };
        for _ in 0..10 {
            press(Key::Tab).await;
            if page
                .active_element()
                .await
                .unwrap()
                .tag_name()
                .await
                .unwrap()
                == "summary"
            {
                break;
            }
        }
        press(Key::Enter).await;
        press(Key::Tab).await;
        let tag = "return document.activeElement.tagName";
        assert_eq!(evaluate(page, tag).await, json!("BUTTON"));
        // Another reader comes before it and leaves again.
        let other = locks.shared("order:42").acquire().await.unwrap();
        becomes(page, "two holders", |shown| shown.contains("Holders: 2")).await;
        other.release().await.unwrap();
        becomes(page, "one holder", |shown| shown.contains("Holders: 1")).await;
        assert_eq!(
            evaluate(page, tag).await,
            json!("BUTTON"),
            "the focus is kept"
        );
        press(Key::Enter).await;
        becomes(page, "revoked", |shown| shown.contains("Revoked.")).await;
        assert_eq!(
            guard.lost().await.kind(),
            LockErrorKind::Lost(Loss::Revoked)
        );
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lock_is_revoked_without_javascript() {
    let locks = named("orders");
    let url = pages(Inspector::new(locks.clone())).await;
    let guard = locks.exclusive("order:42").acquire().await.unwrap();
    Browser::without_javascript(async |page| {
        page.goto(&url).await.unwrap();
        click(page, Locator::LinkText("order:42")).await;
        revoke(page).await;
        let until = Instant::now() + LONG;
        loop {
            let shown = page.source().await.unwrap();
            assert!(!shown.contains(">Live<"), "{shown}");
            if shown.contains("Revoked.") {
                break;
            }
            assert!(Instant::now() < until, "{shown}");
            sleep(Duration::from_millis(50)).await;
        }
    })
    .await;
    assert_eq!(
        guard.lost().await.kind(),
        LockErrorKind::Lost(Loss::Revoked)
    );
}

/// At each width nothing is cut off. With `LOCK_TESTS_SCREENSHOTS`, a directory, the pages are kept
/// as pictures.
#[tokio::test(flavor = "multi_thread")]
async fn the_pages_fit_a_telephone() {
    let server = RedisServer::builder().start().await;
    let client = async |name: &str| {
        let builder = LockClient::builder().identity(name);
        builder.connect(&server.url()).await.unwrap()
    };
    let (one, other) = (
        client("orders@web-1:4711").await,
        client("orders@web-2:822").await,
    );
    let long = format!("tenant:{}:order:{}", "a".repeat(100), "7".repeat(100));
    let guards = [
        one.exclusive("stock:sneaker")
            .name("sell")
            .acquire()
            .await
            .unwrap(),
        one.shared("report:2026-11").acquire().await.unwrap(),
        other.shared("report:2026-11").acquire().await.unwrap(),
        other.exclusive(long.as_str()).acquire().await.unwrap(),
        one.permits("exports", 3.try_into().unwrap())
            .acquire()
            .await
            .unwrap(),
    ];
    let waiting = tokio::spawn(other.exclusive("stock:sneaker").wait(LONG * 2).acquire());
    let refused = one
        .exclusive("stock:sneaker")
        .name("shop::sell")
        .no_wait()
        .acquire();
    refused.await.unwrap_err();
    let url = pages(Inspector::new(one.clone())).await;
    Browser::run(async |page| {
        for (name, query) in [
            ("locks", ""),
            ("lock", "?key=stock%3Asneaker"),
            ("long", &format!("?key={}", long.replace(':', "%3A"))),
            ("activity", "?view=activity"),
            ("health", "?view=health"),
        ] {
            for width in WIDTHS {
                page.goto(&format!("{url}{query}")).await.unwrap();
                browser::resize(page, width).await;
                becomes(page, "it is live", |shown| shown.contains("Live")).await;
                let inner = "return window.innerWidth";
                becomes_equal(page, inner, json!(width), "the window is smaller").await;
                let is_cut = "return document.documentElement.scrollWidth > window.innerWidth";
                let place = format!("{name} at {width} is cut off");
                becomes_equal(page, is_cut, json!(false), &place).await;
                browser::keep_picture(page, &format!("{name}-{width}")).await;
            }
        }
    })
    .await;
    waiting.abort();
    drop(guards);
}
