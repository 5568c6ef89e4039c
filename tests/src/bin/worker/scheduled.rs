//! A replica with scheduled jobs and a clock of its own, which differs from that of the machine.

use std::{
    collections::BTreeSet,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use futures_util::{StreamExt as _, stream};
use lock_runtime::{LockClient, LockErrorKind, LockSpec};
use lock_tests::processes::Parent;
use redis::{AsyncCommands as _, aio::MultiplexedConnection};
use tokio::time::sleep;

/// The number of jobs that run at a time.
const JOBS: usize = 4;
/// The pause between two looks at the clock.
const LOOK: Duration = Duration::from_millis(5);

/// Runs a job once for each scheduled time. Appends `<scheduled time> <fencing token>` to the list
/// "begun" when its body begins, and to "recorded" when its result is confirmed. Prints `ready` at
/// first, and `ended` when the look-back of the last occurrence is over by its clock, or all are
/// done.
#[derive(clap::Args)]
pub(crate) struct Scheduled {
    #[arg(long)]
    url: String,
    /// The difference between the clock of this process and that of the machine.
    #[arg(long, allow_hyphen_values = true)]
    offset_ms: i64,
    /// The scheduled time of the first occurrence, since 1970.
    #[arg(long)]
    first_ms: i64,
    #[arg(long)]
    every_ms: i64,
    #[arg(long)]
    occurrences: i64,
    #[arg(long)]
    look_back_ms: i64,
    /// The longest time that a job takes.
    #[arg(long)]
    job_ms: u64,
    /// Has the time of this process in the key, in place of the scheduled one, to show the fault.
    #[arg(long)]
    by_now: bool,
}

impl Scheduled {
    pub(crate) async fn run(self, mut parent: Parent) {
        // A process that is killed leaves its keys for as long.
        let defaults = LockSpec::exclusive().lease(Duration::from_secs(1));
        let builder = LockClient::builder().defaults(defaults);
        let locks = builder.connect(&self.url).await.expect("a server");
        let client = redis::Client::open(self.url.as_str()).expect("a URL");
        let lists = client.get_multiplexed_async_connection().await;
        let lists = lists.expect("a server");
        parent.say("ready");
        let mut done = BTreeSet::new();
        loop {
            let now = self.now();
            let due: Vec<_> = self.due(now).filter(|at| !done.contains(at)).collect();
            let is_over = now > self.at(self.occurrences) + self.look_back_ms;
            if is_over || done.contains(&self.at(self.occurrences - 1)) && due.is_empty() {
                break;
            }
            let runs = due.into_iter().map(async |at| {
                let is_done = self.job(&locks, lists.clone(), at).await;
                is_done.then_some(at)
            });
            let ran: Vec<_> = stream::iter(runs).buffer_unordered(JOBS).collect().await;
            done.extend(ran.into_iter().flatten());
            sleep(LOOK).await;
        }
        parent.say("ended");
        locks.shutdown().await;
        parent.finished().await;
    }

    fn now(&self) -> i64 {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let now = i64::try_from(now.expect("after 1970").as_millis());
        now.expect("before the year 292,000,000") + self.offset_ms
    }

    fn at(&self, occurrence: i64) -> i64 {
        self.first_ms + occurrence * self.every_ms
    }

    /// Returns the scheduled times of the look-back.
    fn due(&self, now: i64) -> impl Iterator<Item = i64> {
        let all = (0..self.occurrences).map(|occurrence| self.at(occurrence));
        all.filter(move |at| (now - self.look_back_ms..=now).contains(at))
    }

    /// Returns whether the job is done. The next look asks again if it is not.
    async fn job(&self, locks: &LockClient, mut lists: MultiplexedConnection, at: i64) -> bool {
        let key = if self.by_now { self.now() } else { at };
        let once = locks.once(format!("report:{key}")).no_wait();
        let mut append = async |list: &str, fence: u64| {
            let appended = lists.rpush(list, format!("{at} {fence}")).await;
            let _: usize = appended.expect("a server");
        };
        let ran = once.run_bytes(async |held| {
            let fence = held.fence().number();
            append("begun", fence).await;
            sleep(Duration::from_millis(rand::random_range(0..=self.job_ms))).await;
            Ok::<_, std::convert::Infallible>(fence.to_string().into_bytes())
        });
        match ran.await {
            Ok(Ok(ran)) => {
                if !ran.is_replay {
                    append("recorded", ran.fence.number()).await;
                }
                true
            }
            Err(error) => {
                // The last three on a busy machine, where a lease ends before a call does.
                let is_expected = matches!(
                    error.kind(),
                    LockErrorKind::Running
                        | LockErrorKind::Lost(_)
                        | LockErrorKind::Unavailable
                        | LockErrorKind::ReleaseUnknown
                );
                assert!(is_expected, "{error}");
                false
            }
        }
    }
}
