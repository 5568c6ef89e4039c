//! The namespace of the locks of a client.

use crate::error::LockError;

const MAX_NAMESPACE_BYTES: usize = 64;
/// The side keys of a lock in Redis: `f` for its fence, `q` for its queue. The letter is a prefix
/// if the name of the lock has a hash tag, and a suffix otherwise.
pub(super) const SIDE_KEYS: [&str; 2] = ["f", "q"];

/// Refuses a namespace whose keys could collide with those of another namespace or kind.
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
        "contains ':', so its locks could collide with those of a shorter namespace; write \"shop-eu\" for \"shop:eu\""
    } else if SIDE_KEYS.contains(&namespace) {
        "is reserved; choose a longer word"
    } else {
        return Ok(());
    };
    let shown: String = namespace.chars().take(MAX_NAMESPACE_BYTES).collect();
    let message = format!("the namespace {shown:?} {complaint}");
    Err(LockError::of_settings(&["namespace"], message))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::LockErrorKind;

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
