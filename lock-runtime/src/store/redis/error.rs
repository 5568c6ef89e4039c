//! Classification of errors of the server and of the connection, with remedies.
//!
//! A message of the server may repeat the arguments of a command, and thus a password or a token.
//! Messages are shown only where they are known not to do so.

use std::sync::Arc;

use redis::{ErrorKind, RedisError, ServerError, Value};

use super::{
    connection::handshake::FORMAT,
    operator::acl::AclLine,
    script::names::{format_name, settings_name},
};
use crate::store::{StoreError, StoreErrorKind};

/// The error for a server that does not speak RESP3.
const NO_HELLO: &str = "the server refuses HELLO 3 (RESP3), which locks need: it is older than Redis 6.0 or has renamed \
                        the command, or a proxy such as Envoy, twemproxy or Codis is in between; connect to the server itself, or with \
                        ?protocol=resp2 at the end of a redis:// URL, without messages: waiters then poll";

pub(super) const NO_PROVIDER: &str = "TLS could not be set up; install a crypto provider at the start of `main`: \
                                      `rustls::crypto::ring::default_provider().install_default()`";

/// Parts of the reply to `SELECT` with a number that is too large: for the server's databases, or
/// for any server.
const NO_DATABASE: [&str; 2] = ["DB index", "value is out of range"];

/// Classifies an error reply.
pub(super) fn refused(error: &ServerError, acl: &AclLine) -> StoreError {
    classify(error.code(), error.details().unwrap_or_default(), acl)
}

/// Classifies an error of the connection.
pub(super) fn disconnected(error: &RedisError, acl: &AclLine) -> StoreError {
    if let Some([(_, error), ..]) = error.clone().into_server_errors().as_deref() {
        return refused(error, acl);
    }
    // An error of the crate may have the server's message as its detail: the server refused to
    // select the database.
    let detail = error.detail().unwrap_or_default();
    match error.kind() {
        ErrorKind::Parse => unavailable("the connection ended within a reply"),
        ErrorKind::RESP3NotSupported => wrong_server(NO_HELLO),
        ErrorKind::AuthenticationFailed => unauthenticated(),
        ErrorKind::Io if error.is_connection_refusal() => unavailable(format!(
            "no connection: {error}; is Redis running there? check host and port"
        )),
        ErrorKind::Server(_) if detail.contains("has no permissions") => {
            classify("NOPERM", detail, acl)
        }
        ErrorKind::Server(_) if NO_DATABASE.iter().any(|no| detail.contains(no)) => {
            StoreError::new(
                StoreErrorKind::InvalidUrl,
                "the server has no database of that number; end the URL with a smaller number, such as /0 (the server's \
             configuration sets the number of `databases`)",
            )
        }
        _ => unavailable(format!("no connection: {error}")),
    }
}

/// The error for a call that may succeed later.
pub(super) fn unavailable(message: impl Into<Arc<str>>) -> StoreError {
    StoreError::new(StoreErrorKind::Unavailable, message)
}

/// The error for a server that cannot store locks.
pub(super) fn wrong_server(message: impl Into<Arc<str>>) -> StoreError {
    StoreError::new(StoreErrorKind::WrongServer, message)
}

/// Whether the reply is an error that only a replica returns, or a server that no longer accepts
/// the credentials of the connection.
pub(super) fn ends_connection(value: &Value) -> bool {
    let Value::ServerError(error) = value else {
        return false;
    };
    let cause = cause(error.code(), error.details().unwrap_or_default());
    matches!(cause, "READONLY" | "MASTERDOWN" | "NOAUTH")
}

/// Whether the connection has broken: at its end, the library cannot parse the reply that was being
/// received.
pub(super) fn is_broken(error: &RedisError) -> bool {
    error.is_connection_dropped() || error.kind() == ErrorKind::Parse
}

/// Classifies the failure of a first connection, over TLS or not, and adds a remedy.
pub(super) fn unconnected(error: &RedisError, tls: bool, acl: &AclLine) -> StoreError {
    if error.kind() == ErrorKind::Parse {
        return wrong_server(
            "the server does not speak the Redis protocol; check host and port, and whether it requires TLS (rediss://)",
        );
    }
    if error.kind() != ErrorKind::Io || error.is_connection_refusal() {
        return disconnected(error, acl);
    }
    let text = error.to_string();
    // The redis crate passes on the errors of rustls as text, so they have no type here.
    let remedy = if tls
        && (text.contains("CertificateRequired") || text.contains("HandshakeFailure"))
    {
        "the server may require a client certificate; set one with `RedisOptions::client_certificate`"
    } else if tls && text.contains("certificate") {
        "connect by a name that the certificate is valid for, and trust its authority through the system, SSL_CERT_FILE or \
         `RedisOptions::root_certificate`"
    } else if tls {
        "the server may not speak TLS on this port; without TLS the URL begins with redis:// (and for Sentinels \
         alone it has sentinel_tls=false)"
    } else if error.is_connection_dropped() {
        "check host and port, whether the server requires TLS (rediss://), and whether a proxy such as twemproxy is in between"
    } else {
        return disconnected(error, acl);
    };
    unavailable(format!("no connection: {text}; {remedy}"))
}

/// The reason for which a connection over RESP2 receives no message.
pub(super) fn without_messages() -> StoreError {
    let message = "the URL asks for RESP2, which has no messages: the end of the connection is noticed at the next call";
    StoreError::new(StoreErrorKind::Unsupported, message)
}

/// The error for a server that lacks RESP3 or the commands of the scripts.
pub(super) fn too_old(version: &str) -> StoreError {
    wrong_server(format!(
        "Redis {version} is too old; locks need Redis 6.0 or later (HELLO 3)"
    ))
}

/// The error for a server that is a replica.
pub(super) fn read_only() -> StoreError {
    let message = "the server is a read-only replica; connect to its primary";
    StoreError::new(StoreErrorKind::ReadOnly, message)
}

/// The namespace has another format; `None`: its version cannot be read.
pub(super) fn incompatible(namespace: &str, found: Option<u32>) -> StoreError {
    let key = format_name(namespace);
    let message = match found {
        Some(found) => format!(
            "the namespace {namespace:?} has format {found} (key {key}), and this client has format {FORMAT}: choose \
             another namespace, or upgrade or stop the clients of the older format"
        ),
        None => format!(
            "the key {key}, which keeps the format of the namespace {namespace:?}, holds other data, and this client has \
             format {FORMAT}: choose another namespace, or move the data"
        ),
    };
    StoreError::new(StoreErrorKind::IncompatibleFormat, message)
}

/// The clients of a server of a majority have other settings than this one.
pub(super) fn other_settings(namespace: &str, theirs: &str, ours: &str) -> StoreError {
    let key = settings_name(namespace);
    let message = format!(
        "the clients of the namespace {namespace:?} have other settings (key {key}): {theirs}, and this client {ours}. Use \
         one `longest_lease` and one list of servers, in one order, in all clients; to change them, stop all clients, \
         delete the key on every server, and start them again"
    );
    StoreError::new(StoreErrorKind::Unsupported, message).of_settings(&["longest_lease", "url"])
}

fn unauthenticated() -> StoreError {
    StoreError::new(
        StoreErrorKind::Unauthenticated,
        "the server refused the user name and password, or requires them; \
         give them in the URL, redis://user:password@host:6379 (or redis://:password@host:6379), or by \
         `RedisOptions::credentials`",
    )
}

fn classify(code: &str, details: &str, acl: &AclLine) -> StoreError {
    match cause(code, details) {
        "READONLY" => read_only(),
        "NOAUTH" | "WRONGPASS" => unauthenticated(),
        "NOPERM" => {
            let details = safe(details);
            let message = format!(
                "the server's access rules deny a right that locks need ({details}); allow it with: {acl}"
            );
            StoreError::new(StoreErrorKind::Forbidden, message)
        }
        cause @ ("MOVED" | "ASK" | "CROSSSLOT") => unavailable(format!(
            "the server is one node of a cluster and another one keeps this lock ({cause}); \
             connect with redis+cluster://host:port"
        )),
        "DENIED" => StoreError::new(
            StoreErrorKind::Forbidden,
            "the server is in protected mode and accepts local connections only; give it a password, or bind it",
        ),
        "WRONGTYPE" => {
            let message = "a key of the lock holds data of another type";
            StoreError::new(StoreErrorKind::ForeignKey, message)
        }
        "NOPROTO" => wrong_server(NO_HELLO),
        "UNKNOWN" if safe(details).to_ascii_lowercase().contains("hello") => wrong_server(NO_HELLO),
        "UNKNOWN" => wrong_server(format!(
            "the server, or a proxy before it, does not support a command that locks need ({}); use Redis 6.0 or \
             later, and connect to the server itself",
            safe(details)
        )),
        "OOM" => unavailable("the server is out of memory (maxmemory)"),
        "LOADING" => unavailable("the server is loading its data"),
        "BUSY" => unavailable("the server is busy running another script"),
        "TRYAGAIN" => unavailable(
            "the lock is being moved to another node of the cluster, and its keys are not all there yet (TRYAGAIN)",
        ),
        cause => unavailable(format!("the server refused: {cause} {}", safe(details))),
    }
}

/// The code that identifies the error. Before Redis 7 an error within a script is reported as
/// `ERR`, with the original code in its text.
fn cause<'a>(code: &'a str, details: &'a str) -> &'a str {
    if code != "ERR" {
        return code;
    }
    if details.contains("ACL failure in script")
        || details.contains("can't run this command or subcommand")
    {
        return "NOPERM";
    }
    if is_unknown_command(details) {
        return "UNKNOWN";
    }
    if details.starts_with("AUTH ") || details.contains("no password is set") {
        return "WRONGPASS";
    }
    if !details.starts_with("Error running script") {
        return code;
    }
    let mut inner =
        "OOM READONLY NOPERM WRONGTYPE MISCONF NOREPLICAS MASTERDOWN LOADING CLUSTERDOWN TRYAGAIN"
            .split(' ');
    let is_named = |prefix: &str, code: &str| details.contains(&format!("{prefix}{code} "));
    let named = inner.find(|inner| is_named(": -", inner) || is_named(": ", inner));
    named.unwrap_or(code)
}

/// Whether the message refuses a command for good, in the words of servers and of proxies.
fn is_unknown_command(details: &str) -> bool {
    let details = safe(details).to_ascii_lowercase();
    let is_of_script = details.starts_with("error running script");
    let words = [
        "unknown command",
        "unknown redis command",
        "unsupported command",
        "command not supported",
        "command is not supported",
        "not supported command",
        "invalid command",
        "command is disabled",
        "command not allowed by proxy",
    ];
    match is_of_script {
        true => details.contains("unknown redis command"),
        false => words.iter().any(|words| details.contains(words)),
    }
}

/// Removes from a message the arguments that it repeats, and the position in the script, which is
/// of no use to users.
fn safe(details: &str) -> &str {
    let text = details.split(", with args").next().unwrap_or_default();
    text.split(" script: ").next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn classified(code: &str, details: &str) -> StoreError {
        classify(code, details, &AclLine::new("lock", 0))
    }

    #[test]
    fn every_reply_has_its_kind() {
        use StoreErrorKind::*;
        let read_only = "READONLY You can't write against a read only replica.
             ERR Error running script (call to f_1): @user_script:1: -READONLY You can't write";
        let forbidden = "NOPERM this user has no permissions to run the 'evalsha' command
             ERR ACL failure in script: User x has no permissions to access the 'k' key";
        let unauthenticated = "NOAUTH Authentication required.
             WRONGPASS invalid username-password pair or user is disabled.
             ERR AUTH <password> called without any password configured";
        let foreign = "WRONGTYPE Operation against a key holding the wrong kind of value
             ERR Error running script (call to f_1): @user_script:1: WRONGTYPE Operation against";
        let wrong = "ERR unknown command 'EVALSHA', with args beginning with: 'x'
             ERR unsupported command 'hello'
             ERR Command not supported by the proxy
             ERR Error running script (call to f_1): @user_script:1: Unknown Redis command called from Lua";
        let unavailable = "OOM command not allowed when used memory > 'maxmemory'.
             ERR Error running script (call to f_1): @user_script:1: -OOM command not allowed
             LOADING Redis is loading the dataset in memory
             BUSY Redis is busy running a script.
             MASTERDOWN Link with MASTER is down
             CLUSTERDOWN The cluster is down
             TRYAGAIN Multiple keys request during rehashing of slot
             MOVED 1 127.0.0.1:1
             ERR max number of clients reached";
        for (kind, replies) in [
            (ReadOnly, read_only),
            (Forbidden, forbidden),
            (Unauthenticated, unauthenticated),
            (ForeignKey, foreign),
            (WrongServer, wrong),
            (Unavailable, unavailable),
        ] {
            for reply in replies.lines() {
                let (code, details) = reply.trim().split_once(' ').unwrap();
                assert_eq!(classified(code, details).kind(), kind, "{reply}");
            }
        }
    }

    #[test]
    fn refused_connection_error_names_the_remedy() {
        let refusal = std::io::Error::from(std::io::ErrorKind::ConnectionRefused);
        let error = unconnected(&refusal.into(), false, &AclLine::new("lock", 0)).to_string();
        assert!(error.starts_with("no connection: "), "{error}");
        let remedy = "; is Redis running there? check host and port";
        assert!(error.ends_with(remedy), "{error}");
    }

    /// A cut within a reply is no reason to give up.
    #[test]
    fn a_reply_without_an_end_is_permanent_for_a_first_connection_only() {
        let acl = AclLine::new("lock", 0);
        let error = RedisError::from((ErrorKind::Parse, "unexpected end"));
        assert!(is_broken(&error));
        assert!(disconnected(&error, &acl).is_transient());
        let first = unconnected(&error, false, &acl);
        assert_eq!(first.kind(), StoreErrorKind::WrongServer);
    }

    #[test]
    fn a_forbidden_lock_says_what_to_allow() {
        let error = classified("NOPERM", "no permissions").to_string();
        let line = "ACL SETUSER <user> on ><password> ~lock:* ";
        assert!(error.contains(line), "{error}");
    }

    #[test]
    fn arguments_that_the_server_repeats_are_not_shown() {
        let unknown = ("ERR", "unknown command 'HELLO', ");
        for (code, text) in [unknown, ("NOPERM", "no, "), ("OTHER", "no, ")] {
            let details = format!("{text}with args beginning with: 'secret'");
            let error = classified(code, &details).to_string();
            assert!(!error.contains("secret"), "{error}");
        }
    }
}
