//! A task of a storm on PostgreSQL whose holds last as long as a transaction with
//! `lock_runtime.guard`, also after their leases.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use lock_runtime::{LockClient, LockGuard, fencing};
use lock_tests::{
    postgres,
    storm::{Ask, Event, KEYS, Kind, Nanos, Record, in_nanos, nanos},
};
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use tokio::time::sleep;
use tokio_postgres::Client;

use super::{
    LEASE,
    faults::Faults,
    processes::{GUARDED, Records},
};

const WAIT: Duration = Duration::from_millis(1500);
/// Upper bound of most transactions.
const SHORT: Duration = Duration::from_millis(5);
/// The lease of the holders that do not renew it, and of which many transactions outlast it.
const BRIEF: Duration = Duration::from_millis(150);

pub(super) struct Guarded {
    pub(super) locks: LockClient,
    pub(super) namespace: String,
    pub(super) url: String,
    pub(super) seed: u64,
    pub(super) records: Records,
    pub(super) faults: Arc<Faults>,
}

impl Guarded {
    /// Takes locks one after the other until the storm is over. Returns the number of transactions
    /// that were committed, and of them that of those after the end of the lease.
    pub(super) async fn work(self, over: Arc<AtomicBool>) -> (u64, u64) {
        let mut random = StdRng::seed_from_u64(self.seed);
        let (mut db, mut committed, mut outlasted) = (None, 0, 0);
        let mut request = 0;
        while !over.load(Ordering::Relaxed) {
            request += 1;
            let key = KEYS[random.random_range(0..KEYS.len())];
            let stay = match random.random_range(0..50) {
                0 => LEASE * 5 / 4,
                1..10 => BRIEF * 5 / 4,
                _ => SHORT.mul_f64(random.random()),
            };
            let renews = random.random_bool(0.5);
            let lease = if renews { LEASE } else { BRIEF };
            let asked = self.locks.exclusive(key).lease(lease).wait(WAIT);
            let asked = if renews { asked } else { asked.no_renew() };
            let ask = Ask {
                kind: Kind::Exclusive,
                keys: vec![key.to_owned()],
                wait: Some(in_nanos(WAIT)),
                lease: in_nanos(lease),
                min_hold: 0,
            };
            self.say(request, nanos(), Event::Asked(ask));
            let guard = match asked.acquire().await {
                Ok(guard) => guard,
                Err(error) => {
                    let code = error.code().to_owned();
                    self.say(request, nanos(), Event::Refused { code });
                    continue;
                }
            };
            let at = nanos();
            let (fences, validity) = (vec![guard.fence().number()], in_nanos(guard.validity()));
            self.say(request, at, Event::Granted { fences, validity });
            if db.as_ref().is_none_or(Client::is_closed) {
                db = postgres::try_connect(&self.url).await.ok();
            }
            let held_until = match &mut db {
                Some(db) => self.transaction(db, &guard, key, stay).await,
                None => None,
            };
            let outlasts = guard.validity().is_zero();
            if outlasts {
                // The store reports no end of a transaction, so that its waiters try again later.
                let name = "a transaction outlasts the lease".to_owned();
                self.faults.ended(name, nanos().min(at + validity), false);
            }
            if let Some(at) = held_until {
                (committed, outlasted) = (committed + 1, outlasted + u64::from(outlasts));
                self.say(request, at, Event::Held { validity: 0 });
            }
            self.say(request, held_until.unwrap_or(at), Event::Leaving);
            let released = guard.release().await;
            let code = released.map_or_else(|error| error.code(), |()| "released");
            let code = code.to_owned();
            self.say(request, nanos(), Event::Released { code });
            sleep(SHORT.mul_f64(random.random())).await;
        }
        (committed, outlasted)
    }

    /// Holds the lock for a transaction. Returns the time of its end if it was committed.
    async fn transaction(
        &self,
        db: &mut Client,
        guard: &LockGuard,
        key: &str,
        stay: Duration,
    ) -> Option<Nanos> {
        let name = format!("{}:{key}", self.namespace);
        let transaction = db.transaction().await.ok()?;
        let guarded = fencing::guard_named(&transaction, &name, guard.fence()).await;
        guarded.ok()?;
        sleep(stay).await;
        let at = nanos();
        transaction.commit().await.ok()?;
        Some(at)
    }

    fn say(&self, request: u64, at: Nanos, event: Event) {
        let record = Record { at, request, event };
        self.records.add(GUARDED, record);
    }
}
