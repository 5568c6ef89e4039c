use std::{
    sync::Arc,
    time::{Duration, UNIX_EPOCH},
};

use apalis_core::{error::BoxDynError, task::data::Data, worker::builder::WorkerBuilder};
use apalis_cron::{CronScheduler, Tick};
use chrono::{DateTime, TimeDelta, Utc};
use cron::Schedule;
use lock_runtime::{LockClient, LockError, distributed_lock, store::MemoryStore};

use crate::{EACH_SECOND, MISSED, Runs, each_is_run_once, now, run};

include!("../../../../lock-runtime/guide/recipes/apalis_cron.rs");

static RUNS: Runs = Runs::new(std::collections::BTreeMap::new());

#[distributed_lock(key = "report:{at}", once = "48h", client = locks, wait = "15m")]
async fn report(locks: &LockClient, at: i64) -> Result<(), LockError> {
    run(&RUNS, at);
    Ok(())
}

#[tokio::test]
async fn replicas_with_apalis_cron_run_each_occurrence_once() {
    let store = Arc::new(MemoryStore::new());
    let began = now();
    let reports = || Reports {
        locks: LockClient::with_store(store.clone()),
        schedule: EACH_SECOND.parse().unwrap(),
        look_back: TimeDelta::seconds(MISSED),
    };
    let replicas = [tokio::spawn(work(reports())), tokio::spawn(work(reports()))];
    let locks = LockClient::with_store(store.clone());
    each_is_run_once(&RUNS, &locks, began).await;
    replicas.iter().for_each(|replica| replica.abort());
}
