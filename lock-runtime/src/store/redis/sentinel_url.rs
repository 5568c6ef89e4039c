//! The URL that names Sentinels, or the URL of a primary and that of each of its Sentinels.

use std::{borrow::Cow, num::NonZeroU32, time::Duration};

use percent_encoding::percent_decode_str;
use redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo, RedisConnectionInfo};
use url::Host;

use super::{
    sentinel::Sentinels,
    settings::{MinReplicas, RedisOptions},
    url::{check_tls, for_locks, tuned},
};
use crate::error::{LockError, LockErrorKind};

const DEFAULT_PORT: u16 = 26379;

/// Whether the URL names Sentinels.
pub(super) fn is_one(url: &str) -> bool {
    matches!(
        scheme(url),
        "redis+sentinel" | "rediss+sentinel" | "valkey+sentinel" | "valkeys+sentinel"
    )
}

/// Parses `redis+sentinel://[user:password@]host[:26379][,host...]/<name>[/db][?..]`. Returns the
/// Sentinels, and the settings with the parameters of the URL applied.
///
/// # Errors
/// `InvalidUrl`. The message never repeats the URL, which may contain passwords.
pub(super) fn open(
    url: &str,
    mut settings: RedisOptions,
) -> Result<(Sentinels, RedisOptions), LockError> {
    check_tls(url)?;
    let parts = Parts::of(url).map_err(invalid)?;
    let (name, db) = parts.name_and_db().map_err(invalid)?;
    let options = Options::of(parts.query).map_err(invalid)?;
    settings.min_replicas = options
        .min_replicas()
        .map_err(invalid)?
        .or(settings.min_replicas);
    let primary = parts.credentials.clone().settings().set_db(db);
    let watching = options.credentials().map_err(invalid)?.settings();
    let mut sentinels: Vec<ConnectionInfo> = Vec::new();
    for host in parts.hosts.split(',') {
        let address = address(host, parts.tls).map_err(invalid)?;
        // A Sentinel that is named twice has one vote.
        if sentinels.iter().all(|other| *other.addr() != address) {
            sentinels.push(at(address, watching.clone())?);
        }
    }
    Ok((
        Sentinels::new(name, of_primary(parts.tls, primary)?, sentinels, &settings)?,
        settings,
    ))
}

/// Parses `redis://[user:password@]<name>[/db]` and a `redis://[user:password@]host[:26379]` for
/// each Sentinel.
///
/// # Errors
/// The errors of [`open`].
pub(super) fn open_each<'a>(
    primary: &str,
    urls: impl IntoIterator<Item = &'a str>,
    settings: &RedisOptions,
) -> Result<Sentinels, LockError> {
    check_tls(primary)?;
    let parts = Parts::of(primary).map_err(invalid_primary)?;
    let name = decoded(parts.hosts, "the primary's name").map_err(invalid_primary)?;
    if name.is_empty() {
        return Err(invalid_primary(
            "it has no name of a primary in place of the host",
        ));
    }
    if name.contains(':') {
        return Err(invalid_primary(
            "it has a port after the primary's name; the Sentinels supply the port",
        ));
    }
    if name.contains(',') {
        return Err(invalid_primary(
            "it has several names in place of the host; a client has one primary",
        ));
    }
    let db = database(parts.path.trim_end_matches('/')).map_err(invalid_primary)?;
    parts.no_query().map_err(invalid_primary)?;
    let primary = of_primary(parts.tls, parts.credentials.settings().set_db(db))?;
    let mut sentinels: Vec<ConnectionInfo> = Vec::new();
    for url in urls {
        check_tls(url)?;
        let parts = Parts::of(url).map_err(invalid_sentinel)?;
        if !matches!(parts.path, "" | "/") {
            return Err(invalid_sentinel(
                "it has a path after the address; a Sentinel has no databases",
            ));
        }
        parts.no_query().map_err(invalid_sentinel)?;
        let address = address(parts.hosts, parts.tls).map_err(invalid_sentinel)?;
        if sentinels.iter().all(|other| *other.addr() != address) {
            sentinels.push(at(address, parts.credentials.settings())?);
        }
    }
    if sentinels.is_empty() {
        return Err(invalid_sentinel(
            "no Sentinel is given; name each of them, three or more",
        ));
    }
    Sentinels::new(name.into_owned(), primary, sentinels, settings)
}

type Complaint = Cow<'static, str>;

fn invalid(complaint: impl Into<Complaint>) -> LockError {
    let right = "redis+sentinel://user:password@host1:26379,host2:26379,host3:26379/mymaster/0";
    refused(
        "the URL does not name the Sentinels of a primary",
        complaint,
        right,
    )
}

fn invalid_primary(complaint: impl Into<Complaint>) -> LockError {
    refused(
        "the URL does not name a primary",
        complaint,
        "redis://user:password@mymaster/0",
    )
}

fn invalid_sentinel(complaint: impl Into<Complaint>) -> LockError {
    refused(
        "the URL does not name a Sentinel",
        complaint,
        "redis://user:password@host:26379",
    )
}

fn refused(problem: &str, complaint: impl Into<Complaint>, right: &str) -> LockError {
    let complaint = complaint.into();
    let message = format!(
        "{problem}: {complaint}; a valid one is {right} (percent-encode special characters of the password)"
    );
    LockError::new(LockErrorKind::InvalidUrl, message)
}

fn scheme(url: &str) -> &str {
    url.split_once("://").map_or("", |(scheme, _)| scheme)
}

/// The parts of a URL with several hosts.
struct Parts<'a> {
    tls: bool,
    credentials: Credentials,
    hosts: &'a str,
    /// The text after the hosts, without its first `/`.
    path: &'a str,
    query: Option<&'a str>,
}

impl<'a> Parts<'a> {
    fn of(url: &'a str) -> Result<Self, Complaint> {
        let scheme = scheme(url).to_ascii_lowercase();
        let tls = match scheme.strip_suffix("+sentinel").unwrap_or(&scheme) {
            "redis" | "valkey" => false,
            "rediss" | "valkeys" => true,
            _ => return Err("it does not begin with redis:// or rediss://".into()),
        };
        let rest = url.split_once("://").map_or("", |(_, rest)| rest);
        if rest.contains('#') {
            return Err("it has a fragment (#), which is not supported".into());
        }
        let (rest, query) = match rest.split_once('?') {
            Some((rest, query)) => (rest, Some(query)),
            None => (rest, None),
        };
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let (credentials, hosts) = match authority.rsplit_once('@') {
            Some((credentials, hosts)) => (Credentials::of(credentials)?, hosts),
            None => (Credentials::default(), authority),
        };
        Ok(Self {
            tls,
            credentials,
            hosts,
            path,
            query,
        })
    }

    /// Parses `<name>[/db]`.
    fn name_and_db(&self) -> Result<(String, i64), Complaint> {
        let (name, db) = self.path.split_once('/').unwrap_or((self.path, ""));
        if name.is_empty() {
            return Err(
                "the name of the primary is missing after the hosts, as in /mymaster".into(),
            );
        }
        Ok((
            decoded(name, "the primary's name")?.into_owned(),
            database(db.trim_end_matches('/'))?,
        ))
    }

    fn no_query(&self) -> Result<(), Complaint> {
        if self.query.is_some() {
            Err("it has parameters (?), which are not supported here".into())
        } else {
            Ok(())
        }
    }
}

fn database(text: &str) -> Result<i64, Complaint> {
    match text.parse::<i64>() {
        _ if text.is_empty() => Ok(0),
        Ok(db) if db >= 0 => Ok(db),
        Ok(_) => Err("the database number is negative".into()),
        Err(_) => Err("the text after the primary's name is not a database number".into()),
    }
}

fn decoded<'a>(text: &'a str, part: &str) -> Result<Cow<'a, str>, Complaint> {
    percent_decode_str(text)
        .decode_utf8()
        .map_err(|_| format!("{part} is not UTF-8").into())
}

#[derive(Clone, Default)]
struct Credentials {
    user: Option<String>,
    password: Option<String>,
}

impl Credentials {
    fn of(text: &str) -> Result<Self, Complaint> {
        let (user, password) = match text.split_once(':') {
            Some((user, password)) => (user, Some(password)),
            None => (text, None),
        };
        let user = decoded(user, "the user's name")?;
        let password = password
            .map(|password| decoded(password, "the password"))
            .transpose()?;
        if !user.is_empty() && password.is_none() {
            return Err(
                "it has a user and no password; a password alone is written :password@".into(),
            );
        }
        Ok(Self {
            user: Some(user.into_owned()).filter(|user| !user.is_empty()),
            password: password
                .map(Cow::into_owned)
                .filter(|password| !password.is_empty()),
        })
    }

    fn settings(self) -> RedisConnectionInfo {
        let mut settings = RedisConnectionInfo::default();
        if let Some(user) = self.user {
            settings = settings.set_username(user);
        }
        if let Some(password) = self.password {
            settings = settings.set_password(password);
        }
        settings
    }
}

/// Parses `host`, `host:port` or `[::1]:port`.
fn address(text: &str, tls: bool) -> Result<ConnectionAddr, Complaint> {
    // An IPv6 address is in brackets, and contains colons of its own.
    let (host, port) = match text.rsplit_once(':') {
        Some((host, port)) if !port.ends_with(']') => (host, Some(port)),
        _ => (text, None),
    };
    if host.is_empty() {
        return Err("a host is missing".into());
    }
    let host = match Host::parse(host) {
        Ok(Host::Domain(name)) => name,
        Ok(Host::Ipv4(address)) => address.to_string(),
        Ok(Host::Ipv6(address)) => address.to_string(),
        Err(_) => {
            return Err(
                "a host is not valid; an IPv6 address is written in brackets, [::1]".into(),
            );
        }
    };
    let port = port
        .map_or(Ok(DEFAULT_PORT), str::parse)
        .ok()
        .filter(|port| *port > 0);
    let port = port.ok_or("a port is not a number from 1 to 65535")?;
    Ok(to(host, port, tls))
}

fn to(host: String, port: u16, tls: bool) -> ConnectionAddr {
    if tls {
        ConnectionAddr::TcpTls {
            host,
            port,
            insecure: false,
            tls_params: None,
        }
    } else {
        ConnectionAddr::Tcp(host, port)
    }
}

fn at(address: ConnectionAddr, settings: RedisConnectionInfo) -> Result<ConnectionInfo, LockError> {
    let info = address
        .into_connection_info()
        .map_err(|error| invalid(error.to_string()))?;
    Ok(tuned(info.set_redis_settings(settings)))
}

/// The connection settings of the primary, without its address.
fn of_primary(tls: bool, settings: RedisConnectionInfo) -> Result<ConnectionInfo, LockError> {
    at(to(String::new(), 0, tls), settings).map(for_locks)
}

/// The parameters of the URL.
#[derive(Default)]
struct Options<'a> {
    user: Option<Cow<'a, str>>,
    password: Option<Cow<'a, str>>,
    count: Option<Cow<'a, str>>,
    timeout: Option<Cow<'a, str>>,
}

impl<'a> Options<'a> {
    fn of(query: Option<&'a str>) -> Result<Self, Complaint> {
        let mut options = Self::default();
        for option in query
            .unwrap_or_default()
            .split('&')
            .filter(|option| !option.is_empty())
        {
            let (name, value) = option.split_once('=').unwrap_or((option, ""));
            let (place, name) = match name {
                "sentinel_user" => (&mut options.user, "sentinel_user"),
                "sentinel_password" => (&mut options.password, "sentinel_password"),
                "min_replicas" => (&mut options.count, "min_replicas"),
                "replica_timeout" => (&mut options.timeout, "replica_timeout"),
                // The name is not shown, as it may be the rest of a password.
                _ => {
                    return Err("it has an unknown parameter; the known ones are sentinel_user, sentinel_password, \
                                min_replicas and replica_timeout"
                        .into());
                }
            };
            if value.is_empty() {
                return Err(format!("the parameter {name} has no value").into());
            }
            if place.replace(decoded(value, name)?).is_some() {
                return Err(format!("the parameter {name} is given twice").into());
            }
        }
        Ok(options)
    }

    fn credentials(&self) -> Result<Credentials, Complaint> {
        if self.user.is_some() && self.password.is_none() {
            return Err("sentinel_user needs a sentinel_password".into());
        }
        let owned = |text: &Option<Cow<'_, str>>| text.as_deref().map(str::to_owned);
        Ok(Credentials {
            user: owned(&self.user),
            password: owned(&self.password),
        })
    }

    fn min_replicas(&self) -> Result<Option<MinReplicas>, Complaint> {
        let Some(count) = &self.count else {
            return match self.timeout {
                Some(_) => Err(
                    "replica_timeout needs min_replicas, the number of replicas to wait for".into(),
                ),
                None => Ok(None),
            };
        };
        let count: NonZeroU32 = count
            .parse()
            .map_err(|_| "min_replicas is not a whole number of at least 1")?;
        let timeout = match &self.timeout {
            Some(timeout) => {
                duration(timeout).ok_or("replica_timeout is not a duration such as 50ms")?
            }
            None => MinReplicas::DEFAULT_TIMEOUT,
        };
        let min_replicas = MinReplicas { count, timeout };
        min_replicas.check()?;
        Ok(Some(min_replicas))
    }
}

/// Parses `50ms` or `1s`.
fn duration(text: &str) -> Option<Duration> {
    if let Some(millis) = text.strip_suffix("ms") {
        return millis.parse().ok().map(Duration::from_millis);
    }
    text.strip_suffix('s')?
        .parse()
        .ok()
        .map(Duration::from_secs)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opened(url: &str) -> (Sentinels, RedisOptions) {
        open(url, RedisOptions::default()).unwrap_or_else(|error| panic!("{url}: {error}"))
    }

    #[test]
    fn each_invalid_url_has_a_message_of_its_own() {
        for (url, words) in [
            ("redis+sentinel://", "a host is missing|primary is missing"),
            ("redis+sentinel://:hunter2@/mymaster", "a host is missing"),
            ("redis+sentinel://:hunter2@a,/mymaster", "a host is missing"),
            (
                "redis+sentinel://:hunter2@a,:7/mymaster",
                "a host is missing",
            ),
            (
                "redis+sentinel://:hunter2@a",
                "name of the primary is missing",
            ),
            (
                "redis+sentinel://:hunter2@a/",
                "name of the primary is missing",
            ),
            (
                "redis+sentinel://:hunter2@a//0",
                "name of the primary is missing",
            ),
            ("redis+sentinel://:hunter2@a/mymaster/-1", "negative"),
            (
                "redis+sentinel://:hunter2@a/mymaster/hunter2",
                "not a database number",
            ),
            (
                "redis+sentinel://:hunter2@a/mymaster/0/1",
                "not a database number",
            ),
            (
                "redis+sentinel://:hunter2@a:hunter2/mymaster",
                "not a number from 1 to 65535",
            ),
            (
                "redis+sentinel://:hunter2@a:0/mymaster",
                "not a number from 1 to 65535",
            ),
            (
                "redis+sentinel://:hunter2@a:65536/mymaster",
                "not a number from 1 to 65535",
            ),
            ("redis+sentinel://:hunter2@::1/mymaster", "brackets"),
            ("redis+sentinel://:hunter2@[::1/mymaster", "brackets"),
            (
                "redis+sentinel://:hunter2@a b/mymaster",
                "a host is not valid",
            ),
            (
                "redis+sentinel://hunter2@a/mymaster",
                "user and no password",
            ),
            ("redis+sentinel://:hunter2%ff@a/mymaster", "not UTF-8"),
            ("redis+sentinel://:hunter2@a/mymaster#hunter2", "fragment"),
            (
                "redis+sentinel://:hunter2@a/mymaster?hunter2=1",
                "unknown parameter",
            ),
            (
                "redis+sentinel://:hunter2@a/mymaster?sentinel_user=ann",
                "needs a sentinel_password",
            ),
            (
                "redis+sentinel://:hunter2@a/mymaster?sentinel_password",
                "no value",
            ),
            (
                "redis+sentinel://:hunter2@a/mymaster?sentinel_password=hunter2&sentinel_password=hunter2",
                "twice",
            ),
            (
                "redis+sentinel://:hunter2@a/mymaster?min_replicas=0",
                "at least 1",
            ),
            (
                "redis+sentinel://:hunter2@a/mymaster?min_replicas=-1",
                "at least 1",
            ),
            (
                "redis+sentinel://:hunter2@a/mymaster?min_replicas=many",
                "at least 1",
            ),
            (
                "redis+sentinel://:hunter2@a/mymaster?replica_timeout=50ms",
                "needs min_replicas",
            ),
            (
                "redis+sentinel://:hunter2@a/mymaster?min_replicas=1&replica_timeout=50",
                "50ms",
            ),
            (
                "redis+sentinel://:hunter2@a/mymaster?min_replicas=1&replica_timeout=0ms",
                "1 ms to 400 ms",
            ),
            (
                "redis+sentinel://:hunter2@a/mymaster?min_replicas=1&replica_timeout=1s",
                "1 ms to 400 ms",
            ),
        ] {
            let Err(error) = open(url, RedisOptions::default()) else {
                panic!("{url}")
            };
            assert_eq!(error.kind(), LockErrorKind::InvalidUrl, "{url}");
            let text = error.to_string();
            assert!(
                words.split('|').any(|words| text.contains(words)),
                "{url}: {text}"
            );
            assert!(
                text.contains("redis+sentinel://user:password@host1:26379,"),
                "{text}"
            );
            assert!(!text.contains("hunter2"), "{text}");
        }
    }

    #[cfg(not(feature = "rustls"))]
    #[test]
    fn a_tls_url_names_the_missing_feature() {
        let Err(error) = open("rediss+sentinel://a/mymaster", RedisOptions::default()) else {
            panic!("no TLS")
        };
        assert!(error.to_string().contains("`rustls`"), "{error}");
    }

    #[test]
    fn a_url_says_who_and_where() {
        let url = "redis+sentinel://ann:p%40ss@10.0.0.1,[::1]:7,sentinel_3:8,10.0.0.1:26379/my%20master/3\
                   ?sentinel_user=bob&sentinel_password=a+b%26c&min_replicas=2&replica_timeout=50ms";
        let (sentinels, settings) = opened(url);
        assert_eq!(sentinels.name(), "my master");
        let addresses: Vec<_> = sentinels.addresses().map(ToString::to_string).collect();
        assert_eq!(addresses, ["10.0.0.1:26379", "::1:7", "sentinel_3:8"]);
        let primary = sentinels.primary_settings();
        assert_eq!(
            (primary.username(), primary.password(), primary.db()),
            (Some("ann"), Some("p@ss"), 3)
        );
        let watching = sentinels.sentinel_settings();
        assert_eq!(
            (watching.username(), watching.password()),
            (Some("bob"), Some("a+b&c"))
        );
        let two = NonZeroU32::new(2).unwrap();
        assert_eq!(
            settings.min_replicas,
            Some(MinReplicas {
                count: two,
                timeout: Duration::from_millis(50)
            })
        );
    }

    #[test]
    fn what_a_url_leaves_out_has_a_default() {
        for url in [
            "redis+sentinel://a/m",
            "redis+sentinel://a/m/",
            "valkey+sentinel://:@a:26379/m/0/?",
        ] {
            let (sentinels, settings) = opened(url);
            let addresses: Vec<_> = sentinels.addresses().map(ToString::to_string).collect();
            assert_eq!(addresses, ["a:26379"], "{url}");
            let primary = sentinels.primary_settings();
            assert_eq!(
                (primary.username(), primary.password(), primary.db()),
                (None, None, 0),
                "{url}"
            );
            assert_eq!(settings.min_replicas, None);
        }
        let (_, settings) = opened("redis+sentinel://a/m?min_replicas=1");
        assert_eq!(
            settings.min_replicas.unwrap().timeout,
            MinReplicas::DEFAULT_TIMEOUT
        );
        let before = settings.clone();
        assert_eq!(
            open("redis+sentinel://a/m", before).unwrap().1.min_replicas,
            settings.min_replicas
        );
    }

    #[test]
    fn urls_of_each_say_the_same() {
        let sentinels = [
            "redis://:pw@10.0.0.1:7",
            "redis://:pw@10.0.0.2",
            "redis://:pw@10.0.0.2:26379/",
        ];
        let sentinels = open_each(
            "REDIS://app:secret@MyMaster/2",
            sentinels,
            &RedisOptions::default(),
        )
        .unwrap();
        assert_eq!(sentinels.name(), "MyMaster");
        let addresses: Vec<_> = sentinels.addresses().map(ToString::to_string).collect();
        assert_eq!(addresses, ["10.0.0.1:7", "10.0.0.2:26379"]);
        let primary = sentinels.primary_settings();
        assert_eq!(
            (primary.username(), primary.password(), primary.db()),
            (Some("app"), Some("secret"), 2)
        );
        assert_eq!(sentinels.sentinel_settings().password(), Some("pw"));
    }

    #[test]
    fn each_wrong_one_of_several_urls_is_told() {
        let fine = "redis://:hunter2@a";
        for (primary, sentinels, words) in [
            (
                "redis://:hunter2@",
                [fine],
                "no name of a primary|redis://user:password@mymaster/0",
            ),
            (
                "redis://:hunter2@mymaster:6379",
                [fine],
                "a port|redis://user:password@mymaster/0",
            ),
            (
                "redis://:hunter2@a,b",
                [fine],
                "one primary|redis://user:password@mymaster/0",
            ),
            (
                "redis://:hunter2@a/-1",
                [fine],
                "negative|redis://user:password@mymaster/0",
            ),
            (
                "redis://:hunter2@a?hunter2",
                [fine],
                "parameters|redis://user:password@mymaster/0",
            ),
            (
                "mymaster",
                [fine],
                "redis:// or rediss://|redis://user:password@mymaster/0",
            ),
            (
                "redis://a",
                ["redis://:hunter2@b/0"],
                "no databases|redis://user:password@host:26379",
            ),
            (
                "redis://a",
                ["redis://:hunter2@b?hunter2=1"],
                "parameters|redis://user:password@host:26379",
            ),
            (
                "redis://a",
                ["redis://:hunter2@"],
                "a host is missing|redis://user:password@host:26379",
            ),
            (
                "redis://a",
                ["10.0.0.1:26379"],
                "redis:// or rediss://|redis://user:password@host:26379",
            ),
        ] {
            let Err(error) = open_each(primary, sentinels, &RedisOptions::default()) else {
                panic!("{primary}")
            };
            assert_eq!(error.kind(), LockErrorKind::InvalidUrl);
            let text = error.to_string();
            assert!(
                words.split('|').all(|words| text.contains(words)),
                "{primary} {sentinels:?}: {text}"
            );
            assert!(!text.contains("hunter2"), "{text}");
        }
        let Err(error) = open_each("redis://a", [], &RedisOptions::default()) else {
            panic!("no Sentinel is given")
        };
        assert!(
            error.to_string().contains("no Sentinel is given"),
            "{error}"
        );
    }
}
