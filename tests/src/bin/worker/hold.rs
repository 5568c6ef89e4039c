//! Holds a lock and, on request, writes to the resource that it protects, even after it has lost
//! the lock.

use std::time::Duration;

use lock_runtime::{HeldLock, LockClient};
use lock_tests::{RedisFencedResource, processes::Parent};

/// Acquires "a", prints its fencing token, writes 2 to the resource at the next line, and prints
/// the results of the write and of the release.
#[derive(clap::Args)]
pub(crate) struct Hold {
    /// The server of the resource.
    #[arg(long)]
    url: String,
    /// The store of the lock, if it is another one.
    #[arg(long)]
    store: Option<String>,
    #[arg(long)]
    namespace: String,
    #[arg(long)]
    resource: String,
    #[arg(long)]
    lease_ms: u64,
    /// Writes in the body of `run`.
    #[arg(long)]
    run: bool,
}

impl Hold {
    pub(crate) async fn run(self, mut parent: Parent) {
        let locks = LockClient::builder()
            .namespace(&self.namespace)
            .connect(self.store.as_ref().unwrap_or(&self.url))
            .await
            .expect("a server");
        let resource = RedisFencedResource::open(&self.url, &self.resource).await;
        let request = locks
            .exclusive("a")
            .lease(Duration::from_millis(self.lease_ms));
        let ended = if self.run {
            request
                .run(async |held| write(&held, &resource, &mut parent).await)
                .await
        } else {
            let guard = request.acquire().await.expect("the lock is free");
            write(&guard.held(), &resource, &mut parent).await;
            guard.release().await
        };
        parent.say(ended.map_or_else(|error| error.code(), |()| "released"));
        locks.shutdown().await;
        parent.finished().await;
    }
}

async fn write(held: &HeldLock, resource: &RedisFencedResource, parent: &mut Parent) {
    parent.say(held.fence().to_string());
    parent.line().await;
    let lost = held.is_lost() && held.validity().is_zero();
    let written = resource.write(held.fence(), 2).await.is_ok();
    parent.say(format!("lost={lost} written={written}"));
}
