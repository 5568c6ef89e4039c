//! The evaluation of the answers of several Sentinels, without I/O.

use std::fmt;

use crate::store::{StoreError, StoreErrorKind};

/// The answers so far.
pub(super) struct Votes {
    /// The answer of each Sentinel.
    pub(super) answers: Vec<Option<SentinelAnswer>>,
}

#[derive(Debug)]
pub(super) enum SentinelAnswer {
    Named(Named),
    /// The Sentinel monitors no primary of that name.
    Unknown,
    Failed(StoreError),
}

/// A primary, as of the configuration of one epoch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Named {
    pub(super) host: String,
    pub(super) port: u16,
    pub(super) epoch: u64,
}

impl Named {
    /// Whether this is another primary, of a later configuration.
    pub(super) fn replaces(&self, other: &Self) -> bool {
        self.epoch > other.epoch && (&self.host, self.port) != (&other.host, other.port)
    }
}

impl fmt::Display for Named {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

impl Votes {
    pub(super) fn new(sentinels: usize) -> Self {
        let answers = (0..sentinels).map(|_| None).collect();
        Self { answers }
    }

    /// Records an answer. Returns whether it decides the vote, whatever the other answers are.
    pub(super) fn take(&mut self, index: usize, answer: SentinelAnswer) -> bool {
        self.answers[index] = Some(answer);
        self.named().count() > self.answers.len() / 2
    }

    fn named(&self) -> impl Iterator<Item = &Named> {
        self.answers.iter().filter_map(|answer| match answer {
            Some(SentinelAnswer::Named(named)) => Some(named),
            _ => None,
        })
    }

    /// The primary of the latest configuration. Of two with the same epoch it is the one that more
    /// Sentinels name. `heard` is a recent notification of one Sentinel, which the others may not
    /// have known yet.
    pub(super) fn elected<'a>(&'a self, heard: Option<&'a Named>) -> Option<&'a Named> {
        let votes = |named: &Named| self.named().filter(|other| *other == named).count();
        let candidates = self.named().chain(heard);
        candidates.max_by_key(|named| (named.epoch, votes(named)))
    }

    /// The kind of the error if no Sentinel names a primary.
    pub(super) fn failure(&self) -> StoreErrorKind {
        let mut kinds = self.answers.iter().map(|answer| match answer {
            Some(SentinelAnswer::Failed(error)) => error.kind(),
            _ => StoreErrorKind::Unavailable,
        });
        let first = kinds.next();
        let common = first.filter(|first| kinds.all(|kind| kind == *first));
        common.unwrap_or(StoreErrorKind::Unavailable)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn primary(host: &str, epoch: u64) -> Named {
        let (host, port) = (host.into(), 6379);
        Named { host, port, epoch }
    }

    fn named(host: &str, epoch: u64) -> SentinelAnswer {
        SentinelAnswer::Named(primary(host, epoch))
    }

    fn failed(kind: StoreErrorKind) -> SentinelAnswer {
        SentinelAnswer::Failed(StoreError::new(kind, "no"))
    }

    #[test]
    fn a_majority_decides_and_the_latest_configuration_counts() {
        let mut votes = Votes::new(3);
        assert!(!votes.take(2, named("old", 4)));
        assert!(votes.take(0, named("new", 5)), "two of three");
        assert_eq!(votes.elected(None).unwrap().host, "new");
    }

    #[test]
    fn an_answer_without_a_name_is_no_vote() {
        let mut votes = Votes::new(5);
        assert!(!votes.take(0, SentinelAnswer::Unknown));
        assert!(!votes.take(1, failed(StoreErrorKind::Unavailable)));
        assert!(!votes.take(2, named("a", 1)));
        assert!(!votes.take(3, named("a", 1)));
        let so_far = &votes.elected(None).unwrap().host;
        assert_eq!(so_far, "a", "when no Sentinel is left to ask");
        assert!(votes.take(4, named("b", 2)));
        assert_eq!(votes.elected(None).unwrap().host, "b");
    }

    #[test]
    fn the_latest_message_counts_until_a_majority_knows_as_much() {
        let elected = |votes: &Votes, epoch| {
            let heard = primary("heard", epoch);
            votes.elected(Some(&heard)).unwrap().host.clone()
        };
        let mut votes = Votes::new(3);
        assert_eq!(elected(&votes, 0), "heard");
        votes.take(0, named("a", 4));
        votes.take(1, named("a", 4));
        for (epoch, host) in [(5, "heard"), (4, "a"), (3, "a")] {
            assert_eq!(elected(&votes, epoch), host);
        }
    }

    #[test]
    fn primary_is_replaced_by_a_later_configuration_only() {
        assert!(primary("b", 2).replaces(&primary("a", 1)));
        for other in [primary("a", 2), primary("b", 1), primary("b", 0)] {
            assert!(!other.replaces(&primary("a", 1)), "{other:?}");
        }
    }

    #[test]
    fn of_two_in_one_epoch_the_one_with_more_votes_counts() {
        for order in [[0, 1, 2], [2, 1, 0], [1, 0, 2]] {
            let mut votes = Votes::new(3);
            for index in order {
                votes.take(index, named(if index == 1 { "a" } else { "b" }, 7));
            }
            assert_eq!(votes.elected(None).unwrap().host, "b");
        }
    }

    #[test]
    fn answers_without_a_name_elect_none_and_keep_their_error() {
        use StoreErrorKind::*;
        let unauthenticated = || failed(Unauthenticated);
        for (answers, kind) in [
            (
                [SentinelAnswer::Unknown, SentinelAnswer::Unknown],
                Unavailable,
            ),
            ([unauthenticated(), unauthenticated()], Unauthenticated),
            ([unauthenticated(), failed(Unavailable)], Unavailable),
            ([failed(Forbidden), SentinelAnswer::Unknown], Unavailable),
        ] {
            let mut votes = Votes::new(2);
            for (index, answer) in answers.into_iter().enumerate() {
                assert!(!votes.take(index, answer));
            }
            assert_eq!(votes.elected(None), None);
            assert_eq!(votes.failure(), kind);
        }
    }
}
