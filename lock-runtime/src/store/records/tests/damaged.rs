//! Records and messages that no client has written: damaged, or made to do harm. Every rule reads
//! them without a panic, and grants no number twice.
//!
//! `LOCK_TESTS_STORM=400 cargo test -p lock-runtime --all-features --lib records::tests` takes ten
//! minutes. `LOCK_TESTS_SEED=n` begins with another record.

use std::{collections::BTreeMap, env, num::NonZeroU32, str::FromStr, time::Duration};

use rand::{RngExt as _, SeedableRng as _, rngs::StdRng, seq::IndexedRandom as _};

use super::{
    Message, Record, RecordName, Timestamp, Version, news,
    step::{
        body::{Body, StoredMode},
        clock::{Clock, Now, Reading},
        evaluation::{Lock, Terms, Writes, evaluate},
    },
};
use crate::{
    guard::fence::FencingToken,
    request::key::LockKey,
    request::spec::{LockKind, Mode},
    shell::time::Instant,
    store::{
        AcquireReply, ClientId, Grant, Hold, IfBusy, KeyRequest, NextHolder, Release, Renewal,
        RevokeScope, StoreEvent, Token,
        table::{Step, Table},
    },
};

/// The time for which a test runs.
const USUAL: Duration = Duration::from_millis(1500);
const NOW: u64 = 1_800_000_000_000_000;

type StoredSlot = ([u8; 16], bool, u64, u64);
type StoredPlace = ([u8; 16], StoredMode, u64, u32, u64, u64);
/// The fields of a [`Body`].
type Fields = (
    u64,
    u64,
    Vec<[u8; 16]>,
    StoredMode,
    Vec<StoredSlot>,
    Vec<StoredPlace>,
);

fn variable<T: FromStr>(name: &str) -> Option<T> {
    env::var(name).ok()?.parse().ok()
}

/// Calls `round` with one seed after the other until the time is over.
fn storm(mut round: impl FnMut(&mut StdRng)) {
    let until = Instant::now() + USUAL * variable("LOCK_TESTS_STORM").unwrap_or(1);
    let mut seed = variable("LOCK_TESTS_SEED").unwrap_or(0);
    while Instant::now() < until {
        let begun = Instant::now();
        let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            round(&mut StdRng::seed_from_u64(seed));
        }));
        assert!(ended.is_ok(), "LOCK_TESTS_SEED={seed}");
        // Far longer than a loop that is bounded by the record.
        assert!(
            begun.elapsed() < Duration::from_secs(60),
            "LOCK_TESTS_SEED={seed}"
        );
        seed += 1;
    }
    println!("{seed} rounds");
}

/// A choice of numbers near the bounds of their types and of the time.
fn number(random: &mut StdRng) -> u64 {
    let near = [0, 1 << 31, 1 << 32, NOW, 1 << 53, 1 << 63, u64::MAX];
    let near = *near.choose(random).unwrap();
    match random.random_range(0..4) {
        0 => random.random(),
        1 => near.wrapping_add(random.random_range(0..3)),
        2 => near.wrapping_sub(random.random_range(0..3)),
        _ => NOW.wrapping_add_signed(random.random_range(-20_000_000..20_000_000)),
    }
}

fn token(random: &mut StdRng) -> Token {
    Token::from_bytes([random.random_range(0..6); 16])
}

fn mode(random: &mut StdRng) -> Mode {
    match random.random_range(0..3) {
        0 => Mode::Exclusive,
        1 => Mode::Shared,
        _ => Mode::Permits(NonZeroU32::new(random.random_range(1..5)).unwrap()),
    }
}

fn several<T>(random: &mut StdRng, mut one: impl FnMut(&mut StdRng) -> T) -> Vec<T> {
    let count = match random.random_range(0..100) {
        0 => 300,
        _ => random.random_range(0..5),
    };
    (0..count).map(|_| one(random)).collect()
}

fn fields(random: &mut StdRng) -> Fields {
    let slot = |random: &mut StdRng| {
        let token = token(random).to_bytes();
        (token, random.random(), number(random), number(random))
    };
    let place = |random: &mut StdRng| {
        let (token, mode) = (token(random).to_bytes(), mode(random).into());
        let (lease, reserved) = (number(random), number(random) as u32);
        (token, mode, lease, reserved, number(random), number(random))
    };
    let revoked = several(random, |random| token(random).to_bytes());
    let mode = mode(random).into();
    let (slots, queue) = (several(random, slot), several(random, place));
    (number(random), number(random), revoked, mode, slots, queue)
}

/// Changes some bytes, or their number.
fn damage(random: &mut StdRng, bytes: &mut Vec<u8>) {
    for _ in 0..random.random_range(0..4) {
        let at = random.random_range(0..=bytes.len());
        match random.random_range(0..4) {
            0 => bytes.truncate(at),
            1 => bytes.insert(at, random.random()),
            2 => bytes.splice(at..at, [255; 9]).for_each(drop),
            _ => {
                if let Some(byte) = bytes.get_mut(at) {
                    *byte ^= 1 << random.random_range(0..8);
                }
            }
        }
    }
}

fn body(random: &mut StdRng) -> Vec<u8> {
    let mut bytes = postcard::to_extend(&fields(random), vec![1]).unwrap();
    if random.random() {
        damage(random, &mut bytes);
    }
    bytes
}

/// Executes one of the operations on a lock. Returns the fencing token that it grants to a token
/// that the record does not contain.
fn operate(
    random: &mut StdRng,
    lock: &Lock,
    table: &mut Table,
    step: &mut Step<'_>,
) -> Option<FencingToken> {
    let key = lock.key.clone();
    let mode = match lock.kind {
        LockKind::Permits => Mode::Permits(NonZeroU32::MIN),
        LockKind::Lock => *[Mode::Exclusive, Mode::Shared].choose(random).unwrap(),
    };
    let hold = Hold::new(key.clone(), mode, token(random));
    let lease = Duration::from_secs(random.random_range(0..100_000));
    match random.random_range(0..9) {
        0 | 1 => {
            let fresh = Hold::new(key, mode, Token::random());
            let mut request = KeyRequest::new(fresh, lease, step.now + lease);
            request.reserved = number(random) as u32;
            request.if_busy = *[IfBusy::Queue, IfBusy::Refuse].choose(random).unwrap();
            match table.acquire(&request, step) {
                AcquireReply::Granted(Grant { fence, .. }) => return Some(fence),
                _ => return None,
            }
        }
        2 => {
            let request = KeyRequest::new(hold, lease, step.now + lease);
            table.acquire(&request, step);
        }
        3 => {
            table.poll(&hold, step);
        }
        4 => {
            let renewal = Renewal::new(hold, lease);
            table.renew(
                &renewal.at_most(random.random::<bool>().then_some(lease)),
                step.now,
                step.begins,
            );
        }
        5 => {
            let mut release = Release::new(hold);
            release.keep_for = random.random::<bool>().then_some(lease);
            release.next = random
                .random::<bool>()
                .then(|| NextHolder::new(Token::random(), lease, number(random) as u32));
            table.release(&release, step);
        }
        6 => table.abandon(&hold, step),
        7 => drop(table.convert(&hold, step)),
        _ => {
            let found = table.inspect(&key, lock.kind, step);
            let scope = match found.holders.first() {
                Some(holder) if random.random() => RevokeScope::Holder(holder.id),
                _ => RevokeScope::AlsoEndless,
            };
            table.revoke(&key, lock.kind, scope, step);
        }
    }
    None
}

fn now(random: &mut StdRng) -> Now {
    let reached = match random.random_range(0..4) {
        0 => number(random),
        _ => NOW,
    };
    let reached = Timestamp::from_micros(reached);
    let latest = reached.later(Duration::from_millis(random.random_range(0..100)));
    let unsure = latest.since(reached);
    Now {
        reached,
        latest,
        unsure,
    }
}

#[test]
fn no_record_makes_a_rule_panic_or_grant_a_number_twice() {
    let mut granted = BTreeMap::new();
    storm(|random| {
        let key = LockKey::new("a").unwrap();
        let kind = *[LockKind::Lock, LockKind::Permits].choose(random).unwrap();
        let lock = Lock::new(&key, kind);
        let terms = Terms {
            now: now(random),
            caller: random.random::<bool>().then(|| token(random)),
            is_guarded: random.random_bool(0.2),
            writes: *[Writes::Changes, Writes::Durably, Writes::Always]
                .choose(random)
                .unwrap(),
        };
        let mut record = Some(Record::new(Version::random(), body(random)));
        // Each operation begins with the record that the one before has written.
        for _ in 0..4 {
            let before = record
                .as_ref()
                .map(|record| Body::read(&lock.name, &record.body));
            let found = [record.clone()];
            let locks = std::slice::from_ref(&lock);
            let rule = |table: &mut Table, step: &mut Step<'_>| operate(random, &lock, table, step);
            let Ok(evaluation) = evaluate(locks, &found, &terms, rule) else {
                assert!(before.is_some_and(|before| before.is_err()));
                return;
            };
            let latest = before.and_then(Result::ok).map_or(0, |before| {
                before.is_taken(terms.now.reached);
                before.fence
            });
            if let Some(fence) = evaluation.outcome {
                assert!(fence.number() > latest, "{fence} after {latest}");
                *granted.entry(lock.kind as usize).or_insert(0) += 1;
            }
            for caused in &evaluation.events {
                for change in evaluation.swap.iter().flat_map(|swap| &swap.changes) {
                    let shows_record = random.random();
                    let now = terms.now.reached;
                    news::message(caused.client, &caused.event, change, now, shows_record);
                }
            }
            if let Some(swap) = evaluation.swap {
                let written = swap.changes.into_iter().next().unwrap().record;
                Body::read(&lock.name, &written.body).unwrap();
                record = Some(written);
            }
        }
    });
    // The records are not all refused.
    assert!(
        granted.len() == 2 && granted.values().all(|count| *count > 10),
        "{granted:?}"
    );
}

#[test]
fn no_message_makes_a_client_panic() {
    let mut read = 0;
    storm(|random| {
        let clock = Clock::default();
        let now = now(random);
        clock.read(now.reached, now.latest, Instant::now());
        let reading: Reading = clock.reading().unwrap();
        let name = RecordName::new("a");
        let record = Record::new(Version::random(), body(random));
        let change = super::Change::new(name, None, record, Timestamp::from_micros(NOW));
        let (key, kind) = (LockKey::new("a").unwrap(), LockKind::Lock);
        let ttl = Duration::from_micros(number(random));
        let event = match random.random_range(0..3) {
            0 => {
                let fence = FencingToken::new(number(random)).unwrap_or(FencingToken::LAST);
                let hold = Hold::new(key, mode(random), token(random));
                let grant = Grant::new(fence, ttl).reserved(number(random) as u32);
                StoreEvent::granted(hold, grant)
            }
            1 => StoreEvent::FreeIn { key, kind, ttl },
            _ => StoreEvent::Revoked {
                token: token(random),
            },
        };
        let sent = Timestamp::from_micros(number(random));
        let Some(Message { mut body, .. }) =
            news::message(ClientId::random(), &event, &change, sent, random.random())
        else {
            return;
        };
        if random.random() {
            damage(random, &mut body);
        }
        read += usize::from(news::read(&body, &reading).is_some());
    });
    assert!(read > 10, "{read}");
}
