//! Templates of keys, and the requests that fill them.

use http::{HeaderName, HeaderValue, Request};

use super::KeyTemplate;
use crate::{
    fuzz::{is_readable, refused_readably, within_bounds},
    key::{KeyExtractor as _, Target},
};

/// A template, the query of a request, and the value of each of its headers.
#[test]
fn requests() {
    bolero::check!().for_each(|input: &[u8]| {
        let text = String::from_utf8_lossy(input);
        let mut lines = text.splitn(3, '\n');
        let mut next = || lines.next().unwrap_or_default();
        let (template, query, header) = (next(), next(), next());
        within_bounds(input, || {
            let Some(template) = refused_readably(KeyTemplate::new(template)) else {
                return;
            };
            let again = template.to_string().parse::<KeyTemplate>().unwrap();
            assert_eq!(again.parts, template.parts);
            let uri = format!("/shop.Orders/Pay?{query}");
            let Ok(mut request) = Request::post(uri).body(()) else {
                return;
            };
            if let Ok(value) = HeaderValue::from_bytes(header.as_bytes()) {
                let headers = request.headers_mut();
                headers.insert(HeaderName::from_static("a"), value);
            }
            match template.target(&mut request) {
                Ok(Target::Lock(key)) => is_readable(&key),
                Ok(_) => {}
                Err(error) => is_readable(&error),
            }
        });
    });
}
