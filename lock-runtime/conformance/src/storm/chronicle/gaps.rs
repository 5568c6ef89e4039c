//! The times in which a lock was free while a request waited for it.

use std::{ops::Range, time::Duration};

use super::{
    Chronicle, Fault, Nanos, RECOVERY, in_nanos, meets,
    request::{Lock, Request},
};
use crate::storm::PERMITS;

/// The longest time for which a lock was free while a request waited for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gap {
    pub key: String,
    pub permits: bool,
    pub time: Range<Nanos>,
    /// The part of it in which all processes ran.
    pub length: Duration,
    pub allowed: Duration,
    pub explained_by: Vec<String>,
    /// The requests for the lock about that time, if the gap is longer than allowed. Times are in
    /// milliseconds since its start.
    pub requests: Vec<String>,
}

impl Chronicle {
    /// The time in which a request of a live process waited for a single lock.
    fn waits(&self, request: &Request) -> Option<Range<Nanos>> {
        let waits = request.ask.wait.is_some() && request.ask.keys.len() == 1;
        let end = request
            .answered
            .or_else(|| self.killed.get(&request.process).copied());
        let time = request.asked..end.unwrap_or(Nanos::MAX);
        (waits && !self.gives_up_calls(request, &time)).then_some(time)
    }

    /// Returns whether calls of a request with a brief lease may have been given up, which lasts
    /// for a sixth of the lease, as something did not run for as long.
    fn gives_up_calls(&self, request: &Request, time: &Range<Nanos>) -> bool {
        let lease = request.ask.lease;
        let mut stalls = self.stalls.iter();
        lease < self.lease / 2
            && stalls.any(|(_, stall)| meets(stall, time) && stall.end - stall.start >= lease / 6)
    }

    /// The longest gaps of each lock, and the length that is allowed for them. A gap is a time in
    /// which the lock was free while one and the same request waited for it.
    pub fn gaps(&self) -> Vec<Gap> {
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
            let (explained, plain): (Vec<_>, Vec<_>) = found
                .into_iter()
                .partition(|gap| gap.allowed > self.handover);
            let longest = |gaps: Vec<Gap>| gaps.into_iter().max_by_key(|gap| gap.length);
            gaps.extend([longest(plain), longest(explained)].into_iter().flatten());
        }
        gaps
    }

    /// Without a fault, a lock that is free is granted within the handover of this chronicle.
    /// Otherwise:
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
            self.handover
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

    /// The requests for a lock, its revocations, and the stalls of all processes, from a second
    /// before `time` to its end.
    pub(super) fn about(&self, lock: &Lock, time: &Range<Nanos>) -> Vec<String> {
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
        let revoked = self.revocations.iter();
        let revoked = revoked.filter(|(of, at)| of == lock && meets(at, &(since..time.end)));
        let revoked = revoked.map(|(_, at)| {
            let [start, end] = [at.start, at.end].map(millis);
            format!("revoked from {start:?} to {end:?}")
        });
        let requests = self.requests.iter().filter(of_lock).filter(near).map(text);
        requests.chain(revoked).chain(stalls).collect()
    }
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
