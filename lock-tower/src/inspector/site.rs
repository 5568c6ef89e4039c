//! The site whose page makes a request, as browsers report it.

use http::{HeaderValue, request::Parts};

use super::query::Format;

/// Returns whether a view may be shown: not within a page of another origin, which cannot read it
/// but could use up the streams of events and the reads of the store. It may link to the views.
///
/// Browsers send these headers to services that they reach over HTTPS or as `localhost` or a
/// loopback address, and no page can change them. Without them, the request is answered, unless it
/// has an origin: a page of the inspector sends none with a view, and a WebSocket of another page
/// has no other header. A view that a page of any site fetches in advance has no site, as if the
/// viewer had entered its address, but a purpose.
pub(super) fn may_show(parts: &Parts, format: Format) -> bool {
    let header = |name| parts.headers.get(name).map(HeaderValue::as_bytes);
    match header("sec-fetch-site") {
        None => header("origin").is_none(),
        Some(b"same-origin") => true,
        Some(_) => {
            let is_link = header("sec-fetch-mode") == Some(b"navigate")
                && header("sec-fetch-dest") == Some(b"document")
                && header("sec-purpose").is_none();
            is_link && format != Format::Events
        }
    }
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;

    #[test]
    fn another_site_may_only_link_to_a_view() {
        let request = |site: &str, mode: &str, dest: &str| {
            let request = Request::get("/").header("sec-fetch-site", site);
            let request = request.header("sec-fetch-mode", mode);
            request.header("sec-fetch-dest", dest)
        };
        let shows = |site: &str, mode: &str, dest: &str, format| {
            let request = request(site, mode, dest).body(()).unwrap();
            may_show(&request.into_parts().0, format)
        };
        for format in [Format::Html, Format::Json, Format::Events] {
            let is_page = format != Format::Events;
            assert!(shows("same-origin", "cors", "empty", format));
            let fetched = request("none", "navigate", "document").header("sec-purpose", "prefetch");
            assert!(!may_show(&fetched.body(()).unwrap().into_parts().0, format));
            for site in ["none", "cross-site", "same-site"] {
                assert_eq!(shows(site, "navigate", "document", format), is_page);
                for (mode, dest) in [
                    ("no-cors", "empty"),
                    ("cors", "empty"),
                    ("no-cors", "image"),
                    ("navigate", "iframe"),
                ] {
                    assert!(!shows(site, mode, dest, format), "{site} {mode} {dest}");
                }
            }
            let plain = || Request::get("/");
            assert!(may_show(&plain().body(()).unwrap().into_parts().0, format));
            let socket = plain().header("origin", "http://other.example");
            assert!(!may_show(&socket.body(()).unwrap().into_parts().0, format));
        }
    }
}
