//! Operations on records, step by step, at any time.

mod attempt;
mod evaluation;
mod outcome;

use std::{sync::Arc, time::Duration};

use super::{
    super::{Record, RecordName, Timestamp, Version},
    body::{Body, Origin},
    clock::Now,
};
use crate::{
    guard::fence::FencingToken,
    request::spec::Mode,
    shell::time::Instant,
    store::{
        ClientId, Token,
        table::entry::{Entry, Recorded, Slot},
    },
};

const LEASE: Duration = Duration::from_secs(10);
const SECOND: Duration = Duration::from_secs(1);
const NOW: Timestamp = Timestamp::from_micros(1_800_000_000_000_000);

/// Returns the name of a lock.
pub(super) fn name() -> RecordName {
    RecordName::new("a")
}

/// Creates a record whose lock these clients hold.
pub(super) fn record(clients: &[ClientId]) -> Record {
    let mut entry = Entry::new(Mode::Shared);
    let slots = clients.iter().map(|client| slot(Token::of(*client)));
    entry.slots.extend(slots);
    written(&entry)
}

/// Creates the record of a lock that is done.
pub(super) fn record_of_done() -> Record {
    let mut entry = Entry::new(Mode::Exclusive);
    let result = Recorded {
        fence: FencingToken::LAST,
        at: 0,
        value: Arc::from(*b"result"),
    };
    entry.slots.push(Slot {
        kept: true,
        result: Some(Box::new(result)),
        ..slot(Token::random())
    });
    written(&entry)
}

fn slot(token: Token) -> Slot {
    Slot {
        token,
        kept: false,
        expires: Instant::now() + LEASE,
        fence: FencingToken::LAST,
        result: None,
    }
}

fn written(entry: &Entry) -> Record {
    let origin = Origin::at(Instant::now(), NOW.micros());
    let body = Body::of(Some(entry), 1, 1, origin);
    Record::new(Version::random(), body.write(&name()).unwrap())
}

/// Returns the time of a clock that is known exactly.
fn exactly(now: Timestamp) -> Now {
    Now {
        reached: now,
        latest: now,
        unsure: Duration::ZERO,
    }
}
