//! The records of all processes of a storm, and the conditions that they must meet.

mod gaps;
mod operations;
mod request;

use std::{
    collections::{BTreeMap, HashMap},
    ops::Range,
    time::{Duration, Instant},
};

use self::request::{Lock, Request};
pub use self::{gaps::Gap, operations::Operation};
use super::{Event, Grant, History, Kind, PERMITS, Record, TICK, Violation};

/// The longest time for which a lock may be free while a request waits for it and nothing fails.
pub const HANDOVER: Duration = Duration::from_millis(250);
/// The time that may pass after a fault and a lease, until dead processes are detected and
/// connections are restored.
pub const RECOVERY: Duration = Duration::from_secs(3);
/// The longest time by which a reply may exceed the wait of its request.
const LATE: Duration = Duration::from_millis(500);

/// A time by `nanos`, or a duration.
pub type Nanos = u64;

pub fn in_nanos(time: Duration) -> Nanos {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// A deliberate fault.
#[derive(Clone, Debug)]
pub struct Fault {
    pub name: String,
    pub time: Range<Nanos>,
    /// The only store lost its data during the fault. For a lease after it, the store may grant
    /// locks that are held.
    pub loses: bool,
}

/// Violations of the order of fencing tokens.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct TokenViolations {
    pub shared_by_readers: Vec<String>,
    pub others: Vec<String>,
}

/// All records of a storm.
#[derive(Debug)]
pub struct Chronicle {
    requests: Vec<Request>,
    stalls: Vec<(usize, Range<Nanos>)>,
    /// The locks whose holders were revoked, and when.
    revocations: Vec<(Lock, Range<Nanos>)>,
    killed: HashMap<usize, Nanos>,
    faults: Vec<Fault>,
    lease: Nanos,
    /// The longest time for which a lock may be free while a request waits for it and nothing
    /// fails.
    handover: Duration,
    /// Any time, by the clock of a [`History`].
    zero: Instant,
}

impl Chronicle {
    pub fn new(
        records: impl IntoIterator<Item = (usize, Record)>,
        killed: HashMap<usize, Nanos>,
        faults: Vec<Fault>,
        lease: Duration,
    ) -> Self {
        let mut requests: Vec<Request> = Vec::new();
        let (mut stalls, mut revocations) = (Vec::new(), Vec::new());
        let mut numbers: HashMap<(usize, u64), usize> = HashMap::new();
        // Without a reply, it is executed within a call and the time of a straggler.
        let latest = in_nanos(lease) * 2;
        for (process, Record { at, request, event }) in records {
            match event {
                Event::Stalled { since } => stalls.push((process, since..at)),
                Event::Revoking { key, permits } => {
                    numbers.insert((process, request), revocations.len());
                    revocations.push(((key, permits), at..at + latest));
                }
                Event::Revoked => revocations[numbers[&(process, request)]].1.end = at,
                Event::Asked(ask) => {
                    numbers.insert((process, request), requests.len());
                    requests.push(Request::new(process, ask, at));
                }
                event => requests[numbers[&(process, request)]].note(at, event),
            }
        }
        requests.sort_by_key(|request| request.asked);
        stalls.sort_by_key(|(_, stall)| stall.start);
        Self {
            requests,
            stalls: joined(stalls),
            revocations,
            killed,
            faults,
            lease: in_nanos(lease),
            handover: HANDOVER,
            zero: Instant::now(),
        }
    }

    /// Sets the longest time for which a lock may be free while a request waits for it and nothing
    /// fails.
    #[must_use]
    pub fn handover(self, handover: Duration) -> Self {
        Self { handover, ..self }
    }

    pub fn grants(&self) -> usize {
        self.requests
            .iter()
            .filter(|request| !request.fences.is_empty())
            .count()
    }

    /// The codes with which requests, holds and releases ended, with their counts.
    pub fn codes(&self) -> BTreeMap<&str, usize> {
        let mut counts = BTreeMap::new();
        for request in &self.requests {
            let lost = request.lost.as_ref().map(|lost| &lost.code);
            let codes = [request.refused.as_ref(), lost, request.released.as_ref()];
            codes
                .into_iter()
                .flatten()
                .for_each(|code| *counts.entry(code.as_str()).or_default() += 1);
        }
        counts
    }

    /// The requests for each lock, in the order in which they were made.
    fn by_lock(&self) -> BTreeMap<Lock, Vec<&Request>> {
        let mut locks: BTreeMap<Lock, Vec<&Request>> = BTreeMap::new();
        for request in &self.requests {
            request
                .locks()
                .for_each(|lock| locks.entry(lock).or_default().push(request));
        }
        locks
    }

    fn instant(&self, at: Nanos) -> Instant {
        self.zero + Duration::from_nanos(at)
    }

    /// Tokens of a lock that were granted twice or went back, in any modes, and guards that were
    /// entered again with another token.
    pub fn token_violations(&self) -> TokenViolations {
        let mut violations = TokenViolations::default();
        for (lock, requests) in self.by_lock() {
            let mut history = History::default();
            for request in requests {
                let index = request
                    .ask
                    .keys
                    .iter()
                    .position(|key| *key == lock.0)
                    .expect("one of its keys");
                let (Some(&token), Some(granted_at)) =
                    (request.fences.get(index), request.answered)
                else {
                    continue;
                };
                let (asked_at, granted_at) =
                    (self.instant(request.asked), self.instant(granted_at));
                history.add(Grant {
                    asked_at,
                    granted_at,
                    token,
                });
                for entered in request.entered.iter().filter(|&&entered| entered != token) {
                    let entered = format!(
                        "{lock:?}: a guard with token {token} was entered again with {entered}"
                    );
                    violations.others.push(entered);
                }
            }
            for violation in history.violations() {
                let holders = match violation {
                    Violation::Twice(token) => self.holders_of(&lock, token),
                    Violation::Back { earlier, later } => [
                        self.holders_of(&lock, earlier),
                        self.holders_of(&lock, later),
                    ]
                    .concat(),
                };
                let twice = matches!(violation, Violation::Twice(_));
                let shared = twice && holders.iter().all(|holder| holder.reads());
                let holders: Vec<_> = holders
                    .iter()
                    .map(|holder| {
                        (
                            holder.process,
                            holder.ask.kind,
                            holder.asked,
                            holder.answered,
                        )
                    })
                    .collect();
                let text = format!("{lock:?}: {violation}: {holders:?}");
                if shared {
                    violations.shared_by_readers.push(text)
                } else {
                    violations.others.push(text)
                }
            }
        }
        violations
    }

    fn holders_of(&self, lock: &Lock, token: u64) -> Vec<&Request> {
        let has = |request: &&Request| {
            request.fences.contains(&token) && request.locks().any(|own| own == *lock)
        };
        self.requests.iter().filter(has).collect()
    }

    /// Overlapping claims of one lock that exclude each other, except after a loss of data.
    pub fn overlaps(&self) -> Vec<String> {
        let mut overlaps = Vec::new();
        for (lock, requests) in self.by_lock() {
            let claim = |it: &Request| self.until_revoked(&lock, it.asked, it.claim()?);
            let claims = requests
                .into_iter()
                .filter_map(|request| Some((claim(request)?, request)));
            let mut claims: Vec<_> = claims.collect();
            claims.sort_by_key(|(claim, _)| claim.start);
            let mut active: Vec<(Range<Nanos>, &Request)> = Vec::new();
            for (claim, request) in claims {
                active.retain(|(other, _)| other.end > claim.start);
                let others = active.iter().filter(|(other, holder)| {
                    (!request.reads() || !holder.reads())
                        && !self.loses_within(claim.start..claim.end.min(other.end))
                });
                let others: Vec<_> = others.collect();
                let room = if lock.1 { PERMITS as usize - 1 } else { 0 };
                if others.len() > room && !claim.is_empty() {
                    let (other, holder) = others[0];
                    let millis = (claim.end.min(other.end) - claim.start) / 1_000_000;
                    overlaps.push(format!(
                        "{lock:?}: {:?} of process {} from {} meets {:?} of process {} from {}, for {millis} ms",
                        request.ask.kind, request.process, claim.start, holder.ask.kind, holder.process, other.start
                    ));
                }
                active.push((claim, request));
            }
        }
        overlaps
    }

    /// The part of a claim before a revocation, of which its holder learns later. `None` if the
    /// lock may have been revoked before the grant arrived: it was asked for before the revocation,
    /// and the lease of such a grant is not over when the claim begins.
    fn until_revoked(
        &self,
        lock: &Lock,
        asked: Nanos,
        claim: Range<Nanos>,
    ) -> Option<Range<Nanos>> {
        let revocations = self.revocations.iter();
        let mut revoked = revocations.filter(|(of, time)| {
            let leased = time.start..time.end + self.lease;
            of == lock && asked < time.end && meets(&leased, &claim)
        });
        let end = revoked.try_fold(claim.end, |end, (_, time)| {
            (time.start > claim.start).then(|| end.min(time.start))
        })?;
        Some(claim.start..end)
    }

    /// Returns whether holders of the lock were revoked, with what was left of their `min_hold`.
    fn is_revoked_within(&self, lock: &Lock, time: Range<Nanos>) -> bool {
        let mut revocations = self.revocations.iter();
        revocations.any(|(of, revoked)| of == lock && meets(revoked, &time))
    }

    /// Confirmed extensions after which the lock was valid for less time than was asked for, less
    /// the time of two calls, 1 % and 2 ms.
    pub fn short_extensions(&self) -> Vec<String> {
        let mut short = Vec::new();
        for request in &self.requests {
            for extension in &request.extended {
                let [asked, took, validity] = extension.map(Duration::from_nanos);
                // The store's clock may be known from a slower call. A shared clock is known to
                // 200 ms.
                let earlier = took.max(Duration::from_millis(200));
                let allowance = took + earlier + asked / 100 + Duration::from_millis(2);
                // It may be revoked between the reply and the look at its validity.
                let lost = request.lost.as_ref().filter(|_| validity.is_zero());
                let is_revoked = lost.is_some_and(|lost| lost.code == "lost_revoked");
                if validity + allowance < asked && !is_revoked {
                    short.push(format!(
                        "{validity:.1?} instead of {asked:.1?}, after {took:.1?}: {request:?}"
                    ));
                }
            }
        }
        short
    }

    /// The number of confirmed extensions.
    pub fn extensions(&self) -> usize {
        self.requests.iter().map(|it| it.extended.len()).sum()
    }

    /// Locks that were granted before the end of the `min_hold` of an earlier holder, except after
    /// a loss of data. The `min_hold` counts from the grant, which is not before the request and
    /// the end of each earlier claim that excludes it. It ends with the lease that was known last.
    pub fn early(&self) -> Vec<String> {
        let mut early = Vec::new();
        for (lock, requests) in self.by_lock() {
            let downgrades: Vec<_> = requests
                .iter()
                .filter(|request| request.ask.kind == Kind::Downgraded)
                .map(|request| (request.process, request.asked))
                .collect();
            let claims = requests
                .into_iter()
                .filter_map(|request| Some((request.claim()?, request)));
            let mut claims: Vec<_> = claims.collect();
            claims.sort_by_key(|(claim, _)| claim.start);
            // The latest end of a claim, of all and of writers.
            let (mut all, mut writers) = (0, 0);
            let mut active: Vec<(Nanos, Nanos, &Request)> = Vec::new();
            for (claim, request) in claims {
                active.retain(|(_, end, _)| *end > claim.start);
                // A writer that was downgraded admits readers.
                let admits = |(_, _, holder): &&(Nanos, Nanos, &Request)| {
                    request.reads()
                        && (holder.reads()
                            || downgrades.iter().any(|(process, asked)| {
                                *process == holder.process && holder.leaves_at(*asked)
                            }))
                };
                let others = active.iter().filter(|other| !admits(other));
                let others: Vec<_> = others.collect();
                let room = if lock.1 { PERMITS as usize - 1 } else { 0 };
                let reserved = others
                    .iter()
                    .find(|(_, _, holder)| holder.has_left(claim.start));
                if others.len() > room
                    && request.ask.kind != Kind::Downgraded
                    && let Some((since, end, holder)) = reserved
                    && !self.loses_within(*since..claim.start)
                    // The grant may have been revoked on its way.
                    && !self.is_revoked_within(&lock, holder.asked..claim.start)
                {
                    let micros = (end - claim.start) / 1_000;
                    let about = self.about(&lock, &(*since..claim.start)).join("\n");
                    early.push(format!(
                        "{lock:?}: {:?} of process {} at {}, {micros} us before the end of the \
                         min_hold of {:?} of process {} since {since}\n{about}",
                        request.ask.kind,
                        request.process,
                        claim.start,
                        holder.ask.kind,
                        holder.process
                    ));
                }
                let before = match (lock.1, request.reads()) {
                    (true, _) => 0,
                    (false, true) => writers,
                    (false, false) => all,
                };
                let since = request.asked.max(before.min(claim.start));
                all = all.max(claim.end);
                if !request.reads() {
                    writers = writers.max(claim.end);
                }
                let end = request.reserved_until(since).max(claim.end);
                active.push((since, end, request));
            }
        }
        early
    }

    /// Returns whether `time` meets a loss of data or the lease after it. By the end of that lease,
    /// all earlier grants have expired.
    fn loses_within(&self, time: Range<Nanos>) -> bool {
        let losses = self.faults.iter().filter(|fault| fault.loses);
        losses
            .into_iter()
            .any(|loss| meets(&(loss.time.start..loss.time.end + self.lease), &time))
    }

    /// Requests that were answered later than their wait allows.
    pub fn late_answers(&self) -> Vec<String> {
        // A request that does not wait makes at most two calls.
        let call =
            |lease| in_nanos((Duration::from_nanos(lease) / 6).min(Duration::from_millis(500)));
        let mut late = Vec::new();
        for request in self
            .requests
            .iter()
            .filter(|request| request.ask.kind != Kind::Downgraded)
        {
            let (Some(answered), false) = (
                request.answered,
                request.refused.as_deref() == Some(Event::DROPPED),
            ) else {
                continue;
            };
            let took = answered - request.asked;
            let allowed = request.ask.wait.unwrap_or(2 * call(request.ask.lease)) + in_nanos(LATE);
            if took <= allowed {
                continue;
            }
            let time = request.asked..answered;
            let stalled = self.stalled(time.clone(), Some(request.process));
            if took > allowed + stalled {
                let times = [took, allowed, stalled].map(Duration::from_nanos);
                let faults = self.faults.iter().filter(|it| meets(&it.time, &time));
                let faults: Vec<_> = faults.map(|it| (&it.name, &it.time)).collect();
                late.push(format!(
                    "answered after, allowed, stalled: {times:.1?}: {request:?}, faults: {faults:?}"
                ));
            }
        }
        late
    }

    /// The part of `time` in which one process did not run, or the sum over all processes.
    fn stalled(&self, time: Range<Nanos>, process: Option<usize>) -> Nanos {
        let end = self
            .stalls
            .partition_point(|(_, stall)| stall.start < time.end);
        let of = self.stalls[..end]
            .iter()
            .filter(|(stalled, _)| process.is_none_or(|process| process == *stalled));
        of.map(|(_, stall)| {
            stall
                .end
                .min(time.end)
                .saturating_sub(stall.start.max(time.start))
        })
        .sum()
    }
}

/// Joins stalls of a process that two looks at the clock in a row have found: it was as slow
/// between them.
fn joined(stalls: Vec<(usize, Range<Nanos>)>) -> Vec<(usize, Range<Nanos>)> {
    let mut joined: Vec<(usize, Range<Nanos>)> = Vec::new();
    for (process, stall) in stalls {
        let before = joined.iter_mut().rev().find(|(of, _)| *of == process);
        match before {
            Some((_, before)) if stall.start < before.end + in_nanos(2 * TICK) => {
                before.end = before.end.max(stall.end);
            }
            _ => joined.push((process, stall)),
        }
    }
    joined
}

fn meets(one: &Range<Nanos>, other: &Range<Nanos>) -> bool {
    one.start < other.end && other.start < one.end
}
