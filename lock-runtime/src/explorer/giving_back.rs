//! The end of a hold: models `Holding::leave`, `Holding::part`, `Entry::release`, `giving_back.rs`.

use tokio::time::Instant;

use super::{
    clean_up::CleanUp,
    message::{Call, Reply, Request},
    process::{Process, Purpose},
    schedule::Ending,
    sim::{Event, Sim, Timer, say},
};
use crate::{
    gate::{Baton, Budget, PASSES, Parting},
    giving_back::heir,
    lease::Lease,
    spec::call_timeout,
    store::{NextHolder, Release, ReleaseReply, Token},
};

/// A release with a caller that awaits it.
pub(super) struct GivingBack {
    pub(super) release: Release,
    pub(super) lease: std::time::Duration,
}

impl GivingBack {
    pub(super) fn speaks_of(&self, token: Token) -> bool {
        self.release.hold.token == token
            || self.release.next.is_some_and(|next| next.token == token)
    }
}

impl Process {
    /// Ends the hold.
    pub(super) fn done(&mut self, sim: &mut Sim, id: u32) {
        match self.holders.get(&id) {
            None => return,
            // The lease may have expired before the driver has noticed it.
            Some(holder) if holder.lease.loss(sim.now).is_some() => return self.lose(sim, id),
            Some(_) => {}
        }
        let Some(holder) = self.holders.remove(&id) else {
            return;
        };
        let (arrival, now) = (holder.arrival, sim.now);
        let terms = arrival.terms;
        say!(
            sim,
            "{} h{id} is done with {}, {:?}",
            self.who,
            sim.name(holder.hold.token),
            arrival.ending
        );
        let keep_for = terms
            .min_hold
            .and_then(|min_hold| min_hold.checked_sub(now - holder.since));
        let mut release = Release::new(holder.hold.clone()).keep_for(keep_for);
        if let Some(budget) = holder.budget.filter(|_| keep_for.is_none())
            && let Some(line) = &mut self.lines[arrival.lock]
        {
            let baton = Baton::new(
                holder.hold,
                holder.fence,
                holder.lease.passed_on(now),
                budget,
                now,
            );
            let baton = baton.filter(|baton| baton.budget.is_after(self.lost));
            let (parting, waker) = line.part(terms.lease, baton, now);
            if let Some(waker) = waker {
                waker.wake();
            }
            match parting {
                Parting::Passed => {
                    say!(sim, "{} hands it off locally", self.who);
                    return self.again(sim, arrival);
                }
                Parting::HandBack(token) => {
                    sim.introduce(token, self.who);
                    release = release.next(NextHolder::new(token, terms.lease, PASSES));
                }
                Parting::GiveBack => {}
            }
        }
        if arrival.ending == Ending::Drop {
            self.clean_up(sim, CleanUp::release(now, release, terms.lease));
            return self.again(sim, arrival);
        }
        let request = Request::Release(release.clone());
        let call = self.call(sim, Purpose::Release, request, call_timeout(terms.lease));
        self.releases.insert(
            call,
            GivingBack {
                release,
                lease: terms.lease,
            },
        );
        if arrival.ending == Ending::Forsake {
            let pause = sim.dice.up_to(call_timeout(terms.lease) / 4);
            sim.after(pause, Event::Timer(self.who, Timer::Forsake(call)));
        }
        self.again(sim, arrival);
    }

    pub(super) fn release_answered(
        &mut self,
        sim: &mut Sim,
        call: Call,
        sent: Instant,
        reply: Option<Reply>,
    ) {
        let Some(GivingBack { release, lease }) = self.releases.remove(&call) else {
            return;
        };
        match reply {
            Some(Reply::Release(reply)) => self.given_back(sim, &release, sent, reply),
            _ => self.clean_up(sim, CleanUp::release_again(sim.now, release, lease)),
        }
    }

    /// Drops the future of a release.
    pub(super) fn forsake(&mut self, sim: &mut Sim, call: Call) {
        let Some(GivingBack { release, lease }) = self.releases.remove(&call) else {
            return;
        };
        say!(
            sim,
            "{} drops the release of {}",
            self.who,
            sim.name(release.hold.token)
        );
        self.calls.remove(&call);
        self.clean_up(sim, CleanUp::release_again(sim.now, release, lease));
    }

    /// Applies the reply to a release to the waiters of this process.
    pub(super) fn given_back(
        &mut self,
        sim: &mut Sim,
        release: &Release,
        sent: Instant,
        reply: ReleaseReply,
    ) {
        let lock = sim.lock_of(&release.hold);
        let Some(next) = release.next else {
            return self.released(sim, lock);
        };
        let hold = heir(release, next);
        match reply {
            ReleaseReply::Passed(grant) => {
                let lease = Lease::granted(next.lease, true, sent, grant.ttl, sim.dice.fraction());
                let budget = Budget::new(grant.reserved, sent, sim.now);
                let baton = Baton {
                    hold,
                    fence: grant.fence,
                    lease,
                    budget,
                };
                let (handed_back, waker) = match &mut self.lines[lock] {
                    Some(line) if baton.budget.is_after(self.lost) => line.handed_back(baton),
                    Some(line) => {
                        line.drop_place(baton.hold.token);
                        (Err(baton.hold), line.released(sim.now))
                    }
                    None => (Err(baton.hold), None),
                };
                waker.into_iter().for_each(std::task::Waker::wake);
                if let Err(hold) = handed_back {
                    self.clean_up(
                        sim,
                        CleanUp::release(sim.now, Release::new(hold), next.lease),
                    );
                }
            }
            ReleaseReply::Queued {
                counter,
                holder_ttl,
            } => {
                let (now, jitter) = (sim.now, sim.dice.fraction());
                let line = self.lines[lock].as_mut();
                let called = line.and_then(|line| {
                    line.queued(hold.token, sent, counter, holder_ttl, now, jitter)
                        .then(|| line.call_head())
                });
                match called {
                    Some(waker) => waker.into_iter().for_each(std::task::Waker::wake),
                    None => self.clean_up(sim, CleanUp::abandon(now, hold, next.lease, None)),
                }
            }
            ReleaseReply::Released | ReleaseReply::NotHeld => {
                self.drop_place(sim, lock, hold.token)
            }
        }
    }

    /// Drops the queue entry of a release that was to take the lock up again, but has not.
    pub(super) fn drop_place(&mut self, sim: &Sim, lock: usize, token: Token) {
        if let Some(line) = &mut self.lines[lock] {
            line.drop_place(token);
        }
        self.released(sim, lock);
    }
}
