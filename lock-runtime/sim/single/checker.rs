//! The invariants of a run: those that hold at every moment, and those that hold at its end.

use std::collections::BTreeMap;

use tokio::time::Instant;

use super::server::Server;
use crate::{
    fence::FencingToken,
    key::LockKey,
    sim::process::{Began, Process},
    spec::{LockKind, Mode},
    store::{Hold, Token},
};

/// The kinds of violations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wrong {
    /// Two holders that exclude each other hold a lock at the same time, each by its own clock.
    TwoHolders,
    /// A holder is valid, but the store does not hold the lock for it, or not for as long.
    NotHeld,
    /// A fencing token is not larger than an earlier one.
    Fence,
    /// A lock was handed off locally more often, or for longer, than allowed.
    Budget,
    /// A lock was handed out that ends before it can be renewed.
    TooShort,
    /// The store keeps something for a token that no part of its living process knows.
    Orphan,
    /// A waiting task was not woken although it has something to do.
    Asleep,
    /// A waiter is not served although there are no more faults.
    Stuck,
    /// Something is left in the store or in a process at the end.
    Leak,
    /// A request was refused in a way that its schedule excludes.
    Refusal,
}

pub(super) type Violation = crate::sim::explore::Violation<Wrong>;

/// The longest sequence of local hand-offs.
const MAX_HANDOFFS: u32 = 32;

/// A hold of a process that has crashed without a release.
struct Dead {
    hold: Hold,
    until: Instant,
}

/// The fencing tokens of a lock.
#[derive(Default)]
struct Fences {
    /// The largest one of a writer.
    writer: Option<FencingToken>,
    others: Vec<FencingToken>,
    /// All of them, with the times at which the guards were handed out.
    at: Vec<(Instant, FencingToken)>,
}

#[derive(Default)]
pub(super) struct Checker {
    fences: BTreeMap<(LockKind, LockKey), Fences>,
    /// The number of guards that each token of a writer was handed out to, one after the other.
    writers: BTreeMap<Token, u32>,
    dead: Vec<Dead>,
    found: Vec<Violation>,
    /// If set, all other violations are ignored.
    pub(super) only: Option<Wrong>,
    /// Tokens that may be granted twice or kept without an owner: their acquire was duplicated by
    /// the network, which rule 10 excludes, or their abandonment had to give up.
    pub(super) excused: Vec<Token>,
    /// Tokens that were revoked. Their holders may not know of it yet.
    pub(super) revoked: Vec<Token>,
    /// When the store lost its data. Earlier grants are no longer exclusive.
    pub(super) data_lost_at: Option<Instant>,
}

impl Checker {
    pub(super) fn report(&mut self, wrong: Wrong, what: impl FnOnce() -> String) {
        if self.only.is_none_or(|only| only == wrong) {
            self.found.push(Violation {
                wrong,
                what: what(),
            });
        }
    }

    pub(super) fn found(&mut self) -> Option<Violation> {
        self.found.pop()
    }

    fn was_lost(&self, server: &Server, token: Token) -> bool {
        let granted_at = server.granted_at.get(&token);
        self.data_lost_at
            .is_some_and(|lost_at| granted_at.is_none_or(|at| *at <= lost_at))
    }

    /// Checks the order of fencing tokens. A token is larger than all that were handed out before
    /// its request was made. That of a writer is larger than all earlier ones, and no later one is
    /// smaller. No two are equal. `is_warned` says whether the process has received all events
    /// about lost data.
    pub(super) fn began(&mut self, began: &Began, server: &Server, is_warned: bool, now: Instant) {
        let Began { hold, fence, .. } = began;
        let mut is_handoff = false;
        if hold.mode == Mode::Exclusive {
            let guards = self.writers.entry(hold.token).or_default();
            *guards += 1;
            is_handoff = *guards > 1;
            let guards = *guards;
            if guards > MAX_HANDOFFS + 1 {
                self.report(Wrong::Budget, || {
                    format!("{} is held {guards} times in a row", hold.key)
                });
            }
        }
        // Nothing can be said about a grant whose data the store has lost, except that it is not
        // handed off by a process that knows of the loss.
        let is_outdated = self.was_lost(server, hold.token) && !(is_handoff && is_warned);
        let is_exempt = self.excused.contains(&hold.token) || self.revoked.contains(&hold.token);
        if is_exempt || is_outdated {
            return;
        }
        if !began.is_long_enough {
            self.report(Wrong::TooShort, || {
                format!("{} is held for too short a time", hold.key)
            });
        }
        let fences = self.fences.entry((hold.mode.kind(), hold.key.clone()));
        let fences = fences.or_default();
        let before = |(at, other): &(Instant, FencingToken)| *at < began.asked_at && other >= fence;
        let mut is_in_order =
            fences.writer.is_none_or(|writer| writer < *fence) && !fences.at.iter().any(before);
        if hold.mode == Mode::Exclusive {
            is_in_order &= fences.others.iter().all(|other| other < fence);
            fences.writer = fences.writer.max(Some(*fence));
        } else {
            is_in_order &= !fences.others.contains(fence);
            fences.others.push(*fence);
        }
        fences.at.push((now, *fence));
        if !is_in_order {
            self.report(Wrong::Fence, || {
                format!("{} has fencing token {fence} out of order", hold.key)
            });
        }
    }

    pub(super) fn crashed(&mut self, process: &Process, now: Instant) {
        let dead = process.session.valid(now).map(|(_, hold, until)| Dead {
            hold: hold.clone(),
            until,
        });
        self.dead.extend(dead);
    }

    /// Checks the holders after every event.
    pub(super) fn holders(&mut self, now: Instant, processes: &[Process], server: &Server) {
        self.dead.retain(|dead| now < dead.until);
        let living = processes.iter().flat_map(|process| {
            process
                .session
                .valid(now)
                .map(|(_, hold, until)| (hold, until))
        });
        let dead = self.dead.iter().map(|dead| (&dead.hold, dead.until));
        let valid: Vec<_> = living
            .chain(dead)
            .filter(|(hold, _)| {
                !self.revoked.contains(&hold.token) && !self.was_lost(server, hold.token)
            })
            .map(|(hold, until)| (hold.clone(), until))
            .collect();
        for (index, (hold, until)) in valid.iter().enumerate() {
            let kept_until = server.table.held_until(hold, now);
            if kept_until.is_none_or(|kept_until| kept_until < *until) {
                self.report(Wrong::NotHeld, || {
                    format!(
                        "{} is held for {:?} by a process only",
                        hold.key,
                        *until - now
                    )
                });
            }
            let beside = valid[..index].iter().filter(|(other, _)| {
                other.key == hold.key && other.mode.kind() == hold.mode.kind()
            });
            let (mut count, mut is_excluded) = (1, false);
            for (other, _) in beside {
                count += 1;
                is_excluded |= hold.mode == Mode::Exclusive || other.mode == Mode::Exclusive;
            }
            let too_many = matches!(hold.mode, Mode::Permits(permits) if count > permits.get());
            if is_excluded || too_many {
                self.report(Wrong::TwoHolders, || format!("{} is held twice", hold.key));
            }
        }
    }

    /// Checks, after each request that the store executes, that everything it keeps has an owner,
    /// unless its process is dead. `owner` returns the living process that introduced a token.
    pub(super) fn owners<'a>(
        &mut self,
        now: Instant,
        keys: &[LockKey],
        server: &Server,
        owner: impl Fn(Token) -> Option<&'a Process>,
        wrong: Wrong,
    ) {
        for key in keys {
            for kind in [LockKind::Lock, LockKind::Permits] {
                for (token, mode) in server.table.tokens(key, kind, now) {
                    let Some(process) = owner(token).filter(|_| !self.excused.contains(&token))
                    else {
                        continue;
                    };
                    if !process.session.knows(token) {
                        let state = if mode.is_some() { "held" } else { "queued" };
                        self.report(wrong, || format!("{key} is {state} without an owner"));
                    }
                }
            }
        }
    }
}
