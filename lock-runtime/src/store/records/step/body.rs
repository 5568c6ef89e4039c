//! The content of the record of a lock.

use std::{collections::VecDeque, num::NonZeroU32, time::Duration};

use serde::{Deserialize, Serialize};

use super::super::{RecordName, Timestamp, name::unreadable};
use crate::{
    guard::fence::FencingToken,
    request::{
        key::LockKey,
        spec::{LockKind, Mode},
    },
    shell::time::Instant,
    store::{
        Done, NextHolder, StoreError, Token,
        table::{
            Table,
            entry::{Entry, Place, Recorded, Slot},
        },
    },
};

/// The first byte of a record. Changes with the rest of the format.
const FORMAT: u8 = 1;
/// The first byte of the record of a lock that is done. Its result follows, and when it was
/// recorded. Earlier versions refuse such a record: they would lose the result.
const DONE: u8 = 2;

/// The content of a record.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Body {
    /// The latest fencing token, zero if there is none.
    pub(crate) fence: u64,
    /// The first fencing token of the present holders, or of the last ones. Larger than `fence` if
    /// they were revoked.
    pub(crate) since: u64,
    /// The tokens of the latest holders that an operator has revoked.
    pub(crate) revoked: Vec<[u8; 16]>,
    mode: StoredMode,
    pub(crate) slots: Vec<StoredSlot>,
    pub(crate) queue: Vec<StoredPlace>,
    /// The result of the first slot.
    #[serde(skip)]
    pub(crate) result: Option<Box<Recorded>>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum StoredMode {
    #[default]
    Exclusive,
    Shared,
    Permits(NonZeroU32),
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StoredSlot {
    pub(crate) token: [u8; 16],
    kept: bool,
    pub(crate) expires: u64,
    pub(crate) fence: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StoredPlace {
    pub(crate) token: [u8; 16],
    mode: StoredMode,
    /// In microseconds.
    lease: u64,
    reserved: u32,
    pub(crate) seen: u64,
    came: u64,
}

impl From<Mode> for StoredMode {
    fn from(mode: Mode) -> Self {
        match mode {
            Mode::Exclusive => Self::Exclusive,
            Mode::Shared => Self::Shared,
            Mode::Permits(of) => Self::Permits(of),
        }
    }
}

impl From<StoredMode> for Mode {
    fn from(mode: StoredMode) -> Self {
        match mode {
            StoredMode::Exclusive => Self::Exclusive,
            StoredMode::Shared => Self::Shared,
            StoredMode::Permits(of) => Self::Permits(of),
        }
    }
}

/// Translates the times of records to instants and back. Its origin is before all of them, as an
/// instant before the start of the machine may not exist.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Origin {
    instant: Instant,
    micros: u64,
}

impl Origin {
    /// Returns an origin that is not after `now` and the times of `bodies`.
    pub(crate) fn before<'a>(now: Timestamp, bodies: impl IntoIterator<Item = &'a Body>) -> Self {
        let times = bodies.into_iter().flat_map(|body| {
            let ends = body.slots.iter().map(|slot| slot.expires);
            ends.chain(body.queue.iter().flat_map(|place| [place.seen, place.came]))
        });
        Self {
            instant: Instant::now(),
            micros: times.fold(now.micros(), u64::min),
        }
    }

    /// Creates the origin of a clock that shows `micros` at `instant`.
    #[cfg(test)]
    pub(crate) fn at(instant: Instant, micros: u64) -> Self {
        Self { instant, micros }
    }

    pub(crate) fn instant(&self, micros: u64) -> Instant {
        self.instant + Duration::from_micros(micros.saturating_sub(self.micros))
    }

    fn micros(&self, instant: Instant) -> u64 {
        let since = instant.saturating_duration_since(self.instant);
        self.micros.saturating_add(since.as_micros() as u64)
    }
}

impl Body {
    /// Reads a record.
    ///
    /// # Errors
    /// `IncompatibleFormat`.
    pub(crate) fn read(name: &RecordName, bytes: &[u8]) -> Result<Self, StoreError> {
        match bytes {
            [FORMAT, body @ ..] => {
                postcard::from_bytes(body).map_err(|error| unreadable(name, &error.to_string()))
            }
            [DONE, body @ ..] => {
                let parts = postcard::take_from_bytes::<Self>(body);
                let parts = parts.and_then(|(body, rest)| {
                    let (fence, at, value): (_, _, &[u8]) = postcard::from_bytes(rest)?;
                    Ok((body, FencingToken::new(fence), at, value.into()))
                });
                let (body, fence, at, value) =
                    parts.map_err(|error| unreadable(name, &error.to_string()))?;
                let is_kept = body.slots.first().is_some_and(|slot| slot.kept);
                let Some(fence) = fence.filter(|_| is_kept) else {
                    return Err(unreadable(name, "a result of no holder"));
                };
                let result = Some(Box::new(Recorded { fence, at, value }));
                Ok(Self { result, ..body })
            }
            [format, ..] => Err(unreadable(name, &format!("format {format}"))),
            [] => Err(unreadable(name, "no format")),
        }
    }

    /// Returns whether the body is that of a lock that is done.
    pub(crate) fn is_done(bytes: &[u8]) -> bool {
        bytes.first() == Some(&DONE)
    }

    pub(crate) fn write(&self, name: &RecordName) -> Result<Vec<u8>, StoreError> {
        let written = match &self.result {
            None => postcard::to_extend(self, vec![FORMAT]),
            Some(result) => {
                let Recorded { fence, at, value } = &**result;
                postcard::to_extend(self, vec![DONE])
                    .and_then(|bytes| postcard::to_extend(&(fence.number(), at, &**value), bytes))
            }
        };
        written.map_err(|error| unreadable(name, &error.to_string()))
    }

    /// Returns the holders and waiters, unless there are none.
    pub(crate) fn entry(&self, origin: Origin) -> Option<Entry> {
        if self.slots.is_empty() && self.queue.is_empty() {
            return None;
        }
        let mut entry = Entry::new(self.mode.into());
        entry
            .slots
            .extend(self.slots.iter().map(|slot| slot.read(origin)));
        if let Some(slot) = entry.slots.first_mut() {
            slot.result.clone_from(&self.result);
        }
        let places = self.queue.iter().map(|place| place.read(origin));
        entry.line = places.collect::<VecDeque<_>>();
        Some(entry)
    }

    pub(crate) fn of(entry: Option<&Entry>, fence: u64, since: u64, origin: Origin) -> Self {
        let Some(entry) = entry else {
            return Self {
                fence,
                since,
                ..Self::default()
            };
        };
        Self {
            fence,
            since,
            revoked: Vec::new(),
            mode: entry.mode.into(),
            slots: entry
                .slots
                .iter()
                .map(|slot| StoredSlot::of(slot, origin))
                .collect(),
            queue: entry
                .line
                .iter()
                .map(|place| StoredPlace::of(place, origin))
                .collect(),
            result: entry.slots.first().and_then(|slot| slot.result.clone()),
        }
    }

    /// Returns whether there is a holder, a reservation or a waiter.
    pub(crate) fn is_taken(&self, now: Timestamp) -> bool {
        let origin = Origin::before(now, [self]);
        let entry = self.entry(origin);
        entry.is_some_and(|entry| entry.is_taken(origin.instant(now.micros())))
    }

    /// Returns the result of a lock that is done.
    pub(crate) fn done(&self, key: &LockKey, now: Timestamp) -> Option<Done> {
        let origin = Origin::before(now, [self]);
        let mut table = Table::default();
        table.insert(key, LockKind::Lock, self.entry(origin)?);
        table.done(key, origin.instant(now.micros()))
    }

    pub(crate) fn mode(&self) -> Mode {
        self.mode.into()
    }

    /// Returns whether both are equal, apart from the latest call of each waiter.
    pub(crate) fn equals_apart_from_polls(&self, other: &Self) -> bool {
        let timeless = |body: &Self| {
            let mut body = body.clone();
            body.queue.iter_mut().for_each(|place| place.seen = 0);
            body
        };
        timeless(self) == timeless(other)
    }
}

impl StoredSlot {
    fn of(slot: &Slot, origin: Origin) -> Self {
        Self {
            token: slot.token.to_bytes(),
            kept: slot.kept,
            expires: origin.micros(slot.expires),
            fence: slot.fence.number(),
        }
    }

    fn read(&self, origin: Origin) -> Slot {
        Slot {
            token: Token::from_bytes(self.token),
            kept: self.kept,
            expires: origin.instant(self.expires),
            // A holder with a damaged number is still one.
            fence: FencingToken::new(self.fence).unwrap_or(FencingToken::LAST),
            result: None,
        }
    }
}

impl StoredPlace {
    fn of(place: &Place, origin: Origin) -> Self {
        let NextHolder {
            token,
            lease,
            reserved,
        } = place.request;
        Self {
            token: token.to_bytes(),
            mode: place.mode.into(),
            lease: lease.as_micros() as u64,
            reserved,
            seen: origin.micros(place.seen),
            came: origin.micros(place.came),
        }
    }

    fn read(&self, origin: Origin) -> Place {
        let (token, lease) = (
            Token::from_bytes(self.token),
            Duration::from_micros(self.lease),
        );
        Place {
            mode: self.mode.into(),
            request: NextHolder::new(token, lease, self.reserved),
            seen: origin.instant(self.seen),
            came: origin.instant(self.came),
        }
    }
}
