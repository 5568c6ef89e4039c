//! A store that writes down in which order it is asked what, and mistreats what it is told to. Behind it lies another one.

use std::{
    collections::VecDeque,
    future::{Future, pending},
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Duration,
};

use lock_runtime::{
    LockKey, LockKind, RevokeScope,
    store::{
        AcquireAllReply, AcquireReply, ConvertReply, Grant, Hold, Inspection, KeyPart, KeyRequest,
        Limits, Listener, PollReply, Release, ReleaseReply, RenewReply, Renewal, Store, StoreError,
        StoreErrorKind, Token,
    },
};
use tokio::{
    sync::{Notify, watch},
    time::{Instant, sleep},
};

type Reply<'a, T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send + 'a>>;

/// What was asked, when it was asked.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Asked {
    Acquire {
        token: Token,
        sent: Instant,
        deadline: Instant,
    },
    Renew(Token),
    Release(Token),
    Abandon(Token),
}

/// What becomes of a request to acquire; without one it is answered at once.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fate {
    /// Executed, and answered so much later.
    AnsweredAfter(Duration),
    /// Executed, and answered as a grant for no longer than this.
    GrantedFor(Duration),
    /// Executed, and never answered.
    Unanswered,
    /// On its way until the token was abandoned, executed then, and never answered.
    OvertakenByItsAbandon,
}

#[derive(Debug)]
pub(crate) struct Watched {
    behind: Arc<dyn Store>,
    asked: Mutex<Vec<Asked>>,
    news: Notify,
    fates: Mutex<VecDeque<Fate>>,
    stragglers: Mutex<Vec<KeyRequest>>,
    /// So many calls of `abandon` still fail.
    deaf_to_abandons: Mutex<u32>,
    slow_renewals: Mutex<Duration>,
    /// No release is executed.
    stopped_releases: watch::Sender<bool>,
}

impl Watched {
    pub(crate) fn new(behind: Arc<dyn Store>) -> Arc<Self> {
        Arc::new(Self {
            behind,
            asked: Mutex::default(),
            news: Notify::new(),
            fates: Mutex::default(),
            stragglers: Mutex::default(),
            deaf_to_abandons: Mutex::default(),
            slow_renewals: Mutex::default(),
            stopped_releases: watch::Sender::default(),
        })
    }

    /// The next request to acquire meets `fate`; called several times, the next ones in that order.
    pub(crate) fn next_acquire(&self, fate: Fate) {
        lock(&self.fates).push_back(fate);
    }

    /// The next `times` calls of `abandon` fail and do nothing.
    pub(crate) fn lose_abandons(&self, times: u32) {
        *lock(&self.deaf_to_abandons) = times;
    }

    /// Renewals are executed and answered so much later.
    pub(crate) fn slow_renewals(&self, by: Duration) {
        *lock(&self.slow_renewals) = by;
    }

    /// No release is executed, or those that wait for it and all that follow.
    pub(crate) fn stop_releases(&self, stopped: bool) {
        self.stopped_releases.send_replace(stopped);
    }

    /// Everything asked so far.
    pub(crate) fn asked(&self) -> Vec<Asked> {
        lock(&self.asked).clone()
    }

    /// The requests to acquire so far: their tokens.
    pub(crate) fn tokens(&self) -> Vec<Token> {
        let token = |asked: &Asked| {
            if let Asked::Acquire { token, .. } = asked {
                Some(*token)
            } else {
                None
            }
        };
        self.asked().iter().filter_map(token).collect()
    }

    /// Waits until `wanted` says yes to everything asked so far.
    pub(crate) async fn wait_for(&self, wanted: impl Fn(&[Asked]) -> bool) {
        loop {
            let news = self.news.notified();
            if wanted(&lock(&self.asked)) {
                return;
            }
            news.await;
        }
    }

    fn note(&self, asked: Asked) {
        lock(&self.asked).push(asked);
        self.news.notify_waiters();
    }

    async fn abandon_there(&self, hold: &Hold) -> Result<(), StoreError> {
        let lost = {
            let mut left = lock(&self.deaf_to_abandons);
            let lost = *left > 0;
            *left = left.saturating_sub(1);
            lost
        };
        self.note(Asked::Abandon(hold.token));
        if lost {
            return Err(StoreError::new(StoreErrorKind::Unavailable, "lost"));
        }
        self.behind.abandon(hold).await?;
        let straggler = {
            let mut stragglers = lock(&self.stragglers);
            let place = stragglers.iter().position(|request| request.hold == *hold);
            place.map(|place| stragglers.remove(place))
        };
        if let Some(request) = straggler {
            let reply = self.behind.acquire(&request).await?;
            assert!(
                matches!(reply, AcquireReply::Granted(_)),
                "it holds for nobody now: {reply:?}"
            );
        }
        Ok(())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Store for Watched {
    fn acquire<'a>(&'a self, request: &'a KeyRequest) -> Reply<'a, AcquireReply> {
        Box::pin(async move {
            let (token, deadline) = (request.hold.token, request.deadline);
            self.note(Asked::Acquire {
                token,
                sent: Instant::now(),
                deadline,
            });
            let fate = lock(&self.fates).pop_front();
            match fate {
                None => self.behind.acquire(request).await,
                Some(Fate::AnsweredAfter(time)) => {
                    let reply = self.behind.acquire(request).await;
                    sleep(time).await;
                    reply
                }
                Some(Fate::GrantedFor(ttl)) => Ok(match self.behind.acquire(request).await? {
                    AcquireReply::Granted(grant) => {
                        AcquireReply::Granted(Grant::new(grant.fence, ttl))
                    }
                    reply => reply,
                }),
                Some(Fate::Unanswered) => {
                    self.behind.acquire(request).await?;
                    pending().await
                }
                Some(Fate::OvertakenByItsAbandon) => {
                    lock(&self.stragglers).push(request.clone());
                    pending().await
                }
            }
        })
    }

    fn acquire_all<'a>(&'a self, requests: &'a [KeyRequest]) -> Reply<'a, AcquireAllReply> {
        Box::pin(async move {
            for KeyRequest { hold, deadline, .. } in requests {
                self.note(Asked::Acquire {
                    token: hold.token,
                    sent: Instant::now(),
                    deadline: *deadline,
                });
            }
            let fate = lock(&self.fates).pop_front();
            let reply = self.behind.acquire_all(requests).await;
            if fate.is_some() {
                pending().await
            } else {
                reply
            }
        })
    }

    fn poll<'a>(
        &'a self,
        holds: &'a [Hold],
    ) -> futures_util::future::BoxFuture<'a, Vec<Result<PollReply, StoreError>>> {
        self.behind.poll(holds)
    }

    fn renew<'a>(
        &'a self,
        renewals: &'a [Renewal],
    ) -> futures_util::future::BoxFuture<'a, Vec<Result<RenewReply, StoreError>>> {
        Box::pin(async move {
            renewals
                .iter()
                .for_each(|renewal| self.note(Asked::Renew(renewal.hold.token)));
            let replies = self.behind.renew(renewals).await;
            let time = *lock(&self.slow_renewals);
            if !time.is_zero() {
                sleep(time).await;
            }
            replies
        })
    }

    fn release<'a>(&'a self, release: &'a Release) -> Reply<'a, ReleaseReply> {
        Box::pin(async move {
            self.note(Asked::Release(release.hold.token));
            // The sender is here: it cannot be gone.
            let _ = self
                .stopped_releases
                .subscribe()
                .wait_for(|stopped| !stopped)
                .await;
            self.behind.release(release).await
        })
    }

    fn convert<'a>(&'a self, hold: &'a Hold) -> Reply<'a, ConvertReply> {
        self.behind.convert(hold)
    }

    fn abandon<'a>(&'a self, hold: &'a Hold) -> Reply<'a, ()> {
        Box::pin(self.abandon_there(hold))
    }

    fn inspect<'a>(&'a self, key: &'a LockKey, kind: LockKind) -> Reply<'a, Inspection> {
        self.behind.inspect(key, kind)
    }

    fn revoke<'a>(
        &'a self,
        key: &'a LockKey,
        kind: LockKind,
        scope: RevokeScope,
    ) -> Reply<'a, lock_runtime::RevokeReply> {
        self.behind.revoke(key, kind, scope)
    }

    fn listen(&self, listener: Weak<dyn Listener>) {
        self.behind.listen(listener);
    }

    fn name_of(&self, key: &LockKey, kind: LockKind, part: KeyPart) -> Option<String> {
        self.behind.name_of(key, kind, part)
    }

    fn server_of(&self, key: &LockKey, kind: LockKind) -> u64 {
        self.behind.server_of(key, kind)
    }

    fn limits(&self) -> Limits {
        self.behind.limits()
    }

    fn settled(&self) -> futures_util::future::BoxFuture<'_, ()> {
        self.behind.settled()
    }
}
