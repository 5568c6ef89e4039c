//! Acquire and release, every task its own key, over one connection.

use std::time::Duration;

use lock_runtime::LockClient;
use lock_tests::redis_server::RedisServer;

use crate::{
    contest::Contest,
    raw::{self, Raw, RawLock, SCRIPTS},
    report::Row,
    subject::{Ours, Rslock},
    wire::Wires,
};

const TASKS: [usize; 3] = [1, 64, 1024];

pub(crate) async fn measure(slice: Duration) -> Vec<Row> {
    let server = RedisServer::start().await;
    let client = raw::client(&server.url());
    let locks = LockClient::connect(&server.url())
        .await
        .expect("our own server answers");
    let raw = Raw::connect(&client).await;
    let wires = Wires::connect([(server.addr(), &raw.connection)]).await;
    let manager = Rslock::manager(&client);
    let mut rows = Vec::new();
    for tasks in TASKS {
        let contest = Contest::new("uncontended", tasks, slice)
            .servers([&server])
            .each("lock-runtime", |task| {
                Ours::new(&locks, format!("bench:{task}"))
            })
            .each(SCRIPTS, |task| RawLock::new(&raw, &format!("raw:{task}")))
            .each("rslock", |task| {
                Rslock::new(&manager, format!("rslock:{task}"))
            });
        rows.extend(
            wires
                .compete(contest, |task| (0..1, format!("wire:{task}")))
                .run()
                .await,
        );
    }
    locks.shutdown().await;
    rows
}
