//! Each fault of a database is noticed by the conformance tests, and slowness does no harm.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use lock_runtime::store::{
    RecordStore, Records, Replied, Replies, Store, StoreError,
    records::{ReadReply, Record, RecordName, Swap, SwapReply, Swapped, Timestamp},
};
use tokio::time::sleep;

use super::files::{FileRecords, Place};
use crate::conformance::noticed::{LATE, notices};

/// Any promise: which one is seen first, two holders or the lock of a lost release, is chance.
const BREAKS: &str = "the store breaks";
const DAY: Duration = Duration::from_secs(24 * 60 * 60);
const LATENESS: Duration = Duration::from_millis(100);
/// The time that a swap takes which is executed late if it is dropped meanwhile.
const DROPPED_WITHIN: Duration = Duration::from_millis(30);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// Replaces records of any version.
    IgnoresVersions,
    /// Compares the version of the first record of a swap only.
    ComparesOneVersion,
    /// Returns the records of a conflict in another order.
    ReversesConflicts,
    /// Replaces records before the time of a swap.
    IgnoresTimes,
    /// Keeps the version of a record that it replaces.
    KeepsVersions,
    /// Replies to each fifth swap without executing it.
    LosesSwaps,
    /// Executes only the first change of a swap.
    HalvesSwaps,
    /// Executes a swap once more, and late, if its future was dropped.
    ExecutesLate,
    /// The same, and deletes the records of free locks.
    ForgetsAndExecutesLate,
    /// Executes a swap at once, and replies late.
    RepliesLate,
    /// Gives all swaps of a batch the outcome of one that conflicts.
    ConflictsTogether,
    /// Keeps the first 32 KiB of a record.
    CutsRecords,
    /// Returns the first hundred records of a read.
    ReadsAHundred,
    /// Shows the time of its start.
    Stands,
}

#[derive(Clone, Debug)]
struct Faulty {
    records: FileRecords,
    fault: Fault,
    swaps: Arc<AtomicUsize>,
    /// Swaps whose futures were dropped, until another one changes the same record.
    dropped: Arc<Mutex<Vec<Swap>>>,
    start: Timestamp,
}

impl Faulty {
    fn new(place: &Place, fault: Fault) -> Self {
        Self {
            records: place.records(),
            fault,
            swaps: Arc::default(),
            dropped: Arc::default(),
            start: Timestamp::of_system(),
        }
    }

    /// Executes dropped swaps after another one, such as that of the abandonment.
    fn execute_late(&self, after: &Swap) {
        let names: Vec<_> = after.changes.iter().map(|change| &change.name).collect();
        let late = |swap: &mut Swap| {
            swap.changes
                .iter()
                .any(|change| names.contains(&&change.name))
        };
        for swap in self.dropped.lock().unwrap().extract_if(.., late) {
            let faulty = self.clone();
            tokio::spawn(async move {
                sleep(LATENESS).await;
                // Any swap deletes the records that are not needed.
                let none = Swap::new(Vec::new(), Timestamp::default());
                faulty.records.swap(&none).await.unwrap();
                faulty.swap(swap).await.unwrap();
            });
        }
    }

    async fn swap(self, mut swap: Swap) -> Result<SwapReply, StoreError> {
        let nth = self.swaps.fetch_add(1, Ordering::Relaxed);
        match self.fault {
            Fault::LosesSwaps if nth % 5 == 4 => {
                return Ok(SwapReply::new(Timestamp::of_system(), Swapped::Done));
            }
            Fault::IgnoresVersions => return self.overwrite(swap, 0).await,
            Fault::ComparesOneVersion => return self.overwrite(swap, 1).await,
            Fault::IgnoresTimes => swap.not_before = Timestamp::default(),
            Fault::KeepsVersions => {
                for change in &mut swap.changes {
                    change.record.version = change.known.unwrap_or(change.record.version);
                }
            }
            Fault::HalvesSwaps => swap.changes.truncate(1),
            Fault::CutsRecords => {
                let records = swap.changes.iter_mut().map(|change| &mut change.record);
                records.for_each(|record| record.body.truncate(32 * 1024));
            }
            Fault::ForgetsAndExecutesLate => {
                for change in &mut swap.changes {
                    let micros = change.needed_until.micros() - DAY.as_micros() as u64;
                    change.needed_until = Timestamp::from_micros(micros);
                }
            }
            _ => {}
        }
        let mut reply = self.records.swap(&swap).await;
        if self.fault == Fault::ReversesConflicts
            && let Ok(SwapReply {
                outcome: Swapped::Conflict(present),
                ..
            }) = &mut reply
        {
            present.reverse();
        }
        if self.fault == Fault::RepliesLate {
            sleep(LATENESS).await;
        }
        reply
    }

    /// Replaces records of any version, apart from the first ones, which are `compared`.
    async fn overwrite(self, mut swap: Swap, compared: usize) -> Result<SwapReply, StoreError> {
        loop {
            let reply = self.records.swap(&swap).await?;
            let Swapped::Conflict(present) = &reply.outcome else {
                return Ok(reply);
            };
            for (index, (change, record)) in swap.changes.iter_mut().zip(present).enumerate() {
                let version = record.as_ref().map(|record| record.version);
                if index < compared && version != change.known {
                    return Ok(reply);
                }
                change.known = version;
            }
        }
    }
}

/// A swap that is executed late if its future is dropped.
struct Late<'a>(Option<(&'a Faulty, &'a Swap)>);

impl Drop for Late<'_> {
    fn drop(&mut self) {
        if let Some((faulty, swap)) = self.0.take() {
            faulty.dropped.lock().unwrap().push(swap.clone());
        }
    }
}

impl Records for Faulty {
    fn swap<'a>(&'a self, swap: &'a Swap) -> Replied<'a, SwapReply> {
        let late = matches!(
            self.fault,
            Fault::ExecutesLate | Fault::ForgetsAndExecutesLate
        );
        Box::pin(async move {
            let mut late = Late(late.then_some((self, swap)));
            if late.0.is_some() {
                sleep(DROPPED_WITHIN).await;
            }
            let reply = self.clone().swap(swap.clone()).await;
            late.0 = None;
            self.execute_late(swap);
            reply
        })
    }

    fn swap_each<'a>(&'a self, swaps: &'a [Swap]) -> Replies<'a, SwapReply> {
        Box::pin(async move {
            let mut replies = self.records.swap_each(swaps).await;
            let is_conflict = |it: &&Result<SwapReply, StoreError>| matches!(it, Ok(reply) if matches!(reply.outcome, Swapped::Conflict(_)));
            if self.fault == Fault::ConflictsTogether
                && let Some(conflict) = replies.iter().find(is_conflict).cloned()
            {
                replies.fill(conflict);
            }
            replies
        })
    }

    fn read<'a>(&'a self, names: &'a [RecordName]) -> Replied<'a, ReadReply> {
        Box::pin(async move {
            let mut reply = self.records.read(names).await?;
            match self.fault {
                Fault::ReadsAHundred => reply.records.truncate(100),
                Fault::Stands => reply = ReadReply::new(self.start, reply.records),
                _ => {}
            }
            Ok(reply)
        })
    }

    fn list<'a>(
        &'a self,
        prefix: &'a str,
        after: Option<&'a RecordName>,
    ) -> Replied<'a, Vec<(RecordName, Record)>> {
        self.records.list(prefix, after)
    }
}

/// Makes a client of a database with a fault each time.
macro_rules! make {
    ($place:ident, $fault:expr) => {{
        let records = Faulty::new(&$place, $fault);
        async move || Arc::new(RecordStore::new(records.clone())) as Arc<dyn Store>
    }};
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn versions_that_do_not_count_are_noticed() {
    for fault in [Fault::IgnoresVersions, Fault::KeepsVersions] {
        let place = Place::new();
        let make = make!(place, fault);
        notices(
            BREAKS,
            lock_conformance::contenders_exclude_each_other(&make),
        )
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn faults_that_locks_meet_rarely_are_noticed() {
    for (fault, promise) in [
        (
            Fault::ComparesOneVersion,
            "each of them has the known version",
        ),
        (Fault::IgnoresVersions, "each of them has the known version"),
        (Fault::HalvesSwaps, "a swap"),
        (Fault::ReversesConflicts, "in the order of the changes"),
        (Fault::IgnoresTimes, "before its time"),
        (Fault::ConflictsTogether, "has its own outcome"),
        (Fault::CutsRecords, "a read and a list show each record"),
        (Fault::ReadsAHundred, "a read and a list show each record"),
        (Fault::Stands, "the clock goes on"),
    ] {
        let place = Place::new();
        let records = Arc::new(Faulty::new(&place, fault));
        let make = async || records.clone() as Arc<dyn Records>;
        notices(promise, async {
            lock_conformance::swaps_compare_every_version(&make).await;
            lock_conformance::conflicts_are_in_the_order_of_their_changes(&make).await;
            lock_conformance::swaps_wait_for_their_time(&make).await;
            lock_conformance::swaps_of_a_batch_have_their_own_outcomes(&make).await;
            lock_conformance::reads_show_many_records_and_large_ones(&make).await;
            lock_conformance::the_clock_goes_on_for_all_clients(&make).await;
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn swaps_that_are_lost_are_noticed() {
    let place = Place::new();
    let make = make!(place, Fault::LosesSwaps);
    notices(
        BREAKS,
        lock_conformance::contenders_exclude_each_other(&make),
    )
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn swaps_of_which_a_part_is_lost_are_noticed() {
    let place = Place::new();
    let make = make!(place, Fault::HalvesSwaps);
    let promise = "a call that is repeated does no more than the first one";
    notices(
        promise,
        lock_conformance::several_keys_are_acquired_together(&make),
    )
    .await;
}

/// A swap that is executed late finds another version, as long as that record is kept.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn records_that_are_deleted_early_are_noticed() {
    let place = Place::new();
    let make = make!(place, Fault::ForgetsAndExecutesLate);
    notices(
        LATE,
        lock_conformance::abandoned_requests_have_no_effect(&make),
    )
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_swaps_and_late_replies_do_no_harm() {
    for fault in [Fault::ExecutesLate, Fault::RepliesLate] {
        let place = Place::new();
        let make = make!(place, fault);
        lock_conformance::abandoned_requests_have_no_effect(&make).await;
        lock_conformance::dropped_calls_can_be_abandoned(&make).await;
    }
}
