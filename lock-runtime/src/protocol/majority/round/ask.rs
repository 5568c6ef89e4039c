//! The requests of a round to the servers, from the first exchange to the end of its lease.

use super::{
    Ask, Calls, Phase, Round,
    vote::{Status, VoteStanding},
};
use crate::{request::spec::Mode, shell::time::Instant, store::IfBusy};

impl Round {
    /// Begins the first exchange. The coordinator is asked alone if the lock is `contended` and the
    /// request queues.
    pub(crate) fn acquire(&mut self, contended: bool, deadline: Instant, now: Instant) -> Calls {
        self.begin_exchange(now);
        match self.coordinator {
            Some(coordinator) if contended && self.if_busy == IfBusy::Queue => {
                self.phase = Phase::Coordinator;
                let ask = self.ask(coordinator, IfBusy::Queue, deadline);
                [(coordinator, ask)].into_iter().collect()
            }
            _ => self.ask_all(deadline, now),
        }
    }

    pub(super) fn ask_all(&mut self, deadline: Instant, now: Instant) -> Calls {
        self.phase = Phase::All;
        self.asked_all_at = now;
        let (coordinator, if_busy) = (self.coordinator, self.if_busy);
        let mut calls = self.ask_each(|round, server| {
            let waits = Some(server) == coordinator;
            let if_busy = if waits { if_busy } else { IfBusy::Refuse };
            Some(round.ask(server, if_busy, deadline))
        });
        // The coordinator first, as its reply is awaited.
        calls.sort_by_key(|(server, _)| Some(*server) != coordinator);
        calls
    }

    /// Collects the requests to the servers to which there is one.
    pub(super) fn ask_each(&mut self, ask: impl Fn(&mut Self, usize) -> Option<Ask>) -> Calls {
        (0..self.states.len())
            .filter_map(|server| Some((server, ask(self, server)?)))
            .collect()
    }

    /// Begins an exchange that polls: the coordinator alone while the acquisition waits in its
    /// queue, otherwise all servers.
    pub(crate) fn poll(&mut self, deadline: Instant, now: Instant) -> Calls {
        self.begin_exchange(now);
        self.polls = true;
        self.redraws |= self.hold.mode == Mode::Shared && self.fence.is_some();
        if self.fence.is_none()
            && let Some(coordinator) = self.waits_at()
            && self.states[coordinator].pushed.is_none()
        {
            self.phase = Phase::Coordinator;
            // It is not the head, or no longer.
            self.headless_since = None;
            let ask = self.count(coordinator, IfBusy::Queue, deadline);
            return [(coordinator, ask)].into_iter().collect();
        }
        self.phase = Phase::Head;
        self.ask_each(|round, server| Some(round.count(server, IfBusy::Queue, deadline)))
    }

    /// Requests the missing votes of a held lock. A restarted server votes for the lock again;
    /// otherwise one restart after another would cost the majority.
    pub(crate) fn heal(&mut self, deadline: Instant) -> Calls {
        let is_held = self.fence.is_some() && self.phase == Phase::Over && !self.closed;
        self.ask_each(|round, server| {
            let state = &round.states[server];
            // A vote that was renewed counts for the validity of the lock, so it is kept.
            let is_missing = match state.standing {
                VoteStanding::Outside => true,
                VoteStanding::Queued => !state.renewed && state.pushed.is_none(),
                VoteStanding::Asked | VoteStanding::Holds(_) => false,
            };
            if !is_held || !is_missing {
                return None;
            }
            // A holder must not stay in a wait queue.
            round.abandon_at(server);
            Some(round.ask(server, IfBusy::Refuse, deadline))
        })
    }

    /// Builds the request that queries the state at a server, or asks for its vote. A server
    /// that is known to hold or queue the alias is not sent an acquire: a refusal would not
    /// remove the alias.
    pub(super) fn count(&mut self, server: usize, if_busy: IfBusy, deadline: Instant) -> Ask {
        let state = &mut self.states[server];
        let ask = match state.standing {
            VoteStanding::Holds(_) => {
                self.redraws |= self.hold.mode == Mode::Shared;
                Ask::Renew(state.token)
            }
            VoteStanding::Queued => Ask::Poll(state.token),
            VoteStanding::Outside | VoteStanding::Asked => {
                return self.ask(server, if_busy, deadline);
            }
        };
        state.status = Status::Awaited;
        ask
    }

    pub(super) fn ask(&mut self, server: usize, if_busy: IfBusy, deadline: Instant) -> Ask {
        if self.states[server].standing == VoteStanding::Asked {
            // The outcome of the previous acquire is unknown, so its alias is not used again.
            self.abandon_at(server);
        }
        let state = &mut self.states[server];
        state.standing = VoteStanding::Asked;
        state.straggler_until = Some(deadline);
        state.status = Status::Awaited;
        Ask::Acquire(state.token, if_busy)
    }

    pub(super) fn begin_exchange(&mut self, now: Instant) {
        self.exchange += 1;
        self.since = now;
        self.majority_at = None;
        for state in &mut self.states {
            state.status = Status::None;
        }
    }
}
