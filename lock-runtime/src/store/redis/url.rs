//! Clients set up for locks, from a URL.

use std::time::Duration;

use redis::{
    Client, ConnectionInfo, IntoConnectionInfo, ProtocolVersion, io::tcp::socket2::TcpKeepalive,
};

use super::settings::RedisOptions;
use crate::error::{LockError, LockErrorKind};

/// The time after which a connection is given up if sent data or a probe is not acknowledged. A
/// connection that is cut silently must be detected well within a lease of usual length.
const SILENCE: Duration = Duration::from_secs(5);

/// Refuses a URL that asks for TLS if TLS is not compiled in. The rest of the URL may be right.
///
/// # Errors
/// `InvalidUrl`, with the feature to enable.
pub(super) fn check_tls(url: &str) -> Result<(), LockError> {
    let scheme = url.split_once("://").map_or("", |(scheme, _)| scheme);
    let is_tls = matches!(scheme.split('+').next(), Some("rediss" | "valkeys"));
    if is_tls && !cfg!(feature = "rustls") {
        Err(LockError::new(
            LockErrorKind::InvalidUrl,
            "the URL asks for TLS, which is not compiled in; enable the feature `rustls` of lock-runtime",
        ))
    } else {
        Ok(())
    }
}

/// Creates a client for a URL.
///
/// # Errors
/// `InvalidUrl`. The message never repeats the URL, which may contain a password.
pub(super) fn open(url: &str, settings: &RedisOptions) -> Result<Client, LockError> {
    check_tls(url)?;
    let scheme = url.split_once("://").map_or("", |(scheme, _)| scheme);
    match scheme {
        "redis" | "rediss" | "valkey" | "valkeys" | "unix" | "redis+unix" | "valkey+unix" => {}
        _ => {
            return Err(invalid(
                "it begins with none of redis://, rediss://, unix://, redis+sentinel://, redis+cluster://, redlock: and memory:",
            ));
        }
    }
    let is_socket = scheme.contains("unix");
    let known =
        |name: &str| name == "protocol" || is_socket && matches!(name, "db" | "user" | "pass");
    let parameters = url.split_once('?').map_or("", |(_, parameters)| parameters);
    let parameters = parameters.split('#').next().unwrap_or_default().split('&');
    let mut names = parameters.map(|parameter| parameter.split('=').next().unwrap_or_default());
    if names.any(|name| !name.is_empty() && !known(name)) {
        return Err(invalid(
            "it has an unsupported parameter (`min_replicas` is an option of `RedisOptions`, or of redis+sentinel://)",
        ));
    }
    let info = url.into_connection_info().map_err(|error| {
        // The first part is a fixed text. The detail after it might quote the URL.
        invalid(error.to_string().split(" - ").next().unwrap_or_default())
    })?;
    if info.redis_settings().db() < 0 {
        return Err(invalid("the database number is negative"));
    }
    settings.client(for_locks(info), |error| invalid(&error.to_string()))
}

fn invalid(complaint: &str) -> LockError {
    LockError::new(
        LockErrorKind::InvalidUrl,
        format!(
            "the URL does not name a Redis server: {complaint}; a valid one is redis://user:password@host:6379/0 \
             (percent-encode special characters of the password)"
        ),
    )
}

/// The connection settings for a server that stores locks.
pub(super) fn for_locks(info: ConnectionInfo) -> ConnectionInfo {
    // With RESP3 the client library reports a lost connection by itself, and delivers
    // push messages.
    let redis = info
        .redis_settings()
        .clone()
        .set_protocol(ProtocolVersion::RESP3);
    tuned(info.set_redis_settings(redis))
}

/// The connection settings for any server.
pub(super) fn tuned(info: ConnectionInfo) -> ConnectionInfo {
    let mut redis = info.redis_settings().clone();
    if redis.lib_name().is_none() {
        // A user with few access rights may not set the library name, and would fill the server's
        // log of denials.
        redis = redis.set_skip_set_lib_name();
    }
    // Every message is a small request that a caller waits for.
    let mut tcp = info.tcp_settings().clone().set_nodelay(true);
    if tcp.keepalive().is_none() {
        tcp = tcp.set_keepalive(
            TcpKeepalive::new()
                .with_time(SILENCE / 2)
                .with_interval(SILENCE / 5),
        );
    }
    #[cfg(any(target_os = "android", target_os = "fuchsia", target_os = "linux"))]
    if tcp.user_timeout().is_none() {
        tcp = tcp.set_user_timeout(SILENCE);
    }
    info.set_redis_settings(redis).set_tcp_settings(tcp)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_url_error_shows_a_valid_one_and_no_password() {
        for url in [
            "",
            "127.0.0.1:6379",
            "http://user:hunter2@127.0.0.1",
            "user:hunter2@127.0.0.1:6379",
            "redis://user:hunter2@",
            "redis://user:hunter2@127.0.0.1:port",
            "redis://user:hunter2@127.0.0.1/database",
            "redis://user:hunter2@127.0.0.1/?protocol=hunter2",
            "redis://user:hunter2@127.0.0.1/?min_replicas=1",
            "redis://127.0.0.1/?password=hunter2",
            "redis://:hunter2@0.0.0.0",
        ] {
            let error = open(url, &RedisOptions::default()).unwrap_err();
            assert_eq!(error.kind(), LockErrorKind::InvalidUrl, "{url}");
            assert!(
                error
                    .to_string()
                    .contains("redis://user:password@host:6379/0"),
                "{error}"
            );
            assert!(!error.to_string().contains("hunter2"), "{error}");
        }
    }

    #[test]
    fn a_client_speaks_resp3_whatever_the_url_says() {
        for url in [
            "redis://127.0.0.1/3",
            "redis://[::1]:7/?protocol=resp2",
            "unix:///run/redis.sock",
        ] {
            let client = open(url, &RedisOptions::default()).unwrap();
            let info = client.get_connection_info();
            assert_eq!(info.redis_settings().protocol(), ProtocolVersion::RESP3);
            assert!(info.tcp_settings().nodelay() && info.tcp_settings().keepalive().is_some());
        }
    }
}
