//! The servers of an ensemble, and the user.

use std::fmt;

use percent_encoding::percent_decode_str;
use url::Url;

use crate::error::{LockError, LockErrorKind};

const PORT: u16 = 2181;

/// The servers of an ensemble, the path of the nodes, and the user.
#[derive(Clone)]
pub(super) struct Target {
    /// `host:port` of each.
    pub(super) servers: Vec<String>,
    /// The path below which the nodes are, without a slash at its end.
    pub(super) root: String,
    /// `user:password`.
    pub(super) user: Option<String>,
}

/// Omits the user and the password.
impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Target")
            .field("servers", &self.servers)
            .field("root", &self.root)
            .finish_non_exhaustive()
    }
}

impl Target {
    /// Parses `zookeeper://[user:password@]host[:port][,host[:port]..][/path]`.
    ///
    /// # Errors
    /// `InvalidUrl`. No part of the URL in the message can be a password.
    pub(super) fn new(url: &str) -> Result<Self, LockError> {
        let (scheme, rest) = url.split_once("://").unwrap_or(("", url));
        if !scheme.eq_ignore_ascii_case("zookeeper") {
            return Err(invalid("the scheme is not zookeeper://"));
        }
        if rest.contains(['?', '#']) {
            return Err(invalid(
                "it has a parameter or a fragment, or the password contains '?' or '#': write them as %3F and %23",
            ));
        }
        let (user, place) = match rest.rsplit_once('@') {
            Some((user, _)) if user.contains(['@', '/']) => {
                let text = "the password contains '@' or '/': write them as %40 and %2F";
                return Err(invalid(text));
            }
            Some((user, place)) => (Some(credentials(user)?), place),
            None => (None, rest),
        };
        let (hosts, path) = place.split_once('/').unwrap_or((place, ""));
        let root = match path.trim_end_matches('/') {
            "" => String::new(),
            path if path.split('/').any(|part| matches!(part, "" | "." | "..")) => {
                return Err(invalid("a part of the path is empty, '.' or '..'"));
            }
            path => format!("/{path}"),
        };
        let servers = hosts.split(',').map(address).collect::<Result<_, _>>()?;
        Ok(Self {
            servers,
            root,
            user,
        })
    }
}

fn invalid(complaint: impl fmt::Display) -> LockError {
    let message = format!(
        "the URL of ZooKeeper is invalid: {complaint}; it is zookeeper://user:password@host:2181,host:2181/path"
    );
    LockError::new(LockErrorKind::InvalidUrl, message)
}

fn credentials(user: &str) -> Result<String, LockError> {
    let decode = |text| {
        let decoded = percent_decode_str(text).decode_utf8();
        decoded.map_err(|_| invalid("the user or the password is not UTF-8"))
    };
    let Some((name, password)) = user.split_once(':') else {
        return Err(invalid("the user has no password"));
    };
    let (name, password) = (decode(name)?, decode(password)?);
    if name.is_empty() || name.contains(':') {
        return Err(invalid("the name of the user is empty or contains ':'"));
    }
    Ok(format!("{name}:{password}"))
}

/// Returns the host and the port of a server.
fn address(host: &str) -> Result<String, LockError> {
    // A scheme that the parser has no rules for, so that it keeps each port.
    let parsed = Url::parse(&format!("zookeeper://{host}"));
    let parsed = parsed.map_err(|error| invalid(format!("a host: {error}")))?;
    let host = parsed.host_str().filter(|host| !host.is_empty());
    let Some(host) = host else {
        return Err(invalid("a host is missing"));
    };
    Ok(format!("{host}:{}", parsed.port().unwrap_or(PORT)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_names_servers_a_user_and_a_path() {
        let of = |url: &str| Target::new(url).unwrap();
        assert_eq!(of("zookeeper://a").servers, ["a:2181"]);
        let target = of("ZooKeeper://app:p%40w%2F@a:80,b,[::1]:7/apps/locks/");
        assert_eq!(target.servers, ["a:80", "b:2181", "[::1]:7"]);
        assert_eq!(target.root, "/apps/locks");
        assert_eq!(target.user.as_deref(), Some("app:p@w/"));
        assert_eq!(of("zookeeper://a/").root, "");
    }

    #[test]
    fn a_url_that_is_wrong_is_refused_without_its_password() {
        for url in [
            "zookeeper:",
            "zookeeper://",
            "http://a",
            "zookeeper://app@a",
            "zookeeper://:secret@a",
            "zookeeper://app:secret@x@a",
            "zookeeper://app:sec/ret@a",
            "zookeeper://app:secret@",
            "zookeeper://app:secret@a,,b",
            "zookeeper://app:secret@a:99999",
            "zookeeper://app:secret@a//path",
            "zookeeper://app:secret@a/..",
            "zookeeper://app:secret@a?x=1",
            "zookeeper://app:%ff%fesecret@a",
        ] {
            let error = Target::new(url).err().unwrap();
            assert_eq!(error.kind(), LockErrorKind::InvalidUrl, "{url}");
            let shown = format!("{error:#} {error:?}");
            assert!(
                !shown.contains("secret") && !shown.contains("sec/"),
                "{shown}"
            );
        }
    }
}
