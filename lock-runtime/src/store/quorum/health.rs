//! The health of a quorum: that of each server, and whether a majority grants locks.

use std::{collections::HashMap, sync::Arc};

use futures_util::future::join_all;

use crate::{
    observe::health::{Finding, Health, ServerHealth, Severity, Verdict},
    protocol::majority::majority,
    store::QuorumMember,
};

pub(super) async fn of(names: &[String], servers: &[Arc<dyn QuorumMember>]) -> Health {
    let each = join_all(servers.iter().map(|server| server.health())).await;
    combine(names.iter().zip(each))
}

fn combine<'a>(each: impl Iterator<Item = (&'a String, Health)>) -> Health {
    let (mut servers, mut findings) = (Vec::<ServerHealth>::new(), Vec::new());
    let mut runs = HashMap::new();
    let (mut count, mut grant) = (0, 0);
    for (name, health) in each {
        count += 1;
        let mut grants = health.verdict() != Verdict::Unavailable;
        let (mut of_member, mut about_member) = health.into_parts();
        if let [server] = of_member.as_mut_slice() {
            server.name.clone_from(name);
            for finding in &mut about_member {
                finding.server = Some(name.clone());
            }
            if let Some(run_id) = &server.run_id
                && let Some(other) = runs.insert(run_id.clone(), name)
            {
                grants = false;
                let message =
                    format!("it is the same server as {other}, which would have two votes");
                let remedy = "name each server once in the URL";
                let finding = Finding::new(Severity::Critical, "same_server", message, remedy);
                about_member.push(finding.about(name));
            }
        }
        grant += usize::from(grants);
        servers.extend(of_member);
        findings.extend(about_member);
    }
    let needed = majority(count);
    if grant < count {
        let remedy = "remedy the findings about the others";
        findings.push(match grant < needed {
            true => Finding::new(
                Severity::Critical,
                "no_majority",
                format!("{grant} of {count} servers grant locks, and {needed} are needed: no lock is granted"),
                remedy,
            ),
            false => Finding::new(
                Severity::Warning,
                "minority_out",
                format!(
                    "{grant} of {count} servers grant locks, and {needed} are needed: {} more may fail",
                    grant - needed
                ),
                remedy,
            ),
        });
    }
    Health::granting(grant >= needed, servers, findings)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_majority_decides_and_a_server_has_one_vote() {
        let names: Vec<_> = (0..3).map(|number| format!("s{number}")).collect();
        let server = |run_id: Option<&str>| {
            let mut server = ServerHealth::memory();
            server.grants_locks = run_id.is_some();
            server.run_id = run_id.map(str::to_owned);
            Health::new(vec![server], Vec::new())
        };
        let (a, b, c) = (Some("a"), Some("b"), Some("c"));
        for (runs, verdict, codes) in [
            ([a, b, c], Verdict::Healthy, &[][..]),
            ([a, None, c], Verdict::Degraded, &["minority_out"]),
            ([None, None, c], Verdict::Unavailable, &["no_majority"]),
            (
                [a, a, c],
                Verdict::Degraded,
                &["same_server", "minority_out"],
            ),
            (
                [a, a, None],
                Verdict::Unavailable,
                &["same_server", "no_majority"],
            ),
        ] {
            let health = combine(names.iter().zip(runs.map(server)));
            assert_eq!(health.verdict(), verdict, "{runs:?}");
            let found: Vec<_> = health.findings().iter().map(|it| it.code).collect();
            assert_eq!(found, codes, "{runs:?}");
            assert_eq!(health.servers()[2].name, "s2");
        }
    }
}
