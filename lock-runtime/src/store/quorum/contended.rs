//! For which locks somebody had to wait lately: there it is better to ask the line node first.

use std::{collections::HashMap, sync::Mutex, time::Duration};

use foldhash::fast::RandomState;
use tokio::time::Instant;

use crate::{key::LockKey, sync::lock};

/// So long after somebody had to wait, those who come next will have to as well.
const LATELY: Duration = Duration::from_millis(100);
/// So many locks are remembered before those of long ago are forgotten.
const MANY: usize = 256;

#[derive(Debug, Default)]
pub(super) struct Contended(Mutex<HashMap<LockKey, Instant, RandomState>>);

impl Contended {
    /// Somebody had to wait for it.
    pub(super) fn note(&self, key: &LockKey, now: Instant) {
        let mut keys = lock(&self.0);
        if keys.len() >= MANY {
            keys.retain(|_, until| *until > now);
            // So many at a time need no better than to ask all at once.
            if keys.len() >= MANY {
                keys.clear();
            }
        }
        keys.insert(key.clone(), now + LATELY);
    }

    pub(super) fn is(&self, key: &LockKey, now: Instant) -> bool {
        lock(&self.0).get(key).is_some_and(|until| *until > now)
    }
}
