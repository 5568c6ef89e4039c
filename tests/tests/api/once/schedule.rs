//! Jobs with a scheduled time, which is in the key: processes whose clocks differ, and which are
//! killed, run each occurrence once.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use lock_runtime::LockClient;
use lock_tests::{
    RedisServer, Worker,
    place::{HANGS, times_as_long},
};
use tokio::{task::JoinSet, time::timeout};

const WORKER: &str = env!("CARGO_BIN_EXE_lock-worker");
const PROCESSES: usize = 4;

/// Occurrences at regular times, for processes with clocks of their own.
struct Schedule {
    server: RedisServer,
    first_ms: i64,
    every_ms: i64,
    occurrences: i64,
    /// The largest difference between the clock of a process and that of the machine.
    skew_ms: i64,
    look_back_ms: i64,
    job_ms: u64,
    by_now: bool,
}

impl Schedule {
    async fn new(occurrences: i64, skew_ms: i64) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        Self {
            server: RedisServer::start().await,
            // A process whose clock is ahead begins at once.
            first_ms: i64::try_from(now.as_millis()).unwrap() + skew_ms,
            every_ms: 10,
            occurrences,
            skew_ms,
            look_back_ms: 5000,
            job_ms: 20,
            by_now: false,
        }
    }

    fn start(&self, offset_ms: i64) -> Worker {
        let url = self.server.url();
        let mut arguments = vec!["scheduled", "--url", &url];
        let numbers = [
            ("--offset-ms", offset_ms.to_string()),
            ("--first-ms", self.first_ms.to_string()),
            ("--every-ms", self.every_ms.to_string()),
            ("--occurrences", self.occurrences.to_string()),
            ("--look-back-ms", self.look_back_ms.to_string()),
            ("--job-ms", self.job_ms.to_string()),
        ];
        for (name, number) in &numbers {
            arguments.extend([*name, number.as_str()]);
        }
        arguments.extend(self.by_now.then_some("--by-now"));
        Worker::spawn(WORKER, &arguments)
    }

    /// Runs a process until it ends by itself, and kills and restarts it before that, up to
    /// `kills` times, with another difference of its clock. Returns the number of kills.
    async fn replica(&self, mut offset_ms: i64, kills: usize) -> usize {
        let mut killed = 0;
        loop {
            let mut worker = self.start(offset_ms);
            assert_eq!(worker.line().await.as_deref(), Some("ready"));
            let life = if killed < kills {
                Duration::from_millis(rand::random_range(0..1500))
            } else {
                HANGS
            };
            if let Ok(line) = timeout(life, worker.line()).await {
                assert_eq!(line.as_deref(), Some("ended"));
                assert!(worker.finish().await.success());
                return killed;
            }
            worker.kill().await;
            killed += 1;
            offset_ms = rand::random_range(-self.skew_ms..=self.skew_ms);
        }
    }

    /// Runs all processes until they end. Returns the number of kills.
    async fn run(self: &Arc<Self>, kills: usize) -> usize {
        let mut replicas = JoinSet::new();
        for number in 0..PROCESSES {
            let share = 2 * self.skew_ms / (PROCESSES as i64 - 1);
            let offset = number as i64 * share - self.skew_ms;
            let this = self.clone();
            replicas.spawn(async move { this.replica(offset, kills).await });
        }
        let kills = timeout(HANGS, replicas.join_all()).await;
        kills.unwrap().iter().sum()
    }

    /// Returns the fencing tokens in a list, by the scheduled time.
    async fn fences(&self, list: &str) -> HashMap<i64, Vec<u64>> {
        let mut fences = HashMap::<_, Vec<_>>::new();
        let lines: Vec<String> = self.server.query(&["LRANGE", list, "0", "-1"]).await;
        for line in lines {
            let (at, fence) = line.split_once(' ').unwrap();
            fences
                .entry(at.parse().unwrap())
                .or_default()
                .push(fence.parse().unwrap());
        }
        fences
    }

    /// Compares the result of each occurrence with the bodies and the records that the processes
    /// saw. Returns the number of bodies.
    async fn judge(&self) -> Result<usize, String> {
        let locks = LockClient::connect(&self.server.url()).await.unwrap();
        let (begun, recorded) = (self.fences("begun").await, self.fences("recorded").await);
        for occurrence in 0..self.occurrences {
            let at = self.first_ms + occurrence * self.every_ms;
            let stored = locks.once(format!("report:{at}")).stored().await.unwrap();
            let stored = stored.ok_or_else(|| format!("occurrence {occurrence} was missed"))?;
            let fence = stored.fence.number();
            let (begun, recorded) = (begun.get(&at), recorded.get(&at));
            let seen = format!("occurrence {occurrence}: {begun:?} {recorded:?} {stored:?}");
            // One grant has recorded it, and none came later. Its process may have been killed
            // before it could report that.
            let of_grant = begun.into_iter().flatten().filter(|it| **it == fence);
            let is_last = begun.into_iter().flatten().max() == Some(&fence);
            let is_seen_once = recorded.is_none_or(|recorded| recorded == &[fence]);
            let is_result_of_grant = stored.value == fence.to_string().as_bytes();
            if of_grant.count() != 1 || !is_last || !is_seen_once || !is_result_of_grant {
                return Err(seen);
            }
        }
        assert_eq!(begun.len(), usize::try_from(self.occurrences).unwrap());
        Ok(begun.values().map(Vec::len).sum())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_occurrence_is_recorded_once_by_processes_whose_clocks_differ_and_which_are_killed() {
    let times = times_as_long();
    let occurrences = 1000 * times as i64;
    let schedule = Arc::new(Schedule::new(occurrences, 5000).await);
    let began = Instant::now();
    let kills = schedule.run(20 * times).await;
    let bodies = schedule.judge().await.unwrap();
    let elapsed = began.elapsed();
    println!("{occurrences} occurrences, {kills} kills: {bodies} bodies begun in {elapsed:.1?}");
}

/// The judge of the test above finds the fault.
#[tokio::test(flavor = "multi_thread")]
async fn the_time_of_the_process_in_the_key_runs_a_job_in_each_process() {
    let mut schedule = Schedule::new(20, 300).await;
    schedule.by_now = true;
    let schedule = Arc::new(schedule);
    schedule.run(0).await;
    schedule.judge().await.unwrap_err();
    let recorded = schedule.fences("recorded").await;
    assert_eq!(recorded.len(), 20);
    assert!(recorded.values().any(|it| it.len() > 1), "{recorded:?}");
}
