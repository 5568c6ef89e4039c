//! The invariants of a run: those that hold at every moment, and those that hold at its end.

use std::{collections::BTreeMap, mem::take, time::Duration};

use super::{
    client::{Client, Votes},
    explore::Violation,
    network::Network,
    process::Began,
    server::Server,
};
use crate::{
    fence::FencingToken,
    key::LockKey,
    protocol::quorum::majority,
    spec::{LockKind, Mode},
    store::{Hold, Token},
    time::Instant,
};

/// The kinds of violations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wrong {
    /// Two holders that exclude each other hold a lock at the same time, each by its own clock.
    TwoHolders,
    /// A holder is valid, but the store, or a majority of the servers, does not hold the lock for
    /// it, or not for as long.
    NotHeld,
    /// A fencing token was handed out before, or is not larger than an earlier one.
    Fence,
    /// A lock was handed off locally more often, or for longer, than allowed.
    Budget,
    /// A lock was handed out that ends before it can be renewed.
    TooShort,
    /// A server keeps something for a token that no part of its living client knows.
    Orphan,
    /// A waiting task was not woken although it has something to do.
    Asleep,
    /// A waiter is not served although there are no more faults.
    Stuck,
    /// Something is left at a server or in a client at the end.
    Leak,
    /// A request was refused in a way that its schedule excludes.
    Refusal,
    /// The extension of a lease was confirmed, but its holder does not count on it.
    Unextended,
    /// A request was refused as contended, but the store kept the lock for no other one.
    Contended,
}

/// The time after the end of a hold in which a process may still count it as current: it learns of
/// the end from the replies to its waiters, which poll every second.
const LATELY: Duration = Duration::from_secs(2);

/// The longest sequence of local hand-offs.
const MAX_HANDOFFS: u32 = 32;

/// A lock that a client holds, or held when it crashed without a release.
struct Holder {
    hold: Hold,
    /// In true time.
    until: Instant,
    votes: Option<Votes>,
}

/// A fencing token, and the mode and the time of its guard.
type Numbered = (FencingToken, Mode, Instant);

#[derive(Default)]
pub(super) struct Checker {
    fences: BTreeMap<(LockKind, LockKey), Vec<Numbered>>,
    /// The number of guards that each token of a writer was handed out to, one after the other.
    writers: BTreeMap<Token, u32>,
    dead: Vec<Holder>,
    /// When the single store last had a holder, a reservation or a waiter of each lock.
    taken_at: BTreeMap<(LockKind, LockKey), Instant>,
    pub(super) found: Option<Violation>,
    /// If set, all other violations are ignored.
    pub(super) only: Option<Wrong>,
}

impl Checker {
    pub(super) fn report(&mut self, wrong: Wrong, what: impl FnOnce() -> String) {
        if self.only.is_none_or(|only| only == wrong) && self.found.is_none() {
            let what = what();
            self.found = Some(Violation { wrong, what });
        }
    }

    /// Checks the state after an event at a client or a server.
    pub(super) fn look(&mut self, net: &mut Network, clients: &mut [Client], servers: &[Server]) {
        for (who, began) in take(&mut net.began) {
            let is_warned = clients[who.process].is_warned;
            self.began(net, servers, &began, is_warned);
        }
        self.holders(net, clients, servers);
        if net.is_single {
            self.contended(net, &servers[0]);
        }
    }

    /// Checks that requests are refused as contended only if the store had something to refuse them
    /// for. A reply that the store did not give proves nothing.
    fn contended(&mut self, net: &mut Network, server: &Server) {
        for (key, kind) in net.locks() {
            if server.table().is_taken(key, kind, server.clock.at(net.now)) {
                self.taken_at.insert((kind, key.clone()), net.now);
            }
        }
        for lock in take(&mut net.contended) {
            let taken_at = self.taken_at.get(&lock).copied();
            let known_at = taken_at.max(net.paused_until);
            if known_at.is_none_or(|at| at + LATELY < net.now) {
                self.report(Wrong::Contended, || {
                    format!("{} is said to be held, last {taken_at:?}", lock.1)
                });
            }
        }
    }

    /// Checks the order of fencing tokens. A token is larger than all that were handed out before
    /// its request was made. That of a writer is larger than all earlier ones, and no later one is
    /// smaller. No two are equal. `is_warned` says whether the process has received all events
    /// about lost data.
    fn began(&mut self, net: &Network, servers: &[Server], began: &Began, is_warned: bool) {
        let Began { hold, fence, .. } = began;
        let name = || format!("{} as {}", hold.key, net.name(hold.token));
        let guards = self.writers.entry(hold.token).or_default();
        *guards += u32::from(hold.mode == Mode::Exclusive);
        let guards = *guards;
        let is_handoff = hold.mode == Mode::Exclusive && guards > 1;
        if is_handoff && guards > MAX_HANDOFFS + 1 {
            let often = || format!("{} is held {guards} times in a row", name());
            self.report(Wrong::Budget, often);
        }
        // Nothing can be said about a grant whose data the store has lost, except that it is not
        // handed off by a process that knows of the loss.
        let is_outdated = was_lost(net, servers, hold.token) && !(is_handoff && is_warned);
        let is_excused = net.is_single && net.excused.contains(&hold.token);
        if is_excused || net.revoked.contains(&hold.token) || is_outdated {
            return;
        }
        // A majority takes its time to confirm a grant.
        if net.is_single && !began.is_long_enough {
            let short = || format!("{} is held for too short a time", name());
            self.report(Wrong::TooShort, short);
        }
        let fences = self.fences.entry((hold.mode.kind(), hold.key.clone()));
        let fences = fences.or_default();
        let is_smaller = |(other, mode, at): &Numbered| {
            let has_writer = [hold.mode, *mode].contains(&Mode::Exclusive);
            other < fence || other > fence && !has_writer && *at >= began.asked_at
        };
        let is_in_order = fences.iter().all(is_smaller);
        fences.push((*fence, hold.mode, net.now));
        if !is_in_order {
            let wrong = || format!("{} has fencing token {fence} out of order", name());
            self.report(Wrong::Fence, wrong);
        }
    }

    pub(super) fn crashed(&mut self, net: &Network, client: &mut Client) {
        self.dead.extend(held(net, client));
    }

    /// Checks that holders exclude each other, and that a majority of the servers holds each lock
    /// for as long as its holder is valid. A server that has lost the lock with its data counts
    /// too, as it does not vote in the meantime.
    fn holders(&mut self, net: &Network, clients: &mut [Client], servers: &[Server]) {
        self.dead.retain(|dead| net.now < dead.until);
        let clients = clients.iter_mut();
        let mut holders: Vec<_> = clients.flat_map(|client| held(net, client)).collect();
        let living = holders.len();
        holders.append(&mut self.dead);
        let is_valid = |Holder { hold, .. }: &&Holder| {
            !net.revoked.contains(&hold.token) && !was_lost(net, servers, hold.token)
        };
        let valid: Vec<_> = holders.iter().filter(is_valid).collect();
        for (index, holder) in valid.iter().enumerate() {
            let hold = &holder.hold;
            if !is_kept(net, servers, holder) {
                self.report(Wrong::NotHeld, || {
                    let left = holder.until - net.now;
                    format!("{} is held for {left:?} by a client only", hold.key)
                });
            }
            let before = valid[..index].iter().map(|other| &other.hold);
            let lock = (hold.mode.kind(), &hold.key);
            let beside: Vec<_> = before
                .filter(|it| (it.mode.kind(), &it.key) == lock)
                .collect();
            let is_excluded = match hold.mode {
                Mode::Exclusive => !beside.is_empty(),
                Mode::Shared => beside.iter().any(|other| other.mode == Mode::Exclusive),
                Mode::Permits(permits) => beside.len() >= permits.get() as usize,
            };
            if is_excluded {
                self.report(Wrong::TwoHolders, || {
                    format!("{} is held twice, by {}", hold.key, net.name(hold.token))
                });
            }
        }
        self.dead = holders.split_off(living);
    }

    /// Checks, after a request that a server executes, that everything it keeps has an owner,
    /// unless its client is dead.
    pub(super) fn owners(
        &mut self,
        net: &Network,
        clients: &[Client],
        (number, server): (usize, &Server),
        wrong: Wrong,
    ) {
        let now = server.clock.at(net.now);
        for (key, kind) in net.locks() {
            for (token, mode) in server.table().tokens(key, kind, now) {
                let owner = net
                    .origin(token)
                    .map(|it| (it.who, &clients[it.who.process]));
                let is_named =
                    |(at, name, _): &(usize, Token, FencingToken)| (*at, *name) == (number, token);
                let living = owner.filter(|(who, client)| client.who == *who);
                if living.is_some_and(|(_, client)| !client.owns(number, token))
                    && !net.excused.contains(&token)
                    && !server.has_undone(token)
                    && !net.named.iter().any(is_named)
                {
                    let state = if mode.is_some() { "held" } else { "queued" };
                    self.report(wrong, || {
                        let name = net.name(token);
                        format!("{key} is {state} at s{number} by {name} without an owner")
                    });
                }
            }
        }
    }
}

/// The locks that a client holds by its own clock.
fn held(net: &Network, client: &mut Client) -> Vec<Holder> {
    let valid = client.process.session.valid(client.now(net));
    let valid = valid.map(|(_, hold, until)| (hold.clone(), until));
    let valid: Vec<_> = valid.collect();
    let holder = |(hold, until): (Hold, Instant)| Holder {
        until: client.clock.when(until),
        votes: client.votes(&hold),
        hold,
    };
    valid.into_iter().map(holder).collect()
}

/// Whether the single store has lost the lock with its data.
fn was_lost(net: &Network, servers: &[Server], token: Token) -> bool {
    net.is_single && servers[0].has_lost(token)
}

fn is_kept(net: &Network, servers: &[Server], holder: &Holder) -> bool {
    let Holder { hold, until, votes } = holder;
    let at_the_store = [(0, hold.token)];
    let (since, aliases) = match votes {
        None if servers[0].has_undone(hold.token) => return true,
        Some(Votes { since, aliases }) => (*since, &aliases[..]),
        None if net.is_single => (net.start, &at_the_store[..]),
        None => return true,
    };
    let keeps = |(number, server): &(usize, &Server)| {
        let forgot = !net.is_single
            && (server.lost_data_at).is_some_and(|at| at >= since - net.schedule.longest_lease);
        let mut aliases = aliases.iter().filter(|(at, _)| at == number);
        aliases.any(|(_, token)| {
            let alias = hold.alias(*token);
            let kept = server.table().held_until(&alias, server.clock.at(net.now));
            forgot || kept.is_some_and(|kept| server.clock.when(kept) >= *until)
        })
    };
    servers.iter().enumerate().filter(keeps).count() >= majority(servers.len())
}
