//! Creation of Redis clients from URLs, with the connection settings for locks.

use std::{borrow::Cow, time::Duration};

use redis::{
    Client, ConnectionInfo, IntoConnectionInfo, ProtocolVersion, RedisError,
    io::tcp::socket2::TcpKeepalive,
};
use url::{ParseError, Url};

use super::settings::RedisOptions;
use crate::error::{LockError, LockErrorKind};

/// The time after which a connection is given up if sent data or a probe is not acknowledged. A
/// connection that is cut silently must be detected well within a lease of usual length.
const SILENCE: Duration = Duration::from_secs(5);

/// Returns the URL with its scheme in lower case.
pub(super) fn with_lower_scheme(url: &str) -> Cow<'_, str> {
    match url.split_once("://") {
        Some((scheme, rest)) if scheme.bytes().any(|byte| byte.is_ascii_uppercase()) => {
            Cow::Owned(format!("{}://{rest}", scheme.to_ascii_lowercase()))
        }
        _ => Cow::Borrowed(url),
    }
}

/// Refuses a URL that requires TLS if TLS is not compiled in. Checks nothing else in the URL.
///
/// # Errors
/// `InvalidUrl`, with the feature to enable.
pub(super) fn check_tls(url: &str) -> Result<(), LockError> {
    let url = with_lower_scheme(url);
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
    let url = &*with_lower_scheme(url);
    check_tls(url)?;
    let scheme = url.split_once("://").map_or("", |(scheme, _)| scheme);
    match scheme {
        "redis" | "rediss" | "valkey" | "valkeys" | "unix" | "redis+unix" | "valkey+unix" => {}
        _ => {
            let meant = if is_address(url) {
                format!(" (did you mean redis://{url}?)")
            } else {
                String::new()
            };
            return Err(invalid(&format!(
                "it begins with none of redis://, rediss://, unix://, redis+sentinel://, redis+cluster://, the same with \
                 valkey, redlock: and memory:{meant}",
            )));
        }
    }
    let is_socket = scheme.contains("unix");
    let known =
        |name: &str| name == "protocol" || is_socket && matches!(name, "db" | "user" | "pass");
    let query = url.split_once('?').map_or("", |(_, query)| query);
    let parameters = query.split('#').next().unwrap_or_default().split('&');
    let mut names = parameters.map(|parameter| parameter.split('=').next().unwrap_or_default());
    if let Some(unknown) = names.find(|name| !name.is_empty() && !known(name)) {
        // What precedes an `@` may be the rest of a password.
        return Err(invalid(&unsupported(unknown, query.contains('@'))));
    }
    let info = url
        .into_connection_info()
        .map_err(|error| invalid(&complaint(url, &error)))?;
    if info.redis_settings().db() < 0 {
        return Err(invalid("the database number is negative"));
    }
    settings.client(for_locks(info), |error| invalid(&error.to_string()))
}

/// Returns whether the text is a host and a port, without a scheme and credentials.
fn is_address(text: &str) -> bool {
    let Some((host, port)) = text.rsplit_once(':') else {
        return false;
    };
    let of_host = |byte: u8| byte.is_ascii_alphanumeric() || b".-[]:".contains(&byte);
    !host.is_empty() && host.bytes().all(of_host) && port.parse::<u16>().is_ok()
}

fn unsupported(name: &str, secret: bool) -> String {
    let of_name = |byte: u8| byte.is_ascii_lowercase() || byte == b'_';
    if secret || !name.bytes().all(of_name) {
        return "it has an unsupported parameter".into();
    }
    let remedy = match name {
        "min_replicas" => {
            "it is an option of `RedisOptions`, or of redis+sentinel:// and its replica_timeout"
        }
        "replica_timeout" => "it is an option of redis+sentinel://",
        "longest_lease" => "it is an option of `RedisOptions`",
        "namespace" => "set it with `LockClient::builder().namespace(..)`",
        _ if OPTIONS.contains(&name) => "set it with `LockClient::builder().defaults(..)`",
        _ => "leave it out",
    };
    format!("it has the unsupported parameter {name:?}: {remedy}")
}

macro_rules! names {
    (
        options { $( $(#[$doc:meta])* $option:ident($($arg:ident: $of:ty)?) { $($set:tt)* } )* }
        modes { $($modes:tt)* }
    ) => {
        &[$(stringify!($option)),*]
    };
}

/// The options of a lock. They are not parameters of a URL.
const OPTIONS: &[&str] = crate::__lock_options!(names);

/// Describes the error of the redis crate for a URL.
fn complaint(url: &str, error: &RedisError) -> Cow<'static, str> {
    // The first part is a fixed text. The detail after it might quote the URL.
    let text = error.to_string();
    let text = text.split(" - ").next().unwrap_or_default();
    match Url::parse(url) {
        Err(ParseError::InvalidPort) => "the port is not a number from 1 to 65535".into(),
        Err(error) => error.to_string().into(),
        Ok(url) if text.contains("database number") => {
            let path = url.path().trim_start_matches('/');
            // A path with an `@` begins within a password that is not percent-encoded.
            if path.contains('@') {
                "its path is not a database number".into()
            } else {
                format!("{path:?} is not a database number").into()
            }
        }
        Ok(_) => text.to_owned().into(),
    }
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
    fn wrong_url_error_names_the_wrong_part() {
        for (url, words) in [
            (
                "redis://:hunter2@127.0.0.1/0?lease=3s",
                "the unsupported parameter \"lease\": set it with `LockClient::builder().defaults(..)`",
            ),
            (
                "redis://127.0.0.1?protocol=resp3&namespace=shop",
                "\"namespace\": set it with `LockClient::builder().namespace(..)`",
            ),
            (
                "redis://127.0.0.1/?min_replicas=1",
                "\"min_replicas\": it is an option of `RedisOptions`",
            ),
            ("redis://127.0.0.1/?tls=1", "\"tls\": leave it out"),
            ("redis://:x?hunter2=y@h", "an unsupported parameter;"),
            (
                "redis://:hunter2@127.0.0.1:99999",
                "the port is not a number from 1 to 65535",
            ),
            (
                "redis://:hunter2@127.0.0.1:port",
                "the port is not a number from 1 to 65535",
            ),
            (
                "redis://:hunter2@127.0.0.1/abc",
                "\"abc\" is not a database number",
            ),
            (
                "redis://us/er:hunter2@127.0.0.1/0",
                "its path is not a database number",
            ),
            ("127.0.0.1:17391", "(did you mean redis://127.0.0.1:17391?)"),
            ("[::1]:6379", "(did you mean redis://[::1]:6379?)"),
            (
                "redis-7.local:6379",
                "(did you mean redis://redis-7.local:6379?)",
            ),
            ("user:hunter2@127.0.0.1:6379", "and memory:; a valid one"),
            ("127.0.0.1", "and memory:; a valid one"),
        ] {
            let error = open(url, &RedisOptions::default()).unwrap_err();
            assert_eq!(error.kind(), LockErrorKind::InvalidUrl, "{url}");
            let error = error.to_string();
            assert!(error.contains(words), "{url}: {error}");
            assert!(!error.contains("hunter2"), "{error}");
        }
    }

    #[test]
    fn a_scheme_is_in_any_case() {
        for url in ["REDIS://Host:1/2", "Valkey://Host:1/2"] {
            let client = open(url, &RedisOptions::default()).unwrap();
            let info = client.get_connection_info();
            assert_eq!(
                (info.addr().to_string().as_str(), info.redis_settings().db()),
                ("Host:1", 2)
            );
        }
        assert_eq!(
            check_tls("REDISS+Sentinel://a/m").is_ok(),
            cfg!(feature = "rustls")
        );
    }

    #[test]
    fn a_client_speaks_resp3_whatever_the_url_says() {
        for url in [
            "redis://127.0.0.1/3",
            "redis+unix:///run/redis.sock",
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
