//! The push messages of the server: grants from the wait queue, reservations, and revocations.
//!
//! A store has a channel of its own, whose name is part of its queue entries, and shares another
//! one with all stores. A message that cannot be parsed is ignored: messages are only hints, and
//! every client may publish them.

use std::time::Duration;

use redis::{PushInfo, PushKind};

use super::super::{
    clock::ServerClock,
    script::{
        names,
        reply::{self, text},
    },
};
use crate::{
    guard::fence::FencingToken,
    request::{key::LockKey, spec::LockKind},
    shell::time::Instant,
    store::{ClientId, Grant, Hold, Listeners, MOST_RESERVED, StoreEvent, Token},
};

/// The most holders of one message that are notified of their revocation. The others notice it at
/// their next renewal.
const MOST_REVOKED: usize = 4096;

/// Parses push messages, and notifies the listeners.
#[derive(Debug)]
pub(crate) struct Pushes {
    pub(crate) namespace: String,
    /// The identifier of the client that uses the store, which ends the name of its channel.
    pub(crate) client: ClientId,
    /// The channel for the grants and reservations of this store's requests, and for the waiters
    /// behind locks that its client may retain.
    pub(crate) own: String,
    /// The channel for revoked holders.
    pub(crate) revoked: String,
    /// A grant counts only once it is polled.
    confirms: bool,
    /// Requests are notified by slot.
    sharded: bool,
    pub(crate) listeners: Listeners,
}

impl Pushes {
    pub(crate) fn new(namespace: &str) -> Self {
        Self::of(namespace, ClientId::random())
    }

    pub(crate) fn of(namespace: &str, client: ClientId) -> Self {
        Self {
            namespace: namespace.to_owned(),
            client,
            own: format!("{namespace}:{client}"),
            revoked: format!("{namespace}:revoked"),
            confirms: false,
            sharded: false,
            listeners: Listeners::default(),
        }
    }

    /// With `confirms`, a message announces a grant that is to be polled: the replicas may not have
    /// it yet, or other programs may publish messages as well.
    pub(crate) fn confirming(self, confirms: bool) -> Self {
        Self { confirms, ..self }
    }

    /// The messages of a cluster, where a published message is forwarded to all nodes. Grants are
    /// sent by slot instead.
    pub(crate) fn sharded(namespace: &str) -> Self {
        Self {
            sharded: true,
            ..Self::new(namespace)
        }
    }

    /// The channels to which every connection subscribes.
    pub(crate) fn channels(&self) -> Vec<&str> {
        vec![&self.own, &self.revoked]
    }

    /// The channel for the waiters in a slot of a cluster, `<own>:{tag}`, where `tag`
    /// determines the slot.
    pub(crate) fn of_slot(&self, tag: u32) -> String {
        format!("{}:{{{tag}}}", self.own)
    }

    /// Handles a message. It runs in the task that reads the connection, so it only
    /// parses and notifies. `clock` is that of the server, once it is known.
    pub(crate) fn take(&self, push: &PushInfo, clock: Option<&ServerClock>) {
        if !matches!(push.kind, PushKind::Message | PushKind::SMessage) {
            return;
        }
        let mut words = push.data.iter().map(text);
        let (Some(Some(channel)), Some(Some(message))) = (words.next(), words.next()) else {
            return;
        };
        let is_own = match channel.strip_prefix(&self.own) {
            Some(slot) => slot.is_empty() || self.sharded && slot.starts_with(":{"),
            None => false,
        };
        if is_own {
            let event = self.kept(message).or_else(|| self.wanted(message));
            if let Some(event) = event.or_else(|| self.granted(message)) {
                let micros = clock.map_or(0, |clock| clock.server_micros(Instant::now()));
                self.listeners
                    .notify(&event.announced(micros, self.confirms));
            }
        } else if channel == self.revoked {
            for member in message.split(' ').take(MOST_REVOKED) {
                if let Some(token) = member.rsplit(':').next().and_then(Token::from_hex) {
                    self.listeners.notify(&StoreEvent::Revoked { token });
                }
            }
        }
    }

    /// Parses `kept kind ttl lock`. The name of the lock may contain blanks.
    fn kept(&self, message: &str) -> Option<StoreEvent> {
        let mut words = message.strip_prefix("kept ")?.splitn(3, ' ');
        let kind = match words.next()? {
            "lock" => LockKind::Lock,
            "permits" => LockKind::Permits,
            _ => return None,
        };
        let ttl = Duration::from_millis(words.next()?.parse().ok()?);
        let key = LockKey::new(names::key_of(&self.namespace, words.next()?, kind)?).ok()?;
        Some(StoreEvent::FreeIn { key, kind, ttl })
    }

    /// Parses `wanted token lock`. The name of the lock may contain blanks.
    fn wanted(&self, message: &str) -> Option<StoreEvent> {
        let (token, lock) = message.strip_prefix("wanted ")?.split_once(' ')?;
        let token = Token::from_hex(token)?;
        let key = names::key_of(&self.namespace, lock, LockKind::Lock)?;
        let key = LockKey::new(key).ok()?;
        Some(StoreEvent::Wanted { key, token })
    }

    /// Parses `mode member fence ttl reserved lock`, where the name of the lock may contain blanks.
    fn granted(&self, message: &str) -> Option<StoreEvent> {
        let mut words = message.splitn(6, ' ');
        let mode = reply::mode(words.next()?)?;
        let token = Token::from_hex(words.next()?.rsplit(':').next()?)?;
        let fence = FencingToken::new(words.next()?.parse().ok()?)?;
        let ttl = Duration::from_millis(words.next()?.parse().ok()?);
        let reserved: u32 = words.next()?.parse().ok()?;
        let key = LockKey::new(names::key_of(&self.namespace, words.next()?, mode.kind())?).ok()?;
        let hold = Hold::new(key, mode, token);
        let grant = Grant::new(fence, ttl).reserved(reserved.min(MOST_RESERVED));
        Some(StoreEvent::granted(hold, grant))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::spec::Mode;

    const HEX: &str = "0123456789abcdef0123456789abcdef";

    fn key(name: &str) -> LockKey {
        LockKey::new(name).unwrap()
    }

    #[test]
    fn a_message_tells_the_whole_grant() {
        let pushes = Pushes::new("my app");
        let three = Mode::Permits(3.try_into().unwrap());
        let exclusive = format!("exclusive {HEX} 7 250 2 my app:a b");
        for (mode, message) in [
            (Mode::Exclusive, exclusive),
            (Mode::Shared, format!("shared {HEX} 7 250 2 my app:a b")),
            (three, format!("3 3:{HEX} 7 250 2 my app:permits:a b")),
        ] {
            let Some(StoreEvent::Granted { hold, grant, .. }) = pushes.granted(&message) else {
                panic!("{message}")
            };
            let token = Token::from_hex(HEX).unwrap();
            assert_eq!(hold, Hold::new(key("a b"), mode, token));
            let fence = FencingToken::new(7).unwrap();
            let expected = Grant::new(fence, Duration::from_millis(250)).reserved(2);
            assert_eq!(grant, expected);
        }
    }

    #[test]
    fn a_message_tells_when_the_lock_is_free() {
        let plain = Pushes::new("my app");
        let granted = plain.granted(&format!("3 3:{HEX} 7 250 0 my app:permits:a b"));
        let granted = granted.map(|event| event.announced(0, true));
        let kept = plain.kept("kept permits 250 my app:permits:a b");
        for (event, expected, expected_ttl) in [
            (plain.kept("kept lock 250 my app:a b"), LockKind::Lock, 250),
            (kept, LockKind::Permits, 250),
            // The grant is to be confirmed, and its waiter is only notified.
            (granted, LockKind::Permits, 0),
        ] {
            let Some(StoreEvent::FreeIn { key: k, kind, ttl }) = event else {
                panic!("{event:?}")
            };
            assert_eq!((k, kind), (key("a b"), expected));
            assert_eq!(ttl, Duration::from_millis(expected_ttl));
        }
    }

    #[test]
    fn a_message_tells_which_lock_is_wanted() {
        let wanted = Pushes::new("my app").wanted(&format!("wanted {HEX} my app:a b"));
        let Some(StoreEvent::Wanted { key: of, token }) = wanted else {
            panic!("{wanted:?}")
        };
        assert_eq!((of, Some(token)), (key("a b"), Token::from_hex(HEX)));
    }

    #[test]
    fn a_message_of_another_format_is_ignored() {
        let pushes = Pushes::new("lock");
        for message in [
            "",
            "kept",
            "kept lock 250",
            "kept lock 250 lock:",
            "kept lock 250 other:a",
            "kept lock -1 lock:a",
            "kept reader 250 lock:a",
            "kept permits 250 lock:a",
        ] {
            assert!(pushes.kept(message).is_none(), "{message}");
        }
        for message in [
            "wanted",
            "wanted x lock:a",
            &format!("wanted {HEX}"),
            &format!("wanted {HEX} other:a"),
        ] {
            assert!(pushes.wanted(message).is_none(), "{message}");
        }
        let fine = format!("exclusive {HEX} 7 250 0 lock:a");
        assert!(pushes.granted(&fine).is_some());
        for message in [
            "",
            "hello",
            &format!("exclusive {HEX} 7 250 0 other:a"),
            &format!("exclusive {HEX} 7 250 0 lock:"),
            &format!("exclusive {HEX} 0 250 0 lock:a"),
            &format!("exclusive {HEX} 7 -1 0 lock:a"),
            &format!("exclusive {} 7 250 0 lock:a", &HEX[1..]),
            &format!("exclusive {} 7 250 0 lock:a", HEX.to_uppercase()),
            &format!("0 0:{HEX} 7 250 0 lock:permits:a"),
            &format!("2 2:{HEX} 7 250 0 lock:a"),
        ] {
            assert!(pushes.granted(message).is_none(), "{message}");
        }
    }

    proptest::proptest! {
        /// Any program with the right may publish on the channels.
        #[test]
        fn no_message_causes_a_panic(message in "(kept |wanted )?(exclusive|shared|3|lock|permits|-|[0-9]{1,20}| |:|my app:|[a-f0-9]{32}|\\PC){0,12}") {
            let pushes = Pushes::new("my app");
            for event in pushes.kept(&message).into_iter().chain(pushes.wanted(&message)).chain(pushes.granted(&message)) {
                let _ = event.announced(0, false);
            }
        }
    }
}
