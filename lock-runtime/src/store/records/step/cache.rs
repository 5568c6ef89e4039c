//! The records that a process has seen last. They save a read before each change: a change of an
//! outdated record fails and returns the present one.

use std::{
    collections::{HashMap, HashSet},
    hash::Hash,
    mem::take,
    sync::Mutex,
};

use super::super::{Record, RecordName};
use crate::shell::{sync::lock, time::Instant};

/// The number of records in each half.
const CAPACITY: usize = 8192;

/// Keeps the records that were used last. `None` is kept for a name that has no record.
#[derive(Debug, Default)]
pub(crate) struct Cache(Mutex<Seen>);

#[derive(Debug, Default)]
struct Seen {
    records: Halves<RecordName, (Option<Record>, Option<Instant>)>,
    /// The records that other clients have changed while this one was about to.
    contended: HashSet<RecordName>,
}

/// Keeps the entries that were used last. Once the recent half is full, it takes the place of the
/// older one. An entry that is used in the meantime moves to the recent half.
#[derive(Debug)]
pub(crate) struct Halves<K, V> {
    recent: HashMap<K, V>,
    older: HashMap<K, V>,
}

impl Cache {
    pub(crate) fn get(&self, name: &RecordName) -> Option<Option<Record>> {
        let mut seen = lock(&self.0);
        seen.records.get(name).map(|(record, _)| record.clone())
    }

    pub(crate) fn is_contended(&self, name: &RecordName) -> bool {
        lock(&self.0).contended.contains(name)
    }

    pub(crate) fn set_contended(&self, name: &RecordName, is_contended: bool) {
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

    pub(crate) fn put(&self, name: &RecordName, record: Option<Record>) {
        lock(&self.0).records.put(name.clone(), (record, None));
    }

    /// Keeps a record that this process has written. Called when the reply arrives.
    pub(crate) fn put_own(&self, name: &RecordName, record: Record) {
        let written = Some(Instant::now());
        lock(&self.0)
            .records
            .put(name.clone(), (Some(record), written));
    }

    /// Returns when this process has written the record, if no other one is known to have since.
    pub(crate) fn written(&self, name: &RecordName) -> Option<Instant> {
        lock(&self.0).records.get(name)?.1
    }
}

impl<K, V> Default for Halves<K, V> {
    fn default() -> Self {
        Self {
            recent: HashMap::new(),
            older: HashMap::new(),
        }
    }
}

impl<K: Eq + Hash, V> Halves<K, V> {
    pub(crate) fn get(&mut self, key: &K) -> Option<&V> {
        if let Some((key, value)) = self.older.remove_entry(key)
            && !self.recent.contains_key(&key)
        {
            self.put(key, value);
        }
        self.recent.get(key)
    }

    pub(crate) fn put(&mut self, key: K, value: V) {
        if self.recent.len() >= CAPACITY {
            self.older = take(&mut self.recent);
        }
        self.recent.insert(key, value);
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
        let halves = &lock(&cache.0).records;
        assert!(halves.recent.len() + halves.older.len() <= 2 * CAPACITY);
    }
}
