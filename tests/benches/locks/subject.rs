//! Subjects of the measurements: clients that acquire one lock again and again.

use std::time::Duration;

use futures_util::future::try_join_all;
use lock_runtime::{LockClient, LockGuard, LockKey};
use redis::Client;
use rslock::LockManager;

/// The lease of every lock that is measured.
pub(crate) const LEASE: Duration = Duration::from_secs(30);
/// Longer than any run: a wait ends with its turn or with its round.
const LONG: Duration = Duration::from_secs(24 * 60 * 60);

pub(crate) trait Subject: Send + Sync + 'static {
    type Guard: Send;

    /// Waits until the lock is granted.
    fn acquire(&self) -> impl Future<Output = Self::Guard> + Send;

    fn release(&self, guard: Self::Guard) -> impl Future<Output = ()> + Send;
}

pub(crate) struct Ours {
    locks: LockClient,
    key: LockKey,
    lease: Duration,
    retain: Duration,
}

impl Ours {
    pub(crate) fn new(locks: &LockClient, key: String) -> Self {
        Self {
            locks: locks.clone(),
            key: LockKey::new(key).expect("a short name is valid"),
            lease: LEASE,
            retain: Duration::ZERO,
        }
    }

    pub(crate) fn retain(self, retain: Duration) -> Self {
        Self { retain, ..self }
    }

    pub(crate) fn lease(self, lease: Duration) -> Self {
        Self { lease, ..self }
    }
}

impl Subject for Ours {
    type Guard = LockGuard;

    async fn acquire(&self) -> LockGuard {
        let request = self.locks.exclusive(&self.key).lease(self.lease);
        let request = request.retain(self.retain).wait(LONG);
        request.acquire().await.expect("it is granted at some time")
    }

    async fn release(&self, guard: LockGuard) {
        guard.release().await.expect("it is held");
    }
}

/// Connects `clients` clients, each with its own connection.
pub(crate) async fn connect(url: &str, clients: usize) -> Vec<LockClient> {
    let clients = try_join_all((0..clients).map(|_| LockClient::connect(url))).await;
    clients.expect("our own server answers")
}

/// The peer, with its default pauses between attempts.
pub(crate) struct Rslock {
    manager: LockManager,
    key: String,
}

impl Rslock {
    pub(crate) fn new(manager: &LockManager, key: String) -> Self {
        Self {
            manager: manager.clone(),
            key,
        }
    }

    /// A client of the peer. It connects on first use.
    pub(crate) fn manager(client: &Client) -> LockManager {
        Self::manager_of(std::slice::from_ref(client))
    }

    /// The same over several servers, by majority.
    pub(crate) fn manager_of(clients: &[Client]) -> LockManager {
        LockManager::from_clients(clients.to_vec())
    }
}

impl Subject for Rslock {
    type Guard = rslock::LockGuard;

    async fn acquire(&self) -> rslock::LockGuard {
        self.manager
            .acquire(self.key.as_str(), LEASE)
            .await
            .expect("the lease is not too large")
    }

    async fn release(&self, guard: rslock::LockGuard) {
        guard.release().await;
    }
}
