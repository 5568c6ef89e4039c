//! Majorities: how many are one, and what one of them agrees on.

/// More than half of `nodes`. Two majorities have a node in common.
pub(crate) fn majority(nodes: usize) -> usize {
    nodes / 2 + 1
}

/// The `n`th largest of `values`, from 1: so many of them are at least as large. `None` if there are fewer.
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
    fn two_majorities_have_a_node_in_common() {
        for nodes in 1..20 {
            assert!(2 * majority(nodes) > nodes && 2 * (majority(nodes) - 1) <= nodes);
        }
    }

    proptest! {
        #[test]
        fn so_many_are_at_least_as_large(values in proptest::collection::vec(0u8..9, 0..9), n in 1usize..9) {
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
