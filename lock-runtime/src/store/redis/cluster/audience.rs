//! Who waits in which slot, and so which channels are to be subscribed to, and where. Decides only; it is told the time.
//!
//! A slot has one channel, however many wait there, and is listened to only while somebody does, and a little longer: a lock that goes
//! back and forth need not be subscribed to each time.

use std::{collections::HashMap, time::Duration};

use tokio::time::Instant;

use super::slots::{Address, Slot};
use crate::{
    key::LockKey,
    spec::LockKind,
    store::{ENTRY_TTL, Hold, Token},
};

/// A channel is kept for so long after the last who waited there.
pub(super) const LINGER: Duration = Duration::from_secs(1);

/// A lock that somebody waits for.
pub(super) type Wanted = (LockKey, LockKind);

/// Those who wait, by slot.
#[derive(Default)]
pub(super) struct Audience {
    seats: HashMap<Slot, Seat>,
}

struct Seat {
    waiting: HashMap<Token, Waiting>,
    standing: Standing,
    /// Nobody waits here since then.
    empty_since: Option<Instant>,
}

struct Waiting {
    key: LockKey,
    kind: LockKind,
    /// Whoever stands in line asks at least once a second, so one who was not heard of for long is gone.
    heard: Instant,
}

#[derive(Clone, PartialEq, Eq, Debug)]
enum Standing {
    Out,
    /// A subscription is under way.
    Asked(Address),
    /// What is told there is heard.
    In(Address),
    /// The node forbids it. It is not asked again.
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

/// What is to be done for one who waits.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Todo {
    /// Subscribe to the slot's channel at the node.
    pub(super) subscribe: bool,
    /// It has moved away from there.
    pub(super) unsubscribe: Option<Address>,
}

impl Audience {
    pub(super) fn is_empty(&self) -> bool {
        self.seats.is_empty()
    }

    /// `hold` stands in line, as `node` has said.
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

    /// `token` does not wait any more. Says whether the slot has become empty by that.
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

    /// The channel is heard at `node` from now on. Those who wait may have missed what was told before.
    pub(super) fn subscribed(&mut self, slot: Slot, node: &Address) -> Vec<Wanted> {
        self.stands(slot, node, Standing::In(node.clone()))
    }

    /// The channel is no longer heard at `node`. Those who wait are to ask, and ask for it anew.
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

    /// The subscription at `node` did not come about; whoever asks next tries again, unless the node has forbidden it.
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

    /// Nothing is heard from `node` any more. Those who wait there are to ask.
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

    /// Forgets the channels that nobody has waited at for a while; each is to be unsubscribed from.
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

    /// Is any channel listened to at `node`, or to be?
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
            "it is under way"
        );
        assert_eq!(
            audience.subscribed(SLOT, &node("a")).len(),
            2,
            "what was told before is asked for"
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
            "it has left already"
        );
        assert!(audience.sweep(now + LINGER / 2).is_empty());
        assert_eq!(
            audience.waits(SLOT, &first, &node("a"), now + LINGER / 2),
            Todo::default(),
            "it is still heard"
        );
        assert!(
            audience.sweep(now + LINGER).is_empty(),
            "somebody waits again"
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
            "of no interest any more"
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
            "another connection may be let in"
        );
    }
}
