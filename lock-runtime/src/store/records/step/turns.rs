//! The order of the operations of this process on a contended record.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, Weak},
};

use tokio::sync::{Mutex as Queue, OwnedMutexGuard};

use super::super::RecordName;
use crate::shell::sync::lock;

/// The number of records from which on those without an operation are removed.
const MANY: usize = 1024;

/// A queue of operations.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Turn {
    pub(crate) name: RecordName,
    /// Acquisitions pause for other clients. Those that keep a lock, or make it free, are not
    /// behind them.
    pub(crate) acquires: bool,
}

/// One operation of a kind at a time for each contended record, in the order of their coming.
#[derive(Debug, Default)]
pub(crate) struct Turns(Mutex<HashMap<Turn, Weak<Queue<()>>>>);

impl Turns {
    /// Waits until the earlier operations of this kind on this record have ended.
    pub(crate) async fn wait(&self, turn: Turn) -> OwnedMutexGuard<()> {
        let queue = {
            let mut queues = lock(&self.0);
            if queues.len() >= MANY {
                queues.retain(|_, queue| queue.strong_count() > 0);
            }
            match queues.get(&turn).and_then(Weak::upgrade) {
                Some(queue) => queue,
                None => {
                    let queue = Arc::new(Queue::new(()));
                    queues.insert(turn, Arc::downgrade(&queue));
                    queue
                }
            }
        };
        queue.lock_owned().await
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    fn turn(number: usize) -> Turn {
        Turn {
            name: RecordName::new(number.to_string()),
            acquires: true,
        }
    }

    #[test]
    fn records_without_an_operation_are_forgotten_and_those_with_one_are_not() {
        let turns = Turns::default();
        let now = |number| turns.wait(turn(number)).now_or_never();
        let first = now(0).unwrap();
        let others: Vec<_> = (1..MANY).map(|number| now(number).unwrap()).collect();
        assert_eq!(lock(&turns.0).len(), MANY);
        drop(others);
        drop(now(MANY).unwrap());
        assert_eq!(lock(&turns.0).len(), 2);
        assert!(now(0).is_none());
        drop(first);
        assert!(now(0).is_some());
    }
}
