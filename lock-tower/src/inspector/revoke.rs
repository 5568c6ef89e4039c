//! Revocations.

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header, request::Parts};
use http_body::Body;
use lock_runtime::{
    LockClient, LockError, LockErrorKind, LockKey, LockKind,
    operator::{HolderId, Revocation},
    text::visible,
};
use serde_json::json;

use super::{
    Content, Inspector, InspectorBody, View,
    content::{error_json, status_of},
    json as respond_json,
    query::{accepts_json, parse_key, parse_kind},
    text,
};
use crate::protocol::body::{BoxError, Buffered};

/// More than the longest key takes when each of its bytes is escaped.
const MAX_FORM_BYTES: usize = 4096;

/// The holder that was shown.
#[derive(Clone)]
pub(super) struct Form {
    pub(super) key: LockKey,
    kind: LockKind,
    holder: HolderId,
}

pub(super) async fn respond<B>(
    inspector: &Inspector,
    parts: &Parts,
    body: B,
) -> Response<InspectorBody>
where
    B: Body,
    B::Error: Into<BoxError>,
{
    if !inspector.may_revoke() {
        return text(
            StatusCode::FORBIDDEN,
            "this page is read only; `allow_revoke` changes that",
        );
    }
    if !is_allowed(parts, &inspector.origins) {
        inspector.warn(
            "origin",
            "revocation refused: sent by a page of another origin",
            parts,
        );
        let message = "the header Origin has to be one that `allow_revoke` names";
        return text(StatusCode::FORBIDDEN, message);
    }
    let caller = inspector.caller_of(parts);
    let body = Buffered::read(body, MAX_FORM_BYTES).await;
    if body.next.is_some() {
        return text(
            StatusCode::BAD_REQUEST,
            "the form is too long or incomplete",
        );
    }
    let form = match Form::parse(parts, &body.data) {
        Ok(form) => form,
        Err(mistake) => return text(StatusCode::BAD_REQUEST, mistake),
    };
    let Form { key, kind, .. } = form.clone();
    // A task of its own: a caller that hangs up must not end it between the call and the log.
    let locks = inspector.locks.clone();
    let revoked = tokio::spawn(async move {
        let outcome = form.revoke(&locks).await;
        let Form { key, holder, .. } = form;
        let code = match &outcome {
            Ok(reply) => reply_code(*reply),
            Err(error) => error.code(),
        };
        let key = visible(key.as_str());
        tracing::warn!(lock.key = key, %holder, caller, outcome = code, "revocation by an operator");
        (outcome, code)
    });
    let Ok((outcome, code)) = revoked.await else {
        return text(
            StatusCode::SERVICE_UNAVAILABLE,
            "the service is shutting down",
        );
    };
    if accepts_json(parts) {
        return match outcome {
            Ok(reply) => respond_json(status_of_reply(reply), &json!({ "outcome": code })),
            Err(error) => respond_json(status_of(&error), &error_json(&error)),
        };
    }
    let (status, message) = match &outcome {
        Ok(reply) => (status_of_reply(*reply), message(*reply).to_owned()),
        Err(error) if error.kind() == LockErrorKind::Unavailable => {
            let message = format!("It is not known whether it was revoked: {error:#}");
            (status_of(error), visible(&message))
        }
        Err(error) => (
            status_of(error),
            visible(&format!("Not revoked: {error:#}")),
        ),
    };
    let view = View::Lock { key, kind };
    let content = Content::load(&inspector.locks, &view).await;
    inspector.page(&view, &content, Some((status, &message)))
}

impl Form {
    pub(super) fn parse(parts: &Parts, body: &Bytes) -> Result<Self, &'static str> {
        let content_type = parts.headers.get(header::CONTENT_TYPE);
        let content_type = content_type.and_then(|value| value.to_str().ok());
        let media_type = content_type.unwrap_or_default().split(';').next();
        if media_type.map(str::trim) != Some("application/x-www-form-urlencoded") {
            return Err("the content type is application/x-www-form-urlencoded");
        }
        let (mut key, mut kind, mut holder) = (None, LockKind::Lock, None);
        for (name, value) in form_urlencoded::parse(body) {
            match &*name {
                "key" => key = Some(parse_key(&value)?),
                "kind" => kind = parse_kind(&value)?,
                "holder" => holder = value.parse().ok(),
                _ => {}
            }
        }
        let (Some(key), Some(holder)) = (key, holder) else {
            return Err("the fields are key, holder (as shown), and kind (lock or permits)");
        };
        Ok(Self { key, kind, holder })
    }

    async fn revoke(&self, locks: &LockClient) -> Result<Revocation, LockError> {
        let revoking = locks.revoke(&self.key).holder(self.holder);
        match self.kind {
            LockKind::Permits => revoking.permits().await,
            _ => revoking.await,
        }
    }
}

fn reply_code(reply: Revocation) -> &'static str {
    match reply {
        Revocation::Revoked => "revoked",
        Revocation::NotHeld => "not_held",
        _ => "changed",
    }
}

fn status_of_reply(reply: Revocation) -> StatusCode {
    match reply {
        Revocation::Revoked => StatusCode::OK,
        _ => StatusCode::CONFLICT,
    }
}

fn message(reply: Revocation) -> &'static str {
    match reply {
        Revocation::Revoked => "Revoked. The holder notices at once, or at its next renewal.",
        Revocation::NotHeld => "Not revoked: the lock was not held any more.",
        _ => "Not revoked: this holder no longer had the lock.",
    }
}

/// Whether the request was sent by a page of an allowed origin. Browsers add the header `Origin` to
/// each `POST`, and no script can change it.
fn is_allowed(parts: &Parts, origins: &[HeaderValue]) -> bool {
    let mut sites = parts.headers.get_all("sec-fetch-site").iter();
    let mut named = parts.headers.get_all(header::ORIGIN).iter();
    let origin = named.next().filter(|_| named.next().is_none());
    sites.all(|site| site == "same-origin") && origin.is_some_and(|origin| origins.contains(origin))
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;

    fn accepts(headers: &[(&str, &str)]) -> bool {
        let mut request = Request::post("/");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let origins = ["https://ops.example.com", "http://127.0.0.1:8080"];
        let origins = origins.map(HeaderValue::from_static);
        is_allowed(&request.body(()).unwrap().into_parts().0, &origins)
    }

    #[test]
    fn the_origin_has_to_be_one_that_is_allowed() {
        let ours = ("origin", "https://ops.example.com");
        assert!(accepts(&[ours]));
        assert!(accepts(&[("origin", "http://127.0.0.1:8080")]));
        for origin in [
            "http://ops.example.com",
            "https://ops.example.com:444",
            "https://ops.example.com.evil.example",
            "https://evil.example",
            "http://127.0.0.1:8081",
            "null",
            "",
            "https://ops.example.com/",
            "https://user@ops.example.com",
        ] {
            assert!(!accepts(&[("origin", origin)]), "{origin}");
        }
        assert!(!accepts(&[]), "no origin");
        assert!(!accepts(&[ours, ("origin", "https://evil.example")]));
        // A page whose own name resolves to the address of this service.
        assert!(!accepts(&[
            ("origin", "http://evil.example"),
            ("host", "evil.example")
        ]));
        assert!(accepts(&[ours, ("sec-fetch-site", "same-origin")]));
        assert!(!accepts(&[ours, ("sec-fetch-site", "same-site")]));
        assert!(!accepts(&[ours, ("sec-fetch-site", "cross-site")]));
    }
}
