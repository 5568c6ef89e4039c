//! One of the servers, with its circuit breaker.

use std::{
    fmt,
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::time::Instant;

use crate::{
    key::LockKey,
    store::{QuorumMember, StoreError},
    sync::lock,
};

/// How long the circuit breaker stays open after a server has failed to reply. After that it
/// admits a single probe.
const REST: Duration = Duration::from_millis(500);

pub(super) struct Node {
    name: String,
    pub(super) store: Arc<dyn QuorumMember>,
    /// Until when the circuit breaker is open, and the error that opened it.
    rests: Mutex<Option<(Instant, StoreError)>>,
}

impl Node {
    pub(super) fn new(name: String, store: Arc<dyn QuorumMember>) -> Self {
        Self {
            name,
            store,
            rests: Mutex::default(),
        }
    }

    /// Returns the last error while the circuit breaker is open. When this time is over, lets one
    /// probe through and stays open for the other requests.
    pub(super) fn admits(&self, now: Instant) -> Result<(), StoreError> {
        match &mut *lock(&self.rests) {
            Some((until, error)) if now < *until => Err(error.clone().with_unsent(true)),
            Some((until, _)) => {
                *until = now + REST;
                Ok(())
            }
            None => Ok(()),
        }
    }

    pub(super) fn is_well(&self, now: Instant) -> bool {
        lock(&self.rests)
            .as_ref()
            .is_none_or(|(until, _)| *until <= now)
    }

    /// Closes the circuit breaker if the server has replied, and opens it otherwise.
    pub(super) fn note<T>(&self, result: &Result<T, StoreError>, now: Instant) {
        match result {
            Err(error) if error.is_transient() => self.rest(error.clone(), now),
            _ => *lock(&self.rests) = None,
        }
    }

    /// Opens the circuit breaker.
    pub(super) fn rest(&self, error: StoreError, now: Instant) {
        *lock(&self.rests) = Some((now + REST, error));
    }
}

impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.store.fmt(f)
    }
}

/// The coordinator of a lock. All clients that list the servers in the same order and find the same
/// ones healthy choose the same server. `None` if no server is healthy.
pub(super) fn line_node(nodes: &[Arc<Node>], key: &LockKey, now: Instant) -> Option<usize> {
    let first = stable_hash(key.as_str()) as usize % nodes.len();
    (0..nodes.len())
        .map(|step| (first + step) % nodes.len())
        .find(|index| nodes[*index].is_well(now))
}

/// FNV-1a: every process must compute the same number, whatever its version.
fn stable_hash(text: &str) -> u32 {
    text.bytes().fold(0x811c_9dc5, |hash, byte| {
        (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{MemoryStore, StoreErrorKind};

    #[tokio::test(start_paused = true)]
    async fn silent_server_is_probed_by_one_request() {
        let node = Node::new("a".into(), Arc::new(MemoryStore::new()));
        let now = Instant::now();
        assert!(node.admits(now).is_ok());
        node.rest(StoreError::timed_out(REST), now);
        let refused = node.admits(now).unwrap_err();
        assert!(refused.is_unsent() && refused.kind() == StoreErrorKind::Unavailable);
        assert!(node.admits(now + REST).is_ok());
        assert!(node.admits(now + REST).is_err());
        node.note(&Ok(()), now + REST);
        assert!(node.admits(now + REST).is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn the_order_is_kept_by_the_first_server_that_is_well() {
        let nodes: Vec<_> = (0..3)
            .map(|n| Arc::new(Node::new(n.to_string(), Arc::new(MemoryStore::new()))))
            .collect();
        let (key, now) = (LockKey::new("a").unwrap(), Instant::now());
        let first = line_node(&nodes, &key, now).unwrap();
        nodes[first].rest(StoreError::timed_out(REST), now);
        assert_eq!(line_node(&nodes, &key, now), Some((first + 1) % 3));
        assert_eq!(line_node(&nodes, &key, now + REST), Some(first));
        // The value that other versions of this code compute.
        assert_eq!(stable_hash("a"), 0xe40c_292c);
    }
}
