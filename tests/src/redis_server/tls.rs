//! TLS beside the plain port of a server, with its own authority and certificates.

use std::{fs, io, path::Path};

use super::{Builder, RedisServer, url};
use crate::certificates::{Certificates, Identity};

/// A TLS port, and the certificates for it.
#[derive(Clone, Debug)]
pub(super) struct Tls {
    pub(super) port: u16,
    certificates: Certificates,
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
        self.tls = Some(Tls {
            port: 0,
            certificates: Certificates::new(names),
        });
        self
    }

    /// The same with an expired certificate for another name that is its own authority.
    #[must_use]
    pub fn tls_self_signed(mut self) -> Self {
        self.tls = Some(Tls {
            port: 0,
            certificates: Certificates::self_signed(),
        });
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
        &self.tls().certificates.ca
    }

    /// A certificate that the server accepts if it requires one.
    pub fn client_identity(&self) -> &Identity {
        &self.tls().certificates.client
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
    /// Writes the server's files to its directory, which is removed with it, and returns the
    /// options for them.
    pub(super) fn options(&self, directory: &Path) -> io::Result<Vec<String>> {
        let mut options = vec!["--tls-port".to_owned(), self.port.to_string()];
        let Certificates { ca, server, .. } = &self.certificates;
        for (option, name, pem) in [
            ("--tls-ca-cert-file", "ca.pem", ca),
            ("--tls-cert-file", "server.pem", &server.certificate),
            ("--tls-key-file", "server.key", &server.key),
        ] {
            let file = directory.join(name);
            fs::write(&file, pem)?;
            options.extend([option.to_owned(), file.display().to_string()]);
        }
        options.extend(["--tls-auth-clients", "no"].map(str::to_owned));
        Ok(options)
    }
}
