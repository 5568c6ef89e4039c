//! The hosts that requests may name.

use std::net::IpAddr;

use http::{header::HOST, request::Parts, uri::Authority};

/// The allowed names of hosts, in lower case. IP addresses and `localhost` are always allowed: no
/// site can make its own name out of them. Addresses that lead to this machine without being those
/// of it are not: browsers do not treat them as this machine.
#[derive(Clone, Debug, Default)]
pub(super) struct Hosts {
    names: Vec<Box<str>>,
}

impl Hosts {
    /// Adds a name. Returns false if it is none.
    pub(super) fn allow(&mut self, host: &str) -> bool {
        let is_name = host.parse().is_ok_and(|it: Authority| it.host() == host);
        if is_name {
            self.names.push(host.to_ascii_lowercase().into());
        }
        is_name
    }

    /// Returns whether the request names allowed hosts only, and at least one: in the header, in
    /// the URI (where HTTP/2 has it), or in both.
    pub(super) fn allow_request(&self, parts: &Parts) -> bool {
        let headers = parts.headers.get_all(HOST).iter();
        let headers = headers.map(|host| Authority::try_from(host.as_bytes()).ok());
        let mut named = headers
            .chain(parts.uri.authority().cloned().map(Some))
            .peekable();
        named.peek().is_some() && named.all(|host| host.is_some_and(|host| self.has(host.host())))
    }

    fn has(&self, host: &str) -> bool {
        let address = host.trim_start_matches('[').trim_end_matches(']');
        let mut names = self.names.iter().map(|name| &**name).chain(["localhost"]);
        let is_own = |ip: IpAddr| !ip.is_unspecified() && ip == ip.to_canonical();
        address.parse().is_ok_and(is_own) || names.any(|name| name.eq_ignore_ascii_case(host))
    }
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;

    fn accepts(uri: &str, hosts: &[&str]) -> bool {
        let mut allowed = Hosts::default();
        assert!(allowed.allow("Ops.example.com"));
        let request = hosts.iter().fold(Request::get(uri), |request, host| {
            request.header(HOST, *host)
        });
        allowed.allow_request(&request.body(()).unwrap().into_parts().0)
    }

    #[test]
    fn a_request_has_to_name_an_allowed_host() {
        for host in [
            "127.0.0.1",
            "10.0.0.1:8080",
            "[::1]:8080",
            "[fe80::1]",
            "localhost",
            "LOCALHOST:8080",
            "ops.example.com",
            "OPS.example.com:443",
        ] {
            assert!(accepts("/", &[host]), "{host}");
        }
        for host in [
            "",
            ":80",
            "evil.example",
            "evil.example:8080",
            "ops.example.com.evil.example",
            "evil.ops.example.com",
            "ops.example.com.",
            "127.0.0.1.evil.example",
            "localhost.evil.example",
            "127.0.0.1@evil.example",
            "evil.example#localhost",
            "evil.example, localhost",
            "0x7f.1",
            "2130706433",
            "localhost ",
            "0.0.0.0",
            "[::]:8080",
            "[::ffff:127.0.0.1]",
        ] {
            assert!(!accepts("/", &[host]), "{host}");
        }
        assert!(!accepts("/", &[]), "no host");
        assert!(!accepts("/", &["localhost", "evil.example"]));
        assert!(accepts("https://ops.example.com/locks", &[]), "HTTP/2");
        assert!(!accepts("https://evil.example/locks", &[]));
        assert!(!accepts("https://evil.example/locks", &["localhost"]));
        assert!(!accepts("http://localhost/locks", &["evil.example"]));
    }

    #[test]
    fn an_address_that_is_not_allowed_by_itself_can_be_named() {
        let mut allowed = Hosts::default();
        assert!(allowed.allow("0.0.0.0"));
        let request = Request::get("/").header(HOST, "0.0.0.0:8080").body(());
        assert!(allowed.allow_request(&request.unwrap().into_parts().0));
    }

    #[test]
    fn a_host_has_no_port_and_no_scheme() {
        for host in [
            "",
            "ops:80",
            "https://ops",
            "user@ops",
            "ops/locks",
            "*.ops example",
            "a b",
        ] {
            assert!(!Hosts::default().allow(host), "{host}");
        }
    }
}
