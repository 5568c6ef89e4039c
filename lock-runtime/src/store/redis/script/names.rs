//! The names of a lock's keys, and the namespace that they share.

use crate::{
    request::{key::LockKey, spec::LockKind},
    store::{ClientId, KeyPart, namespace::SIDE_KEYS},
};

/// The keys of one lock. They are in the same cluster slot.
pub(crate) struct Names {
    lock: String,
    has_tag: bool,
}

impl Names {
    pub(crate) fn new(namespace: &str, key: &LockKey, kind: LockKind) -> Self {
        Self {
            lock: lock_name(namespace, key, kind),
            has_tag: key.hash_tag().is_some(),
        }
    }

    /// The key of a part, in pieces.
    pub(crate) fn of(&self, part: KeyPart) -> [&str; 3] {
        let beside = match part {
            KeyPart::Lock => ["", ""],
            // A hash tag must remain the first one in the name, so the letter is a prefix. Without
            // a hash tag the whole name of the lock becomes the tag.
            KeyPart::Fence if self.has_tag => ["f:", ""],
            KeyPart::Fence => ["{", "}:f"],
            KeyPart::Queue if self.has_tag => ["q:", ""],
            KeyPart::Queue => ["{", "}:q"],
        };
        let [before, after] = beside;
        [before, &self.lock, after]
    }
}

/// The key of the holders.
pub(crate) fn lock_name(namespace: &str, key: &LockKey, kind: LockKind) -> String {
    [namespace, infix(kind), key.as_str()].concat()
}

/// The text between the namespace and the name of a lock.
fn infix(kind: LockKind) -> &'static str {
    match kind {
        LockKind::Lock => ":",
        LockKind::Permits => ":permits:",
    }
}

/// The key of the marker of a server's data in a namespace. It is not a side key of a lock, because
/// the name of a lock is not empty.
pub(crate) fn marker_name(namespace: &str) -> String {
    let [fence, _] = SIDE_KEYS;
    format!("{fence}:{namespace}:")
}

/// The key of the format version of a namespace; absent for version 1. It is not the fence of a
/// lock: a lock whose fence has this prefix has a hash tag.
pub(crate) fn format_name(namespace: &str) -> String {
    let [fence, _] = SIDE_KEYS;
    format!("{fence}:{namespace}:format")
}

/// The key of the settings that all clients of a majority share. As with the format version, it is
/// not the fence of a lock.
pub(crate) fn settings_name(namespace: &str) -> String {
    let [fence, _] = SIDE_KEYS;
    format!("{fence}:{namespace}:settings")
}

/// The key of the name of a client. As with the format version, it is not the fence of a lock.
pub(crate) fn client_name(namespace: &str, client: ClientId) -> String {
    let [fence, _] = SIDE_KEYS;
    format!("{fence}:{namespace}:client:{client}")
}

/// The key of the grant times of a client's readers and permits.
pub(crate) fn grants_name(namespace: &str, client: ClientId) -> String {
    let [fence, _] = SIDE_KEYS;
    format!("{fence}:{namespace}:grants:{client}")
}

/// The name of the lock that the key belongs to; `None` if it is not in this namespace and kind.
pub(crate) fn key_of<'a>(namespace: &str, lock: &'a str, kind: LockKind) -> Option<&'a str> {
    let name = lock.strip_prefix(namespace)?;
    name.strip_prefix(infix(kind))
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::store::redis::topology::cluster::slot_of;

    const PARTS: [KeyPart; 3] = [KeyPart::Lock, KeyPart::Fence, KeyPart::Queue];

    #[test]
    fn the_keys_of_a_lock_share_a_slot_and_differ() {
        for name in [
            "order:42", "{a}", "x{a}y", "x{a}{b}", "a{b", "{{a}", "a{b}}", "f:x", "ns:x",
        ] {
            let key = LockKey::new(name).unwrap();
            for kind in [LockKind::Lock, LockKind::Permits] {
                let names = Names::new("ns:sub", &key, kind);
                let all = PARTS.map(|part| names.of(part).concat());
                assert_eq!(HashSet::from(all.clone()).len(), 3, "{all:?}");
                let slots = HashSet::from(all.clone().map(|name| slot_of(name.as_bytes())));
                assert_eq!(slots.len(), 1, "{all:?}");
            }
        }
    }

    #[test]
    fn the_names_are_those_of_the_documentation() {
        let names = |name: &str, kind| {
            let key = LockKey::new(name).unwrap();
            PARTS.map(|part| Names::new("lock", &key, kind).of(part).concat())
        };
        let plain = ["lock:a", "{lock:a}:f", "{lock:a}:q"];
        assert_eq!(names("a", LockKind::Lock), plain);
        let tagged = ["lock:{a}b", "f:lock:{a}b", "q:lock:{a}b"];
        assert_eq!(names("{a}b", LockKind::Lock), tagged);
        assert_eq!(names("a", LockKind::Permits)[0], "lock:permits:a");
        assert_eq!(format_name("lock"), "f:lock:format");
    }
}
