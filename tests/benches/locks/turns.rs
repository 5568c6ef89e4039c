//! The timed loops, and their clock.

use std::{
    pin::{Pin, pin},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use tokio::time::{Sleep, sleep_until};

use crate::{
    contest::{Round, Tally},
    subject::Subject,
};

/// The clock of one subject in one round, for one of its tasks.
#[derive(Clone)]
pub(crate) struct Watch {
    client: usize,
    until: Instant,
    /// One for all tasks: a histogram for each of 10,000 would take gigabytes.
    tally: Arc<Mutex<Tally>>,
}

impl Watch {
    pub(crate) fn is_running(&self) -> bool {
        Instant::now() < self.until
    }

    /// Completes at the end of the round.
    pub(crate) fn end(&self) -> Sleep {
        sleep_until(self.until.into())
    }

    pub(crate) fn record(&self, each: Duration, times: u32) {
        self.tally().record(each, times.into());
    }

    /// Records that a lock with other waiters was granted to this client.
    pub(crate) fn granted(&self) {
        self.tally().granted(self.client);
    }

    fn tally(&self) -> MutexGuard<'_, Tally> {
        self.tally.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Runs `task` for all subjects concurrently; it returns the number of its turns.
pub(crate) async fn together<S, F>(
    slice: Duration,
    subjects: impl IntoIterator<Item = S>,
    task: impl Fn(S, Watch) -> F,
) -> Round
where
    F: Future<Output = u64> + Send + 'static,
{
    let start = Instant::now();
    let (until, tally) = (start + slice, Arc::new(Mutex::new(Tally::new())));
    let watch = |client| Watch {
        client,
        until,
        tally: tally.clone(),
    };
    let subjects = subjects.into_iter().enumerate();
    let tasks: Vec<_> = subjects
        .map(|(client, subject)| tokio::spawn(task(subject, watch(client))))
        .collect();
    let mut served = Vec::with_capacity(tasks.len());
    for task in tasks {
        served.push(task.await.expect("a subject does not panic"));
    }
    let took = start.elapsed();
    watch(0).tally().round(took, &served)
}

/// An operation that can be repeated.
pub(crate) trait Call: Send + Sync + 'static {
    fn call(&self) -> impl Future<Output = ()> + Send;
}

/// Acquires and releases a lock.
pub(crate) struct Turn<S>(pub(crate) S);

impl<S: Subject> Call for Turn<S> {
    async fn call(&self) {
        let Self(subject) = self;
        subject.release(subject.acquire().await).await;
    }
}

/// Repeats a call until the round is over, and times `batch` calls together: reading the clock
/// costs a good part of a short one.
pub(crate) async fn repeat(call: impl Call, batch: u32, watch: Watch) -> u64 {
    let mut turns = 0;
    while watch.is_running() {
        let before = Instant::now();
        for _ in 0..batch {
            call.call().await;
        }
        watch.record(before.elapsed() / batch, batch);
        turns += u64::from(batch);
        if batch > 1 {
            // Calls this short may never wait, and the other tasks would not run.
            tokio::task::yield_now().await;
        }
    }
    turns
}

/// Acquires, behind other waiters, and releases at once, until the round is over. The waits are
/// timed; one that the end of the round cuts off counts as long as it lasted.
pub(crate) async fn contend(subject: impl Subject, watch: Watch) -> u64 {
    let mut end = pin!(watch.end());
    let mut turns = 0;
    while watch.is_running() {
        let before = Instant::now();
        let guard = acquire_before(&subject, end.as_mut()).await;
        watch.record(before.elapsed(), 1);
        let Some(guard) = guard else { break };
        watch.granted();
        subject.release(guard).await;
        turns += 1;
    }
    turns
}

/// Returns `None` if the end came first: a slow subject must not delay the others.
pub(crate) async fn acquire_before<S: Subject>(
    subject: &S,
    end: Pin<&mut Sleep>,
) -> Option<S::Guard> {
    tokio::select! {
        biased;
        guard = subject.acquire() => Some(guard),
        () = end => None,
    }
}

/// Tasks that each acquire and release a separate lock, repeatedly.
pub(crate) fn each<S: Subject>(
    slice: Duration,
    tasks: usize,
    subject: impl Fn(usize) -> S,
) -> impl Future<Output = Round> {
    together(
        slice,
        (0..tasks).map(move |task| Turn(subject(task))),
        |turn, watch| repeat(turn, 1, watch),
    )
}
