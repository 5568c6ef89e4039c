//! The model test: random operations on the in-memory store and on another store get the same
//! replies.
//!
//! The seed alone determines a sequence. The sequences run concurrently, each with its own keys,
//! over one connection. A sequence that fails prints its seed and every step with both replies.

mod answer;
mod shape;
mod side;
mod step;
mod steps;

use std::{env, fmt::Write as _, panic::resume_unwind, sync::Arc, time::Duration};

use futures_util::future::join_all;
use lock_runtime::{
    Mode,
    operator::Waiter,
    store::{MemoryStore, Store},
    time::Instant,
};
use tokio::{
    task::{JoinError, JoinSet},
    time::sleep,
};

use self::{shape::Shape, side::Side, steps::Steps};
use super::{
    SEED,
    subject::{Subject, promise, skipped, unique},
};

/// The default number of sequences.
const SEQUENCES: u64 = 150;
const STEPS: usize = 110;
/// The largest number of sequences in progress at a time: enough that those that sleep cost no
/// time.
const AT_A_TIME: u32 = 100;
/// The longest that a call may take: a waiter polls after several calls, and must not be stale.
const CALL: Duration = Waiter::STALE_AFTER.checked_div(100).unwrap();
/// The time after which no sequence begins, unless their number was set.
const BEGIN_WITHIN: Duration = Duration::from_secs(20);

/// A model test, which compares a store with the in-memory store.
///
/// Each sequence has 110 operations. By default there are 150 sequences, and fewer if not all have
/// begun after 20 s. A store with slow calls gets fewer of them at a time.
///
/// The environment variable `LOCK_CONFORMANCE_SEED` sets the seed of the first sequence, to repeat
/// a sequence that has failed.
#[derive(Clone, Debug)]
pub struct Model {
    /// The number of sequences, if it must not depend on the time that they take.
    sequences: Option<u64>,
    first: u64,
    exact: bool,
}

impl Default for Model {
    fn default() -> Self {
        Self::new()
    }
}

impl Model {
    /// Creates a model test of the default size.
    pub fn new() -> Self {
        let first = env::var(SEED).ok().and_then(|seed| seed.parse().ok());
        Self {
            sequences: None,
            first: first.unwrap_or_default(),
            exact: false,
        }
    }

    /// Sets the number of sequences, all of which are run.
    #[must_use]
    pub fn sequences(self, sequences: u64) -> Self {
        Self {
            sequences: Some(sequences),
            ..self
        }
    }

    /// Also compares the parts of a reply that the contract leaves open, and expects the store to
    /// keep the fencing token of a key that is not held.
    #[must_use]
    #[doc(hidden)]
    pub fn exact(self) -> Self {
        Self {
            exact: true,
            ..self
        }
    }

    /// Runs the sequences on the store of `make`.
    ///
    /// # Panics
    /// If the store replies otherwise than the in-memory store. The message contains the seed and
    /// every step with both replies.
    pub async fn run(&self, make: &impl AsyncFn() -> Arc<dyn Store>) {
        let store = make().await;
        let subject = Subject::over(store.clone());
        let at_a_time = at_a_time(&subject).await;
        let test = Arc::new(Comparison {
            exact: self.exact,
            shape: Shape::of(&subject, self.exact).await,
            memory: Arc::new(MemoryStore::new()),
            store,
            run: unique(),
        });
        let begun = Instant::now();
        let mut sequences = JoinSet::new();
        let number = self.sequences.unwrap_or(SEQUENCES);
        for index in 0..number {
            if sequences.len() >= at_a_time {
                finished(sequences.join_next().await);
            }
            if self.sequences.is_none() && begun.elapsed() > BEGIN_WITHIN {
                let left = format!("{} of {number} sequences", number - index);
                skipped(&left, "the calls are slow");
                break;
            }
            sequences.spawn(test.clone().sequence(self.first + index));
        }
        while !sequences.is_empty() {
            finished(sequences.join_next().await);
        }
    }
}

/// Returns the number of sequences that a store can serve at a time.
async fn at_a_time(subject: &Subject) -> usize {
    let begun = Instant::now();
    let calls = (0..AT_A_TIME).map(|_| async {
        let hold = subject.held(Mode::Exclusive).await;
        subject.release(&hold).await;
    });
    join_all(calls).await;
    let call = begun.elapsed() / (2 * AT_A_TIME);
    let fitting = CALL.as_micros() / call.as_micros().max(1);
    fitting.clamp(1, AT_A_TIME.into()) as usize
}

fn finished(sequence: Option<Result<(), JoinError>>) {
    if let Some(Err(error)) = sequence {
        resume_unwind(error.into_panic());
    }
}

struct Comparison {
    exact: bool,
    shape: Shape,
    memory: Arc<MemoryStore>,
    store: Arc<dyn Store>,
    /// Part of the names of all keys.
    run: String,
}

impl Comparison {
    fn sides(&self) -> [Side; 2] {
        let memory = Side::new(self.memory.clone(), self.shape.unit);
        let store = Side::new(self.store.clone(), self.shape.unit).remembering(self.exact);
        [memory, store]
    }

    async fn sequence(self: Arc<Self>, seed: u64) {
        let mut steps = Steps::new(seed, &self.run, self.shape);
        let [mut memory, mut store] = self.sides();
        let mut story = String::new();
        for number in 1..=STEPS {
            let step = steps.next();
            let (expected, found) = (memory.take(&step).await, store.take(&step).await);
            if steps.are_late() || matches!(found, Ok(answer::Answer::Unanswered)) {
                let rest = format!("sequence {seed} from step {number} on");
                return skipped(&rest, "the calls are slow");
            }
            let _ = writeln!(
                story,
                "{number:3}. {step}\n     memory: {expected:?}\n      store: {found:?}"
            );
            let agree = match (&expected, &found) {
                (Ok(expected), Ok(found)) if self.exact => expected == found,
                (Ok(expected), Ok(found)) => expected.allows(found, &step),
                _ => false,
            };
            promise!(
                "it replies as the in-memory store does",
                agree,
                "{SEED}={seed}:\n{story}"
            );
            steps.learn(&step, expected.unwrap_or_default());
            if let Some(short) = self.shape.short.filter(|short| step.is_short(*short)) {
                sleep(2 * short).await;
            }
        }
    }
}
