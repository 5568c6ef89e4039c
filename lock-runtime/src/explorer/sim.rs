//! The shared state of a run: the virtual clock, the event queue, the network, the dice, the trace.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    sync::{Arc, Mutex},
    task::{Wake, Waker},
    time::Duration,
};

use tokio::time::Instant;

use super::{
    Broken,
    dice::Dice,
    message::{Call, Reply, Request},
    schedule::{Action, Network},
};
use crate::{
    fence::FencingToken,
    key::LockKey,
    store::{Grant, Hold, Token},
    sync::lock,
};

/// A process, and the number of its restarts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Who {
    pub(super) process: usize,
    pub(super) life: u32,
}

pub(super) enum Event {
    /// A request reaches the store.
    AtStore(Who, Call, Request),
    /// A reply reaches the sender of the request.
    Replied(Who, Call, Reply),
    Pushed(Who, Hold, Grant),
    Timer(Who, Timer),
    Action(Action),
}

/// The timers of a process. A second number distinguishes the current wait from earlier ones.
#[derive(Clone, Copy, Debug)]
pub(super) enum Timer {
    /// The time-out of a call to the store.
    Call(Call),
    Waiter(u32, u32),
    /// The waiter is cancelled.
    Cancel(u32),
    /// The driver checks a lease.
    Lease(u32, u32),
    /// The holder is done.
    Done(u32),
    /// The holder extends its lease.
    Extend(u32),
    /// The future of a release is dropped.
    Forsake(Call),
    CleanUp(u32),
}

/// A guard was handed out.
pub(super) struct Began {
    pub(super) hold: Hold,
    pub(super) fence: FencingToken,
}

pub(super) struct Sim {
    start: Instant,
    pub(super) now: Instant,
    events: BTreeMap<(Instant, u64), Event>,
    numbers: u64,
    pub(super) dice: Dice,
    pub(super) network: Network,
    /// There are no more faults.
    pub(super) quiet: bool,
    /// The store executes nothing until then.
    pub(super) store_stalls_until: Instant,
    pub(super) broken: Option<Broken>,
    pub(super) keys: Vec<LockKey>,
    /// The process of each token.
    tokens: Vec<(Token, Who)>,
    /// Tokens that may stay in the store without an owner: their acquire was duplicated by the
    /// network, which PROTOCOL 10 excludes, or their clean-up had to give up.
    excused: Vec<Token>,
    pub(super) began: Vec<Began>,
    /// The number of waiters served before the end of the faults, by process.
    pub(super) served: Vec<u32>,
    woken: Arc<Mutex<Vec<(Who, u32)>>>,
    pub(super) trace: Option<String>,
}

/// Writes a line to the trace, if there is one.
macro_rules! say {
    ($sim:expr, $($what:tt)*) => {
        if $sim.trace.is_some() {
            let line = format!($($what)*);
            $sim.write(&line);
        }
    };
}
pub(crate) use say;

struct Bell {
    woken: Arc<Mutex<Vec<(Who, u32)>>>,
    whom: (Who, u32),
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        lock(&self.woken).push(self.whom);
    }
}

impl Sim {
    pub(super) fn new(
        dice: Dice,
        network: Network,
        keys: Vec<LockKey>,
        broken: Option<Broken>,
        traced: bool,
    ) -> Self {
        let start = Instant::now();
        Self {
            start,
            now: start,
            events: BTreeMap::new(),
            numbers: 0,
            dice,
            network,
            quiet: false,
            store_stalls_until: start,
            broken,
            keys,
            tokens: Vec::new(),
            excused: Vec::new(),
            began: Vec::new(),
            served: Vec::new(),
            woken: Arc::default(),
            trace: traced.then(String::new),
        }
    }

    pub(super) fn is_broken(&self, rule: Broken) -> bool {
        self.broken == Some(rule)
    }

    /// The time since the start of the run.
    pub(super) fn elapsed(&self) -> Duration {
        self.now - self.start
    }

    pub(super) fn number(&mut self) -> u32 {
        self.numbers += 1;
        self.numbers as u32
    }

    pub(super) fn at(&mut self, when: Instant, event: Event) {
        self.numbers += 1;
        self.events
            .insert((when.max(self.now), self.numbers), event);
    }

    pub(super) fn after(&mut self, pause: Duration, event: Event) {
        self.at(self.now + pause, event);
    }

    pub(super) fn next(&mut self) -> Option<Event> {
        let ((when, _), event) = self.events.pop_first()?;
        self.now = when;
        Some(event)
    }

    pub(super) fn lock_of(&self, hold: &Hold) -> usize {
        // Every hold was created from one of the keys.
        self.keys
            .iter()
            .position(|key| *key == hold.key)
            .unwrap_or_default()
    }

    pub(super) fn waker(&self, who: Who, waiter: u32) -> Waker {
        Waker::from(Arc::new(Bell {
            woken: self.woken.clone(),
            whom: (who, waiter),
        }))
    }

    pub(super) fn woken(&self) -> Option<(Who, u32)> {
        lock(&self.woken).pop()
    }

    /// Sends a request, which may be lost, delayed, duplicated or overtaken.
    pub(super) fn send(&mut self, who: Who, call: Call, request: Request) {
        if let Some(token) = request.introduces() {
            self.introduce(token, who);
        }
        let delays = self.delays(self.network.late);
        say!(
            self,
            "{who} sends #{call} {}{}",
            self.show(&request),
            fate(&delays)
        );
        if let (2, Request::Acquire(acquire)) = (delays.len(), &request) {
            self.excused.push(acquire.hold.token);
        }
        for delay in delays {
            self.after(delay, Event::AtStore(who, call, request.clone()));
        }
    }

    pub(super) fn reply(&mut self, who: Who, call: Call, reply: Reply) {
        let delays = self.delays(self.network.late);
        say!(
            self,
            "    store replies to #{call} of {who}: {}{}",
            self.show_reply(&reply),
            fate(&delays)
        );
        for delay in delays {
            self.after(delay, Event::Replied(who, call, reply));
        }
    }

    pub(super) fn push(&mut self, hold: Hold, grant: Grant) {
        let Some(who) = self.whose(hold.token) else {
            return;
        };
        let delays = self.delays(self.network.pushes_late);
        say!(
            self,
            "    store pushes {} to {who}: {}{}",
            self.name(hold.token),
            self.show_grant(&grant),
            fate(&delays)
        );
        for delay in delays {
            self.after(delay, Event::Pushed(who, hold.clone(), grant));
        }
    }

    pub(super) fn excuse(&mut self, token: Token) {
        self.excused.push(token);
    }

    pub(super) fn is_excused(&self, token: Token) -> bool {
        self.excused.contains(&token)
    }

    fn delays(&mut self, late: usize) -> Vec<Duration> {
        if self.quiet {
            return vec![Duration::from_micros(200)];
        }
        if self.dice.chance(self.network.lost) {
            return Vec::new();
        }
        let longest = if self.dice.chance(late) {
            self.network.longest
        } else {
            Duration::from_millis(1)
        };
        let mut delays = vec![self.dice.up_to(longest)];
        if self.dice.chance(self.network.doubled) {
            delays.push(self.dice.up_to(self.network.longest));
        }
        delays
    }

    pub(super) fn introduce(&mut self, token: Token, who: Who) {
        if self.whose(token).is_none() {
            self.tokens.push((token, who));
        }
    }

    pub(super) fn whose(&self, token: Token) -> Option<Who> {
        self.tokens
            .iter()
            .find(|(known, _)| *known == token)
            .map(|(_, who)| *who)
    }

    /// The name of a token in the trace.
    pub(super) fn name(&self, token: Token) -> String {
        let place = self.tokens.iter().position(|(known, _)| *known == token);
        place.map_or_else(|| "t?".to_owned(), |place| format!("t{place}"))
    }

    pub(super) fn write(&mut self, line: &str) {
        let at = self.elapsed().as_secs_f64() * 1e3;
        if let Some(trace) = &mut self.trace {
            // Writing to a string does not fail.
            let _ = writeln!(trace, "{at:>10.3} ms  {line}");
        }
    }
}

fn fate(delays: &[Duration]) -> String {
    match delays {
        [] => " (lost)".to_owned(),
        [delay] if *delay < Duration::from_millis(1) => String::new(),
        delays => format!(" (arrives after {delays:?})"),
    }
}
