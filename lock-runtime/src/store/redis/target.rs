//! The target of a connection: a server at an address, or the primary that the Sentinels name.

use std::{fmt, sync::Arc};

use redis::{Client, ConnectionAddr, ConnectionInfo};

use super::{
    error::unavailable,
    sentinel::{Named, Sentinels},
};
use crate::store::StoreError;

/// The target of a connection.
#[derive(Clone)]
pub(super) enum Target {
    Server(Arc<Client>),
    Primary(Arc<Sentinels>),
}

impl Target {
    /// Returns the server to connect to now. If Sentinels name it, returns them as well, with the
    /// name.
    pub(super) async fn server(
        &self,
    ) -> Result<(Client, Option<(&Arc<Sentinels>, Named)>), StoreError> {
        match self {
            Self::Server(client) => Ok(((**client).clone(), None)),
            Self::Primary(sentinels) => {
                let (named, client) = sentinels.primary().await?;
                Ok((client, Some((sentinels, named))))
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
            Self::Server(client) => client.get_connection_info(),
            Self::Primary(sentinels) => &sentinels.primary,
        }
    }
}

/// Formats the target without credentials.
impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Server(client) => client.get_connection_info().addr().fmt(f),
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

/// A client for a server with these settings.
pub(super) fn client(info: ConnectionInfo) -> Result<Client, StoreError> {
    Client::open(info).map_err(|error| unavailable(format!("no connection: {error}")))
}
