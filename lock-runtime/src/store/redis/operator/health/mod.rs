//! The health of a server: one question on the connection of the store, and the findings about its
//! reply. Nothing is written.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use redis::{Cmd, ServerError, Value};
use tokio::time::timeout;

use super::{
    super::{
        RedisStore,
        connection::{
            Connection,
            handshake::{self, Info, Kind},
        },
        error,
        topology::{servers::Servers, target::Target},
    },
    rights,
};
use crate::{
    observe::health::{Finding, Health, PATIENCE, ServerHealth, ServerRole, Severity, is_answer},
    shell::time::Instant,
    store::{StoreError, StoreErrorKind},
};

/// The difference of clocks that is reported. Servers that are kept in time by NTP differ by
/// milliseconds.
const CLOCK_TOLERANCE: Duration = Duration::from_secs(1);
/// The share of `maxmemory`, in percent, beyond which it is about to run out.
const FULL: u64 = 90;

/// The state of a server, with the findings about it.
pub(crate) struct Examined {
    pub(crate) server: ServerHealth,
    pub(crate) findings: Vec<Finding>,
    /// The reply of a node of a cluster to `CLUSTER SLOTS`.
    pub(crate) slots: Option<Value>,
}

/// The replies of a server, and when they were received.
struct Replies {
    round_trip: Duration,
    /// The time of this process halfway between request and reply, in microseconds since 1970.
    halfway: u64,
    time: Value,
    info: Value,
    write: Value,
    rights: Value,
    slots: Option<Value>,
}

impl RedisStore {
    pub(crate) async fn examine(&self) -> Health {
        let connection = match &self.servers {
            Servers::One(connection) => connection,
            Servers::Cluster(cluster) => return cluster.health().await,
            #[cfg(all(test, feature = "records"))]
            Servers::Simulated(_) => unreachable!("no simulator asks for it"),
        };
        let required = self.replicas.as_ref().map(|replicas| replicas.required());
        let key = harmless_key(&self.namespace, "");
        let Target::Primary(sentinels) = &connection.connector.target else {
            let name = connection.connector.target.to_string();
            let Examined {
                server, findings, ..
            } = examine(connection, name, &key, required).await;
            return Health::new(vec![server], findings);
        };
        let (mut examined, (primary, of_sentinels, about_sentinels)) = tokio::join!(
            examine(
                connection,
                format!("the primary {:?}", sentinels.name),
                &key,
                required
            ),
            sentinels.health(),
        );
        if let Some(address) = primary {
            for finding in &mut examined.findings {
                finding.server = Some(address.clone());
            }
            examined.server.name = address;
        }
        let mut findings = examined.findings;
        findings.extend(about_sentinels);
        let servers = [examined.server].into_iter().chain(of_sentinels);
        Health::new(servers.collect(), findings)
    }
}

/// A key that holds no sorted set, so that the [write](write_of_nothing) has no effect: the record
/// of a fencing token, or none. In a cluster the `tag` determines the slot.
pub(crate) fn harmless_key(namespace: &str, tag: &str) -> String {
    format!("f:{namespace}:health{tag}")
}

/// A write that the server refuses as it would refuse that of a lock, and that changes nothing: no
/// member is added (`XX`), so neither is the key.
fn write_of_nothing(key: &str) -> Cmd {
    let mut write = redis::cmd("ZADD");
    write.arg(key).arg("XX").arg(0).arg("health");
    write
}

/// Asks a server, within a second. `key` is one that the server serves, and `required` the number
/// of replicas that a grant needs.
pub(crate) async fn examine(
    connection: &Connection,
    name: String,
    key: &str,
    required: Option<u64>,
) -> Examined {
    let replies = timeout(PATIENCE, ask(connection, key)).await;
    let replies = replies.unwrap_or_else(|_| Err(StoreError::timed_out(PATIENCE)));
    let mut examined = Examined {
        server: ServerHealth::new(name),
        findings: Vec::new(),
        slots: replies
            .as_ref()
            .ok()
            .and_then(|replies| replies.slots.clone()),
    };
    match replies {
        Ok(replies) => {
            examined.server.reachable = true;
            examined.server.round_trip = Some(replies.round_trip);
            examined.judge(connection, replies, required);
            let critical = |finding: &Finding| finding.severity == Severity::Critical;
            examined.server.grants_locks = !examined.findings.iter().any(critical);
        }
        Err(error) => {
            examined.server.reachable = is_answer(&error);
            if error.kind() == StoreErrorKind::ReadOnly {
                examined.server.role = Some(ServerRole::Replica);
            }
            examined.findings.push(Finding::failed(&error));
        }
    }
    for finding in &mut examined.findings {
        finding.server = Some(examined.server.name.clone());
    }
    examined
}

async fn ask(connection: &Connection, key: &str) -> Result<Replies, StoreError> {
    let connector = &connection.connector;
    let mut questions = redis::pipe();
    // The time comes first, as the others take longer.
    questions.cmd("TIME").cmd("INFO");
    questions.add_command(write_of_nothing(key));
    questions.add_command(rights::question(
        &connector.acl,
        &connector.pushes.namespace,
    ));
    if connector.kind == Kind::Node {
        questions.cmd("CLUSTER").arg("SLOTS");
    }
    // Time to connect is not part of the round trip.
    connection.ready().await?;
    let (sent, began) = (SystemTime::now(), Instant::now());
    // A quarantined server answers, as none of this concerns a lock.
    let replies = connection.send_all_again(&questions, false).await?;
    let round_trip = began.elapsed();
    let halfway = (sent + round_trip / 2).duration_since(UNIX_EPOCH);
    let mut replies = replies.into_iter();
    let mut next = || replies.next().unwrap_or(Value::Nil);
    Ok(Replies {
        round_trip,
        halfway: halfway.map_or(0, |time| time.as_micros() as u64),
        time: next(),
        info: next(),
        write: next(),
        rights: next(),
        slots: replies.next(),
    })
}

impl Examined {
    /// A server that cannot be asked.
    pub(crate) fn failed(name: &str, error: &StoreError) -> Self {
        Self {
            server: ServerHealth::new(name),
            findings: vec![Finding::failed(error).about(name)],
            slots: None,
        }
    }

    fn add(
        &mut self,
        severity: Severity,
        code: &'static str,
        message: impl Into<String>,
        remedy: impl Into<std::borrow::Cow<'static, str>>,
    ) {
        let finding = Finding::new(severity, code, message, remedy);
        self.findings.push(finding);
    }

    fn judge(&mut self, connection: &Connection, replies: Replies, required: Option<u64>) {
        let connector = &connection.connector;
        match handshake::text(&replies.info, &connector.acl) {
            Ok(info) => {
                let part = (connector.kind, connector.target.moves());
                self.judge_info(&Info(info), part, required);
            }
            // It is one of the missing rights.
            Err(error) if error.kind() == StoreErrorKind::Forbidden => {}
            Err(error) => self.findings.push(Finding::failed(&error)),
        }
        let missing = rights::missing(&replies.rights, &connector.acl, &connector.pushes.namespace);
        if let Value::ServerError(refusal) = &replies.write {
            self.judge_write(
                refusal,
                error::refused(refusal, &connector.acl),
                missing.is_some(),
            );
        }
        if let Some(missing) = missing {
            self.judge_rights(missing);
        }
        if let Ok(micros) = handshake::micros_of(&replies.time, &connector.acl) {
            self.judge_clock((micros as f64 - replies.halfway as f64) / 1e6);
        }
        let tenure = connector.tenure();
        if let Some(left) = tenure.and_then(|tenure| tenure.keeps_away(Instant::now())) {
            self.server.quarantine_left = Some(left);
            self.add(
                Severity::Critical,
                "quarantined",
                format!("it may have forgotten a lock, and votes in {left:.0?}"),
                "wait; restart one server at a time, with that pause between them",
            );
        }
    }

    /// Judges the server in its part: the kind, and whether another one becomes the primary when it
    /// fails.
    pub(in crate::store::redis) fn judge_info(
        &mut self,
        info: &Info,
        (kind, fails_over): (Kind, bool),
        required: Option<u64>,
    ) {
        use Severity::{Critical, Notice, Warning};
        let number = |name| info.field(name).and_then(|text| text.parse::<u64>().ok());
        let product = ["valkey_version", "redis_version"];
        let version = product.iter().find_map(|name| info.field(name));
        let brand = match info.field("valkey_version") {
            Some(_) => "Valkey",
            None => "Redis",
        };
        self.server.version = version.map(|version| format!("{brand} {version}"));
        self.server.replicas = number("connected_slaves");
        self.server.eviction_policy = info.field("maxmemory_policy").map(str::to_owned);
        self.server.run_id = info.field("run_id").map(str::to_owned);
        let is_replica = matches!(info.field("role"), Some("slave" | "replica"));
        self.server.role = Some(match is_replica {
            true => ServerRole::Replica,
            false => ServerRole::Primary,
        });
        if is_replica {
            self.findings.push(Finding::failed(&error::read_only()));
        }
        if info.field("loading") == Some("1") {
            self.add(
                Critical,
                "loading",
                "the server is loading its data",
                "wait until it has",
            );
        }
        if let Some(policy) = info.eviction() {
            self.add(
                Warning,
                "eviction",
                format!("the policy {policy} may evict a lock while it is held"),
                "set maxmemory-policy to noeviction",
            );
        }
        if let (Some(used), Some(most @ 1..)) = (number("used_memory"), number("maxmemory"))
            && used.saturating_mul(100) > most.saturating_mul(FULL)
        {
            let percent = used.saturating_mul(100) / most;
            self.add(
                Warning,
                "memory",
                format!("{percent} % of maxmemory is in use"),
                "raise maxmemory, or move other data to another server",
            );
        }
        for (field, file) in [
            ("rdb_last_bgsave_status", "snapshot (RDB)"),
            ("aof_last_write_status", "append-only file (AOF)"),
            (
                "aof_last_bgrewrite_status",
                "rewrite of the append-only file",
            ),
        ] {
            if info.field(field) == Some("err") {
                self.add(
                    Warning,
                    "persistence",
                    format!("the last {file} could not be written"),
                    "check the space and the rights of its directory; the server's log has the cause",
                );
            }
        }
        let connected = self.server.replicas.filter(|_| !is_replica);
        if let (Some(found), Some(required)) = (connected, required)
            && found < required
        {
            self.add(
                Critical,
                "too_few_replicas",
                format!(
                    "{found} replicas are connected, and a grant needs {required} (min_replicas)"
                ),
                "start the replicas, or lower min_replicas",
            );
        }
        if kind == Kind::Primary && info.field("cluster_enabled") == Some("1") {
            self.add(
                Notice,
                "cluster_node",
                "the server is a node of a cluster: if there are others, they keep a part of the locks, which this client \
                 neither lists nor acquires",
                "connect with redis+cluster://host:port",
            );
        }
        let without_replica = match kind {
            Kind::Node => {
                Some("the node has no replica: if it fails, its slots are out until it is back")
            }
            Kind::Primary if fails_over => {
                Some("the primary has no replica: if it fails, there is no failover")
            }
            Kind::Primary => None,
        };
        if let (Some(message), Some(0)) = (without_replica, connected) {
            self.add(Notice, "no_replica", message, "add a replica");
        }
        let major = version.and_then(|version| version.split('.').next()?.parse::<u32>().ok());
        if kind == Kind::Node && brand == "Redis" && major.is_some_and(|major| major < 7) {
            self.add(
                Notice,
                "old_version",
                "Redis before 7.0 has no sharded channels: waiters only poll once a second",
                "upgrade to Redis 7.0 or later",
            );
        }
    }

    fn judge_write(&mut self, refusal: &ServerError, error: StoreError, rights_known: bool) {
        let known = |code| self.findings.iter().any(|finding| finding.code == code);
        let remedy = match refusal.code() {
            // A fencing token under this name, which was left as it is; a slot that has just moved.
            "WRONGTYPE" | "TRYAGAIN" => return,
            "MOVED" | "ASK" if self.slots.is_some() => return,
            "READONLY" if known("read_only") => return,
            "LOADING" if known("loading") => return,
            "NOPERM" if rights_known => return,
            "OOM" => "raise maxmemory, or move other data to another server",
            "MISCONF" => {
                "repair its persistence (space and rights of the directory), or set stop-writes-on-bgsave-error to no"
            }
            "NOREPLICAS" => "start its replicas, or lower min-replicas-to-write",
            "CLUSTERDOWN" => "restore the failed nodes, or set cluster-require-full-coverage to no",
            _ => return self.findings.push(Finding::failed(&error)),
        };
        let message = format!("it refuses writes: {error}");
        self.add(Severity::Critical, "writes_refused", message, remedy);
    }

    fn judge_rights(&mut self, missing: Vec<String>) {
        let (dispensable, required): (Vec<_>, Vec<_>) = missing
            .iter()
            .map(String::as_str)
            .partition(|right| rights::is_dispensable(right));
        let remedy = |rights: &[&str]| format!("ACL SETUSER <user> {}", rights.join(" "));
        let (info, channels): (Vec<_>, Vec<_>) =
            dispensable.into_iter().partition(|right| *right == "+info");
        if !required.is_empty() {
            let message = format!("the user lacks {}", required.join(" "));
            let remedy = remedy(&required);
            self.add(Severity::Critical, "missing_rights", message, remedy);
        }
        if !info.is_empty() {
            self.add(
                Severity::Warning,
                "no_info",
                "the user lacks +info: role, version and settings are not known",
                remedy(&info),
            );
        }
        if !channels.is_empty() {
            let channels = channels.as_slice();
            self.add(
                Severity::Warning,
                "no_messages",
                format!(
                    "the user lacks {}: messages about grants and revocations are lost, and waiters only poll",
                    channels.join(" ")
                ),
                remedy(channels),
            );
        }
        self.server.missing_rights = Some(missing);
    }

    fn judge_clock(&mut self, difference: f64) {
        self.server.clock_difference = Some(difference);
        // The reply may have been sent at any time within the round trip.
        let round_trip = self.server.round_trip.unwrap_or_default();
        let tolerance = (CLOCK_TOLERANCE + round_trip / 2).as_secs_f64();
        if difference.abs() > tolerance {
            let word = if difference > 0.0 {
                "ahead of"
            } else {
                "behind"
            };
            self.add(
                Severity::Warning,
                "clock",
                format!(
                    "its clock is {:.1} s {word} that of this process",
                    difference.abs()
                ),
                "synchronize both by NTP",
            );
        }
    }
}

#[cfg(test)]
mod tests;
