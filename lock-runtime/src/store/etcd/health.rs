//! The health of the members.

use futures_util::future::join_all;
use tokio::time::timeout;

use super::{
    calls::Calls,
    messages::{Empty, STATUS, StatusResponse},
};
use crate::{
    observe::health::{Finding, Health, PATIENCE, ServerHealth, ServerRole, Severity, is_answer},
    shell::time::Instant,
    store::{StoreError, StoreErrorKind},
};

/// The part of its data that a member should use at least, and the size from which on it matters.
const USED: f64 = 0.5;
const LARGE: i64 = 100 << 20;

impl Calls {
    /// Asks all members at the same time, and reads the clock of the locks.
    pub(super) async fn health(&self) -> Health {
        let read = async {
            let read = self.of_any_member(|| self.read(&[]));
            let read = timeout(PATIENCE, read).await;
            read.unwrap_or_else(|_| Err(StoreError::timed_out(PATIENCE)))
        };
        let members = (0..self.members.count()).map(|index| self.member(index));
        let (read, members) = tokio::join!(read, join_all(members));
        Health::of_members(read.map(drop), members)
    }

    async fn member(&self, index: usize) -> (ServerHealth, Vec<Finding>) {
        let name = self.members.name(index);
        let mut server = ServerHealth::new(name);
        let sent = Instant::now();
        let status = self
            .members
            .ask::<_, StatusResponse>(index, STATUS, Empty {});
        let status = timeout(PATIENCE, status).await;
        let status = match status.unwrap_or_else(|_| Err(StoreError::timed_out(PATIENCE))) {
            Ok(status) => status,
            // Some versions show it to the user root only.
            Err(error) if error.kind() == StoreErrorKind::Forbidden => {
                (server.reachable, server.grants_locks) = (true, true);
                let finding = Finding::new(
                    Severity::Notice,
                    "unknown",
                    format!("the member does not show its state: {error}"),
                    "ask as the user root for it",
                );
                return (server, vec![finding.about(name)]);
            }
            Err(error) => {
                server.reachable = is_answer(&error);
                return (server, vec![Finding::failed(&error).about(name)]);
            }
        };
        server.reachable = true;
        server.grants_locks = status.leader != 0 && !status.is_learner;
        server.round_trip = Some(sent.elapsed());
        server.version = Some(format!("etcd {}", status.version));
        let own = status.header.map(|header| header.member_id);
        server.role = Some(match own == Some(status.leader) {
            _ if status.is_learner => ServerRole::Learner,
            true => ServerRole::Leader,
            false => ServerRole::Follower,
        });
        let mut findings = Vec::new();
        if status.leader == 0 {
            findings.push(Finding::new(
                Severity::Critical,
                "no_leader",
                "the member knows no leader",
                "start a majority of the members, and check the network between them",
            ));
        }
        for alarm in status.errors {
            let (code, remedy) = match alarm.contains("NOSPACE") {
                true => (
                    "full",
                    "compact and defragment the members, or raise --quota-backend-bytes, then `etcdctl alarm disarm`",
                ),
                false => ("alarm", "`etcdctl alarm list`, and restore the member"),
            };
            findings.push(Finding::new(Severity::Critical, code, alarm, remedy));
        }
        let used = status.db_size_in_use as f64 / status.db_size.max(1) as f64;
        if status.db_size > LARGE && used < USED {
            findings.push(Finding::new(
                Severity::Warning,
                "fragmented",
                format!("{:.0} % of the data are in use", used * 100.0),
                "defragment the member, and set --auto-compaction-retention",
            ));
        }
        let findings = findings.into_iter().map(|finding| finding.about(name));
        (server, findings.collect())
    }
}
