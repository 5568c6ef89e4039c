//! A server and a client with a fixed version of HTTP, for tests that run over both versions.

use axum::{Router, http::Version};
use serde_json::Value;
use tokio::task::JoinHandle;

use super::server::Server;

/// Generates two tests for each function, which takes an [`Http`]: over HTTP/1.1 and over HTTP/2.
macro_rules! over_both_versions {
    ($($name:ident),* $(,)?) => {
        mod over_http1 {
            crate::layer::client::over_both_versions!(@ One: $($name)*);
        }
        mod over_http2 {
            crate::layer::client::over_both_versions!(@ Two: $($name)*);
        }
    };
    (@ $version:ident: $($name:ident)*) => {$(
        #[tokio::test]
        async fn $name() {
            lock_tests::place::in_time(super::$name(crate::layer::client::Http::$version)).await;
        }
    )*};
}
pub(super) use over_both_versions;

/// A version of HTTP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Http {
    One,
    /// With prior knowledge, and all requests on one connection.
    Two,
}

impl Http {
    fn version(self) -> Version {
        match self {
            Self::One => Version::HTTP_11,
            Self::Two => Version::HTTP_2,
        }
    }

    fn client(self) -> reqwest::Client {
        let client = reqwest::Client::builder().no_proxy();
        let client = match self {
            Self::One => client.http1_only(),
            Self::Two => client.http2_prior_knowledge(),
        };
        client.build().unwrap()
    }
}

/// A server with its own client.
pub(super) struct Connected {
    server: Server,
    client: reqwest::Client,
    version: Version,
}

impl Connected {
    pub(super) async fn start(http: Http, app: Router) -> Self {
        Self {
            server: Server::start(app).await,
            client: http.client(),
            version: http.version(),
        }
    }

    /// A request to which the test can add headers and a body.
    pub(super) fn request(&self, path: &str) -> reqwest::RequestBuilder {
        self.client.post(self.server.url(path))
    }

    /// Sends a request and returns the response once its head has arrived. Dropping the future or
    /// the response disconnects.
    pub(super) async fn post(&self, path: &str) -> reqwest::Response {
        let response = self.request(path).send().await.unwrap();
        assert_eq!(response.version(), self.version);
        response
    }

    /// Starts a request.
    pub(super) fn call(&self, path: &str) -> Call {
        self.call_with(self.request(path))
    }

    pub(super) fn call_with(&self, request: reqwest::RequestBuilder) -> Call {
        let version = self.version;
        Call(tokio::spawn(async move {
            let response = request.send().await?;
            assert_eq!(response.version(), version);
            Ok(response)
        }))
    }
}

/// A request in progress.
pub(super) struct Call(JoinHandle<reqwest::Result<reqwest::Response>>);

impl Call {
    /// The response, once its head has arrived.
    pub(super) async fn response(self) -> reqwest::Result<reqwest::Response> {
        self.0.await.unwrap()
    }

    /// Resets the stream of HTTP/2, or closes the connection of HTTP/1.1.
    pub(super) async fn hang_up(self) {
        self.0.abort();
        assert!(
            self.0.await.unwrap_err().is_cancelled(),
            "the response has arrived already"
        );
    }
}

/// The status and the `code` of a problem document.
pub(super) async fn problem(response: reqwest::Response) -> (u16, String) {
    assert_eq!(
        response.headers()["content-type"],
        "application/problem+json"
    );
    let status = response.status().as_u16();
    let document: Value = serde_json::from_slice(&response.bytes().await.unwrap()).unwrap();
    assert_eq!(document["status"], status);
    (status, document["code"].as_str().unwrap().to_owned())
}
