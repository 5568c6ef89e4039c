//! TLS for connections.

use tokio_postgres::config::SslMode;

/// TLS for connections, or none.
#[derive(Clone)]
pub(super) enum Tls {
    None,
    #[cfg(feature = "postgres-rustls")]
    Rustls(tokio_postgres_rustls::MakeRustlsConnect),
}

impl Tls {
    #[cfg(not(feature = "postgres-rustls"))]
    pub(super) fn new(root: Option<&[u8]>, mode: SslMode) -> Result<Self, String> {
        if root.is_some() || mode == SslMode::Require {
            let complaint = "it asks for TLS, which is not compiled in; enable the feature `postgres-rustls` of lock-runtime";
            return Err(complaint.into());
        }
        Ok(Self::None)
    }

    /// Uses the authorities in `root`, or those of the system.
    #[cfg(feature = "postgres-rustls")]
    pub(super) fn new(root: Option<&[u8]>, mode: SslMode) -> Result<Self, String> {
        use rustls::{
            ClientConfig, RootCertStore,
            pki_types::{CertificateDer, pem::PemObject as _},
        };
        // `prefer` is no protection, so it is not worth the authorities of the system.
        if root.is_none() && mode != SslMode::Require {
            return Ok(Self::None);
        }
        let mut roots = RootCertStore::empty();
        match root {
            Some(pem) => {
                for certificate in CertificateDer::pem_slice_iter(pem) {
                    let certificate =
                        certificate.map_err(|error| format!("the root certificate: {error}"))?;
                    roots
                        .add(certificate)
                        .map_err(|error| format!("the root certificate: {error}"))?;
                }
                if roots.is_empty() {
                    return Err("the root certificate: there is none in the PEM".into());
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
        let config = ClientConfig::builder()
            .with_root_certificates(roots)
            .with_no_client_auth();
        Ok(Self::Rustls(tokio_postgres_rustls::MakeRustlsConnect::new(
            config,
        )))
    }
}
