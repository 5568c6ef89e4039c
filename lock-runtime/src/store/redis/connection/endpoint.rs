//! A server to connect to, with its credentials and certificates.

use std::fmt;
#[cfg(feature = "redis-rustls")]
use std::{io, sync::Arc};

#[cfg(feature = "redis-rustls")]
use futures_util::{TryFutureExt as _, future::select_ok};
#[cfg(feature = "redis-rustls")]
use redis::io::tcp::socket2::SockRef;
use redis::{
    AsyncConnectionConfig, Client, ConnectionAddr, ConnectionInfo, ProtocolVersion, RedisResult,
    aio::{MultiplexedConnection, PubSub},
};
#[cfg(feature = "redis-rustls")]
use rustls::{ClientConfig, pki_types::ServerName};
#[cfg(feature = "redis-rustls")]
use tokio::net::{TcpStream, lookup_host};
use tokio::task::JoinSet;
#[cfg(feature = "redis-rustls")]
use tokio_rustls::{TlsConnector, client::TlsStream};

use super::{super::error::unavailable, login::Login};
use crate::{client::credentials::Provider, observe::text::visible, store::StoreError};
#[cfg(feature = "redis-rustls")]
use crate::{error::LockError, store::remote::pem::Certificates};

/// A server to connect to.
#[derive(Clone)]
pub(crate) struct Endpoint {
    /// The connection settings of the URL and of the options.
    pub(crate) info: ConnectionInfo,
    /// Provides the credentials of each connection.
    pub(crate) provider: Option<Provider>,
    /// Certificates, which are read for each connection unless `tls` has them.
    #[cfg(feature = "redis-rustls")]
    certificates: Option<Arc<Certificates>>,
    #[cfg(feature = "redis-rustls")]
    tls: Option<Arc<ClientConfig>>,
}

impl Endpoint {
    pub(crate) fn new(info: ConnectionInfo, provider: Option<Provider>) -> Self {
        Self {
            info,
            provider,
            #[cfg(feature = "redis-rustls")]
            certificates: None,
            #[cfg(feature = "redis-rustls")]
            tls: None,
        }
    }

    /// The same with these certificates.
    ///
    /// # Errors
    /// `InvalidSpec` for certificates that cannot be used.
    #[cfg(feature = "redis-rustls")]
    pub(crate) fn over_tls(self, certificates: &Certificates) -> Result<Self, LockError> {
        let tls = match certificates.check()? {
            Some(config) if !certificates.change() => Some(Arc::new(config)),
            _ => None,
        };
        let certificates = (!certificates.is_empty()).then(|| Arc::new(certificates.clone()));
        Ok(Self {
            certificates,
            tls,
            ..self
        })
    }

    /// Returns a complaint about a URL that asks for RESP2, for several servers.
    pub(crate) fn check_messages(&self) -> Result<(), &'static str> {
        match sends_messages(&self.info) {
            true => Ok(()),
            false => Err("protocol=resp2 is for a single server"),
        }
    }

    /// The same server, spoken to in this version of the protocol.
    pub(crate) fn speaking(self, protocol: ProtocolVersion) -> Self {
        Self {
            info: speaking(self.info, protocol),
            ..self
        }
    }

    /// A server at another address, with the same credentials and certificates.
    pub(crate) fn at(&self, host: String, port: u16) -> Self {
        Self {
            info: at(&self.info, host, port),
            ..self.clone()
        }
    }

    /// Returns the server with its present credentials and certificates, and when they are to be
    /// replaced on its connection.
    ///
    /// # Errors
    /// `Unavailable` if there are none.
    ///
    /// # Panics
    /// Without a crypto provider for certificates, as the redis crate does without certificates.
    pub(crate) async fn door(&self) -> Result<(Door, Option<Login>), StoreError> {
        let (settings, login) = Login::new(self).await?;
        let info = self.info.clone().set_redis_settings(settings);
        #[cfg(feature = "redis-rustls")]
        let tls = match (&self.tls, self.certificates.clone()) {
            (None, Some(certificates)) => {
                let _ = ClientConfig::builder();
                let reading = tokio::task::spawn_blocking(move || certificates.client_config());
                let read = reading
                    .map_err(|error| unavailable(error.to_string()))
                    .await?;
                let read = read.map_err(|error| unavailable(format!("no connection: {error}")));
                Some(Arc::new(read?))
            }
            (tls, _) => tls.clone(),
        };
        let client = Client::open(info);
        let client = client.map_err(|error| unavailable(format!("no connection: {error}")))?;
        let door = Door {
            client,
            #[cfg(feature = "redis-rustls")]
            tls,
        };
        Ok((door, login))
    }
}

/// The task that reads from and writes to a connection. It ends when this is dropped. Empty if the
/// redis crate has started the task, which then ends with the connection.
pub(crate) type Driver = JoinSet<()>;

/// A server with the credentials and the certificates of one connection.
pub(crate) struct Door {
    client: Client,
    /// Set for certificates of the application. Without them, the redis crate connects with those
    /// of the system.
    #[cfg(feature = "redis-rustls")]
    tls: Option<Arc<ClientConfig>>,
}

impl Door {
    /// Opens a connection for calls.
    pub(crate) async fn open(
        &self,
        config: &AsyncConnectionConfig,
    ) -> RedisResult<(MultiplexedConnection, Driver)> {
        #[allow(unused_mut)]
        let mut driver = Driver::new();
        #[cfg(feature = "redis-rustls")]
        if let Some(tls) = &self.tls {
            let info = self.client.get_connection_info();
            let (stream, config) = (over_tls(info, tls).await?, config.clone());
            let connect =
                MultiplexedConnection::new_with_config(info.redis_settings(), stream, config);
            let (connection, work) = connect.await?;
            driver.spawn(work);
            return Ok((connection, driver));
        }
        let connect = self
            .client
            .get_multiplexed_async_connection_with_config(config);
        Ok((connect.await?, driver))
    }

    /// Opens a connection for messages.
    pub(crate) async fn listen(&self) -> RedisResult<PubSub> {
        #[cfg(feature = "redis-rustls")]
        if let Some(tls) = &self.tls {
            let info = self.client.get_connection_info();
            return PubSub::new(info.redis_settings(), over_tls(info, tls).await?).await;
        }
        self.client.get_async_pubsub().await
    }

    /// The same over RESP2.
    pub(super) fn over_resp2(self) -> Option<Self> {
        let info = self.client.get_connection_info().clone();
        let info = speaking(info, ProtocolVersion::RESP2);
        let client = Client::open(info).ok()?;
        Some(Self { client, ..self })
    }
}

#[cfg(feature = "redis-rustls")]
async fn over_tls(
    info: &ConnectionInfo,
    tls: &Arc<ClientConfig>,
) -> io::Result<TlsStream<TcpStream>> {
    let ConnectionAddr::TcpTls { host, port, .. } = info.addr() else {
        return Err(io::Error::other("the URL does not ask for TLS"));
    };
    let name = ServerName::try_from(host.clone()).map_err(io::Error::other)?;
    // An address that does not answer must not delay the others.
    let addresses = lookup_host((&host[..], *port)).await?;
    let attempts: Vec<_> = addresses
        .map(|it| Box::pin(TcpStream::connect(it)))
        .collect();
    if attempts.is_empty() {
        return Err(io::Error::other("the host has no address"));
    }
    let (stream, _) = select_ok(attempts).await?;
    let settings = info.tcp_settings();
    stream.set_nodelay(settings.nodelay())?;
    let socket = SockRef::from(&stream);
    if let Some(keepalive) = settings.keepalive() {
        socket.set_tcp_keepalive(keepalive)?;
    }
    #[cfg(any(target_os = "android", target_os = "fuchsia", target_os = "linux"))]
    socket.set_tcp_user_timeout(settings.user_timeout())?;
    TlsConnector::from(tls.clone()).connect(name, stream).await
}

/// Formats the address alone.
impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&visible(&self.info.addr().to_string()))
    }
}

/// Returns whether the server can send messages: RESP2 has none on a connection for calls.
pub(crate) fn sends_messages(info: &ConnectionInfo) -> bool {
    info.redis_settings().protocol() != ProtocolVersion::RESP2
}

pub(crate) fn is_tls(address: &ConnectionAddr) -> bool {
    matches!(address, ConnectionAddr::TcpTls { .. })
}

/// The connection settings of `info` for another address.
pub(crate) fn at(info: &ConnectionInfo, host: String, port: u16) -> ConnectionInfo {
    let mut address = info.addr().clone();
    match &mut address {
        ConnectionAddr::TcpTls {
            host: h, port: p, ..
        } => (*h, *p) = (host, port),
        _ => address = ConnectionAddr::Tcp(host, port),
    }
    info.clone().set_addr(address)
}

/// The connection settings of `info` for this version of the protocol.
pub(crate) fn speaking(info: ConnectionInfo, protocol: ProtocolVersion) -> ConnectionInfo {
    let redis = info.redis_settings().clone().set_protocol(protocol);
    info.set_redis_settings(redis)
}
