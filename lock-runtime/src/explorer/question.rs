//! One acquire attempt, and the clean-up of its token if no reply arrives: models `question.rs`.

use std::time::Duration;

use tokio::time::Instant;

use super::{
    Broken,
    clean_up::CleanUp,
    holder::Holder,
    message::{Call, Reply, Request},
    process::{Process, Purpose},
    schedule::Arrival,
    sim::Sim,
    waiter::State,
};
use crate::{
    acquire::STRAGGLE,
    store::{AcquireReply, Hold, IfBusy, KeyRequest, Token},
};

pub(super) struct Question {
    pub(super) call: Call,
    pub(super) hold: Hold,
    deadline: Instant,
}

/// An abandoned acquire whose reply is still applied, against PROTOCOL 1.
pub(super) struct Late {
    waiter: u32,
    hold: Hold,
    sent: Instant,
}

impl Process {
    pub(super) fn ask(
        &mut self,
        sim: &mut Sim,
        id: u32,
        token: Token,
        if_busy: IfBusy,
        reserved: u32,
    ) {
        let Some(waiter) = self.waiters.get(&id) else {
            return;
        };
        let (terms, patience) = (waiter.arrival.terms, waiter.patience(sim.now));
        let hold = Hold::new(sim.keys[waiter.arrival.lock].clone(), terms.mode, token);
        let deadline = sim.now + patience + STRAGGLE;
        let request = KeyRequest {
            if_busy,
            reserved,
            ..KeyRequest::new(hold.clone(), terms.lease, deadline)
        };
        let call = self.call(
            sim,
            Purpose::Waiter(id),
            Request::Acquire(request),
            patience,
        );
        let question = Question {
            call,
            hold,
            deadline,
        };
        self.becomes(
            id,
            if if_busy == IfBusy::Queue {
                State::Asking(question)
            } else {
                State::Beside(question)
            },
        );
    }

    /// Returns the holder, or the reply if the lock was not granted. Returns `None` if the grant
    /// has no validity left and its token was abandoned.
    pub(super) fn question_answered(
        &mut self,
        sim: &mut Sim,
        arrival: Arrival,
        question: Question,
        sent: Instant,
        reply: AcquireReply,
    ) -> Option<Result<Holder, AcquireReply>> {
        let AcquireReply::Granted(grant) = reply else {
            return Some(Err(reply));
        };
        let holder = Holder::start(sim, arrival, question.hold.clone(), grant, sent);
        if holder.is_none() {
            self.abandon_question(sim, question, arrival.terms.lease);
        }
        holder.map(Ok)
    }

    /// Abandons the token now, and again after the deadline of the request (PROTOCOL 8).
    pub(super) fn abandon_question(&mut self, sim: &mut Sim, question: Question, lease: Duration) {
        let once_more = Some(question.deadline).filter(|_| !sim.is_broken(Broken::AbandonsOnce));
        self.clean_up(
            sim,
            CleanUp::abandon(sim.now, question.hold, lease, once_more),
        );
    }

    pub(super) fn give_up_token(
        &mut self,
        sim: &mut Sim,
        waiter: u32,
        question: Question,
        sent: Instant,
        lease: Duration,
    ) {
        if sim.is_broken(Broken::BelievesTheAbandoned) {
            self.late.insert(
                question.call,
                Late {
                    waiter,
                    hold: question.hold.clone(),
                    sent,
                },
            );
        }
        self.abandon_question(sim, question, lease);
    }

    /// Applies the reply to an abandoned acquire. Only a client without PROTOCOL 1 does this.
    pub(super) fn believe(&mut self, sim: &mut Sim, call: Call, reply: Option<Reply>) {
        let Some(Late {
            waiter: id,
            hold,
            sent,
        }) = self.late.remove(&call)
        else {
            return;
        };
        let Some(waiter) = self.waiters.get(&id) else {
            return;
        };
        if let (Some(Reply::Acquire(AcquireReply::Granted(grant))), State::Waiting) =
            (reply, &waiter.state)
            && let Some(holder) = Holder::start(sim, waiter.arrival, hold, grant, sent)
        {
            self.served(sim, id, None, holder);
        }
    }
}
