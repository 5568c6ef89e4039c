//! A search through all schedules of a small scope. A schedule is a list of choices; the next one
//! differs in the last choice that has an alternative, and is run from the start.
//!
//! Events of different processes, and of a process and the store, have the same outcome in either
//! order. Of such orders only one is run ([sleep sets], by Godefroid). Every state is reached if
//! the number of choices is not limited.
//!
//! [sleep sets]: https://doi.org/10.1007/3-540-60761-7

use std::time::Duration;

/// The state that an event changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Actor {
    Store,
    Process(usize),
    /// The event changes the time, or everything.
    All,
}

/// The time of an event, since the start of the run, and its number.
pub(super) type EventId = (Duration, u64);

/// An event that can occur next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Move {
    pub(super) event: EventId,
    actor: Actor,
}

impl Move {
    pub(super) fn new(event: EventId, actor: Actor) -> Self {
        Self { event, actor }
    }

    fn is_independent_of(self, other: Self) -> bool {
        self.actor != other.actor && self.actor != Actor::All && other.actor != Actor::All
    }
}

/// The deviations from a network without faults.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Faults {
    /// How often time passes, until the next timer, while messages are in flight.
    pub(super) delays: usize,
    pub(super) lost: usize,
    pub(super) doubled: usize,
}

#[derive(Default)]
pub(super) struct Search {
    /// The choices, each with the number of its alternatives.
    choices: Vec<(usize, usize)>,
    /// The number of choices that this run has made.
    made: usize,
    /// Events that lead to orders which were run before.
    asleep: Vec<Move>,
    faults: Faults,
    left: Faults,
    /// The number of choices whose alternatives are run. All later ones are the first alternative.
    depth: usize,
    /// A run made more choices than that.
    pub(super) is_cut: bool,
    /// All orders that continue this run were run before.
    pub(super) is_pruned: bool,
}

impl Search {
    pub(super) fn new(faults: Faults, depth: usize) -> Self {
        Self {
            faults,
            left: faults,
            depth,
            ..Self::default()
        }
    }

    /// Returns the number of the alternative that this run takes.
    fn choose_one(&mut self, alternatives: usize) -> usize {
        if alternatives == 1 || self.made == self.depth {
            self.is_cut |= alternatives > 1;
            return 0;
        }
        if self.made == self.choices.len() {
            self.choices.push((0, alternatives));
        }
        self.made += 1;
        self.choices[self.made - 1].0
    }

    /// Chooses the next event: one of those that can occur now, or the passage of time. `None` if
    /// there is none, or if the run is pruned.
    pub(super) fn choose(&mut self, moves: Vec<Move>, wait: Option<Move>) -> Option<EventId> {
        let is_idle = moves.is_empty();
        let asleep = std::mem::take(&mut self.asleep);
        let awake = moves.into_iter().filter(|it| !asleep.contains(it));
        let wait = wait.filter(|_| is_idle || self.left.delays > 0);
        let moves: Vec<_> = awake.chain(wait).collect();
        if moves.is_empty() {
            self.is_pruned = !is_idle;
            return None;
        }
        let chosen = self.choose_one(moves.len());
        let next = moves[chosen];
        let others = asleep.iter().chain(&moves[..chosen]);
        let asleep = others.filter(|it| it.is_independent_of(next));
        self.asleep = asleep.copied().collect();
        if !is_idle && Some(next) == wait {
            self.left.delays -= 1;
        }
        Some(next.event)
    }

    /// Chooses how many copies of a message arrive.
    pub(super) fn copies(&mut self) -> usize {
        let fates = [(1, 1), (0, self.left.lost), (2, self.left.doubled)];
        let fates: Vec<_> = fates.into_iter().filter(|(_, left)| *left > 0).collect();
        let (copies, _) = fates[self.choose_one(fates.len())];
        match copies {
            0 => self.left.lost -= 1,
            2 => self.left.doubled -= 1,
            _ => {}
        }
        copies
    }

    /// Prepares the next schedule. Returns `false` if there is none.
    pub(super) fn advance(&mut self) -> bool {
        self.restart();
        while let Some((chosen, alternatives)) = self.choices.last_mut() {
            *chosen += 1;
            if chosen < alternatives {
                return true;
            }
            self.choices.pop();
        }
        false
    }

    /// Prepares the same schedule again.
    pub(super) fn restart(&mut self) {
        (self.made, self.left, self.is_pruned) = (0, self.faults, false);
        self.asleep.clear();
    }
}
