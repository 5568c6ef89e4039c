//! Certificates for servers of tests, with an authority of their own.

use std::fmt;

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};

/// A certificate and its private key, both in PEM.
#[derive(Clone)]
pub struct Identity {
    /// The certificate.
    pub certificate: String,
    /// Its private key.
    pub key: String,
}

/// The certificates of a server and of a client, and their authority.
#[derive(Clone, Debug)]
pub(crate) struct Certificates {
    pub(crate) ca: String,
    pub(crate) server: Identity,
    pub(crate) client: Identity,
}

impl Certificates {
    /// Creates an authority, and a certificate for a server with these names or addresses.
    ///
    /// # Panics
    /// When a name is invalid.
    pub(crate) fn new(names: &[&str]) -> Self {
        Self::try_new(names).unwrap_or_else(|error| panic!("a certificate for {names:?}: {error}"))
    }

    fn try_new(names: &[&str]) -> Result<Self, rcgen::Error> {
        let mut authority = CertificateParams::default();
        authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        authority.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        authority.distinguished_name = common_name("lock-tests authority");
        let key = KeyPair::generate()?;
        let ca = authority.self_signed(&key)?.pem();
        let issuer = Issuer::new(authority, key);
        let server = Identity::issue(&issuer, "lock-tests server", names)?;
        let client = Identity::issue(&issuer, "lock-tests client", &[])?;
        Ok(Self { ca, server, client })
    }

    /// Creates a certificate for a server that no chain can verify: it has signed itself, is marked
    /// as that of an authority, has expired, and is for another name.
    ///
    /// # Panics
    /// When it cannot be created.
    pub(crate) fn self_signed() -> Self {
        let mut params = CertificateParams::new(vec!["elsewhere.example".to_owned()])
            .unwrap_or_else(|error| panic!("a name: {error}"));
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.not_after = rcgen::date_time_ymd(2020, 1, 1);
        let signed = KeyPair::generate().and_then(|key| {
            let certificate = params.self_signed(&key)?.pem();
            let key = key.serialize_pem();
            Ok(Identity { certificate, key })
        });
        let server = signed.unwrap_or_else(|error| panic!("a certificate: {error}"));
        Self {
            ca: server.certificate.clone(),
            server,
            ..Self::new(&["localhost"])
        }
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
