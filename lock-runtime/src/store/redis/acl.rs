//! The access rules that locks need on a server with users.

use std::fmt;

/// The commands of the scripts, and `eval` and `evalsha` to run them. `info` is for the checks on
/// connect; `subscribe`, and `publish` in the scripts, are for push messages.
const COMMANDS: &str = "+eval +evalsha +info +subscribe +publish +time +type +get +set +del +pttl +pexpire +pexpireat \
                        +hget +hmget +hset +hdel \
                        +zadd +zrem +zscore +zcount +zrange +zrangebyscore +zremrangebyscore";

/// The additional commands for the nodes of a cluster: for the slot map, for keys of a migrating
/// slot, and for push messages.
const CLUSTER_COMMANDS: &str = "+cluster|slots +asking +ssubscribe +sunsubscribe +spublish";

/// The `ACL SETUSER` line for the locks of one namespace, in database `db` of a server or on the
/// nodes of a cluster.
#[derive(Clone, Debug)]
pub(super) struct AclLine {
    namespace: String,
    db: i64,
    waits: bool,
    cluster: bool,
}

impl AclLine {
    pub(super) fn new(namespace: &str, db: i64) -> Self {
        // Key patterns are globs, and cannot contain blanks.
        let mut pattern = String::with_capacity(namespace.len());
        for c in namespace.chars() {
            match c {
                '*' | '?' | '[' | ']' | '\\' | '^' => pattern.extend(['\\', c]),
                c if c.is_whitespace() => pattern.push('?'),
                c => pattern.push(c),
            }
        }
        Self {
            namespace: pattern,
            db,
            waits: false,
            cluster: false,
        }
    }

    /// Sets whether the store waits for replicas.
    pub(super) fn waiting(self, waits: bool) -> Self {
        Self { waits, ..self }
    }

    /// The line for the nodes of a cluster.
    pub(super) fn of_cluster(namespace: &str) -> Self {
        Self {
            cluster: true,
            ..Self::new(namespace, 0)
        }
    }
}

impl fmt::Display for AclLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            namespace: ns,
            db,
            waits,
            cluster,
        } = self;
        write!(f, "ACL SETUSER <user> on ><password> ~{ns}:*")?;
        // The side keys of a lock: its fence and its queue.
        for side in ["f", "q"] {
            write!(f, " ~{{{ns}:*}}:{side} ~{side}:{ns}:*")?;
        }
        write!(f, " &{ns}:* {COMMANDS}")?;
        if *waits {
            f.write_str(" +wait")?;
        }
        if *cluster {
            write!(f, " {CLUSTER_COMMANDS}")?;
        }
        if *db == 0 {
            Ok(())
        } else {
            f.write_str(" +select")
        }
    }
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
        assert!(
            AclLine::new("a", 0)
                .waiting(true)
                .to_string()
                .ends_with("+wait")
        );
    }

    #[test]
    fn a_cluster_needs_more_than_a_server() {
        let (server, cluster) = (
            AclLine::new("a", 0).to_string(),
            AclLine::of_cluster("a").to_string(),
        );
        assert_eq!(cluster, format!("{server} {CLUSTER_COMMANDS}"));
    }
}
