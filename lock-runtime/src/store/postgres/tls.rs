//! TLS for connections, and how one is made with it or without.

use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite};
use tokio_postgres::{AsyncMessage, Client, Config, Connection, Error, NoTls, config::SslMode};

use crate::pem::Certificates;

/// TLS for connections, or none.
#[derive(Clone)]
pub(super) enum Tls {
    None,
    #[cfg(feature = "postgres-rustls")]
    Rustls(tokio_postgres_rustls::MakeRustlsConnect),
    /// TLS if the server offers it, without a look at its certificate: protection from readers of
    /// the network, and none from a server in between, as with `libpq`.
    #[cfg(feature = "postgres-rustls")]
    Preferred(tokio_postgres_rustls::MakeRustlsConnect),
}

/// Drives a connection, and returns the next message or its end.
pub(super) type Driver =
    Box<dyn FnMut(&mut Context<'_>) -> Poll<Option<Result<AsyncMessage, Error>>> + Send>;

impl Tls {
    /// Connects to the first of the hosts that accepts the connection.
    pub(super) async fn connect(self, config: &Config) -> Result<(Client, Driver), Error> {
        match self {
            Self::None => config.connect(NoTls).await.map(driven),
            #[cfg(feature = "postgres-rustls")]
            Self::Rustls(tls) => config.connect(tls).await.map(driven),
            #[cfg(feature = "postgres-rustls")]
            Self::Preferred(tls) => match config.connect(tls).await {
                Err(error) if refuses_tls(&error) => config.connect(NoTls).await.map(driven),
                connected => connected.map(driven),
            },
        }
    }
}

fn driven<S, T>((client, mut connection): (Client, Connection<S, T>)) -> (Client, Driver)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    (client, Box::new(move |cx| connection.poll_message(cx)))
}

/// Returns whether a connection without TLS may succeed: the handshake has failed, or the server
/// accepts no client over TLS.
#[cfg(feature = "postgres-rustls")]
fn refuses_tls(error: &Error) -> bool {
    let is_refused = Some(&tokio_postgres::error::SqlState::INVALID_AUTHORIZATION_SPECIFICATION);
    // The driver tells the kinds of its errors apart by their texts alone.
    error.code() == is_refused
        || error
            .to_string()
            .starts_with("error performing TLS handshake")
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
        if certificates.is_empty() && mode != SslMode::Require {
            return Ok(match mode {
                SslMode::Prefer => unverified::connector().map_or(Self::None, Self::Preferred),
                _ => Self::None,
            });
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

/// TLS that accepts any certificate.
#[cfg(feature = "postgres-rustls")]
mod unverified {
    use std::sync::Arc;

    use rustls::{
        ClientConfig, DigitallySignedStruct, Error, SignatureScheme,
        client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
        crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature},
        pki_types::{CertificateDer, ServerName, UnixTime},
    };
    use tokio_postgres_rustls::MakeRustlsConnect;

    /// `None` without a crypto provider, which the application installs.
    pub(super) fn connector() -> Option<MakeRustlsConnect> {
        let Some(provider) = CryptoProvider::get_default() else {
            tracing::debug!("no crypto provider is installed, so connections do not use TLS");
            return None;
        };
        let config = ClientConfig::builder()
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(Unverified(provider.clone())))
            .with_no_client_auth();
        Some(MakeRustlsConnect::new(config))
    }

    #[derive(Debug)]
    struct Unverified(Arc<CryptoProvider>);

    impl ServerCertVerifier for Unverified {
        fn verify_server_cert(
            &self,
            _certificate: &CertificateDer<'_>,
            _intermediates: &[CertificateDer<'_>],
            _name: &ServerName<'_>,
            _ocsp: &[u8],
            _now: UnixTime,
        ) -> Result<ServerCertVerified, Error> {
            Ok(ServerCertVerified::assertion())
        }

        fn verify_tls12_signature(
            &self,
            message: &[u8],
            certificate: &CertificateDer<'_>,
            signed: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            let algorithms = &self.0.signature_verification_algorithms;
            verify_tls12_signature(message, certificate, signed, algorithms)
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            certificate: &CertificateDer<'_>,
            signed: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            let algorithms = &self.0.signature_verification_algorithms;
            verify_tls13_signature(message, certificate, signed, algorithms)
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            let algorithms = &self.0.signature_verification_algorithms;
            algorithms.supported_schemes()
        }
    }
}
