//! The invariants of a run: those that hold at every moment, and those that hold at its end.

use std::{collections::BTreeMap, mem::take, num::NonZeroU32, sync::Arc, time::Duration};

use super::{
    client::{Client, Votes},
    explore::Violation,
    network::Network,
    process::{Began, Completed, Who},
    server::Server,
};
use crate::{
    guard::fence::FencingToken,
    protocol::{HeldId, majority::majority},
    request::key::LockKey,
    request::spec::{LockKind, Mode},
    shell::time::Instant,
    store::{Hold, RETAINED, Token},
};

/// The kinds of violations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wrong {
    /// Two holders that exclude each other hold a lock at the same time, each by its own clock.
    TwoHolders,
    /// A holder is valid, but the store, or a majority of the servers, does not hold the lock for
    /// it, or not for as long.
    NotHeld,
    /// A lock was granted again before the end of a `min_hold`.
    TooEarly,
    /// A fencing token was handed out before, or is not larger than an earlier one.
    Fence,
    /// A lock was handed off locally more often, or for longer, than allowed.
    Budget,
    /// A lock was handed out that ends before it can be renewed.
    TooShort,
    /// A server keeps something for a token that no part of its living client knows.
    Orphan,
    /// A client no longer gives a token up although a lease that it has requested for it lasts on.
    Left,
    /// A client has lost a lock that it renews, and no fault since the grant explains it.
    Lost,
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
    /// The store does not keep a result that it has confirmed, or with which a lock was released.
    Forgotten,
    /// The store keeps a result that no holder has left, or one whose time was over.
    Recorded,
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

/// A lock with a `min_hold`. Times are true ones.
struct Kept {
    who: Who,
    held: HeldId,
    hold: Hold,
    /// The store may have made a reader of the writer, which admits others.
    is_converted: bool,
    /// The end of `min_hold`, by the slowest clock.
    until: Instant,
    /// The end of the lease as the client knew it last.
    valid_until: Instant,
}

/// A result that a holder has asked the store to keep.
struct Recording {
    asked: Completed,
    stage: Stage,
}

#[derive(Clone, Copy)]
enum Stage {
    /// The store held the lock until then, when it was seen last.
    Held(Option<Instant>),
    Kept,
    /// It must not be seen any more.
    Over,
}

/// A fencing token, and the mode and the time of its guard.
type Numbered = (FencingToken, Mode, Instant);

#[derive(Default)]
pub(super) struct Checker {
    fences: BTreeMap<(LockKind, LockKey), Vec<Numbered>>,
    /// The number of guards that each token of a writer was handed out to, one after the other.
    writers: BTreeMap<Token, u32>,
    dead: Vec<Holder>,
    kept: Vec<Kept>,
    completed: Vec<Completed>,
    results: BTreeMap<Arc<[u8]>, Recording>,
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
        for converts in take(&mut net.converts) {
            let mut kept = self.kept.iter_mut();
            if let Some(kept) = kept.find(|kept| (kept.who, kept.held) == converts) {
                (kept.is_converted, kept.hold.mode) = (true, Mode::Shared);
            }
        }
        for (who, began) in take(&mut net.began) {
            let is_warned = clients[who.process].is_warned;
            self.keep(net, servers, who, &began);
            self.began(net, servers, &began, is_warned);
        }
        for taken in take(&mut net.taken) {
            self.kept.retain(|kept| (kept.who, kept.held) != taken);
        }
        self.left(net, clients, servers);
        self.lost(net, servers);
        if let Some(token) = net.short.take() {
            self.report(Wrong::TooShort, || {
                format!("{} is granted for too short a time", net.name(token))
            });
        }
        self.holders(net, clients, servers);
        if net.is_single {
            self.contended(net, clients, servers);
            self.completed(net, servers);
            self.results(net, servers);
        }
    }

    /// Checks that the store keeps only results that holders have left, each of them once, and
    /// that the release of a lock does not lose its result.
    fn results(&mut self, net: &mut Network, servers: &[Server]) {
        for asked in take(&mut net.asked) {
            let stage = Stage::Held(None);
            let result = asked.result.clone();
            self.results.insert(result, Recording { asked, stage });
        }
        let (net, server) = (&*net, &servers[0]);
        let now = server.clock.at(net.now);
        let mut wrong = None;
        let mut kept = Vec::new();
        for key in &net.keys {
            let Some(done) = server.table().done(key, now) else {
                continue;
            };
            let recording = self.results.get_mut(&done.value[..]);
            match recording.filter(|it| it.asked.hold.key == *key) {
                Some(it) if matches!(it.stage, Stage::Over) => {
                    if !is_uncertain(net, servers, it.asked.hold.token) {
                        let name = net.name(it.asked.hold.token);
                        let what = format!("the result of {name} is kept late or again");
                        wrong = Some((Wrong::Recorded, what));
                    }
                }
                Some(it) => it.stage = Stage::Kept,
                None => {
                    let value = done.value.escape_ascii();
                    let what = format!("{key} has the result {value}, which no holder has left");
                    wrong = Some((Wrong::Recorded, what));
                }
            }
            kept.push(done.value);
        }
        for (result, Recording { asked, stage }) in &mut self.results {
            let Completed { hold, until, .. } = &*asked;
            if matches!(stage, Stage::Over) || kept.iter().any(|it| it[..] == **result) {
                continue;
            }
            // A store of records may judge a call by an earlier time than that of its clock.
            let judged = now.checked_sub(net.schedule.doubt).unwrap_or(now);
            let held_until = server.table().held_until(hold, judged);
            *stage = match (*stage, held_until) {
                (Stage::Held(_), Some(held)) => Stage::Held(Some(held)),
                (Stage::Held(Some(held)), None)
                    if held > now
                        && net.now < *until
                        && !is_uncertain(net, servers, hold.token) =>
                {
                    let what = format!("{} is released without its result", net.name(hold.token));
                    wrong = Some((Wrong::Forgotten, what));
                    Stage::Over
                }
                _ => Stage::Over,
            };
        }
        if let Some((wrong, what)) = wrong {
            self.report(wrong, || what);
        }
    }

    /// Checks that the store keeps the results that it has confirmed.
    fn completed(&mut self, net: &mut Network, servers: &[Server]) {
        self.completed.append(&mut net.completed);
        let is_certain = |token| !is_uncertain(net, servers, token);
        self.completed
            .retain(|it| net.now < it.until && is_certain(it.hold.token));
        let server = &servers[0];
        let is_forgotten = |it: &&Completed| {
            let done = server.table().done(&it.hold.key, server.clock.at(net.now));
            done.is_none_or(|done| done.value != *it.result)
        };
        if let Some(it) = self.completed.iter().find(is_forgotten).cloned() {
            self.report(Wrong::Forgotten, || {
                format!("the result of {} is not kept", net.name(it.hold.token))
            });
        }
    }

    /// Checks that a token is given up until every lease that was requested for it has ended.
    fn left(&mut self, net: &mut Network, clients: &[Client], servers: &[Server]) {
        for (number, hold) in take(&mut net.left) {
            let server = &servers[number];
            let client = net
                .origin(hold.token)
                .map(|it| (it.who, &clients[it.who.process]));
            let is_owned = |(who, client): (Who, &Client)| {
                client.who == who && client.owns(net, number, hold.token)
            };
            if !net.is_single && client.is_some_and(is_owned) {
                net.left.push((number, hold));
                net.look = true;
                continue;
            }
            let kept = server
                .table()
                .held_until(&hold, server.clock.at(net.now))
                .map(|until| server.clock.when(until));
            // A call to a server of a majority may wait for its connection, and the session counts
            // from the call.
            let late = if net.is_single {
                Duration::ZERO
            } else {
                LATELY
            };
            let slack = net.schedule.longest_lease / 50 + Duration::from_millis(5) + late;
            let lasts_on = |until: Instant| until > net.now + slack;
            if kept.is_some_and(lasts_on) && net.ends(number, hold.token).is_some_and(lasts_on) {
                self.report(Wrong::Left, || {
                    format!(
                        "{} is left at s{number}, held until {kept:?}",
                        net.name(hold.token)
                    )
                });
            }
        }
    }

    /// Checks that a fault explains each loss of a lock that is renewed.
    fn lost(&mut self, net: &mut Network, servers: &[Server]) {
        for (who, token, since) in take(&mut net.lost) {
            // A server of a majority may lose its vote while the others are yet to reply.
            let asked_by = since - net.schedule.longest_lease;
            let is_explained = net.search.is_some()
                || net.was_troubled(who.process, since)
                || net.revoked.contains(&token)
                || is_excused(net, token)
                || was_lost(net, servers, token)
                || !net.is_single && servers.iter().any(|it| it.has_lost_vote(token, asked_by))
                || servers[0].has_undone(token);
            if !is_explained {
                self.report(Wrong::Lost, || {
                    format!("{who} has lost {}, held since {since:?}", net.name(token))
                });
            }
        }
    }

    /// Checks that requests are refused as contended only if the store had something to refuse
    /// them for, or a client holds the lock that the store has lost with its data. A reply that
    /// the store did not give proves nothing.
    fn contended(&mut self, net: &mut Network, clients: &mut [Client], servers: &[Server]) {
        let server = &servers[0];
        for (key, kind) in net.locks() {
            if server.table().is_taken(key, kind, server.clock.at(net.now)) {
                self.taken_at.insert((kind, key.clone()), net.now);
            }
        }
        for lock in take(&mut net.contended) {
            let taken_at = self.taken_at.get(&lock).copied();
            let known_at = taken_at.max(net.paused_until);
            let mut holders = clients.iter_mut().flat_map(|client| held(net, client));
            let is_held = holders.any(|Holder { hold, .. }| {
                (hold.mode.kind(), &hold.key) == (lock.0, &lock.1)
                    && is_uncertain(net, servers, hold.token)
            });
            if known_at.is_none_or(|at| at + LATELY < net.now) && !is_held {
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
        let most = match hold.token.retains() {
            true => RETAINED,
            false => MAX_HANDOFFS,
        };
        if is_handoff && guards > most + 1 {
            let often = || format!("{} is held {guards} times in a row", name());
            self.report(Wrong::Budget, often);
        }
        // Nothing can be said about a grant whose data the store has lost, except that it is not
        // handed off by a process that knows of the loss.
        let is_outdated = was_lost(net, servers, hold.token) && !(is_handoff && is_warned);
        if is_excused(net, hold.token) || net.revoked.contains(&hold.token) || is_outdated {
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

    /// Records that a lock is held for a `min_hold`, which a downgrade does not begin anew.
    fn keep(&mut self, net: &Network, servers: &[Server], who: Who, began: &Began) {
        let Began { held, hold, .. } = began;
        let mut kept = self.kept.iter_mut();
        if let Some(kept) = kept.find(|kept| kept.hold.token == hold.token) {
            if kept.is_converted {
                (kept.held, kept.is_converted) = (*held, false);
                return;
            }
            let is_early = net.now < kept.until.min(kept.valid_until);
            if is_early && !is_uncertain(net, servers, hold.token) {
                let early = || format!("{} is handed off too early", net.name(hold.token));
                self.report(Wrong::TooEarly, early);
            }
            self.kept.retain(|kept| kept.hold.token != hold.token);
        }
        if let Some(min_hold) = began.min_hold {
            // Clocks are 1 % apart at most, and a visit may read the time a little early.
            let least = (min_hold - min_hold / 50).saturating_sub(Duration::from_millis(1));
            self.kept.push(Kept {
                who,
                held: *held,
                hold: hold.clone(),
                is_converted: false,
                until: net.now + least,
                valid_until: net.now,
            });
        }
    }

    /// Checks that no client holds a lock that was released before its `min_hold` has passed.
    fn kept(&mut self, net: &Network, servers: &[Server], holders: &[Holder]) {
        for Holder { hold, until, .. } in holders {
            let of_it = |kept: &&mut Kept| kept.hold.token == hold.token;
            if let Some(kept) = self.kept.iter_mut().find(of_it) {
                kept.valid_until = *until;
            }
        }
        self.kept
            .retain(|kept| net.now < kept.until.min(kept.valid_until));
        let lock = |hold: &Hold| (hold.mode.kind(), hold.key.clone());
        let mut early = None;
        for Kept { hold, until, .. } in &self.kept {
            if holders.iter().any(|it| it.hold.token == hold.token)
                || is_uncertain(net, servers, hold.token)
            {
                continue;
            }
            let others = holders.iter().map(|other| &other.hold);
            let others = others.filter(|other| lock(other) == lock(hold));
            let mut others = others.filter(|other| !is_uncertain(net, servers, other.token));
            let is_excluded = match hold.mode {
                Mode::Exclusive => others.next().is_some(),
                Mode::Shared => others.any(|other| other.mode == Mode::Exclusive),
                // The last of them was granted its permit by its own number (rule 38).
                Mode::Permits(permits) => {
                    let (mut count, mut most) = (1, permits.get());
                    for other in others {
                        count += 1;
                        if let Mode::Permits(permits) = other.mode {
                            most = most.max(permits.get());
                        }
                    }
                    count > most
                }
            };
            if is_excluded {
                early = Some((hold.clone(), *until - net.now));
            }
        }
        if let Some((hold, left)) = early {
            self.report(Wrong::TooEarly, || {
                let name = net.name(hold.token);
                format!(
                    "{} is held {left:?} before the min_hold of {name} ends",
                    hold.key
                )
            });
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
        self.kept(net, servers, &holders);
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
                // Each has counted the others against its own number, whenever it came.
                Mode::Permits(permits) => {
                    let others = beside.iter().filter_map(|other| match other.mode {
                        Mode::Permits(permits) => Some(permits),
                        _ => None,
                    });
                    let most = others.fold(permits, NonZeroU32::max);
                    beside.len() >= most.get() as usize
                }
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
                let living = owner.filter(|(who, client)| client.who == *who);
                if living.is_some_and(|(_, client)| !client.owns(net, number, token))
                    && !net.excused.contains(&(number, token))
                    && !server.has_undone(token)
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

/// Whether nothing can be said about a grant: it was revoked, lost with the data of the single
/// store, or made by a copy of its request.
fn is_uncertain(net: &Network, servers: &[Server], token: Token) -> bool {
    net.revoked.contains(&token)
        || is_excused(net, token)
        || was_lost(net, servers, token)
        || net.is_single && servers[0].has_undone(token)
}

/// Whether the single store may keep the token without an owner, or grant it twice.
fn is_excused(net: &Network, token: Token) -> bool {
    net.is_single && net.excused.contains(&(0, token))
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
