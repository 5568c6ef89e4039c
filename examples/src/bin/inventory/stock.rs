//! The stock. It does not synchronize its users, that is left to the lock. It only rejects writes
//! with the fencing token of an earlier lock.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use lock_runtime::FencingToken;

/// The pieces of one item.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Pieces {
    pub(crate) on_the_shelf: u64,
    pub(crate) set_aside: u64,
}

/// The pieces of all items. The mutex is held for one read or one write, never for both.
#[derive(Debug)]
pub(crate) struct Stock(Mutex<HashMap<&'static str, Record>>);

#[derive(Debug)]
struct Record {
    pieces: Pieces,
    /// The largest token so far.
    fence: Option<FencingToken>,
}

/// The error for a token that is older than the latest one.
#[derive(Debug)]
pub(crate) struct Stale;

impl Stock {
    /// Creates a stock with `each` pieces of each item on the shelf.
    pub(crate) fn of(items: &[&'static str], each: u64) -> Self {
        let record = || Record {
            pieces: Pieces {
                on_the_shelf: each,
                set_aside: 0,
            },
            fence: None,
        };
        Self(Mutex::new(
            items.iter().map(|item| (*item, record())).collect(),
        ))
    }

    /// Returns `None` for an unknown item.
    pub(crate) fn read(&self, item: &str) -> Option<Pieces> {
        self.records().get(item).map(|record| record.pieces)
    }

    /// Sets the pieces of an item. An unknown item is ignored.
    pub(crate) fn write(
        &self,
        item: &str,
        pieces: Pieces,
        fence: Option<FencingToken>,
    ) -> Result<(), Stale> {
        let mut records = self.records();
        let Some(record) = records.get_mut(item) else {
            return Ok(());
        };
        if fence < record.fence {
            return Err(Stale);
        }
        *record = Record { pieces, fence };
        Ok(())
    }

    fn records(&self) -> MutexGuard<'_, HashMap<&'static str, Record>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_from_before_is_refused() {
        let stock = Stock::of(&["bolt"], 10);
        let pieces = Pieces {
            on_the_shelf: 9,
            set_aside: 1,
        };
        assert!(stock.write("bolt", pieces, FencingToken::new(2)).is_ok());
        assert!(
            stock
                .write("bolt", Pieces::default(), FencingToken::new(1))
                .is_err()
        );
        assert_eq!(stock.read("bolt"), Some(pieces));
    }
}
