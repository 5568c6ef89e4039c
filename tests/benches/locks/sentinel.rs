//! Acquire and release behind Sentinels, one key for each task: as over one server, and with a
//! replica that must confirm each grant before it is returned. The limit is the same two scripts
//! sent directly to the primary.

use std::{num::NonZeroU32, time::Duration};

use lock_runtime::{LockClient, LockClientBuilder, RedisOptions};
use lock_tests::SentinelSet;

use crate::{
    contest::{Contest, LIMIT},
    raw::{self, Raw, RawLock},
    report::Row,
    subject::Ours,
    turns::each,
};

const TASKS: [usize; 2] = [1, 64];
const PATIENCE: Duration = Duration::from_millis(200);

pub(crate) async fn measure(slice: Duration) -> Vec<Row> {
    let set = SentinelSet::start().await;
    let primary = format!("redis://{}", SentinelSet::SERVICE);
    let connect = async |builder: LockClientBuilder| {
        builder
            .connect_sentinel(&primary, set.sentinel_urls())
            .await
            .expect("our own Sentinels answer")
    };
    let locks = connect(LockClient::builder()).await;
    let replicated = connect(
        LockClient::builder().redis(RedisOptions::new().min_replicas(NonZeroU32::MIN, PATIENCE)),
    )
    .await;
    let raw = Raw::connect(&raw::client(&set.master().await.url())).await;
    let mut rows = Vec::new();
    for tasks in TASKS {
        let contest = Contest::new("sentinel", tasks, slice)
            .servers(set.nodes())
            .subject("lock-runtime", |_, slice| {
                each(slice, tasks, |task| {
                    Ours::new(&locks, format!("bench:{task}"))
                })
            })
            .subject("min_replicas(1)", |_, slice| {
                each(slice, tasks, |task| {
                    Ours::new(&replicated, format!("replicated:{task}"))
                })
            })
            .subject(LIMIT, |_, slice| {
                each(slice, tasks, |task| {
                    RawLock::new(&raw, &format!("raw:{task}"))
                })
            });
        rows.extend(contest.run().await);
    }
    locks.shutdown().await;
    replicated.shutdown().await;
    rows
}
