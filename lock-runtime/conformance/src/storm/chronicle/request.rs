//! One request of a storm.

use std::ops::Range;

use super::Nanos;
use crate::storm::{Ask, Event, Kind};

/// One of the two locks of a name; `true` for the permits.
pub(super) type Lock = (String, bool);

/// The recorded events of a request.
#[derive(Clone, Debug)]
pub(super) struct Request {
    pub(super) process: usize,
    pub(super) ask: Ask,
    pub(super) asked: Nanos,
    /// The time of the grant or the refusal.
    pub(super) answered: Option<Nanos>,
    pub(super) refused: Option<String>,
    pub(super) fences: Vec<u64>,
    pub(super) entered: Vec<u64>,
    /// The times at which the guard was checked, each with the end of its validity as of then.
    pub(super) held: Vec<(Nanos, Nanos)>,
    /// Each confirmed extension: the requested lease, the time of the call, and the validity
    /// afterwards.
    pub(super) extended: Vec<[Nanos; 3]>,
    pub(super) lost: Option<Lost>,
    pub(super) leaving: Option<Nanos>,
    pub(super) released: Option<String>,
}

#[derive(Clone, Debug)]
pub(super) struct Lost {
    pub(super) at: Nanos,
    pub(super) code: String,
    pub(super) valid_at: Nanos,
}

impl Request {
    pub(super) fn reads(&self) -> bool {
        matches!(self.ask.kind, Kind::Shared | Kind::Downgraded)
    }

    pub(super) fn locks(&self) -> impl Iterator<Item = Lock> {
        let permits = self.ask.kind == Kind::Permit;
        self.ask.keys.iter().map(move |key| (key.clone(), permits))
    }

    /// The time in which the holder could rely on the lock.
    pub(super) fn claim(&self) -> Option<Range<Nanos>> {
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

    /// The time until which the lock stays reserved at least after a release, if it was granted at
    /// `since`: to the end of `min_hold`, or of the lease as the guard knew it. A lock that was
    /// lost is not reserved.
    pub(super) fn reserved_until(&self, since: Nanos) -> Nanos {
        let valid_until = self.held.iter().map(|(_, until)| *until).max();
        match (&self.lost, valid_until) {
            (None, Some(valid_until)) => valid_until.min(since + self.ask.min_hold),
            _ => 0,
        }
    }

    /// Whether the guard was about to leave before `at`.
    pub(super) fn has_left(&self, at: Nanos) -> bool {
        self.leaving.is_some_and(|leaving| leaving <= at)
    }

    /// Whether the guard may be the one that was downgraded at `at`.
    pub(super) fn leaves_at(&self, at: Nanos) -> bool {
        const AT_ONCE: Nanos = 100_000_000;
        (self.leaving).is_some_and(|leaving| leaving <= at && at <= leaving + AT_ONCE)
    }

    /// The time in which the lock is not free: its claim and its reservation. A request for several
    /// keys and a downgrade may hold the lock from the time of the request on.
    pub(super) fn occupies(&self) -> Option<Range<Nanos>> {
        let unknown = self.ask.keys.len() > 1 || self.ask.kind == Kind::Downgraded;
        let Some(claim) = self.claim() else {
            return unknown.then(|| self.asked..self.answered.unwrap_or(Nanos::MAX));
        };
        let from = if unknown { self.asked } else { claim.start };
        Some(from..claim.end.max(claim.start + self.ask.min_hold))
    }

    pub(super) fn new(process: usize, ask: Ask, asked: Nanos) -> Self {
        Self {
            process,
            ask,
            asked,
            answered: None,
            refused: None,
            fences: Vec::new(),
            entered: Vec::new(),
            held: Vec::new(),
            extended: Vec::new(),
            lost: None,
            leaving: None,
            released: None,
        }
    }

    pub(super) fn note(&mut self, at: Nanos, event: Event) {
        match event {
            Event::Granted { fences, validity } => {
                (self.answered, self.fences) = (Some(at), fences);
                self.held.push((at, at + validity));
            }
            Event::Held { validity } => self.held.push((at, at + validity)),
            Event::Extended {
                asked,
                took,
                validity,
            } => self.extended.push([asked, took, validity]),
            Event::Lost { code, valid_at } => {
                _ = self.lost.get_or_insert(Lost { at, code, valid_at })
            }
            Event::Entered { fence } => self.entered.push(fence),
            Event::Leaving => self.leaving = Some(at),
            Event::Released { code } => self.released = Some(code),
            Event::Refused { code } => (self.answered, self.refused) = (Some(at), Some(code)),
            Event::Asked(_) | Event::Revoking { .. } | Event::Revoked | Event::Stalled { .. } => {
                unreachable!("they begin a request, or belong to none")
            }
        }
    }
}
