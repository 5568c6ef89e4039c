//! The random numbers of tokens, identifiers and pauses, in one place, so that a simulation can
//! seed them.

use rand::distr::{Distribution, StandardUniform};

/// Returns a number of the thread's generator.
pub(crate) fn random<T>() -> T
where
    StandardUniform: Distribution<T>,
{
    #[cfg(test)]
    if let Some(number) = super::simulated::random() {
        return number;
    }
    rand::random()
}
