//! The metrics of requests and holds.

use std::{
    collections::HashMap,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        OnceLock, PoisonError, RwLock,
        atomic::{AtomicUsize, Ordering},
    },
};

use metrics::{Key, Label, Level, Metadata, Recorder, SharedString, with_recorder};

use super::{Grant, OnceOutcome};
use crate::{
    error::{LockError, LockErrorKind, Loss},
    observe::metrics::{
        ACQUISITIONS, CONTENDED, HANDOFFS, HELD, HOLD, LOST, ONCE, RENEWAL_FAILURES, RENEWALS,
        STORED, WAIT, WAITING,
    },
    protocol::Source,
    request::name::RequestName,
    request::spec::Mode,
    shell::time::Instant,
};

static METADATA: Metadata<'static> =
    Metadata::new("lock_runtime", Level::INFO, Some("lock_runtime"));

/// The most names that a process distinguishes: clients can invent gRPC methods, for example, and
/// each name has metrics of its own.
const MAX_NAMES: usize = 256;

/// The outcomes of requests, the codes of their errors included.
const OUTCOMES: [&str; 27] = [
    GRANTED,
    "contended",
    "wait_timeout",
    "overloaded",
    "unavailable",
    "blocked",
    "foreign_key",
    "unauthenticated",
    "forbidden",
    "wrong_server",
    "read_only",
    "full",
    "incompatible_format",
    REENTERED,
    CANCELLED,
    "done",
    "would_deadlock",
    "lost_expired",
    "lost_taken",
    "lost_revoked",
    "lost_max_hold",
    "mode_mismatch",
    "invalid_key",
    "invalid_spec",
    "invalid_url",
    "no_runtime",
    "shutting_down",
];
/// The number of outcomes, the first ones, that are zero before they occur. Those are the ones that
/// operators watch; a series for each of the others, name and mode would seldom have a value.
const WATCHED: usize = 13;
const GRANTED: &str = "granted";
const REENTERED: &str = "reentered";
const CANCELLED: &str = "cancelled";

const LOSSES: [Loss; 4] = [Loss::Expired, Loss::Taken, Loss::Revoked, Loss::MaxHold];

/// Calls `record` with the recorder, if one is installed. A panic of the recorder ends here: it
/// must not end a connection, nor the drop of a guard.
pub(crate) fn recorded(record: impl FnOnce(&dyn Recorder)) {
    with_recorder(|to| {
        if is_installed(to) {
            drop(catch_unwind(AssertUnwindSafe(|| record(to))));
        }
    });
}

/// Returns whether this is not the recorder that stands for none, which has no size and is not in a
/// box. A global recorder is in one.
fn is_installed(to: &dyn Recorder) -> bool {
    size_of_val(to) > 0 || address(to) == align_of_val(to)
}

fn address(to: &dyn Recorder) -> usize {
    std::ptr::from_ref(to).cast::<()>().addr()
}

pub(crate) fn count(to: &dyn Recorder, key: &Key, more: u64) {
    to.register_counter(key, &METADATA).increment(more);
}

pub(crate) fn observe(to: &dyn Recorder, key: &Key, value: f64) {
    to.register_histogram(key, &METADATA).record(value);
}

/// The metric keys of a name and mode, with their labels. They are built once.
#[derive(Debug)]
struct Meters {
    outcomes: [Key; OUTCOMES.len()],
    contended: Key,
    wait: Key,
    waiting: Key,
    held: Key,
    hold: Key,
    losses: [Key; LOSSES.len()],
    renewals: Key,
    renewal_failures: Key,
    local: Key,
    remote: Key,
    retained: Key,
    /// By [`OnceOutcome`].
    once: [Key; 5],
    stored: Key,
    /// The address of the recorder that has all of them.
    registered_with: AtomicUsize,
}

type ByMode = [OnceLock<Meters>; 3];

/// The names of this process. There are few, and they live as long as it does.
static NAMES: RwLock<Option<HashMap<RequestName, &'static ByMode>>> = RwLock::new(None);
static UNNAMED: ByMode = [const { OnceLock::new() }; 3];
static OTHER: ByMode = [const { OnceLock::new() }; 3];

/// Returns the meters of all requests with this name.
fn named(name: &RequestName) -> Option<&'static ByMode> {
    let names = NAMES.read().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = names.as_ref().and_then(|names| names.get(name)) {
        return Some(known);
    }
    let is_full = |names: &HashMap<_, _>| names.len() >= MAX_NAMES;
    if names.as_ref().is_some_and(is_full) {
        return None;
    }
    drop(names);
    let mut names = NAMES.write().unwrap_or_else(PoisonError::into_inner);
    let names = names.get_or_insert_default();
    if is_full(names) && !names.contains_key(name) {
        return None;
    }
    let new = || &*Box::leak(Box::new([const { OnceLock::new() }; 3]));
    Some(names.entry(name.clone()).or_insert_with(new))
}

impl Meters {
    fn of(name: Option<&RequestName>, mode: Mode) -> &'static Self {
        let (by_mode, text) = match name.map(|name| (named(name), name)) {
            None => (&UNNAMED, SharedString::const_str("unnamed")),
            Some((None, _)) => (&OTHER, SharedString::const_str("other")),
            Some((Some(by_mode), name)) => (by_mode, name.to_label()),
        };
        let index = match mode {
            Mode::Exclusive => 0,
            Mode::Shared => 1,
            Mode::Permits(_) => 2,
        };
        by_mode[index].get_or_init(|| Self::new(text, mode.as_str()))
    }

    fn new(name: SharedString, mode: &'static str) -> Self {
        let labels = [Label::new("name", name), Label::new("mode", mode)];
        let key = |metric| Key::from_parts(metric, labels.to_vec());
        let with = |metric, label, value: &'static str| {
            let mut labels = labels.to_vec();
            labels.push(Label::new(label, value));
            Key::from_parts(metric, labels)
        };
        let loss = |loss| {
            let code = LockErrorKind::Lost(loss).code();
            code.strip_prefix("lost_").unwrap_or(code)
        };
        Self {
            outcomes: OUTCOMES.map(|outcome| with(ACQUISITIONS, "outcome", outcome)),
            contended: key(CONTENDED),
            wait: key(WAIT),
            waiting: key(WAITING),
            held: key(HELD),
            hold: key(HOLD),
            losses: LOSSES.map(|it| with(LOST, "loss", loss(it))),
            renewals: key(RENEWALS),
            renewal_failures: key(RENEWAL_FAILURES),
            local: with(HANDOFFS, "scope", "local"),
            remote: with(HANDOFFS, "scope", "remote"),
            retained: with(HANDOFFS, "scope", "retained"),
            once: OnceOutcome::ALL.map(|outcome| {
                let outcome = Label::new("outcome", outcome.as_str());
                Key::from_parts(ONCE, vec![labels[0].clone(), outcome])
            }),
            stored: Key::from_parts(STORED, vec![labels[0].clone()]),
            registered_with: AtomicUsize::new(0),
        }
    }

    /// Registers those that operators watch, unless the recorder has them: the rate of a counter is
    /// known only if it existed before its first increment.
    fn register(&self, to: &dyn Recorder) {
        let recorder = address(to);
        if self.registered_with.load(Ordering::Relaxed) == recorder {
            return;
        }
        let outcomes = self.outcomes.iter().take(WATCHED);
        let counters = outcomes.chain(&self.losses).chain([
            &self.contended,
            &self.renewals,
            &self.renewal_failures,
            &self.local,
            &self.remote,
        ]);
        counters.for_each(|key| count(to, key, 0));
        for key in [&self.waiting, &self.held] {
            to.register_gauge(key, &METADATA).increment(0);
        }
        for key in [&self.wait, &self.hold] {
            let _registered = to.register_histogram(key, &METADATA);
        }
        self.registered_with.store(recorder, Ordering::Relaxed);
    }

    fn count_outcome(&self, to: &dyn Recorder, outcome: &str) {
        let keys = OUTCOMES.iter().zip(&self.outcomes);
        for (_, key) in keys.filter(|(known, _)| **known == outcome) {
            count(to, key, 1);
        }
    }

    fn count_refusal(&self, to: &dyn Recorder, error: &LockError) {
        use LockErrorKind as Kind;
        self.count_outcome(to, error.code());
        if let Kind::Contended | Kind::WaitTimeout | Kind::Overloaded = error.kind() {
            count(to, &self.contended, 1);
        }
    }
}

/// A request without an outcome so far. `None` if there was no recorder.
pub(crate) struct WatchedRequest(Option<(&'static Meters, Instant)>);

impl WatchedRequest {
    pub(super) fn begin(name: Option<&RequestName>, mode: Mode) -> Self {
        let mut attempt = Self(None);
        recorded(|to| {
            let meters = Meters::of(name, mode);
            meters.register(to);
            to.register_gauge(&meters.waiting, &METADATA).increment(1);
            attempt.0 = Some((meters, Instant::now()));
        });
        attempt
    }

    pub(super) fn ended(&mut self, outcome: Result<Grant, &LockError>) {
        self.end(|meters, to| match outcome {
            Ok(grant) => {
                let is_new = !grant.is_reentered;
                meters.count_outcome(to, if is_new { GRANTED } else { REENTERED });
                if grant.was_contended {
                    count(to, &meters.contended, 1);
                }
            }
            Err(error) => meters.count_refusal(to, error),
        });
    }

    fn end(&mut self, record: impl FnOnce(&Meters, &dyn Recorder)) {
        if let Some((meters, since)) = self.0.take() {
            recorded(|to| {
                to.register_gauge(&meters.waiting, &METADATA).decrement(1);
                observe(to, &meters.wait, since.elapsed().as_secs_f64());
                record(meters, to);
            });
        }
    }

    pub(super) fn granted(&self, source: Source) -> Hold {
        Hold(self.0.map(|(meters, _)| Holding {
            meters,
            source,
            since: Instant::now(),
        }))
    }
}

impl Drop for WatchedRequest {
    fn drop(&mut self) {
        self.end(|meters, to| meters.count_outcome(to, CANCELLED));
    }
}

pub(super) fn refused(name: Option<&RequestName>, mode: Mode, error: &LockError) {
    recorded(|to| {
        let meters = Meters::of(name, mode);
        meters.register(to);
        meters.count_refusal(to, error);
    });
}

/// Counts a request for work that is done once, and the bytes that it has recorded.
pub(super) fn once(name: Option<&RequestName>, outcome: OnceOutcome, stored: usize) {
    recorded(|to| {
        let meters = Meters::of(name, Mode::Exclusive);
        // The rate of a counter is known only if it existed before its first increment.
        for (known, key) in OnceOutcome::ALL.into_iter().zip(&meters.once) {
            count(to, key, u64::from(known == outcome));
        }
        count(to, &meters.stored, stored as u64);
    });
}

/// A held lock. Empty if there was no recorder when it was requested.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Hold(Option<Holding>);

#[derive(Clone, Copy, Debug)]
struct Holding {
    meters: &'static Meters,
    source: Source,
    since: Instant,
}

impl Hold {
    pub(super) fn downgraded(self, name: Option<&RequestName>) -> Self {
        Self(self.0.map(|_| Holding {
            meters: Meters::of(name, Mode::Shared),
            source: Source::Free,
            since: Instant::now(),
        }))
    }

    fn record(self, record: impl FnOnce(Holding, &dyn Recorder)) {
        if let Some(holding) = self.0 {
            recorded(|to| record(holding, to));
        }
    }

    pub(super) fn begun(self) {
        self.record(|Holding { meters, source, .. }, to| {
            meters.register(to);
            to.register_gauge(&meters.held, &METADATA).increment(1);
            match source {
                Source::Free => {}
                Source::Local => count(to, &meters.local, 1),
                Source::Queue => count(to, &meters.remote, 1),
                Source::Retained => count(to, &meters.retained, 1),
            }
        });
    }

    pub(super) fn ended(self, loss: Option<Loss>) {
        self.record(|Holding { meters, since, .. }, to| {
            to.register_gauge(&meters.held, &METADATA).decrement(1);
            observe(to, &meters.hold, since.elapsed().as_secs_f64());
        });
        loss.into_iter().for_each(|loss| self.lost(loss));
    }

    /// Counts a loss.
    pub(crate) fn lost(self, loss: Loss) {
        self.record(|Holding { meters, .. }, to| {
            let keys = LOSSES.iter().zip(&meters.losses);
            for (_, key) in keys.filter(|(known, _)| **known == loss) {
                count(to, key, 1);
            }
        });
    }

    /// Counts a renewal that the store has confirmed, or one without a usable reply.
    pub(crate) fn renewed(self, is_confirmed: bool) {
        self.record(|Holding { meters, .. }, to| {
            let failures = &meters.renewal_failures;
            let key = if is_confirmed {
                &meters.renewals
            } else {
                failures
            };
            count(to, key, 1);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_capped() {
        let of = |index: usize| {
            let name = RequestName::from(format!("name {index}"));
            Meters::of(Some(&name), Mode::Exclusive)
                .hold
                .labels()
                .next()
                .unwrap()
                .value()
                .to_owned()
        };
        for index in 0..MAX_NAMES {
            assert_eq!(of(index), format!("name {index}"));
        }
        assert_eq!(of(MAX_NAMES), "other");
        assert_eq!(of(0), "name 0");
        let unnamed = Meters::of(None, Mode::Shared);
        assert!(
            unnamed
                .hold
                .labels()
                .any(|label| label.value() == "unnamed")
        );
        assert!(unnamed.hold.labels().any(|label| label.value() == "shared"));
    }

    #[test]
    fn a_recorder_without_size_is_installed_if_it_is_in_a_box() {
        let mut is_recorded = false;
        recorded(|_| is_recorded = true);
        assert!(!is_recorded);
        let boxed: Box<dyn Recorder> = Box::new(metrics::NoopRecorder);
        assert!(is_installed(&*boxed));
    }

    /// An outcome without a series would not be counted.
    #[test]
    fn errors_of_requests_are_outcomes() {
        use LockErrorKind as Kind;
        for kind in [
            Kind::Contended,
            Kind::WaitTimeout,
            Kind::Overloaded,
            Kind::Done,
            Kind::WouldDeadlock,
            Kind::Lost(Loss::Expired),
            Kind::Lost(Loss::Taken),
            Kind::Lost(Loss::Revoked),
            Kind::Lost(Loss::MaxHold),
            Kind::Unavailable,
            Kind::Blocked,
            Kind::ModeMismatch,
            Kind::ForeignKey,
            Kind::InvalidKey,
            Kind::InvalidSpec,
            Kind::NoRuntime,
            Kind::ShuttingDown,
            Kind::Unauthenticated,
            Kind::Forbidden,
            Kind::WrongServer,
            Kind::ReadOnly,
            Kind::Full,
            Kind::IncompatibleFormat,
        ] {
            assert!(OUTCOMES.contains(&kind.code()), "{kind:?}");
        }
    }
}
