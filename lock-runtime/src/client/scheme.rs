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
                Err(LockError::of_settings(&["scheme"], message))
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

/// The kind of store that a URL names by its scheme.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) enum Scheme {
    Memory,
    Redis,
    Redlock,
    Postgres,
    Etcd,
    ZooKeeper,
}

impl Scheme {
    /// The kind of store at `url`. Any other URL counts as one of Redis, which refuses it if it is
    /// wrong.
    ///
    /// # Errors
    /// `InvalidUrl` for an in-memory store with an address.
    pub(super) fn of(url: &str) -> Result<Self, LockError> {
        let rest = parts(url).1;
        let has_address = rest.starts_with("://");
        if is_of(url, &["memory"]) {
            if matches!(rest, "" | ":" | "://") {
                return Ok(Self::Memory);
            }
            let message = "a store in this process has no address: its URL is \"memory:\" and nothing else; \
                           that of a Redis server is redis://user:password@host:6379/0";
            return Err(LockError::new(LockErrorKind::InvalidUrl, message));
        }
        Ok(if is_of(url, &["redlock"]) && rest.starts_with(':') {
            Self::Redlock
        } else if is_of(url, &["postgres", "postgresql"]) && has_address {
            Self::Postgres
        } else if is_of(url, &["etcd", "etcds"]) && has_address {
            Self::Etcd
        } else if is_of(url, &["zookeeper"]) && has_address {
            Self::ZooKeeper
        } else {
            Self::Redis
        })
    }

    pub(super) fn is_not_compiled_in(self) -> LockError {
        let (feature, url) = match self {
            Self::Memory | Self::Redis | Self::Redlock => ("redis", "redis://host:6379/0"),
            Self::Postgres => ("postgres", "postgres://host/database"),
            Self::Etcd => ("etcd", "etcd://host:2379"),
            Self::ZooKeeper => ("zookeeper", "zookeeper://host:2181"),
        };
        let message = format!(
            "the store is not compiled in, but \"memory:\" is; enable the feature `{feature}` of lock-runtime for {url:?}"
        );
        LockError::new(LockErrorKind::InvalidUrl, message)
    }
}

/// Returns whether the URL names a server.
#[cfg(any(feature = "redis", feature = "postgres", feature = "etcd"))]
pub(super) fn names_a_server(url: &str) -> bool {
    url.contains("://") && !is_of(url, &["memory"])
}

/// Returns whether the URL names Redis servers or Sentinels with TLS, or several URLs one of which
/// does.
pub(super) fn is_tls_of_redis(url: &str) -> bool {
    let is_tls = |url: &str| {
        let (base, topology) = parts(url).0.split_once('+').unwrap_or((parts(url).0, ""));
        let query = url.split_once('?').map_or("", |(_, query)| query);
        let asks = query.split('&').any(|it| it == "sentinel_tls=true");
        is_of(base, &["rediss", "valkeys"]) || asks && topology.eq_ignore_ascii_case("sentinel")
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
        for (url, scheme) in [
            ("MEMORY:", Scheme::Memory),
            ("memory", Scheme::Memory),
            ("PostgreSQL://host/db", Scheme::Postgres),
            ("postgres", Scheme::Redis),
            ("Redlock:redis://a", Scheme::Redlock),
            ("ETCDS://a", Scheme::Etcd),
            ("ZooKeeper://a", Scheme::ZooKeeper),
        ] {
            assert_eq!(Scheme::of(url).unwrap(), scheme, "{url}");
        }
        assert!(Scheme::of("Memory://host").is_err());
        #[cfg(any(feature = "redis", feature = "postgres", feature = "etcd"))]
        assert!(!names_a_server("Memory://") && names_a_server("redis://host"));
        for tls in [
            "REDISS://host",
            "valkeys+cluster://host",
            "rediss+sentinel://a,b/name",
            "redis+sentinel://a,b/name?min_replicas=1&sentinel_tls=true",
            "Redlock:redis://a,Rediss://b,redis://c",
        ] {
            assert!(is_tls_of_redis(tls), "{tls}");
        }
        for plain in [
            "redis://rediss-host",
            "redis://a:rediss@host",
            "redis://:a,rediss:b@host",
            "redis+sentinel://a/name?sentinel_tls=false",
            "redis://host?sentinel_tls=true",
            "memory:",
            "redlock",
        ] {
            assert!(!is_tls_of_redis(plain), "{plain}");
        }
    }
}
