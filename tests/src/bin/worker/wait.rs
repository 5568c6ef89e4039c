//! Waits in the queue for a lock, and updates the resource that it protects.

use std::time::Duration;

use lock_runtime::LockClient;
use lock_tests::{RedisFencedResource, processes::Parent};

/// Waits for "a", prints its fencing token, adds one to the resource, and prints the results of the
/// write and of the release.
#[derive(clap::Args)]
pub(crate) struct Wait {
    #[arg(long)]
    url: String,
    #[arg(long)]
    namespace: String,
    #[arg(long)]
    resource: String,
    #[arg(long)]
    lease_ms: u64,
    #[arg(long)]
    strict_order: bool,
}

impl Wait {
    pub(crate) async fn run(self, mut parent: Parent) {
        let locks = LockClient::builder()
            .namespace(&self.namespace)
            .connect(&self.url)
            .await
            .expect("a server");
        let resource = RedisFencedResource::open(&self.url, &self.resource).await;
        let request = locks
            .exclusive("a")
            .lease(Duration::from_millis(self.lease_ms))
            .wait(Duration::from_secs(300));
        let request = if self.strict_order {
            request.strict_order()
        } else {
            request
        };
        let guard = request.acquire().await.expect("its turn comes");
        parent.say(guard.fence().to_string());
        let written = resource.increment(guard.fence()).await.is_ok();
        let ended = guard
            .release()
            .await
            .map_or_else(|error| error.code(), |()| "released");
        parent.say(format!("written={written} {ended}"));
        locks.shutdown().await;
        parent.finished().await;
    }
}
