//! What a browser sends to the pages for operators, and the headers of a caller over gRPC.

use bytes::Bytes;
use http::{HeaderValue, Request, header};

use super::{hosts::Hosts, query::Query, revoke::Form};
use crate::{
    fuzz::{is_readable, within_bounds},
    protocol::wire,
};

/// A query, a host and a time-out, and a form behind them.
#[test]
fn requests() {
    bolero::check!().for_each(|input: &[u8]| {
        let mut lines = input.splitn(4, |byte| *byte == b'\n');
        let mut next = || lines.next().unwrap_or_default();
        let (query, host, timeout, form) = (next(), next(), next(), next());
        within_bounds(input, || {
            let form_type = "application/x-www-form-urlencoded";
            let mut request = Request::post("/").header(header::CONTENT_TYPE, form_type);
            for (name, value) in [("host", host), ("accept", host), ("grpc-timeout", timeout)] {
                if let Ok(value) = HeaderValue::from_bytes(value) {
                    request = request.header(name, value);
                }
            }
            let uri = [b"/locks?", query].concat();
            let uri = http::Uri::try_from(uri).unwrap_or_default();
            let (mut parts, ()) = request.uri(uri).body(()).unwrap().into_parts();
            Hosts::default().allow_request(&parts);
            wire::patience(&parts.headers);
            wire::is_grpc(&parts.headers);
            if let Ok(asked) = Query::parse(&parts) {
                let link = format!("/locks{}", asked.view.link(asked.format));
                parts.uri = link.parse().unwrap();
                assert_eq!(Query::parse(&parts), Ok(asked), "{link}");
            }
            if let Ok(form) = Form::parse(&parts, &Bytes::copy_from_slice(form)) {
                is_readable(&form.key);
            }
        });
    });
}
