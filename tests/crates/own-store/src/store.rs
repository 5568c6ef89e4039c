//! The store.

use std::{
    collections::HashSet,
    future::{Future, ready},
    pin::Pin,
    sync::{Arc, Mutex, Weak},
    time::Duration,
};

use lock_runtime::{
    LockKey, LockKind, Mode,
    operator::Inspection,
    store::{
        AcquireAllReply, AcquireReply, ConvertReply, Hold, IfBusy, KeyPart, KeyRequest, Limits,
        Listener, MemoryStore, PollReply, Release, ReleaseReply, RenewReply, Renewal, RevokeReply,
        RevokeScope, Store, StoreError, Token,
    },
};

type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;
type Replied<'a, T> = BoxFuture<'a, Result<T, StoreError>>;

/// Fails a test that makes a request beyond the limits.
#[derive(Debug)]
pub(crate) struct OwnStore {
    inner: MemoryStore,
    limits: Limits,
    queues: bool,
    /// No request of these tokens has an effect any more: the store has no clock for deadlines.
    abandoned: Mutex<HashSet<Token>>,
}

impl OwnStore {
    pub(crate) fn new(limits: Limits, queues: bool) -> Arc<Self> {
        Arc::new(Self {
            inner: MemoryStore::new(),
            limits,
            queues,
            abandoned: Mutex::default(),
        })
    }

    fn check(&self, lease: Duration, mode: Mode) {
        let Limits {
            shortest_lease,
            longest_lease,
            ..
        } = self.limits;
        assert!(
            (shortest_lease..=longest_lease).contains(&lease),
            "a lease of {lease:?}"
        );
        assert!(!matches!(mode, Mode::Permits(_)), "{mode:?}");
    }

    /// The request as this store understands it.
    fn read(&self, request: &KeyRequest) -> KeyRequest {
        self.check(request.lease, request.hold.mode);
        let mut request = request.clone().reserved(0);
        request.deadline += Duration::from_secs(3600);
        if !self.queues {
            request.if_busy = IfBusy::Refuse;
        }
        request
    }
}

/// It does not know the remaining lease of a holder.
fn conceal(reply: AcquireReply) -> AcquireReply {
    match reply {
        AcquireReply::Busy { has_waiters, .. } => AcquireReply::Busy {
            holder_ttl: None,
            has_waiters,
        },
        AcquireReply::Queued { counter, .. } => AcquireReply::Queued {
            counter,
            holder_ttl: None,
        },
        reply => reply,
    }
}

impl Store for OwnStore {
    fn acquire<'a>(&'a self, request: &'a KeyRequest) -> Replied<'a, AcquireReply> {
        let asked = self.read(request);
        Box::pin(async move {
            if self.abandoned.lock().unwrap().contains(&asked.hold.token) {
                return Ok(AcquireReply::Busy {
                    holder_ttl: None,
                    has_waiters: false,
                });
            }
            Ok(conceal(self.inner.acquire(&asked).await?))
        })
    }

    fn acquire_all<'a>(&'a self, requests: &'a [KeyRequest]) -> Replied<'a, AcquireAllReply> {
        let most = self.limits.keys_at_once.map_or(usize::MAX, usize::from);
        assert!(requests.len() <= most, "{} keys", requests.len());
        let requests: Vec<_> = requests.iter().map(|request| self.read(request)).collect();
        Box::pin(async move { self.inner.acquire_all(&requests).await })
    }

    fn poll<'a>(&'a self, holds: &'a [Hold]) -> BoxFuture<'a, Vec<Result<PollReply, StoreError>>> {
        self.inner.poll(holds)
    }

    fn renew<'a>(
        &'a self,
        renewals: &'a [Renewal],
    ) -> BoxFuture<'a, Vec<Result<RenewReply, StoreError>>> {
        for Renewal { lease, .. } in renewals {
            assert!(*lease <= self.limits.longest_lease, "a lease of {lease:?}");
        }
        self.inner.renew(renewals)
    }

    fn release<'a>(&'a self, release: &'a Release) -> Replied<'a, ReleaseReply> {
        let mut release = release.clone();
        if let Some(next) = &mut release.next {
            self.check(next.lease, release.hold.mode);
            next.reserved = 0;
        }
        Box::pin(async move { self.inner.release(&release).await })
    }

    fn convert<'a>(&'a self, hold: &'a Hold) -> Replied<'a, ConvertReply> {
        self.inner.convert(hold)
    }

    fn abandon<'a>(&'a self, hold: &'a Hold) -> Replied<'a, ()> {
        self.abandoned.lock().unwrap().insert(hold.token);
        self.inner.abandon(hold)
    }

    fn inspect<'a>(&'a self, key: &'a LockKey, kind: LockKind) -> Replied<'a, Inspection> {
        assert_eq!(kind, LockKind::Lock);
        self.inner.inspect(key, kind)
    }

    fn revoke<'a>(
        &'a self,
        key: &'a LockKey,
        kind: LockKind,
        scope: RevokeScope,
    ) -> Replied<'a, RevokeReply> {
        assert_eq!(kind, LockKind::Lock);
        self.inner.revoke(key, kind, scope)
    }

    fn name_of(&self, _: &LockKey, _: LockKind, _: KeyPart) -> Option<String> {
        None
    }

    fn server_of(&self, _: &LockKey, _: LockKind) -> u64 {
        0
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    fn listen(&self, _: Weak<dyn Listener>) {}

    fn settled(&self) -> BoxFuture<'_, ()> {
        Box::pin(ready(()))
    }
}
