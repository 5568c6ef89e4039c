//! What stands for this process in the store's line. Decides only; it is told the time, the replies and the pushes.

use std::time::Duration;

use tokio::time::Instant;

use super::Wish;
use crate::{
    fence::FencingToken,
    spec::Mode,
    store::{Grant, LONGEST_POLL, Token},
};

/// The first pause between two questions to a store that keeps no line.
pub(super) const FIRST_PAUSE: Duration = Duration::from_millis(2);
/// The longest one.
pub(super) const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// So long after it was asked with, a place whose outcome nobody has told is given up: more than any call to the store takes.
const UNTOLD: Duration = Duration::from_secs(1);

/// What stands for this process at the store: the head of a line asks with it, and leaves it to the next with the same wish (PROTOCOL 17).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// The name under which the store was asked.
    pub(crate) token: Token,
    pub(crate) mode: Mode,
    pub(crate) lease: Duration,
    standing: Standing,
    /// Told by the store, and not believed yet.
    pushed: Option<Grant>,
    /// The next question is due then.
    pub(super) ask_at: Instant,
    pause: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    /// The store does not know the token.
    Outside,
    /// A request is under way that may put it in line.
    Asked,
    /// It stands in line.
    Queued {
        /// When the latest request was sent that was answered so: it surely did not hold the lock before (PROTOCOL 4).
        as_of: Instant,
        /// The key's fencing token by that reply: an older grant is not for this one (PROTOCOL 3).
        counter: Option<FencingToken>,
    },
}

/// A grant out of the line that may be believed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Proven {
    pub(crate) grant: Grant,
    /// Its lease is counted from here (PROTOCOL 4).
    pub(crate) as_of: Instant,
}

impl Place {
    pub(super) fn new(wish: Wish, now: Instant) -> Self {
        Self {
            token: Token::random(),
            mode: wish.mode,
            lease: wish.lease,
            standing: Standing::Outside,
            pushed: None,
            ask_at: now,
            pause: FIRST_PAUSE,
        }
    }

    pub(super) fn fits(&self, wish: Wish) -> bool {
        (self.mode, self.lease) == (wish.mode, wish.lease)
    }

    /// A request is about to be sent, whose outcome somebody will tell. Says whether it is to be a poll.
    pub(super) fn asked(&mut self, now: Instant) -> bool {
        let in_line = self.is_queued();
        if !in_line {
            self.standing = Standing::Asked;
            self.ask_at = now + UNTOLD;
        }
        in_line
    }

    pub(super) fn is_queued(&self) -> bool {
        matches!(self.standing, Standing::Queued { .. })
    }

    pub(super) fn is_asked(&self) -> bool {
        self.standing == Standing::Asked
    }

    /// May the store know the token?
    pub(super) fn is_known(&self) -> bool {
        self.standing != Standing::Outside
    }

    /// A request sent at `sent` was answered "in line". `jitter` in 0..1 keeps those who wait from asking in step.
    pub(super) fn queued(
        &mut self,
        sent: Instant,
        counter: Option<FencingToken>,
        holder_ttl: Option<Duration>,
        now: Instant,
        jitter: f64,
    ) {
        match self.standing {
            // Overtaken by a later one.
            Standing::Queued { as_of, .. } if sent < as_of => {}
            _ => {
                self.standing = Standing::Queued {
                    as_of: sent,
                    counter,
                }
            }
        }
        self.pause = FIRST_PAUSE;
        // Half a lease, so that a pushed grant has validity left; at the holder's expiry, as nobody else may notice it.
        let poll = LONGEST_POLL
            .min(self.lease / 2)
            .mul_f64(0.75 + 0.25 * jitter);
        self.ask_at = now
            + holder_ttl.map_or(poll, |ttl| {
                poll.min(ttl.saturating_add(Duration::from_millis(1)))
            });
    }

    /// The store pushed a grant.
    pub(super) fn pushed(&mut self, grant: Grant) {
        if self.pushed.is_none_or(|pushed| pushed.fence < grant.fence) {
            self.pushed = Some(grant);
        }
    }

    /// What the store knows of it, or has pushed, may be out of date: it is asked by `at`.
    pub(super) fn doubt(&mut self, at: Instant) {
        if !self.is_asked() {
            self.pushed = None;
            self.ask_at = self.ask_at.min(at);
        }
    }

    /// The pushed grant, once a reply has shown that it is not an old one.
    pub(super) fn proven(&self) -> Option<Proven> {
        let Standing::Queued { as_of, counter } = self.standing else {
            return None;
        };
        let grant = self
            .pushed
            .filter(|grant| counter.is_none_or(|counter| grant.fence > counter))?;
        Some(Proven { grant, as_of })
    }

    /// The store refused, and keeps no line: the next question is due after a pause that grows, at the latest when the holder's
    /// lease ends.
    pub(super) fn refused(&mut self, now: Instant, holder_ttl: Option<Duration>, jitter: f64) {
        // Of several servers some may have said yes: that name is being given up there (PROTOCOL 1).
        self.rename();
        self.try_later(now, holder_ttl, jitter);
    }

    /// What was asked had no answer, or a useless one.
    pub(super) fn try_later(&mut self, now: Instant, holder_ttl: Option<Duration>, jitter: f64) {
        self.pushed = None;
        let pause = self.pause.mul_f64(0.5 + 0.5 * jitter);
        self.pause = self.pause.mul_f64(1.6).min(LONGEST_PAUSE);
        // Past the very millisecond, so that the question does not come a moment too early.
        let expiry = holder_ttl.map_or(LONGEST_PAUSE, |ttl| {
            ttl.saturating_add(Duration::from_millis(1))
        });
        self.ask_at = now + pause.min(expiry);
    }

    /// A fresh name, where the old one must not be believed any more (PROTOCOL 1).
    pub(super) fn rename(&mut self) {
        self.token = Token::random();
        self.standing = Standing::Outside;
        self.pushed = None;
    }
}
