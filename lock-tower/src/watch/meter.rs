//! The metrics of one request.

use std::sync::Arc;

use lock_runtime::{HeldLock, LockError, LockErrorKind};
use metrics::{Key, Label, Level, Metadata, Recorder, SharedString, with_recorder};
use tokio::time::Instant;

use crate::{
    metrics::{ACQUIRE, CONTENDED, HOLD, LOST, RENEWALS, UNLOCKED, WAITING},
    policy::Policy,
};

static METADATA: Metadata<'static> =
    Metadata::new(module_path!(), Level::INFO, Some(module_path!()));

/// The metric keys of a policy, with their labels. They are built once, so that a request
/// allocates nothing if no recorder is installed.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Names {
    policy: Label,
    granted: Key,
    hold: Key,
    waiting: Key,
    contended: Key,
    renewals: Key,
    unlocked: Key,
}

impl Names {
    pub(crate) fn of(policy: &Arc<str>) -> Self {
        let policy = Label::new("policy", SharedString::from_shared(policy.clone()));
        let key = |name| Key::from_parts(name, vec![policy.clone()]);
        Self {
            granted: acquired(&policy, "granted"),
            hold: key(HOLD),
            waiting: key(WAITING),
            contended: key(CONTENDED),
            renewals: key(RENEWALS),
            unlocked: key(UNLOCKED),
            policy,
        }
    }
}

fn acquired(policy: &Label, outcome: &'static str) -> Key {
    Key::from_parts(
        ACQUIRE,
        vec![policy.clone(), Label::new("outcome", outcome)],
    )
}

/// The state of one request, as counted in the metrics.
pub(super) struct Meter {
    policy: Arc<Policy>,
    stage: Stage,
}

enum Stage {
    /// Not waiting and not holding.
    Out,
    Asking {
        since: Instant,
    },
    Holding {
        since: Instant,
        held: HeldLock,
    },
}

impl Meter {
    pub(super) fn new(policy: &Arc<Policy>) -> Self {
        Self {
            policy: policy.clone(),
            stage: Stage::Out,
        }
    }

    pub(super) fn asks(&mut self) {
        self.stage = Stage::Asking {
            since: Instant::now(),
        };
        with_recorder(|to| {
            to.register_gauge(&self.names().waiting, &METADATA)
                .increment(1)
        });
    }

    pub(super) fn granted(&mut self, held: &HeldLock) {
        self.asked("granted");
        with_recorder(|to| {
            if held.was_contended() {
                count(to, &self.names().contended, 1);
            }
        });
        self.stage = Stage::Holding {
            since: Instant::now(),
            held: held.clone(),
        };
    }

    pub(super) fn refused(&mut self, error: &LockError, served: bool) {
        self.asked(error.code());
        with_recorder(|to| {
            use LockErrorKind as Kind;
            if matches!(
                error.kind(),
                Kind::Contended | Kind::WaitTimeout | Kind::Overloaded
            ) {
                count(to, &self.names().contended, 1);
            }
            if served {
                count(to, &self.names().unlocked, 1);
            }
        });
    }

    pub(super) fn released(&mut self, error: Option<&LockError>) {
        if let Stage::Holding { since, held } = std::mem::replace(&mut self.stage, Stage::Out) {
            with_recorder(|to| {
                let names = self.names();
                to.register_histogram(&names.hold, &METADATA)
                    .record(since.elapsed());
                let renewals = held.renewals();
                if renewals > 0 {
                    count(to, &names.renewals, renewals);
                }
                if let Some(error) = error
                    && matches!(error.kind(), LockErrorKind::Lost(_))
                {
                    let how = Label::new("loss", error.code());
                    count(
                        to,
                        &Key::from_parts(LOST, vec![names.policy.clone(), how]),
                        1,
                    );
                }
            });
        }
    }

    /// Ends the acquire attempt, if there is one.
    fn asked(&mut self, outcome: &'static str) {
        if let Stage::Asking { since } = self.stage {
            self.stage = Stage::Out;
            with_recorder(|to| {
                let names = self.names();
                to.register_gauge(&names.waiting, &METADATA).decrement(1);
                let took = since.elapsed();
                if outcome == "granted" {
                    to.register_histogram(&names.granted, &METADATA)
                        .record(took);
                } else {
                    to.register_histogram(&acquired(&names.policy, outcome), &METADATA)
                        .record(took);
                }
            });
        }
    }

    fn names(&self) -> &Names {
        self.policy.names()
    }
}

fn count(to: &dyn Recorder, key: &Key, more: u64) {
    to.register_counter(key, &METADATA).increment(more);
}

impl Drop for Meter {
    /// Counts a request whose client has disconnected or whose handler has panicked.
    fn drop(&mut self) {
        self.asked("cancelled");
        self.released(None);
    }
}
