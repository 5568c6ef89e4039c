//! Does work once for each of many keys until it is killed, or for one key when the test says so.

use std::{process, time::Duration};

use lock_runtime::{LockClient, OnceEntry};
use lock_tests::{place::LONG, processes::Parent};
use tokio::task::yield_now;

/// Does the work of `<prefix>0`, `<prefix>1` and so on. Prints `began`, `ended` or `failed` from
/// the body, and `done` with the result afterwards; each with the number of the key, and all but
/// `failed` with a value.
#[derive(clap::Args)]
pub(crate) struct Once {
    #[arg(long)]
    url: String,
    #[arg(long)]
    namespace: String,
    #[arg(long)]
    lease_ms: u64,
    /// Begins the work of the key `<prefix>` only, prints `began`, completes it after the next
    /// line, and prints `done` or the code of the error.
    #[arg(long)]
    one: bool,
    prefix: String,
}

impl Once {
    pub(crate) async fn run(self, mut parent: Parent) {
        let locks = LockClient::builder()
            .namespace(&self.namespace)
            .connect(&self.url)
            .await
            .expect("a server");
        match self.one {
            true => self.do_one(&locks, &mut parent).await,
            false => self.do_many(&locks, &parent).await,
        }
        locks.shutdown().await;
        parent.finished().await;
    }

    async fn do_one(&self, locks: &LockClient, parent: &mut Parent) {
        let lease = Duration::from_millis(self.lease_ms);
        let begun = locks.once(&*self.prefix).lease(lease).begin().await;
        let Ok(OnceEntry::Vacant(guard)) = begun else {
            panic!("the key is free: {begun:?}");
        };
        parent.say("began");
        parent.line().await;
        let ended = guard.complete(b"late").await;
        parent.say(ended.map_or_else(|error| error.code(), |()| "done"));
    }

    async fn do_many(&self, locks: &LockClient, parent: &Parent) {
        let lease = Duration::from_millis(self.lease_ms);
        for number in 0_u32.. {
            let once = locks.once(format!("{}{number}", self.prefix));
            let body = async |held: lock_runtime::HeldLock| {
                let value = format!("{}:{}", process::id(), held.fence());
                parent.say(format!("began {number} {value}"));
                yield_now().await;
                if rand::random_bool(0.25) {
                    parent.say(format!("failed {number}"));
                    return Err(());
                }
                parent.say(format!("ended {number} {value}"));
                Ok(value.into_bytes())
            };
            // After an error, as of a lease that has ended on a busy machine, the key is free.
            if let Ok(Ok(done)) = once.lease(lease).wait(LONG).run_bytes(body).await {
                let value = String::from_utf8_lossy(&done.value).into_owned();
                parent.say(format!("done {number} {value}"));
            }
        }
    }
}
