//! The connections of the pool: how one is made, and when another one takes its place.

use std::{future::poll_fn, ops::Deref, sync::atomic::Ordering};

use deadpool::managed::{Manager, Metrics, RecycleError, RecycleResult};
use deadpool_postgres::ClientWrapper;
use tokio_postgres::{Client, Error};

use super::{
    super::{
        failure::Unconnected,
        settings::{Settings, Target},
    },
    tls::Driver,
};
use crate::shell::time::Instant;

/// Makes connections to a database.
pub(crate) struct Connector {
    pub(crate) target: Target,
}

/// A connection, with the statements that were prepared on it.
pub(crate) struct Connected {
    client: ClientWrapper,
    /// When another one has to take its place.
    until: Option<Instant>,
}

/// A connection that returns to its pool when it is dropped.
pub(crate) type Object = deadpool::managed::Object<Connector>;

impl Manager for Connector {
    type Type = Connected;
    type Error = Unconnected;

    async fn create(&self) -> Result<Connected, Unconnected> {
        let settings = self.target.settings().await.map_err(Unconnected::new)?;
        let Settings { config, tls, until } = settings;
        let client = tls.connect(&config).await.map(spawn);
        let client = client.map_err(|error: Error| {
            Unconnected::refused(&error).of_a_client(self.target.accepted.load(Ordering::Acquire))
        })?;
        self.target.accepted.store(true, Ordering::Release);
        Ok(Connected { client, until })
    }

    async fn recycle(&self, connected: &mut Connected, _: &Metrics) -> RecycleResult<Unconnected> {
        let is_over = connected.until.is_some_and(|until| Instant::now() >= until);
        if is_over || connected.client.is_closed() {
            return Err(RecycleError::message("the connection is over"));
        }
        Ok(())
    }
}

impl Deref for Connected {
    type Target = ClientWrapper;

    fn deref(&self) -> &ClientWrapper {
        &self.client
    }
}

/// Drives the connection, whose errors are those of its calls, until the client is dropped.
fn spawn((client, mut drive): (Client, Driver)) -> ClientWrapper {
    let driven = tokio::spawn(async move {
        while let Some(message) = poll_fn(&mut drive).await {
            if let Err(error) = message {
                tracing::debug!(%error, "a connection to PostgreSQL has ended");
                return;
            }
        }
    });
    ClientWrapper::new(client, driven)
}
