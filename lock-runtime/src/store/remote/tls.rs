//! TLS for connections to servers.

use std::{fmt::Display, sync::Arc};

use rustls::{
    ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme,
    client::{
        WebPkiServerVerifier,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature},
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime, pem::PemObject as _},
};

use crate::store::remote::pem::Certificates;

impl Certificates {
    /// Reads the certificates, and those that the system trusts if there is no root.
    ///
    /// # Errors
    /// A complaint about the certificates, or about a missing crypto provider.
    pub(crate) fn client_config(&self) -> Result<ClientConfig, String> {
        let of_the_root = |error: &dyn Display| format!("the root certificate: {error}");
        let of_the_client = |error: &dyn Display| format!("the certificate of the client: {error}");
        let (mut roots, mut own) = (RootCertStore::empty(), Vec::new());
        match &self.root {
            Some(pem) => {
                let pem = pem.read().map_err(|error| of_the_root(&error))?;
                for certificate in CertificateDer::pem_slice_iter(&pem) {
                    let certificate = certificate.map_err(|error| of_the_root(&error))?;
                    let added = roots.add(certificate.clone());
                    added.map_err(|error| of_the_root(&error))?;
                    own.push(certificate);
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
        let Some(provider) = CryptoProvider::get_default() else {
            return Err("TLS needs a crypto provider; install one, such as rustls::crypto::ring::default_provider().install_default()".into());
        };
        let config = ClientConfig::builder();
        let config = match own.is_empty() {
            true => config.with_root_certificates(roots),
            false => {
                let chains = WebPkiServerVerifier::builder(Arc::new(roots)).build();
                let chains = chains.map_err(|error| of_the_root(&error))?;
                let trusted = Trusted::Own(own, chains);
                let verifier = Arc::new(Verifier(trusted, provider.clone()));
                config
                    .dangerous()
                    .with_custom_certificate_verifier(verifier)
            }
        };
        let Some((own, key)) = &self.client else {
            return Ok(config.with_no_client_auth());
        };
        let own = own.read().map_err(|error| of_the_client(&error))?;
        let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&own).collect();
        let chain = chain.map_err(|error| of_the_client(&error))?;
        let key = key.read().map_err(|error| of_the_client(&error))?;
        let key = PrivateKeyDer::from_pem_slice(&key).map_err(|error| of_the_client(&error))?;
        let config = config.with_client_auth_cert(chain, key);
        config.map_err(|error| of_the_client(&error))
    }
}

/// TLS that accepts any certificate. `None` without a crypto provider, which the application
/// installs.
#[cfg(feature = "postgres-rustls")]
pub(crate) fn unverified() -> Option<ClientConfig> {
    let provider = CryptoProvider::get_default()?;
    let verifier = Arc::new(Verifier(Trusted::Any, provider.clone()));
    let config = ClientConfig::builder()
        .dangerous()
        .with_custom_certificate_verifier(verifier)
        .with_no_client_auth();
    Some(config)
}

/// Verifies that the server has the key of its certificate, and that the certificate is trusted.
#[derive(Debug)]
struct Verifier(Trusted, Arc<CryptoProvider>);

/// The certificates that a server may present.
#[derive(Debug)]
enum Trusted {
    /// These certificates, whatever name and time they are for, and those of the chains from them.
    Own(Vec<CertificateDer<'static>>, Arc<WebPkiServerVerifier>),
    #[cfg(feature = "postgres-rustls")]
    Any,
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        match &self.0 {
            Trusted::Own(own, chains) if own.iter().all(|own| own != certificate) => {
                chains.verify_server_cert(certificate, intermediates, name, ocsp, now)
            }
            _ => Ok(ServerCertVerified::assertion()),
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.1.signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signed, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.1.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signed, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.1.signature_verification_algorithms.supported_schemes()
    }
}
