//! Calls about several records, large ones, and messages.

use std::{
    sync::{Arc, Mutex, PoisonError, Weak},
    time::Duration,
};

use lock_runtime::{
    operator::ClientId,
    store::{
        Instant, Records,
        records::{Change, Inbox, Message, Record, RecordName, Swap, Swapped, Timestamp, Version},
    },
};
use tokio::time::sleep;

use super::{NEEDED, version};
use crate::subject::{IMPRECISE, LONG, in_time, promise, skipped, unique};

const OWN: &str = "each swap of a batch has its own outcome";
const ALL: &str = "a read and a list show each record, and none for a name that has none";
const SILENT: &str = "a swap sends its messages only if it takes effect";
const ONWARD: &str = "the clock goes on by itself, and no client is behind another one";
/// More than a store may put into a call.
const MANY: usize = 300;
/// The record of a lock for which a thousand processes wait.
const LARGE: usize = 40 * 1024;
const PAUSE: Duration = Duration::from_millis(1200);

fn swap(name: &RecordName, known: Option<Version>, body: Vec<u8>, now: Timestamp) -> Swap {
    let needed_until = Timestamp::from_micros(now.micros() + NEEDED.as_micros() as u64);
    let record = Record::new(version(), body);
    let change = Change::new(name.clone(), known, record, needed_until);
    Swap::new(vec![change], Timestamp::default())
}

fn name() -> RecordName {
    RecordName::new(unique())
}

/// Checks that a conflict of one swap does not change the outcome of those that are made with it.
///
/// # Panics
/// If the database breaks this promise.
pub async fn swaps_of_a_batch_have_their_own_outcomes(make: &impl AsyncFn() -> Arc<dyn Records>) {
    in_time(async {
        let records = make().await;
        let now = records.read(&[]).await.expect("the time").now;
        let names: Vec<_> = (0..40).map(|_| name()).collect();
        let is_wrong = |index: usize| index % 3 == 1;
        let known = |index| is_wrong(index).then(version);
        let swaps = names.iter().enumerate();
        let swaps = swaps.map(|(index, name)| swap(name, known(index), b"new".to_vec(), now));
        let swaps: Vec<_> = swaps.collect();
        let replies = records.swap_each(&swaps).await;
        promise!(
            OWN,
            replies.len() == swaps.len(),
            "{} replies",
            replies.len()
        );
        for (index, reply) in replies.into_iter().enumerate() {
            let outcome = reply.expect("a reply to a swap").outcome;
            let expected = match is_wrong(index) {
                true => Swapped::Conflict(vec![None]),
                false => Swapped::Done,
            };
            promise!(
                OWN,
                outcome == expected,
                "{index}: {outcome:?} instead of {expected:?}"
            );
        }
        let present = records.read(&names).await.expect("the records").records;
        for (index, (record, swap)) in present.into_iter().zip(&swaps).enumerate() {
            let expected = (!is_wrong(index)).then(|| swap.changes[0].record.clone());
            promise!(OWN, record == expected, "{index}: {record:?}");
        }
    })
    .await;
}

/// Checks that a read of many names and a list show those that have a record, however large, in
/// their order.
///
/// # Panics
/// If the database breaks this promise.
pub async fn reads_show_many_records_and_large_ones(make: &impl AsyncFn() -> Arc<dyn Records>) {
    in_time(async {
        let records = make().await;
        let now = records.read(&[]).await.expect("the time").now;
        let prefix = unique();
        let name = |index| RecordName::new(format!("{prefix}.{index:03}"));
        let names: Vec<_> = (0..MANY).map(name).collect();
        let body = |index: usize| match index {
            0 => Some(Vec::new()),
            1 => Some((0..LARGE).map(|byte| byte as u8).collect()),
            _ => index
                .is_multiple_of(7)
                .then(|| format!("{index}").into_bytes()),
        };
        for (index, name) in names.iter().enumerate() {
            let Some(body) = body(index) else { continue };
            let reply = records.swap(&swap(name, None, body, now)).await;
            let outcome = reply.expect("a reply to a swap").outcome;
            promise!(ALL, outcome == Swapped::Done, "{index}: {outcome:?}");
        }
        let present = records.read(&names).await.expect("the records").records;
        promise!(ALL, present.len() == MANY, "{} of {MANY}", present.len());
        for (index, record) in present.into_iter().enumerate() {
            let (found, expected) = (record.map(|record| record.body), body(index));
            let [found_size, size] = [&found, &expected].map(|it| it.as_ref().map(Vec::len));
            promise!(
                ALL,
                found == expected,
                "name {index}: {found_size:?} bytes instead of {size:?}"
            );
        }
        let mut listed = Vec::new();
        loop {
            let page = records.list(&prefix, listed.last()).await.expect("a list");
            if page.is_empty() {
                break;
            }
            listed.extend(page.into_iter().map(|(name, _)| name));
        }
        let expected = names.into_iter().enumerate();
        let expected = expected.filter(|(index, _)| body(*index).is_some());
        let expected: Vec<_> = expected.map(|(_, name)| name).collect();
        promise!(ALL, listed == expected, "{} in the list", listed.len());
    })
    .await;
}

/// Collects messages.
#[derive(Default)]
struct Collected(Mutex<Vec<Vec<u8>>>);

impl Collected {
    fn messages(&self) -> Vec<Vec<u8>> {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

impl Inbox for Collected {
    fn deliver(&self, message: &[u8]) {
        let mut messages = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        messages.push(message.to_vec());
    }

    fn connected(&self, _is_connected: bool) {}
}

/// Checks that the messages of a swap are sent if it takes effect, and not otherwise.
///
/// # Panics
/// If the database breaks this promise.
pub async fn swaps_without_effect_send_no_message(make: &impl AsyncFn() -> Arc<dyn Records>) {
    in_time(async {
        let (records, sender) = (make().await, make().await);
        if !records.limits().push {
            return skipped("messages", "the database has none");
        }
        let inbox = Arc::new(Collected::default());
        let weak: Weak<Collected> = Arc::downgrade(&inbox);
        records.listen(weak);
        let client = ClientId::random();
        records.expect_messages(client).await;
        let now = sender.read(&[]).await.expect("the time").now;
        let name = name();
        let of = |known, text: &str| {
            let mut swap = swap(&name, known, Vec::new(), now);
            swap.messages = vec![Message::new(client, text.as_bytes().to_vec())];
            swap
        };
        let conflict = of(Some(version()), "of a conflict");
        let outcome = sender.swap(&conflict).await.expect("a reply").outcome;
        promise!(
            SILENT,
            outcome == Swapped::Conflict(vec![None]),
            "{outcome:?}"
        );
        let mut early = of(None, "of an early swap");
        let future = now.micros() + NEEDED.as_micros() as u64;
        early.not_before = Timestamp::from_micros(future);
        let outcome = sender.swap(&early).await.expect("a reply").outcome;
        promise!(SILENT, outcome == Swapped::Early, "{outcome:?}");
        // A message may be lost, but not each of them.
        let mut known = None;
        for _ in 0..LONG.as_millis() / 100 {
            let swap = of(known, "sent");
            let outcome = sender.swap(&swap).await.expect("a reply").outcome;
            promise!(SILENT, outcome == Swapped::Done, "{outcome:?}");
            known = Some(swap.changes[0].record.version);
            sleep(Duration::from_millis(100)).await;
            if !inbox.messages().is_empty() {
                break;
            }
        }
        let received = inbox.messages();
        let is_sent = |message: &Vec<u8>| message == b"sent";
        promise!(
            SILENT,
            !received.is_empty() && received.iter().all(is_sent),
            "{received:?}"
        );
    })
    .await;
}

/// Checks that time passes by the clock while no call is made, about as fast as for the test, and
/// that the clients agree on it.
///
/// # Panics
/// If the database breaks this promise.
pub async fn the_clock_goes_on_for_all_clients(make: &impl AsyncFn() -> Arc<dyn Records>) {
    in_time(async {
        let clients = [make().await, make().await];
        // A clock that the clients advance goes on from their first calls.
        for client in &clients {
            client.read(&[]).await.expect("the time");
        }
        let mut before: Option<(Timestamp, Timestamp)> = None;
        for turn in 0..4 {
            let begun = Instant::now();
            sleep(PAUSE).await;
            let reply = clients[turn % 2].read(&[]).await.expect("the time");
            let passed = begun.elapsed();
            let (now, latest) = (reply.now.micros(), reply.latest.micros());
            promise!(ONWARD, now <= latest, "{now} is after {latest}");
            if let Some((first, last)) = before {
                let least = first.micros() + (PAUSE / 2).as_micros() as u64;
                let most = last.micros() + (passed + passed / 50 + IMPRECISE).as_micros() as u64;
                promise!(
                    ONWARD,
                    latest >= least && now <= most,
                    "turn {turn}: {now} to {latest}, {passed:?} after {first:?} to {last:?}"
                );
            }
            before = Some((reply.now, reply.latest));
        }
    })
    .await;
}
