//! Steps of a sequence, drawn from a seed. Half of them use holds that were granted before, as most
//! others are refused.

use std::{collections::VecDeque, fmt, num::NonZeroU32, time::Duration};

use lock_runtime::{
    LockKey, LockKind, Mode, RevokeScope,
    store::{Hold, NextHolder, Token},
};
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};

use super::answer::Answer;

/// A lease that has ended when the next step begins.
pub(super) const SHORT_MS: u64 = 30;
const HOUR: Duration = Duration::from_secs(3600);
const KEYS: usize = 3;
const TOKENS: usize = 4;

/// One request to a store.
#[derive(Clone)]
pub(super) enum Step {
    Acquire {
        hold: Hold,
        lease: Duration,
        late: bool,
        queue: bool,
        reserved: u32,
    },
    AcquireAll {
        holds: Vec<Hold>,
        lease: Duration,
    },
    Poll(Hold),
    Renew(Vec<(Hold, Duration)>),
    Release {
        hold: Hold,
        keep_for: Option<Duration>,
        next: Option<NextHolder>,
    },
    /// Only at a store that can be one of a quorum.
    HandOff {
        hold: Hold,
        heir: NextHolder,
        is_coordinator: bool,
        late: bool,
    },
    Convert(Hold),
    Abandon(Hold),
    Inspect(LockKey, LockKind),
    Revoke(LockKey, LockKind, RevokeScope),
}

impl Step {
    /// Whether the step may create a hold that ends by itself before the next step.
    pub(super) fn is_short(&self) -> bool {
        let short = Some(Duration::from_millis(SHORT_MS));
        match self {
            Self::Acquire { lease, .. } => Some(*lease) == short,
            Self::Release { keep_for, next, .. } => {
                *keep_for == short || next.map(|next| next.lease) == short
            }
            _ => false,
        }
    }
}

/// Draws steps.
pub(super) struct Steps {
    random: StdRng,
    keys: Vec<LockKey>,
    tokens: Vec<Token>,
    /// Holds that were granted, some of them over by now.
    granted: Vec<Hold>,
    /// Holds in the wait queue, some of them granted by now.
    in_line: Vec<Hold>,
    polls: VecDeque<Hold>,
    confirm: VecDeque<Hold>,
    /// Whether the steps contain hand-offs.
    of_a_quorum: bool,
    /// All tokens of this sequence; messages show the index of a token.
    known: Vec<Token>,
}

/// A step, and the tokens that its message refers to.
pub(super) struct Told {
    pub(super) step: Step,
    known: Vec<Token>,
}

impl std::ops::Deref for Told {
    type Target = Step;

    fn deref(&self) -> &Step {
        &self.step
    }
}

impl Steps {
    pub(super) fn new(seed: u64, of_a_quorum: bool) -> Self {
        // Names of all shapes that differ in their side keys.
        let keys = [
            format!("a{seed}"),
            format!("{{b{seed}}}:x"),
            format!("c{seed}{{d}}"),
        ];
        let keys = keys
            .into_iter()
            .map(|name| LockKey::new(name).unwrap())
            .collect();
        let tokens: Vec<_> = std::iter::repeat_with(Token::random).take(TOKENS).collect();
        Self {
            random: StdRng::seed_from_u64(seed),
            keys,
            known: tokens.clone(),
            tokens,
            granted: Vec::new(),
            in_line: Vec::new(),
            polls: VecDeque::new(),
            confirm: VecDeque::new(),
            of_a_quorum,
        }
    }

    pub(super) fn next(&mut self) -> Told {
        // After each step all queue entries are polled, as clients do now and then: no entry
        // becomes stale, and every hand-off is confirmed before it ends.
        let step = if let Some(hold) = self.confirm.pop_front() {
            Step::Renew(vec![(hold, HOUR)])
        } else if let Some(hold) = self.polls.pop_front() {
            Step::Poll(hold)
        } else {
            let step = self.draw();
            self.polls.extend(self.in_line.iter().cloned());
            step
        };
        Told {
            step,
            known: self.known.clone(),
        }
    }

    /// Records grants and queue entries.
    pub(super) fn learn(&mut self, step: &Step, answer: Answer) {
        match (step, answer) {
            (Step::Acquire { hold, .. }, Answer::Granted(_)) => self.granted.push(hold.clone()),
            (Step::AcquireAll { holds, .. }, Answer::AllGranted(_)) => {
                self.granted.extend_from_slice(holds)
            }
            (
                Step::Release {
                    hold,
                    next: Some(next),
                    ..
                },
                Answer::Passed(_),
            ) => {
                self.granted
                    .push(Hold::new(hold.key.clone(), hold.mode, next.token));
            }
            (
                Step::Release {
                    hold,
                    next: Some(next),
                    ..
                },
                Answer::Queued(_),
            ) => {
                self.in_line
                    .push(Hold::new(hold.key.clone(), hold.mode, next.token));
            }
            (Step::Acquire { hold, .. }, Answer::Queued(_)) if !self.in_line.contains(hold) => {
                self.in_line.push(hold.clone());
            }
            (Step::Poll(hold), Answer::Granted(_)) if self.in_line.contains(hold) => {
                self.in_line.retain(|other| other != hold);
                self.granted.push(hold.clone());
                // As a client does: the lease of a hand-off is short.
                self.confirm.push_back(hold.clone());
            }
            (Step::Poll(hold), Answer::Gone) => self.in_line.retain(|other| other != hold),
            // It is polled as a waiter is, whether it was granted the lock or not.
            (Step::HandOff { hold, heir, .. }, _) => {
                let hold = Hold::new(hold.key.clone(), Mode::Exclusive, heir.token);
                if !self.in_line.contains(&hold) {
                    self.in_line.push(hold.clone());
                    self.polls.push_front(hold);
                }
            }
            (Step::Convert(hold), Answer::Converted(_)) => {
                self.granted
                    .push(Hold::new(hold.key.clone(), Mode::Shared, hold.token));
            }
            _ => {}
        }
        if self.granted.len() > 2 * TOKENS {
            self.granted.remove(0);
        }
    }

    fn draw(&mut self) -> Step {
        match self.random.random_range(0..100) {
            0..26 => {
                let (queue, reserved) = (self.chance(6), self.random.random_range(0..3));
                Step::Acquire {
                    hold: self.hold(3),
                    lease: self.lease(),
                    late: false,
                    queue,
                    reserved,
                }
            }
            26..28 => Step::Acquire {
                hold: self.hold(3),
                lease: HOUR,
                late: true,
                queue: true,
                reserved: 0,
            },
            28..30 => {
                let short = Duration::from_millis(SHORT_MS);
                Step::Acquire {
                    hold: self.hold(5),
                    lease: short,
                    late: false,
                    queue: false,
                    reserved: 0,
                }
            }
            30..36 => self.acquire_all(),
            36..44 => Step::Poll(self.hold(8)),
            44..56 => {
                let count = self.random.random_range(1..4);
                Step::Renew((0..count).map(|_| (self.hold(8), self.renewal())).collect())
            }
            56..74 if self.of_a_quorum && self.chance(4) => self.hand_off(),
            56..74 => self.release(),
            74..80 => Step::Convert(self.hold(8)),
            80..86 => Step::Abandon(self.hold(7)),
            86..96 => Step::Inspect(self.key(), self.kind()),
            _ => {
                let scope = if self.chance(5) {
                    RevokeScope::Leased
                } else {
                    RevokeScope::AlsoEndless
                };
                Step::Revoke(self.key(), self.kind(), scope)
            }
        }
    }

    fn hand_off(&mut self) -> Step {
        let mut hold = self.hold(8);
        let mut heir = NextHolder::new(
            self.fresh_token(),
            self.lease(),
            self.random.random_range(0..3),
        );
        let waits = |hold: &&Hold| hold.mode == Mode::Exclusive;
        if self.chance(4)
            && let Some(waiter) = self.in_line.iter().find(waits)
        {
            heir.token = waiter.token;
            hold.key = waiter.key.clone();
        }
        Step::HandOff {
            hold,
            heir,
            is_coordinator: self.chance(4),
            late: self.chance(1),
        }
    }

    fn acquire_all(&mut self) -> Step {
        let mut keys = self.keys.clone();
        keys.sort();
        let left_out = self.random.random_range(0..KEYS + 1);
        if left_out < KEYS {
            keys.remove(left_out);
        }
        let token = self.token();
        let mode = |random: &mut StdRng| {
            if random.random_bool(0.5) {
                Mode::Exclusive
            } else {
                Mode::Shared
            }
        };
        let holds = keys
            .into_iter()
            .map(|key| Hold::new(key, mode(&mut self.random), token))
            .collect();
        Step::AcquireAll {
            holds,
            lease: self.lease(),
        }
    }

    fn release(&mut self) -> Step {
        let hold = self.hold(8);
        let (mut keep_for, mut next) = (None, None);
        match self.random.random_range(0..10) {
            0..2 => keep_for = Some(self.lease()),
            2 => keep_for = Some(Duration::from_millis(SHORT_MS)),
            3 => keep_for = Some(Duration::ZERO),
            4..6 => {
                next = Some(NextHolder::new(
                    self.fresh_token(),
                    self.lease(),
                    self.random.random_range(0..3),
                ))
            }
            6 => next = Some(NextHolder::new(self.token(), self.lease(), 0)),
            _ => {}
        }
        // Passing a token on to itself, or to one that waits already, has no meaning.
        let waits = |token| self.in_line.iter().any(|hold| hold.token == token);
        next = next.filter(|next| next.token != hold.token && !waits(next.token));
        Step::Release {
            hold,
            keep_for,
            next,
        }
    }

    /// With a chance of `granted` in ten, a hold that was granted before.
    fn hold(&mut self, granted: u32) -> Hold {
        if self.chance(granted) && !self.granted.is_empty() {
            let index = self.random.random_range(0..self.granted.len());
            return self.granted[index].clone();
        }
        let key = self.key();
        let mode = match self.random.random_range(0..10) {
            0..3 => Mode::Exclusive,
            3..7 => Mode::Shared,
            permits => Mode::Permits(NonZeroU32::new(permits - 6).unwrap()),
        };
        Hold::new(key, mode, self.token())
    }

    fn key(&mut self) -> LockKey {
        // Most steps use the same key, so that they interact.
        let index = if self.chance(6) {
            0
        } else {
            self.random.random_range(0..KEYS)
        };
        self.keys[index].clone()
    }

    fn token(&mut self) -> Token {
        if self.chance(2) {
            self.fresh_token();
        }
        self.tokens[self.random.random_range(0..TOKENS)]
    }

    fn fresh_token(&mut self) -> Token {
        let token = Token::random();
        self.known.push(token);
        let index = self.random.random_range(0..TOKENS);
        self.tokens[index] = token;
        token
    }

    fn lease(&mut self) -> Duration {
        HOUR * self.random.random_range(1..4)
    }

    fn renewal(&mut self) -> Duration {
        HOUR * self.random.random_range(0..5)
    }

    fn kind(&mut self) -> LockKind {
        if self.chance(6) {
            LockKind::Lock
        } else {
            LockKind::Permits
        }
    }

    fn chance(&mut self, of_ten: u32) -> bool {
        self.random.random_ratio(of_ten, 10)
    }
}

impl fmt::Display for Told {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let token = |token: &Token| {
            self.known
                .iter()
                .position(|known| known == token)
                .unwrap_or_default()
        };
        let hold = |hold: &Hold| format!("{} {:?} #{}", hold.key, hold.mode, token(&hold.token));
        match &self.step {
            Step::Acquire {
                hold: of,
                lease,
                late,
                queue,
                reserved,
            } => {
                let how = format!(
                    "{}{}",
                    if *late { ", late" } else { "" },
                    if *queue { ", queued" } else { "" }
                );
                write!(
                    f,
                    "acquire {} for {lease:?}{how}, {reserved} reserved",
                    hold(of)
                )
            }
            Step::AcquireAll { holds, lease } => {
                write!(
                    f,
                    "acquire all [{}] for {lease:?}",
                    holds.iter().map(hold).collect::<Vec<_>>().join(", ")
                )
            }
            Step::Poll(of) => write!(f, "poll {}", hold(of)),
            Step::Renew(renewals) => {
                let renewals = renewals
                    .iter()
                    .map(|(of, lease)| format!("{} for {lease:?}", hold(of)));
                write!(f, "renew [{}]", renewals.collect::<Vec<_>>().join(", "))
            }
            Step::Release {
                hold: of,
                keep_for,
                next,
            } => {
                let next = next.map(|next| (token(&next.token), next.lease, next.reserved));
                write!(
                    f,
                    "release {}, keep for {keep_for:?}, next {next:?}",
                    hold(of)
                )
            }
            Step::HandOff {
                hold: of,
                heir,
                is_coordinator,
                late,
            } => write!(
                f,
                "hand off {} to #{} for {:?}, {} reserved, coordinator: {is_coordinator}, late: {late}",
                hold(of),
                token(&heir.token),
                heir.lease,
                heir.reserved
            ),
            Step::Convert(of) => write!(f, "convert {}", hold(of)),
            Step::Abandon(of) => write!(f, "abandon {}", hold(of)),
            Step::Inspect(key, kind) => write!(f, "inspect {key} {kind:?}"),
            Step::Revoke(key, kind, scope) => write!(f, "revoke {key} {kind:?} {scope:?}"),
        }
    }
}
