//! Rules 2 and 4 for every request whose reply states how long a lock lasts: the holder counts from
//! the sending, and relies on the lock for no longer than its store keeps it. Rules 9 and 11 for
//! every way in which an extended lock ends: it is given up until its store has it no more.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use lock_runtime::{
    LockClient, LockErrorKind, LockGuard, LockKind, LockSpec,
    store::{MemoryStore, QuorumMember, QuorumStore, Store, StoreError, StoreErrorKind},
};
use lock_tests::{
    FaultyStore,
    faulty_store::{Call, Operation, Outcome},
    place::begun,
};
use tokio::time::sleep;

use super::HOUR;

const LEASE: Duration = Duration::from_secs(30);
/// Less than any request waits for its reply.
const DELAY: Duration = Duration::from_millis(150);

/// The margin of a lease for clocks that run at different speeds.
fn drift(lease: Duration) -> Duration {
    lease / 100 + Duration::from_millis(2)
}

/// Locks in this process whose operations pass through a hook: of one store, or of a majority.
fn behind<F: Future<Output = Outcome> + Send + 'static>(
    has_majority: bool,
    hook: impl Fn(Call) -> F + Clone + Send + Sync + 'static,
) -> (Arc<dyn Store>, Arc<dyn Store>) {
    let server = |number: usize| {
        let memory: Arc<dyn QuorumMember> = Arc::new(MemoryStore::new());
        let faulty: Arc<dyn QuorumMember> = FaultyStore::new(memory.clone(), hook.clone());
        let named = |store| (number.to_string(), store);
        (named(memory), named(faulty))
    };
    if !has_majority {
        let ((_, memory), (_, faulty)) = server(0);
        return (memory, faulty);
    }
    let (memories, faulty): (Vec<_>, Vec<_>) = (0..3).map(server).unzip();
    let majority =
        |servers| QuorumStore::new(servers, LockSpec::MAX_LEASE).expect("three are an odd number");
    (Arc::new(majority(memories)), Arc::new(majority(faulty)))
}

/// A store that executes each operation at once, and replies after [`DELAY`].
struct Slow {
    direct: Arc<dyn Store>,
    locks: LockClient,
    others: LockClient,
}

impl Slow {
    fn new(has_majority: bool) -> Self {
        let (direct, slow) = behind(has_majority, |call| async move {
            let outcome = call.execute().await;
            sleep(DELAY).await;
            outcome
        });
        Self {
            locks: LockClient::with_store(slow.clone()),
            others: LockClient::with_store(slow),
            direct,
        }
    }

    /// Checks that the holder relies on its lock for no longer than the store keeps it, less the
    /// margin. Returns for how long that is.
    async fn check(&self, how: &str, guard: &LockGuard) -> Duration {
        let mut left = LockSpec::MAX_LEASE;
        for (key, _) in guard.fences() {
            let seen = self.direct.inspect(key, LockKind::Lock).await.unwrap();
            let ends = seen.holders.iter().filter_map(|holder| holder.ttl);
            left = left.min(ends.min().expect("the lock is held"));
        }
        let (valid, most) = (guard.validity(), left.saturating_sub(drift(left)));
        assert!(valid <= most, "{how}: {valid:?} and not at most {most:?}");
        assert!(!valid.is_zero(), "{how}");
        left
    }
}

// Rules 2 and 4.
#[tokio::test(start_paused = true)]
async fn no_reply_makes_a_lock_valid_for_longer_than_its_store_keeps_it() {
    for has_majority in [false, true] {
        let slow = Slow::new(has_majority);
        let Slow { locks, others, .. } = &slow;
        let request = |key: &'static str| locks.exclusive(key).lease(LEASE);

        let guard = request("a").acquire().await.unwrap();
        slow.check("acquired", &guard).await;
        sleep(LEASE).await;
        let left = slow.check("renewed", &guard).await;
        assert!(left > LEASE / 2, "it was renewed: {left:?}");
        guard.verify().await.unwrap();
        slow.check("verified", &guard).await;
        guard.extend(LEASE * 2).await.unwrap();
        let left = slow.check("extended", &guard).await;
        assert!(left > LEASE, "it was extended: {left:?}");
        let guard = guard.downgrade().await.unwrap();
        slow.check("converted", &guard).await;
        sleep(LEASE).await;
        slow.check("renewed as a reader", &guard).await;
        guard.release().await.unwrap();

        let guard = request("a").no_wait().acquire().await.unwrap();
        slow.check("without waiting", &guard).await;
        // The time for local hand-offs is over, so its release requests the lock again.
        let waiting = tokio::spawn(begun(request("a").acquire()).await);
        sleep(DELAY * 2).await;
        guard.release().await.unwrap();
        let guard = waiting.await.unwrap().unwrap();
        slow.check("taken up again", &guard).await;
        // A local hand-off soon after the grant.
        let waiting = tokio::spawn(begun(request("a").acquire()).await);
        guard.release().await.unwrap();
        let guard = waiting.await.unwrap().unwrap();
        slow.check("handed off", &guard).await;
        guard.release().await.unwrap();

        for request in [locks.all(["b", "c"]).no_wait(), locks.all(["b", "c"])] {
            let guard = request.lease(LEASE).acquire().await.unwrap();
            slow.check("several", &guard).await;
            guard.release().await.unwrap();
        }

        for is_renewed in [true, false] {
            let held = others.exclusive("d").acquire().await.unwrap();
            let request = request("d").wait(LEASE * 2);
            let request = if is_renewed {
                request
            } else {
                request.no_renew()
            };
            let waiting = tokio::spawn(request.acquire());
            sleep(LEASE / 4).await;
            held.release().await.unwrap();
            let guard = waiting.await.unwrap().unwrap();
            slow.check("pushed", &guard).await;
            sleep(DELAY * 3).await;
            let left = slow.check("confirmed", &guard).await;
            assert!(left > LEASE / 2, "it was confirmed: {left:?}");
            guard.release().await.unwrap();
        }

        // A poll finds that the lease of the holder has ended.
        let held = others
            .exclusive("e")
            .lease(LEASE)
            .no_renew()
            .acquire()
            .await
            .unwrap();
        let waiting = tokio::spawn(request("e").wait(LEASE * 2).acquire());
        sleep(LEASE / 4).await;
        std::mem::forget(held);
        let guard = waiting.await.unwrap().unwrap();
        slow.check("after the end of a lease", &guard).await;
        guard.release().await.unwrap();
    }
}

/// The way in which an extended lock ends.
#[derive(Clone, Copy, Debug)]
enum End {
    Released,
    Dropped,
    /// It is lost, as `max_hold` has passed.
    MaxHold,
    /// It is lost, as the reply to the extension and those to all renewals are missing.
    Expired,
    /// The writer becomes a reader, which is released.
    Reader,
    /// The reader is lost, as `max_hold` has passed.
    ReaderMaxHold,
    /// The reply to the conversion is missing.
    Conversion,
}

// Rules 9 and 11.
#[tokio::test(start_paused = true)]
async fn an_extended_lock_is_given_up_until_its_store_has_it_no_more() {
    use End::*;
    for has_majority in [false, true] {
        for end in [
            Released,
            Dropped,
            MaxHold,
            Expired,
            Reader,
            ReaderMaxHold,
            Conversion,
        ] {
            gives_up(has_majority, end).await;
        }
    }
}

/// Extends a lock to an hour, and ends it while releases and abandonments fail for longer than its
/// lease. Soon after that, another client gets the lock.
async fn gives_up(has_majority: bool, end: End) {
    let is_failing = Arc::new(AtomicBool::new(false));
    let (fails, mute) = (is_failing.clone(), Arc::new(AtomicBool::new(false)));
    let is_mute = mute.clone();
    let (direct, store) = behind(has_majority, move |call| {
        let (fails, is_mute) = (
            fails.load(Ordering::Relaxed),
            is_mute.load(Ordering::Relaxed),
        );
        async move {
            let lost = || Err(StoreError::new(StoreErrorKind::Unavailable, "lost"));
            match call.operation {
                Operation::Release(_) | Operation::Abandon(_) if fails => lost(),
                Operation::Renew(_) | Operation::Convert(_) if is_mute => {
                    let _ = call.execute().await;
                    lost()
                }
                _ => call.execute().await,
            }
        }
    });
    let locks = LockClient::with_store(store);
    let request = locks.exclusive("k").lease(LEASE);
    let request = match end {
        End::MaxHold | End::ReaderMaxHold => request.max_hold(LEASE / 3),
        _ => request,
    };
    let guard = request.acquire().await.unwrap();
    is_failing.store(true, Ordering::Relaxed);
    mute.store(matches!(end, End::Expired), Ordering::Relaxed);
    assert_eq!(
        guard.extend(HOUR).await.is_err(),
        matches!(end, End::Expired)
    );
    match end {
        End::Released => drop(guard.release().await.unwrap_err()),
        End::Dropped => drop(guard),
        End::MaxHold | End::Expired => drop(guard.lost().await),
        End::Reader => drop(guard.downgrade().await.unwrap()),
        End::ReaderMaxHold => drop(guard.downgrade().await.unwrap().lost().await),
        End::Conversion => {
            mute.store(true, Ordering::Relaxed);
            drop(guard.downgrade().await.unwrap_err());
        }
    }
    sleep(LEASE * 2).await;
    let others = LockClient::with_store(direct);
    let error = others
        .exclusive("k")
        .no_wait()
        .acquire()
        .await
        .map(drop)
        .unwrap_err();
    let case = format!("{end:?}, majority: {has_majority}");
    assert_eq!(error.kind(), LockErrorKind::Contended, "{case}");
    is_failing.store(false, Ordering::Relaxed);
    let next = others.exclusive("k").wait(LEASE).acquire().await;
    next.expect(&case).release().await.unwrap();
}
