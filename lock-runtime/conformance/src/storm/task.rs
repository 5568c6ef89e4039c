//! One task of a storm.

use std::{
    num::NonZeroU32,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use futures_util::FutureExt as _;
use lock_runtime::{
    LockClient, LockError, LockErrorKind, LockGuard, LockRequest,
    time::{Instant, sleep_until},
};
use rand::{RngExt as _, rngs::StdRng};
use tokio::time::{sleep, timeout};

use super::{Ask, Clock, Event, KEYS, Kind, Log, PERMITS, Plan, Record, in_nanos};

/// Upper bound of most stays.
const SHORT_STAY: Duration = Duration::from_millis(2);
/// Upper bound of some stays, so that a holder is inside when a fault begins.
const LONG_STAY: Duration = Duration::from_millis(150);
/// Upper bound of the times for which locks are retained.
const LONGEST_RETENTION: Duration = Duration::from_millis(100);
/// Upper bound of most waits.
const SHORT_WAIT: Duration = Duration::from_millis(1500);
/// Wait of some requests, longer than any fault.
const LONG_WAIT: Duration = Duration::from_secs(10);
/// Period in which all tasks read the same lock.
const CROWDED: Duration = Duration::from_millis(300);
/// Interval between checks of a guard.
const LOOK: Duration = Duration::from_millis(10);
/// A guard whose validity has grown by less was not renewed.
const NEWS: Duration = Duration::from_millis(1);

pub(super) struct Task {
    locks: LockClient,
    plan: Plan,
    random: StdRng,
    log: Log,
    requests: Arc<AtomicU64>,
}

/// A request, and how its guard is used.
struct Wanted {
    request: LockRequest,
    ask: Ask,
    reentrant: bool,
    /// The lease to which the hold is extended.
    extension: Option<Duration>,
}

impl Task {
    pub(super) fn new(
        locks: LockClient,
        plan: Plan,
        random: StdRng,
        log: Log,
        requests: Arc<AtomicU64>,
    ) -> Self {
        Self {
            locks,
            plan,
            random,
            log,
            requests,
        }
    }

    pub(super) async fn work(mut self, over: Arc<AtomicBool>) {
        while !over.load(Ordering::Relaxed) {
            self.turn().await;
            sleep(self.up_to(SHORT_STAY * 2)).await;
        }
    }

    async fn turn(&mut self) {
        if self.random.random_bool(0.004) {
            self.revoke().await;
        }
        let wanted = self.choose();
        let (reentrant, extension) = (wanted.reentrant, wanted.extension);
        let (key, kind) = (wanted.ask.keys[0].clone(), wanted.ask.kind);
        let Some((id, guard)) = self.acquire(wanted).await else {
            return;
        };
        let stay = self.stay();
        if reentrant {
            return self.enter_again(id, guard, &key, stay).await;
        }
        if let Some(lease) = extension {
            self.extend(id, &guard, lease).await;
        }
        self.hold(id, &guard, stay).await;
        if kind == Kind::Exclusive && guard.fences().count() == 1 && self.random.random_bool(0.15) {
            return self.downgrade(id, guard, key).await;
        }
        self.give_back(id, guard).await;
    }

    fn choose(&mut self) -> Wanted {
        let crowd = is_crowded(self.plan.clock);
        let key = if crowd {
            KEYS[0]
        } else {
            KEYS[self.random.random_range(0..KEYS.len())]
        };
        let name = |key: &str| format!("{}{key}", self.plan.prefix);
        let key = &name(key);
        let mut keys = vec![key.clone()];
        let permits = NonZeroU32::new(PERMITS).expect("a number of permits is not zero");
        let (mut kind, mut reentrant) = (Kind::Exclusive, false);
        let request = match self.random.random_range(0..100) {
            _ if crowd => {
                kind = Kind::Shared;
                self.locks.shared(key)
            }
            0..40 => self.locks.exclusive(key),
            40..50 => {
                reentrant = true;
                self.locks.reentrant(key)
            }
            50..75 => {
                kind = Kind::Shared;
                self.locks.shared(key)
            }
            75..90 if self.plan.permits => {
                kind = Kind::Permit;
                self.locks.permits(key, permits)
            }
            75..90 => self.locks.exclusive(key),
            _ if self.plan.several_at_once => {
                keys = KEYS[1..].iter().map(|key| name(key)).collect();
                self.locks.all(&keys)
            }
            _ => self.locks.exclusive(key),
        };
        let renews = !self.random.random_bool(0.07);
        let mut lease = if renews {
            self.plan.lease
        } else {
            self.plan.brief_lease
        };
        let is_extended = renews && !reentrant && self.random.random_bool(0.1);
        // The store keeps no lock for longer than the lease of the plan.
        let extension = is_extended.then_some(lease);
        if is_extended {
            lease = lease * 2 / 3;
        }
        let mut request = request.lease(lease);
        let wait = match self.random.random_range(0..100) {
            0..12 => None,
            12..27 => Some(LONG_WAIT),
            _ => Some(self.up_to(SHORT_WAIT)),
        };
        request = match wait {
            Some(wait) => request.wait(wait),
            None => request.no_wait(),
        };
        let mut min_hold = Duration::ZERO;
        if self.random.random_bool(0.1) {
            min_hold = self.up_to(LONG_STAY / 3);
            request = request.min_hold(min_hold);
        }
        if !is_extended && self.random.random_bool(0.07) {
            request = request.max_hold(min_hold + Duration::from_millis(1) + self.up_to(LONG_STAY));
        }
        if !renews {
            request = request.no_renew();
        }
        if self.random.random_bool(0.15) {
            request = request.strict_order();
        }
        if self.plan.retains && self.random.random_bool(0.4) {
            request = request.retain(self.up_to(LONGEST_RETENTION));
        }
        let (wait, lease, min_hold) = (wait.map(in_nanos), in_nanos(lease), in_nanos(min_hold));
        Wanted {
            request,
            ask: Ask {
                kind,
                keys,
                wait,
                lease,
                min_hold,
            },
            reentrant,
            extension,
        }
    }

    /// Revokes the holders of a lock.
    async fn revoke(&mut self) {
        let name = KEYS[self.random.random_range(0..KEYS.len())];
        let key = format!("{}{name}", self.plan.prefix);
        let permits = self.plan.permits && self.random.random_bool(0.3);
        let id = self.requests.fetch_add(1, Ordering::Relaxed) + 1;
        let revoking = Event::Revoking {
            key: key.clone(),
            permits,
        };
        self.say(id, revoking);
        let revoked = if permits {
            self.locks.revoke(&key).permits().await
        } else {
            self.locks.revoke(&key).await
        };
        match revoked {
            Ok(_) => self.say(id, Event::Revoked),
            Err(error) => drop(code(&error)),
        }
    }

    /// Extends the lease, and records how long it is valid then.
    async fn extend(&self, id: u64, guard: &LockGuard, lease: Duration) {
        let began = (self.plan.clock)();
        if let Err(error) = guard.extend(lease).await {
            code(&error);
            return;
        }
        let validity = validity(guard);
        let at = (self.plan.clock)();
        (self.log)(Record {
            at,
            request: id,
            event: Event::Extended {
                asked: in_nanos(lease),
                took: at - began,
                validity,
            },
        });
    }

    /// Returns the guard and the number of its request. Some requests are dropped before the
    /// return, perhaps after the grant.
    async fn acquire(&mut self, wanted: Wanted) -> Option<(u64, LockGuard)> {
        let patience = self
            .random
            .random_bool(0.1)
            .then(|| self.up_to(LONG_STAY / 3));
        let id = self.ask(wanted.ask);
        let acquire = wanted.request.acquire();
        let result = match patience {
            Some(patience) => timeout(patience, acquire).await.ok(),
            None => Some(acquire.await),
        };
        self.answered(id, result)
    }

    fn ask(&self, ask: Ask) -> u64 {
        let id = self.requests.fetch_add(1, Ordering::Relaxed) + 1;
        self.say(id, Event::Asked(ask));
        id
    }

    /// Records the result of a request; `None` for one that was dropped.
    fn answered(
        &self,
        id: u64,
        result: Option<Result<LockGuard, LockError>>,
    ) -> Option<(u64, LockGuard)> {
        let code = match result {
            Some(Ok(guard)) => {
                let at = (self.plan.clock)();
                let validity = validity(&guard);
                let fences = guard.fences().map(|(_, fence)| fence.number()).collect();
                (self.log)(Record {
                    at,
                    request: id,
                    event: Event::Granted { fences, validity },
                });
                return Some((id, guard));
            }
            Some(Err(error)) => code(&error),
            None => Event::DROPPED.to_owned(),
        };
        self.say(id, Event::Refused { code });
        None
    }

    /// Keeps the guard for `stay`, and records each renewal and its loss.
    async fn hold(&self, id: u64, guard: &LockGuard, stay: Duration) {
        let until = Instant::now() + stay;
        let (mut valid_at, mut known) = ((self.plan.clock)(), 0);
        loop {
            // The time before the validity: a pause in between makes the recorded end earlier,
            // never later.
            let at = (self.plan.clock)();
            let validity = validity(guard);
            if validity == 0 {
                let code = guard
                    .lost()
                    .now_or_never()
                    .map_or("no_validity".to_owned(), |error| code(&error));
                return self.say(id, Event::Lost { code, valid_at });
            }
            valid_at = at;
            if at + validity > known + in_nanos(NEWS) {
                known = at + validity;
                (self.log)(Record {
                    at,
                    request: id,
                    event: Event::Held { validity },
                });
            }
            let now = Instant::now();
            if now >= until {
                return;
            }
            sleep_until(until.min(now + LOOK)).await;
        }
    }

    /// Releases or drops the guard.
    async fn give_back(&mut self, id: u64, guard: LockGuard) {
        let dropped = self.random.random_bool(0.2);
        self.say(id, Event::Leaving);
        if dropped {
            return drop(guard);
        }
        let code = guard
            .release()
            .await
            .map_or_else(|error| code(&error), |()| "released".to_owned());
        self.say(id, Event::Released { code });
    }

    /// Enters the lock again. The lock ends with the last of two guards, in either order.
    async fn enter_again(&mut self, id: u64, outer: LockGuard, key: &str, stay: Duration) {
        let request = self.locks.reentrant(key).lease(self.plan.lease).no_wait();
        let last = match outer.scope(request.acquire()).await {
            Ok(inner) => {
                self.say(
                    id,
                    Event::Entered {
                        fence: inner.fence().number(),
                    },
                );
                let (first, last) = if self.random.random_bool(0.5) {
                    (inner, outer)
                } else {
                    (outer, inner)
                };
                self.hold(id, &first, stay / 2).await;
                if let Err(error) = first.release().await {
                    code(&error);
                }
                last
            }
            Err(error) => {
                assert!(
                    matches!(error.kind(), LockErrorKind::Lost(_)),
                    "a held lock can be entered: {error:?}"
                );
                outer
            }
        };
        self.hold(id, &last, stay / 2).await;
        self.give_back(id, last).await;
    }

    async fn downgrade(&mut self, id: u64, guard: LockGuard, key: String) {
        self.say(id, Event::Leaving);
        let lease = in_nanos(self.plan.lease);
        let ask = Ask {
            kind: Kind::Downgraded,
            keys: vec![key],
            wait: None,
            lease,
            min_hold: 0,
        };
        let reader = self.ask(ask);
        let downgraded = guard.downgrade().await;
        let Some((reader, guard)) = self.answered(reader, Some(downgraded)) else {
            return;
        };
        let stay = self.stay();
        self.hold(reader, &guard, stay).await;
        self.give_back(reader, guard).await;
    }

    fn say(&self, request: u64, event: Event) {
        (self.log)(Record {
            at: (self.plan.clock)(),
            request,
            event,
        });
    }

    fn up_to(&mut self, longest: Duration) -> Duration {
        longest.mul_f64(self.random.random())
    }

    fn stay(&mut self) -> Duration {
        match self.random.random_range(0..1000) {
            // Long enough for some renewals.
            0 => self.plan.lease * 5 / 4,
            // Longer than a lease without renewal.
            1..8 => self.plan.brief_lease * 5 / 4,
            8..20 => self.up_to(LONG_STAY),
            20..500 => Duration::ZERO,
            _ => self.up_to(SHORT_STAY),
        }
    }
}

/// Whether all tasks of all processes now read the same lock.
fn is_crowded(clock: Clock) -> bool {
    let period = in_nanos(CROWDED);
    (clock() / period).is_multiple_of(5)
}

fn validity(guard: &LockGuard) -> u64 {
    in_nanos(guard.validity())
}

/// Returns the code of an error, which a failing store or another holder must explain.
fn code(error: &LockError) -> String {
    use LockErrorKind::{
        Blocked, Contended, Full, Lost, ReadOnly, ReleaseUnknown, Unavailable, WaitTimeout,
    };
    let expected = match error.kind() {
        Contended | WaitTimeout | Unavailable | ReleaseUnknown | ReadOnly | Full | Lost(_) => true,
        // A process that is stopped within a transaction has a record locked for up to a second.
        Blocked => true,
        _ => false,
    };
    assert!(expected, "no failing store explains this: {error:?}");
    error.code().to_owned()
}
