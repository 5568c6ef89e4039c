//! The store under test.

use std::{
    fmt,
    future::Future,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::{sleep, timeout};

use lock_runtime::{
    LockClient, LockKey, LockKind, LockSpec, Mode,
    operator::Inspection,
    store::{
        AcquireReply, Grant, Hold, KeyRequest, Limits, PollReply, Release, ReleaseReply,
        RenewReply, Renewal, Store, StoreError, Token,
    },
    time::Instant,
};

/// Longer than any operation that does not hang, also on a busy machine.
pub(crate) const LONG: Duration = Duration::from_secs(30);
/// The precision to which a store may know the time. It may keep a lock for longer by as much.
pub(crate) const IMPRECISE: Duration = Duration::from_millis(500);
/// The pause between two checks of a condition that is not an event.
const LOOK: Duration = Duration::from_millis(10);

/// Fails a test because the store breaks a promise.
#[track_caller]
pub(crate) fn broken(promise: &str, details: fmt::Arguments<'_>) -> ! {
    panic!("the store breaks a promise: {promise}\n{details}")
}

/// Fails a test unless the store keeps a promise.
macro_rules! promise {
    ($promise:expr, $holds:expr, $($details:tt)+) => {
        if !$holds {
            $crate::subject::broken($promise, format_args!($($details)+))
        }
    };
}
pub(crate) use promise;

/// Locks a mutex, also after a test has failed.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Prints the reason for which a check is left out.
pub(crate) fn skipped(check: &str, reason: &str) {
    println!("not checked: {check}: {reason}");
}

/// Fails a test that hangs.
pub(crate) async fn in_time<T>(future: impl Future<Output = T>) -> T {
    timeout(4 * LONG, future).await.expect("the test hangs")
}

/// The only reply of a batch.
pub(crate) fn one<T>(replies: Vec<Result<T, StoreError>>) -> Result<T, StoreError> {
    let [reply] = <[_; 1]>::try_from(replies)
        .unwrap_or_else(|replies| panic!("{} replies instead of one", replies.len()));
    reply
}

/// A connection to the store under test. A call that fails ends the test.
pub(crate) struct Subject {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) limits: Limits,
}

impl Subject {
    pub(crate) async fn of(make: &impl AsyncFn() -> Arc<dyn Store>) -> Self {
        Self::over(make().await)
    }

    pub(crate) fn over(store: Arc<dyn Store>) -> Self {
        let limits = store.limits();
        Self { store, limits }
    }

    /// A client with a default lease that the store supports.
    pub(crate) fn client(&self) -> LockClient {
        let builder = LockClient::builder().defaults(LockSpec::exclusive().lease(self.lease()));
        let client = builder.build_with_store(self.store.clone());
        client.expect("a client of a store that supports the lease")
    }

    /// The default lease, or the nearest that the store supports.
    pub(crate) fn lease(&self) -> Duration {
        self.at_least(LockSpec::DEFAULT_LEASE)
            .min(self.limits.longest_lease)
    }

    /// `lease`, or the shortest lease of the store.
    pub(crate) fn at_least(&self, lease: Duration) -> Duration {
        lease.max(self.limits.shortest_lease)
    }

    /// The modes that the store supports.
    pub(crate) fn modes(&self) -> Vec<Mode> {
        let mut modes = vec![Mode::Exclusive, Mode::Shared];
        if self.limits.permits {
            modes.push(TWO_PERMITS);
        } else {
            skipped("permits", "limits().permits is false");
        }
        modes
    }

    pub(crate) async fn reply_to(&self, request: &KeyRequest) -> AcquireReply {
        self.store.acquire(request).await.expect("an acquire")
    }

    pub(crate) async fn acquire(&self, hold: &Hold, lease: Duration) -> AcquireReply {
        self.reply_to(&request(hold, lease)).await
    }

    /// Acquires a lock that is free.
    pub(crate) async fn granted(&self, hold: &Hold, lease: Duration) -> Grant {
        match self.acquire(hold, lease).await {
            AcquireReply::Granted(grant) => grant,
            reply => panic!("{hold:?} is free, and was answered {reply:?}"),
        }
    }

    /// Acquires a fresh lock for [`lease`](Self::lease).
    pub(crate) async fn held(&self, mode: Mode) -> Hold {
        let hold = fresh_hold(mode);
        self.granted(&hold, self.lease()).await;
        hold
    }

    pub(crate) async fn queue_for(&self, hold: &Hold, lease: Duration) -> AcquireReply {
        self.reply_to(&request(hold, lease).queued()).await
    }

    /// Another acquisition of the same lock, in the queue.
    pub(crate) async fn waiter(&self, key: &LockKey, mode: Mode) -> Hold {
        let hold = beside(key, mode);
        let reply = self.queue_for(&hold, self.lease()).await;
        assert!(matches!(reply, AcquireReply::Queued { .. }), "{reply:?}");
        hold
    }

    /// Further acquisitions of the same lock, in the queue in this order.
    pub(crate) async fn waiters<const N: usize>(&self, key: &LockKey, mode: Mode) -> [Hold; N] {
        let holds = [(); N].map(|()| beside(key, mode));
        for hold in &holds {
            let reply = self.queue_for(hold, self.lease()).await;
            assert!(matches!(reply, AcquireReply::Queued { .. }), "{reply:?}");
        }
        holds
    }

    pub(crate) async fn poll(&self, hold: &Hold) -> PollReply {
        one(self.store.poll(std::slice::from_ref(hold)).await).expect("a poll")
    }

    pub(crate) async fn is_queued(&self, hold: &Hold) -> bool {
        matches!(self.poll(hold).await, PollReply::Queued { .. })
    }

    /// Polls a waiter that should have its lock.
    pub(crate) async fn polled(&self, promise: &str, hold: &Hold) -> Grant {
        match self.poll(hold).await {
            PollReply::Granted(grant) => grant,
            reply => broken(promise, format_args!("{hold:?} polls and gets {reply:?}")),
        }
    }

    pub(crate) async fn renew(&self, hold: &Hold, lease: Duration) -> RenewReply {
        let renewals = [Renewal::new(hold.clone(), lease)];
        one(self.store.renew(&renewals).await).expect("a renewal")
    }

    pub(crate) async fn release(&self, hold: &Hold) -> ReleaseReply {
        self.release_as(Release::new(hold.clone())).await
    }

    pub(crate) async fn release_as(&self, release: Release) -> ReleaseReply {
        self.store.release(&release).await.expect("a release")
    }

    pub(crate) async fn abandon(&self, hold: &Hold) {
        self.store.abandon(hold).await.expect("an abandonment");
    }

    pub(crate) async fn inspect(&self, hold: &Hold) -> Inspection {
        self.inspect_key(&hold.key, hold.mode.kind()).await
    }

    pub(crate) async fn inspect_key(&self, key: &LockKey, kind: LockKind) -> Inspection {
        let inspection = self.store.inspect(key, kind).await;
        inspection.expect("an inspection")
    }

    pub(crate) async fn waiting(&self, hold: &Hold) -> Vec<Mode> {
        let waiters = self.inspect(hold).await.waiters;
        waiters.iter().map(|waiter| waiter.mode).collect()
    }

    /// Fails unless a lock has neither a holder nor a waiter.
    pub(crate) async fn assert_unused(&self, promise: &str, hold: &Hold) {
        let found = self.inspect(hold).await;
        let unused = found.holders.is_empty() && found.waiters.is_empty();
        promise!(promise, unused, "{} is left: {found:?}", hold.key);
    }

    /// Waits until the leases of all holders but `left` have ended.
    pub(crate) async fn ended(&self, promise: &str, hold: &Hold, left: usize) {
        eventually(promise, async || {
            self.inspect(hold).await.holders.len() == left
        })
        .await;
    }

    /// Returns whether the store keeps wait queues.
    pub(crate) async fn queues(&self) -> bool {
        let holder = self.held(Mode::Exclusive).await;
        let waiter = beside(&holder.key, Mode::Exclusive);
        let reply = self.queue_for(&waiter, self.lease()).await;
        for hold in [&waiter, &holder] {
            self.abandon(hold).await;
        }
        match reply {
            AcquireReply::Queued { .. } => true,
            AcquireReply::Busy { .. } => {
                skipped("wait queues", "the store replies Busy instead of Queued");
                false
            }
            reply => panic!("a request for a lock that is held was answered {reply:?}"),
        }
    }
}

/// Two permits.
pub(crate) const TWO_PERMITS: Mode = Mode::Permits(std::num::NonZeroU32::new(2).expect("two"));

/// A name that no other test has, and no other run of this one.
pub(crate) fn unique() -> String {
    format!("conformance:{:016x}", rand::random::<u64>())
}

pub(crate) fn fresh_key() -> LockKey {
    LockKey::new(unique()).expect("a short name")
}

/// An acquisition of a lock that no other test uses.
pub(crate) fn fresh_hold(mode: Mode) -> Hold {
    beside(&fresh_key(), mode)
}

/// Another acquisition of the same lock.
pub(crate) fn beside(key: &LockKey, mode: Mode) -> Hold {
    Hold::new(key.clone(), mode, Token::random())
}

/// A mode that waits for holders in `mode`.
pub(crate) fn conflicting(mode: Mode) -> Mode {
    match mode {
        Mode::Shared => Mode::Exclusive,
        mode => mode,
    }
}

/// A request with a deadline that does not matter.
pub(crate) fn request(hold: &Hold, lease: Duration) -> KeyRequest {
    KeyRequest::new(hold.clone(), lease, Instant::now() + 2 * LONG)
}

/// Checks a condition until it holds; for changes without a notification.
pub(crate) async fn eventually(promise: &str, mut holds: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + LONG;
    while !holds().await {
        promise!(promise, Instant::now() < deadline, "not within {LONG:?}");
        sleep(LOOK).await;
    }
}
