//! Messages between the clients of a store of records.

use serde::{Deserialize, Serialize};

use super::{
    Change, ClientId, MAX_MESSAGE_BYTES, Message, Record, RecordName, Timestamp, Version,
    body::StoredMode, clock::Reading,
};
use crate::{
    fence::FencingToken,
    store::{Grant, HANDOFF_LEASE, Hold, StoreEvent, Token},
    time::Instant,
};

/// The longest record that is sent with a grant.
const MAX_RECORD_BYTES: usize = MAX_MESSAGE_BYTES / 2;

/// A message. Its times are by the clock of the database.
#[derive(Debug, Serialize, Deserialize)]
struct Letter {
    news: News,
    name: String,
    /// The version and the content of the record, which the addressee will probably change next.
    record: Option<(u64, Vec<u8>)>,
}

#[derive(Debug, Serialize, Deserialize)]
enum News {
    Granted {
        mode: StoredMode,
        token: [u8; 16],
        fence: u64,
        reserved: u32,
        expires: u64,
    },
    FreeIn {
        at: u64,
    },
    Revoked {
        token: [u8; 16],
    },
}

/// Returns the message for an event of the step at `now` that makes `change`. `None` if it is no
/// event of a single lock, or too long.
pub(super) fn message(
    to: ClientId,
    event: &StoreEvent,
    change: &Change,
    now: Timestamp,
) -> Option<Message> {
    let news = match event {
        StoreEvent::Granted { hold, grant, .. } => News::Granted {
            mode: hold.mode.into(),
            token: hold.token.to_bytes(),
            fence: grant.fence.number(),
            reserved: grant.reserved,
            expires: now.later(grant.ttl).micros(),
        },
        StoreEvent::FreeIn { ttl, .. } => News::FreeIn {
            at: now.later(*ttl).micros(),
        },
        StoreEvent::Revoked { token } => News::Revoked {
            token: token.to_bytes(),
        },
        _ => return None,
    };
    let record = &change.record;
    let is_short = record.body.len() <= MAX_RECORD_BYTES;
    let letter = Letter {
        news,
        name: change.name.as_str().to_owned(),
        record: is_short.then(|| (record.version.number(), record.body.clone())),
    };
    let body = postcard::to_allocvec(&letter).ok()?;
    (body.len() <= MAX_MESSAGE_BYTES).then(|| Message::new(to, body))
}

/// Reads a message: the event, and the record that it contains.
pub(super) fn read(
    message: &[u8],
    reading: &Reading,
) -> Option<(StoreEvent, Option<(RecordName, Record)>)> {
    let letter: Letter = postcard::from_bytes(message).ok()?;
    let name = RecordName::new(letter.name);
    // No later than by the clock of the database, as the holder relies on it.
    let left = |at: u64| Timestamp::from_micros(at).since(reading.at(Instant::now()).latest);
    let event = match letter.news {
        News::Granted {
            mode,
            token,
            fence,
            reserved,
            expires,
        } => {
            let (key, _) = name.lock()?;
            // Longer if the reading is older than a step of the clock.
            let ttl = left(expires).min(HANDOFF_LEASE);
            let grant = Grant::new(FencingToken::new(fence)?, ttl).reserved(reserved);
            StoreEvent::Granted {
                hold: Hold::new(key, mode.into(), Token::from_bytes(token)),
                grant,
                is_named: false,
                next: None,
            }
        }
        News::FreeIn { at } => {
            let (key, kind) = name.lock()?;
            let ttl = left(at);
            StoreEvent::FreeIn { key, kind, ttl }
        }
        News::Revoked { token } => StoreEvent::Revoked {
            token: Token::from_bytes(token),
        },
    };
    let record = letter.record.and_then(|(version, body)| {
        let version = Version::from_number(version)?;
        Some((name, Record::new(version, body)))
    });
    Some((event, record))
}
