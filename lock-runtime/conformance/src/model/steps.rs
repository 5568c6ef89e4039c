//! Steps of a sequence, drawn from a seed. Half of them use holds that were granted before, as most
//! others are refused.

use std::{collections::VecDeque, num::NonZeroU32, time::Duration};

use lock_runtime::{
    LockKey, LockKind, Mode,
    operator::Waiter,
    store::{Grant, Hold, NextHolder, RevokeScope, Token},
    time::Instant,
};
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};

use super::{
    answer::Answer,
    shape::Shape,
    step::{Shown, Step},
};

const KEYS: usize = 3;
const TOKENS: usize = 4;
/// The time within which a waiter has polled again, and a hand-off is confirmed, if neither is to
/// end by itself at one of the stores.
const POLLED_WITHIN: Duration = Duration::from_millis(2400);
const _: () = assert!(POLLED_WITHIN.as_millis() < Waiter::STALE_AFTER.as_millis());
const _: () = assert!(POLLED_WITHIN.as_millis() < Grant::HANDOFF_LEASE.as_millis());

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
    shape: Shape,
    /// The number of results so far.
    results: u32,
    /// The holds that were released with a result. A client repeats such a release with the result,
    /// and a store may reply otherwise to one without.
    completed: Vec<Hold>,
    /// Tokens of which no request may have an effect any more.
    abandoned: Vec<Token>,
    /// All tokens of this sequence; messages show the index of a token.
    known: Vec<Token>,
    /// The times of the last two draws. Each waiter polls between two draws.
    drawn: [Instant; 2],
}

impl Steps {
    /// The steps of a seed. No other run uses keys with the name of `run`.
    pub(super) fn new(seed: u64, run: &str, shape: Shape) -> Self {
        // Names of all shapes that differ in the keys which a Redis server keeps beside them.
        let keys = [
            format!("a{seed}:{run}"),
            format!("{{b{seed}:{run}}}:x"),
            format!("c{seed}:{run}{{d}}"),
        ];
        let keys = keys.map(|name| LockKey::new(name).expect("a short name"));
        let keys = keys.to_vec();
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
            abandoned: Vec::new(),
            results: 0,
            completed: Vec::new(),
            shape,
            drawn: [Instant::now(); 2],
        }
    }

    pub(super) fn next(&mut self) -> Shown {
        // After each step all queue entries are polled, as clients do now and then: no entry
        // becomes stale, and every hand-off is confirmed before it ends.
        let step = if let Some(hold) = self.confirm.pop_front() {
            Step::Renew(vec![(hold, self.shape.unit)])
        } else if let Some(hold) = self.polls.pop_front() {
            Step::Poll(hold)
        } else {
            self.drawn = [self.drawn[1], Instant::now()];
            let step = self.draw();
            self.polls.extend(self.in_line.iter().cloned());
            step
        };
        Shown::new(step, self.known.clone())
    }

    /// Whether a waiter may have polled too late for one of the stores.
    pub(super) fn are_late(&self) -> bool {
        self.drawn[0].elapsed() >= POLLED_WITHIN
    }

    /// Same as `hold`, for a request. A store without a clock ignores the requests of an abandoned
    /// token, and no client makes any.
    fn request_of(&mut self, granted: u32) -> Hold {
        let mut hold = self.hold(granted);
        if self.abandoned.contains(&hold.token) {
            hold.token = self.fresh_token();
        }
        hold
    }

    fn abandon(&mut self) -> Step {
        let hold = self.hold(7);
        if !self.shape.has_clock {
            self.abandoned.push(hold.token);
            if self.tokens.contains(&hold.token) {
                self.tokens.retain(|token| *token != hold.token);
                let token = Token::random();
                self.known.push(token);
                self.tokens.push(token);
            }
        }
        Step::Abandon(hold)
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
            (Step::Poll(hold), Answer::Gone | Answer::IsDone(_)) => {
                self.in_line.retain(|other| other != hold)
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
                let (queue, reserved) = (self.queues(6), self.random.random_range(0..3));
                Step::Acquire {
                    hold: self.request_of(3),
                    lease: self.lease(),
                    late: false,
                    queue,
                    reserved,
                }
            }
            26..28 => Step::Acquire {
                hold: self.request_of(3),
                lease: self.shape.unit,
                late: self.shape.has_clock,
                queue: self.queues(10),
                reserved: 0,
            },
            28..30 => Step::Acquire {
                hold: self.request_of(5),
                lease: self.short(),
                late: false,
                queue: false,
                reserved: 0,
            },
            30..36 => self.acquire_all(),
            36..44 => Step::Poll(self.hold(8)),
            44..56 => {
                let count = self.random.random_range(1..4);
                Step::Renew((0..count).map(|_| (self.hold(8), self.renewal())).collect())
            }
            56..61 if self.shape.results => self.complete(),
            56..74 => self.release(),
            74..80 => Step::Convert(self.hold(8)),
            80..86 => self.abandon(),
            86..89 if self.shape.results => Step::Look(self.key()),
            // Often enough that few steps meet a lock that is done.
            89..93 if self.shape.results => Step::Forget(self.key()),
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

    fn acquire_all(&mut self) -> Step {
        let mut keys = self.keys.clone();
        keys.sort();
        let left_out = self.random.random_range(0..KEYS + 1);
        if left_out < KEYS {
            keys.remove(left_out);
        }
        keys.truncate(self.shape.keys_at_once);
        let token = if self.shape.reuses_tokens {
            self.token()
        } else {
            self.fresh_token()
        };
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
        if self.completed.contains(&hold) {
            return self.completing(hold);
        }
        let (mut keep_for, mut next) = (None, None);
        match self.random.random_range(0..10) {
            0..2 => keep_for = Some(self.lease()),
            2 => keep_for = Some(self.short()),
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

    /// A release with a result, as a client makes it for a lock that is exclusive.
    fn complete(&mut self) -> Step {
        let mut hold = self.hold(8);
        hold.mode = Mode::Exclusive;
        self.completing(hold)
    }

    fn completing(&mut self, hold: Hold) -> Step {
        self.completed.push(hold.clone());
        let keep_for = match self.chance(3) {
            true => self.short(),
            false => self.lease(),
        };
        self.results += 1;
        let result = format!(
            "{} .kept {}",
            self.results,
            "x".repeat(self.results as usize)
        );
        Step::Complete {
            hold,
            keep_for,
            result: result.into_bytes(),
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
            number if self.shape.permits => {
                NonZeroU32::new(number - 6).map_or(Mode::Shared, Mode::Permits)
            }
            _ => Mode::Exclusive,
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
        self.shape.unit * self.random.random_range(1..4)
    }

    fn renewal(&mut self) -> Duration {
        self.shape.unit * self.random.random_range(0..5)
    }

    /// A lease that has ended when the next step begins.
    fn short(&mut self) -> Duration {
        self.shape.short.unwrap_or(self.shape.unit)
    }

    /// With this chance in ten, a request is queued, if the store has wait queues.
    fn queues(&mut self, of_ten: u32) -> bool {
        self.chance(of_ten) && self.shape.queues
    }

    fn kind(&mut self) -> LockKind {
        if self.chance(6) || !self.shape.permits {
            LockKind::Lock
        } else {
            LockKind::Permits
        }
    }

    fn chance(&mut self, of_ten: u32) -> bool {
        self.random.random_ratio(of_ten, 10)
    }
}
