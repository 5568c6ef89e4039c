//! Records that stay locked, such as by a transaction of an operator.

use std::{collections::HashSet, sync::Mutex};

use tokio::sync::{Semaphore, SemaphorePermit};

use crate::shell::sync::lock;

/// The largest number of remembered names.
const MOST: usize = 1000;

/// The records for which a call has waited in vain. Those that wait for them again do so one after
/// the other, and leave the other connections to the calls for other records.
pub(super) struct Locked {
    names: Mutex<HashSet<String>>,
    turn: Semaphore,
}

impl Default for Locked {
    fn default() -> Self {
        Self {
            names: Mutex::default(),
            turn: Semaphore::new(1),
        }
    }
}

impl Locked {
    /// Waits for the turn of a call for these records, if one of them was locked.
    pub(super) async fn turn(&self, records: &[String]) -> Option<SemaphorePermit<'_>> {
        let is_locked = {
            let names = lock(&self.names);
            records.iter().any(|record| names.contains(record))
        };
        match is_locked {
            // The semaphore is never closed.
            true => self.turn.acquire().await.ok(),
            false => None,
        }
    }

    pub(super) fn set(&self, records: &[String], is_locked: bool) {
        let mut names = lock(&self.names);
        if !is_locked {
            records.iter().for_each(|record| drop(names.take(record)));
            return;
        }
        if names.len() >= MOST {
            names.clear();
        }
        names.extend(records.iter().cloned());
    }
}
