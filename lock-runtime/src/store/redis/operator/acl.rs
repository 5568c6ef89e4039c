//! The access rules that locks need on a server with users.

use std::fmt;

/// The commands of the scripts, and `eval` and `evalsha` to run them. `info` is for the checks on
/// connect; `subscribe`, and `publish` in the scripts, are for push messages.
const COMMANDS: &str = "+eval +evalsha +info +subscribe +publish +time +type +exists +get +mget +set +del +pttl +pexpire +pexpireat \
                        +hget +hmget +hset +hdel \
                        +zadd +zrem +zscore +zcount +zrange +zrangebyscore +zremrangebyscore";

/// The additional commands for the nodes of a cluster: for the slot map, for keys of a migrating
/// slot, and for push messages.
const CLUSTER_COMMANDS: &str = "+cluster|slots +asking +ssubscribe +sunsubscribe +spublish";

/// The `ACL SETUSER` line for the locks of one namespace, in database `db` of a server or on the
/// nodes of a cluster.
#[derive(Clone, Debug)]
pub(crate) struct AclLine(String);

impl AclLine {
    pub(crate) fn new(namespace: &str, db: i64) -> Self {
        // Key patterns are globs, and cannot contain blanks.
        let ns = literally(namespace).replace(char::is_whitespace, "?");
        // The side keys of a lock: its fence and its queue.
        let [fence, queue] = ["f", "q"].map(|side| format!("~{{{ns}:*}}:{side} ~{side}:{ns}:*"));
        let select = if db == 0 { "" } else { " +select" };
        // Where a new user may use all channels, a pattern alone is an error.
        let channels = format!("resetchannels &{ns}:*");
        Self(format!(
            "ACL SETUSER <user> on ><password> ~{ns}:* {fence} {queue} {channels} {COMMANDS}{select}"
        ))
    }

    /// Sets whether the store waits for replicas.
    pub(crate) fn waiting(self, waits: bool) -> Self {
        let wait = if waits { " +wait" } else { "" };
        Self(self.0 + wait)
    }

    /// The rights, word by word: patterns of keys and of channels, and commands.
    pub(crate) fn rights(&self) -> impl Iterator<Item = &str> {
        let words = self.0.split(' ');
        words.filter(|word| word.starts_with(['~', '&', '+']))
    }

    /// The line for the nodes of a cluster.
    pub(crate) fn of_cluster(namespace: &str) -> Self {
        Self(format!("{} {CLUSTER_COMMANDS}", Self::new(namespace, 0)))
    }
}

impl fmt::Display for AclLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Escapes a text for a pattern.
pub(super) fn literally(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        if matches!(c, '*' | '?' | '[' | ']' | '\\' | '^') {
            escaped.push('\\');
        }
        escaped.push(c);
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_is_no_pattern() {
        let line = AclLine::new("a*b c", 0).to_string();
        assert!(line.contains(" ~a\\*b?c:* "), "{line}");
        assert!(line.contains(" ~{a\\*b?c:*}:f ~f:a\\*b?c:* "), "{line}");
        assert!(!line.contains("+select"));
        assert!(AclLine::new("a", 3).to_string().ends_with("+select"));
        let waiting = AclLine::new("a", 0).waiting(true).to_string();
        assert!(waiting.ends_with("+wait"));
    }

    #[test]
    fn a_cluster_needs_more_than_a_server() {
        let (server, cluster) = (AclLine::new("a", 0), AclLine::of_cluster("a"));
        assert_eq!(cluster.to_string(), format!("{server} {CLUSTER_COMMANDS}"));
    }
}
