//! What is stored of a response, and how it is repeated.

use bytes::Bytes;
use futures_util::{StreamExt as _, TryStreamExt, stream};
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode, request::Parts};
use http_body::{Body, Frame};
use http_body_util::{BodyStream, StreamBody};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::{Settings, body::OnceBody};
use crate::protocol::{
    body::{BoxError, Buffered},
    wire::{is_grpc, is_grpc_web, is_transient_in_grpc},
};

/// The header of a response that is repeated.
const REPLAYED: HeaderName = HeaderName::from_static("idempotent-replayed");

/// The digest of a request.
pub(super) type Fingerprint = [u8; 32];

/// Returns a digest of the request. A part that differs in length cannot make up for another.
pub(super) fn fingerprint(parts: &Parts, body: &Bytes) -> Fingerprint {
    // A nested router has removed its prefix from the other one.
    let uri = parts
        .extensions
        .get::<axum::extract::OriginalUri>()
        .map_or(&parts.uri, |original| &original.0);
    let target = uri.path_and_query().map_or("", |it| it.as_str());
    let mut digest = Sha256::new();
    for part in [parts.method.as_str().as_bytes(), target.as_bytes(), body] {
        digest.update((part.len() as u64).to_be_bytes());
        digest.update(part);
    }
    digest.finalize().into()
}

/// What is stored of a response.
#[derive(Serialize, Deserialize)]
struct Stored<'b> {
    fingerprint: Fingerprint,
    status: u16,
    headers: Headers,
    /// `None` if it was too long.
    body: Option<&'b [u8]>,
}

/// Names and values. The trailers follow what is [`Stored`].
type Headers = Vec<(String, Vec<u8>)>;

/// The room for the status, the headers and the trailers of a stored response, in bytes.
pub(super) const MOST_OF_HEAD: usize = 16 * 1024;

impl Stored<'_> {
    /// Returns the bytes that are stored: with headers, body and trailers, if all of them are not
    /// longer than `most`.
    fn written(self, trailers: Option<&HeaderMap>, most: usize) -> Option<Vec<u8>> {
        let trailers = trailers.map(listed).unwrap_or_default();
        let of = |headers: &Headers| -> usize {
            let lengths = headers
                .iter()
                .map(|(name, value)| name.len() + value.len() + 8);
            lengths.sum()
        };
        let body = self.body.map_or(0, <[u8]>::len);
        let length = 64 + body + of(&self.headers) + of(&trailers);
        if length <= most {
            // A vector that grows has room for twice of it.
            let room = Vec::with_capacity(length);
            return postcard::to_extend(&(&self, trailers), room).ok();
        }
        let not_kept = Self {
            headers: Vec::new(),
            body: None,
            ..self
        };
        postcard::to_allocvec(&not_kept).ok()
    }
}

/// Why a stored response cannot be repeated.
pub(super) enum Unfit {
    /// Another version has stored it.
    Unreadable,
    /// It belongs to another request.
    Reused,
    /// It was too long.
    NotKept,
}

fn listed<'h>(headers: impl IntoIterator<Item = (&'h HeaderName, &'h HeaderValue)>) -> Headers {
    let headers = headers.into_iter();
    let listed = headers.map(|(name, value)| (name.as_str().to_owned(), value.as_bytes().to_vec()));
    listed.collect()
}

fn read(headers: Headers, into: &mut HeaderMap) {
    for (name, value) in headers {
        let name = HeaderName::try_from(name).ok();
        if let Some((name, value)) = name.zip(HeaderValue::try_from(value).ok()) {
            into.append(name, value);
        }
    }
}

/// A response that has been served, and the bytes that are stored of it: `None` if it is not kept.
pub(super) struct Collected {
    pub(super) stored: Option<Vec<u8>>,
    pub(super) response: Response<OnceBody>,
}

impl Collected {
    /// Reads the body of a response that is to be stored, as far as it can be.
    pub(super) async fn of<R>(
        response: Response<R>,
        fingerprint: Fingerprint,
        settings: &Settings,
    ) -> Self
    where
        R: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
    {
        // Also in reply to a request that does not look like gRPC, which tonic serves as well.
        let is_grpc = is_grpc(response.headers());
        let is_stored = is_grpc || (settings.is_stored)(response.status());
        // The status of gRPC-Web is within the body.
        if !is_stored || is_grpc_web(response.headers()) {
            let response = response.map(OnceBody::new);
            let stored = None;
            return Self { stored, response };
        }
        let (parts, body) = response.into_parts();
        let most = settings.terms.most_of_response;
        let Buffered {
            data,
            trailers,
            next,
            rest,
        } = Buffered::read(body, most).await;
        let is_failed = matches!(next, Some(Err(_)));
        let status = trailers.as_ref().unwrap_or(&parts.headers);
        // A gRPC response that is longer has no status so far.
        let is_kept = !is_grpc || next.is_some() || !is_transient_in_grpc(status);
        let stored = (is_kept && !is_failed).then(|| {
            let kept = parts
                .headers
                .iter()
                .filter(|(name, _)| settings.headers.contains(name) || is_grpc && is_of_grpc(name));
            let stored = Stored {
                fingerprint,
                status: parts.status.as_u16(),
                headers: listed(kept),
                body: next.is_none().then_some(&data[..]),
            };
            stored.written(trailers.as_ref(), most.saturating_add(MOST_OF_HEAD))
        });
        let body = match next {
            None => ended(data, trailers),
            Some(next) => {
                let frames = stream::iter([Ok(Frame::data(data)), next]);
                let rest = TryStreamExt::map_err(BodyStream::new(rest), Into::into);
                OnceBody::new(StreamBody::new(frames.chain(rest)))
            }
        };
        Self {
            stored: stored.flatten(),
            response: Response::from_parts(parts, body),
        }
    }
}

/// Returns a body that has been read. One without trailers says that it has ended, as gRPC needs
/// for an error without a message.
fn ended(data: Bytes, trailers: Option<HeaderMap>) -> OnceBody {
    let Some(trailers) = trailers else {
        return OnceBody::of(data);
    };
    let data = (!data.is_empty()).then(|| Frame::data(data));
    let frames = data.into_iter().chain([Frame::trailers(trailers)]);
    OnceBody::new(StreamBody::new(stream::iter(frames.map(Ok::<_, BoxError>))))
}

/// Returns whether a header of a gRPC response is a part of its outcome.
fn is_of_grpc(name: &HeaderName) -> bool {
    name.as_str().starts_with("grpc-")
}

/// Returns the stored response to an equal request.
pub(super) fn replay(stored: &[u8], fingerprint: Fingerprint) -> Result<Response<OnceBody>, Unfit> {
    let (stored, rest) =
        postcard::take_from_bytes::<Stored>(stored).map_err(|_| Unfit::Unreadable)?;
    // An earlier version has stored none.
    let trailers = postcard::from_bytes::<Headers>(rest).unwrap_or_default();
    if stored.fingerprint != fingerprint {
        return Err(Unfit::Reused);
    }
    let body = Bytes::copy_from_slice(stored.body.ok_or(Unfit::NotKept)?);
    let trailers = (!trailers.is_empty()).then(|| {
        let mut map = HeaderMap::new();
        read(trailers, &mut map);
        map
    });
    let body = ended(body, trailers);
    let mut response = Response::new(body);
    *response.status_mut() = StatusCode::from_u16(stored.status).map_err(|_| Unfit::Unreadable)?;
    read(stored.headers, response.headers_mut());
    let replayed = HeaderValue::from_static("true");
    response.headers_mut().insert(REPLAYED, replayed);
    Ok(response)
}
