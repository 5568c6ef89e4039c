//! The target of a connection: a server at an address, or the primary that the Sentinels name.

use std::{fmt, sync::Arc};

use redis::{Client, ConnectionAddr, RedisConnectionInfo};
use tokio::task::AbortHandle;

use super::sentinel::{Named, Sentinels};
use crate::store::StoreError;

/// The target of a connection.
#[derive(Clone)]
pub(super) enum Target {
    Server(Arc<Client>),
    Primary(Arc<Sentinels>),
}

impl Target {
    /// The server to connect to now, and its name from the Sentinels.
    pub(super) async fn server(&self) -> Result<(Client, Option<Named>), StoreError> {
        match self {
            Self::Server(client) => Ok(((**client).clone(), None)),
            Self::Primary(sentinels) => {
                let (named, client) = sentinels.primary().await?;
                Ok((client, Some(named)))
            }
        }
    }

    /// Calls `switched` once the target is another server. Returns `None` if it never changes. The
    /// caller ends the task with the connection.
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

    /// Whether the target can become another server.
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

/// Shows no credentials.
impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Server(client) => client.get_connection_info().addr().fmt(f),
            Self::Primary(sentinels) => sentinels.fmt(f),
        }
    }
}
