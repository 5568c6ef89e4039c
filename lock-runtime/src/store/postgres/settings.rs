//! The address of a database and the options of its client.

use std::{
    error::Error,
    net::IpAddr,
    num::NonZeroUsize,
    str::FromStr as _,
    sync::{Arc, atomic::AtomicBool},
    time::Duration,
};

use tokio::task::spawn_blocking;
use tokio_postgres::{
    Config,
    config::{Host, SslMode},
};

use super::connection::tls::Tls;
use crate::{
    client::credentials::{Credentials, Provider},
    error::{LockError, LockErrorKind},
    observe::text::visible,
    shell::time::Instant,
    store::{
        StoreError, StoreErrorKind,
        remote::pem::{Certificates, Pem},
    },
};

/// The parameters of a URL that name files: of trusted authorities, of the certificate of the
/// client, and of its private key.
const FILES: [&str; 3] = ["sslrootcert", "sslcert", "sslkey"];
/// The parameter of a URL that names the owner of the schema.
const OWNER: &str = "schema_owner";
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
    credentials: Option<Provider>,
    schema_owner: Option<String>,
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
            credentials: None,
            schema_owner: None,
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
    ///
    /// The certificate of the server itself may be among them. It is accepted as it is, without a
    /// look at its name, its dates and its issuer: so a self-signed one can be pinned.
    #[must_use]
    pub fn root_certificate(mut self, pem: impl Into<Vec<u8>>) -> Self {
        self.root_certificate = Some(pem.into());
        self
    }

    /// Asks `provide` for the user and the password of each new connection, in place of those of
    /// the URL.
    ///
    /// An attempt to connect waits for at most a second, and a call that takes longer serves the
    /// next attempt. The function should keep a token that is dear to get. Its errors are those of
    /// an attempt to connect.
    ///
    /// ```
    /// # async fn token() -> Result<String, std::io::Error> { Ok(String::new()) }
    /// use lock_runtime::{Credentials, PostgresOptions};
    ///
    /// let options = PostgresOptions::new()
    ///     .credentials(async || Ok(Credentials::new("app", token().await?)));
    /// # drop(options);
    /// ```
    #[must_use]
    pub fn credentials<P, F>(mut self, provide: P) -> Self
    where
        P: Fn() -> F + Send + Sync + 'static,
        F: Future<Output = Result<Credentials, Box<dyn Error + Send + Sync>>> + Send + 'static,
    {
        self.credentials = Some(Provider::new(provide));
        self
    }

    /// Trusts the schema `lock_runtime` of this role as well. The parameter `schema_owner` of a URL
    /// does the same.
    ///
    /// The owner of the schema can make its functions act with the rights of their callers. So by
    /// default it must be this user, the owner of the database, or a superuser.
    #[must_use]
    pub fn schema_owner(mut self, role: impl Into<String>) -> Self {
        self.schema_owner = Some(role.into());
        self
    }

    pub(super) fn pool_size(&self) -> usize {
        self.connections.get()
    }
}

/// The database that a URL names.
#[derive(Clone)]
pub(super) struct Target {
    config: Config,
    tls: Tls,
    /// Certificates that are read for each connection.
    certificates: Option<Arc<Certificates>>,
    credentials: Option<Provider>,
    /// The roles that may own the schema, besides those that may do anything anyway.
    pub(super) owners: Vec<String>,
    /// The server has accepted the client before, on any connection.
    pub(super) accepted: Arc<AtomicBool>,
}

/// The settings of one connection.
pub(super) struct Settings {
    pub(super) config: Config,
    pub(super) tls: Tls,
    /// When another connection has to take its place.
    pub(super) until: Option<Instant>,
}

impl Target {
    pub(super) fn new(url: &str, options: &PostgresOptions) -> Result<Self, LockError> {
        check_text(url).map_err(invalid)?;
        let Parameters { url, files, owner } = Parameters::of(url);
        let config = Config::from_str(&url).map_err(|error| cause(&error, &url));
        let mut config = config.map_err(|complaint| invalid(&complaint))?;
        check_parts(&config).map_err(invalid)?;
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
        // The application's own sessions may have the name that the URL gives.
        let name = config.get_application_name();
        let name = name.map_or("lock-runtime".into(), |name| format!("lock-runtime {name}"));
        config.application_name(name);
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
        let [root, own, key] = files.map(|file| file.map(|path| Pem::File(path.into())));
        let client = match (own, key) {
            (Some(own), Some(key)) => Some((own, key)),
            (None, None) => None,
            _ => return Err(invalid("sslcert and sslkey need each other")),
        };
        let root = root.or_else(|| options.root_certificate.clone().map(Pem::Text));
        let certificates = Certificates { root, client };
        if config.get_ssl_mode() == SslMode::Disable && !certificates.is_empty() {
            return Err(invalid("it has sslmode=disable, and certificates"));
        }
        if !certificates.is_empty() {
            config.ssl_mode(SslMode::Require);
        }
        Ok(Self {
            tls: Tls::new(&certificates, config.get_ssl_mode())
                .map_err(|complaint| invalid(&complaint))?,
            config,
            certificates: certificates.change().then(|| Arc::new(certificates)),
            credentials: options.credentials.clone(),
            owners: options
                .schema_owner
                .clone()
                .into_iter()
                .chain(owner)
                .collect(),
            accepted: Arc::default(),
        })
    }

    /// Returns the settings for a new connection, with the present credentials and certificates.
    ///
    /// # Errors
    /// `Unavailable` if there are none.
    pub(super) async fn settings(&self) -> Result<Settings, StoreError> {
        let mut settings = Settings {
            config: self.config.clone(),
            tls: self.tls.clone(),
            until: None,
        };
        if let Some(certificates) = self.certificates.clone() {
            let mode = self.config.get_ssl_mode();
            let reading = spawn_blocking(move || Tls::new(&certificates, mode)).await;
            let read = reading.unwrap_or_else(|ended| Err(ended.to_string()));
            settings.tls = read.map_err(|complaint| {
                let message = format!("no connection: {complaint}");
                StoreError::new(StoreErrorKind::Unavailable, message)
            })?;
        }
        if let Some(provider) = &self.credentials {
            let credentials = provider.credentials().await?;
            settings.until = credentials.again_at();
            settings.config.password(credentials.password);
            if let Some(user) = credentials.user {
                settings.config.user(user);
            }
        }
        Ok(settings)
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
        // Another name may be a part of a URL that was taken for one.
        let is_plain = |name: &&str| !name.contains(['@', ':', '=', '&', '#', '%']);
        let database = database.filter(is_plain).unwrap_or_default();
        visible(&format!("{hosts}/{database}"))
    }
}

/// The parameters of a URL that the driver does not know, and the URL without them.
struct Parameters {
    url: String,
    files: [Option<String>; 3],
    owner: Option<String>,
}

impl Parameters {
    /// Takes them out, and values of `sslmode` that mean the same as `require` here: the
    /// certificate of the server is always verified.
    fn of(url: &str) -> Self {
        let (mut files, mut owner) = ([None, None, None], None);
        let Some((base, query)) = url.split_once('?') else {
            let url = url.to_owned();
            return Self { url, files, owner };
        };
        let mut kept = Vec::new();
        for parameter in query.split('&') {
            let (name, value) = parameter.split_once('=').unwrap_or((parameter, ""));
            match (FILES.iter().position(|file| *file == name), name, value) {
                (Some(index), ..) => files[index] = Some(decoded(value)),
                (None, OWNER, _) => owner = Some(decoded(value)),
                (None, "sslmode", "verify-ca" | "verify-full") => kept.push("sslmode=require"),
                _ => kept.push(parameter),
            }
        }
        let url = format!("{base}?{}", kept.join("&"));
        Self { url, files, owner }
    }
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

/// Refuses an `@` that is not the one between the credentials and the hosts. The driver takes the
/// text after it for a host, and it may be the rest of a password.
fn check_text(url: &str) -> Result<(), &'static str> {
    let Some((_, rest)) = url.split_once("://") else {
        return Ok(());
    };
    let mut parts = rest.split('@');
    let credentials = parts.next().unwrap_or_default();
    match parts.count() {
        0 => Ok(()),
        1 if !credentials.contains('?') => Ok(()),
        _ => {
            Err("it has an `@` or a `?` in the user, the password or a parameter; write %40 or %3F")
        }
    }
}

/// Refuses hosts and users that contain separators, as they may contain a password.
fn check_parts(config: &Config) -> Result<(), &'static str> {
    let is_address = |name: &str| {
        let (address, _zone) = name.split_once('%').unwrap_or((name, ""));
        address.parse::<IpAddr>().is_ok()
    };
    let is_host = |host: &Host| match host {
        Host::Tcp(name) => !name.contains(['@', ':', '/', '?', '#', '&', '=']) || is_address(name),
        #[cfg(unix)]
        Host::Unix(path) => !path.as_os_str().as_encoded_bytes().contains(&b'@'),
    };
    if !config.get_hosts().iter().all(is_host) {
        return Err("a host contains a character that no name has, such as `@` or `:`");
    }
    if config.get_user().is_some_and(|user| user.contains(':')) {
        return Err("the user contains `:`; write user:password@host");
    }
    Ok(())
}

/// Returns the complaint of the driver, without names that may be a part of a password.
fn cause(error: &tokio_postgres::Error, url: &str) -> String {
    let Some(source) = std::error::Error::source(error) else {
        return error.to_string();
    };
    let complaint = source.to_string();
    let is_name = |name: &str| name.bytes().all(|it| it.is_ascii_lowercase() || it == b'_');
    let is_known = |text: &str| text.strip_suffix('`').is_some_and(is_name);
    match complaint.strip_prefix("unknown option `") {
        Some(name) if url.contains("password=") || !is_known(name) => {
            "it has an unknown parameter".to_owned()
        }
        _ => complaint,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_shown_on_one_line() {
        let url = "postgres://app@host/a%1B[2J%0Ab";
        let target = Target::new(url, &PostgresOptions::new()).unwrap();
        assert_eq!(target.address(), r"host:5432/a\u{1b}[2J\u{a}b");
    }
}
