//! From a URL, or from a client that the caller made, to a client set up for locks.

use std::time::Duration;

use redis::{
    Client, ConnectionAddr, ConnectionInfo, IntoConnectionInfo, ProtocolVersion,
    io::tcp::socket2::TcpKeepalive,
};

use super::settings::Settings;
use crate::error::{LockError, LockErrorKind};

/// After so long without an answer to what was sent, or to a probe, the connection is given up: a cut that nobody
/// announces must be noticed well within a lease of usual length.
const SILENCE: Duration = Duration::from_secs(5);

/// Refuses a URL that asks for TLS where it is not compiled in: the rest of it may be right.
///
/// # Errors
/// `InvalidUrl`, with the feature to enable.
pub(super) fn check_tls(url: &str) -> Result<(), LockError> {
    let scheme = url.split_once("://").map_or("", |(scheme, _)| scheme);
    let is_tls = matches!(scheme.split('+').next(), Some("rediss" | "valkeys"));
    if is_tls && !cfg!(feature = "rustls") {
        Err(no_tls())
    } else {
        Ok(())
    }
}

fn no_tls() -> LockError {
    LockError::new(
        LockErrorKind::InvalidUrl,
        "the URL asks for TLS, which is not compiled in; enable the feature `rustls` of lock-runtime",
    )
}

/// A client for a URL.
///
/// # Errors
/// `InvalidUrl`; the message never repeats the URL, as it may hold a password.
pub(super) fn open(url: &str, settings: &Settings) -> Result<Client, LockError> {
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
            "it has a parameter that means nothing here (`min_replicas` is a setting of the builder, or of redis+sentinel://)",
        ));
    }
    let info = url.into_connection_info().map_err(|error| {
        // The first part is a fixed text; a detail behind it might quote the URL.
        invalid(error.to_string().split(" - ").next().unwrap_or_default())
    })?;
    adjust(info, settings)
}

fn invalid(complaint: &str) -> LockError {
    LockError::new(
        LockErrorKind::InvalidUrl,
        format!(
            "the URL does not name a Redis server: {complaint}; a right one is redis://user:password@host:6379/0 \
             (percent-encode special characters of the password)"
        ),
    )
}

/// The same client, set up for locks.
///
/// # Errors
/// `InvalidUrl` if the client names a server that cannot be reached with what is compiled in.
pub(super) fn adjust(info: ConnectionInfo, settings: &Settings) -> Result<Client, LockError> {
    if info.redis_settings().db() < 0 {
        return Err(invalid("the number of the database is negative"));
    }
    // A ready client may ask for TLS as well.
    let is_tls = matches!(info.addr(), ConnectionAddr::TcpTls { .. });
    settings.client(for_locks(info), |error| {
        match is_tls && !cfg!(feature = "rustls") {
            true => no_tls(),
            false => invalid(&error.to_string()),
        }
    })
}

/// How a server that keeps locks is connected to.
pub(super) fn for_locks(info: ConnectionInfo) -> ConnectionInfo {
    // RESP3 tells of a lost connection by itself, and carries pushes.
    let redis = info
        .redis_settings()
        .clone()
        .set_protocol(ProtocolVersion::RESP3);
    tuned(info.set_redis_settings(redis))
}

/// How any server is connected to.
pub(super) fn tuned(info: ConnectionInfo) -> ConnectionInfo {
    let mut redis = info.redis_settings().clone();
    if redis.lib_name().is_none() {
        // A user with narrow access rights may not do this, and would fill the server's log of denials.
        redis = redis.set_skip_set_lib_name();
    }
    // Every message is one small request that somebody waits for.
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
    fn a_wrong_url_is_refused_with_a_right_one_and_without_the_password() {
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
            let error = open(url, &Settings::default()).unwrap_err();
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
            let client = open(url, &Settings::default()).unwrap();
            let info = client.get_connection_info();
            assert_eq!(info.redis_settings().protocol(), ProtocolVersion::RESP3);
            assert!(info.tcp_settings().nodelay() && info.tcp_settings().keepalive().is_some());
        }
    }
}
