//! The guide's recipes for scheduled jobs, with the schedulers of other crates: replicas that look
//! back run each occurrence once, and miss none.

#![cfg(test)]
#![allow(
    clippy::unwrap_used,
    reason = "clippy.toml allows it in test functions only, and not in what they share"
)]

mod with_apalis_cron;
mod with_tokio_cron_scheduler;

use std::{
    collections::BTreeMap,
    sync::Mutex,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use lock_runtime::LockClient;
use tokio::time::{sleep, timeout};

const EACH_SECOND: &str = "* * * * * *";
/// The occurrences before the start that replicas are to catch up.
const MISSED: i64 = 30;

/// The number of runs of each occurrence.
type Runs = Mutex<BTreeMap<i64, u32>>;

fn now() -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    now.as_secs().try_into().unwrap()
}

fn run(runs: &Runs, at: i64) {
    *runs.lock().unwrap().entry(at).or_default() += 1;
}

/// Waits until replicas that began at `began` have run a few occurrences, and checks all of them.
async fn each_is_run_once(runs: &Runs, locks: &LockClient, began: i64) {
    let until = began + 3;
    let is_over = || runs.lock().unwrap().contains_key(&until);
    let all = async {
        while !is_over() {
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(Duration::from_secs(60), all).await.unwrap();
    let runs = runs.lock().unwrap().clone();
    // The first look is a little later than the start, and its look-back reaches as far.
    let first = *runs.keys().next().unwrap();
    assert!(first < began, "{began}: {runs:?}");
    assert!(
        (first..=until).all(|at| runs[&at] == 1),
        "{began}: {runs:?}"
    );
    for at in first..until {
        let stored = locks.once(format!("report:{at}")).stored().await.unwrap();
        assert!(stored.is_some(), "{at}");
    }
}
