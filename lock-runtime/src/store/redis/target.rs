//! The target of a connection: a server at an address, or the primary that the Sentinels name.

use std::{fmt, sync::Arc};

#[cfg(feature = "rustls")]
use futures_util::TryFutureExt as _;
use redis::{Client, ConnectionAddr, ConnectionInfo};

use super::{
    error::unavailable,
    login::Login,
    sentinel::{Named, Sentinels},
};
use crate::{credentials::Provider, store::StoreError};
#[cfg(feature = "rustls")]
use crate::{error::LockError, pem::Certificates};

/// The target of a connection.
#[derive(Clone)]
pub(super) enum Target {
    Server(Arc<Endpoint>),
    Primary(Arc<Sentinels>),
}

/// A server to connect to.
#[derive(Clone)]
pub(super) struct Endpoint {
    /// The connection settings of the URL and of the options.
    pub(super) info: ConnectionInfo,
    /// Provides the credentials of each connection.
    pub(super) provider: Option<Provider>,
    /// Certificates that are read for each connection.
    #[cfg(feature = "rustls")]
    certificates: Option<Arc<Certificates>>,
}

impl Endpoint {
    pub(super) fn new(info: ConnectionInfo, provider: Option<Provider>) -> Self {
        Self {
            info,
            provider,
            #[cfg(feature = "rustls")]
            certificates: None,
        }
    }

    /// The same with these certificates.
    ///
    /// # Errors
    /// `InvalidSpec` for certificates that cannot be used.
    #[cfg(feature = "rustls")]
    pub(super) fn over_tls(self, certificates: &Certificates) -> Result<Self, LockError> {
        let changing = certificates
            .change()
            .then(|| Arc::new(certificates.clone()));
        Ok(Self {
            info: certificates.apply(self.info)?,
            certificates: changing,
            ..self
        })
    }

    /// A server at another address, with the same credentials and certificates.
    pub(super) fn at(&self, host: String, port: u16) -> Self {
        Self {
            info: at(&self.info, host, port),
            ..self.clone()
        }
    }

    /// Returns a client with the present credentials and certificates, and when they are to be
    /// replaced on its connection.
    ///
    /// # Errors
    /// `Unavailable` if there are none.
    pub(super) async fn client(&self) -> Result<(Client, Option<Login>), StoreError> {
        let (settings, login) = Login::new(self).await?;
        let info = self.info.clone().set_redis_settings(settings);
        #[cfg(feature = "rustls")]
        let info = match self.certificates.clone() {
            Some(certificates) => {
                let reading = tokio::task::spawn_blocking(move || certificates.apply(info));
                let read = reading
                    .map_err(|error| unavailable(error.to_string()))
                    .await?;
                read.map_err(|error| unavailable(format!("no connection: {error}")))?
            }
            None => info,
        };
        let client = Client::open(info);
        let client = client.map_err(|error| unavailable(format!("no connection: {error}")))?;
        Ok((client, login))
    }
}

/// Formats the address alone.
impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.info.addr().fmt(f)
    }
}

impl Target {
    /// Returns the server to connect to now. If Sentinels name it, returns them as well, with the
    /// name.
    pub(super) async fn server(
        &self,
    ) -> Result<(Endpoint, Option<(&Arc<Sentinels>, Named)>), StoreError> {
        match self {
            Self::Server(server) => Ok(((**server).clone(), None)),
            Self::Primary(sentinels) => {
                let (named, server) = sentinels.primary().await?;
                Ok((server, Some((sentinels, named))))
            }
        }
    }

    /// Returns whether the target can change to another server.
    pub(super) fn moves(&self) -> bool {
        matches!(self, Self::Primary(_))
    }

    /// The connection settings, without the address of a primary.
    pub(super) fn info(&self) -> &ConnectionInfo {
        match self {
            Self::Server(server) => &server.info,
            Self::Primary(sentinels) => &sentinels.primary.info,
        }
    }
}

/// Formats the target without credentials.
impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Server(server) => server.fmt(f),
            Self::Primary(sentinels) => sentinels.fmt(f),
        }
    }
}

pub(super) fn is_tls(address: &ConnectionAddr) -> bool {
    matches!(address, ConnectionAddr::TcpTls { .. })
}

/// The connection settings of `info` for another address.
pub(super) fn at(info: &ConnectionInfo, host: String, port: u16) -> ConnectionInfo {
    let mut address = info.addr().clone();
    match &mut address {
        ConnectionAddr::TcpTls {
            host: h, port: p, ..
        } => (*h, *p) = (host, port),
        _ => address = ConnectionAddr::Tcp(host, port),
    }
    info.clone().set_addr(address)
}
