//! All grants of one key, and the conditions that they must meet: tokens increase, and no gap is
//! long.

use std::{
    collections::HashMap,
    fmt,
    ops::Range,
    time::{Duration, Instant},
};

/// A grant to one holder.
#[derive(Clone, Copy, Debug)]
pub struct Grant {
    pub asked_at: Instant,
    /// The time at which the holder received the guard.
    pub granted_at: Instant,
    pub token: u64,
}

/// A violation of the order of fencing tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Violation {
    /// Two holders had this token.
    Twice(u64),
    /// The request with the later token was made after the grant of the earlier one, which is
    /// larger.
    Back { earlier: u64, later: u64 },
}

/// The grants of one key.
#[derive(Clone, Debug, Default)]
pub struct History {
    grants: Vec<Grant>,
}

impl History {
    pub fn add(&mut self, grant: Grant) {
        self.grants.push(grant);
    }

    pub fn count(&self) -> usize {
        self.grants.len()
    }

    /// The time of the grant that was added last.
    pub fn last(&self) -> Option<Instant> {
        self.grants.last().map(|grant| grant.granted_at)
    }

    /// Tokens that were granted twice, and tokens smaller than one that was granted before their
    /// request.
    pub fn violations(&self) -> Vec<Violation> {
        let tokens: Vec<_> = self
            .grants
            .iter()
            .map(|grant| (grant, grant.token))
            .collect();
        let mut holders: HashMap<u64, usize> = HashMap::new();
        tokens
            .iter()
            .for_each(|(_, token)| *holders.entry(*token).or_default() += 1);
        let twice = holders
            .into_iter()
            .filter(|(_, holders)| *holders > 1)
            .map(|(token, _)| Violation::Twice(token));
        let mut violations: Vec<_> = twice.collect();

        let (mut asked, mut granted) = (tokens.clone(), tokens);
        asked.sort_by_key(|(grant, _)| grant.asked_at);
        granted.sort_by_key(|(grant, _)| grant.granted_at);
        let mut granted = granted.into_iter().peekable();
        let mut largest = 0;
        for (grant, token) in asked {
            while let Some((_, before)) =
                granted.next_if(|(before, _)| before.granted_at < grant.asked_at)
            {
                largest = largest.max(before);
            }
            if token < largest {
                violations.push(Violation::Back {
                    earlier: largest,
                    later: token,
                });
            }
        }
        violations
    }

    /// The longest time without a grant among those that begin while this fault is the latest, by
    /// this measure. A gap that began before the fault counts from it.
    pub fn longest_gap(
        &self,
        fault: Instant,
        next_fault: Option<Instant>,
        end: Instant,
        length: impl Fn(Range<Instant>) -> Duration,
    ) -> Duration {
        let granted = self.grants.iter().map(|grant| grant.granted_at);
        let mut times: Vec<_> = granted
            .filter(|time| (fault..end).contains(time))
            .chain([fault, end])
            .collect();
        times.sort();
        let gaps = times
            .windows(2)
            .filter(|gap| next_fault.is_none_or(|next| gap[0] < next));
        gaps.map(|gap| length(gap[0]..gap[1]))
            .max()
            .unwrap_or_default()
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Twice(token) => write!(f, "token {token} was given twice"),
            Self::Back { earlier, later } => {
                write!(
                    f,
                    "token {later} went to a request made when {earlier} had been given already"
                )
            }
        }
    }
}
