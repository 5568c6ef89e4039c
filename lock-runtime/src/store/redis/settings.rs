//! [`RedisOptions`]: the options of a store in addition to its URL, independent of the topology.

#[cfg(feature = "redis-rustls")]
use std::path::PathBuf;
use std::{error::Error, num::NonZeroU32, time::Duration};

use redis::ConnectionInfo;
#[cfg(feature = "redis-rustls")]
use rustls::{ClientConfig, crypto::CryptoProvider};

use super::connection::endpoint::Endpoint;
#[cfg(feature = "redis-rustls")]
use super::connection::endpoint::is_tls;
#[cfg(feature = "redis-rustls")]
use crate::store::remote::pem::{Certificates, Pem};
use crate::{
    client::credentials::{Credentials, Provider},
    error::LockError,
    request::spec::LockSpec,
};

/// Options for connections to Redis, in addition to the URL. See
/// [`LockClientBuilder::redis`](crate::LockClientBuilder::redis).
///
/// `Debug` omits certificates and keys.
///
/// ```
/// use std::{num::NonZeroU32, time::Duration};
/// use lock_runtime::{LockClient, RedisOptions};
///
/// let replicated = RedisOptions::new().min_replicas(NonZeroU32::MIN, Duration::from_millis(50));
/// let builder = LockClient::builder().namespace("shop").redis(replicated);
/// # drop(builder);
/// ```
#[must_use = "options have no effect until they are passed to a builder"]
#[derive(Clone, Debug, Default)]
pub struct RedisOptions {
    /// The number of replicas that must have a grant before it is reported.
    pub(super) min_replicas: Option<MinReplicas>,
    /// The longest lease over several servers.
    longest_lease: Option<Duration>,
    /// The time without an answer of a server after which requests for its keys are refused.
    pub(crate) unavailable_after: Option<Duration>,
    /// A grant that a message announces is polled before it is used.
    pub(crate) confirm_grants: bool,
    /// The time for which a fencing token is kept after its grant.
    pub(crate) fences_kept_for: Option<Duration>,
    credentials: Option<Provider>,
    sentinel_credentials: Option<Provider>,
    #[cfg(feature = "redis-rustls")]
    certificates: Certificates,
}

/// The number of replicas that must have a grant, and the time limit of the wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MinReplicas {
    pub(super) count: NonZeroU32,
    pub(super) timeout: Duration,
}

impl MinReplicas {
    /// Replicas at the same site have a grant within a round trip; the rest is a
    /// margin for delays.
    pub(super) const DEFAULT_TIMEOUT: Duration = Duration::from_millis(100);
    /// A call to the store takes at most 500 ms, and the wait is only a part of it.
    const LONGEST_TIMEOUT: Duration = Duration::from_millis(400);

    /// Checks the time-out, and returns the complaint.
    pub(super) fn check(self) -> Result<(), &'static str> {
        // The server takes whole milliseconds, and waits without limit for zero.
        if (Duration::from_millis(1)..=Self::LONGEST_TIMEOUT).contains(&self.timeout) {
            return Ok(());
        }
        Err("the time-out must be from 1 ms to 400 ms, as a call to the store takes at most 500 ms")
    }
}

impl RedisOptions {
    /// The time-out of `min_replicas` where only their number is set.
    pub(crate) const DEFAULT_REPLICA_TIMEOUT: Duration = MinReplicas::DEFAULT_TIMEOUT;

    /// Creates the default options.
    pub fn new() -> Self {
        Self::default()
    }

    /// Reports a grant only once `replicas` replicas have it, and waits for them for at
    /// most `timeout`, 1 ms to 400 ms.
    ///
    /// The URL of Sentinels can set the same (`?min_replicas=1&replica_timeout=50ms`) and takes
    /// precedence.
    ///
    /// Without this setting, the promotion of a lagging replica loses grants. A lock may then
    /// have two holders until the first one notices the loss at its next renewal. With it, each
    /// grant costs one more round trip. If too few replicas answer in time, no lock is granted:
    /// the request fails with `Unavailable` or continues to wait. Renewals do not wait for
    /// replicas. The setting narrows the gap and does not close it; see the guide's
    /// [page on Redis](crate::guide::redis#what-a-failover-may-lose).
    ///
    /// It applies to a single server and to the primary behind Sentinels; other stores refuse it
    /// with `InvalidSpec`. The Redis user needs the permission `+wait`.
    pub fn min_replicas(mut self, replicas: NonZeroU32, timeout: Duration) -> Self {
        let count = replicas;
        self.min_replicas = Some(MinReplicas { count, timeout });
        self
    }

    /// Sets the longest lease of a request over several servers (`redlock:`), 30 s by default.
    ///
    /// Use the same value for all clients. A client with another one is refused as `InvalidSpec`
    /// when it connects; the [guide](crate::guide::majority#settings-that-all-clients-share) shows
    /// how to change it. A lease that is left unset is at most this long.
    ///
    /// A server does not vote for this long after a restart, or after its first use in a
    /// namespace, because it may have forgotten a lock. A larger value makes that time longer.
    /// Other stores ignore this setting.
    pub fn longest_lease(mut self, longest_lease: Duration) -> Self {
        self.longest_lease = Some(longest_lease);
        self
    }

    /// Asks `provide` for the user and the password at each attempt to connect, in place of those
    /// of the URL: of a server, of each server of several, of each node of a cluster, or of the
    /// primary behind Sentinels.
    ///
    /// An attempt waits for at most a second, and a call that takes longer serves the next attempt.
    /// The function is called often while a server does not answer, so it should keep a token that
    /// is dear to get. Its errors are those of an attempt to connect, and their texts are logged.
    ///
    /// ```
    /// use lock_runtime::{Credentials, RedisOptions};
    ///
    /// // The file is replaced when the password changes.
    /// let options = RedisOptions::new().credentials(async || {
    ///     let password = std::fs::read_to_string("/run/secrets/redis")?;
    ///     Ok(Credentials::new("app", password.trim_end()))
    /// });
    /// # drop(options);
    /// ```
    pub fn credentials<P, F>(mut self, provide: P) -> Self
    where
        P: Fn() -> F + Send + Sync + 'static,
        F: Future<Output = Result<Credentials, Box<dyn Error + Send + Sync>>> + Send + 'static,
    {
        self.credentials = Some(Provider::new(provide));
        self
    }

    /// Same as [`credentials`](Self::credentials), for the Sentinels.
    pub fn sentinel_credentials<P, F>(mut self, provide: P) -> Self
    where
        P: Fn() -> F + Send + Sync + 'static,
        F: Future<Output = Result<Credentials, Box<dyn Error + Send + Sync>>> + Send + 'static,
    {
        self.sentinel_credentials = Some(Provider::new(provide));
        self
    }

    /// Trusts the authorities of these certificates (PEM) for TLS connections (`rediss://`),
    /// instead of those that the system trusts.
    ///
    /// The certificate of the server itself may be among them. It is accepted as it is, without a
    /// look at its name, its dates and its issuer: so a self-signed one can be pinned.
    #[cfg(feature = "redis-rustls")]
    pub fn root_certificate(mut self, pem: impl Into<Vec<u8>>) -> Self {
        self.certificates.root = Some(Pem::Text(pem.into()));
        self
    }

    /// Same as [`root_certificate`](Self::root_certificate), with a file that is read at each
    /// attempt to connect.
    #[cfg(feature = "redis-rustls")]
    pub fn root_certificate_file(mut self, path: impl Into<PathBuf>) -> Self {
        self.certificates.root = Some(Pem::File(path.into()));
        self
    }

    /// Presents this certificate, with its private key (both PEM), to servers that request one on
    /// a TLS connection.
    #[cfg(feature = "redis-rustls")]
    pub fn client_certificate(
        mut self,
        certificate: impl Into<Vec<u8>>,
        key: impl Into<Vec<u8>>,
    ) -> Self {
        let own = (Pem::Text(certificate.into()), Pem::Text(key.into()));
        self.certificates.client = Some(own);
        self
    }

    /// Same as [`client_certificate`](Self::client_certificate), with files that are read at each
    /// attempt to connect. An attempt that finds a certificate and the key of another one fails,
    /// and is repeated.
    #[cfg(feature = "redis-rustls")]
    pub fn client_certificate_files(
        mut self,
        certificate: impl Into<PathBuf>,
        key: impl Into<PathBuf>,
    ) -> Self {
        let own = (Pem::File(certificate.into()), Pem::File(key.into()));
        self.certificates.client = Some(own);
        self
    }

    /// Returns the longest lease of a request over several servers.
    pub(crate) fn longest_lease_or_default(&self) -> Duration {
        self.longest_lease.unwrap_or(LockSpec::DEFAULT_LEASE)
    }

    /// Returns whether a message only announces a grant. Without the replicas it does not count.
    pub(super) fn confirms(&self) -> bool {
        self.confirm_grants || self.min_replicas.is_some()
    }

    /// Checks the options, before any connection is established.
    ///
    /// # Errors
    /// `InvalidSpec`.
    pub(crate) fn check(&self) -> Result<(), LockError> {
        LockSpec::exclusive()
            .lease(self.longest_lease_or_default())
            .check()?;
        if let Some(Err(complaint)) = self.min_replicas.map(MinReplicas::check) {
            return Err(invalid(&["min_replicas"], complaint));
        }
        #[cfg(feature = "redis-rustls")]
        self.certificates.check()?;
        Ok(())
    }

    /// Refuses `min_replicas`, for a store that cannot wait for replicas.
    ///
    /// # Errors
    /// `InvalidSpec` if it is set.
    pub(crate) fn refuse_replicas(&self, reason: &str) -> Result<(), LockError> {
        match self.min_replicas {
            Some(_) => Err(invalid(
                &["min_replicas"],
                &format!("{reason}; leave it out"),
            )),
            None => Ok(()),
        }
    }

    /// Creates the endpoint of a server, with the certificates if it uses TLS.
    ///
    /// # Errors
    /// `InvalidSpec` for certificates that cannot be used.
    pub(super) fn endpoint(&self, info: ConnectionInfo) -> Result<Endpoint, LockError> {
        self.endpoint_as(info, self.credentials.clone())
    }

    /// The same for a Sentinel.
    pub(super) fn sentinel(&self, info: ConnectionInfo) -> Result<Endpoint, LockError> {
        self.endpoint_as(info, self.sentinel_credentials.clone())
    }

    fn endpoint_as(
        &self,
        info: ConnectionInfo,
        provider: Option<Provider>,
    ) -> Result<Endpoint, LockError> {
        let endpoint = Endpoint::new(info, provider);
        #[cfg(feature = "redis-rustls")]
        if is_tls(endpoint.info.addr()) {
            return endpoint.over_tls(&self.certificates);
        }
        Ok(endpoint)
    }
}

#[cfg(feature = "redis-rustls")]
impl Certificates {
    /// Checks them before any connection is established, and returns the settings of TLS with them.
    /// `None` if there are none, or without a crypto provider: each attempt to connect then names
    /// the remedy.
    ///
    /// # Errors
    /// `InvalidSpec` for certificates that cannot be used.
    pub(super) fn check(&self) -> Result<Option<ClientConfig>, LockError> {
        let read = |setting: &'static [&'static str; 1], pem: &Pem, header: &str, complaint| {
            let text = pem.read().map_err(|error| invalid(setting, &error))?;
            match String::from_utf8_lossy(&text).contains(header) {
                true => Ok(()),
                false => Err(invalid(setting, complaint)),
            }
        };
        let certificate = |setting: &'static [&'static str; 1], pem: &Pem| {
            let complaint = "it contains no PEM certificate (-----BEGIN CERTIFICATE-----)";
            read(setting, pem, "-----BEGIN CERTIFICATE-----", complaint)
        };
        if let Some(root) = &self.root {
            certificate(&["root_certificate"], root)?;
        }
        if let Some((own, key)) = &self.client {
            certificate(&["client_certificate"], own)?;
            let complaint = "it contains no PEM private key (-----BEGIN PRIVATE KEY-----)";
            read(&["client_certificate"], key, "PRIVATE KEY-----", complaint)?;
        }
        if self.is_empty() || CryptoProvider::get_default().is_none() {
            return Ok(None);
        }
        // The error names the position of invalid PEM, and does not repeat the text.
        let config = self.client_config();
        let config =
            config.map_err(|error| invalid(&["root_certificate", "client_certificate"], &error));
        config.map(Some)
    }
}

fn invalid(settings: &'static [&'static str], complaint: &str) -> LockError {
    let message = format!("`{}`: {complaint}", settings.join("`, `"));
    LockError::of_settings(settings, message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::LockErrorKind;

    const ONE: NonZeroU32 = NonZeroU32::MIN;

    #[test]
    fn a_wait_for_replicas_that_cannot_be_meant_is_refused() {
        let check = |timeout| RedisOptions::new().min_replicas(ONE, timeout).check();
        let (micros, ms) = (Duration::from_micros, Duration::from_millis);
        for timeout in [Duration::ZERO, micros(999), ms(401), Duration::MAX] {
            let error = check(timeout).unwrap_err();
            assert_eq!(error.kind(), LockErrorKind::InvalidSpec);
            assert!(error.to_string().contains("1 ms to 400 ms"), "{error}");
        }
        for timeout in [ms(1), ms(400)] {
            assert!(check(timeout).is_ok());
        }
    }

    #[cfg(feature = "redis-rustls")]
    #[test]
    fn certificates_that_are_none_are_refused_and_never_shown() {
        let own =
            |certificate: &str| RedisOptions::new().client_certificate(certificate, "hunter2");
        let root = RedisOptions::new().root_certificate("hunter2");
        for (settings, words) in [
            (root, "BEGIN CERTIFICATE"),
            (own("hunter2"), "BEGIN CERTIFICATE"),
            (own("-----BEGIN CERTIFICATE-----"), "BEGIN PRIVATE KEY"),
        ] {
            let error = settings.check().unwrap_err();
            assert_eq!(error.kind(), LockErrorKind::InvalidSpec);
            assert!(error.to_string().contains(words), "{error}");
            let shown = format!("{error} {settings:?}");
            assert!(!shown.contains("hunter2"), "{shown}");
        }
    }
}
