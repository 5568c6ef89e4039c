//! The URL of a cluster, `redis+cluster://[user:password@]host[:port][,host[:port]...]`, or the
//! URLs of some of its nodes.

use redis::{ConnectionAddr, ConnectionInfo};

use super::{settings::RedisOptions, url};
use crate::error::{LockError, LockErrorKind};

const RIGHT: &str = "redis+cluster://user:password@host:6379,host2:6379";

/// Parses the nodes of a cluster URL; `None` if the URL is not for a cluster.
///
/// # Errors
/// `InvalidUrl`. The message never repeats the URL, which may contain a password.
pub(super) fn parse(
    url: &str,
    settings: &RedisOptions,
) -> Option<Result<Vec<ConnectionInfo>, LockError>> {
    let (scheme, rest) = url.split_once("+cluster://")?;
    matches!(scheme, "redis" | "rediss" | "valkey" | "valkeys")
        .then(|| nodes(scheme, rest, settings))
}

fn nodes(
    scheme: &str,
    rest: &str,
    settings: &RedisOptions,
) -> Result<Vec<ConnectionInfo>, LockError> {
    let (user, hosts) = match rest.rsplit_once('@') {
        Some((user, hosts)) => (format!("{user}@"), hosts),
        None => (String::new(), rest),
    };
    let hosts = hosts.strip_suffix('/').unwrap_or(hosts);
    if hosts.contains('/') {
        return Err(invalid("a cluster has no numbered databases"));
    }
    if hosts.contains(['?', '#']) {
        return Err(invalid(
            "it has a query (?) or a fragment (#), which are not supported",
        ));
    }
    seeds(
        hosts
            .split(',')
            .map(|host| format!("{scheme}://{user}{host}")),
        settings,
    )
}

/// Parses URLs that name one node each.
///
/// # Errors
/// The errors of [`parse`].
pub(super) fn seeds(
    urls: impl IntoIterator<Item = impl AsRef<str>>,
    settings: &RedisOptions,
) -> Result<Vec<ConnectionInfo>, LockError> {
    let mut seeds: Vec<ConnectionInfo> = Vec::new();
    for url in urls {
        url::check_tls(url.as_ref())?;
        let client = url::open(url.as_ref(), settings).map_err(|error| match error.kind() {
            LockErrorKind::InvalidUrl => invalid("the URL of a node is not valid"),
            _ => error,
        })?;
        let seed = client.get_connection_info().clone();
        if seed.redis_settings().db() != 0 {
            return Err(invalid("a cluster has no numbered databases"));
        }
        if is_tls(&seed).is_none() {
            return Err(invalid("a node needs a host and a port"));
        }
        if seeds
            .first()
            .is_some_and(|first| is_tls(first) != is_tls(&seed))
        {
            return Err(invalid("either all nodes or none use TLS"));
        }
        seeds.push(seed);
    }
    if seeds.is_empty() {
        Err(invalid("no node is given"))
    } else {
        Ok(seeds)
    }
}

fn is_tls(info: &ConnectionInfo) -> Option<bool> {
    match info.addr() {
        ConnectionAddr::Tcp(..) => Some(false),
        ConnectionAddr::TcpTls { .. } => Some(true),
        _ => None,
    }
}

fn invalid(complaint: &str) -> LockError {
    LockError::new(
        LockErrorKind::InvalidUrl,
        format!(
            "this does not name a Redis Cluster: {complaint}; a valid URL is {RIGHT} (percent-encode special characters of \
             the password)"
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(url: &str) -> Option<Result<Vec<ConnectionInfo>, LockError>> {
        super::parse(url, &RedisOptions::default())
    }

    fn seeds(
        urls: impl IntoIterator<Item = impl AsRef<str>>,
    ) -> Result<Vec<ConnectionInfo>, LockError> {
        super::seeds(urls, &RedisOptions::default())
    }

    fn named(url: &str) -> Vec<String> {
        parse(url)
            .unwrap()
            .unwrap()
            .iter()
            .map(|seed| seed.addr().to_string())
            .collect()
    }

    #[test]
    fn a_url_names_the_nodes_to_begin_with() {
        for (url, nodes) in [
            ("redis+cluster://a", vec!["a:6379"]),
            ("redis+cluster://a:1,b,c:3", vec!["a:1", "b:6379", "c:3"]),
            ("redis+cluster://user:password@a:1,b:2/", vec!["a:1", "b:2"]),
            (
                "valkey+cluster://:password@127.0.0.1:1",
                vec!["127.0.0.1:1"],
            ),
        ] {
            assert_eq!(named(url), nodes, "{url}");
        }
        let seeds = parse("redis+cluster://ann:p%2Cw@a:1,[::1]:2")
            .unwrap()
            .unwrap();
        for seed in &seeds {
            assert_eq!(seed.redis_settings().username(), Some("ann"));
            assert_eq!(seed.redis_settings().password(), Some("p,w"));
        }
        assert!(
            matches!(seeds[1].addr(), ConnectionAddr::Tcp(host, 2) if host == "::1"),
            "{:?}",
            seeds[1].addr()
        );
    }

    #[test]
    fn a_url_of_another_kind_is_left_to_others() {
        for url in [
            "",
            "redis://a",
            "redis+sentinel://a/b",
            "http+cluster://a",
            "cluster://a",
        ] {
            assert!(parse(url).is_none(), "{url}");
        }
    }

    #[test]
    fn wrong_url_error_shows_a_valid_one_and_no_password() {
        for url in [
            "redis+cluster://",
            "redis+cluster://user:hunter2@",
            "redis+cluster://user:hunter2@a,",
            "redis+cluster://user:hunter2@,a",
            "redis+cluster://user:hunter2@a:port",
            "redis+cluster://user:hunter2@a:1/0",
            "redis+cluster://user:hunter2@a:1/3",
            "redis+cluster://user:hunter2@a:1?protocol=hunter2",
            "redis+cluster://user:hunter2@a:1#hunter2",
            "redis+cluster://user:hunter2/@a:1",
        ] {
            let error = parse(url).unwrap().unwrap_err();
            assert_eq!(error.kind(), LockErrorKind::InvalidUrl, "{url}");
            assert!(error.to_string().contains(RIGHT), "{error}");
            assert!(!error.to_string().contains("hunter2"), "{error}");
        }
        let none: [&str; 0] = [];
        for seeds in [
            seeds(none),
            seeds(["redis://a/1"]),
            seeds(["unix:///run/redis.sock"]),
            seeds(["a:1"]),
        ] {
            assert!(seeds.unwrap_err().to_string().contains(RIGHT));
        }
    }

    #[cfg(feature = "rustls")]
    #[test]
    fn the_nodes_are_reached_over_tls_or_none_is() {
        assert_eq!(
            is_tls(&parse("rediss+cluster://a,b").unwrap().unwrap()[1]),
            Some(true)
        );
        assert!(
            seeds(["rediss://a", "redis://b"])
                .unwrap_err()
                .to_string()
                .contains("TLS")
        );
    }
}
