//! [`LockClient::health`].

use tokio::time::timeout;

use super::LockClient;
use crate::{
    observe::health::{Finding, Health, PATIENCE, Severity},
    shell::runtime,
    store::StoreError,
};

impl LockClient {
    /// Returns the state of the store and of each of its servers, with a remedy for each finding.
    ///
    /// It takes about a second at most, and never fails: a server that does not answer is reported
    /// as such. It asks on the connections that the locks use, writes nothing and affects no lock.
    /// Sentinels are asked on connections of their own.
    ///
    /// A client that was [shut down](Self::shutdown) reports
    /// [`Unavailable`](crate::health::Verdict::Unavailable), and so does a call outside a Tokio
    /// runtime.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// use lock_runtime::{LockClient, health::Verdict};
    ///
    /// let health = LockClient::in_memory().health().await;
    /// assert_eq!(health.verdict(), Verdict::Healthy);
    /// println!("{health}");
    /// # }
    /// ```
    ///
    /// # Cancellation
    /// Dropping the future has no effect.
    pub async fn health(&self) -> Health {
        if let Err(error) = runtime::check() {
            let message = error.to_string();
            let remedy = "call it within #[tokio::main]";
            let finding = Finding::new(Severity::Critical, "no_runtime", message, remedy);
            return Health::unusable(finding);
        }
        // The stores keep the time limit themselves, with one exception: a custom one.
        let health = timeout(2 * PATIENCE, self.core.store.health()).await;
        let health = health.unwrap_or_else(|_| {
            let error = StoreError::timed_out(2 * PATIENCE);
            Health::unusable(Finding::failed(&error))
        });
        if !self.core.with_state(|state| state.session.is_closed()) {
            return health;
        }
        let (servers, mut findings) = health.into_parts();
        let message = "the client was shut down, and takes no requests";
        let remedy = "none: the process is about to end";
        findings.push(Finding::new(
            Severity::Critical,
            "shut_down",
            message,
            remedy,
        ));
        Health::granting(false, servers, findings)
    }
}
