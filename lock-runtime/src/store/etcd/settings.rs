//! The members of a cluster, the user, and the options of the client.

use std::{
    error::Error,
    future::{Future, ready},
    time::Duration,
};

use percent_encoding::percent_decode_str;
use tonic::transport::Endpoint;
use url::Url;

use crate::{
    client::credentials::{Credentials, Provider},
    error::{LockError, LockErrorKind},
};

const PORT: u16 = 2379;
const CONNECT_TIMEOUT: Duration = Duration::from_millis(500);
/// The pause between two probes of a connection. A server closes connections that probe more often
/// than every five seconds (`--grpc-keepalive-min-time`).
const KEEPALIVE: Duration = Duration::from_secs(10);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(2);

/// Options for connections to etcd that a URL cannot express.
#[derive(Clone, Debug, Default)]
pub struct EtcdOptions {
    credentials: Option<Provider>,
    #[cfg(feature = "etcd-rustls")]
    tls: Tls,
}

#[cfg(feature = "etcd-rustls")]
#[derive(Clone, Default)]
struct Tls {
    root: Option<Vec<u8>>,
    client: Option<(Vec<u8>, Vec<u8>)>,
}

/// Omits the private key.
#[cfg(feature = "etcd-rustls")]
impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tls")
            .field("root", &self.root.is_some())
            .field("client", &self.client.is_some())
            .finish()
    }
}

impl EtcdOptions {
    /// Creates the default options.
    pub fn new() -> Self {
        Self::default()
    }

    /// Asks `provide` for the user and the password when a member requires a new token, in place of
    /// those of the URL: for the first call, and when the token has ended or was refused.
    ///
    /// A call waits for at most a second, and an answer that takes longer serves the next one. The
    /// errors of the function are those of the call.
    #[must_use]
    pub fn credentials<P, F>(mut self, provide: P) -> Self
    where
        P: Fn() -> F + Send + Sync + 'static,
        F: Future<Output = Result<Credentials, Box<dyn Error + Send + Sync>>> + Send + 'static,
    {
        self.credentials = Some(Provider::new(provide));
        self
    }

    /// Sets the authorities that the members' certificates may come from, in PEM, instead of those
    /// of the system.
    #[cfg(feature = "etcd-rustls")]
    #[must_use]
    pub fn root_certificate(mut self, pem: impl Into<Vec<u8>>) -> Self {
        self.tls.root = Some(pem.into());
        self
    }

    /// Sets the certificate of this client and its private key, in PEM.
    #[cfg(feature = "etcd-rustls")]
    #[must_use]
    pub fn client_certificate(
        mut self,
        certificate: impl Into<Vec<u8>>,
        key: impl Into<Vec<u8>>,
    ) -> Self {
        self.tls.client = Some((certificate.into(), key.into()));
        self
    }
}

impl EtcdOptions {
    #[cfg(feature = "etcd-rustls")]
    fn is_anonymous(&self) -> bool {
        self.tls.client.is_none()
    }

    #[cfg(not(feature = "etcd-rustls"))]
    fn is_anonymous(&self) -> bool {
        true
    }
}

/// The members of a cluster, and the user.
#[derive(Clone)]
pub(super) struct Target {
    /// Each with its address.
    pub(super) members: Vec<(String, Endpoint)>,
    /// The user of the URL.
    pub(super) user: Option<String>,
    /// Provides the password, if there is a user.
    pub(super) credentials: Option<Provider>,
    /// The connection has TLS, and no certificate of the client.
    pub(super) is_anonymous: bool,
}

impl Target {
    /// Parses `etcd://[user:password@]host[:port][,host[:port]..]`, or `etcds://` with TLS.
    ///
    /// # Errors
    /// `InvalidUrl`. No part of the URL in the message can be a password.
    pub(super) fn new(url: &str, options: &EtcdOptions) -> Result<Self, LockError> {
        let (scheme, rest) = url.split_once("://").unwrap_or(("", url));
        let is_secure = scheme.eq_ignore_ascii_case("etcds");
        if !is_secure && !scheme.eq_ignore_ascii_case("etcd") {
            return Err(invalid("the scheme is not etcd:// or etcds://"));
        }
        let rest = rest.strip_suffix('/').unwrap_or(rest);
        if rest.contains(['/', '?', '#']) {
            return Err(invalid(
                "it has a path, a parameter or a fragment, or the password contains '/', '?' or '#': write them \
                 as %2F, %3F and %23. The namespace of the client is the prefix of the keys",
            ));
        }
        let (user, hosts) = match rest.rsplit_once('@') {
            Some((user, _)) if user.contains('@') => {
                return Err(invalid("the password contains '@': write it as %40"));
            }
            Some((user, hosts)) => (Some(credentials(user)?), hosts),
            None => (None, rest),
        };
        let members = hosts.split(',').map(|host| {
            let (name, uri) = address(host, is_secure)?;
            let unusable = |_| invalid(format!("{name} is no address"));
            let endpoint = Endpoint::from_shared(uri).map_err(unusable)?;
            let endpoint = endpoint
                .connect_timeout(CONNECT_TIMEOUT)
                .tcp_nodelay(true)
                .http2_keep_alive_interval(KEEPALIVE)
                .keep_alive_timeout(KEEPALIVE_TIMEOUT);
            let endpoint = match is_secure {
                true => secured(endpoint, options)?,
                false => endpoint,
            };
            Ok((name, endpoint))
        });
        let members = members.collect::<Result<_, _>>()?;
        let of_url = user.clone().map(|(user, password)| {
            let of_url = Credentials::new(user, password);
            Provider::new(move || ready(Ok(of_url.clone())))
        });
        Ok(Self {
            members,
            user: user.map(|(user, _)| user),
            credentials: options.credentials.clone().or(of_url),
            is_anonymous: is_secure && options.is_anonymous(),
        })
    }
}

fn invalid(complaint: impl std::fmt::Display) -> LockError {
    let message = format!(
        "the URL of etcd is invalid: {complaint}; it is etcd://user:password@host:2379,host:2379"
    );
    LockError::new(LockErrorKind::InvalidUrl, message)
}

fn credentials(user: &str) -> Result<(String, String), LockError> {
    let (name, password) = user.split_once(':').unwrap_or((user, ""));
    let decode = |text| {
        let decoded = percent_decode_str(text).decode_utf8();
        decoded
            .map(String::from)
            .map_err(|_| invalid("the user or the password is not UTF-8"))
    };
    Ok((decode(name)?, decode(password)?))
}

/// Returns the address of a member for people, and as a URI.
fn address(host: &str, is_secure: bool) -> Result<(String, String), LockError> {
    // A scheme that the parser has no rules for, so that it keeps each port.
    let parsed = Url::parse(&format!("etcd://{host}"));
    let parsed = parsed.map_err(|error| invalid(format!("a host: {error}")))?;
    let host = parsed.host_str().filter(|host| !host.is_empty());
    let Some(host) = host.filter(|_| parsed.path().is_empty()) else {
        return Err(invalid("a host is missing"));
    };
    let port = parsed.port().unwrap_or(PORT);
    let scheme = if is_secure { "https" } else { "http" };
    Ok((
        format!("{host}:{port}"),
        format!("{scheme}://{host}:{port}"),
    ))
}

#[cfg(feature = "etcd-rustls")]
fn secured(endpoint: Endpoint, options: &EtcdOptions) -> Result<Endpoint, LockError> {
    use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _};
    use tonic::transport::{Certificate, ClientTlsConfig, Identity};

    let unusable = |which: &str, error: &dyn std::fmt::Display| {
        let message = format!("the {which} for etcd cannot be used: {error}");
        LockError::new(LockErrorKind::InvalidUrl, message)
    };
    // Else an authority without a certificate would trust no member.
    let check = |which: &str, pem: &[u8]| match CertificateDer::from_pem_slice(pem) {
        Ok(_) => Ok(()),
        Err(error) => Err(unusable(which, &error)),
    };
    let mut config = ClientTlsConfig::new();
    config = match &options.tls.root {
        Some(root) => {
            check("root certificate", root)?;
            config.ca_certificate(Certificate::from_pem(root))
        }
        None => config.with_native_roots(),
    };
    if let Some((certificate, key)) = &options.tls.client {
        check("certificate of the client", certificate)?;
        PrivateKeyDer::from_pem_slice(key).map_err(|error| unusable("private key", &error))?;
        config = config.identity(Identity::from_pem(certificate, key));
    }
    let secured = endpoint.tls_config(config);
    secured.map_err(|error| unusable("certificates", &error))
}

#[cfg(not(feature = "etcd-rustls"))]
fn secured(_: Endpoint, _: &EtcdOptions) -> Result<Endpoint, LockError> {
    Err(invalid("etcds:// needs the feature `etcd-rustls`"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(url: &str) -> Result<Target, LockError> {
        Target::new(url, &EtcdOptions::new())
    }

    #[tokio::test]
    async fn a_url_names_members_and_a_user() {
        let names = |url: &str| {
            let members = target(url).unwrap().members;
            members
                .into_iter()
                .map(|(name, _)| name)
                .collect::<Vec<_>>()
        };
        assert_eq!(names("etcd://a"), ["a:2379"]);
        assert_eq!(
            names("ETCD://a:80,b:2379,[::1]:7/"),
            ["a:80", "b:2379", "[::1]:7"]
        );
        assert!(target("etcd://a").unwrap().credentials.is_none());
        let target = target("etcd://a%3Ap:p%40w%2F@a,b").unwrap();
        assert_eq!(target.user.as_deref(), Some("a:p"));
        let credentials = target.credentials.unwrap().credentials().await.unwrap();
        assert_eq!(credentials.password, "p@w/");
    }

    #[test]
    fn a_url_that_is_wrong_is_refused_without_its_password() {
        for url in [
            "etcd:",
            "etcd://",
            "http://a",
            "etcd://app:secret@x@a",
            "etcd://app:sec/ret@a",
            "etcd://app:secret@",
            "etcd://app:secret@a,,b",
            "etcd://app:secret@a:99999",
            "etcd://app:secret@a/path",
            "etcd://app:secret@a?x=1",
            "etcd://app:%ff%fesecret@a",
        ] {
            let error = target(url).err().unwrap();
            assert_eq!(error.kind(), LockErrorKind::InvalidUrl, "{url}");
            let shown = format!("{error:#} {error:?}");
            assert!(
                !shown.contains("secret") && !shown.contains("sec/"),
                "{shown}"
            );
        }
    }
}
