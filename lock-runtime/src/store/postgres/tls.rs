//! TLS for connections.

use tokio_postgres::config::SslMode;

use crate::pem::Certificates;

/// TLS for connections, or none.
#[derive(Clone)]
pub(super) enum Tls {
    None,
    #[cfg(feature = "postgres-rustls")]
    Rustls(tokio_postgres_rustls::MakeRustlsConnect),
}

impl Tls {
    #[cfg(not(feature = "postgres-rustls"))]
    pub(super) fn new(certificates: &Certificates, mode: SslMode) -> Result<Self, String> {
        if !certificates.is_empty() || mode == SslMode::Require {
            let complaint = "it asks for TLS, which is not compiled in; enable the feature `postgres-rustls` of lock-runtime";
            return Err(complaint.into());
        }
        Ok(Self::None)
    }

    /// Uses the authorities in the certificates, or those of the system.
    #[cfg(feature = "postgres-rustls")]
    pub(super) fn new(certificates: &Certificates, mode: SslMode) -> Result<Self, String> {
        use rustls::{
            ClientConfig, RootCertStore,
            pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
        };
        // `prefer` is no protection, so it is not worth the authorities of the system.
        if certificates.is_empty() && mode != SslMode::Require {
            return Ok(Self::None);
        }
        let of_the_root = |error: &dyn std::fmt::Display| format!("the root certificate: {error}");
        let of_the_client =
            |error: &dyn std::fmt::Display| format!("the certificate of the client: {error}");
        let mut roots = RootCertStore::empty();
        match &certificates.root {
            Some(pem) => {
                let pem = pem.read().map_err(|error| of_the_root(&error))?;
                for certificate in CertificateDer::pem_slice_iter(&pem) {
                    let certificate = certificate.map_err(|error| of_the_root(&error))?;
                    roots
                        .add(certificate)
                        .map_err(|error| of_the_root(&error))?;
                }
                if roots.is_empty() {
                    return Err(of_the_root(&"there is none in the PEM"));
                }
            }
            None => {
                let system = rustls_native_certs::load_native_certs();
                roots.add_parsable_certificates(system.certs);
            }
        }
        if rustls::crypto::CryptoProvider::get_default().is_none() {
            return Err("TLS needs a crypto provider; install one, such as rustls::crypto::ring::default_provider().install_default()".into());
        }
        let config = ClientConfig::builder().with_root_certificates(roots);
        let config = match &certificates.client {
            Some((own, key)) => {
                let own = own.read().map_err(|error| of_the_client(&error))?;
                let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&own).collect();
                let chain = chain.map_err(|error| of_the_client(&error))?;
                let key = key.read().map_err(|error| of_the_client(&error))?;
                let key = PrivateKeyDer::from_pem_slice(&key);
                let key = key.map_err(|error| of_the_client(&error))?;
                let config = config.with_client_auth_cert(chain, key);
                config.map_err(|error| of_the_client(&error))?
            }
            None => config.with_no_client_auth(),
        };
        Ok(Self::Rustls(tokio_postgres_rustls::MakeRustlsConnect::new(
            config,
        )))
    }
}
