//! The results of a storm.

use std::{fmt, time::Duration};

use super::{Chronicle, Gap, Operation, TokenViolations};
use crate::subject::promise;

/// The results of a storm. Its text contains all of them.
#[derive(Debug)]
pub struct Report {
    store: String,
    seed: u64,
    length: Duration,
    grants: usize,
    codes: Vec<(String, usize)>,
    gaps: Vec<Gap>,
    pub tokens: TokenViolations,
    pub overlaps: Vec<String>,
    early: Vec<String>,
    late: Vec<String>,
    extensions: usize,
    short_extensions: Vec<String>,
    /// See [`Chronicle::operations`].
    pub operations: Vec<Operation>,
}

impl Report {
    pub fn new(store: String, chronicle: &Chronicle, length: Duration, seed: u64) -> Self {
        Self {
            store,
            seed,
            length,
            grants: chronicle.grants(),
            codes: chronicle
                .codes()
                .into_iter()
                .map(|(code, count)| (code.to_owned(), count))
                .collect(),
            gaps: chronicle.gaps(),
            tokens: chronicle.token_violations(),
            overlaps: chronicle.overlaps(),
            early: chronicle.early(),
            late: chronicle.late_answers(),
            extensions: chronicle.extensions(),
            short_extensions: chronicle.short_extensions(),
            operations: chronicle.operations(),
        }
    }

    /// Asserts that fencing tokens order the holders, whatever failed.
    pub fn assert_fenced(&self) {
        self.assert_ordered();
        promise!(
            "each reader has a fencing token of its own",
            self.tokens.shared_by_readers.is_empty(),
            "{self}"
        );
    }

    /// Asserts the same, except that readers may share a token.
    pub fn assert_ordered(&self) {
        assert!(self.grants > 0, "nothing was granted\n{self}");
        promise!(
            "fencing tokens of a key are unique and increase",
            self.tokens.others.is_empty(),
            "{self}"
        );
    }

    /// Asserts that no holder relied on a lock that another one held.
    pub fn assert_exclusive(&self) {
        promise!(
            "no holder relies on a lock that another one holds",
            self.overlaps.is_empty(),
            "{self}"
        );
    }

    /// Asserts that every lock was kept for its `min_hold`.
    pub fn assert_kept(&self) {
        promise!(
            "a lock is kept for its min_hold",
            self.early.is_empty(),
            "{self}"
        );
    }

    /// Asserts that no lock was free for longer than allowed while a request waited for it.
    pub fn assert_served(&self) {
        let idle: Vec<_> = self
            .gaps
            .iter()
            .filter(|gap| gap.length > gap.allowed)
            .collect();
        let requests: Vec<_> = idle.iter().flat_map(|gap| &gap.requests).collect();
        promise!(
            "no lock is free for long while a request waits for it",
            idle.is_empty(),
            "{idle:#?}\n{requests:#?}\n{self}"
        );
    }

    /// Asserts that no request was answered late.
    pub fn assert_answered(&self) {
        promise!(
            "no request is answered late",
            self.late.is_empty(),
            "{self}"
        );
    }

    /// Asserts that every confirmed extension was one.
    pub fn assert_extended(&self) {
        promise!(
            "a lease that was extended is valid for as long as asked",
            self.short_extensions.is_empty(),
            "{self}"
        );
    }

    pub fn assert_all(&self) {
        self.assert_fenced();
        self.assert_extended();
        self.assert_exclusive();
        self.assert_kept();
        self.assert_served();
        self.assert_answered();
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            store,
            length,
            seed,
            grants,
            ..
        } = self;
        write!(
            f,
            "storm of {length:.1?} on {store} with the seed {seed}: {grants} grants, {} extensions",
            self.extensions
        )?;
        self.codes
            .iter()
            .try_for_each(|(code, count)| write!(f, ", {count} {code}"))?;
        for gap in &self.gaps {
            let Gap {
                key,
                permits,
                length,
                allowed,
                explained_by,
                ..
            } = gap;
            let lock = if *permits { "permits" } else { "lock" };
            write!(
                f,
                "\n  {lock} {key} was free and waited for {length:.1?} of {allowed:.1?} allowed"
            )?;
            if let Some(last) = explained_by.last() {
                write!(f, ", after {} faults, the last: {last}", explained_by.len())?;
            }
        }
        let TokenViolations {
            shared_by_readers,
            others,
        } = &self.tokens;
        for (what, found) in [
            ("shared tokens", shared_by_readers),
            ("tokens", others),
            ("overlaps", &self.overlaps),
            ("early", &self.early),
            ("late", &self.late),
            ("short extensions", &self.short_extensions),
        ] {
            write!(f, "\n  {what}: {}", found.len())?;
            found
                .iter()
                .take(5)
                .try_for_each(|line| write!(f, "\n    {line}"))?;
        }
        Ok(())
    }
}
