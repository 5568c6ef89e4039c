//! A resource that is protected by a lock and detects when the protection fails: it checks fencing
//! tokens and counts the effects of a broken lock. One is in this process ([`FencedResource`]), one
//! in Redis for several processes ([`RedisFencedResource`]).
//!
//! The content is one number, and every write should add one to the number that was read before.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")] async fn main() {
//! use lock_tests::FencedResource;
//!
//! let stock = FencedResource::new();
//! // acquire a lock here, and take its fencing token
//! stock.increment(7u64).await.unwrap();
//! // a holder that lost its lease to token 7
//! assert!(stock.increment(6u64).await.is_err());
//!
//! assert_eq!((stock.report().writes, stock.report().violations), (1, 1));
//! # }
//! ```

mod in_process;
mod on_redis;

use std::{error, fmt};

pub use in_process::{FencedResource, Inside};
pub use on_redis::RedisFencedResource;

/// The counts of a resource so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// The number the resource holds: the count of writes, if none was lost.
    pub value: u64,
    /// Accepted writes.
    pub writes: u64,
    /// Entries and writes refused because of a smaller fencing token than one seen before.
    pub violations: u64,
    /// Entries while a visitor was inside with which the new one must not overlap. They count
    /// whether the token was refused or not: a resource that checks no tokens would have let them
    /// in.
    pub overlaps: u64,
    /// Accepted writes of a number that was computed from an outdated one.
    pub lost_updates: u64,
    /// Largest number of visitors inside at once, readers included.
    pub peak: u64,
}

impl Report {
    /// Whether no count shows a broken lock.
    pub fn is_clean(&self) -> bool {
        self.violations == 0 && self.overlaps == 0 && self.lost_updates == 0
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            value,
            writes,
            violations,
            overlaps,
            lost_updates,
            peak,
        } = self;
        write!(f, "value={value} writes={writes} violations={violations} ")?;
        write!(
            f,
            "overlaps={overlaps} lost_updates={lost_updates} peak={peak}"
        )
    }
}

/// A fencing token that was refused because a later one had been seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stale {
    /// The refused token.
    pub presented: u64,
    /// The largest token seen.
    pub seen: u64,
}

impl fmt::Display for Stale {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "fencing token {} is older than {}",
            self.presented, self.seen
        )
    }
}

impl error::Error for Stale {}
