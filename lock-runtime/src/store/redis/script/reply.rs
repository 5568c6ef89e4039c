//! The replies of the scripts: a word, followed by whole numbers or further words.

use std::time::Duration;

use redis::Value;

use super::super::error::wrong_server;
use crate::{
    guard::fence::FencingToken,
    request::key::LockKey,
    request::spec::Mode,
    store::{
        ClientId, Done, Grant, Holder, HolderId, Identity, KeyPart, StoreError, Token, Waiter,
    },
};

/// A reply, read from front to back.
pub(crate) struct Reply {
    word: Value,
    rest: std::vec::IntoIter<Value>,
}

impl Reply {
    pub(crate) fn new(value: Value) -> Result<Self, StoreError> {
        let Value::Array(items) = value else {
            return Err(unexpected());
        };
        let mut rest = items.into_iter();
        match rest.next() {
            Some(word) if text(&word).is_some() => Ok(Self { word, rest }),
            _ => Err(unexpected()),
        }
    }

    /// The first word, which is the outcome.
    pub(crate) fn word(&self) -> &str {
        text(&self.word).unwrap_or_default()
    }

    pub(crate) fn text(&mut self) -> Result<String, StoreError> {
        owned(self.rest.next())
    }

    pub(super) fn bytes(&mut self) -> Result<Vec<u8>, StoreError> {
        match self.rest.next() {
            Some(Value::BulkString(bytes)) => Ok(bytes),
            _ => Err(unexpected()),
        }
    }

    pub(crate) fn number(&mut self) -> Result<i64, StoreError> {
        match self.rest.next() {
            Some(Value::Int(number)) => Ok(number),
            _ => Err(unexpected()),
        }
    }

    pub(crate) fn count(&mut self) -> Result<u64, StoreError> {
        u64::try_from(self.number()?).map_err(|_| unexpected())
    }

    pub(crate) fn ttl(&mut self) -> Result<Duration, StoreError> {
        self.count().map(Duration::from_millis)
    }

    /// A time to live; `None` for -1, which Redis returns for a key without an expiry.
    pub(super) fn known_ttl(&mut self) -> Result<Option<Duration>, StoreError> {
        let millis = u64::try_from(self.number()?);
        Ok(millis.ok().map(Duration::from_millis))
    }

    /// The latest fencing token, 0 for none.
    pub(super) fn counter(&mut self) -> Result<Option<FencingToken>, StoreError> {
        self.count().map(FencingToken::new)
    }

    /// The value of a lock that is done, which `done.lua` writes.
    pub(super) fn done(&mut self, key: &LockKey) -> Result<Done, StoreError> {
        let value = self.bytes()?;
        let mut parts = value.splitn(4, |byte| *byte == b' ');
        let mut text = || str::from_utf8(parts.next()?).ok();
        let mut head = || {
            let token = Token::from_hex(text()?.strip_suffix(".done")?)?;
            let (micros, fence) = (text()?.parse().ok()?, text()?.parse().ok()?);
            Some((token, micros, FencingToken::new(fence)?))
        };
        let (token, micros, fence) = head().ok_or_else(unexpected)?;
        let result = parts.next().ok_or_else(unexpected)?.to_vec();
        let id = HolderId::of(key, token, true);
        Ok(Done::new(result, fence, micros, id))
    }

    pub(crate) fn grant(&mut self) -> Result<Grant, StoreError> {
        let fence = self.counter()?.ok_or_else(unexpected)?;
        let ttl = self.ttl()?;
        let reserved = u32::try_from(self.count()?).map_err(|_| unexpected())?;
        Ok(Grant::new(fence, ttl).reserved(reserved))
    }

    fn mode(&mut self) -> Result<Mode, StoreError> {
        mode(&self.text()?).ok_or_else(unexpected)
    }

    /// The client of a token; nothing for foreign data.
    fn client(&mut self) -> Result<Identity, StoreError> {
        let digits = self.text()?;
        if digits.is_empty() {
            return Ok(Identity::Foreign);
        }
        let client = ClientId::from_hex(&digits).ok_or_else(unexpected)?;
        Ok(Identity::unnamed(client))
    }

    fn holder(&mut self) -> Result<Holder, StoreError> {
        let (mode, ttl) = (self.mode()?, self.known_ttl()?);
        let id = self.text()?.parse().map_err(|_| unexpected())?;
        let holder = Holder::new(id, mode, ttl, self.client()?);
        let state = self.count()?;
        Ok(holder
            .reservation(state > 0)
            .done(state == 2)
            .held_for(self.known_ttl()?))
    }

    /// Reads `count` holders.
    pub(crate) fn holders(&mut self, count: u64) -> Result<Vec<Holder>, StoreError> {
        (0..count).map(|_| self.holder()).collect()
    }

    /// Reads the waiters: the rest of the reply.
    pub(crate) fn waiters(&mut self) -> Result<Vec<Waiter>, StoreError> {
        let mut waiters = Vec::with_capacity(self.rest.len() / 5);
        while self.rest.len() > 0 {
            let (mode, lease, silent) = (self.mode()?, self.ttl()?, self.ttl()?);
            let waiter = Waiter::new(mode, lease, silent, self.client()?);
            waiters.push(waiter.waited(self.known_ttl()?));
        }
        Ok(waiters)
    }

    /// Reads texts, `None` for those that are missing: the rest of the reply.
    pub(crate) fn texts(&mut self) -> Vec<Option<String>> {
        let texts = self.rest.by_ref().map(|value| owned(Some(value)).ok());
        texts.collect()
    }
}

/// Parses a mode in the format of the scripts.
pub(crate) fn mode(text: &str) -> Option<Mode> {
    match text {
        "exclusive" => Some(Mode::Exclusive),
        "shared" => Some(Mode::Shared),
        permits => permits.parse().ok().map(Mode::Permits),
    }
}

/// Parses the scripts' words for the key that holds foreign data.
pub(super) fn foreign_part(word: &str) -> Option<KeyPart> {
    match word {
        "foreign" => Some(KeyPart::Lock),
        "foreign fence" => Some(KeyPart::Fence),
        "foreign queue" => Some(KeyPart::Queue),
        _ => None,
    }
}

fn owned(value: Option<Value>) -> Result<String, StoreError> {
    let text = value.and_then(|value| redis::from_redis_value(value).ok());
    text.ok_or_else(unexpected)
}

/// The text of a string.
pub(crate) fn text(value: &Value) -> Option<&str> {
    match value {
        Value::BulkString(bytes) => str::from_utf8(bytes).ok(),
        Value::SimpleString(text) => Some(text),
        _ => None,
    }
}

/// The error for a reply that no script returns. It omits the reply, which may contain arbitrary
/// data.
pub(crate) fn unexpected() -> StoreError {
    wrong_server("the server sent an unexpected reply to a script")
}
