//! The clean-up of tokens that are no longer used: models `driver/clean_up.rs`.

use std::time::Duration;

use tokio::time::Instant;

use super::{
    message::{Reply, Request},
    process::{Process, Purpose},
    sim::{Event, Sim, Timer, say},
};
use crate::{
    driver::{FIRST_PAUSE, LONGEST_PAUSE},
    giving_back::heir,
    spec::{DEFAULT_LEASE, call_timeout},
    store::{Hold, Release, Token},
};

pub(super) struct CleanUp {
    what: What,
    sent_before: bool,
    straggler_until: Option<Instant>,
    give_up_at: Instant,
    pause: Duration,
    /// The release that takes the lock up again is in progress.
    is_giving_back: bool,
}

#[derive(Clone)]
enum What {
    Release(Release),
    Abandon(Hold),
}

impl CleanUp {
    fn new(what: What, give_up_at: Instant) -> Self {
        let (sent_before, straggler_until) = (false, None);
        Self {
            what,
            sent_before,
            straggler_until,
            give_up_at,
            pause: FIRST_PAUSE,
            is_giving_back: false,
        }
    }

    pub(super) fn release(now: Instant, release: Release, lease: Duration) -> Self {
        Self::new(What::Release(release), now + lease)
    }

    pub(super) fn release_again(now: Instant, release: Release, lease: Duration) -> Self {
        Self {
            sent_before: true,
            ..Self::release(now, release, lease)
        }
    }

    pub(super) fn abandon(
        now: Instant,
        hold: Hold,
        lease: Duration,
        straggler_until: Option<Instant>,
    ) -> Self {
        let give_up_at = straggler_until.unwrap_or(now) + lease;
        Self {
            straggler_until,
            ..Self::new(What::Abandon(hold), give_up_at)
        }
    }

    pub(super) fn hold(&self) -> &Hold {
        match &self.what {
            What::Release(release) => &release.hold,
            What::Abandon(hold) => hold,
        }
    }

    fn next(&self) -> Option<(Hold, Duration)> {
        match &self.what {
            What::Release(release) => release.next.map(|next| (heir(release, next), next.lease)),
            What::Abandon(_) => None,
        }
    }

    pub(super) fn speaks_of(&self, token: Token) -> bool {
        self.hold().token == token || self.next().is_some_and(|(hold, _)| hold.token == token)
    }
}

impl Process {
    pub(super) fn clean_up(&mut self, sim: &mut Sim, mut clean_up: CleanUp) {
        let id = sim.number();
        let next = clean_up.next();
        say!(
            sim,
            "{} c{id} cleans up {}",
            self.who,
            sim.name(clean_up.hold().token)
        );
        match (&clean_up.what, next) {
            (What::Release(release), Some(_)) if !clean_up.sent_before => {
                let request = Request::Release(release.clone());
                clean_up.is_giving_back = true;
                self.clean_ups.insert(id, clean_up);
                self.call(
                    sim,
                    Purpose::CleanUp(id),
                    request,
                    call_timeout(DEFAULT_LEASE),
                );
            }
            (_, next) => {
                let lock = sim.lock_of(clean_up.hold());
                self.clean_ups.insert(id, clean_up);
                if let Some((heir, _)) = next {
                    self.drop_place(sim, lock, heir.token);
                }
                self.say(sim, id);
            }
        }
    }

    /// Sends the request to the store, possibly again.
    pub(super) fn say(&mut self, sim: &mut Sim, id: u32) {
        let Some(clean_up) = self.clean_ups.get(&id) else {
            return;
        };
        let request = match clean_up.what.clone() {
            // This release is no longer combined with an acquire for the next holder.
            What::Release(release) => Request::Release(Release {
                next: None,
                ..release
            }),
            What::Abandon(hold) => Request::Abandon(hold),
        };
        self.call(
            sim,
            Purpose::CleanUp(id),
            request,
            call_timeout(DEFAULT_LEASE),
        );
    }

    pub(super) fn clean_up_answered(
        &mut self,
        sim: &mut Sim,
        id: u32,
        sent: Instant,
        reply: Option<Reply>,
    ) {
        let Some(clean_up) = self.clean_ups.get_mut(&id) else {
            return;
        };
        let lock = sim.lock_of(clean_up.hold());
        if std::mem::take(&mut clean_up.is_giving_back) {
            match (clean_up.what.clone(), reply, clean_up.next()) {
                (What::Release(release), Some(Reply::Release(reply)), _) => {
                    self.clean_ups.remove(&id);
                    self.given_back(sim, &release, sent, reply);
                }
                (.., next) => {
                    if let Some((heir, _)) = next {
                        self.drop_place(sim, lock, heir.token);
                    }
                    self.say(sim, id);
                }
            }
            return;
        }
        match (reply, clean_up.straggler_until) {
            (Some(_), Some(deadline)) if sent <= deadline => {
                self.released(sim, lock);
                return sim.at(
                    deadline + Duration::from_millis(1),
                    Event::Timer(self.who, Timer::CleanUp(id)),
                );
            }
            (Some(_), _) => {}
            (None, _) if sim.now >= clean_up.give_up_at => {
                say!(sim, "{} c{id} gives up", self.who);
                sim.excuse(clean_up.hold().token);
            }
            (None, _) => {
                let pause = clean_up.pause.mul_f64(0.5 + 0.5 * sim.dice.fraction());
                clean_up.pause = (clean_up.pause * 2).min(LONGEST_PAUSE);
                return sim.after(pause, Event::Timer(self.who, Timer::CleanUp(id)));
            }
        }
        let Some(clean_up) = self.clean_ups.remove(&id) else {
            return;
        };
        self.released(sim, lock);
        if let Some((heir, lease)) = clean_up.next() {
            self.clean_up(sim, CleanUp::abandon(sim.now, heir, lease, None));
        }
    }
}
