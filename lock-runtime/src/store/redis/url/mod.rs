//! The URLs of servers, of the nodes of a cluster and of the Sentinels of a primary, and the
//! connection settings for locks.
//!
//! The redis crate parses the URL of one server. A URL of several hosts is taken apart here
//! ([`Hosts`]), and put together again for each of them. No message repeats a URL, which may
//! contain passwords.

pub(super) mod sentinel;

use std::{borrow::Cow, fmt::Display, time::Duration};

use redis::{
    ConnectionInfo, IntoConnectionInfo, ProtocolVersion, RedisError, io::tcp::socket2::TcpKeepalive,
};
use url::{ParseError, Url};

use super::{
    connection::endpoint::{Endpoint, speaking},
    settings::RedisOptions,
};
use crate::error::{LockError, LockErrorKind};

/// The time after which a connection is given up if sent data or a probe is not acknowledged. A
/// connection that is cut silently must be detected well within a lease of usual length.
const SILENCE: Duration = Duration::from_secs(5);

/// A form of URLs, as in the message about a URL that does not have it: the subject that such a URL
/// names, and an example.
pub(super) struct Form(&'static str, &'static str);

pub(crate) const SERVER: Form = Form("a Redis server", "redis://user:password@host:6379/0");
pub(crate) const CLUSTER: Form = Form(
    "a Redis Cluster",
    "redis+cluster://user:password@host:6379,host2:6379",
);
pub(crate) const REDLOCK: Form = Form(
    "several Redis servers",
    "redlock:redis://host1:6379,redis://host2:6379,redis://host3:6379",
);
pub(super) const SENTINELS: Form = Form(
    "the Sentinels of a primary",
    "redis+sentinel://user:password@host1:26379,host2:26379,host3:26379/mymaster/0",
);

/// The reason why a URL is refused.
pub(super) type Complaint = Cow<'static, str>;

impl Form {
    /// Refuses a URL that does not have this form.
    pub(crate) fn refuse(&self, complaint: impl Display) -> LockError {
        let Self(names, example) = self;
        let message = format!(
            "the URL does not name {names}: {complaint}; a valid one is {example} (percent-encode special characters of \
             the password, such as @ and ,)"
        );
        LockError::new(LockErrorKind::InvalidUrl, message)
    }

    /// Creates the endpoint of the URL of one server.
    ///
    /// # Errors
    /// `InvalidUrl`, and `InvalidSpec` for certificates that cannot be used.
    pub(crate) fn endpoint(
        &self,
        url: &str,
        settings: &RedisOptions,
    ) -> Result<Endpoint, LockError> {
        let url = &*with_lower_scheme(url);
        check_tls(url)?;
        let info = check_parameters(url).and_then(|()| info(url));
        let info = info.map_err(|complaint| self.refuse(complaint))?;
        let is_plain = |it| matches!(it, "protocol=resp2" | "protocol=2");
        let query = url.split_once('?').map_or("", |(_, query)| query);
        let endpoint = settings.endpoint(for_locks(info))?;
        Ok(match query.split('&').any(is_plain) {
            true => endpoint.speaking(ProtocolVersion::RESP2),
            false => endpoint,
        })
    }
}

/// Returns the URL with its scheme in lower case.
pub(crate) fn with_lower_scheme(url: &str) -> Cow<'_, str> {
    match url.split_once("://") {
        Some((scheme, rest)) if scheme.bytes().any(|byte| byte.is_ascii_uppercase()) => {
            Cow::Owned(format!("{}://{rest}", scheme.to_ascii_lowercase()))
        }
        _ => Cow::Borrowed(url),
    }
}

/// The kind of the servers that a URL names: the text after the `+` of its scheme.
pub(crate) fn topology(url: &str) -> Option<&str> {
    let (base, topology) = scheme(url).split_once('+')?;
    is_tcp(base).then_some(topology)
}

fn scheme(url: &str) -> &str {
    url.split_once("://").map_or("", |(scheme, _)| scheme)
}

fn is_tcp(scheme: &str) -> bool {
    matches!(scheme, "redis" | "rediss" | "valkey" | "valkeys")
}

/// Refuses a URL that requires TLS if TLS is not compiled in. Checks nothing else in the URL.
///
/// # Errors
/// `InvalidUrl`, with the feature to enable.
pub(super) fn check_tls(url: &str) -> Result<(), LockError> {
    let url = with_lower_scheme(url);
    let is_tls = matches!(scheme(&url).split('+').next(), Some("rediss" | "valkeys"));
    if !is_tls || cfg!(feature = "redis-rustls") {
        return Ok(());
    }
    let message = "the URL asks for TLS, which is not compiled in; enable the feature `redis-rustls` of lock-runtime";
    Err(LockError::new(LockErrorKind::InvalidUrl, message))
}

/// Checks the scheme and the parameters of the URL of one server.
fn check_parameters(url: &str) -> Result<(), Complaint> {
    let scheme = scheme(url);
    let is_socket = matches!(scheme, "unix" | "redis+unix" | "valkey+unix");
    if !is_tcp(scheme) && !is_socket {
        let meant = match is_address(url) {
            true => format!(" (did you mean redis://{url}?)"),
            false => String::new(),
        };
        return Err(format!(
            "it begins with none of redis://, rediss://, unix://, redis+sentinel://, redis+cluster://, the same with valkey, \
             redlock: and memory:{meant}",
        )
        .into());
    }
    // The redis crate would take `#insecure` for leave not to check certificates.
    if url.contains('#') {
        return Err("it has a fragment, which begins with #; leave it out".into());
    }
    let (path, query) = url.split_once('?').unwrap_or((url, ""));
    if is_socket && path.contains('@') {
        return Err("the path of a socket contains an `@`, as credentials would; write %40".into());
    }
    let known =
        |name: &str| name == "protocol" || is_socket && matches!(name, "db" | "user" | "pass");
    let names = query.split('&').filter_map(|it| it.split('=').next());
    let mut seen = Vec::new();
    for name in names.filter(|name| !name.is_empty()) {
        if !known(name) {
            return Err(unsupported(name).into());
        }
        if seen.contains(&name) {
            return Err(
                format!("it has the parameter {name:?} twice; leave one of them out").into(),
            );
        }
        seen.push(name);
    }
    Ok(())
}

/// Returns whether the text is a host and a port, without a scheme and credentials.
fn is_address(text: &str) -> bool {
    let Some((host, port)) = text.rsplit_once(':') else {
        return false;
    };
    let of_host = |byte: u8| byte.is_ascii_alphanumeric() || b".-[]:".contains(&byte);
    !host.is_empty() && host.bytes().all(of_host) && port.parse::<u16>().is_ok()
}

/// Names a parameter only if it is a usual one, as another may be the rest of a password.
fn unsupported(name: &str) -> String {
    let remedy = match name {
        "min_replicas" => {
            "it is an option of `RedisOptions`, or of redis+sentinel:// and its replica_timeout"
        }
        "replica_timeout" => "it is an option of redis+sentinel://",
        "longest_lease" => "it is an option of `RedisOptions`",
        "namespace" => "set it with `LockClient::builder().namespace(..)`",
        "tls" | "ssl" | "timeout" | "db" | "password" => "leave it out",
        _ if OPTIONS.contains(&name) => "set it with `LockClient::builder().defaults(..)`",
        _ => return "it has an unsupported parameter".into(),
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

/// Parses the URL of one server.
fn info(url: &str) -> Result<ConnectionInfo, Complaint> {
    let info = url.into_connection_info();
    let info = info.map_err(|error| complaint(url, &error))?;
    match info.redis_settings().db() {
        ..0 => Err("the database number is negative".into()),
        0.. => Ok(info),
    }
}

/// Describes the error of the redis crate for a URL.
fn complaint(url: &str, error: &RedisError) -> Complaint {
    // The first part is a fixed text. The detail after it might quote the URL.
    let text = error.to_string();
    let text = text.split(" - ").next().unwrap_or_default();
    match Url::parse(url) {
        Err(ParseError::InvalidPort) => "the port is not a number from 1 to 65535".into(),
        Err(error) => error.to_string().into(),
        Ok(url) if text.contains("database number") => {
            let path = url.path().trim_start_matches('/');
            // Another path may begin within a password that is not percent-encoded.
            match path.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
                true => format!("{path:?} is not a database number").into(),
                false => "its path is not a database number".into(),
            }
        }
        Ok(_) => text.to_owned().into(),
    }
}

/// Parses `redis+cluster://[user:password@]host[:port][,host[:port]...]`: nodes of a cluster.
///
/// # Errors
/// `InvalidUrl`, and `InvalidSpec` for certificates that cannot be used.
pub(crate) fn cluster(url: &str, settings: &RedisOptions) -> Result<Vec<Endpoint>, LockError> {
    check_tls(url)?;
    let hosts = Hosts::of(url, "+cluster").and_then(Hosts::without_query);
    let hosts = hosts.map_err(|complaint| CLUSTER.refuse(complaint))?;
    if !hosts.path.is_empty() {
        return Err(CLUSTER.refuse("a cluster has no numbered databases"));
    }
    let node = |host| {
        let node = CLUSTER.endpoint(&hosts.url_of(host), settings)?;
        node.check_messages().map_err(|it| CLUSTER.refuse(it))?;
        Ok(node)
    };
    hosts.hosts.split(',').map(node).collect()
}

/// The parts of a URL that may name several hosts.
pub(super) struct Hosts<'a> {
    scheme: &'a str,
    /// The text before the hosts, `user:password@`.
    user: &'a str,
    pub(super) hosts: &'a str,
    /// The text after the hosts, without its first `/`.
    pub(crate) path: &'a str,
    pub(crate) query: Option<&'a str>,
}

impl<'a> Hosts<'a> {
    /// Takes a URL apart. Its scheme may end with `topology`.
    pub(crate) fn of(url: &'a str, topology: &str) -> Result<Self, Complaint> {
        let (scheme, rest) = url.split_once("://").unwrap_or_default();
        let scheme = scheme.strip_suffix(topology).unwrap_or(scheme);
        if !is_tcp(scheme) {
            return Err("it does not begin with redis:// or rediss://".into());
        }
        if rest.contains('#') {
            return Err("it has a fragment (#), which is not supported".into());
        }
        let (rest, query) = match rest.split_once('?') {
            Some((rest, query)) => (rest, Some(query)),
            None => (rest, None),
        };
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        if path.contains('@') {
            return Err("it has an `@` after a `/`; in a password, write %2F for the `/`".into());
        }
        let hosts_at = authority.rfind('@').map_or(0, |at| at + 1);
        let (user, hosts) = authority.split_at(hosts_at);
        Ok(Self {
            scheme,
            user,
            hosts,
            path,
            query,
        })
    }

    pub(super) fn without_query(self) -> Result<Self, Complaint> {
        match self.query {
            Some(_) => Err("it has parameters (?), which are not supported here".into()),
            None => Ok(self),
        }
    }

    /// The same URL with or without TLS.
    pub(super) fn with_scheme(&self, scheme: &'a str) -> Self {
        Self { scheme, ..*self }
    }

    /// The URL of one of the hosts.
    fn url_of(&self, host: &str) -> String {
        format!("{}://{}{host}", self.scheme, self.user)
    }

    /// The connection settings that all hosts share, without an address.
    pub(crate) fn shared(&self) -> Result<ConnectionInfo, Complaint> {
        if !matches!(self.user, "" | "@") && !self.user.contains(':') {
            return Err(
                "it has a user and no password; a password alone is written :password@".into(),
            );
        }
        info(&self.url_of("host"))
    }
}

/// The connection settings for a server that stores locks.
pub(super) fn for_locks(info: ConnectionInfo) -> ConnectionInfo {
    // With RESP3 the client library reports a lost connection by itself, and delivers
    // push messages.
    tuned(speaking(info, ProtocolVersion::RESP3))
}

/// The connection settings for any server.
pub(super) fn tuned(info: ConnectionInfo) -> ConnectionInfo {
    // A user with few access rights may not set the library name, and would fill the server's log
    // of denials.
    let redis = info.redis_settings().clone().set_skip_set_lib_name();
    // Every message is a small request that a caller waits for.
    let tcp = info.tcp_settings().clone().set_nodelay(true);
    let keepalive = TcpKeepalive::new().with_time(SILENCE / 2);
    let tcp = tcp.set_keepalive(keepalive.with_interval(SILENCE / 5));
    #[cfg(any(target_os = "android", target_os = "fuchsia", target_os = "linux"))]
    let tcp = tcp.set_user_timeout(SILENCE);
    info.set_redis_settings(redis).set_tcp_settings(tcp)
}

#[cfg(test)]
impl Form {
    /// Checks that the error refuses a URL of this form, and shows a valid one and no password.
    pub(crate) fn assert_refused(&self, url: &str, error: &LockError, words: &str) {
        assert_eq!(error.kind(), LockErrorKind::InvalidUrl, "{url}");
        let text = error.to_string();
        assert!(text.contains(words), "{url}: {text}");
        assert!(text.contains(self.1), "{url}: {text}");
        assert!(!text.contains("hunter2"), "{text}");
    }
}

#[cfg(test)]
mod tests {
    use redis::ConnectionAddr;

    #[cfg(feature = "redis-rustls")]
    use super::super::connection::endpoint::is_tls;
    use super::*;

    fn endpoint(url: &str) -> Result<Endpoint, LockError> {
        SERVER.endpoint(url, &RedisOptions::default())
    }

    fn cluster(url: &str) -> Result<Vec<Endpoint>, LockError> {
        super::cluster(url, &RedisOptions::default())
    }

    #[test]
    fn an_address_is_shown_on_one_line() {
        let socket = endpoint("unix:///run/a%1B[2J%0Ab").unwrap();
        assert_eq!(socket.to_string(), r"/run/a\u{1b}[2J\u{a}b");
    }

    #[test]
    fn wrong_url_error_names_the_wrong_part_and_shows_a_valid_url() {
        const PORT: &str = "the port is not a number from 1 to 65535";
        for (url, words) in [
            ("", ""),
            ("127.0.0.1:6379", ""),
            ("http://user:hunter2@127.0.0.1", ""),
            ("user:hunter2@127.0.0.1:6379", "and memory:; a valid one"),
            ("127.0.0.1", "and memory:; a valid one"),
            ("127.0.0.1:17391", "(did you mean redis://127.0.0.1:17391?)"),
            ("[::1]:6379", "(did you mean redis://[::1]:6379?)"),
            ("redis-7.local:6379", "redis://redis-7.local:6379?)"),
            ("redis://user:hunter2@", ""),
            ("redis://user:hunter2@127.0.0.1:port", PORT),
            ("redis://:hunter2@127.0.0.1:99999", PORT),
            ("redis://:hunter2@127.0.0.1:port", PORT),
            ("redis://user:hunter2@127.0.0.1/database", ""),
            ("redis://:hunter2@h/abc", "\"abc\" is not a database number"),
            ("redis://us/er:hunter2@h/0", "path is not a database number"),
            ("redis://user:hunter2@127.0.0.1/?protocol=hunter2", ""),
            ("redis://127.0.0.1/?password=hunter2", ""),
            (
                "redis://h/?protocol=2&protocol=hunter2",
                "\"protocol\" twice",
            ),
            ("redis://:hunter2@0.0.0.0", ""),
            ("redis://:x?hunter2=y@h", "an unsupported parameter;"),
            // The first of a list, whose password contains a comma as well.
            ("redis://:x?hunter", "an unsupported parameter;"),
        ] {
            SERVER.assert_refused(url, &endpoint(url).unwrap_err(), words);
        }
    }

    #[test]
    fn unsupported_parameter_error_names_the_remedy() {
        const NAMESPACE: &str = "set it with `LockClient::builder().namespace(..)`";
        for (parameter, remedy) in [
            ("lease", "set it with `LockClient::builder().defaults(..)`"),
            ("namespace", NAMESPACE),
            ("min_replicas", "it is an option of `RedisOptions`"),
            ("tls", "leave it out"),
        ] {
            let url = format!("redis://user:hunter2@127.0.0.1/0?protocol=resp3&{parameter}=1");
            let words = format!("the unsupported parameter {parameter:?}: {remedy}");
            SERVER.assert_refused(&url, &endpoint(&url).unwrap_err(), &words);
        }
    }

    #[test]
    fn a_scheme_is_in_any_case() {
        for url in ["REDIS://Host:1/2", "Valkey://Host:1/2"] {
            let info = &endpoint(url).unwrap().info;
            assert_eq!(info.addr().to_string(), "Host:1");
            assert_eq!(info.redis_settings().db(), 2);
        }
        let is_known = check_tls("REDISS+Sentinel://a/m").is_ok();
        assert_eq!(is_known, cfg!(feature = "redis-rustls"));
    }

    #[test]
    fn a_client_speaks_resp3_unless_the_url_says_otherwise() {
        use ProtocolVersion::{RESP2, RESP3};
        for (url, protocol) in [
            ("redis://127.0.0.1/3", RESP3),
            ("redis+unix:///run/redis.sock", RESP3),
            ("redis://[::1]:7/?protocol=resp2", RESP2),
            ("unix:///run/redis.sock?db=1&protocol=2", RESP2),
            ("redis://[::1]:7/?protocol=3", RESP3),
            ("unix:///run/redis.sock", RESP3),
        ] {
            let info = &endpoint(url).unwrap().info;
            assert_eq!(info.redis_settings().protocol(), protocol, "{url}");
            assert!(info.tcp_settings().nodelay() && info.tcp_settings().keepalive().is_some());
        }
    }

    #[test]
    fn a_url_names_the_nodes_to_begin_with() {
        for (url, expected) in [
            ("redis+cluster://a", "a:6379"),
            ("redis+cluster://a:1,b,c:3", "a:1 b:6379 c:3"),
            ("redis+cluster://user:password@a:1,b:2/", "a:1 b:2"),
            ("valkey+cluster://:password@127.0.0.1:1", "127.0.0.1:1"),
        ] {
            assert_eq!(topology(url), Some("cluster"));
            let nodes = cluster(url).unwrap();
            let names: Vec<_> = nodes
                .iter()
                .map(|node| node.info.addr().to_string())
                .collect();
            assert_eq!(names.join(" "), expected, "{url}");
        }
        let nodes = cluster("redis+cluster://ann:p%2Cw@a:1,[::1]:2").unwrap();
        for node in &nodes {
            assert_eq!(node.info.redis_settings().username(), Some("ann"));
            assert_eq!(node.info.redis_settings().password(), Some("p,w"));
        }
        assert_eq!(*nodes[1].info.addr(), ConnectionAddr::Tcp("::1".into(), 2));
    }

    #[test]
    fn a_url_of_another_kind_is_left_to_others() {
        for (url, expected) in [
            ("", None),
            ("redis://a", None),
            ("redis+sentinel://a/b", Some("sentinel")),
            ("http+cluster://a", None),
            ("cluster://a", None),
        ] {
            assert_eq!(topology(url), expected, "{url}");
        }
    }

    #[test]
    fn an_error_about_a_cluster_shows_a_valid_url_and_no_password() {
        for (url, words) in [
            ("", ""),
            ("user:hunter2@", ""),
            ("user:hunter2@a,", ""),
            ("user:hunter2@,a", ""),
            ("user:hunter2@a:port", "the port is not"),
            ("user:hunter2@a:1/0", "no numbered databases"),
            ("user:hunter2@a:1/3", "no numbered databases"),
            ("user:hunter2@a:1?protocol=hunter2", "(?)"),
            ("user:hunter2@a:1#hunter2", "(#)"),
            ("user:hunter2/@a:1", ""),
        ] {
            let url = format!("redis+cluster://{url}");
            CLUSTER.assert_refused(&url, &cluster(&url).unwrap_err(), words);
        }
    }

    #[cfg(feature = "redis-rustls")]
    #[test]
    fn the_nodes_are_reached_over_tls() {
        let nodes = cluster("rediss+cluster://a,b").unwrap();
        assert!(nodes.iter().all(|node| is_tls(node.info.addr())));
    }
}
