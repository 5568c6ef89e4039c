//! The records that a process has seen last. They save a read before each change: a change of an
//! outdated record fails and returns the present one.

use std::{
    collections::{HashMap, HashSet},
    mem::take,
    sync::Mutex,
};

use super::{Record, RecordName};
use crate::sync::lock;

/// The number of records in each half.
const CAPACITY: usize = 8192;

/// Keeps the records that were used last. `None` is kept for a name that has no record.
#[derive(Debug, Default)]
pub(super) struct Cache(Mutex<Halves>);

/// Once the recent half is full, it takes the place of the older one. A record that is used in the
/// meantime moves to the recent half.
#[derive(Debug, Default)]
struct Halves {
    recent: HashMap<RecordName, Option<Record>>,
    older: HashMap<RecordName, Option<Record>>,
    /// The records that other clients have changed while this one was about to.
    contended: HashSet<RecordName>,
}

impl Cache {
    pub(super) fn get(&self, name: &RecordName) -> Option<Option<Record>> {
        let mut halves = lock(&self.0);
        if let Some(record) = halves.recent.get(name) {
            return Some(record.clone());
        }
        let record = halves.older.remove(name)?;
        halves.put(name, record.clone());
        Some(record)
    }

    pub(super) fn is_contended(&self, name: &RecordName) -> bool {
        lock(&self.0).contended.contains(name)
    }

    pub(super) fn set_contended(&self, name: &RecordName, is_contended: bool) {
        let contended = &mut lock(&self.0).contended;
        if !is_contended {
            contended.remove(name);
            return;
        }
        if contended.len() >= CAPACITY {
            contended.clear();
        }
        contended.insert(name.clone());
    }

    pub(super) fn put(&self, name: &RecordName, record: Option<Record>) {
        lock(&self.0).put(name, record);
    }
}

impl Halves {
    fn put(&mut self, name: &RecordName, record: Option<Record>) {
        if self.recent.len() >= CAPACITY {
            self.older = take(&mut self.recent);
        }
        self.recent.insert(name.clone(), record);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_in_use_stay_and_others_go() {
        let cache = Cache::default();
        let name = |number: usize| RecordName::new(format!("k{number}"));
        for number in 0..3 * CAPACITY {
            cache.put(&name(number), None);
            assert_eq!(cache.get(&name(0)), Some(None), "after {number}");
        }
        assert_eq!(cache.get(&name(1)), None);
        let halves = lock(&cache.0);
        assert!(halves.recent.len() + halves.older.len() <= 2 * CAPACITY);
    }
}
