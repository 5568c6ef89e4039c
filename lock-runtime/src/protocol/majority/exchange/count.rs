//! The size of a majority, and the value on which a majority agrees.

/// More than half of `servers`. Any two majorities have a server in common.
pub(crate) fn majority(servers: usize) -> usize {
    servers / 2 + 1
}

/// The `n`th largest of `values`, counted from 1: at least `n` of the values are no smaller. `None`
/// if there are fewer than `n` values.
pub(crate) fn nth_largest<T: Ord>(values: impl IntoIterator<Item = T>, n: usize) -> Option<T> {
    let mut values: Vec<_> = values.into_iter().collect();
    values.sort_unstable();
    let index = values.len().checked_sub(n)?;
    values.into_iter().nth(index)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn two_majorities_have_a_server_in_common() {
        for servers in 1..20 {
            assert!(2 * majority(servers) > servers && 2 * (majority(servers) - 1) <= servers);
        }
    }

    proptest! {
        #[test]
        fn n_values_are_at_least_as_large(values in proptest::collection::vec(0u8..9, 0..9), n in 1usize..9) {
            match nth_largest(values.iter().copied(), n) {
                Some(value) => {
                    prop_assert!(values.iter().filter(|one| **one >= value).count() >= n);
                    prop_assert!(values.iter().filter(|one| **one > value).count() < n);
                }
                None => prop_assert!(values.len() < n),
            }
        }
    }
}
