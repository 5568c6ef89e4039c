//! The health of Sentinels: which of them answer, and whether they agree.

use futures_util::future::join_all;

use super::{SentinelAnswer, Sentinels, ask};
use crate::{
    observe::health::{Finding, ServerHealth, ServerRole, Severity, is_answer},
    shell::time::Instant,
};

impl Sentinels {
    /// The address of the primary that most Sentinels name, the state of each Sentinel, and the
    /// findings about them.
    pub(crate) async fn health(&self) -> (Option<String>, Vec<ServerHealth>, Vec<Finding>) {
        let answers = join_all(self.sentinels.iter().map(async |sentinel| {
            let since = Instant::now();
            (ask(sentinel, &self.name).await, since.elapsed())
        }));
        let answers = answers.await;
        let named = |answer: &SentinelAnswer| match answer {
            SentinelAnswer::Named(named) => Some(named.to_string()),
            SentinelAnswer::Unknown | SentinelAnswer::Failed(_) => None,
        };
        let names: Vec<_> = answers.iter().map(|(answer, _)| named(answer)).collect();
        let votes = |name: &&String| names.iter().flatten().filter(|other| other == name).count();
        let primary = names.iter().flatten().max_by_key(votes).cloned();
        let (mut servers, mut findings) = (Vec::new(), Vec::new());
        for ((name, (answer, took)), named) in self.addresses().zip(&answers).zip(&names) {
            let mut server = ServerHealth::new(&name);
            server.role = Some(ServerRole::Sentinel);
            server.reachable = match answer {
                SentinelAnswer::Failed(error) => is_answer(error),
                SentinelAnswer::Named(_) | SentinelAnswer::Unknown => true,
            };
            server.round_trip = server.reachable.then_some(*took);
            let finding = match answer {
                SentinelAnswer::Failed(error) => Some(Finding {
                    severity: Severity::Warning,
                    code: "sentinel_down",
                    ..Finding::failed(error)
                }),
                SentinelAnswer::Unknown => Some(Finding::new(
                    Severity::Warning,
                    "sentinel_unknown_name",
                    format!("the Sentinel monitors no primary {:?}", self.name),
                    "configure it with `sentinel monitor`",
                )),
                SentinelAnswer::Named(_) if *named != primary => Some(Finding::new(
                    Severity::Warning,
                    "sentinel_disagrees",
                    "the Sentinel names another primary than most of them",
                    "wait for the end of a failover; otherwise: SENTINEL RESET",
                )),
                SentinelAnswer::Named(_) => None,
            };
            findings.extend(finding.map(|finding| finding.about(name)));
            servers.push(server);
        }
        let (answered, all) = (names.iter().flatten().count(), names.len());
        if answered <= all / 2 {
            let message =
                format!("{answered} of {all} Sentinels name a primary: no failover is possible");
            let remedy = "start the others";
            findings.push(Finding::new(
                Severity::Warning,
                "no_sentinel_majority",
                message,
                remedy,
            ));
        }
        (primary, servers, findings)
    }
}
