//! Where a connection leads: to a server with an address, or to whichever one the Sentinels name.

use std::{fmt, sync::Arc};

use redis::{Client, ConnectionAddr, RedisConnectionInfo};

use super::sentinel::Sentinels;
use crate::store::StoreError;

/// Where a connection leads.
#[derive(Clone)]
pub(super) enum Target {
    Server(Arc<Client>),
    Primary(Arc<Sentinels>),
}

impl Target {
    /// The server to connect to now.
    pub(super) async fn server(&self) -> Result<Client, StoreError> {
        match self {
            Self::Server(client) => Ok((**client).clone()),
            Self::Primary(sentinels) => sentinels.primary().await,
        }
    }

    /// May it be another server in a moment?
    pub(super) fn moves(&self) -> bool {
        matches!(self, Self::Primary(_))
    }

    pub(super) fn settings(&self) -> &RedisConnectionInfo {
        match self {
            Self::Server(client) => client.get_connection_info().redis_settings(),
            Self::Primary(sentinels) => sentinels.primary_settings(),
        }
    }

    pub(super) fn is_tls(&self) -> bool {
        let address = match self {
            Self::Server(client) => client.get_connection_info().addr(),
            Self::Primary(sentinels) => sentinels.primary_address(),
        };
        matches!(address, ConnectionAddr::TcpTls { .. })
    }
}

/// Without credentials.
impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Server(client) => client.get_connection_info().addr().fmt(f),
            Self::Primary(sentinels) => sentinels.fmt(f),
        }
    }
}
