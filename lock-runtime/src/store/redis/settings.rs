//! The settings of a store in addition to its URL, independent of the topology.

use std::{fmt, num::NonZeroU32, time::Duration};

use redis::{Client, ConnectionInfo, RedisError};
#[cfg(feature = "rustls")]
use redis::{ClientTlsConfig, ConnectionAddr, TlsCertificates};

use crate::error::{LockError, LockErrorKind};

/// The settings for every server of a store.
#[derive(Clone, Default)]
pub(crate) struct Settings {
    /// The number of replicas that must have a grant before it is reported.
    pub(crate) min_replicas: Option<MinReplicas>,
    /// The trusted certificate authority, in PEM; `None`: those that the system trusts.
    #[cfg(feature = "rustls")]
    pub(crate) root_certificate: Option<Vec<u8>>,
    /// The certificate of this client.
    #[cfg(feature = "rustls")]
    pub(crate) client_certificate: Option<ClientCertificate>,
}

/// A certificate and its private key, in PEM.
#[cfg(feature = "rustls")]
#[derive(Clone)]
pub(crate) struct ClientCertificate {
    pub(crate) certificate: Vec<u8>,
    pub(crate) key: Vec<u8>,
}

/// The number of replicas that must have a grant, and the time limit of the wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MinReplicas {
    pub(crate) count: NonZeroU32,
    pub(crate) timeout: Duration,
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
        if self.timeout < Duration::from_millis(1) || self.timeout > Self::LONGEST_TIMEOUT {
            return Err(
                "the time-out must be from 1 ms to 400 ms, as a call to the store takes at most 500 ms",
            );
        }
        Ok(())
    }
}

impl Settings {
    /// Checks the settings, before any connection is established.
    ///
    /// # Errors
    /// `InvalidSpec`.
    pub(crate) fn check(&self) -> Result<(), LockError> {
        if let Some(min_replicas) = self.min_replicas {
            min_replicas
                .check()
                .map_err(|complaint| invalid("min_replicas", complaint))?;
        }
        #[cfg(feature = "rustls")]
        self.check_certificates()?;
        Ok(())
    }

    /// Refuses `min_replicas`, for a store that cannot wait for replicas.
    ///
    /// # Errors
    /// `InvalidSpec` if it is set.
    pub(crate) fn refuse_replicas(&self, reason: &str) -> Result<(), LockError> {
        match self.min_replicas {
            Some(_) => Err(invalid("min_replicas", &format!("{reason}; leave it out"))),
            None => Ok(()),
        }
    }

    /// Refuses certificates, for a store whose connections are configured in another way.
    ///
    /// # Errors
    /// `InvalidSpec` if there are any.
    pub(crate) fn refuse_certificates(&self, reason: &str) -> Result<(), LockError> {
        #[cfg(feature = "rustls")]
        for (setting, is_there) in [
            ("root_certificate", self.root_certificate.is_some()),
            ("client_certificate", self.client_certificate.is_some()),
        ] {
            if is_there {
                return Err(invalid(setting, &format!("{reason}; leave it out")));
            }
        }
        let _ = reason;
        Ok(())
    }

    #[cfg(feature = "rustls")]
    fn check_certificates(&self) -> Result<(), LockError> {
        let is_pem = |pem: &[u8], header: &str| String::from_utf8_lossy(pem).contains(header);
        if self
            .root_certificate
            .as_ref()
            .is_some_and(|pem| !is_pem(pem, "-----BEGIN CERTIFICATE-----"))
        {
            return Err(invalid(
                "root_certificate",
                "it contains no PEM certificate (-----BEGIN CERTIFICATE-----)",
            ));
        }
        if let Some(ClientCertificate { certificate, key }) = &self.client_certificate {
            if !is_pem(certificate, "-----BEGIN CERTIFICATE-----") {
                let complaint = "it contains no PEM certificate (-----BEGIN CERTIFICATE-----)";
                return Err(invalid("client_certificate", complaint));
            }
            if !is_pem(key, "PRIVATE KEY-----") {
                let complaint = "it contains no PEM private key (-----BEGIN PRIVATE KEY-----)";
                return Err(invalid("client_certificate", complaint));
            }
        }
        Ok(())
    }

    /// Creates a client for a server, with the certificates if it uses TLS.
    ///
    /// # Errors
    /// `InvalidSpec` for certificates that cannot be used, otherwise the error that
    /// `refused` returns.
    pub(super) fn client(
        &self,
        info: ConnectionInfo,
        refused: impl FnOnce(&RedisError) -> LockError,
    ) -> Result<Client, LockError> {
        #[cfg(feature = "rustls")]
        if let ConnectionAddr::TcpTls {
            tls_params: None, ..
        } = info.addr()
            && (self.root_certificate.is_some() || self.client_certificate.is_some())
        {
            let certificates = TlsCertificates {
                client_tls: self.client_certificate.clone().map(
                    |ClientCertificate { certificate, key }| ClientTlsConfig {
                        client_cert: certificate,
                        client_key: key,
                    },
                ),
                root_cert: self.root_certificate.clone(),
            };
            return Client::build_with_tls(info, certificates).map_err(|error| {
                // The error names the position of invalid PEM, and does not repeat the text.
                LockError::new(
                    LockErrorKind::InvalidSpec,
                    format!("the certificates cannot be used: {error}"),
                )
            });
        }
        Client::open(info).map_err(|error| refused(&error))
    }
}

fn invalid(setting: &str, complaint: &str) -> LockError {
    LockError::new(
        LockErrorKind::InvalidSpec,
        format!("`{setting}`: {complaint}"),
    )
}

// Omits the keys, which are secret.
impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut settings = f.debug_struct("Settings");
        settings.field("min_replicas", &self.min_replicas);
        #[cfg(feature = "rustls")]
        settings
            .field("root_certificate", &self.root_certificate.is_some())
            .field("client_certificate", &self.client_certificate.is_some());
        settings.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: NonZeroU32 = NonZeroU32::MIN;

    #[test]
    fn a_wait_for_replicas_that_cannot_be_meant_is_refused() {
        for timeout in [
            Duration::ZERO,
            Duration::from_micros(999),
            Duration::from_millis(401),
            Duration::MAX,
        ] {
            let settings = Settings {
                min_replicas: Some(MinReplicas {
                    count: ONE,
                    timeout,
                }),
                ..Settings::default()
            };
            let error = settings.check().unwrap_err();
            assert_eq!(error.kind(), LockErrorKind::InvalidSpec);
            assert!(error.to_string().contains("1 ms to 400 ms"), "{error}");
        }
        for timeout in [Duration::from_millis(1), Duration::from_millis(400)] {
            assert!(
                MinReplicas {
                    count: ONE,
                    timeout
                }
                .check()
                .is_ok()
            );
        }
    }

    #[cfg(feature = "rustls")]
    #[test]
    fn certificates_that_are_none_are_refused_and_never_shown() {
        let certificate = b"-----BEGIN CERTIFICATE-----".to_vec();
        let own = |certificate: &[u8], key: &[u8]| Settings {
            client_certificate: Some(ClientCertificate {
                certificate: certificate.into(),
                key: key.into(),
            }),
            ..Settings::default()
        };
        let root = Settings {
            root_certificate: Some(b"hunter2".to_vec()),
            ..Settings::default()
        };
        for (settings, words) in [
            (&root, "BEGIN CERTIFICATE"),
            (&own(b"hunter2", b"hunter2"), "BEGIN CERTIFICATE"),
            (&own(&certificate, b"hunter2"), "BEGIN PRIVATE KEY"),
        ] {
            let error = settings.check().unwrap_err();
            assert_eq!(error.kind(), LockErrorKind::InvalidSpec);
            assert!(error.to_string().contains(words), "{error}");
            assert!(
                !format!("{error} {settings:?}").contains("hunter2"),
                "{error} {settings:?}"
            );
        }
    }
}
