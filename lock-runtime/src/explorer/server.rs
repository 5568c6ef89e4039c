//! The store: the table of the in-memory store, behind a network.

use super::{
    Broken,
    message::{Call, Reply, Request},
    sim::{Sim, Who, say},
};
use crate::store::{
    RenewReply,
    memory::table::{Fences, Step, Table},
};

#[derive(Default)]
pub(super) struct Server {
    pub(super) table: Table,
    fences: Fences,
}

impl Server {
    /// Executes a request, as [`MemoryStore`](crate::store::MemoryStore) does.
    pub(super) fn execute(&mut self, sim: &mut Sim, who: Who, call: Call, request: &Request) {
        say!(
            sim,
            "  store executes #{call} of {who}: {}",
            sim.show(request)
        );
        let token = request.hold().token;
        let caller = matches!(request, Request::Acquire(_) | Request::Poll(_)).then_some(token);
        let mut step = Step::new(sim.now, &self.fences, caller);
        step.lets_nobody_in =
            sim.is_broken(Broken::OnlyReleaseAdvances) && !matches!(request, Request::Release(_));
        let reply = match request {
            Request::Acquire(request) => Reply::Acquire(self.table.acquire(request, &mut step)),
            Request::Poll(hold) => Reply::Poll(self.table.poll(hold, &mut step)),
            Request::Release(release) => {
                if let Some(next) = release.next.filter(|_| sim.is_excused(token)) {
                    sim.excuse(next.token);
                }
                Reply::Release(self.table.release(release, &mut step))
            }
            Request::Abandon(hold) => {
                self.table.abandon(hold, &mut step);
                Reply::Abandoned
            }
            Request::Renew(renewal) => match self.table.renew(renewal, sim.now) {
                RenewReply::Renewed { .. } if sim.is_broken(Broken::RenewalShortens) => {
                    self.table.shorten(&renewal.hold, renewal.lease, sim.now);
                    Reply::Renew(RenewReply::Renewed { ttl: renewal.lease })
                }
                reply => Reply::Renew(reply),
            },
        };
        let handed_over = step.handed_over;
        // The events of a step are sent before its reply, and may arrive after it.
        for (hold, grant) in handed_over {
            sim.push(hold, grant);
        }
        sim.reply(who, call, reply);
    }
}
