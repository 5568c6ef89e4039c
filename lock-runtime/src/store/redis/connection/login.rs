//! The credentials of a connection, with which it authenticates again before they end.

use std::time::Duration;

use redis::{
    RedisConnectionInfo, Value,
    aio::{ConnectionLike as _, MultiplexedConnection},
};
use tokio::{task::JoinSet, time::timeout};

use super::{
    super::{error, operator::acl::AclLine},
    endpoint::Endpoint,
};
use crate::{
    client::credentials::Credentials,
    observe::log,
    shell::time::{Instant, sleep_until},
    store::StoreError,
};

/// The pause after the server, or the application, had no credentials for a connection that has
/// some.
const PAUSE: Duration = Duration::from_secs(1);
/// The longest time for which a reply is awaited.
const PATIENCE: Duration = Duration::from_secs(1);

/// The next authentication of a connection.
pub(crate) struct Login {
    endpoint: Endpoint,
    pub(crate) again_at: Instant,
}

/// The task that authenticates a connection again. It ends when this is dropped.
pub(crate) type Authentication = JoinSet<()>;

impl Login {
    /// Returns the settings of the `endpoint` with its present credentials, and the next
    /// authentication, if there is one.
    pub(crate) async fn new(
        endpoint: &Endpoint,
    ) -> Result<(RedisConnectionInfo, Option<Self>), StoreError> {
        let settings = endpoint.info.redis_settings().clone();
        let Some(provider) = &endpoint.provider else {
            return Ok((settings, None));
        };
        let credentials = provider.credentials().await?;
        let login = credentials.again_at().map(|again_at| Self {
            endpoint: endpoint.clone(),
            again_at,
        });
        let Credentials { user, password, .. } = credentials;
        let settings = settings.set_password(password);
        let settings = match user {
            Some(user) => settings.set_username(user),
            None => settings,
        };
        Ok((settings, login))
    }

    /// Authenticates the connection again and again, each time before its credentials end.
    pub(crate) fn keep(self, connection: &MultiplexedConnection) -> Authentication {
        let mut connection = connection.clone();
        let mut task = JoinSet::new();
        task.spawn(async move {
            let mut next = Some(self);
            while let Some(login) = next {
                sleep_until(login.again_at).await;
                next = login.renew(&mut connection).await;
            }
        });
        task
    }

    /// Authenticates the connection with the present credentials. Until the server accepts them,
    /// the connection keeps its earlier ones.
    async fn renew(self, connection: &mut MultiplexedConnection) -> Option<Self> {
        let error = match Self::new(&self.endpoint).await {
            Ok((settings, next)) => match authenticate(&settings, connection).await {
                Some(Ok(())) => return next,
                Some(Err(error)) => error,
                // The connection is over.
                None => return None,
            },
            Err(error) => error,
        };
        let server = self.endpoint.to_string();
        let message = "the connection has no new credentials yet; it keeps its earlier ones";
        log::summarise(message, "credentials", Some(&server), |left_out| {
            tracing::warn!(server, left_out, %error, "{message}");
        });
        let again_at = Instant::now() + PAUSE.mul_f64(0.5 + rand::random::<f64>());
        Some(Self { again_at, ..self })
    }
}

/// Sends the credentials between two calls. `None`: there is no connection any more.
async fn authenticate(
    settings: &RedisConnectionInfo,
    connection: &mut MultiplexedConnection,
) -> Option<Result<(), StoreError>> {
    let mut command = redis::cmd("AUTH");
    command.arg(settings.username()).arg(settings.password());
    match timeout(PATIENCE, connection.req_packed_command(&command)).await {
        Ok(Ok(Value::ServerError(refusal))) => {
            Some(Err(error::refused(&refusal, &AclLine::new("", 0))))
        }
        Ok(Ok(_)) => Some(Ok(())),
        Ok(Err(_)) => None,
        Err(_) => Some(Err(StoreError::timed_out(PATIENCE))),
    }
}
