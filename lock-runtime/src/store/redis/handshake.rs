//! The handshake on every new connection: it checks whether the server can store locks, and
//! reads its time.

use std::time::Duration;

use redis::{
    Cmd, RedisError, Value,
    aio::{ConnectionLike as _, MultiplexedConnection},
};
use tokio::time::Instant;

use super::{
    acl::AclLine,
    error,
    reply::{Reply, unexpected},
};
use crate::store::{StoreError, StoreErrorKind};

/// The replies of a server to the handshake.
pub(super) struct Greeting {
    pub(super) sent: Instant,
    pub(super) received: Instant,
    info: Value,
    time: Value,
    marker: Value,
}

impl Greeting {
    /// Performs the handshake in one round trip. On a server of a quorum it also reads the
    /// `marker` of the data.
    pub(super) async fn exchange(
        connection: &mut MultiplexedConnection,
        marker: Option<&Cmd>,
    ) -> Result<Self, RedisError> {
        let mut questions = redis::pipe();
        questions.cmd("INFO").cmd("TIME");
        marker.into_iter().for_each(|marker| {
            questions.add_command(marker.clone());
        });
        let sent = Instant::now();
        let mut answers = connection
            .req_packed_commands(&questions, 0, questions.len())
            .await?
            .into_iter();
        let received = Instant::now();
        let [info, time, marker] = [(); 3].map(|()| answers.next().unwrap_or(Value::Nil));
        Ok(Self {
            sent,
            received,
            info,
            time,
            marker,
        })
    }

    /// The reply to `INFO`.
    pub(super) fn info(&self, acl: &AclLine) -> Result<Info, StoreError> {
        text(&self.info, acl).map(Info)
    }

    /// The marker of the data, and the time for which the server has had it.
    pub(super) fn marker(&self, acl: &AclLine) -> Result<(String, Duration), StoreError> {
        if let Value::ServerError(refusal) = &self.marker {
            return Err(error::refused(refusal, acl));
        }
        let mut reply = Reply::new(self.marker.clone())?;
        reply.count()?;
        Ok((reply.text()?, Duration::from_micros(reply.count()?)))
    }

    /// The server's time, in microseconds since 1970.
    pub(super) fn micros(&self, acl: &AclLine) -> Result<u64, StoreError> {
        match &self.time {
            Value::Array(time) => {
                let mut parts = time
                    .iter()
                    .map(|part| text(part, acl)?.parse::<u64>().map_err(|_| unexpected()));
                match (parts.next(), parts.next()) {
                    (Some(seconds), Some(micros)) => Ok(seconds? * 1_000_000 + micros?),
                    _ => Err(unexpected()),
                }
            }
            Value::ServerError(refusal) => Err(error::refused(refusal, acl)),
            _ => Err(unexpected()),
        }
    }
}

fn text(value: &Value, acl: &AclLine) -> Result<String, StoreError> {
    match value {
        Value::ServerError(refusal) => Err(error::refused(refusal, acl)),
        value => redis::from_redis_value_ref(value).map_err(|_| unexpected()),
    }
}

/// The role that a server must have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    /// A server that stores all locks.
    Primary,
    /// A node of a cluster. It may be a replica, which is only queried for the slot map.
    Node,
}

/// The reply to `INFO`.
pub(super) struct Info(String);

impl Info {
    /// Wraps the text of the reply.
    pub(super) fn new(text: String) -> Self {
        Self(text)
    }

    /// The version of the server if it is too old.
    pub(super) fn old_version(&self) -> Option<&str> {
        // Every Valkey has the required features, whichever version of Redis it reports for
        // compatibility.
        if self.field("valkey_version").is_some() {
            return None;
        }
        let version = self.field("redis_version")?;
        let major: u32 = version.split('.').next()?.parse().ok()?;
        (major < 6).then_some(version)
    }

    /// The identifier of the current run of the server.
    pub(super) fn run_id(&self) -> Option<String> {
        self.field("run_id").map(str::to_owned)
    }

    /// The time since the server was started.
    pub(super) fn uptime(&self) -> Option<Duration> {
        self.field("uptime_in_seconds")?
            .parse()
            .ok()
            .map(Duration::from_secs)
    }

    fn field(&self, name: &str) -> Option<&str> {
        let Self(text) = self;
        text.lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
            .map(str::trim)
    }

    /// Checks that the server can store locks in the role `kind`.
    pub(super) fn check(&self, kind: Kind) -> Result<(), StoreError> {
        if let Some(version) = self.old_version() {
            return Err(error::too_old(Some(version)));
        }
        // Valkey names the mode `server_mode`.
        if ["redis_mode", "server_mode"]
            .iter()
            .any(|mode| self.field(mode) == Some("sentinel"))
        {
            let message = "the server is a Sentinel, which keeps no locks; connect to the primary that it watches: \
                           redis+sentinel://host:26379/mymaster";
            return Err(StoreError::new(StoreErrorKind::WrongServer, message));
        }
        if kind == Kind::Node && self.field("cluster_enabled") != Some("1") {
            let message = "the server is not a node of a cluster; connect with redis://host:port";
            return Err(StoreError::new(StoreErrorKind::WrongServer, message));
        }
        if kind == Kind::Primary
            && self
                .field("role")
                .is_some_and(|role| matches!(role, "slave" | "replica"))
        {
            return Err(error::read_only());
        }
        if let Some(policy) = self.field("maxmemory_policy")
            && (policy.starts_with("volatile-") || policy.starts_with("allkeys-"))
        {
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
        let check = |info: &str| Info::new(info.to_owned()).check(Kind::Primary);
        let kind = |info: &str| check(info).map_err(|error| error.kind());
        assert_eq!(
            kind("# Server\r\nredis_version:7.0.15\r\nrole:master\r\n"),
            Ok(())
        );
        assert_eq!(kind("role:slave\r\n"), Err(StoreErrorKind::ReadOnly));
        assert_eq!(
            kind("redis_version:7.0.15\r\nredis_mode:sentinel\r\n"),
            Err(StoreErrorKind::WrongServer)
        );
        let error = check("redis_version:5.0.14\r\nrole:master\r\n").unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::WrongServer);
        assert!(error.to_string().contains("5.0.14"), "{error}");
    }

    #[test]
    fn valkey_is_known_by_the_fields_of_its_own() {
        // As printed by Valkey 8.1.
        let info = |version: &str, mode: &str, role: &str| {
            let text = format!(
                "# Server\r\nredis_version:{version}\r\nserver_name:valkey\r\nvalkey_version:8.1.1\r\n\
                 valkey_release_stage:ga\r\nredis_git_sha1:00000000\r\nredis_git_dirty:0\r\n\
                 redis_build_id:5beb99de11516a6b\r\nserver_mode:{mode}\r\nos:Linux 6.1.0 x86_64\r\narch_bits:64\r\n\
                 \r\n# Replication\r\nrole:{role}\r\n\r\n# Cluster\r\ncluster_enabled:0\r\n"
            );
            Info::new(text)
        };
        assert!(
            info("7.2.4", "standalone", "master")
                .check(Kind::Primary)
                .is_ok()
        );
        // Valkey can be configured to report another version to old clients.
        assert!(
            info("5.0.0", "standalone", "master")
                .check(Kind::Primary)
                .is_ok()
        );
        let error = info("7.2.4", "standalone", "slave")
            .check(Kind::Primary)
            .unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::ReadOnly);
        let error = info("7.2.4", "sentinel", "master")
            .check(Kind::Primary)
            .unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::WrongServer);
        assert!(error.to_string().contains("is a Sentinel"), "{error}");
    }

    #[test]
    fn a_node_of_a_cluster_may_be_a_replica_and_nothing_else() {
        let kind = |info: &str| {
            Info::new(info.to_owned())
                .check(Kind::Node)
                .map_err(|error| error.kind())
        };
        assert_eq!(kind("role:master\r\ncluster_enabled:1\r\n"), Ok(()));
        assert_eq!(kind("role:slave\r\ncluster_enabled:1\r\n"), Ok(()));
        assert_eq!(
            kind("role:master\r\ncluster_enabled:0\r\n"),
            Err(StoreErrorKind::WrongServer)
        );
        assert_eq!(kind("role:master\r\n"), Err(StoreErrorKind::WrongServer));
    }
}
