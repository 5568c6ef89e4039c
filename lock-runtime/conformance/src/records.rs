//! The promises of a store of records that the operations of locks rely on, and seldom need.

mod batches;

use std::{sync::Arc, time::Duration};

use super::subject::{broken, in_time, promise, skipped, unique};
use lock_runtime::store::{
    Records,
    records::{Change, Record, RecordName, Swap, Swapped, Timestamp, Version},
};

pub use self::batches::{
    reads_show_many_records_and_large_ones, swaps_of_a_batch_have_their_own_outcomes,
    swaps_without_effect_send_no_message, the_clock_goes_on_for_all_clients,
};

const COMPARED: &str = "a swap replaces its records only if each of them has the known version";
const ORDERED: &str = "a conflict contains the present records in the order of the changes";
const IN_TIME: &str = "a swap replaces nothing before its time";
/// The changes of a swap, where the database takes as many.
const CHANGES: usize = 3;
/// Longer than any of these tests.
const NEEDED: Duration = Duration::from_secs(600);

/// Some records of a test, and the versions that they have.
struct Subject {
    records: Arc<dyn Records>,
    names: Vec<RecordName>,
    known: Vec<Option<Version>>,
}

impl Subject {
    async fn of(make: &impl AsyncFn() -> Arc<dyn Records>, changes: usize) -> Self {
        let records = make().await;
        let name = |_| RecordName::new(unique());
        Self {
            names: (0..changes).map(name).collect(),
            known: vec![None; changes],
            records,
        }
    }

    async fn now(&self) -> Timestamp {
        self.records.read(&[]).await.expect("the time").now
    }

    async fn present(&self) -> Vec<Option<Record>> {
        let reply = self.records.read(&self.names).await;
        reply.expect("the present records").records
    }

    /// Replaces all records, which have these versions.
    async fn swap(&self, known: &[Option<Version>], not_before: Timestamp) -> (Swap, Swapped) {
        let now = self.now().await;
        let needed_until = Timestamp::from_micros(now.micros() + NEEDED.as_micros() as u64);
        let change = |(name, known): (&RecordName, &Option<Version>)| {
            let record = Record::new(version(), unique().into_bytes());
            Change::new(name.clone(), *known, record, needed_until)
        };
        let changes = self.names.iter().zip(known).map(change).collect();
        let swap = Swap::new(changes, not_before);
        let reply = self.records.swap(&swap).await;
        let outcome = reply.expect("a reply to a swap").outcome;
        (swap, outcome)
    }

    /// Replaces all records, of which no other client knows.
    async fn advance(&mut self) {
        let (swap, outcome) = self.swap(&self.known, Timestamp::default()).await;
        promise!(
            COMPARED,
            outcome == Swapped::Done,
            "{swap:?} of the present versions: {outcome:?}"
        );
        let versions = swap.changes.iter().map(|it| Some(it.record.version));
        self.known = versions.collect();
    }

    /// Makes a swap of one wrong version. Returns the records of its conflict.
    async fn conflict(&self, wrong: usize, version: Option<Version>) -> Vec<Option<Record>> {
        let before = self.present().await;
        let mut known = self.known.clone();
        known[wrong] = version;
        let (swap, outcome) = self.swap(&known, Timestamp::default()).await;
        let after = self.present().await;
        let Swapped::Conflict(present) = outcome else {
            broken(
                COMPARED,
                format_args!(
                    "change {wrong} of {swap:?}, where {before:?} is present: {outcome:?}"
                ),
            );
        };
        promise!(
            COMPARED,
            before == after,
            "a conflict has changed {before:?} to {after:?}: {swap:?}"
        );
        present
    }
}

fn version() -> Version {
    let number = rand::random_range(1..=i64::MAX.cast_unsigned());
    Version::from_number(number).expect("a version")
}

/// The largest number of changes of a swap in these tests.
async fn changes(make: &impl AsyncFn() -> Arc<dyn Records>) -> usize {
    let most = make().await.limits().keys_at_once;
    let most = most.map_or(CHANGES, |most| most.get().min(CHANGES));
    if most < CHANGES {
        skipped("swaps of three records", "the database has none");
    }
    most
}

/// Checks that a swap compares the version of every record, and otherwise replaces none of them.
///
/// # Panics
/// If the database breaks this promise.
pub async fn swaps_compare_every_version(make: &impl AsyncFn() -> Arc<dyn Records>) {
    in_time(async {
        let mut subject = Subject::of(make, changes(make).await).await;
        for round in 0..2 {
            for wrong in 0..subject.names.len() {
                subject.conflict(wrong, Some(version())).await;
                if round > 0 {
                    subject.conflict(wrong, None).await;
                }
            }
            subject.advance().await;
        }
    })
    .await;
}

/// Checks that the records of a conflict come in the order of the changes, whatever their names.
///
/// # Panics
/// If the database breaks this promise.
pub async fn conflicts_are_in_the_order_of_their_changes(
    make: &impl AsyncFn() -> Arc<dyn Records>,
) {
    in_time(async {
        let mut subject = Subject::of(make, changes(make).await).await;
        subject.names.sort();
        for _ in 0..2 {
            for wrong in 0..subject.names.len() {
                let found = subject.conflict(wrong, Some(version())).await;
                let present = subject.present().await;
                promise!(
                    ORDERED,
                    found == present,
                    "{:?}: {found:?} instead of {present:?}",
                    subject.names
                );
            }
            subject.advance().await;
            // The other way round.
            subject.names.reverse();
            subject.known.reverse();
        }
    })
    .await;
}

/// Checks that a swap does nothing before the clock of the database has reached its time.
///
/// # Panics
/// If the database breaks this promise.
pub async fn swaps_wait_for_their_time(make: &impl AsyncFn() -> Arc<dyn Records>) {
    in_time(async {
        let mut subject = Subject::of(make, changes(make).await).await;
        for _ in 0..2 {
            let (before, now) = (subject.present().await, subject.now().await);
            for micros in [NEEDED.as_micros() as u64, 2_000_000] {
                let not_before = Timestamp::from_micros(now.micros() + micros);
                let (swap, outcome) = subject.swap(&subject.known, not_before).await;
                let reached = subject.now().await;
                // The machine may have paused for that long.
                promise!(
                    IN_TIME,
                    outcome == Swapped::Early || reached >= not_before,
                    "{swap:?} at {now:?}: {outcome:?}"
                );
                if outcome == Swapped::Done {
                    return;
                }
            }
            let after = subject.present().await;
            promise!(
                IN_TIME,
                before == after,
                "an early swap has changed {before:?} to {after:?}"
            );
            // Its time has come.
            let (swap, outcome) = subject.swap(&subject.known, now).await;
            promise!(
                IN_TIME,
                outcome == Swapped::Done,
                "{swap:?} after {now:?}: {outcome:?}"
            );
            let versions = swap.changes.iter().map(|it| Some(it.record.version));
            subject.known = versions.collect();
        }
    })
    .await;
}
