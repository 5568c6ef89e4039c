//! A store whose events a test intercepts.

use std::{
    any::Any,
    fmt,
    sync::{Arc, Weak},
    time::Duration,
};

use futures_util::future::BoxFuture;
use lock_runtime::{
    LockKey, LockKind,
    health::Health,
    operator::{ClientId, Holder, HolderId, Inspection},
    store::{
        AcquireAllReply, AcquireReply, ConvertReply, Cursor, Done, Hold, KeyPart, KeyRequest,
        Limits, Listener, Page, PollReply, Release, ReleaseReply, RenewReply, Renewal, Replied,
        Replies, RevokeReply, RevokeScope, Store, StoreError, StoreErrorKind, StoreEvent,
    },
};

use crate::subject::lock;

/// Passes an event on to a listener, or does not.
pub(super) type Pass = Arc<dyn Fn(&StoreEvent, &Arc<dyn Listener>) + Send + Sync>;

/// The fate of a release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    Answered,
    /// The store does not execute it, and the caller gets no reply.
    Unsent,
    /// The store executes it, and the caller gets no reply.
    Unanswered,
}

/// Decides the fate of a release.
pub(super) type Decide = Arc<dyn Fn(&Release) -> Fate + Send + Sync>;

/// A store that leaves the delivery of its events, and the fate of releases, to functions.
pub(super) struct Intercepted {
    inner: Arc<dyn Store>,
    pass: Pass,
    decide: Decide,
    /// The listeners of `inner`, which keeps weak references only.
    interceptors: std::sync::Mutex<Vec<Arc<dyn Listener>>>,
}

impl Intercepted {
    pub(super) fn new(inner: Arc<dyn Store>, pass: Pass) -> Arc<Self> {
        Self::losing(inner, pass, Arc::new(|_| Fate::Answered))
    }

    /// A store that may lose releases.
    pub(super) fn losing(inner: Arc<dyn Store>, pass: Pass, decide: Decide) -> Arc<Self> {
        Arc::new(Self {
            inner,
            pass,
            decide,
            interceptors: Default::default(),
        })
    }
}

struct Interceptor {
    pass: Pass,
    listener: Weak<dyn Listener>,
}

impl Listener for Interceptor {
    fn on_event(&self, event: &StoreEvent) {
        if let Some(listener) = self.listener.upgrade() {
            (self.pass)(event, &listener);
        }
    }
}

impl fmt::Debug for Intercepted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Intercepted").field(&self.inner).finish()
    }
}

// A method with a default body must not be forgotten.
#[deny(clippy::missing_trait_methods)]
impl Store for Intercepted {
    fn listen(&self, listener: Weak<dyn Listener>) {
        let pass = self.pass.clone();
        let interceptor: Arc<dyn Listener> = Arc::new(Interceptor { pass, listener });
        self.inner.listen(Arc::downgrade(&interceptor));
        lock(&self.interceptors).push(interceptor);
    }

    fn client(&self) -> Option<ClientId> {
        self.inner.client()
    }

    fn sends_events(&self) -> bool {
        self.inner.sends_events()
    }

    fn serves_any_runtime(&self) -> bool {
        self.inner.serves_any_runtime()
    }

    fn acquire<'a>(&'a self, request: &'a KeyRequest) -> Replied<'a, AcquireReply> {
        self.inner.acquire(request)
    }

    fn acquire_all<'a>(&'a self, requests: &'a [KeyRequest]) -> Replied<'a, AcquireAllReply> {
        self.inner.acquire_all(requests)
    }

    fn poll<'a>(&'a self, holds: &'a [Hold]) -> Replies<'a, PollReply> {
        self.inner.poll(holds)
    }

    fn renew<'a>(&'a self, renewals: &'a [Renewal]) -> Replies<'a, RenewReply> {
        self.inner.renew(renewals)
    }

    fn release<'a>(&'a self, release: &'a Release) -> Replied<'a, ReleaseReply> {
        let fate = (self.decide)(release);
        Box::pin(async move {
            let reply = match fate {
                Fate::Unsent => None,
                Fate::Answered | Fate::Unanswered => Some(self.inner.release(release).await?),
            };
            let lost = || StoreError::new(StoreErrorKind::Unavailable, "the reply is lost");
            reply.filter(|_| fate == Fate::Answered).ok_or_else(lost)
        })
    }

    fn release_owned(self: Arc<Self>, release: Release) -> Replied<'static, ReleaseReply> {
        Box::pin(async move { self.release(&release).await })
    }

    fn convert<'a>(&'a self, hold: &'a Hold) -> Replied<'a, ConvertReply> {
        self.inner.convert(hold)
    }

    fn abandon<'a>(&'a self, hold: &'a Hold) -> Replied<'a, ()> {
        self.inner.abandon(hold)
    }

    fn inspect<'a>(&'a self, key: &'a LockKey, kind: LockKind) -> Replied<'a, Inspection> {
        self.inner.inspect(key, kind)
    }

    fn done<'a>(&'a self, key: &'a LockKey) -> Replied<'a, Option<Done>> {
        self.inner.done(key)
    }

    fn blockers<'a>(&'a self, key: &'a LockKey, kind: LockKind) -> Replied<'a, Vec<String>> {
        self.inner.blockers(key, kind)
    }

    fn holders<'a>(&'a self, key: &'a LockKey, kind: LockKind) -> Replied<'a, Vec<Holder>> {
        self.inner.holders(key, kind)
    }

    fn revoke<'a>(
        &'a self,
        key: &'a LockKey,
        kind: LockKind,
        scope: RevokeScope,
    ) -> Replied<'a, RevokeReply> {
        self.inner.revoke(key, kind, scope)
    }

    fn introduce<'a>(
        &'a self,
        client: ClientId,
        name: &'a str,
        grants: &'a [(HolderId, Duration)],
        keep_for: Duration,
    ) -> Replied<'a, ()> {
        self.inner.introduce(client, name, grants, keep_for)
    }

    fn names_of<'a>(&'a self, clients: &'a [ClientId]) -> Replied<'a, Vec<Option<String>>> {
        self.inner.names_of(clients)
    }

    fn list<'a>(&'a self, prefix: &'a str, cursor: Option<Cursor>) -> Replied<'a, Page> {
        self.inner.list(prefix, cursor)
    }

    fn name_of(&self, key: &LockKey, kind: LockKind, part: KeyPart) -> Option<String> {
        self.inner.name_of(key, kind, part)
    }

    fn as_any(&self) -> Option<&dyn Any> {
        self.inner.as_any()
    }

    fn guarded_name(&self, key: &LockKey, kind: LockKind) -> Option<String> {
        self.inner.guarded_name(key, kind)
    }

    fn server_of(&self, key: &LockKey, kind: LockKind) -> u64 {
        self.inner.server_of(key, kind)
    }

    fn limits(&self) -> Limits {
        self.inner.limits()
    }

    fn settled(&self) -> BoxFuture<'_, ()> {
        self.inner.settled()
    }

    fn health(&self) -> BoxFuture<'_, Health> {
        self.inner.health()
    }
}
