//! The access rules that a lock needs on a server with users.

use std::fmt;

/// What the scripts call, and `eval` and `evalsha` for the scripts themselves. `info` is for the checks on connect;
/// `subscribe`, and `publish` in the scripts, are for what is told unasked.
const COMMANDS: &str = "+eval +evalsha +info +subscribe +publish +time +type +get +set +del +pttl +pexpire +pexpireat \
                        +hget +hmget +hset +hdel \
                        +zadd +zrem +zscore +zcount +zrange +zrangebyscore +zremrangebyscore";

/// What the nodes of a cluster are asked beyond that: who keeps what, for a key on its way, and for what is told unasked.
const CLUSTER_COMMANDS: &str = "+cluster|slots +asking +ssubscribe +sunsubscribe +spublish";

/// The `ACL SETUSER` line for the locks of one namespace, in database `db` of a server or on the nodes of a cluster.
#[derive(Clone, Debug)]
pub(super) struct AclLine {
    namespace: String,
    db: i64,
    waits: bool,
    cluster: bool,
}

impl AclLine {
    pub(super) fn new(namespace: &str, db: i64) -> Self {
        // Key patterns are globs, and cannot hold blanks.
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

    /// For a store that waits for replicas, or not.
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
        // The keys beside a lock: its fence and its queue.
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
