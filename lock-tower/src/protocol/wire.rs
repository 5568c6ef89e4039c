//! What a request says of its caller: the kind of response that it expects, and its deadline.

use std::time::Duration;

use http::{HeaderMap, HeaderValue, header::CONTENT_TYPE};

/// The kind of response that a caller over HTTP expects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Wire {
    /// Status codes and response bodies.
    Http,
    /// gRPC: statuses are sent in trailers. The request is a `POST` over HTTP/2 with the content
    /// type `application/grpc`, and its route that of a gRPC method: `/package.Service/Method`.
    Grpc,
}

/// The properties of a caller that matter to refusals.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct Caller {
    pub(crate) wire: Wire,
    /// The wait for the lock was cut short, because the caller's deadline is earlier.
    pub(crate) hurried: bool,
}

/// Accepts `application/grpc` and `application/grpc+proto`, but not `application/grpc-web`, which
/// has no trailers of its own.
pub(crate) fn is_grpc(headers: &HeaderMap) -> bool {
    const GRPC: &[u8] = b"application/grpc";
    let content_type = headers
        .get(CONTENT_TYPE)
        .and_then(|value| value.as_bytes().split_at_checked(GRPC.len()));
    content_type.is_some_and(|(start, rest)| {
        start.eq_ignore_ascii_case(GRPC) && matches!(rest.first(), None | Some(b'+' | b';' | b' '))
    })
}

#[cfg(feature = "once")]
pub(crate) fn is_grpc_web(headers: &HeaderMap) -> bool {
    const GRPC_WEB: &[u8] = b"application/grpc-web";
    let content_type = headers.get(CONTENT_TYPE).map(HeaderValue::as_bytes);
    let start = content_type.and_then(|it| it.get(..GRPC_WEB.len()));
    start.is_some_and(|start| start.eq_ignore_ascii_case(GRPC_WEB))
}

/// Returns whether the headers or trailers of a gRPC response carry the status of an error.
pub(super) fn is_grpc_error(headers: &HeaderMap) -> bool {
    headers
        .get("grpc-status")
        .is_some_and(|status| status != "0")
}

/// Returns whether the status of a gRPC response may be another one for the next request, or is
/// missing.
#[cfg(feature = "once")]
pub(crate) fn is_transient_in_grpc(headers: &HeaderMap) -> bool {
    const TRANSIENT: [&str; 8] = ["1", "2", "4", "8", "10", "13", "14", "15"];
    let status = headers.get("grpc-status");
    status.is_none_or(|status| TRANSIENT.iter().any(|it| status == it))
}

/// The longest time that is reserved for sending the response before the deadline of the caller.
/// Without it, the timers of the server and the client, which have the same deadline and started
/// earlier, would always fire first.
const WAY_BACK: Duration = Duration::from_millis(50);

/// The [`grpc-timeout`] of a request: at most eight digits and a unit. A malformed value is
/// ignored.
///
/// [`grpc-timeout`]: https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md#requests
fn grpc_timeout(value: &HeaderValue) -> Option<Duration> {
    let (number, unit) = value
        .to_str()
        .ok()?
        .split_at_checked(value.len().checked_sub(1)?)?;
    if number.is_empty() || number.len() > 8 || !number.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let number: u64 = number.parse().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(number * 3_600),
        "M" => Duration::from_secs(number * 60),
        "S" => Duration::from_secs(number),
        "m" => Duration::from_millis(number),
        "u" => Duration::from_micros(number),
        "n" => Duration::from_nanos(number),
        _ => return None,
    })
}

/// Returns how long a caller of a gRPC method waits for the response.
pub(crate) fn patience(headers: &HeaderMap) -> Option<Duration> {
    let deadline = headers.get("grpc-timeout").and_then(grpc_timeout)?;
    Some(deadline - (deadline / 10).min(WAY_BACK))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grpc_timeout_is_digits_and_a_unit() {
        for (text, timeout) in [
            ("1S", Some(Duration::from_secs(1))),
            ("2M", Some(Duration::from_secs(120))),
            ("99999999H", Some(Duration::from_secs(99_999_999 * 3_600))),
            ("0m", Some(Duration::ZERO)),
            ("100u", Some(Duration::from_micros(100))),
            ("7n", Some(Duration::from_nanos(7))),
            ("", None),
            ("S", None),
            ("1", None),
            ("1s", None),
            ("+1S", None),
            ("-1S", None),
            ("1.5S", None),
            ("100000000S", None),
            ("1\u{e9}", None),
        ] {
            let value = HeaderValue::from_bytes(text.as_bytes()).unwrap();
            assert_eq!(grpc_timeout(&value), timeout, "{text}");
        }
    }
}
