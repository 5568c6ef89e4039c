//! TLS for connections, and how one is made with it or without.

use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite};
use tokio_postgres::{AsyncMessage, Client, Config, Connection, Error, NoTls, config::SslMode};

use crate::store::remote::pem::Certificates;

/// TLS for connections, or none.
#[derive(Clone)]
pub(crate) enum Tls {
    None,
    #[cfg(feature = "postgres-rustls")]
    Rustls(tokio_postgres_rustls::MakeRustlsConnect),
    /// TLS if the server offers it, without a look at its certificate: protection from readers of
    /// the network, and none from a server in between, as with `libpq`.
    #[cfg(feature = "postgres-rustls")]
    Preferred(tokio_postgres_rustls::MakeRustlsConnect),
}

/// Drives a connection, and returns the next message or its end.
pub(crate) type Driver =
    Box<dyn FnMut(&mut Context<'_>) -> Poll<Option<Result<AsyncMessage, Error>>> + Send>;

impl Tls {
    /// Connects to the first of the hosts that accepts the connection.
    pub(crate) async fn connect(self, config: &Config) -> Result<(Client, Driver), Error> {
        match self {
            Self::None => config.connect(NoTls).await.map(driven),
            #[cfg(feature = "postgres-rustls")]
            Self::Rustls(tls) => config.connect(tls).await.map(driven),
            #[cfg(feature = "postgres-rustls")]
            Self::Preferred(tls) => match config.connect(tls).await {
                Err(error) if refuses_tls(&error) => config.connect(NoTls).await.map(driven),
                connected => connected.map(driven),
            },
        }
    }
}

fn driven<S, T>((client, mut connection): (Client, Connection<S, T>)) -> (Client, Driver)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    (client, Box::new(move |cx| connection.poll_message(cx)))
}

/// Returns whether a connection without TLS may succeed: the handshake has failed, or the server
/// accepts no client over TLS.
#[cfg(feature = "postgres-rustls")]
fn refuses_tls(error: &Error) -> bool {
    let is_refused = Some(&tokio_postgres::error::SqlState::INVALID_AUTHORIZATION_SPECIFICATION);
    // The driver tells the kinds of its errors apart by their texts alone.
    error.code() == is_refused
        || error
            .to_string()
            .starts_with("error performing TLS handshake")
}

impl Tls {
    #[cfg(not(feature = "postgres-rustls"))]
    pub(crate) fn new(certificates: &Certificates, mode: SslMode) -> Result<Self, String> {
        if !certificates.is_empty() || mode == SslMode::Require {
            let complaint = "it asks for TLS, which is not compiled in; enable the feature `postgres-rustls` of lock-runtime";
            return Err(complaint.into());
        }
        Ok(Self::None)
    }

    /// Uses the certificates, or the authorities of the system.
    #[cfg(feature = "postgres-rustls")]
    pub(crate) fn new(certificates: &Certificates, mode: SslMode) -> Result<Self, String> {
        use tokio_postgres_rustls::MakeRustlsConnect;

        if !certificates.is_empty() || mode == SslMode::Require {
            let config = certificates.client_config()?;
            return Ok(Self::Rustls(MakeRustlsConnect::new(config)));
        }
        if mode != SslMode::Prefer {
            return Ok(Self::None);
        }
        let Some(config) = crate::store::remote::tls::unverified() else {
            tracing::debug!("no crypto provider is installed, so connections do not use TLS");
            return Ok(Self::None);
        };
        Ok(Self::Preferred(MakeRustlsConnect::new(config)))
    }
}
