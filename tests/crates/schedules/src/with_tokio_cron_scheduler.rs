use std::sync::Arc;

use chrono::{TimeDelta, Utc};
use lock_runtime::{LockClient, LockError, distributed_lock, store::MemoryStore};
use tokio::sync::Notify;
use tokio_cron_scheduler::{Job, JobScheduler, JobSchedulerError};

use crate::{EACH_SECOND, MISSED, Runs, each_is_run_once, now, run};

include!("../../../../lock-runtime/guide/recipes/tokio_cron_scheduler.rs");

static RUNS: Runs = Runs::new(std::collections::BTreeMap::new());

#[distributed_lock(key = "report:{at}", once = "48h", client = locks, wait = "15m")]
async fn report(locks: &LockClient, at: i64) -> Result<(), LockError> {
    run(&RUNS, at);
    Ok(())
}

#[tokio::test]
async fn replicas_with_tokio_cron_scheduler_run_each_occurrence_once() {
    let store = Arc::new(MemoryStore::new());
    let began = now();
    let replica = || {
        let locks = LockClient::with_store(store.clone());
        start(locks, EACH_SECOND, TimeDelta::seconds(MISSED))
    };
    let mut replicas = [replica().await.unwrap(), replica().await.unwrap()];
    let locks = LockClient::with_store(store.clone());
    each_is_run_once(&RUNS, &locks, began).await;
    for replica in &mut replicas {
        replica.shutdown().await.unwrap();
    }
}
