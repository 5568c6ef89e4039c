//! The records of all processes of a storm, and the conditions that they must meet.

use std::{
    collections::{BTreeMap, HashMap},
    ops::Range,
    time::{Duration, Instant},
};

use lock_tests::storm::{Ask, Event, Kind, PERMITS, Record, nanos};

use super::super::storm::history::{Grant, History, Violation};

/// The longest time for which a lock may be free while a request waits for it and nothing fails.
pub(super) const HANDOVER: Duration = Duration::from_millis(250);
/// The time that may pass after a fault and a lease, until dead processes are detected and
/// connections are restored.
pub(super) const RECOVERY: Duration = Duration::from_secs(3);
/// The longest time by which a reply may exceed the wait of its request.
pub(super) const LATE: Duration = Duration::from_millis(500);

/// A time by [`nanos`], or a duration.
pub(super) type Nanos = u64;

pub(super) fn in_nanos(time: Duration) -> Nanos {
    u64::try_from(time.as_nanos()).expect("less than 584 years")
}

/// A deliberate fault.
#[derive(Clone, Debug)]
pub(super) struct Fault {
    pub(super) name: String,
    pub(super) time: Range<Nanos>,
    /// The only store lost its data during the fault. For a lease after it, the store may grant
    /// locks that are held.
    pub(super) loses: bool,
}

/// One of the two locks of a name; `true` for the permits.
type Lock = (String, bool);

/// The recorded events of a request.
#[derive(Clone, Debug)]
struct Request {
    process: usize,
    ask: Ask,
    asked: Nanos,
    /// The time of the grant or the refusal.
    answered: Option<Nanos>,
    refused: Option<String>,
    fences: Vec<u64>,
    entered: Vec<u64>,
    /// The times at which the guard was checked, each with the end of its validity as of then.
    held: Vec<(Nanos, Nanos)>,
    lost: Option<Lost>,
    leaving: Option<Nanos>,
    released: Option<String>,
}

#[derive(Clone, Debug)]
struct Lost {
    at: Nanos,
    code: String,
    valid_at: Nanos,
}

impl Request {
    fn reads(&self) -> bool {
        matches!(self.ask.kind, Kind::Shared | Kind::Downgraded)
    }

    fn locks(&self) -> impl Iterator<Item = Lock> {
        let permits = self.ask.kind == Kind::Permit;
        self.ask.keys.iter().map(move |key| (key.clone(), permits))
    }

    /// The time in which the holder could rely on the lock.
    fn claim(&self) -> Option<Range<Nanos>> {
        let granted = self.held.first()?.0;
        let valid_until = self.held.iter().map(|(_, until)| *until).max()?;
        let lost = self.lost.as_ref().map(|lost| match lost.code.as_str() {
            // The holder can compute the time of these losses in advance.
            "lost_expired" | "lost_max_hold" => lost.at,
            _ => lost.valid_at,
        });
        let end = [lost, self.leaving]
            .into_iter()
            .flatten()
            .fold(valid_until, Nanos::min);
        Some(granted..end.max(granted))
    }

    /// The time in which the lock is not free: its claim and its reservation. A request for several
    /// keys and a downgrade may hold the lock from the time of the request on.
    fn occupies(&self) -> Option<Range<Nanos>> {
        let unknown = self.ask.keys.len() > 1 || self.ask.kind == Kind::Downgraded;
        let Some(claim) = self.claim() else {
            return unknown.then(|| self.asked..self.answered.unwrap_or(Nanos::MAX));
        };
        let from = if unknown { self.asked } else { claim.start };
        Some(from..claim.end.max(claim.start + self.ask.min_hold))
    }
}

/// The longest time for which a lock was free while a request waited for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Gap {
    pub(super) key: String,
    pub(super) permits: bool,
    pub(super) time: Range<Nanos>,
    /// The part of it in which all processes ran.
    pub(super) length: Duration,
    pub(super) allowed: Duration,
    pub(super) explained_by: Vec<String>,
    /// The requests for the lock about that time, if the gap is longer than allowed. Times are in
    /// milliseconds since its start.
    pub(super) requests: Vec<String>,
}

/// Violations of the order of fencing tokens.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct TokenViolations {
    pub(super) shared_by_readers: Vec<String>,
    pub(super) others: Vec<String>,
}

/// All records of a storm.
#[derive(Debug)]
pub(super) struct Chronicle {
    requests: Vec<Request>,
    stalls: Vec<(usize, Range<Nanos>)>,
    killed: HashMap<usize, Nanos>,
    faults: Vec<Fault>,
    lease: Nanos,
    /// One point in time by both clocks.
    zero: (Instant, Nanos),
}

impl Chronicle {
    pub(super) fn new(
        records: impl IntoIterator<Item = (usize, Record)>,
        killed: HashMap<usize, Nanos>,
        faults: Vec<Fault>,
        lease: Duration,
    ) -> Self {
        let mut requests: Vec<Request> = Vec::new();
        let mut stalls = Vec::new();
        let mut numbers: HashMap<(usize, u64), usize> = HashMap::new();
        for (process, Record { at, request, event }) in records {
            match event {
                Event::Stalled { since } => stalls.push((process, since..at)),
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
            stalls,
            killed,
            faults,
            lease: in_nanos(lease),
            zero: (Instant::now(), nanos()),
        }
    }

    pub(super) fn grants(&self) -> usize {
        self.requests
            .iter()
            .filter(|request| !request.fences.is_empty())
            .count()
    }

    /// The codes with which requests, holds and releases ended, with their counts.
    pub(super) fn codes(&self) -> BTreeMap<&str, usize> {
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
        self.zero.0 - Duration::from_nanos(self.zero.1.saturating_sub(at))
    }

    /// Tokens of a lock that were granted twice or went back, in any modes, and guards that were
    /// entered again with another token.
    pub(super) fn token_violations(&self) -> TokenViolations {
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
    pub(super) fn overlaps(&self) -> Vec<String> {
        let mut overlaps = Vec::new();
        for (lock, requests) in self.by_lock() {
            let claims = requests
                .into_iter()
                .filter_map(|request| Some((request.claim()?, request)));
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

    /// Returns whether `time` meets a loss of data or the lease after it. By the end of that lease,
    /// all earlier grants have expired.
    fn loses_within(&self, time: Range<Nanos>) -> bool {
        let losses = self.faults.iter().filter(|fault| fault.loses);
        losses
            .into_iter()
            .any(|loss| meets(&(loss.time.start..loss.time.end + self.lease), &time))
    }

    /// Requests that were answered later than their wait allows.
    pub(super) fn late_answers(&self) -> Vec<String> {
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
            if took > allowed
                && took > allowed + self.stalled(request.asked..answered, Some(request.process))
            {
                let times = [took, allowed].map(Duration::from_nanos);
                late.push(format!("answered after {times:.1?} allowed: {request:?}"));
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

    /// The time in which a request of a live process waited for a single lock.
    fn waits(&self, request: &Request) -> Option<Range<Nanos>> {
        let waits = request.ask.wait.is_some() && request.ask.keys.len() == 1;
        let end = request
            .answered
            .or_else(|| self.killed.get(&request.process).copied());
        waits.then(|| request.asked..end.unwrap_or(Nanos::MAX))
    }

    /// The longest gaps of each lock, and the length that is allowed for them. A gap is a time in
    /// which the lock was free while one and the same request waited for it.
    pub(super) fn gaps(&self) -> Vec<Gap> {
        let mut gaps = Vec::new();
        for (lock, requests) in self.by_lock() {
            let room = if lock.1 { PERMITS as usize } else { 1 };
            let mut waiting: Vec<Range<Nanos>> = Vec::new();
            let mut coming = requests
                .iter()
                .filter_map(|request| self.waits(request))
                .peekable();
            let mut found: Vec<Gap> = Vec::new();
            for free in free_times(
                requests.iter().filter_map(|request| request.occupies()),
                room,
            ) {
                while let Some(wait) = coming.next_if(|wait| wait.start < free.end) {
                    waiting.push(wait);
                }
                waiting.retain(|wait| wait.end > free.start);
                let within =
                    |wait: &Range<Nanos>| wait.start.max(free.start)..wait.end.min(free.end);
                let longest = waiting
                    .iter()
                    .map(within)
                    .max_by_key(|time| time.end.saturating_sub(time.start));
                found.extend(
                    longest
                        .filter(|time| !time.is_empty())
                        .map(|time| self.gap(&lock, time)),
                );
            }
            // The longest gap without a fault that explains it, and the longest with one.
            let (explained, plain): (Vec<_>, Vec<_>) =
                found.into_iter().partition(|gap| gap.allowed > HANDOVER);
            let longest = |gaps: Vec<Gap>| gaps.into_iter().max_by_key(|gap| gap.length);
            gaps.extend([longest(plain), longest(explained)].into_iter().flatten());
        }
        gaps
    }

    /// Without a fault, a lock that is free is granted within [`HANDOVER`]. Otherwise:
    ///
    /// | fault | reason for the delay |
    /// |---|---|
    /// | a process is killed or stopped | the lease of all that it holds or is granted meanwhile |
    /// | a server is stopped, paused or restarted | its return, then the leases of lost releases |
    /// | connections are cut, stalled, silent or lose replies | the same |
    /// | scripts are flushed | one more round trip |
    ///
    /// The limit is therefore the time in which something fails, a lease, and [`RECOVERY`]. It
    /// applies to a lock that is free during a fault, or at most a lease and `RECOVERY` after it.
    fn gap(&self, lock: &Lock, time: Range<Nanos>) -> Gap {
        let after = self.lease + in_nanos(RECOVERY);
        let lasting = |fault: &&Fault| {
            meets(
                &(fault.time.start..fault.time.end.saturating_add(after)),
                &time,
            )
        };
        let faults: Vec<_> = self.faults.iter().filter(lasting).collect();
        let allowed = if faults.is_empty() {
            HANDOVER
        } else {
            let well_times = free_times(faults.iter().map(|fault| fault.time.clone()), 1);
            let well = well_times.iter().map(|well| {
                well.end
                    .min(time.end)
                    .saturating_sub(well.start.max(time.start))
            });
            Duration::from_nanos(time.end - time.start - well.sum::<Nanos>() + after)
        };
        let length = time.end - time.start;
        let length = Duration::from_nanos(length.saturating_sub(self.stalled(time.clone(), None)));
        let explained_by = faults.iter().map(|fault| fault.name.clone()).collect();
        let requests = if length > allowed {
            self.about(lock, &time)
        } else {
            Vec::new()
        };
        Gap {
            key: lock.0.clone(),
            permits: lock.1,
            time,
            length,
            allowed,
            explained_by,
            requests,
        }
    }

    /// The requests for a lock, and the stalls of all processes, from a second before `time` to its
    /// end.
    fn about(&self, lock: &Lock, time: &Range<Nanos>) -> Vec<String> {
        let since = time.start.saturating_sub(1_000_000_000);
        let millis = |at: Nanos| (at as f64 - time.start as f64) / 1e6;
        let of_lock = |request: &&Request| request.locks().any(|own| own == *lock);
        let near = |request: &&Request| {
            let end = request.leaving.or(request.answered);
            request.asked < time.end && end.is_none_or(|end| end >= since)
        };
        let text = |request: &Request| {
            let Request {
                process,
                ask,
                refused,
                released,
                ..
            } = request;
            let [asked, answered, leaving] =
                [Some(request.asked), request.answered, request.leaving].map(|at| at.map(millis));
            format!(
                "process {process}: {ask:?} asked at {asked:?}, answered at {answered:?}, {refused:?}; left at {leaving:?}, \
                 {released:?}, valid {:?}",
                request
                    .claim()
                    .map(|claim| (millis(claim.start), millis(claim.end)))
            )
        };
        let stalls = self
            .stalls
            .iter()
            .filter(|(_, stall)| meets(stall, &(since..time.end)));
        let stalls = stalls.map(|(process, stall)| {
            format!(
                "process {process} stalled from {:?} to {:?}",
                millis(stall.start),
                millis(stall.end)
            )
        });
        let requests = self.requests.iter().filter(of_lock).filter(near).map(text);
        requests.chain(stalls).collect()
    }
}

impl Request {
    fn new(process: usize, ask: Ask, asked: Nanos) -> Self {
        Self {
            process,
            ask,
            asked,
            answered: None,
            refused: None,
            fences: Vec::new(),
            entered: Vec::new(),
            held: Vec::new(),
            lost: None,
            leaving: None,
            released: None,
        }
    }

    fn note(&mut self, at: Nanos, event: Event) {
        match event {
            Event::Granted { fences, validity } => {
                (self.answered, self.fences) = (Some(at), fences);
                self.held.push((at, at + validity));
            }
            Event::Held { validity } => self.held.push((at, at + validity)),
            Event::Lost { code, valid_at } => {
                _ = self.lost.get_or_insert(Lost { at, code, valid_at })
            }
            Event::Entered { fence } => self.entered.push(fence),
            Event::Leaving => self.leaving = Some(at),
            Event::Released { code } => self.released = Some(code),
            Event::Refused { code } => (self.answered, self.refused) = (Some(at), Some(code)),
            Event::Asked(_) | Event::Stalled { .. } => {
                unreachable!("they begin a request, or belong to none")
            }
        }
    }
}

fn meets(one: &Range<Nanos>, other: &Range<Nanos>) -> bool {
    one.start < other.end && other.start < one.end
}

/// The times in which fewer than `room` of `occupied` last.
fn free_times(occupied: impl Iterator<Item = Range<Nanos>>, room: usize) -> Vec<Range<Nanos>> {
    let mut changes: Vec<(Nanos, bool)> = occupied
        .flat_map(|time| [(time.start, true), (time.end, false)])
        .collect();
    // A range that starts at the end of another leaves no gap.
    changes.sort_by_key(|(at, begins)| (*at, !begins));
    let (mut inside, mut free_since, mut free) = (0_usize, Some(0), Vec::new());
    for (at, begins) in changes {
        if begins {
            inside += 1;
            if inside == room
                && let Some(since) = free_since.take()
            {
                free.push(since..at);
            }
        } else {
            inside -= 1;
            if inside + 1 == room {
                free_since = Some(at);
            }
        }
    }
    // The last free time has no end.
    free.extend(free_since.map(|since| since..Nanos::MAX));
    free
}
