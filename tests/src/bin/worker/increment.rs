//! Many tasks that add one to a resource under a lock, some of which give up now and then.

use std::time::Duration;

use lock_runtime::{LockClient, LockErrorKind};
use lock_tests::{RedisFencedResource, processes::Parent};
use tokio::{task::JoinSet, time::timeout};

/// Adds one `rounds` times in each task, under the lock "a"; prints `ready`, waits for a line, and
/// prints the number of additions.
#[derive(clap::Args)]
pub(crate) struct Increment {
    #[arg(long)]
    url: String,
    #[arg(long)]
    namespace: String,
    #[arg(long)]
    resource: String,
    #[arg(long)]
    tasks: usize,
    #[arg(long)]
    rounds: usize,
    #[arg(long)]
    lease_ms: u64,
}

impl Increment {
    pub(crate) async fn run(self, mut parent: Parent) {
        let locks = LockClient::builder()
            .namespace(&self.namespace)
            .connect(&self.url)
            .await
            .expect("a server");
        let resource = RedisFencedResource::open(&self.url, &self.resource).await;
        parent.say("ready");
        parent.line().await;
        let mut tasks = JoinSet::new();
        for _ in 0..self.tasks {
            let lease = Duration::from_millis(self.lease_ms);
            tasks.spawn(work(locks.clone(), resource.clone(), self.rounds, lease));
        }
        let added: usize = tasks.join_all().await.into_iter().sum();
        parent.say(added.to_string());
        locks.shutdown().await;
        parent.finished().await;
    }
}

async fn work(
    locks: LockClient,
    resource: RedisFencedResource,
    rounds: usize,
    lease: Duration,
) -> usize {
    let mut added = 0;
    for _ in 0..rounds {
        if rand::random_bool(0.3) {
            // Gives up at some point, perhaps after the grant.
            let patience = Duration::from_micros(rand::random_range(0..50_000));
            let _ = timeout(patience, locks.exclusive("a").lease(lease).acquire()).await;
        }
        let request = locks
            .exclusive("a")
            .lease(lease)
            .wait(Duration::from_secs(300));
        match request.acquire().await {
            Ok(guard) => {
                added += usize::from(resource.increment(guard.fence()).await.is_ok());
                let _ = guard.release().await;
            }
            // The process was paused for longer than the request may wait.
            Err(error) => assert_eq!(error.kind(), LockErrorKind::WaitTimeout, "{error}"),
        }
    }
    added
}
