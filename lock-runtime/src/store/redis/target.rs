//! Where a connection leads: to a server with an address, or to whichever one the Sentinels name.

use std::{fmt, sync::Arc};

use redis::{Client, ConnectionAddr, RedisConnectionInfo};
use tokio::task::AbortHandle;

use super::sentinel::{Named, Sentinels};
use crate::store::StoreError;

/// Where a connection leads.
#[derive(Clone)]
pub(super) enum Target {
    Server(Arc<Client>),
    Primary(Arc<Sentinels>),
}

impl Target {
    /// The server to connect to now, and how the Sentinels name it.
    pub(super) async fn server(&self) -> Result<(Client, Option<Named>), StoreError> {
        match self {
            Self::Server(client) => Ok(((**client).clone(), None)),
            Self::Primary(sentinels) => {
                let (named, client) = sentinels.primary().await?;
                Ok((client, Some(named)))
            }
        }
    }

    /// Calls `switched` once it is another one; `None`: it never is. The task is to be ended with the connection.
    pub(super) fn watch(
        &self,
        named: Option<Named>,
        switched: impl FnOnce() + Send + 'static,
    ) -> Option<AbortHandle> {
        match self {
            Self::Server(_) => None,
            Self::Primary(sentinels) => named.map(|named| sentinels.watch(named, switched)),
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
