//! Random numbers. A seed gives the same schedule on every machine and with every version
//! of `rand`.

use std::time::Duration;

/// A [SplitMix64](https://prng.di.unimi.it/splitmix64.c) generator.
pub(crate) struct Dice {
    state: u64,
    /// Nothing happens by chance, and nothing takes time.
    is_steady: bool,
}

impl Dice {
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            state: seed.wrapping_mul(0xD134_2543_DE82_EF95),
            is_steady: false,
        }
    }

    /// Dice for a search that makes all choices itself.
    pub(crate) fn steady(seed: u64) -> Self {
        Self {
            is_steady: true,
            ..Self::new(seed)
        }
    }

    /// Dice of the same kind, with a seed of their own.
    pub(crate) fn fork(&mut self) -> Self {
        Self {
            is_steady: self.is_steady,
            ..Self::new(self.below(usize::MAX) as u64)
        }
    }

    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut bits = self.state;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        bits ^ (bits >> 31)
    }

    /// A number in 0..n.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        ((u128::from(self.next()) * n as u128) >> 64) as usize
    }

    pub(crate) fn one_of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    /// `true` with a probability of `in_a_thousand` in 1000.
    pub(crate) fn chance(&mut self, in_a_thousand: usize) -> bool {
        !self.is_steady && self.below(1000) < in_a_thousand
    }

    /// A number in 0..1.
    pub(crate) fn fraction(&mut self) -> f64 {
        if self.is_steady {
            return 0.5;
        }
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// A duration below `longest`, in whole microseconds; short ones are as likely as long ones.
    pub(crate) fn up_to(&mut self, longest: Duration) -> Duration {
        if self.is_steady {
            return Duration::ZERO;
        }
        let micros = longest.as_micros() as usize;
        let scale = self.one_of(&[1, 1, 1, 4, 30]);
        Duration::from_micros(self.below((micros / scale).max(1)) as u64)
    }
}
