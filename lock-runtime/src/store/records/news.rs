//! Messages between the clients of a store of records.

use serde::{Deserialize, Serialize};

use super::{
    Change, ClientId, Message, Record, RecordName, Timestamp, Version,
    step::{body::StoredMode, clock::Reading},
};
use crate::{
    guard::fence::FencingToken,
    shell::time::Instant,
    store::{Grant, Hold, MOST_RESERVED, StoreEvent, Token},
};

/// A message. Its times are by the clock of the database.
#[derive(Debug, Serialize, Deserialize)]
struct Letter {
    news: News,
    name: String,
    /// The version and the content of the record. It is used only where no one but writers of
    /// records can send messages: a forged one would be written back under the true version.
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
    Wanted {
        token: [u8; 16],
    },
}

/// Returns the message for an event of the step at `now` that makes `change`, with the record
/// in a grant, if there is room. `None` if it is no event of a single lock, or too long.
pub(super) fn message(
    to: ClientId,
    event: &StoreEvent,
    change: &Change,
    now: Timestamp,
    shows_record: bool,
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
        StoreEvent::Wanted { token, .. } => News::Wanted {
            token: token.to_bytes(),
        },
        _ => return None,
    };
    let shows_record = shows_record && matches!(news, News::Granted { .. });
    let record = &change.record;
    let mut letter = Letter {
        news,
        name: change.name.as_str().to_owned(),
        record: shows_record.then(|| (record.version.number(), record.body.clone())),
    };
    let mut body = postcard::to_allocvec(&letter).ok()?;
    if body.len() > Message::MAX_BYTES {
        letter.record = None;
        body = postcard::to_allocvec(&letter).ok()?;
    }
    (body.len() <= Message::MAX_BYTES).then(|| Message::new(to, body))
}

/// Reads a message. Returns the record in it as well, if there is one.
pub(super) fn read(
    message: &[u8],
    reading: &Reading,
) -> Option<(StoreEvent, Option<(RecordName, Record)>)> {
    let letter: Letter = postcard::from_bytes(message).ok()?;
    let name = RecordName::new(letter.name);
    let now = reading.at(Instant::now());
    let left = |at: u64, now: Timestamp| Timestamp::from_micros(at).since(now);
    let event = match letter.news {
        News::Granted {
            mode,
            token,
            fence,
            reserved,
            expires,
        } => {
            let (key, _) = name.lock()?;
            // No later than by the clock of the database, as the holder relies on it. Longer if the
            // reading is older than a step of the clock.
            let ttl = left(expires, now.latest).min(Grant::HANDOFF_LEASE);
            let grant = Grant::new(FencingToken::new(fence)?, ttl);
            let grant = grant.reserved(reserved.min(MOST_RESERVED));
            let hold = Hold::new(key, mode.into(), Token::from_bytes(token));
            StoreEvent::granted(hold, grant)
        }
        News::FreeIn { at } => {
            let (key, kind) = name.lock()?;
            // No earlier: the request would find the lock taken.
            let ttl = left(at, now.reached);
            StoreEvent::FreeIn { key, kind, ttl }
        }
        News::Revoked { token } => StoreEvent::Revoked {
            token: Token::from_bytes(token),
        },
        News::Wanted { token } => {
            let (key, _) = name.lock()?;
            let token = Token::from_bytes(token);
            StoreEvent::Wanted { key, token }
        }
    };
    let record = letter.record.and_then(|(version, body)| {
        let version = Version::from_number(version)?;
        Some((name, Record::new(version, body)))
    });
    Some((event, record))
}

/// A message of an earlier version: the lock is free, and its record is this one.
#[cfg(test)]
pub(super) fn with_record(name: &RecordName, record: &super::Record) -> Vec<u8> {
    let letter = Letter {
        news: News::FreeIn { at: 0 },
        name: name.as_str().to_owned(),
        record: Some((record.version.number(), record.body.clone())),
    };
    postcard::to_allocvec(&letter).expect("a short message")
}
