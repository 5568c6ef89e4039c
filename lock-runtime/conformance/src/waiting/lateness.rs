//! The delay of a loaded machine, so that a limit of a time judges the store and not the load.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

/// A pause of the thread.
const STEP: Duration = Duration::from_millis(5);

/// The sum of the delays of a thread that sleeps again and again until this is dropped.
#[derive(Debug)]
pub struct Lateness {
    micros: Arc<AtomicU64>,
}

impl Lateness {
    /// Starts to measure.
    pub fn start() -> Self {
        let micros = Arc::new(AtomicU64::new(0));
        let sum = Arc::downgrade(&micros);
        thread::spawn(move || {
            while let Some(sum) = sum.upgrade() {
                let begin = Instant::now();
                thread::sleep(STEP);
                let late = begin.elapsed().saturating_sub(STEP);
                sum.fetch_add(late.as_micros().try_into().unwrap_or(u64::MAX), Relaxed);
            }
        });
        Self { micros }
    }

    /// Returns `promised` with an allowance for the load since the start: twice the delay of a
    /// single thread, as several processes depend on each other.
    pub fn allows(&self, promised: Duration) -> Duration {
        promised + 2 * Duration::from_micros(self.micros.load(Relaxed))
    }
}
