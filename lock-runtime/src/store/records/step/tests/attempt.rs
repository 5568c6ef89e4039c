//! The calls that an operation makes, and its pauses among other clients.

use super::{
    super::{
        super::{SwapReply, Swapped},
        attempt::{Attempt, Next, Pending},
        cache::Cache,
        evaluation::Lock,
        turns::Turn,
    },
    *,
};
use crate::{
    request::{key::LockKey, spec::LockKind},
    store::{
        AcquireReply, Hold, IfBusy, KeyRequest, StoreErrorKind, remote::outage::InOutage,
        table::Table,
    },
};

fn lock(name: &str) -> Lock {
    Lock::new(&LockKey::new(name).unwrap(), LockKind::Lock)
}

/// An acquisition of the first of these locks.
fn acquiring(names: &[&str]) -> Attempt<AcquireReply> {
    let locks: Vec<_> = names.iter().map(|name| lock(name)).collect();
    let caller = Token::random();
    let hold = Hold::new(locks[0].key.clone(), Mode::Exclusive, caller);
    Attempt::new(locks, move |table: &mut Table, step| {
        let mut request = KeyRequest::new(hold.clone(), LEASE, step.now);
        request.if_busy = IfBusy::Queue;
        table.acquire(&request, step)
    })
    .in_outage(InOutage::Wait)
    .caller(Some(caller))
}

fn next(attempt: &mut Attempt<AcquireReply>) -> Next<AcquireReply> {
    attempt.next(Some(exactly(NOW))).unwrap()
}

fn reads(attempt: &mut Attempt<AcquireReply>) -> bool {
    matches!(next(attempt), Next::Read)
}

fn swap(attempt: &mut Attempt<AcquireReply>) -> Pending<AcquireReply> {
    match next(attempt) {
        Next::Swap(pending) => *pending,
        Next::Read => panic!("it reads"),
        Next::Done(reply, _) => panic!("{reply:?}"),
    }
}

/// Makes a swap that conflicts with one of another client.
fn lose(attempt: &mut Attempt<AcquireReply>) {
    let pending = swap(attempt);
    let present = pending.swap.changes.iter().map(|_| None).collect();
    let reply = SwapReply::new(NOW, Swapped::Conflict(present));
    assert_eq!(attempt.was_swapped(pending, reply), None);
}

fn lost(names: &[&str], conflicts: usize) -> Attempt<AcquireReply> {
    let mut attempt = acquiring(names);
    attempt.was_read(names.iter().map(|_| None).collect());
    (0..conflicts).for_each(|_| lose(&mut attempt));
    attempt
}

/// Returns a cache that knows clients which have left the record a moment ago.
fn cache(clients: usize) -> Cache {
    let cache = Cache::default();
    let clients: Vec<_> = (0..clients).map(|_| ClientId::random()).collect();
    cache.put(&name(), Some(record(&[])));
    cache.put(&name(), Some(record(&clients)));
    cache.put(&name(), Some(record(&[])));
    cache
}

#[test]
fn an_operation_reads_no_record_that_is_known_or_assumed_to_be_absent() {
    let cache = Cache::default();
    assert!(reads(&mut acquiring(&["a"]).cached(&cache, false)));
    assert!(!reads(&mut acquiring(&["a"]).cached(&cache, true)));
    let present = record(&[]);
    cache.put(&name(), Some(present.clone()));
    let mut attempt = acquiring(&["a"]).cached(&cache, false);
    let found = [Some(present.clone())];
    assert!(attempt.has_found(&found));
    assert!(!attempt.has_found(&[None]));
    let pending = swap(&mut attempt);
    assert_eq!(pending.swap.changes[0].known, Some(present.version));
    // Another operation of this process has changed it.
    let changed = record(&[]);
    cache.put_own(&name(), changed.clone());
    attempt.begin_again(&cache);
    assert!(attempt.has_found(&[Some(changed)]));
}

#[test]
fn a_damaged_record_is_read_again_before_the_operation_fails() {
    let damaged = Record::new(Version::random(), vec![1, 255]);
    let cache = Cache::default();
    cache.put(&name(), Some(damaged.clone()));
    let mut attempt = acquiring(&["a"]).cached(&cache, false);
    assert!(reads(&mut attempt));
    attempt.was_read(vec![Some(damaged)]);
    let error = attempt.next(Some(exactly(NOW))).err().unwrap();
    assert_eq!(error.kind(), StoreErrorKind::IncompatibleFormat);
}

/// The record of a lock that does not change may be outdated as well.
#[test]
fn a_conflict_saves_a_read_if_it_shows_the_records_of_all_locks() {
    assert!(!reads(&mut lost(&["a"], 1)));
    assert!(reads(&mut lost(&["a", "b"], 1)));
}

#[test]
fn the_database_locks_a_contended_record_and_otherwise_operations_take_turns() {
    for (names, conflicts) in [(&["a"][..], 0), (&["a"][..], 1), (&["a", "b"][..], 1)] {
        let attempt = lost(names, conflicts);
        assert_eq!(attempt.locks_records(), conflicts > 0);
        assert_eq!(attempt.in_turn(), None);
        let attempt = attempt.without_locks();
        assert!(!attempt.locks_records());
        let turn = || Turn {
            name: name(),
            acquires: true,
        };
        let is_in_turn = conflicts > 0 && names.len() == 1;
        assert_eq!(attempt.in_turn(), is_in_turn.then(turn), "{names:?}");
    }
    // A renewal is not behind acquisitions.
    let renewal = lost(&["a"], 1).in_outage(InOutage::Try).without_locks();
    assert!(!renewal.in_turn().unwrap().acquires);
}

/// A turn takes two changes: an acquisition and a release.
#[tokio::test(start_paused = true)]
async fn a_client_that_has_had_two_turns_in_a_row_lets_one_farther_away_have_its_own() {
    let cache = cache(1);
    let round_trip = Duration::from_millis(1);
    for written in 1..6 {
        cache.put_own(&name(), record(&[]));
        let mut attempt = acquiring(&["a"]).cached(&cache, false);
        let pause = attempt.makes_way(&cache, round_trip, None).unwrap();
        let is_short = pause < round_trip;
        assert_eq!(is_short, written < 4, "{written}: {pause:?}");
        assert!(reads(&mut attempt), "{written}");
    }
}

/// It takes nothing from the others, and they wait for nothing.
#[tokio::test(start_paused = true)]
async fn a_request_that_queues_behind_another_client_makes_no_way_for_it() {
    let round_trip = Duration::from_millis(1);
    for (holder, makes_way) in [(None, true), (Some(ClientId::random()), false)] {
        let cache = cache(1);
        cache.put_own(&name(), record(holder.as_slice()));
        let mut attempt = acquiring(&["a"]).cached(&cache, false);
        let pause = attempt.makes_way(&cache, round_trip, Some(exactly(NOW)));
        assert_eq!(pause.is_some(), makes_way);
        assert_eq!(reads(&mut attempt), makes_way);
    }
}
