//! The address of a database and the options of its client.

use std::{num::NonZeroUsize, str::FromStr as _, time::Duration};

use tokio_postgres::{
    Config,
    config::{Host, SslMode},
};

use super::tls::Tls;
use crate::error::{LockError, LockErrorKind};

/// The parameter of a URL that names a file of trusted authorities.
const ROOT_CERTIFICATE: &str = "sslrootcert";
/// The limits of an attempt to connect, and of data without an acknowledgement.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
const UNACKNOWLEDGED: Duration = Duration::from_secs(5);
/// The pause between two probes of an idle connection.
const KEEPALIVE: Duration = Duration::from_secs(2);

/// Options for connections to PostgreSQL that a URL cannot express.
#[derive(Clone, Debug)]
pub struct PostgresOptions {
    connections: NonZeroUsize,
    root_certificate: Option<Vec<u8>>,
}

impl Default for PostgresOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl PostgresOptions {
    /// The connections of a client by default.
    pub const DEFAULT_CONNECTIONS: NonZeroUsize = NonZeroUsize::new(4).expect("it is not zero");

    /// Creates the default options.
    pub const fn new() -> Self {
        Self {
            connections: Self::DEFAULT_CONNECTIONS,
            root_certificate: None,
        }
    }

    /// Sets the largest number of connections, 4 by default. Another one listens for messages while
    /// a request waits.
    #[must_use]
    pub fn connections(self, connections: NonZeroUsize) -> Self {
        Self {
            connections,
            ..self
        }
    }

    /// Sets the authorities that the server's certificate may come from, in PEM, instead of those
    /// of the system. The parameter `sslrootcert` of a URL names a file with the same.
    #[must_use]
    pub fn root_certificate(mut self, pem: impl Into<Vec<u8>>) -> Self {
        self.root_certificate = Some(pem.into());
        self
    }

    pub(super) fn pool_size(&self) -> usize {
        self.connections.get()
    }
}

/// The database that a URL names.
#[derive(Clone)]
pub(super) struct Target {
    pub(super) config: Config,
    pub(super) tls: Tls,
}

impl Target {
    pub(super) fn new(url: &str, options: &PostgresOptions) -> Result<Self, LockError> {
        let (url, root_file) = without_root_certificate(url);
        let mut config = Config::from_str(&url).map_err(|error| invalid(&cause(&error)))?;
        if config.get_hosts().is_empty() {
            return Err(invalid(
                "it names no host; write postgres://user:password@host:5432/database",
            ));
        }
        if config.get_connect_timeout().is_none() {
            config.connect_timeout(CONNECT_TIMEOUT);
        }
        if config.get_tcp_user_timeout().is_none() {
            config.tcp_user_timeout(UNACKNOWLEDGED);
        }
        if config.get_application_name().is_none() {
            config.application_name("lock-runtime");
        }
        // A listening connection sends nothing, and has to notice the end of its server.
        if config.get_keepalives_idle() == Config::new().get_keepalives_idle() {
            config.keepalives_idle(UNACKNOWLEDGED);
        }
        if config.get_keepalives_interval().is_none() {
            config.keepalives_interval(KEEPALIVE);
        }
        if config.get_keepalives_retries().is_none() {
            config.keepalives_retries(2);
        }
        let root = match root_file {
            Some(path) => Some(std::fs::read(&path).map_err(|error| {
                invalid(&format!(
                    "{ROOT_CERTIFICATE}: the file {path:?} cannot be read: {error}"
                ))
            })?),
            None => options.root_certificate.clone(),
        };
        if config.get_ssl_mode() == SslMode::Disable && root.is_some() {
            return Err(invalid("it has sslmode=disable, and an authority to trust"));
        }
        let is_required = config.get_ssl_mode() == SslMode::Require || root.is_some();
        if is_required {
            config.ssl_mode(SslMode::Require);
        }
        let tls = Tls::new(root.as_deref(), config.get_ssl_mode())
            .map_err(|complaint| invalid(&complaint))?;
        Ok(Self { config, tls })
    }

    /// Returns the hosts and the database, without the credentials.
    pub(super) fn address(&self) -> String {
        let ports = self.config.get_ports();
        let port = |index: usize| ports.get(index).or(ports.first()).copied().unwrap_or(5432);
        let hosts = self.config.get_hosts().iter().enumerate();
        let hosts = hosts.map(|(index, host)| match host {
            Host::Tcp(name) => format!("{name}:{}", port(index)),
            #[cfg(unix)]
            Host::Unix(path) => path.display().to_string(),
        });
        let hosts = hosts.collect::<Vec<_>>().join(",");
        let database = self.config.get_dbname().or(self.config.get_user());
        format!("{hosts}/{}", database.unwrap_or_default())
    }
}

/// Takes the parameter out that the driver does not know, and `sslmode` values whose meaning is
/// that of `require` here: the certificate of the server is always verified.
fn without_root_certificate(url: &str) -> (String, Option<String>) {
    let Some((base, query)) = url.split_once('?') else {
        return (url.to_owned(), None);
    };
    let mut file = None;
    let mut kept = Vec::new();
    for parameter in query.split('&') {
        match parameter.split_once('=') {
            Some((ROOT_CERTIFICATE, path)) => file = Some(decoded(path)),
            Some(("sslmode", "verify-ca" | "verify-full")) => kept.push("sslmode=require"),
            _ => kept.push(parameter),
        }
    }
    (format!("{base}?{}", kept.join("&")), file)
}

fn decoded(text: &str) -> String {
    percent_encoding::percent_decode_str(text)
        .decode_utf8_lossy()
        .into_owned()
}

/// Returns an error without its URL, which may contain a password.
fn invalid(complaint: &str) -> LockError {
    let message = format!("the URL of the PostgreSQL database is invalid: {complaint}");
    LockError::new(LockErrorKind::InvalidUrl, message)
}

fn cause(error: &tokio_postgres::Error) -> String {
    let source = std::error::Error::source(error);
    source.map_or_else(|| error.to_string(), |source| source.to_string())
}
