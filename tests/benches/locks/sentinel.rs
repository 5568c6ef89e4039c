//! Acquire and release behind Sentinels, one key for each task: as over one server, and with a
//! replica that must confirm each grant before it is returned.

use std::{num::NonZeroU32, time::Duration};

use lock_runtime::{LockClient, LockClientBuilder, RedisOptions};
use lock_tests::SentinelSet;

use crate::{
    contest::Contest,
    raw::{self, Raw, RawLock, SCRIPTS},
    report::Row,
    subject::Ours,
    wire::Wires,
};

const TASKS: [usize; 2] = [1, 64];
const PATIENCE: Duration = Duration::from_millis(200);

pub(crate) async fn measure(slice: Duration) -> Vec<Row> {
    let set = SentinelSet::start().await;
    let url = set.url_with("", "");
    let connect = async |builder: LockClientBuilder| {
        builder
            .connect(&url)
            .await
            .expect("our own Sentinels answer")
    };
    let locks = connect(LockClient::builder()).await;
    let replicated = connect(
        LockClient::builder().redis(RedisOptions::new().min_replicas(NonZeroU32::MIN, PATIENCE)),
    )
    .await;
    let primary = set.master().await;
    let raw = Raw::connect(&raw::client(&primary.url())).await;
    let wires = Wires::connect([(primary.addr(), &raw.connection)]).await;
    let mut rows = Vec::new();
    for tasks in TASKS {
        let contest = Contest::new("sentinel", tasks, slice)
            .servers(set.nodes())
            .each("lock-runtime", |task| {
                Ours::new(&locks, format!("bench:{task}"))
            })
            .each("min_replicas(1)", |task| {
                Ours::new(&replicated, format!("replicated:{task}"))
            })
            .each(SCRIPTS, |task| RawLock::new(&raw, &format!("raw:{task}")));
        rows.extend(
            wires
                .compete(contest, |task| (0..1, format!("wire:{task}")))
                .run()
                .await,
        );
    }
    locks.shutdown().await;
    replicated.shutdown().await;
    rows
}
