//! Where a lock lies: the names of its keys, and the namespace they share.

use crate::{
    error::{LockError, LockErrorKind},
    key::LockKey,
    spec::Family,
    store::KeyPart,
};

const MAX_NAMESPACE_BYTES: usize = 64;
/// What the keys beside a lock whose name has a hash tag: `f` for its fence, `q` for its queue.
const SIDE_KEYS: [&str; 2] = ["f", "q"];
const PERMITS: &str = "permits";

/// Refuses a namespace whose keys could meet those of another namespace or family.
///
/// # Errors
/// `InvalidSpec`, with the remedy.
pub(crate) fn check_namespace(namespace: &str) -> Result<(), LockError> {
    let complaint = if namespace.is_empty() {
        "is empty; choose a word such as \"lock\""
    } else if namespace.len() > MAX_NAMESPACE_BYTES {
        "is longer than 64 bytes; choose a shorter one"
    } else if namespace.contains(['{', '}']) {
        "contains a brace, which would decide the cluster slot of every lock; write hash tags into the names of locks"
    } else if namespace.chars().any(char::is_control) {
        "contains a control character; leave it out"
    } else if namespace.contains(':') {
        "contains ':', so its locks could meet those of a shorter namespace; write \"shop-eu\" for \"shop:eu\""
    } else if SIDE_KEYS.contains(&namespace) {
        "is reserved; choose a longer word"
    } else {
        return Ok(());
    };
    let shown: String = namespace.chars().take(MAX_NAMESPACE_BYTES).collect();
    Err(LockError::new(
        LockErrorKind::InvalidSpec,
        format!("the namespace {shown:?} {complaint}"),
    ))
}

/// The keys of one lock. They lie in the same cluster slot.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Names {
    /// Who holds it.
    pub(super) lock: String,
    /// Its latest fencing token.
    pub(super) fence: String,
    /// Who waits for it.
    pub(super) queue: String,
}

impl Names {
    pub(super) fn new(namespace: &str, key: &LockKey, family: Family) -> Self {
        let lock = lock_name(namespace, key, family);
        // A hash tag must stay the first one in the name, so what is added stands in front; without one the whole
        // name of the lock becomes the tag.
        let has_tag = key.hash_tag().is_some();
        let beside = |side: &str| match has_tag {
            true => [side, ":", &lock].concat(),
            false => ["{", &lock, "}:", side].concat(),
        };
        let [fence, queue] = SIDE_KEYS.map(beside);
        Self { lock, fence, queue }
    }

    /// The name of one of them.
    pub(super) fn into_part(self, part: KeyPart) -> String {
        match part {
            KeyPart::Lock => self.lock,
            KeyPart::Fence => self.fence,
            KeyPart::Queue => self.queue,
        }
    }
}

/// The key that says who holds the lock.
pub(super) fn lock_name(namespace: &str, key: &LockKey, family: Family) -> String {
    match family {
        Family::Lock => [namespace, ":", key.as_str()].concat(),
        Family::Permits => [namespace, ":", PERMITS, ":", key.as_str()].concat(),
    }
}

/// The marker of a server's data in a namespace. No lock has that name beside it, as none has an empty name.
pub(super) fn marker_name(namespace: &str) -> String {
    let [fence, _] = SIDE_KEYS;
    format!("{fence}:{namespace}:")
}

/// The version of the format of a namespace; absent for version 1. No lock has that fence, as the
/// name of a lock whose fence begins so has a hash tag.
pub(super) fn format_name(namespace: &str) -> String {
    let [fence, _] = SIDE_KEYS;
    format!("{fence}:{namespace}:format")
}

/// The lock whose key that is; `None` if it is not one of this namespace and family.
pub(super) fn key_of<'a>(namespace: &str, lock: &'a str, family: Family) -> Option<&'a str> {
    let name = lock.strip_prefix(namespace)?.strip_prefix(':')?;
    match family {
        Family::Lock => Some(name),
        Family::Permits => name.strip_prefix(PERMITS)?.strip_prefix(':'),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What Redis Cluster hashes: the text within the first `{..}` if it is not empty, else the whole key.
    fn slot_text(name: &str) -> &str {
        name.split_once('{')
            .and_then(|(_, rest)| rest.split_once('}'))
            .map(|(tag, _)| tag)
            .filter(|tag| !tag.is_empty())
            .unwrap_or(name)
    }

    #[test]
    fn the_keys_of_a_lock_share_a_slot_and_differ() {
        for name in [
            "order:42", "{a}", "x{a}y", "x{a}{b}", "a{b", "{{a}", "a{b}}", "f:x", "ns:x",
        ] {
            let key = LockKey::new(name).unwrap();
            for family in [Family::Lock, Family::Permits] {
                let names = Names::new("ns:sub", &key, family);
                assert_eq!(slot_text(&names.lock), slot_text(&names.fence), "{names:?}");
                assert_eq!(slot_text(&names.lock), slot_text(&names.queue), "{names:?}");
                assert!(
                    names.lock != names.fence
                        && names.lock != names.queue
                        && names.fence != names.queue
                );
            }
        }
    }

    #[test]
    fn the_names_are_those_of_the_documentation() {
        let names = |name: &str, family| Names::new("lock", &LockKey::new(name).unwrap(), family);
        let plain = Names {
            lock: "lock:a".into(),
            fence: "{lock:a}:f".into(),
            queue: "{lock:a}:q".into(),
        };
        assert_eq!(names("a", Family::Lock), plain);
        let tagged = Names {
            lock: "lock:{a}b".into(),
            fence: "f:lock:{a}b".into(),
            queue: "q:lock:{a}b".into(),
        };
        assert_eq!(names("{a}b", Family::Lock), tagged);
        assert_eq!(names("a", Family::Permits).lock, "lock:permits:a");
        assert_eq!(format_name("lock"), "f:lock:format");
    }

    #[test]
    fn a_namespace_that_could_meet_another_is_refused() {
        for (namespace, word) in [
            ("", "empty"),
            (&*"x".repeat(65), "64"),
            ("a{b", "brace"),
            ("a}b", "brace"),
            ("a\nb", "control"),
            ("f", "\"f\""),
            ("q", "\"q\""),
            ("a:b", "shop-eu"),
        ] {
            let error = check_namespace(namespace).unwrap_err();
            assert_eq!(error.kind(), LockErrorKind::InvalidSpec);
            assert!(error.to_string().contains(word), "{error}");
        }
        for namespace in ["lock", "my app", "ff", "permits", &"x".repeat(64)] {
            assert!(check_namespace(namespace).is_ok(), "{namespace}");
        }
    }
}
