//! The health of Sentinels: which of them answer, and whether they agree.

use futures_util::future::join_all;

use super::{Answer, Sentinels, ask};
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
        let named = |answer: &Answer| match answer {
            Answer::Named(named) => Some(named.to_string()),
            Answer::Unknown | Answer::Failed(_) => None,
        };
        let names: Vec<_> = answers.iter().map(|(answer, _)| named(answer)).collect();
        let votes = |name: &&String| names.iter().flatten().filter(|other| other == name).count();
        let primary = names.iter().flatten().max_by_key(votes).cloned();
        let (mut servers, mut findings) = (Vec::new(), Vec::new());
        for ((name, (answer, took)), named) in self.addresses().zip(&answers).zip(&names) {
            let mut server = ServerHealth::new(&name);
            server.role = Some(ServerRole::Sentinel);
            server.reachable = match answer {
                Answer::Failed(error) => is_answer(error),
                Answer::Named(_) | Answer::Unknown => true,
            };
            server.round_trip = server.reachable.then_some(*took);
            let finding = match answer {
                Answer::Failed(error) => Some(Finding {
                    severity: Severity::Warning,
                    code: "sentinel_down",
                    ..Finding::failed(error)
                }),
                Answer::Unknown => Some(Finding::new(
                    Severity::Warning,
                    "sentinel_unknown_name",
                    format!("the Sentinel monitors no primary {:?}", self.name),
                    "configure it with `sentinel monitor`",
                )),
                Answer::Named(_) if *named != primary => Some(Finding::new(
                    Severity::Warning,
                    "sentinel_disagrees",
                    "the Sentinel names another primary than most of them",
                    "wait for the end of a failover; otherwise: SENTINEL RESET",
                )),
                Answer::Named(_) => None,
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
