//! An axum server on its own port, and a client that sends requests unmodified.

use std::{convert::Infallible, net::SocketAddr};

use axum::{
    Router,
    extract::Request,
    http::{HeaderMap, HeaderName, HeaderValue},
    middleware::{self, Next},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::{mpsc, oneshot},
    task::JoinHandle,
};

pub(super) struct Server {
    addr: SocketAddr,
    task: JoinHandle<()>,
}

impl Server {
    pub(super) async fn start(app: Router) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let task = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        Self { addr, task }
    }

    pub(super) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.addr)
    }

    /// Sends a request on its own connection. Dropping the result disconnects.
    pub(super) async fn send(&self, method: &str, path: &str, headers: &[(&str, &str)]) -> Sent {
        let mut request = format!(
            "{method} {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\ncontent-length: 0\r\n"
        );
        for (name, value) in headers {
            request += &format!("{name}: {value}\r\n");
        }
        request += "\r\n";
        let mut stream = TcpStream::connect(self.addr).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        Sent(stream)
    }

    pub(super) async fn post(&self, path: &str) -> Response {
        self.post_with(path, &[]).await
    }

    /// Sends a gRPC call without a message.
    pub(super) async fn grpc(&self, path: &str, headers: &[(&str, &str)]) -> Response {
        let client = reqwest::Client::builder().no_proxy();
        let client = client.http2_prior_knowledge().build().unwrap();
        let call = client.post(self.url(path));
        let call = call.header("content-type", "application/grpc+proto");
        let call = headers
            .iter()
            .fold(call, |call, (name, value)| call.header(*name, *value));
        let response = call.send().await.unwrap();
        Response {
            status: response.status().as_u16(),
            headers: response.headers().clone(),
            body: response.text().await.unwrap(),
        }
    }

    pub(super) async fn post_with(&self, path: &str, headers: &[(&str, &str)]) -> Response {
        self.send("POST", path, headers)
            .await
            .response()
            .await
            .expect("the server responds")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

pub(super) struct Sent(TcpStream);

impl Sent {
    /// The response, or `None` if the server closes the connection without one.
    pub(super) async fn response(mut self) -> Option<Response> {
        let mut text = String::new();
        self.0.read_to_string(&mut text).await.ok()?;
        let (head, body) = text.split_once("\r\n\r\n")?;
        let mut lines = head.lines();
        let status = lines.next()?.split(' ').nth(1)?.parse().unwrap();
        let headers = lines.map(|line| {
            let (name, value) = line.split_once(": ").unwrap();
            (
                HeaderName::try_from(name).unwrap(),
                HeaderValue::try_from(value).unwrap(),
            )
        });
        Some(Response {
            status,
            headers: headers.collect(),
            body: body.to_owned(),
        })
    }
}

#[derive(Debug)]
pub(super) struct Response {
    pub(super) status: u16,
    pub(super) headers: HeaderMap,
    pub(super) body: String,
}

impl Response {
    pub(super) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }

    /// Returns the `code` of a problem document, and checks its other fields.
    pub(super) fn problem(&self) -> String {
        assert_eq!(
            self.header("content-type"),
            Some("application/problem+json"),
            "{self:?}"
        );
        let document: serde_json::Value = serde_json::from_str(&self.body).unwrap();
        assert_eq!(document["status"], self.status);
        for field in ["type", "title", "detail"] {
            assert!(
                document[field]
                    .as_str()
                    .is_some_and(|text| !text.is_empty()),
                "{field}: {document}"
            );
        }
        document["code"].as_str().unwrap().to_owned()
    }
}

/// Resolves to an error when the request or handler that it belongs to is dropped.
pub(super) type End = oneshot::Receiver<Infallible>;

/// Wraps the app and reports each request, by the end of its future. On a runtime with one thread,
/// a reported request has already run up to its first wait.
pub(super) fn watched(app: Router) -> (Router, mpsc::UnboundedReceiver<End>) {
    let (arrived, arrivals) = mpsc::unbounded_channel();
    let watch = middleware::from_fn(move |request: Request, next: Next| {
        let (alive, end) = oneshot::channel();
        arrived.send(end).unwrap();
        async move {
            let _alive = alive;
            next.run(request).await
        }
    });
    (app.layer(watch), arrivals)
}
