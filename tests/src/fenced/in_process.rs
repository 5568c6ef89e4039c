//! The resource shared by the tasks and threads of one process.

use std::{
    num::NonZeroU32,
    sync::{Mutex, MutexGuard, PoisonError},
};

use tokio::task::yield_now;

use super::{Report, Stale};

/// A resource shared by the tasks of this process. The methods take a `FencingToken` or a plain
/// number.
#[derive(Debug)]
pub struct FencedResource {
    /// Number of visitors that may be inside at once, apart from readers.
    room: u64,
    /// A std mutex: it is held for a few instructions, never across an await.
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    seen: u64,
    alone: u64,
    readers: u64,
    report: Report,
}

impl FencedResource {
    /// A resource for an exclusive lock: one visitor inside at a time.
    pub fn new() -> Self {
        Self::with_room(NonZeroU32::MIN)
    }

    /// A resource for permits: `room` visitors inside at a time. Holders of permits come and go in
    /// any order of their tokens, so use the same token for all entries: only the overlaps are
    /// meaningful then.
    pub fn with_room(room: NonZeroU32) -> Self {
        Self {
            room: room.get().into(),
            state: Mutex::default(),
        }
    }

    /// Enters as a visitor that must be alone (or one of `room`), until the returned value is
    /// dropped.
    ///
    /// # Errors
    /// When a larger token was seen; the entry is counted as a violation and as the overlap it
    /// would have been.
    pub fn enter(&self, fence: impl Into<u64>) -> Result<Inside<'_>, Stale> {
        let mut state = self.state();
        if state.alone >= self.room || state.readers > 0 {
            state.report.overlaps += 1;
        }
        state.check(fence.into())?;
        state.alone += 1;
        state.note_peak();
        Ok(Inside {
            resource: self,
            reader: false,
        })
    }

    /// Enters as one of any number of readers, of which none may meet a visitor that must be alone.
    pub fn enter_reader(&self) -> Inside<'_> {
        let mut state = self.state();
        if state.alone > 0 {
            state.report.overlaps += 1;
        }
        state.readers += 1;
        state.note_peak();
        Inside {
            resource: self,
            reader: true,
        }
    }

    /// The current number.
    pub fn read(&self) -> u64 {
        self.state().report.value
    }

    /// Writes a new number: one more than the number read before.
    ///
    /// # Errors
    /// When a larger token was seen; the write is refused and counted as a violation.
    pub fn write(&self, fence: impl Into<u64>, value: u64) -> Result<(), Stale> {
        let mut state = self.state();
        state.check(fence.into())?;
        state.report.writes += 1;
        state.report.lost_updates += u64::from(value != state.report.value + 1);
        state.report.value = value;
        Ok(())
    }

    /// Runs a whole critical section: enter, read, let the other tasks run, write, leave.
    ///
    /// # Errors
    /// When a larger token was seen, at the entry or at the write.
    pub async fn increment(&self, fence: impl Into<u64>) -> Result<(), Stale> {
        let fence = fence.into();
        let _inside = self.enter(fence)?;
        let value = self.read();
        yield_now().await;
        self.write(fence, value + 1)
    }

    /// The counts so far.
    pub fn report(&self) -> Report {
        self.state().report
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for FencedResource {
    fn default() -> Self {
        Self::new()
    }
}

impl State {
    fn check(&mut self, presented: u64) -> Result<(), Stale> {
        if presented < self.seen {
            self.report.violations += 1;
            return Err(Stale {
                presented,
                seen: self.seen,
            });
        }
        self.seen = presented;
        Ok(())
    }

    fn note_peak(&mut self) {
        self.report.peak = self.report.peak.max(self.alone + self.readers);
    }
}

/// A stay inside a [`FencedResource`]; dropping it leaves.
#[derive(Debug)]
#[must_use = "dropping it leaves the resource at once"]
pub struct Inside<'a> {
    resource: &'a FencedResource,
    reader: bool,
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        let mut state = self.resource.state();
        if self.reader {
            state.readers -= 1;
        } else {
            state.alone -= 1;
        }
    }
}
