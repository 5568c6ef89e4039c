//! TLS beside the plain port of a server, with its own authority and certificates.

use std::{fmt, fs, io, path::Path};

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};

use super::{Builder, RedisServer, url};

/// A certificate and its private key, both in PEM.
#[derive(Clone)]
pub struct Identity {
    /// The certificate.
    pub certificate: String,
    /// Its private key.
    pub key: String,
}

/// A TLS port, and the certificates for it.
#[derive(Clone, Debug)]
pub(super) struct Tls {
    pub(super) port: u16,
    ca: String,
    server: Identity,
    client: Identity,
}

impl Builder {
    /// Enables TLS on a separate port, with a certificate for `127.0.0.1` and `localhost`. The
    /// server requires no client certificate; `.arg("--tls-auth-clients", "yes")` makes it require
    /// one.
    #[must_use]
    pub fn tls(self) -> Self {
        self.tls_for(&["127.0.0.1", "localhost"])
    }

    /// The same with a certificate for other names or addresses.
    #[must_use]
    pub fn tls_for(mut self, names: &[&str]) -> Self {
        self.tls = Some(
            Tls::new(names).unwrap_or_else(|error| panic!("a certificate for {names:?}: {error}")),
        );
        self
    }

    /// Uses the authority and the certificates of another builder.
    pub(crate) fn tls_of(mut self, other: &Self) -> Self {
        self.tls.clone_from(&other.tls);
        self
    }
}

impl RedisServer {
    /// [`url`](Self::url) over TLS.
    pub fn tls_url(&self) -> String {
        tls(url("", self.settings.password.as_deref(), self.tls_port()))
    }

    /// [`url_as`](Self::url_as) over TLS.
    pub fn tls_url_as(&self, user: &str, password: &str) -> String {
        tls(url(user, Some(password), self.tls_port()))
    }

    /// The port of [`tls_url`](Self::tls_url).
    pub fn tls_port(&self) -> u16 {
        self.tls().port
    }

    /// The certificate, in PEM, of the authority that has signed the server's and
    /// [`client_identity`](Self::client_identity).
    pub fn ca_pem(&self) -> &str {
        &self.tls().ca
    }

    /// A certificate that the server accepts if it requires one.
    pub fn client_identity(&self) -> &Identity {
        &self.tls().client
    }

    fn tls(&self) -> &Tls {
        self.settings
            .tls
            .as_ref()
            .expect("the server was built with `tls`")
    }
}

fn tls(plain: String) -> String {
    plain.replacen("redis://", "rediss://", 1)
}

impl Tls {
    fn new(names: &[&str]) -> Result<Self, rcgen::Error> {
        let mut authority = CertificateParams::default();
        authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        authority.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        authority.distinguished_name = common_name("lock-tests authority");
        let key = KeyPair::generate()?;
        let ca = authority.self_signed(&key)?.pem();
        let issuer = Issuer::new(authority, key);
        let server = Identity::issue(&issuer, "lock-tests server", names)?;
        let client = Identity::issue(&issuer, "lock-tests client", &[])?;
        Ok(Self {
            port: 0,
            ca,
            server,
            client,
        })
    }

    /// Writes the server's files to its directory, which is removed with it, and returns the
    /// options for them.
    pub(super) fn options(&self, directory: &Path) -> io::Result<Vec<String>> {
        let mut options = vec!["--tls-port".to_owned(), self.port.to_string()];
        for (option, name, pem) in [
            ("--tls-ca-cert-file", "ca.pem", &self.ca),
            ("--tls-cert-file", "server.pem", &self.server.certificate),
            ("--tls-key-file", "server.key", &self.server.key),
        ] {
            let file = directory.join(name);
            fs::write(&file, pem)?;
            options.extend([option.to_owned(), file.display().to_string()]);
        }
        options.extend(["--tls-auth-clients", "no"].map(str::to_owned));
        Ok(options)
    }
}

impl Identity {
    fn issue(
        issuer: &Issuer<'_, KeyPair>,
        name: &str,
        alternatives: &[&str],
    ) -> Result<Self, rcgen::Error> {
        let alternatives: Vec<String> = alternatives.iter().map(|&name| name.to_owned()).collect();
        let mut params = CertificateParams::new(alternatives)?;
        params.distinguished_name = common_name(name);
        let key = KeyPair::generate()?;
        Ok(Self {
            certificate: params.signed_by(&key, issuer)?.pem(),
            key: key.serialize_pem(),
        })
    }
}

/// An authority and the certificates that it signs must have different names: otherwise the
/// certificates would look self-signed.
fn common_name(name: &str) -> DistinguishedName {
    let mut distinguished = DistinguishedName::new();
    distinguished.push(DnType::CommonName, name);
    distinguished
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Identity").finish_non_exhaustive()
    }
}
