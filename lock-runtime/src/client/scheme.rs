//! The schemes of URLs. Their case does not matter.

#[cfg(feature = "records")]
use std::{fmt, sync::Arc};

use crate::error::{LockError, LockErrorKind};
#[cfg(feature = "records")]
use crate::store::{RecordStore, StoreError};

/// Opens a store at a URL, for a namespace.
#[cfg(feature = "records")]
pub(super) type Open = dyn Fn(&str, &str) -> Result<RecordStore, StoreError> + Send + Sync;

/// The schemes that an application has added.
#[cfg(feature = "records")]
#[derive(Clone, Default)]
pub(super) struct Schemes(Vec<(String, Arc<Open>)>);

#[cfg(feature = "records")]
impl Schemes {
    pub(super) fn add(&mut self, name: String, open: Arc<Open>) {
        self.0
            .retain(|(earlier, _)| !earlier.eq_ignore_ascii_case(&name));
        self.0.push((name, open));
    }

    /// Refuses a name with which no URL can begin.
    pub(super) fn check(&self) -> Result<(), LockError> {
        let is_name = |name: &str| {
            let is_part = |c: char| c.is_ascii_alphanumeric() || "+-.".contains(c);
            name.starts_with(|c: char| c.is_ascii_alphabetic()) && name.chars().all(is_part)
        };
        match self.0.iter().find(|(name, _)| !is_name(name)) {
            Some((name, _)) => {
                let message = format!(
                    "`scheme`: no URL has the scheme {name:?}: give its name without a colon, such as \"my-database\""
                );
                Err(LockError::new(LockErrorKind::InvalidSpec, message))
            }
            None => Ok(()),
        }
    }

    /// Returns the function that opens this URL.
    pub(super) fn of(&self, url: &str) -> Option<&Arc<Open>> {
        let named = self.0.iter().find(|(name, _)| is_of(url, &[name]));
        named.map(|(_, open)| open)
    }
}

#[cfg(feature = "records")]
impl fmt::Debug for Schemes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list()
            .entries(self.0.iter().map(|(name, _)| name))
            .finish()
    }
}

/// Returns the scheme of a URL, and the rest with its colon.
pub(super) fn parts(url: &str) -> (&str, &str) {
    url.split_at(url.find(':').unwrap_or(url.len()))
}

fn is_of(url: &str, schemes: &[&str]) -> bool {
    let (scheme, _) = parts(url);
    schemes.iter().any(|it| scheme.eq_ignore_ascii_case(it))
}

/// Returns whether the URL is that of a new in-memory store.
///
/// # Errors
/// `InvalidUrl` if it has more than a scheme.
pub(super) fn is_in_memory(url: &str) -> Result<bool, LockError> {
    match parts(url).1 {
        _ if !is_of(url, &["memory"]) => Ok(false),
        "" | ":" | "://" => Ok(true),
        _ => {
            let message = "a store in this process has no address: its URL is \"memory:\" and nothing else; \
                           that of a Redis server is redis://user:password@host:6379/0";
            Err(LockError::new(LockErrorKind::InvalidUrl, message))
        }
    }
}

/// Returns whether the URL is that of a PostgreSQL database.
pub(super) fn is_postgres(url: &str) -> bool {
    is_of(url, &["postgres", "postgresql"]) && parts(url).1.starts_with("://")
}

/// Returns whether the URL is that of an etcd cluster.
pub(super) fn is_etcd(url: &str) -> bool {
    is_of(url, &["etcd", "etcds"]) && parts(url).1.starts_with("://")
}

/// Returns whether the URL is that of a ZooKeeper ensemble.
pub(super) fn is_zookeeper(url: &str) -> bool {
    is_of(url, &["zookeeper"]) && parts(url).1.starts_with("://")
}

/// Returns whether the URL names a server.
#[cfg(any(feature = "redis", feature = "postgres", feature = "etcd"))]
pub(super) fn names_a_server(url: &str) -> bool {
    url.contains("://") && !is_of(url, &["memory"])
}

/// Returns whether the URL names Redis servers with TLS, or several URLs one of which does.
pub(super) fn is_tls_of_redis(url: &str) -> bool {
    let is_tls = |url: &str| {
        let base = parts(url).0.split('+').next().unwrap_or_default();
        is_of(base, &["rediss", "valkeys"])
    };
    match is_of(url, &["redlock"]) {
        true => parts(url)
            .1
            .trim_start_matches(':')
            .split(',')
            .any(|url| is_tls(url.trim())),
        false => is_tls(url),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_case_of_a_scheme_does_not_matter() {
        assert!(is_in_memory("MEMORY:").unwrap() && is_in_memory("memory").unwrap());
        assert!(is_in_memory("Memory://host").is_err());
        #[cfg(any(feature = "redis", feature = "postgres", feature = "etcd"))]
        assert!(!names_a_server("Memory://") && names_a_server("redis://host"));
        assert!(is_postgres("PostgreSQL://host/db") && !is_postgres("postgres"));
        for tls in [
            "REDISS://host",
            "valkeys+cluster://host",
            "rediss+sentinel://a,b/name",
            "Redlock:redis://a,Rediss://b,redis://c",
        ] {
            assert!(is_tls_of_redis(tls), "{tls}");
        }
        for plain in [
            "redis://rediss-host",
            "redis://a:rediss@host",
            "redis://:a,rediss:b@host",
            "memory:",
            "redlock",
        ] {
            assert!(!is_tls_of_redis(plain), "{plain}");
        }
    }
}
