//! Takes part in a storm over all modes, and prints the record of it.

use std::{sync::Arc, time::Duration};

use lock_runtime::{LockClient, LockError, RedisOptions};
use lock_tests::{
    place::redlock_url,
    processes::Parent,
    storm::{Event, Log, Plan, Record, nanos},
};
use tokio::time::sleep;

/// Between two attempts to connect to servers that fail.
const PAUSE: Duration = Duration::from_millis(20);
/// The shortest time that counts as a stall of the process, in nanoseconds.
const STALL: u64 = 10_000_000;

/// Prints `ready`, works from the next line to the one after it, prints each record as JSON, and at
/// the end `done`.
#[derive(clap::Args)]
pub(crate) struct Storm {
    /// One server, or several of which a majority has to agree.
    #[arg(long = "url", required = true)]
    urls: Vec<String>,
    #[arg(long)]
    namespace: String,
    #[arg(long)]
    longest_lease_ms: u64,
    #[arg(long)]
    lease_ms: u64,
    /// The lease of requests that do not renew it.
    #[arg(long)]
    brief_lease_ms: Option<u64>,
    #[arg(long)]
    tasks: usize,
    #[arg(long)]
    seed: u64,
}

impl Storm {
    pub(crate) async fn run(self, mut parent: Parent) {
        let locks = loop {
            match self.connect().await {
                Ok(locks) => break locks,
                Err(_) => sleep(PAUSE).await,
            }
        };
        parent.say("ready");
        parent.line().await;
        let log: Log = Arc::new(|record: Record| {
            let since = nanos();
            print(&record);
            // The parent reads late where the machine is busy, and a task that prints waits for it.
            let at = nanos();
            if at - since >= STALL {
                let (request, event) = (0, Event::Stalled { since });
                print(&Record { at, request, event });
            }
        });
        let (lease, permits) = (Duration::from_millis(self.lease_ms), self.urls.len() == 1);
        let usual = Plan::new(nanos);
        let brief = self.brief_lease_ms.map(Duration::from_millis);
        let working = Plan {
            tasks: self.tasks,
            lease,
            brief_lease: brief.unwrap_or(usual.brief_lease),
            permits,
            // Over several servers there are neither.
            retains: permits,
            seed: self.seed,
            ..usual
        }
        .start(std::slice::from_ref(&locks), &log);
        parent.line().await;
        working.finish().await;
        locks.shutdown().await;
        parent.say("done");
        parent.finished().await;
    }

    async fn connect(&self) -> Result<LockClient, LockError> {
        let builder = LockClient::builder().namespace(&self.namespace);
        match &self.urls[..] {
            [url] => builder.connect(url).await,
            urls => {
                builder
                    .redis(
                        RedisOptions::new()
                            .longest_lease(Duration::from_millis(self.longest_lease_ms)),
                    )
                    .connect(&redlock_url(urls))
                    .await
            }
        }
    }
}

fn print(record: &Record) {
    let text = serde_json::to_string(record);
    println!("{}", text.expect("a record has no keys that are not text"));
}
