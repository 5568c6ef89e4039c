//! A server as its clients judge it: the circuit breaker, and the choice of the coordinator.

use std::time::Duration;

use crate::{request::key::LockKey, shell::time::Instant, store::StoreError};

/// The time for which the circuit breaker stays open after a server has failed to reply. After
/// that it admits a single probe.
const OPEN_FOR: Duration = Duration::from_millis(500);

#[derive(Clone, Debug)]
pub(in crate::protocol::majority) struct Server {
    pub(in crate::protocol::majority) name: String,
    /// Until when the circuit breaker is open, and the error that opened it.
    open_until: Option<(Instant, StoreError)>,
}

impl Server {
    pub(in crate::protocol::majority) fn new(name: String) -> Self {
        Self {
            name,
            open_until: None,
        }
    }

    /// Returns the last error while the circuit breaker is open. When this time is over, lets one
    /// probe through and stays open for the other requests.
    pub(in crate::protocol::majority) fn admits(&mut self, now: Instant) -> Result<(), StoreError> {
        if let Some((until, error)) = &mut self.open_until {
            if now < *until {
                return Err(error.clone().with_unsent(true));
            }
            *until = now + OPEN_FOR;
        }
        Ok(())
    }

    pub(in crate::protocol::majority) fn is_well(&self, now: Instant) -> bool {
        let open_until = self.open_until.as_ref();
        open_until.is_none_or(|(until, _)| *until <= now)
    }

    /// Closes the circuit breaker if the server has replied, and opens it otherwise.
    pub(in crate::protocol::majority) fn replied(
        &mut self,
        error: Option<&StoreError>,
        now: Instant,
    ) {
        match error {
            Some(error) if error.is_transient() => self.open(error.clone(), now),
            _ => self.open_until = None,
        }
    }

    /// Closes the circuit breaker: the connection to the server was established again.
    pub(in crate::protocol::majority) fn reconnected(&mut self) {
        self.open_until = None;
    }

    /// Opens the circuit breaker.
    pub(in crate::protocol::majority) fn open(&mut self, error: StoreError, now: Instant) {
        self.open_until = Some((now + OPEN_FOR, error));
    }
}

/// The coordinator of a lock. All clients that list the servers in the same order and find the same
/// ones healthy choose the same server. `None` if no server is healthy.
pub(in crate::protocol::majority) fn coordinator(
    servers: &[Server],
    key: &LockKey,
    now: Instant,
) -> Option<usize> {
    let first = stable_hash(key.as_str()) as usize % servers.len();
    (0..servers.len())
        .map(|step| (first + step) % servers.len())
        .find(|index| servers[*index].is_well(now))
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
    use crate::store::StoreErrorKind;

    #[test]
    fn silent_server_is_probed_by_one_request() {
        let mut server = Server::new("a".into());
        let now = Instant::now();
        assert!(server.admits(now).is_ok());
        server.open(StoreError::timed_out(OPEN_FOR), now);
        let refused = server.admits(now).unwrap_err();
        assert!(refused.is_unsent() && refused.kind() == StoreErrorKind::Unavailable);
        assert!(server.admits(now + OPEN_FOR).is_ok());
        assert!(server.admits(now + OPEN_FOR).is_err());
        server.replied(None, now + OPEN_FOR);
        assert!(server.admits(now + OPEN_FOR).is_ok());
    }

    #[test]
    fn a_server_that_refuses_a_call_for_good_answers() {
        for (kind, is_well) in [
            (StoreErrorKind::Unavailable, false),
            (StoreErrorKind::Unauthenticated, true),
        ] {
            let mut server = Server::new("a".into());
            let now = Instant::now();
            server.open(StoreError::timed_out(OPEN_FOR), now);
            server.replied(Some(&StoreError::new(kind, "an error")), now);
            assert_eq!(server.is_well(now), is_well, "{kind:?}");
            server.reconnected();
            assert!(server.is_well(now));
        }
    }

    #[test]
    fn the_first_server_that_is_well_is_the_coordinator() {
        let mut servers = [0, 1, 2].map(|number| Server::new(number.to_string()));
        let (key, now) = (LockKey::new("a").unwrap(), Instant::now());
        let first = coordinator(&servers, &key, now).unwrap();
        servers[first].open(StoreError::timed_out(OPEN_FOR), now);
        assert_eq!(coordinator(&servers, &key, now), Some((first + 1) % 3));
        assert_eq!(coordinator(&servers, &key, now + OPEN_FOR), Some(first));
        // The value that other versions of this code compute.
        assert_eq!(stable_hash("a"), 0xe40c_292c);
    }
}
