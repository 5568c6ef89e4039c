//! [`Health`]: the state of a store and of each of its servers, for operators and for probes.

mod text;

use std::{borrow::Cow, time::Duration};

use crate::{
    shell::time::Instant,
    store::{Store, StoreError, StoreErrorKind},
};

/// The time limit for one server. All servers are asked at the same time.
pub(crate) const PATIENCE: Duration = Duration::from_secs(1);

/// The state of a store, returned by [`LockClient::health`](crate::LockClient::health).
///
/// `Display` prints a report with a line for each server and each finding. With the feature
/// `serde` it is serialized: round trips and clock differences in ms, quarantines in s. Neither
/// contains a password.
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Health {
    verdict: Verdict,
    servers: Vec<ServerHealth>,
    findings: Vec<Finding>,
}

/// The overall state of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize),
    serde(rename_all = "lowercase")
)]
#[non_exhaustive]
pub enum Verdict {
    /// Locks are granted, and no finding is worse than a [`Notice`](Severity::Notice).
    Healthy,
    /// Locks are granted, at least by a part of the servers. The findings need attention.
    Degraded,
    /// No lock is granted at present.
    Unavailable,
}

/// The state of one server.
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct ServerHealth {
    /// The address, or another name, without a password.
    pub name: String,
    /// Whether the server has answered within a second, if only with a refusal.
    pub reachable: bool,
    /// Whether the server grants locks now. `false` for a Sentinel, which keeps none.
    pub grants_locks: bool,
    /// The time between the request and the reply.
    #[cfg_attr(
        feature = "serde",
        serde(
            rename = "round_trip_ms",
            serialize_with = "text::millis",
            skip_serializing_if = "Option::is_none"
        )
    )]
    pub round_trip: Option<Duration>,
    /// The role. `None` if it is not known.
    #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
    pub role: Option<ServerRole>,
    /// The product and its version, such as `Redis 7.2.4`.
    #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
    pub version: Option<String>,
    /// The server's clock minus that of this process, in seconds. The error is at most half the
    /// round trip.
    #[cfg_attr(
        feature = "serde",
        serde(
            rename = "clock_difference_ms",
            serialize_with = "text::known_millis_of_seconds",
            skip_serializing_if = "Option::is_none"
        )
    )]
    pub clock_difference: Option<f64>,
    /// The number of replicas that are connected to the server.
    #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
    pub replicas: Option<u64>,
    /// The rest of the time for which the server of a quorum does not vote.
    #[cfg_attr(
        feature = "serde",
        serde(
            rename = "quarantine_left_s",
            serialize_with = "text::seconds",
            skip_serializing_if = "Option::is_none"
        )
    )]
    pub quarantine_left: Option<Duration>,
    /// The setting `maxmemory-policy`.
    #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
    pub eviction_policy: Option<String>,
    /// The access rules that the user lacks, such as `+set` or `~lock:*`. `None` if they could not
    /// be checked, which needs Redis 7.0 or later.
    #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
    pub missing_rights: Option<Vec<String>>,
    /// Two servers with the same one are the same server under two names.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub(crate) run_id: Option<String>,
}

/// The role of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize),
    serde(rename_all = "lowercase")
)]
#[non_exhaustive]
pub enum ServerRole {
    /// The memory of this process.
    Memory,
    /// A server that keeps locks.
    Primary,
    /// A replica, which grants no locks.
    Replica,
    /// A Sentinel, which names the primary.
    Sentinel,
    /// A member of a cluster that orders its changes.
    Leader,
    /// A member that votes.
    Follower,
    /// A member that does not vote.
    Learner,
}

/// An observation about a store that an operator should know of.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Finding {
    /// The severity.
    pub severity: Severity,
    /// A stable identifier of the kind of finding, such as `eviction`, for alerts.
    pub code: &'static str,
    /// The [name](ServerHealth::name) of the server. `None` for a finding about all of them.
    #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
    pub server: Option<String>,
    /// The observation.
    pub message: String,
    /// The remedy.
    pub remedy: Cow<'static, str>,
}

/// The severity of a [`Finding`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize),
    serde(rename_all = "lowercase")
)]
#[non_exhaustive]
pub enum Severity {
    /// No action is required.
    Notice,
    /// Locks are granted, and a promise is at risk or a reserve is used up.
    Warning,
    /// The server grants no locks, or does not keep them safely.
    Critical,
}

impl Health {
    /// Creates the health of a store that grants locks as long as one of its `servers` does.
    ///
    /// The verdict is [`Unavailable`](Verdict::Unavailable) if no server grants locks. Otherwise it
    /// is [`Degraded`](Verdict::Degraded) if a finding is worse than a notice.
    pub fn new(servers: Vec<ServerHealth>, findings: Vec<Finding>) -> Self {
        let grants = servers.iter().any(|server| server.grants_locks);
        Self::granting(grants, servers, findings)
    }

    /// Creates the health of a cluster by its members' own states, and by a call that reads.
    #[cfg(any(feature = "etcd", feature = "zookeeper"))]
    pub(crate) fn of_members(
        read: Result<(), StoreError>,
        asked: Vec<(ServerHealth, Vec<Finding>)>,
    ) -> Self {
        let (mut servers, mut findings) = (Vec::new(), Vec::new());
        for (mut server, found) in asked {
            server.grants_locks &= read.is_ok();
            servers.push(server);
            findings.extend(found);
        }
        if let Err(error) = &read {
            findings.push(Finding::failed(error));
        }
        if servers.len() > 1 && servers.len() % 2 == 0 {
            findings.push(Finding::new(
                Severity::Notice,
                "members",
                format!("the URL names {} members", servers.len()),
                "name all members; an even number survives no more failures than one less",
            ));
        }
        Self::granting(read.is_ok(), servers, findings)
    }

    /// Same as [`new`](Self::new), with `grants` set if locks are granted.
    pub(crate) fn granting(
        grants: bool,
        servers: Vec<ServerHealth>,
        mut findings: Vec<Finding>,
    ) -> Self {
        findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
        let worst = findings.first().map(|worst| worst.severity);
        let verdict = match worst {
            _ if !grants => Verdict::Unavailable,
            Some(Severity::Warning | Severity::Critical) => Verdict::Degraded,
            Some(Severity::Notice) | None => Verdict::Healthy,
        };
        Self {
            verdict,
            servers,
            findings,
        }
    }

    /// Returns the overall state.
    pub fn verdict(&self) -> Verdict {
        self.verdict
    }

    /// Returns the state of each server.
    pub fn servers(&self) -> &[ServerHealth] {
        &self.servers
    }

    /// Returns the findings, the most severe ones first.
    pub fn findings(&self) -> &[Finding] {
        &self.findings
    }

    pub(crate) fn into_parts(self) -> (Vec<ServerHealth>, Vec<Finding>) {
        (self.servers, self.findings)
    }

    /// The health of a client that cannot use its store at all.
    pub(crate) fn unusable(finding: Finding) -> Self {
        Self::granting(false, Vec::new(), vec![finding])
    }
}

impl ServerHealth {
    /// Creates the state of a server that has not answered.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            reachable: false,
            grants_locks: false,
            round_trip: None,
            role: None,
            version: None,
            clock_difference: None,
            replicas: None,
            quarantine_left: None,
            eviction_policy: None,
            missing_rights: None,
            run_id: None,
        }
    }

    /// The state of the memory of this process.
    pub(crate) fn memory() -> Self {
        Self {
            reachable: true,
            grants_locks: true,
            round_trip: Some(Duration::ZERO),
            role: Some(ServerRole::Memory),
            ..Self::new("memory")
        }
    }
}

impl Finding {
    /// Creates a finding about the whole store.
    pub fn new(
        severity: Severity,
        code: &'static str,
        message: impl Into<String>,
        remedy: impl Into<Cow<'static, str>>,
    ) -> Self {
        Self {
            severity,
            code,
            server: None,
            message: message.into(),
            remedy: remedy.into(),
        }
    }

    /// Makes it a finding about one server.
    #[must_use]
    pub fn about(mut self, server: impl Into<String>) -> Self {
        self.server = Some(server.into());
        self
    }

    /// The finding about a server that does not execute requests because of `error`.
    pub(crate) fn failed(error: &StoreError) -> Self {
        use StoreErrorKind as Kind;
        let (code, remedy) = match error.kind() {
            Kind::ReadOnly => (
                "read_only",
                "connect to the primary, or promote the replica",
            ),
            Kind::Full => ("full", "make room, as the message says"),
            Kind::Blocked => ("blocked", "end the session that has locked the record"),
            Kind::Unauthenticated => ("unauthenticated", "correct the user name and password"),
            Kind::Forbidden => ("missing_rights", "allow the user the right"),
            Kind::WrongServer => ("wrong_server", "connect to Redis 6.0 or later"),
            Kind::InvalidUrl => ("invalid_url", "correct the URL"),
            Kind::Unsupported => ("other_settings", "use the same settings in all clients"),
            Kind::IncompatibleFormat => (
                "incompatible_format",
                "choose another namespace, or use versions of one format",
            ),
            _ => (
                "unavailable",
                "check that the server runs, that it is not overloaded, and the network to it",
            ),
        };
        Self::new(Severity::Critical, code, error.to_string(), remedy)
    }
}

/// Whether the error shows that the server has answered.
pub(crate) fn is_answer(error: &StoreError) -> bool {
    error.kind() != StoreErrorKind::Unavailable
}

/// The health of a custom store, which is asked about a lock.
pub(crate) async fn by_inspection<S: Store + ?Sized>(store: &S) -> Health {
    use crate::{request::key::LockKey, request::spec::LockKind};
    let mut server = ServerHealth::new("store");
    let since = Instant::now();
    let asked = async {
        let Ok(key) = LockKey::new("health") else {
            return Ok(());
        };
        store.inspect(&key, LockKind::Lock).await.map(drop)
    };
    let answer = tokio::time::timeout(PATIENCE, asked).await;
    let answer = answer.unwrap_or_else(|_| Err(StoreError::timed_out(PATIENCE)));
    let mut findings = Vec::new();
    match answer {
        // Foreign data under that name says nothing about other locks.
        Err(error) if error.kind() != StoreErrorKind::ForeignKey => {
            server.reachable = is_answer(&error);
            findings.push(Finding::failed(&error).about(&server.name));
        }
        _ => {
            (server.reachable, server.grants_locks) = (true, true);
            server.round_trip = Some(since.elapsed());
        }
    }
    Health::new(vec![server], findings)
}
