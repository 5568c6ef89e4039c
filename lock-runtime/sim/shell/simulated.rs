//! What the simulator of clients (`sim/shell`) controls in the shells of its thread: the random
//! numbers, the tasks of the drivers, and the fault that is planted.

use std::cell::RefCell;

use rand::{
    RngExt as _, SeedableRng as _,
    distr::{Distribution, StandardUniform},
    rngs::StdRng,
};
use tokio::task::AbortHandle;

/// A fault in a shell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Planted {
    /// A waiter is not woken.
    LosesWakeUp,
    /// A waiter that is polled by another task keeps the waker of the first one.
    KeepsFirstWaker,
    /// The future of an acquire is dropped, and its request stays.
    CancelsNothing,
    /// The same if it is dropped between its wake-up and the next poll.
    CancelsNoneThatIsWoken,
    /// The view of a lock is not found by the effects for it.
    ForgetsView,
    /// The end of one hold ends the view of another one.
    EndsWrongView,
    /// A loss does not wake its waiters.
    TellsNoLoss,
    /// A dropped guard stays.
    KeepsDroppedGuard,
    /// The driver sleeps while there is work.
    RousesNobody,
    /// A driver that has died counts as running.
    CountsAsRunning,
    /// The calls of a driver that has died are not planned again.
    ForgetsCallsInFlight,
    /// A batch of renewals that has been answered counts as in flight.
    CountsAnsweredBatch,
    /// The driver stays when the last clone of its client is gone.
    StaysWithoutClient,
    /// The end of the releases does not wake a shutdown.
    TellsNoEnd,
}

#[derive(Default)]
struct Simulated {
    random: Option<StdRng>,
    planted: Option<Planted>,
    drivers: Vec<AbortHandle>,
}

thread_local! {
    static SIMULATED: RefCell<Simulated> = RefCell::default();
}

/// The shells of this thread are simulated until this is dropped.
pub(crate) struct Simulation(());

impl Simulation {
    pub(crate) fn new(seed: u64, planted: Option<Planted>) -> Self {
        SIMULATED.set(Simulated {
            random: Some(StdRng::seed_from_u64(seed)),
            planted,
            drivers: Vec::new(),
        });
        Self(())
    }
}

impl Drop for Simulation {
    fn drop(&mut self) {
        SIMULATED.take();
    }
}

/// Returns whether the shells of this thread are simulated: the keeper, a thread of its own, stays
/// out, and no task writes the log lines of a burst.
pub(crate) fn is_simulated() -> bool {
    SIMULATED.with_borrow(|it| it.random.is_some())
}

pub(super) fn random<T>() -> Option<T>
where
    StandardUniform: Distribution<T>,
{
    SIMULATED.with_borrow_mut(|it| it.random.as_mut().map(|random| random.random()))
}

/// Returns whether this fault is planted.
pub(crate) fn planted(fault: Planted) -> bool {
    SIMULATED.with_borrow(|it| it.planted == Some(fault))
}

/// Records the task of a driver.
pub(super) fn started(driver: AbortHandle) {
    SIMULATED.with_borrow_mut(|it| {
        it.drivers.retain(|driver| !driver.is_finished());
        it.drivers.push(driver);
    });
}

/// Returns the tasks of the drivers that run, the oldest first.
pub(crate) fn drivers() -> Vec<AbortHandle> {
    SIMULATED.with_borrow(|it| it.drivers.clone())
}
