//! The target of a connection: a server at an address, or the primary that the Sentinels name.

use std::{fmt, sync::Arc};

use redis::ConnectionInfo;

use super::{
    super::connection::endpoint::{Endpoint, sends_messages},
    sentinel::{Named, Sentinels},
};
use crate::store::StoreError;

/// The target of a connection.
#[derive(Clone)]
pub(crate) enum Target {
    Server(Arc<Endpoint>),
    Primary(Arc<Sentinels>),
}

impl Target {
    /// Returns the server to connect to now. If Sentinels name it, returns them as well, with the
    /// name.
    pub(crate) async fn server(
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
    pub(crate) fn moves(&self) -> bool {
        matches!(self, Self::Primary(_))
    }

    /// Returns whether the server can send messages: RESP2 has none on a connection for calls.
    pub(crate) fn sends_messages(&self) -> bool {
        sends_messages(self.info())
    }

    /// The connection settings, without the address of a primary.
    pub(crate) fn info(&self) -> &ConnectionInfo {
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
