//! Acquire and release, every task its own key, over one connection.

use std::time::Duration;

use lock_runtime::LockClient;
use lock_tests::redis_server::RedisServer;

use crate::{
    contest::Contest,
    raw::{self, Raw, RawLock, SCRIPTS},
    report::Row,
    subject::{Ours, Rslock},
    turns::each,
    wire::{BareLock, Socket, WIRE, WIRE_REDIS_RS},
};

const TASKS: [usize; 3] = [1, 64, 1024];

pub(crate) async fn measure(slice: Duration) -> Vec<Row> {
    let server = RedisServer::start().await;
    let client = raw::client(&server.url());
    let locks = LockClient::connect(&server.url())
        .await
        .expect("our own server answers");
    let raw = Raw::connect(&client).await;
    let sockets = BareLock::load([Socket::connect(server.addr()).await]).await;
    let connections = BareLock::load([raw.connection.clone()]).await;
    let manager = Rslock::manager(&client);
    let mut rows = Vec::new();
    for tasks in TASKS {
        let contest = Contest::new("uncontended", tasks, slice)
            .servers([&server])
            .subject("lock-runtime", |_, slice| {
                each(slice, tasks, |task| {
                    Ours::new(&locks, format!("bench:{task}"))
                })
            })
            .subject(WIRE, |_, slice| {
                each(slice, tasks, |task| {
                    BareLock::new(&sockets, format!("wire:{task}"))
                })
            })
            .subject(WIRE_REDIS_RS, |_, slice| {
                each(slice, tasks, |task| {
                    BareLock::new(&connections, format!("wire-rs:{task}"))
                })
            })
            .subject(SCRIPTS, |_, slice| {
                each(slice, tasks, |task| {
                    RawLock::new(&raw, &format!("raw:{task}"))
                })
            })
            .subject("rslock", |_, slice| {
                each(slice, tasks, |task| {
                    Rslock::new(&manager, format!("rslock:{task}"))
                })
            });
        rows.extend(contest.run().await);
    }
    locks.shutdown().await;
    rows
}
