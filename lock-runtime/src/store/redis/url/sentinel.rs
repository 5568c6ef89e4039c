//! The URL that names the Sentinels of a primary.

use std::{borrow::Cow, num::NonZeroU32, time::Duration};

use percent_encoding::percent_decode_str;
use redis::{ConnectionInfo, RedisConnectionInfo};
use url::Host;

use super::{
    super::{
        connection::endpoint::at,
        settings::{MinReplicas, RedisOptions},
        topology::sentinel::Sentinels,
    },
    Complaint, Hosts, SENTINELS, check_tls, for_locks, tuned,
};
use crate::error::LockError;

const DEFAULT_PORT: u16 = 26379;

const TOPOLOGY: &str = "+sentinel";

/// The parameter of Sentinels that use TLS, whether the primary does or not.
const TLS: &str = "sentinel_tls=true";

/// The value of a parameter, if it is given.
type Given<'a> = Option<Cow<'a, str>>;

/// The parameters of a URL of Sentinels.
const PARAMETERS: [&str; 5] = [
    "sentinel_user",
    "sentinel_password",
    "sentinel_tls",
    "min_replicas",
    "replica_timeout",
];

/// Parses `redis+sentinel://[user:password@]host[:26379][,host...]/<name>[/db][?..]`. Returns the
/// Sentinels, and the settings with the parameters of the URL applied.
///
/// # Errors
/// `InvalidUrl`, and `InvalidSpec` for certificates that cannot be used.
pub(crate) fn open(
    url: &str,
    mut settings: RedisOptions,
) -> Result<(Sentinels, RedisOptions), LockError> {
    check_tls(url)?;
    if url
        .split('?')
        .nth(1)
        .is_some_and(|it| it.split('&').any(|it| it == TLS))
    {
        check_tls("rediss://")?;
    }
    let parse = || {
        let url = Hosts::of(url, TOPOLOGY)?;
        let (name, db) = url.path.split_once('/').unwrap_or((url.path, ""));
        if name.is_empty() {
            return Err(
                "the name of the primary is missing after the hosts, as in /mymaster".into(),
            );
        }
        let name = decoded(name, "the primary's name")?.into_owned();
        let primary = primary(&url, db)?;
        let [user, password, tls, count, timeout] = parameters(url.query.unwrap_or_default())?;
        let watching = credentials(user, password)?;
        let shared = match tls.as_deref() {
            None => primary.clone(),
            Some("true") => url.with_scheme("rediss").shared()?,
            Some("false") => url.with_scheme("redis").shared()?,
            Some(_) => return Err("sentinel_tls is neither true nor false".into()),
        };
        let mut sentinels = Vec::new();
        for host in url.hosts.split(',') {
            add(&mut sentinels, &shared, host, watching.clone())?;
        }
        Ok((name, primary, sentinels, min_replicas(count, timeout)?))
    };
    let (name, primary, sentinels, min_replicas) =
        parse().map_err(|complaint: Complaint| SENTINELS.refuse(complaint))?;
    settings.min_replicas = min_replicas.or(settings.min_replicas);
    let sentinels = Sentinels::new(name, primary, sentinels, &settings)?;
    Ok((sentinels, settings))
}

/// The connection settings of the primary, without its address.
fn primary(url: &Hosts<'_>, db: &str) -> Result<ConnectionInfo, Complaint> {
    let info = url.shared()?;
    let settings = info.redis_settings().clone();
    let settings = settings.set_db(database(db.trim_end_matches('/'))?);
    Ok(for_locks(info.set_redis_settings(settings)))
}

/// Adds the Sentinel at `host`, unless it is there already: a Sentinel that is named twice has one
/// vote.
fn add(
    sentinels: &mut Vec<ConnectionInfo>,
    shared: &ConnectionInfo,
    host: &str,
    settings: RedisConnectionInfo,
) -> Result<(), Complaint> {
    let (host, port) = address(host)?;
    let sentinel = tuned(at(shared, host, port).set_redis_settings(settings));
    let mut others = sentinels.iter();
    if others.all(|other| other.addr() != sentinel.addr()) {
        sentinels.push(sentinel);
    }
    Ok(())
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
    let decoded = percent_decode_str(text).decode_utf8();
    decoded.map_err(|_| format!("{part} is not UTF-8").into())
}

/// Parses `host`, `host:port` or `[::1]:port`.
fn address(text: &str) -> Result<(String, u16), Complaint> {
    // An IPv6 address is in brackets, and contains colons of its own.
    let (host, port) = match text.rsplit_once(':') {
        Some((host, port)) if !port.ends_with(']') => (host, port.parse().unwrap_or(0)),
        _ => (text, DEFAULT_PORT),
    };
    if host.is_empty() {
        return Err("a host is missing".into());
    }
    let invalid = "a host is not valid; an IPv6 address is written in brackets, [::1]";
    let host = match Host::parse(host).map_err(|_| invalid)? {
        Host::Domain(name) => name,
        Host::Ipv4(address) => address.to_string(),
        Host::Ipv6(address) => address.to_string(),
    };
    match port {
        0 => Err("a port is not a number from 1 to 65535".into()),
        port => Ok((host, port)),
    }
}

/// Parses the parameters, and returns their values in the order of [`PARAMETERS`].
fn parameters(query: &str) -> Result<[Given<'_>; 5], Complaint> {
    let mut values = [const { None }; 5];
    for parameter in query.split('&').filter(|parameter| !parameter.is_empty()) {
        let (name, value) = parameter.split_once('=').unwrap_or((parameter, ""));
        let Some(index) = PARAMETERS.iter().position(|known| *known == name) else {
            // The name is not shown, as it may be the rest of a password.
            let known = PARAMETERS.join(", ");
            return Err(format!("it has an unknown parameter; the known ones are {known}").into());
        };
        if value.is_empty() {
            return Err(format!("the parameter {name} has no value").into());
        }
        if values[index].replace(decoded(value, name)?).is_some() {
            return Err(format!("the parameter {name} is given twice").into());
        }
    }
    Ok(values)
}

/// The credentials for the Sentinels.
fn credentials(user: Given<'_>, password: Given<'_>) -> Result<RedisConnectionInfo, Complaint> {
    let settings = RedisConnectionInfo::default();
    match (user, password) {
        (None, None) => Ok(settings),
        (None, Some(password)) => Ok(settings.set_password(password)),
        (Some(user), Some(password)) => Ok(settings.set_username(user).set_password(password)),
        (Some(_), None) => Err("sentinel_user needs a sentinel_password".into()),
    }
}

fn min_replicas(count: Given<'_>, timeout: Given<'_>) -> Result<Option<MinReplicas>, Complaint> {
    let count = match (count, &timeout) {
        (Some(count), _) => count.parse::<NonZeroU32>(),
        (None, None) => return Ok(None),
        (None, Some(_)) => {
            Err("replica_timeout needs min_replicas, the number of replicas to wait for")?
        }
    };
    let count = count.map_err(|_| "min_replicas is not a whole number of at least 1")?;
    let timeout = match timeout {
        Some(text) => duration(&text).ok_or("replica_timeout is not a duration such as 50ms")?,
        None => MinReplicas::DEFAULT_TIMEOUT,
    };
    let min_replicas = MinReplicas { count, timeout };
    min_replicas.check()?;
    Ok(Some(min_replicas))
}

/// Parses `50ms` or `1s`.
fn duration(text: &str) -> Option<Duration> {
    if let Some(millis) = text.strip_suffix("ms") {
        return millis.parse().ok().map(Duration::from_millis);
    }
    let seconds = text.strip_suffix('s')?.parse();
    seconds.ok().map(Duration::from_secs)
}

#[cfg(test)]
mod tests {
    #[cfg(feature = "redis-rustls")]
    use super::super::super::connection::endpoint::is_tls;
    use super::*;

    fn open(url: &str) -> Result<(Sentinels, RedisOptions), LockError> {
        super::open(url, RedisOptions::default())
    }

    /// The user, the password and the database.
    fn login(info: &ConnectionInfo) -> (Option<&str>, Option<&str>, i64) {
        let settings = info.redis_settings();
        (settings.username(), settings.password(), settings.db())
    }

    #[test]
    fn each_invalid_url_has_a_message_of_its_own() {
        const NO_NAME: &str = "name of the primary is missing";
        const PORT: &str = "not a number from 1 to 65535";
        const NO_PASSWORD: &str = "needs a sentinel_password";
        const TWICE: &str = ":hunter2@a/m?sentinel_user=hunter2&sentinel_user=b";
        for (url, words) in [
            ("", NO_NAME),
            (":hunter2@/mymaster", "a host is missing"),
            (":hunter2@a,/mymaster", "a host is missing"),
            (":hunter2@a,:7/mymaster", "a host is missing"),
            (":hunter2@a", NO_NAME),
            (":hunter2@a/", NO_NAME),
            (":hunter2@a//0", NO_NAME),
            (":hunter2@a/mymaster/-1", "negative"),
            (":hunter2@a/mymaster/hunter2", "not a database number"),
            (":hunter2@a/mymaster/0/1", "not a database number"),
            (":hunter2@a:hunter2/mymaster", PORT),
            (":hunter2@a:0/mymaster", PORT),
            (":hunter2@a:65536/mymaster", PORT),
            (":hunter2@::1/mymaster", "brackets"),
            (":hunter2@[::1/mymaster", "brackets"),
            (":hunter2@a b/mymaster", "a host is not valid"),
            ("hunter2@a/mymaster", "user and no password"),
            (":hunter2%ff@a/mymaster", "not valid UTF-8"),
            (":hunter2@a/mymaster#hunter2", "fragment"),
            (":hunter2@a/m?hunter2=1", "unknown parameter"),
            (":hunter2@a/m?sentinel_user=ann", NO_PASSWORD),
            (":hunter2@a/m?sentinel_password", "no value"),
            (TWICE, "given twice"),
            (":hunter2@a/m?sentinel_tls=yes", "neither true nor false"),
            (":hunter2@a/m?min_replicas=0", "at least 1"),
            (":hunter2@a/m?min_replicas=-1", "at least 1"),
            (":hunter2@a/m?min_replicas=many", "at least 1"),
            (":hunter2@a/m?replica_timeout=50ms", "needs min_replicas"),
            (":hunter2@a/m?min_replicas=1&replica_timeout=50", "50ms"),
            (":hunter2@a/m?min_replicas=1&replica_timeout=0ms", "400 ms"),
            (":hunter2@a/m?min_replicas=1&replica_timeout=1s", "400 ms"),
        ] {
            let url = format!("redis+sentinel://{url}");
            let error = open(&url).err().unwrap_or_else(|| panic!("{url}"));
            SENTINELS.assert_refused(&url, &error, words);
        }
    }

    #[cfg(not(feature = "redis-rustls"))]
    #[test]
    fn a_tls_url_names_the_missing_feature() {
        let error = open("rediss+sentinel://a/mymaster").err().expect("no TLS");
        assert!(error.to_string().contains("`redis-rustls`"), "{error}");
    }

    #[test]
    fn a_url_has_user_servers_and_settings() {
        let url = "redis+sentinel://ann:p%40ss@10.0.0.1,[::1]:7,sentinel_3:8,10.0.0.1:26379/my%20master/3\
                   ?sentinel_user=bob&sentinel_password=a+b%26c&min_replicas=2&replica_timeout=50ms";
        let (sentinels, settings) = open(url).expect(url);
        assert_eq!(sentinels.name, "my master");
        let expected = ["10.0.0.1:26379", "::1:7", "sentinel_3:8"];
        assert!(sentinels.addresses().eq(expected), "{sentinels}");
        let watching = &sentinels.sentinels[0].info;
        assert_eq!(
            login(&sentinels.primary.info),
            (Some("ann"), Some("p@ss"), 3)
        );
        assert_eq!(login(watching), (Some("bob"), Some("a+b&c"), 0));
        let (count, timeout) = (NonZeroU32::new(2).unwrap(), Duration::from_millis(50));
        let two = MinReplicas { count, timeout };
        assert_eq!(settings.min_replicas, Some(two));
    }

    #[test]
    fn what_a_url_leaves_out_has_a_default() {
        for url in [
            "redis+sentinel://a/m",
            "redis+sentinel://a/m/",
            "redis+sentinel://@A/m",
            "valkey+sentinel://:@a:26379/m/0/?",
        ] {
            let (sentinels, settings) = open(url).expect(url);
            assert!(sentinels.addresses().eq(["a:26379"]), "{url}");
            assert_eq!(login(&sentinels.primary.info), (None, None, 0), "{url}");
            assert_eq!(settings.min_replicas, None);
        }
        let (_, settings) = open("redis+sentinel://a/m?min_replicas=1").unwrap();
        let min_replicas = settings.min_replicas;
        assert_eq!(min_replicas.unwrap().timeout, MinReplicas::DEFAULT_TIMEOUT);
        let (_, kept) = super::open("redis+sentinel://a/m", settings).unwrap();
        assert_eq!(kept.min_replicas, min_replicas);
    }

    #[cfg(feature = "redis-rustls")]
    #[test]
    fn the_sentinels_may_use_tls_where_the_primary_does_not() {
        for (url, of_primary, of_sentinels) in [
            ("redis+sentinel://a/m", false, false),
            ("rediss+sentinel://a/m", true, true),
            ("redis+sentinel://a/m?sentinel_tls=true", false, true),
            ("valkeys+sentinel://:p@a/m?sentinel_tls=false", true, false),
        ] {
            let (sentinels, _) = open(url).expect(url);
            let is_tls = |info: &ConnectionInfo| is_tls(info.addr());
            assert_eq!(is_tls(&sentinels.primary.info), of_primary, "{url}");
            assert_eq!(is_tls(&sentinels.sentinels[0].info), of_sentinels, "{url}");
        }
    }
}
