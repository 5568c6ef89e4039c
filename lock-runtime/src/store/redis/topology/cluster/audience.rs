//! The waiters of each slot, and the subscriptions that they need. This module does no I/O, and
//! its callers pass the time.
//!
//! A slot has one channel, however many waiters it has. The channel is subscribed to while there
//! are waiters and a little longer, so that a lock that alternates between processes is not
//! subscribed to each time.

use std::{collections::HashMap, time::Duration};

use super::slots::{Address, Slot};
use crate::{
    request::{key::LockKey, spec::LockKind},
    shell::time::Instant,
    store::{Hold, Token, Waiter},
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

#[derive(Default)]
struct Seat {
    /// For each waiter its lock, and the time of its latest request. A waiter polls at least once a
    /// second, so one without a recent request is gone.
    waiting: HashMap<Token, (Wanted, Instant)>,
    /// The node at which the channel is subscribed to, requested or forbidden. A forbidden
    /// subscription is not requested again.
    node: Option<Address>,
    /// A subscription is under way.
    asked: bool,
    /// The time since which the slot has had no waiters.
    empty_since: Option<Instant>,
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
        let seat = self.seats.entry(slot).or_default();
        seat.empty_since = None;
        let wanted = (hold.key.clone(), hold.mode.kind());
        seat.waiting.insert(hold.token, (wanted, now));
        if seat.node.as_ref() == Some(node) {
            return Todo::default();
        }
        seat.asked = true;
        Todo {
            subscribe: true,
            unsubscribe: seat.node.replace(node.clone()),
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
        let Some(seat) = self.seat_at(slot, node) else {
            return Vec::new();
        };
        seat.asked = false;
        seat.wanted()
    }

    /// Records that the channel is no longer subscribed to at `node`. Returns the locks to poll; a
    /// poll also subscribes again.
    pub(super) fn unsubscribed(&mut self, slot: Slot, node: &Address) -> Vec<Wanted> {
        let Some(seat) = self.seat_at(slot, node) else {
            return Vec::new();
        };
        seat.node = None;
        seat.wanted()
    }

    fn seat_at(&mut self, slot: Slot, node: &Address) -> Option<&mut Seat> {
        let seat = self.seats.get_mut(&slot)?;
        (seat.node.as_ref() == Some(node)).then_some(seat)
    }

    /// Records that the subscription at `node` has failed. The next poll subscribes again, unless
    /// the node forbids it.
    pub(super) fn failed(&mut self, slot: Slot, node: &Address, forbidden: bool) {
        if let Some(seat) = self.seat_at(slot, node).filter(|seat| seat.asked) {
            seat.asked = false;
            if !forbidden {
                seat.node = None;
            }
        }
    }

    /// Records the loss of the connection to `node`. Returns the locks to poll.
    pub(super) fn lost(&mut self, node: &Address) -> Vec<Wanted> {
        let mut wanted = Vec::new();
        let seats = self.seats.values_mut();
        for seat in seats.filter(|seat| seat.node.as_ref() == Some(node)) {
            seat.node = None;
            wanted.extend(seat.wanted());
        }
        wanted
    }

    /// Removes the slots that have had no waiters for [`LINGER`]. Returns the channels to
    /// unsubscribe from.
    pub(super) fn sweep(&mut self, now: Instant) -> Vec<(Slot, Address)> {
        let mut left = Vec::new();
        self.seats.retain(|slot, seat| {
            let is_recent = |heard| now.saturating_duration_since(heard) < Waiter::TTL;
            seat.waiting.retain(|_, (_, heard)| is_recent(*heard));
            if !seat.waiting.is_empty() {
                return true;
            }
            let empty_since = *seat.empty_since.get_or_insert(now);
            let lingers = now.saturating_duration_since(empty_since) < LINGER;
            if !lingers {
                left.extend(seat.node.take().map(|node| (*slot, node)));
            }
            lingers
        });
        left
    }

    /// Returns whether a channel is subscribed to, requested or forbidden at `node`.
    pub(super) fn listens_at(&self, node: &Address) -> bool {
        let mut seats = self.seats.values();
        seats.any(|seat| seat.node.as_ref() == Some(node))
    }
}

impl Seat {
    /// The locks that have waiters.
    fn wanted(&self) -> Vec<Wanted> {
        let waiting = self.waiting.values();
        waiting.map(|(wanted, _)| wanted.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::spec::Mode;

    const SLOT: Slot = 7;

    /// The waiters of a test, and its time.
    struct Room {
        audience: Audience,
        now: Instant,
    }

    impl Room {
        fn new() -> Self {
            let (audience, now) = (Audience::default(), Instant::now());
            Self { audience, now }
        }

        fn waits(&mut self, hold: &Hold, name: &str) -> Todo {
            self.audience.waits(SLOT, hold, &node(name), self.now)
        }

        fn leaves(&mut self, hold: &Hold) -> bool {
            self.audience.leaves(SLOT, hold.token, self.now)
        }

        fn sweep(&mut self) -> Vec<(Slot, Address)> {
            self.audience.sweep(self.now)
        }
    }

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

    fn nothing() -> Todo {
        Todo::default()
    }

    #[test]
    fn a_slot_is_subscribed_to_once_however_many_wait() {
        let mut room = Room::new();
        assert_eq!(room.waits(&hold(), "a"), subscribe());
        assert_eq!(room.waits(&hold(), "a"), nothing(), "it is under way");
        let missed = room.audience.subscribed(SLOT, &node("a"));
        assert_eq!(missed.len(), 2, "earlier messages may have been missed");
        assert_eq!(room.waits(&hold(), "a"), nothing());
        let other_slot = room.audience.waits(SLOT + 1, &hold(), &node("a"), room.now);
        assert_eq!(other_slot, subscribe());
    }

    #[test]
    fn a_channel_outlives_its_last_waiter_by_a_little() {
        let mut room = Room::new();
        let (first, second) = (hold(), hold());
        room.waits(&first, "a");
        room.waits(&second, "a");
        room.audience.subscribed(SLOT, &node("a"));
        assert!(!room.leaves(&first));
        assert!(room.leaves(&second));
        assert!(!room.leaves(&second), "it was removed before");
        room.now += LINGER / 2;
        assert!(room.sweep().is_empty());
        assert_eq!(room.waits(&first, "a"), nothing(), "still subscribed to");
        room.now += LINGER / 2;
        assert!(room.sweep().is_empty(), "the slot has a waiter again");
        assert!(room.leaves(&first));
        room.now += LINGER;
        assert_eq!(room.sweep(), [(SLOT, node("a"))]);
        assert!(room.audience.is_empty());
    }

    #[test]
    fn who_was_not_heard_of_for_long_keeps_no_channel() {
        let mut room = Room::new();
        room.waits(&hold(), "a");
        room.now += Waiter::TTL;
        assert!(room.sweep().is_empty());
        room.now += LINGER;
        assert_eq!(room.sweep(), [(SLOT, node("a"))]);
    }

    #[test]
    fn a_slot_that_has_moved_is_subscribed_to_where_it_is() {
        let mut room = Room::new();
        let (a, b, waiter) = (node("a"), node("b"), hold());
        room.waits(&waiter, "a");
        room.audience.subscribed(SLOT, &a);
        let moved = Todo {
            subscribe: true,
            unsubscribe: Some(node("a")),
        };
        assert_eq!(room.waits(&waiter, "b"), moved);
        let left = room.audience.unsubscribed(SLOT, &a);
        assert!(left.is_empty(), "not subscribed to there any more");
        assert!(room.audience.lost(&a).is_empty());
        assert_eq!(room.audience.subscribed(SLOT, &b), wanted());
        assert!(room.audience.listens_at(&b) && !room.audience.listens_at(&a));
    }

    #[test]
    fn a_lost_subscription_is_asked_for_again() {
        let mut room = Room::new();
        let (a, waiter) = (node("a"), hold());
        for lose in [Audience::lost, |audience: &mut Audience, node: &Address| {
            audience.unsubscribed(SLOT, node)
        }] {
            assert_eq!(room.waits(&waiter, "a"), subscribe());
            room.audience.subscribed(SLOT, &a);
            assert_eq!(lose(&mut room.audience, &a), wanted());
        }
        assert_eq!(room.waits(&waiter, "a"), subscribe());
        room.audience.failed(SLOT, &a, false);
        assert_eq!(room.waits(&waiter, "a"), subscribe());
    }

    #[test]
    fn a_forbidden_channel_is_asked_for_once() {
        let mut room = Room::new();
        let (a, waiter) = (node("a"), hold());
        room.waits(&waiter, "a");
        room.audience.failed(SLOT, &a, true);
        assert_eq!(room.waits(&waiter, "a"), nothing());
        room.audience.lost(&a);
        let again = room.waits(&waiter, "a");
        assert_eq!(again, subscribe(), "another connection may be allowed");
    }
}
