//! Uses a lock now and then, and retains it in between.

use std::time::Duration;

use lock_runtime::LockClient;
use lock_tests::processes::Parent;

/// Acquires "a", prints its fencing token and releases it, at first and at each line.
#[derive(clap::Args)]
pub(crate) struct Retain {
    #[arg(long)]
    url: String,
    #[arg(long)]
    namespace: String,
    #[arg(long)]
    lease_ms: u64,
}

impl Retain {
    pub(crate) async fn run(self, mut parent: Parent) {
        const LONG: Duration = Duration::from_secs(300);
        let locks = LockClient::builder()
            .namespace(&self.namespace)
            .connect(&self.url)
            .await
            .expect("a server");
        let lease = Duration::from_millis(self.lease_ms);
        let request = locks.exclusive("a").lease(lease).wait(LONG).retain(LONG);
        loop {
            let guard = request.clone().acquire().await.expect("its turn comes");
            let fence = guard.fence();
            guard.release().await.expect("it holds the lock");
            parent.say(fence.to_string());
            if parent.line().await.is_none() {
                break;
            }
        }
        locks.shutdown().await;
    }
}
