//! The texts of a report, and the numbers of its serialized form.

use std::fmt;
#[cfg(any(test, feature = "serde"))]
use std::time::Duration;

use super::{Finding, Health, ServerHealth, ServerRole, Severity, Verdict};
use crate::observe::text::visible;

#[cfg(feature = "serde")]
pub(super) fn millis<S: serde::Serializer>(
    time: &Option<Duration>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    known_millis_of_seconds(&time.map(|time| time.as_secs_f64()), serializer)
}

/// Writes seconds as milliseconds, to a microsecond.
#[cfg(feature = "serde")]
pub(super) fn known_millis_of_seconds<S: serde::Serializer>(
    seconds: &Option<f64>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64((seconds.unwrap_or_default() * 1e6).round() / 1e3)
}

#[cfg(feature = "serde")]
pub(super) fn seconds<S: serde::Serializer>(
    time: &Option<Duration>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(time.unwrap_or_default().as_secs_f64())
}

impl Verdict {
    /// Returns the name in lower case, such as `degraded`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Healthy => "healthy",
            Self::Degraded => "degraded",
            Self::Unavailable => "unavailable",
        }
    }
}

impl Severity {
    /// Returns the name in lower case, such as `warning`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Notice => "notice",
            Self::Warning => "warning",
            Self::Critical => "critical",
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl fmt::Display for ServerRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Memory => "memory",
            Self::Primary => "primary",
            Self::Replica => "replica",
            Self::Sentinel => "Sentinel",
            Self::Leader => "leader",
            Self::Follower => "follower",
            Self::Learner => "learner",
        })
    }
}

impl fmt::Display for Health {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.verdict)?;
        for server in &self.servers {
            write!(f, "\n  {server}")?;
        }
        for finding in &self.findings {
            write!(f, "\n  {finding}")?;
        }
        Ok(())
    }
}

impl fmt::Display for ServerHealth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", visible(&self.name))?;
        let mut facts = Vec::new();
        facts.extend(self.role.map(|role| role.to_string()));
        facts.extend(self.version.as_deref().map(visible));
        match self.round_trip {
            Some(time) => facts.push(format!("round trip {time:.1?}")),
            None if self.reachable => facts.push("refuses requests".into()),
            None => facts.push("no answer".into()),
        }
        let clock = self.clock_difference;
        facts.extend(clock.map(|seconds| format!("clock {:+.1} ms", seconds * 1e3)));
        facts.extend(self.replicas.map(|replicas| format!("{replicas} replicas")));
        facts.extend(self.eviction_policy.as_deref().map(visible));
        facts.extend(
            self.quarantine_left
                .map(|left| format!("votes in {left:.0?}")),
        );
        if let Some(missing) = self
            .missing_rights
            .as_ref()
            .filter(|rights| !rights.is_empty())
        {
            facts.push(format!("lacks {}", missing.join(" ")));
        }
        f.write_str(&facts.join(", "))
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.severity)?;
        if let Some(server) = &self.server {
            write!(f, "{}: ", visible(server))?;
        }
        // A database may name its sessions and transactions with line breaks.
        let (message, remedy) = (visible(&self.message), visible(&self.remedy));
        write!(f, "{message}; remedy: {remedy}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finding(severity: Severity, code: &'static str) -> Finding {
        Finding::new(severity, code, "it is so", "do this")
    }

    #[test]
    fn the_verdict_follows_the_worst_finding_and_the_servers() {
        let memory = || vec![ServerHealth::memory()];
        for (worst, verdict) in [
            (None, Verdict::Healthy),
            (Some(Severity::Notice), Verdict::Healthy),
            (Some(Severity::Warning), Verdict::Degraded),
            (Some(Severity::Critical), Verdict::Degraded),
        ] {
            let findings = || worst.map(|worst| finding(worst, "x")).into_iter().collect();
            assert_eq!(Health::new(memory(), findings()).verdict(), verdict);
            let down = Health::new(vec![ServerHealth::new("a")], findings());
            assert_eq!(down.verdict(), Verdict::Unavailable);
        }
    }

    #[test]
    fn the_report_has_a_line_for_each_server_and_finding() {
        let mut server = ServerHealth::memory();
        server.version = Some("Redis 7\n  critical: b".into());
        server.clock_difference = Some(-0.0021);
        server.replicas = Some(2);
        server.missing_rights = Some(vec!["+set".into()]);
        server.quarantine_left = Some(Duration::from_secs(12));
        let servers = vec![server, ServerHealth::new("10.0.0.2:6379")];
        let findings = vec![
            finding(Severity::Notice, "a"),
            finding(Severity::Critical, "b").about("10.0.0.2:6379"),
            Finding::new(Severity::Notice, "c", "a\n  critical: b", "none"),
        ];
        assert_eq!(
            Health::new(servers, findings).to_string(),
            "degraded\n  \
             memory: memory, Redis 7\\u{a}  critical: b, round trip 0.0ns, clock -2.1 ms, 2 replicas, votes in 12s, lacks +set\n  \
             10.0.0.2:6379: no answer\n  \
             critical: 10.0.0.2:6379: it is so; remedy: do this\n  \
             notice: it is so; remedy: do this\n  \
             notice: a\\u{a}  critical: b; remedy: none"
        );
    }

    #[cfg(feature = "serde")]
    #[test]
    fn the_serialized_form_has_units_in_its_names() {
        let mut server = ServerHealth::memory();
        server.round_trip = Some(Duration::from_micros(1_500));
        server.quarantine_left = Some(Duration::from_millis(2_500));
        server.clock_difference = Some(-0.002_100_4);
        let health = Health::new(vec![server], vec![finding(Severity::Warning, "a")]);
        let value = serde_json::to_value(&health).unwrap();
        assert_eq!(value["verdict"], "degraded");
        assert_eq!(value["servers"][0]["round_trip_ms"], 1.5);
        assert_eq!(value["servers"][0]["quarantine_left_s"], 2.5);
        assert_eq!(value["servers"][0]["clock_difference_ms"], -2.1);
        assert_eq!(value["servers"][0]["role"], "memory");
        assert_eq!(value["findings"][0]["severity"], "warning");
        assert!(value["servers"][0].get("version").is_none());
    }
}
