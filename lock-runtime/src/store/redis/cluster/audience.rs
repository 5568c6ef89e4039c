//! The waiters of each slot, and the subscriptions that they need. This module does no I/O, and
//! its callers pass the time.
//!
//! A slot has one channel, however many waiters it has. The channel is subscribed to while there
//! are waiters and a little longer, so that a lock that alternates between processes is not
//! subscribed to each time.

use std::{collections::HashMap, time::Duration};

use tokio::time::Instant;

use super::slots::{Address, Slot};
use crate::{
    key::LockKey,
    spec::LockKind,
    store::{ENTRY_TTL, Hold, Token},
};

/// The time for which a channel outlives its last waiter.
pub(super) const LINGER: Duration = Duration::from_secs(1);

/// A lock that has waiters.
pub(super) type Wanted = (LockKey, LockKind);

/// The waiters, by slot.
#[derive(Default)]
pub(super) struct Audience {
    seats: HashMap<Slot, Seat>,
}

struct Seat {
    waiting: HashMap<Token, Waiting>,
    standing: Standing,
    /// The time since which the slot has had no waiters.
    empty_since: Option<Instant>,
}

struct Waiting {
    key: LockKey,
    kind: LockKind,
    /// The time of the latest request. A waiter polls at least once a second, so one without a
    /// recent request is gone.
    heard: Instant,
}

#[derive(Clone, PartialEq, Eq, Debug)]
enum Standing {
    Out,
    /// A subscription is under way.
    Asked(Address),
    /// The channel is subscribed to.
    In(Address),
    /// The node forbids the subscription, which is not requested again.
    Refused(Address),
}

impl Standing {
    fn node(&self) -> Option<&Address> {
        match self {
            Self::Out => None,
            Self::Asked(node) | Self::In(node) | Self::Refused(node) => Some(node),
        }
    }
}

/// The actions that a new waiter requires.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Todo {
    /// Subscribe to the slot's channel at the node.
    pub(super) subscribe: bool,
    /// Unsubscribe from it at this node, from which the slot has moved.
    pub(super) unsubscribe: Option<Address>,
}

impl Audience {
    pub(super) fn is_empty(&self) -> bool {
        self.seats.is_empty()
    }

    /// Registers `hold`, which is queued at `node`.
    pub(super) fn waits(&mut self, slot: Slot, hold: &Hold, node: &Address, now: Instant) -> Todo {
        let seat = self.seats.entry(slot).or_insert_with(|| Seat {
            waiting: HashMap::new(),
            standing: Standing::Out,
            empty_since: None,
        });
        seat.empty_since = None;
        let waiting = Waiting {
            key: hold.key.clone(),
            kind: hold.mode.kind(),
            heard: now,
        };
        seat.waiting.insert(hold.token, waiting);
        if seat.standing.node() == Some(node) {
            return Todo::default();
        }
        let before = std::mem::replace(&mut seat.standing, Standing::Asked(node.clone()));
        Todo {
            subscribe: true,
            unsubscribe: before.node().cloned(),
        }
    }

    /// Removes a waiter. Returns whether it was the last one of its slot.
    pub(super) fn leaves(&mut self, slot: Slot, token: Token, now: Instant) -> bool {
        let Some(seat) = self.seats.get_mut(&slot) else {
            return false;
        };
        let emptied = seat.waiting.remove(&token).is_some() && seat.waiting.is_empty();
        if emptied {
            seat.empty_since = Some(now);
        }
        emptied
    }

    /// Records that the channel is subscribed to at `node`. Returns the locks to poll, as their
    /// waiters may have missed earlier messages.
    pub(super) fn subscribed(&mut self, slot: Slot, node: &Address) -> Vec<Wanted> {
        self.stands(slot, node, Standing::In(node.clone()))
    }

    /// Records that the channel is no longer subscribed to at `node`. Returns the locks to poll; a
    /// poll also subscribes again.
    pub(super) fn unsubscribed(&mut self, slot: Slot, node: &Address) -> Vec<Wanted> {
        self.stands(slot, node, Standing::Out)
    }

    fn stands(&mut self, slot: Slot, node: &Address, standing: Standing) -> Vec<Wanted> {
        match self
            .seats
            .get_mut(&slot)
            .filter(|seat| seat.standing.node() == Some(node))
        {
            Some(seat) => {
                seat.standing = standing;
                seat.wanted().collect()
            }
            None => Vec::new(),
        }
    }

    /// Records that the subscription at `node` has failed. The next poll subscribes again, unless
    /// the node forbids it.
    pub(super) fn failed(&mut self, slot: Slot, node: &Address, forbidden: bool) {
        if let Some(seat) = self.seats.get_mut(&slot)
            && seat.standing == Standing::Asked(node.clone())
        {
            seat.standing = if forbidden {
                Standing::Refused(node.clone())
            } else {
                Standing::Out
            };
        }
    }

    /// Records the loss of the connection to `node`. Returns the locks to poll.
    pub(super) fn lost(&mut self, node: &Address) -> Vec<Wanted> {
        let mut wanted = Vec::new();
        for seat in self
            .seats
            .values_mut()
            .filter(|seat| seat.standing.node() == Some(node))
        {
            seat.standing = Standing::Out;
            wanted.extend(seat.wanted());
        }
        wanted
    }

    /// Removes the slots that have had no waiters for [`LINGER`]. Returns the channels to
    /// unsubscribe from.
    pub(super) fn sweep(&mut self, now: Instant) -> Vec<(Slot, Address)> {
        let mut left = Vec::new();
        self.seats.retain(|slot, seat| {
            seat.waiting
                .retain(|_, waiting| now.saturating_duration_since(waiting.heard) < ENTRY_TTL);
            if seat.waiting.is_empty() && seat.empty_since.is_none() {
                seat.empty_since = Some(now);
            }
            let over = seat
                .empty_since
                .is_some_and(|since| now.saturating_duration_since(since) >= LINGER);
            if over {
                left.extend(seat.standing.node().map(|node| (*slot, node.clone())));
            }
            !over
        });
        left
    }

    /// Returns whether a channel is subscribed to, requested or forbidden at `node`.
    pub(super) fn listens_at(&self, node: &Address) -> bool {
        self.seats
            .values()
            .any(|seat| seat.standing.node() == Some(node))
    }
}

impl Seat {
    fn wanted(&self) -> impl Iterator<Item = Wanted> {
        self.waiting
            .values()
            .map(|waiting| (waiting.key.clone(), waiting.kind))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::Mode;

    const SLOT: Slot = 7;

    fn node(name: &str) -> Address {
        Address::new(name, 1)
    }

    fn hold() -> Hold {
        Hold::new(LockKey::new("k").unwrap(), Mode::Exclusive, Token::random())
    }

    fn wanted() -> Vec<Wanted> {
        vec![(LockKey::new("k").unwrap(), LockKind::Lock)]
    }

    fn subscribe() -> Todo {
        Todo {
            subscribe: true,
            unsubscribe: None,
        }
    }

    #[test]
    fn a_slot_is_subscribed_to_once_however_many_wait() {
        let (mut audience, now) = (Audience::default(), Instant::now());
        assert_eq!(audience.waits(SLOT, &hold(), &node("a"), now), subscribe());
        assert_eq!(
            audience.waits(SLOT, &hold(), &node("a"), now),
            Todo::default(),
            "a subscription is under way"
        );
        assert_eq!(
            audience.subscribed(SLOT, &node("a")).len(),
            2,
            "earlier messages may have been missed"
        );
        assert_eq!(
            audience.waits(SLOT, &hold(), &node("a"), now),
            Todo::default()
        );
        assert_eq!(
            audience.waits(SLOT + 1, &hold(), &node("a"), now),
            subscribe()
        );
    }

    #[test]
    fn a_channel_outlives_the_last_who_waits_by_a_little() {
        let (mut audience, now) = (Audience::default(), Instant::now());
        let (first, second) = (hold(), hold());
        audience.waits(SLOT, &first, &node("a"), now);
        audience.waits(SLOT, &second, &node("a"), now);
        audience.subscribed(SLOT, &node("a"));
        assert!(!audience.leaves(SLOT, first.token, now));
        assert!(audience.leaves(SLOT, second.token, now));
        assert!(
            !audience.leaves(SLOT, second.token, now),
            "it was removed before"
        );
        assert!(audience.sweep(now + LINGER / 2).is_empty());
        assert_eq!(
            audience.waits(SLOT, &first, &node("a"), now + LINGER / 2),
            Todo::default(),
            "it is still subscribed to"
        );
        assert!(
            audience.sweep(now + LINGER).is_empty(),
            "the slot has a waiter again"
        );
        assert!(audience.leaves(SLOT, first.token, now + LINGER));
        assert_eq!(audience.sweep(now + 2 * LINGER), [(SLOT, node("a"))]);
        assert!(audience.is_empty());
    }

    #[test]
    fn who_was_not_heard_of_for_long_keeps_no_channel() {
        let (mut audience, now) = (Audience::default(), Instant::now());
        audience.waits(SLOT, &hold(), &node("a"), now);
        assert!(audience.sweep(now + ENTRY_TTL).is_empty());
        assert_eq!(
            audience.sweep(now + ENTRY_TTL + LINGER),
            [(SLOT, node("a"))]
        );
    }

    #[test]
    fn a_slot_that_has_moved_is_subscribed_to_where_it_is() {
        let (mut audience, now) = (Audience::default(), Instant::now());
        let waiter = hold();
        audience.waits(SLOT, &waiter, &node("a"), now);
        audience.subscribed(SLOT, &node("a"));
        let (a, b) = (node("a"), node("b"));
        let moved = Todo {
            subscribe: true,
            unsubscribe: Some(node("a")),
        };
        assert_eq!(audience.waits(SLOT, &waiter, &b, now), moved);
        assert!(
            audience.unsubscribed(SLOT, &a).is_empty(),
            "not subscribed to there any more"
        );
        assert!(audience.lost(&a).is_empty());
        assert_eq!(audience.subscribed(SLOT, &b), wanted());
        assert!(audience.listens_at(&b) && !audience.listens_at(&a));
    }

    #[test]
    fn a_lost_subscription_is_asked_for_again() {
        let (mut audience, now) = (Audience::default(), Instant::now());
        let waiter = hold();
        let a = node("a");
        for lose in [Audience::lost, |audience: &mut Audience, node: &Address| {
            audience.unsubscribed(SLOT, node)
        }] {
            assert_eq!(audience.waits(SLOT, &waiter, &a, now), subscribe());
            audience.subscribed(SLOT, &a);
            assert_eq!(lose(&mut audience, &a), wanted());
        }
        assert_eq!(audience.waits(SLOT, &waiter, &a, now), subscribe());
        audience.failed(SLOT, &a, false);
        assert_eq!(audience.waits(SLOT, &waiter, &a, now), subscribe());
    }

    #[test]
    fn a_forbidden_channel_is_asked_for_once() {
        let (mut audience, now) = (Audience::default(), Instant::now());
        let waiter = hold();
        audience.waits(SLOT, &waiter, &node("a"), now);
        audience.failed(SLOT, &node("a"), true);
        assert_eq!(
            audience.waits(SLOT, &waiter, &node("a"), now),
            Todo::default()
        );
        audience.lost(&node("a"));
        assert_eq!(
            audience.waits(SLOT, &waiter, &node("a"), now),
            subscribe(),
            "another connection may be allowed"
        );
    }
}
