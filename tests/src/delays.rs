//! The delays of a loaded machine, so that a limit of a time judges the code and not the load.

use std::{
    ops::Range,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

const STEP: Duration = Duration::from_millis(5);

/// The delays of a task that sleeps again and again until this is dropped: those of the calls on
/// the same runtime. A delay below 5 ms is no load.
#[derive(Debug, Default)]
pub struct Delays(Arc<Mutex<Vec<Range<Instant>>>>);

impl Delays {
    /// Starts to measure on this runtime.
    pub fn of_tasks() -> Self {
        let delays = Self::default();
        let list = Arc::downgrade(&delays.0);
        tokio::spawn(async move {
            while let Some(list) = list.upgrade() {
                let due = Instant::now() + 2 * STEP;
                tokio::time::sleep(STEP).await;
                let now = Instant::now();
                if due < now {
                    list.lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .push(due..now);
                }
            }
        });
        delays
    }

    /// Returns the length of a time without the delays in it, each counted twice, as several
    /// processes depend on each other.
    pub fn net(&self, time: Range<Instant>) -> Duration {
        let within = |late: &Range<Instant>| {
            let end = late.end.min(time.end);
            end.saturating_duration_since(late.start.max(time.start))
        };
        let late: Duration = self
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .iter()
            .map(within)
            .sum();
        (time.end - time.start).saturating_sub(2 * late)
    }
}
