//! What every store on a server needs: certificates, and the calls that are refused in an outage.

#[cfg(any(feature = "redis", feature = "records"))]
pub(super) mod outage;
#[cfg(any(feature = "rustls", feature = "postgres"))]
// Without TLS they are refused.
#[cfg_attr(
    not(any(feature = "rustls", feature = "postgres-rustls")),
    allow(dead_code)
)]
pub(crate) mod pem;
#[cfg(any(feature = "rustls", feature = "postgres-rustls"))]
pub(crate) mod tls;
