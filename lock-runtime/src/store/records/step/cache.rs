//! The records that a process has seen last. They save a read before each change: a change of an
//! outdated record fails and returns the present one.

use std::{
    collections::{HashMap, HashSet},
    hash::Hash,
    mem::take,
    sync::Mutex,
    time::Duration,
};

use super::{
    super::{Record, RecordName, Version},
    body::Body,
};
use crate::{
    shell::{sync::lock, time::Instant},
    store::ClientId,
};

/// The number of records in each half.
const CAPACITY: usize = 8192;

/// The time for which a client counts among those that change a record.
const LATELY: Duration = Duration::from_secs(1);
/// The number of clients of a record that are remembered.
const CLIENTS: usize = 32;

/// Keeps the records that were used last. `None` is kept for a name that has no record.
#[derive(Debug, Default)]
pub(crate) struct Cache(Mutex<Seen>);

#[derive(Debug, Default)]
struct Seen {
    records: Halves<RecordName, Known>,
    /// The records that other clients have changed while this one was about to.
    contended: HashSet<RecordName>,
}

/// What is known of a record.
#[derive(Debug, Default)]
struct Known {
    record: Option<Record>,
    /// The record is there, and its body, which has a result, is not kept.
    is_done: bool,
    /// When this process has written it, if no other one is known to have since.
    written: Option<Instant>,
    /// The number of times that this process has written it since another one has.
    in_a_row: u32,
    /// When another process was last seen to have changed it.
    changed: Option<Instant>,
    /// The clients that were in it lately.
    clients: Vec<(ClientId, Instant)>,
}

/// Other clients that change a record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Rivals {
    /// Whether another one is in the record, or another process has changed it lately.
    pub(crate) are_there: bool,
    /// The number of those that were in it lately and are not now, and may be about to change it.
    pub(crate) outside: usize,
    /// The number of times that this process has changed it since one of them has.
    pub(crate) waited: u32,
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
        let known = seen.records.get(name).filter(|known| !known.is_done);
        known.map(|known| known.record.clone())
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

    /// Keeps a record that was received. An outdated one costs a conflict and no more.
    pub(crate) fn put(&self, name: &RecordName, record: Option<Record>) {
        let present = clients(name, record.as_ref());
        let records = &mut lock(&self.0).records;
        let known = records.get_or_default(name);
        if version(known.record.as_ref()) == version(record.as_ref()) {
            return;
        }
        // The first record that is seen says nothing about when it was changed.
        if known.record.is_some() {
            known.changed = Some(Instant::now());
            known.meet(present);
        }
        known.keep(record);
        (known.written, known.in_a_row) = (None, 0);
    }

    /// Keeps a record that this process has written. Called when the reply arrives.
    pub(crate) fn put_own(&self, name: &RecordName, record: Record) {
        let records = &mut lock(&self.0).records;
        let known = records.get_or_default(name);
        known.keep(Some(record));
        known.written = Some(Instant::now());
        known.in_a_row = known.in_a_row.saturating_add(1);
    }

    /// Returns when this process has written the record, if no other one is known to have since.
    pub(crate) fn written(&self, name: &RecordName) -> Option<Instant> {
        lock(&self.0).records.get(name)?.written
    }

    /// Returns the clients other than `own` that change the record.
    pub(crate) fn rivals(&self, name: &RecordName, own: Option<ClientId>) -> Rivals {
        let inside = clients(name, self.get(name).flatten().as_ref());
        let mut seen = lock(&self.0);
        let Some(known) = seen.records.get(name) else {
            return Rivals::default();
        };
        let is_late = |at: &Instant| at.elapsed() < LATELY;
        let outside = |(client, at): &&(ClientId, Instant)| {
            is_late(at) && Some(*client) != own && !inside.contains(client)
        };
        Rivals {
            are_there: known.changed.as_ref().is_some_and(is_late)
                || inside.iter().any(|client| Some(*client) != own),
            outside: known.clients.iter().filter(outside).count(),
            waited: known.in_a_row,
        }
    }
}

fn version(record: Option<&Record>) -> Option<Version> {
    record.map(|record| record.version)
}

impl Known {
    fn keep(&mut self, record: Option<Record>) {
        self.record = record;
        let done = self.record.as_mut().filter(|it| Body::is_done(&it.body));
        self.is_done = done.is_some();
        if let Some(record) = done {
            record.body = Vec::new();
        }
    }

    fn meet(&mut self, clients: Vec<ClientId>) {
        for client in clients {
            let goes_on = |(it, at): &(ClientId, Instant)| *it != client && at.elapsed() < LATELY;
            self.clients.retain(goes_on);
            if self.clients.len() < CLIENTS {
                self.clients.push((client, Instant::now()));
            }
        }
    }
}

/// Returns the clients that hold a lock or wait for it.
fn clients(name: &RecordName, record: Option<&Record>) -> Vec<ClientId> {
    let body = record.and_then(|record| Body::read(name, &record.body).ok());
    body.iter().flat_map(Body::clients).collect()
}

impl<K, V> Default for Halves<K, V> {
    fn default() -> Self {
        Self {
            recent: HashMap::new(),
            older: HashMap::new(),
        }
    }
}

impl<K: Clone + Eq + Hash, V: Default> Halves<K, V> {
    pub(crate) fn get_or_default(&mut self, key: &K) -> &mut V {
        if self.get(key).is_none() {
            self.put(key.clone(), V::default());
        }
        self.recent.entry(key.clone()).or_default()
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
    use super::{
        super::tests::{name, record, record_of_done},
        *,
    };

    #[test]
    fn records_in_use_stay_and_others_go() {
        let cache = Cache::default();
        let name = |number: usize| RecordName::new(format!("k{number}"));
        for number in 0..3 * CAPACITY {
            cache.put(&name(number), None);
            assert_eq!(cache.get(&name(0)), Some(None), "after {number}");
            assert!(lock(&cache.0).records.recent.len() <= CAPACITY);
        }
        assert_eq!(cache.get(&name(1)), None);
        let is_kept = |number: usize| cache.get(&name(number)) == Some(None);
        assert!((CAPACITY * 5 / 2..CAPACITY * 3).all(is_kept));
        let halves = &lock(&cache.0).records;
        assert!(halves.recent.len() + halves.older.len() <= 2 * CAPACITY);
    }

    /// A result may be long, and is read by those who ask for it.
    #[test]
    fn the_record_of_a_lock_that_is_done_is_not_kept() {
        let (cache, held) = (Cache::default(), record(&[]));
        cache.put(&name(), Some(held.clone()));
        assert_eq!(cache.get(&name()), Some(Some(held)));
        let done = record_of_done();
        cache.put(&name(), Some(done.clone()));
        assert_eq!(cache.get(&name()), None);
        cache.put_own(&name(), record(&[]));
        assert!(cache.get(&name()).is_some());
        cache.put_own(&name(), done);
        assert_eq!(cache.get(&name()), None);
        assert!(cache.written(&name()).is_some());
    }

    #[test]
    fn contended_records_are_known_until_there_are_too_many() {
        let cache = Cache::default();
        let name = |number: usize| RecordName::new(format!("k{number}"));
        cache.set_contended(&name(0), true);
        cache.set_contended(&name(1), true);
        let contended = [0, 1, 2].map(|number| cache.is_contended(&name(number)));
        assert_eq!(contended, [true, true, false]);
        cache.set_contended(&name(0), false);
        let contended = [0, 1, 2].map(|number| cache.is_contended(&name(number)));
        assert_eq!(contended, [false, true, false]);
        for number in 2..CAPACITY + 2 {
            cache.set_contended(&name(number), true);
            assert!(cache.is_contended(&name(number)));
            assert!(lock(&cache.0).contended.len() <= CAPACITY);
        }
    }

    /// One that is in the record now waits for a message, and changes nothing.
    #[tokio::test(start_paused = true)]
    async fn the_rivals_of_a_client_were_in_the_record_lately_and_are_not_now() {
        let cache = Cache::default();
        let put = |clients: &[ClientId]| cache.put(&name(), Some(record(clients)));
        let [own, inside, gone, long_gone] = [(); 4].map(|()| ClientId::random());
        assert_eq!(cache.rivals(&name(), Some(own)), Rivals::default());
        // The first record that is seen may have been changed long ago.
        put(&[own]);
        assert_eq!(cache.rivals(&name(), Some(own)), Rivals::default());
        assert!(cache.rivals(&name(), Some(inside)).are_there);
        put(&[long_gone]);
        tokio::time::advance(LATELY * 9 / 10).await;
        put(&[own, inside, gone]);
        put(&[gone]);
        cache.put_own(&name(), record(&[inside]));
        tokio::time::advance(LATELY / 5).await;
        for (client, outside) in [(Some(own), 1), (Some(inside), 2), (None, 2)] {
            let rivals = Rivals {
                are_there: true,
                outside,
                waited: 1,
            };
            assert_eq!(cache.rivals(&name(), client), rivals);
        }
        tokio::time::advance(LATELY).await;
        for (client, are_there) in [(Some(own), true), (Some(inside), false)] {
            let rivals = Rivals {
                are_there,
                outside: 0,
                waited: 1,
            };
            assert_eq!(cache.rivals(&name(), client), rivals);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_limited_number_of_the_clients_of_a_record_is_remembered() {
        let cache = Cache::default();
        cache.put(&name(), Some(record(&[])));
        for _ in 0..2 * CLIENTS {
            cache.put(&name(), Some(record(&[ClientId::random()])));
        }
        cache.put(&name(), None);
        assert_eq!(cache.rivals(&name(), None).outside, CLIENTS);
    }
}
