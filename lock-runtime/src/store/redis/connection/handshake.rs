//! The handshake on every new connection: it checks whether the server can store locks, and
//! reads its time.

use std::time::Duration;

use redis::{
    Cmd, RedisError, Value,
    aio::{ConnectionLike as _, MultiplexedConnection},
};

use super::super::{
    error,
    operator::acl::AclLine,
    script::{
        names::format_name,
        reply::{Reply, unexpected},
    },
};
use crate::{
    shell::time::Instant,
    store::{StoreError, StoreErrorKind},
};

/// The version of the format of all keys, values and messages of a namespace, which clients of
/// different versions must not share. A new version leaves its own key and the marker as they are:
/// a connection of any version reads both, and may write the marker, before it knows the version.
pub(crate) const FORMAT: u32 = 1;

/// The longest value of a field of `INFO` that is read: those that matter are words and numbers.
const LONGEST_FIELD: usize = 256;

/// The replies of a server to the handshake.
pub(in crate::store::redis) struct Greeting {
    pub(crate) sent: Instant,
    pub(crate) received: Instant,
    info: Value,
    time: Value,
    format: Value,
    marker: Value,
}

impl Greeting {
    /// Performs the handshake in one round trip. On a server of a quorum it also reads the
    /// `marker` of the data.
    pub(super) async fn exchange(
        connection: &mut MultiplexedConnection,
        namespace: &str,
        marker: Option<&Cmd>,
    ) -> Result<Self, RedisError> {
        let mut questions = redis::pipe();
        questions.cmd("INFO").cmd("TIME");
        questions.cmd("GET").arg(format_name(namespace));
        if let Some(marker) = marker {
            questions.add_command(marker.clone());
        }
        let sent = Instant::now();
        let count = questions.len();
        let answers = connection.req_packed_commands(&questions, 0, count).await?;
        let mut answers = answers.into_iter();
        let mut next = || answers.next().unwrap_or(Value::Nil);
        Ok(Self {
            sent,
            received: Instant::exactly_now(),
            info: next(),
            time: next(),
            format: next(),
            marker: next(),
        })
    }

    /// The replies of a test.
    #[cfg(test)]
    pub(crate) fn of([info, time, format, marker]: [Value; 4]) -> Self {
        let (sent, received) = (Instant::now(), Instant::exactly_now());
        Self {
            sent,
            received,
            info,
            time,
            format,
            marker,
        }
    }

    /// The reply to `INFO`.
    pub(crate) fn info(&self, acl: &AclLine) -> Result<Info, StoreError> {
        text(&self.info, acl).map(Info)
    }

    /// Refuses a namespace of another format. The check is skipped where the access rules forbid
    /// it, and on a node of a cluster that does not serve the key.
    pub(crate) fn check_format(&self, namespace: &str, acl: &AclLine) -> Result<(), StoreError> {
        let found = match &self.format {
            Value::Nil => return Ok(()),
            Value::ServerError(refusal) => {
                let error = error::refused(refusal, acl);
                match (refusal.code(), error.kind()) {
                    ("MOVED" | "ASK" | "CLUSTERDOWN", _) => return Ok(()),
                    (_, StoreErrorKind::Forbidden) => {
                        let key = format_name(namespace);
                        tracing::debug!(
                            key,
                            "the access rules forbid GET: the format of the namespace was not checked"
                        );
                        return Ok(());
                    }
                    (_, StoreErrorKind::ForeignKey) => None,
                    _ => return Err(error),
                }
            }
            value => text(value, acl).ok().and_then(|text| text.parse().ok()),
        };
        match found {
            Some(FORMAT) => Ok(()),
            found => Err(error::incompatible(namespace, found)),
        }
    }

    /// The marker of the data, the time for which the server has had it, and the settings of its
    /// clients.
    pub(crate) fn marker(&self, acl: &AclLine) -> Result<(String, Duration, String), StoreError> {
        let mut reply = Reply::new(settled(&self.marker, acl)?.clone())?;
        reply.count()?;
        let (marker, with_data) = (reply.text()?, Duration::from_micros(reply.count()?));
        Ok((marker, with_data, reply.text()?))
    }

    /// The server's time, in microseconds since 1970.
    pub(crate) fn micros(&self, acl: &AclLine) -> Result<u64, StoreError> {
        micros_of(&self.time, acl)
    }
}

/// The time in a reply to `TIME`, in microseconds since 1970.
pub(crate) fn micros_of(time: &Value, acl: &AclLine) -> Result<u64, StoreError> {
    let time = redis::from_redis_value_ref(settled(time, acl)?);
    let (seconds, micros): (u64, u64) = time.map_err(|_| unexpected())?;
    Ok(seconds.saturating_mul(1_000_000).saturating_add(micros))
}

/// Returns the reply, or the error that it is.
fn settled<'a>(value: &'a Value, acl: &AclLine) -> Result<&'a Value, StoreError> {
    match value {
        Value::ServerError(refusal) => Err(error::refused(refusal, acl)),
        value => Ok(value),
    }
}

pub(crate) fn text(value: &Value, acl: &AclLine) -> Result<String, StoreError> {
    redis::from_redis_value_ref(settled(value, acl)?).map_err(|_| unexpected())
}

/// The role that a server must have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// A server that stores all locks.
    Primary,
    /// A node of a cluster. It may be a replica, which is only queried for the slot map.
    Node,
}

/// The reply to `INFO`.
pub(crate) struct Info(pub(in crate::store::redis) String);

impl Info {
    /// The version of the server if it is too old.
    fn old_version(&self) -> Option<&str> {
        // Every Valkey has the required features, whichever version of Redis it reports for
        // compatibility.
        if self.field("valkey_version").is_some() {
            return None;
        }
        let version = self.field("redis_version")?;
        let major: u32 = version.split('.').next()?.parse().ok()?;
        (major < 6).then_some(version)
    }

    /// The time since the server was started.
    pub(crate) fn uptime(&self) -> Option<Duration> {
        let seconds = self.field("uptime_in_seconds")?.parse();
        seconds.ok().map(Duration::from_secs)
    }

    /// The eviction policy if it may remove a lock while it is held.
    pub(crate) fn eviction(&self) -> Option<&str> {
        let policy = self.field("maxmemory_policy")?;
        let evicts = policy.starts_with("volatile-") || policy.starts_with("allkeys-");
        evicts.then_some(policy)
    }

    pub(crate) fn field(&self, name: &str) -> Option<&str> {
        let mut lines = self.0.lines();
        let value = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        let value = value.map(str::trim);
        value.filter(|value| value.len() <= LONGEST_FIELD)
    }

    /// Checks that the server can store locks in the role `kind`.
    pub(crate) fn check(&self, kind: Kind) -> Result<(), StoreError> {
        if let Some(version) = self.old_version() {
            return Err(error::too_old(version));
        }
        // Valkey names the mode `server_mode`.
        let modes = ["redis_mode", "server_mode"].map(|mode| self.field(mode));
        if modes.contains(&Some("sentinel")) {
            let message = "the server is a Sentinel, which keeps no locks; connect to the primary that it watches: \
                           redis+sentinel://host:26379/mymaster";
            return Err(StoreError::new(StoreErrorKind::WrongServer, message));
        }
        if kind == Kind::Node && self.field("cluster_enabled") != Some("1") {
            let message = "the server is not a node of a cluster; connect with redis://host:port";
            return Err(StoreError::new(StoreErrorKind::WrongServer, message));
        }
        if kind == Kind::Primary && matches!(self.field("role"), Some("slave" | "replica")) {
            return Err(error::read_only());
        }
        if kind == Kind::Primary && self.field("cluster_enabled") == Some("1") {
            tracing::warn!(
                "the server is a node of a cluster: if there are others, they keep a part of the locks, and this client \
                 neither lists nor acquires those; connect with redis+cluster://host:port"
            );
        }
        if let Some(policy) = self.eviction() {
            tracing::warn!(
                policy,
                "the server may evict a lock while it is held; set maxmemory-policy to noeviction"
            );
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_cannot_keep_locks_is_refused() {
        use StoreErrorKind::{ReadOnly, WrongServer};
        let redis = |version: &str, rest: &str| {
            format!("# Server\r\nredis_version:{version}\r\n{rest}\r\n")
        };
        // As printed by Valkey 8.1.
        let valkey = |version: &str, mode: &str, role: &str| {
            format!(
                "# Server\r\nredis_version:{version}\r\nserver_name:valkey\r\nvalkey_version:8.1.1\r\n\
                 valkey_release_stage:ga\r\nredis_git_sha1:00000000\r\nredis_git_dirty:0\r\n\
                 redis_build_id:5beb99de11516a6b\r\nserver_mode:{mode}\r\nos:Linux 6.1.0 x86_64\r\narch_bits:64\r\n\
                 \r\n# Replication\r\nrole:{role}\r\n\r\n# Cluster\r\ncluster_enabled:0\r\n"
            )
        };
        let of_cluster = |role: &str, enabled| format!("{role}\r\ncluster_enabled:{enabled}\r\n");
        let [a_sentinel, no_node, too_old] =
            ["is a Sentinel", "not a node", "5.0.14"].map(|words| Some((WrongServer, words)));
        let (primary, node) = (Kind::Primary, Kind::Node);
        let (a_replica, fine) = (Some((ReadOnly, "")), None);
        let sentinel_of_redis = redis("7.0.15", "redis_mode:sentinel");
        let sentinel_of_valkey = valkey("7.2.4", "sentinel", "master");
        let replica_of_valkey = valkey("7.2.4", "standalone", "slave");
        for (role, info, refusal) in [
            (primary, redis("7.0.15", "role:master"), fine),
            (primary, "role:slave\r\n".into(), a_replica),
            (primary, sentinel_of_redis, a_sentinel),
            (primary, redis("5.0.14", "role:master"), too_old),
            (primary, valkey("7.2.4", "standalone", "master"), fine),
            // Valkey can be configured to report another version to old clients.
            (primary, valkey("5.0.0", "standalone", "master"), fine),
            (primary, replica_of_valkey, a_replica),
            (primary, sentinel_of_valkey, a_sentinel),
            // A node may be a replica, but must be part of a cluster.
            (node, of_cluster("role:master", 1), fine),
            (node, of_cluster("role:slave", 1), fine),
            (node, of_cluster("role:master", 0), no_node),
            (node, "role:master\r\n".into(), no_node),
        ] {
            let found = Info(info.clone()).check(role).err();
            let kind = found.as_ref().map(StoreError::kind);
            assert_eq!(kind, refusal.map(|(kind, _)| kind), "{info}");
            if let (Some(error), Some((_, words))) = (found, refusal) {
                assert!(error.to_string().contains(words), "{error}");
            }
        }
    }
}
