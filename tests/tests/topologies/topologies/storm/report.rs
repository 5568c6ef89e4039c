//! The report of a storm. Its text contains all results. Each test asserts those that its faults
//! allow.

use std::{
    collections::BTreeMap,
    fmt,
    ops::Range,
    time::{Duration, Instant},
};

use lock_runtime::LockError;
use lock_tests::{Delays, fenced, storm::Violation};

use super::{fault::Fault, worker::Key};

#[derive(Debug)]
pub(crate) struct Report {
    length: Duration,
    /// Its length without the delays of a loaded machine.
    net: Duration,
    keys: Vec<OfKey>,
    outages: Vec<Outage>,
    /// The number of each code, and the last error with it.
    errors: BTreeMap<&'static str, (u64, String)>,
}

#[derive(Debug)]
struct OfKey {
    name: String,
    grants: usize,
    violations: Vec<Violation>,
    resource: fenced::Report,
}

/// The longest time without a grant after a fault, less the delays of a loaded machine in it, and
/// the key without it.
#[derive(Debug)]
struct Outage {
    fault: String,
    at: Duration,
    key: String,
    longest_gap: Duration,
    promised: bool,
}

impl Report {
    pub(super) fn new(
        time: Range<Instant>,
        faults: Vec<Fault>,
        keys: &[Key],
        errors: impl Iterator<Item = LockError>,
        delays: &Delays,
    ) -> Self {
        let outages = faults.iter().enumerate().flat_map(|(index, fault)| {
            let nexts = &faults[index + 1..];
            [true, false].into_iter().filter_map(move |promised| {
                let gap = |key: &Key| {
                    // The promise ends with the next outage of the key.
                    let out = nexts
                        .iter()
                        .find(|next| promised && next.out.has(key.name()));
                    let end = out.map_or(time.end, |out| out.at);
                    let next = nexts.first().map(|next| next.at);
                    let net = |gap| delays.net(gap);
                    key.history().longest_gap(fault.at, next, end, net)
                };
                let keys = keys
                    .iter()
                    .filter(|key| promised != fault.out.has(key.name()));
                let (longest_gap, key) = keys.map(|key| (gap(key), key.name().to_owned())).max()?;
                Some(Outage {
                    fault: fault.name.clone(),
                    at: fault.at - time.start,
                    key,
                    longest_gap,
                    promised,
                })
            })
        });
        let outages = outages.collect();
        let of_key = |key: &Key| OfKey {
            name: key.name().to_owned(),
            grants: key.history().count(),
            violations: key.history().violations(),
            resource: key.resource(),
        };
        let mut counts = BTreeMap::<_, (u64, String)>::new();
        for error in errors {
            let (count, last) = counts.entry(error.code()).or_default();
            (*count, *last) = (*count + 1, format!("{error:#}"));
        }
        let length = time.end - time.start;
        Self {
            length,
            net: delays.net(time),
            keys: keys.iter().map(of_key).collect(),
            outages,
            errors: counts,
        }
    }

    /// The number of grants.
    pub(crate) fn grants(&self) -> usize {
        self.keys.iter().map(|key| key.grants).sum()
    }

    /// The number of entries that met a holder with which they exclude each other. A resource that
    /// checks no fencing tokens suffers from them.
    pub(crate) fn overlaps(&self) -> u64 {
        self.keys.iter().map(|key| key.resource.overlaps).sum()
    }

    /// The number of entries and writes that were refused because their fencing token was too old.
    pub(crate) fn refused(&self) -> u64 {
        self.keys.iter().map(|key| key.resource.violations).sum()
    }

    /// Asserts that fencing tokens order all holders of a key and that no update was lost, whatever
    /// failed.
    pub(crate) fn assert_fenced(&self) {
        for key in &self.keys {
            // A call that a loaded machine delays for longer than a sixth of the lease is given up.
            let is_served = key.grants > 0 || self.net.is_zero();
            assert!(is_served, "no grant of {}\n{self}", key.name);
            assert!(
                key.violations.is_empty(),
                "tokens of {} went wrong\n{self}",
                key.name
            );
            assert_eq!(
                key.resource.lost_updates, 0,
                "updates of {} were lost\n{self}",
                key.name
            );
        }
    }

    /// Asserts that no holders overlapped, even if fencing tokens kept them apart. A lock cannot
    /// promise this if servers lose data.
    pub(crate) fn assert_exclusive(&self) {
        assert_eq!(
            (self.overlaps(), self.refused()),
            (0, 0),
            "holders have met\n{self}"
        );
    }

    /// The longest gap in promised service, after any fault and of any key.
    pub(super) fn longest_promised_gap(&self) -> Duration {
        let promised = self.outages.iter().filter(|outage| outage.promised);
        promised
            .map(|outage| outage.longest_gap)
            .max()
            .unwrap_or_default()
    }

    /// Asserts that no key with promised service was without a grant for longer than this after a
    /// fault.
    pub(crate) fn assert_service_within(&self, longest: Duration) {
        for outage in self.outages.iter().filter(|outage| outage.promised) {
            assert!(
                outage.longest_gap <= longest,
                "no service for more than {longest:?}: {outage}\n{self}"
            );
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (grants, overlaps, refused) = (self.grants(), self.overlaps(), self.refused());
        write!(
            f,
            "storm of {:.1?} (net {:.1?}): {grants} grants, {overlaps} unfenced overlaps, {refused} refused as late",
            self.length, self.net
        )?;
        self.errors
            .iter()
            .try_for_each(|(code, (count, _))| write!(f, ", {count} {code}"))?;
        self.errors
            .values()
            .try_for_each(|(_, last)| write!(f, "\n  the last: {last}"))?;
        self.outages
            .iter()
            .try_for_each(|outage| write!(f, "\n  {outage}"))?;
        for OfKey {
            name,
            grants,
            violations,
            resource,
        } in &self.keys
        {
            write!(f, "\n  {name}: {grants} grants, {resource}")?;
            violations
                .iter()
                .take(5)
                .try_for_each(|violation| write!(f, "\n    {violation}"))?;
            if violations.len() > 5 {
                write!(f, "\n    and {} more", violations.len() - 5)?;
            }
        }
        Ok(())
    }
}

impl fmt::Display for Outage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            fault,
            at,
            key,
            longest_gap,
            promised,
        } = self;
        let promised = if *promised {
            ""
        } else {
            ", and none was promised"
        };
        write!(
            f,
            "{at:.1?} {fault}: no grant of {key} for {longest_gap:.1?}{promised}"
        )
    }
}
