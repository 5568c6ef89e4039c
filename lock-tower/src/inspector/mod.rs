//! [`Inspector`]: pages for operators about the locks of a store.
//!
//! | view | query | shows |
//! |---|---|---|
//! | locks | none, or `?prefix=order:` | locks with holders and waiters, 100 on a page |
//! | a lock | `?key=order:42`, `&kind=permits` | holders with buttons to revoke, and waiters |
//! | activity | `?view=activity` | contention and losses of this process |
//! | health | `?view=health` | the servers of the store, with findings and their remedies |
//!
//! Each view refreshes itself, and is JSON with `&format=json`. All of them have the path of the
//! service, so it works below every path, whether or not the router strips it.
//!
//! ```
//! # #[cfg(feature = "axum-08")] {
//! use axum::Router;
//! use lock_tower::{inspector::Inspector, runtime::LockClient};
//!
//! let locks = LockClient::in_memory();
//! let app: Router = Router::new().nest_service("/locks", Inspector::new(locks));
//! # drop(app);
//! # }
//! ```
//!
//! # Access
//!
//! **Everyone who can reach the service sees the names of all locks of the namespace, and those of
//! the clients.** It has no access control of its own: put the middleware of the application around
//! it, or serve it on an address that only operators reach. The [recipe](crate::recipes) has an
//! example.
//!
//! Each request has to name an allowed host: an IP address (but `0.0.0.0`, `::`, or one of IPv4
//! within IPv6), `localhost`, or one that is set by [`allow_host`](Inspector::allow_host) or
//! [`allow_revoke`](Inspector::allow_revoke). Any other is refused with 421 (Misdirected Request)
//! and logged at level warn: a page in the browser of an operator, whose own name was made to
//! resolve to the address of this service (DNS rebinding), could read the locks otherwise. A page
//! of another site may link to a view; where browsers report that it loads one in any other way,
//! over HTTPS, as `localhost` or by a loopback address, it is refused with 403.
//!
//! The pages are read only unless [`allow_revoke`](Inspector::allow_revoke) is called. They contain
//! no tokens of holders, load nothing from elsewhere, cannot be framed, and allow no inline script.
//! Tables and buttons work without JavaScript, which only refreshes them.
//!
//! # Limits
//!
//! - The list reads the names of all locks in the namespace; on Redis the user needs `SCAN`. One
//!   page reads at a time. Pages that refresh themselves spend at most a tenth of the time on it
//!   together, however many keys the store has: with a million, the list is renewed each few
//!   seconds.
//! - A stream of events ends after about 5 s, and the browser opens the next one. A graceful
//!   shutdown waits for the streams that are open.
//! - The state of the locks is that of the store. It is known for all processes; contention and
//!   losses are those of this process and client.
//! - The times of waiters that were in a queue when it was compacted, after many others had left
//!   it, are not known.
//! - How long readers and holders of permits have held their lock is known in Redis after up to
//!   five minutes, and nowhere the time since a lock was handed off within a process.
//! - A waiter is a process: its other requests for the same lock wait in the process.

mod assets;
mod content;
mod events;
#[cfg(test)]
#[path = "../../fuzz/inspector.rs"]
mod fuzz;
mod hosts;
mod html;
mod query;
mod revoke;
mod site;

use std::{
    convert::Infallible,
    fmt,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::{
    HeaderName, HeaderValue, Method, Request, Response, StatusCode, Uri, header, request::Parts,
};
use http_body::{Body, Frame, SizeHint};
use http_body_util::{Either, Full};
use lock_runtime::{LockClient, log, text::visible};
use pin_project::pin_project;
use tower_service::Service;

use self::{
    assets::Asset,
    content::Content,
    events::{Events, Streams},
    hosts::Hosts,
    query::{Format, Query, View},
};
use crate::protocol::body::BoxError;

/// With the digest of [`html::BUTTON`].
const CSP: &str = "default-src 'none'; script-src 'self'; \
                   style-src 'self' 'sha256-vLulBEwpHhSbkBEkUTKBvdJ3s7COtyH/qUL0LkgRMlY='; \
                   connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'";

const COOP: HeaderName = HeaderName::from_static("cross-origin-opener-policy");
const DOCUMENT_POLICY: HeaderName = HeaderName::from_static("document-policy");
const CORP: HeaderName = HeaderName::from_static("cross-origin-resource-policy");

/// Describes the sender of a request for the log.
type Caller = dyn Fn(&Parts) -> Option<String> + Send + Sync;

/// A service with pages for operators about the locks of a store. See the
/// [module](crate::inspector) for its views, and for access control.
///
/// Clones share the limit of pages that refresh themselves.
#[derive(Clone)]
pub struct Inspector {
    locks: LockClient,
    hosts: Hosts,
    /// Those whose pages may revoke. None if the pages are read only.
    origins: Vec<HeaderValue>,
    caller: Arc<Caller>,
    streams: Arc<Streams>,
    title: Option<Arc<str>>,
}

impl Inspector {
    /// The number of pages that may refresh themselves at the same time, by default.
    pub const DEFAULT_MAX_STREAMS: usize = 16;

    /// Creates a service that shows the locks of the client's namespace.
    pub fn new(locks: LockClient) -> Self {
        Self {
            locks,
            hosts: Hosts::default(),
            origins: Vec::new(),
            caller: Arc::new(peer),
            streams: Arc::new(Streams::new(Self::DEFAULT_MAX_STREAMS)),
            title: None,
        }
    }

    /// Shows a title on each page and in its tab, such as `orders, production`: so that an operator
    /// does not take one environment for another.
    #[must_use]
    pub fn title(mut self, title: &str) -> Self {
        self.title = Some(visible(title).into()).filter(|title: &Arc<str>| !title.is_empty());
        self
    }

    /// Accepts requests that name this host, without a port, such as `ops.example.com`, in addition
    /// to IP addresses, `localhost` and other hosts that are set.
    ///
    /// # Panics
    /// If it is no name of a host.
    #[must_use]
    pub fn allow_host(mut self, host: &str) -> Self {
        assert!(
            self.hosts.allow(host),
            "{host:?} is no name of a host such as ops.example.com, without a scheme and a port"
        );
        self
    }

    /// Adds a button to revoke the lock of a holder, which calls
    /// [`LockClient::revoke`](lock_runtime::LockClient::revoke) with the holder that was shown: a
    /// lock that has changed hands since is left untouched.
    ///
    /// Tasks of one client that hand the lock to each other are one holder.
    ///
    /// `origin` is that of the pages as the browsers of the operators see it, such as
    /// `https://ops.example.com` or `http://127.0.0.1:8080`; call this for each one. A revocation
    /// is accepted only if its header `Origin` is one of them, so that no other site can send it
    /// through the browser of an operator. Other pages of the same origin can. The host of the
    /// origin is [allowed](Self::allow_host) as well. Behind a proxy that changes the header `Host`
    /// to another name, allow that name, too.
    ///
    /// Each revocation is logged at level warn, with the address of the caller. Requests that are
    /// refused for their origin are summarised: the first at once, then one line in ten seconds.
    ///
    /// # Panics
    /// If it is no origin: a scheme, a host, and a port if it is not that of the scheme.
    #[must_use]
    pub fn allow_revoke(mut self, origin: &str) -> Self {
        let lower_case = origin.trim_end_matches('/').to_ascii_lowercase();
        let uri: Uri = lower_case.parse().unwrap_or_default();
        let is_origin = uri.scheme().is_some() && uri.path() == "/";
        let allowed = is_origin && uri.host().is_some_and(|host| self.hosts.allow(host));
        match HeaderValue::from_str(&lower_case) {
            Ok(header) if allowed => self.origins.push(header),
            _ => panic!("{origin:?} is no origin such as https://ops.example.com"),
        }
        self
    }

    /// Sets the number of pages that may refresh themselves at the same time,
    /// [`DEFAULT_MAX_STREAMS`](Self::DEFAULT_MAX_STREAMS) by default. Further pages are shown and
    /// do not refresh themselves.
    #[must_use]
    pub fn max_streams(mut self, max_streams: usize) -> Self {
        self.streams = Arc::new(Streams::new(max_streams));
        self
    }

    /// Sets how the log names the caller of a revocation, such as by a user name that the
    /// application's middleware has put into the extensions. By default it is the peer address, if
    /// axum provides it (`into_make_service_with_connect_info::<SocketAddr>`).
    #[must_use]
    pub fn caller(
        mut self,
        caller: impl Fn(&Parts) -> Option<String> + Send + Sync + 'static,
    ) -> Self {
        self.caller = Arc::new(caller);
        self
    }

    async fn respond<B>(self, request: Request<B>) -> Response<InspectorBody>
    where
        B: Body + Send + 'static,
        B::Data: Send,
        B::Error: Into<BoxError>,
    {
        let (parts, body) = request.into_parts();
        if !self.hosts.allow_request(&parts) {
            self.warn("host", "request refused: its host is not allowed", &parts);
            let message = "this host is not allowed; `allow_host` of the service changes that";
            return text(StatusCode::MISDIRECTED_REQUEST, message);
        }
        match parts.method {
            Method::GET | Method::HEAD => self.show(&parts).await,
            Method::POST => revoke::respond(&self, &parts, body).await,
            _ => {
                let mut response = text(StatusCode::METHOD_NOT_ALLOWED, "only GET and POST");
                let allowed = HeaderValue::from_static("GET, HEAD, POST");
                response.headers_mut().insert(header::ALLOW, allowed);
                response
            }
        }
    }

    /// Logs a refused request. Others of the same kind are summarised.
    fn warn(&self, code: &'static str, message: &'static str, parts: &Parts) {
        log::summarise(message, code, None, |left_out| {
            let caller = self.caller_of(parts);
            let [host, origin] = [header::HOST, header::ORIGIN].map(|name| parts.headers.get(name));
            let authority = parts
                .uri
                .authority()
                .map(|authority| visible(authority.as_str()));
            tracing::warn!(caller, ?host, authority, ?origin, left_out, "{message}");
        });
    }

    /// The name of the caller in the log.
    fn caller_of(&self, parts: &Parts) -> String {
        let caller = (self.caller)(parts);
        visible(caller.as_deref().unwrap_or("unknown"))
    }

    async fn show(self, parts: &Parts) -> Response<InspectorBody> {
        if let Some(requested) = Asset::requested(&parts.uri) {
            return match requested {
                Some(asset) => respond(StatusCode::OK, asset.content_type(), asset.text()),
                None => text(StatusCode::NOT_FOUND, "there is no such asset"),
            };
        }
        let query = match Query::parse(parts) {
            Ok(query) => query,
            Err(mistake) => return text(StatusCode::BAD_REQUEST, mistake),
        };
        let Query { view, format } = query;
        if !site::may_show(parts, format) {
            self.warn(
                "site",
                "request refused: a page of another site makes it",
                parts,
            );
            return text(
                StatusCode::FORBIDDEN,
                "a page of another site makes this request",
            );
        }
        match format {
            Format::Events => match self.streams.enter() {
                Some(ticket) => {
                    let events = Events::new(self, view, ticket);
                    let body = InspectorBody(Either::Right(events));
                    let mut response = with_headers(StatusCode::OK, "text/event-stream", body);
                    // nginx would keep the events until its buffer is full.
                    let unbuffered = HeaderValue::from_static("no");
                    response
                        .headers_mut()
                        .insert("x-accel-buffering", unbuffered);
                    response
                }
                None => busy("too many pages refresh themselves"),
            },
            Format::Html | Format::Json => match self.streams.load(&self.locks, &view).await {
                Some(content) if format == Format::Json => {
                    json(content.status(), &content.json(&view))
                }
                Some(content) => self.page(&view, &content, None),
                None => busy("other pages are reading the store"),
            },
        }
    }

    fn may_revoke(&self) -> bool {
        !self.origins.is_empty()
    }

    /// A whole page, with a message about a revocation.
    fn page(
        &self,
        view: &View,
        content: &Content,
        outcome: Option<(StatusCode, &str)>,
    ) -> Response<InspectorBody> {
        let status = outcome.map_or_else(|| content.status(), |(status, _)| status);
        let message = outcome.map(|(_, message)| message);
        let page = html::page(
            view,
            content,
            message,
            self.may_revoke(),
            self.title.as_deref(),
        );
        respond(status, "text/html; charset=utf-8", page.into_string())
    }
}

impl fmt::Debug for Inspector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inspector")
            .field("hosts", &self.hosts)
            .field("origins", &self.origins)
            .finish_non_exhaustive()
    }
}

impl<B> Service<Request<B>> for Inspector
where
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<BoxError>,
{
    type Response = Response<InspectorBody>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let inspector = self.clone();
        Box::pin(async move { Ok(inspector.respond(request).await) })
    }
}

/// Response body for [`Inspector`].
#[pin_project]
pub struct InspectorBody(#[pin] Either<Full<Bytes>, Events>);

impl fmt::Debug for InspectorBody {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InspectorBody").finish_non_exhaustive()
    }
}

impl Body for InspectorBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        self.project().0.poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.0.size_hint()
    }
}

/// The address of the peer.
fn peer(parts: &Parts) -> Option<String> {
    #[cfg(feature = "axum-08")]
    {
        use std::net::SocketAddr;

        use axum::extract::ConnectInfo;

        let peer = parts.extensions.get::<ConnectInfo<SocketAddr>>()?;
        Some(peer.0.to_string())
    }
    #[cfg(not(feature = "axum-08"))]
    {
        let _ = parts;
        None
    }
}

fn text(status: StatusCode, text: &'static str) -> Response<InspectorBody> {
    respond(status, "text/plain; charset=utf-8", text)
}

fn busy(message: &'static str) -> Response<InspectorBody> {
    let mut response = text(StatusCode::SERVICE_UNAVAILABLE, message);
    let later = HeaderValue::from_static("10");
    response.headers_mut().insert(header::RETRY_AFTER, later);
    response
}

fn json(status: StatusCode, value: &serde_json::Value) -> Response<InspectorBody> {
    respond(status, "application/json", value.to_string())
}

fn respond(
    status: StatusCode,
    content_type: &'static str,
    body: impl Into<Bytes>,
) -> Response<InspectorBody> {
    let body = InspectorBody(Either::Left(Full::new(body.into())));
    with_headers(status, content_type, body)
}

fn with_headers(
    status: StatusCode,
    content_type: &'static str,
    body: InspectorBody,
) -> Response<InspectorBody> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    for (name, value) in [
        (header::CONTENT_TYPE, content_type),
        (header::CONTENT_SECURITY_POLICY, CSP),
        (header::X_FRAME_OPTIONS, "DENY"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (CORP, "same-origin"),
        // A page that has opened this one in a window cannot navigate it, except over plain HTTP,
        // where browsers ignore this.
        (COOP, "same-origin"),
        // A link of another site does not scroll a view, at once or later.
        (DOCUMENT_POLICY, "force-load-at-top"),
        // With `no-referrer`, browsers would hide the origin of a form as well.
        (header::REFERRER_POLICY, "same-origin"),
        (header::CACHE_CONTROL, "no-store"),
    ] {
        let value = HeaderValue::from_static(value);
        response.headers_mut().insert(name, value);
    }
    response
}
