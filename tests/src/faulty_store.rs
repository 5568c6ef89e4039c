//! A [`Store`] whose operations a test can fail, delay, hold back, count or replace.
//!
//! A hook receives every operation as a [`Call`] and returns the future of its outcome. The hook
//! decides whether, when and how often the operation is executed.
//!
//! ```
//! use std::{sync::Arc, time::Duration};
//!
//! use lock_runtime::{LockClient, store::MemoryStore};
//! use lock_tests::{FaultyStore, faulty_store::Operation};
//!
//! // The reply to the first acquire request takes a second.
//! let store = FaultyStore::new(Arc::new(MemoryStore::new()), |call| async move {
//!     let outcome = call.execute().await;
//!     if matches!(call.operation, Operation::Acquire(_)) && call.nth == 0 {
//!         tokio::time::sleep(Duration::from_secs(1)).await;
//!     }
//!     outcome
//! });
//! let locks = LockClient::with_store(store);
//! ```

use std::{
    any::Any,
    fmt,
    mem::discriminant,
    sync::{Arc, Weak},
    time::Duration,
};

use futures_util::future::BoxFuture;
use lock_runtime::{
    FencingToken, LockKey, LockKind,
    health::Health,
    operator::{ClientId, Holder, HolderId, Inspection},
    store::{
        AcquireAllReply, AcquireReply, ConvertReply, Cursor, Done, Hold, KeyPart, KeyRequest,
        Limits, Listener, Page, PollReply, QuorumMember, RaiseReply, Release, ReleaseReply,
        RenewReply, Renewal, RevokeReply, RevokeScope, Store, StoreError,
    },
};
use tokio::sync::watch;

/// The outcome of an [`Operation`]. The reply has the type that the method of [`Store`] returns.
pub type Outcome = Result<Box<dyn Any + Send>, StoreError>;

type Reply<'a, T> = BoxFuture<'a, Result<T, StoreError>>;

/// A method of [`Store`] with its arguments.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "the variants are named after the methods")]
pub enum Operation {
    Acquire(KeyRequest),
    AcquireAll(Vec<KeyRequest>),
    Poll(Vec<Hold>),
    Renew(Vec<Renewal>),
    Release(Release),
    Convert(Hold),
    Abandon(Hold),
    Raise(LockKey, LockKind, FencingToken),
    Inspect(LockKey, LockKind),
    Revoke(LockKey, LockKind, RevokeScope),
    List(String, Option<Cursor>),
    Done(LockKey),
}

impl Operation {
    /// Executes the operation on `store`.
    pub async fn execute(&self, store: &dyn QuorumMember) -> Outcome {
        Ok(match self {
            Self::Acquire(request) => Box::new(store.acquire(request).await?),
            Self::AcquireAll(requests) => Box::new(store.acquire_all(requests).await?),
            Self::Poll(holds) => Box::new(store.poll(holds).await),
            Self::Renew(renewals) => Box::new(store.renew(renewals).await),
            Self::Release(release) => Box::new(store.release(release).await?),
            Self::Convert(hold) => Box::new(store.convert(hold).await?),
            Self::Abandon(hold) => Box::new(store.abandon(hold).await?),
            Self::Raise(key, kind, fence) => Box::new(store.raise(key, *kind, *fence).await?),
            Self::Inspect(key, kind) => Box::new(store.inspect(key, *kind).await?),
            Self::Done(key) => Box::new(store.done(key).await?),
            Self::Revoke(key, kind, scope) => Box::new(store.revoke(key, *kind, *scope).await?),
            Self::List(prefix, cursor) => Box::new(store.list(prefix, cursor.clone()).await?),
        })
    }
}

/// An operation that the hook of a [`FaultyStore`] handles.
#[derive(Clone, Debug)]
pub struct Call {
    /// The method and its arguments.
    pub operation: Operation,
    /// The number of earlier calls of the same method.
    pub nth: usize,
    /// The store that the operation is meant for.
    pub inner: Arc<dyn QuorumMember>,
}

impl Call {
    /// Executes the operation on the inner store.
    pub async fn execute(&self) -> Outcome {
        self.operation.execute(&*self.inner).await
    }
}

/// A [`Store`] that passes its operations through a hook, and records them.
pub struct FaultyStore {
    inner: Arc<dyn QuorumMember>,
    hook: Box<dyn Fn(Call) -> BoxFuture<'static, Outcome> + Send + Sync>,
    operations: watch::Sender<Vec<Operation>>,
    is_silent: bool,
    limits: Limits,
}

impl FaultyStore {
    /// Passes every operation on `inner` through `hook`.
    pub fn new<F: Future<Output = Outcome> + Send + 'static>(
        inner: Arc<dyn QuorumMember>,
        hook: impl Fn(Call) -> F + Send + Sync + 'static,
    ) -> Arc<Self> {
        Arc::new(Self {
            limits: inner.limits(),
            inner,
            hook: Box::new(move |call| Box::pin(hook(call))),
            operations: watch::Sender::default(),
            is_silent: false,
        })
    }

    /// Executes every operation on `inner`, and sends no event, whether it says so or not.
    pub fn silent(inner: Arc<dyn QuorumMember>, says_so: bool) -> Arc<Self> {
        let limits = inner.limits();
        Arc::new(Self {
            limits: if says_so { limits.push(false) } else { limits },
            inner,
            hook: Box::new(|call| Box::pin(async move { call.execute().await })),
            operations: watch::Sender::default(),
            is_silent: true,
        })
    }

    /// The operations so far, in the order in which they began.
    pub fn operations(&self) -> Vec<Operation> {
        self.operations.borrow().clone()
    }

    /// The requests for locks so far, of one key or of several.
    pub fn requests(&self) -> Vec<KeyRequest> {
        let requests = |operation| match operation {
            Operation::Acquire(request) => vec![request],
            Operation::AcquireAll(requests) => requests,
            _ => Vec::new(),
        };
        self.operations().into_iter().flat_map(requests).collect()
    }

    /// The number of operations so far that `matches` accepts.
    pub fn count(&self, matches: impl Fn(&Operation) -> bool) -> usize {
        let operations = self.operations.borrow();
        operations.iter().filter(|each| matches(each)).count()
    }

    /// Waits until `matches` accepts at least `count` operations.
    pub async fn wait_for(&self, count: usize, matches: impl Fn(&Operation) -> bool) {
        let mut operations = self.operations.subscribe();
        let enough =
            operations.wait_for(|all| all.iter().filter(|&each| matches(each)).count() >= count);
        enough.await.expect("the store has the sender");
    }

    async fn call<T: 'static>(&self, operation: Operation) -> Result<T, StoreError> {
        let method = discriminant(&operation);
        let mut nth = 0;
        self.operations.send_modify(|all| {
            nth = all
                .iter()
                .filter(|&each| discriminant(each) == method)
                .count();
            all.push(operation.clone());
        });
        let inner = self.inner.clone();
        let call = Call {
            operation,
            nth,
            inner,
        };
        let reply = (self.hook)(call).await?;
        Ok(*reply.downcast().expect("a reply of the operation's type"))
    }
}

impl fmt::Debug for FaultyStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("FaultyStore").field(&self.inner).finish()
    }
}

// A method with a default body must not be forgotten.
#[deny(clippy::missing_trait_methods)]
impl Store for FaultyStore {
    fn client(&self) -> Option<ClientId> {
        self.inner.client()
    }

    fn acquire<'a>(&'a self, request: &'a KeyRequest) -> Reply<'a, AcquireReply> {
        Box::pin(self.call(Operation::Acquire(request.clone())))
    }

    fn acquire_all<'a>(&'a self, requests: &'a [KeyRequest]) -> Reply<'a, AcquireAllReply> {
        Box::pin(self.call(Operation::AcquireAll(requests.to_vec())))
    }

    fn poll<'a>(&'a self, holds: &'a [Hold]) -> BoxFuture<'a, Vec<Result<PollReply, StoreError>>> {
        let all_failed = |error: StoreError| vec![Err(error); holds.len()];
        let replies = self.call(Operation::Poll(holds.to_vec()));
        Box::pin(async move { replies.await.unwrap_or_else(all_failed) })
    }

    fn renew<'a>(
        &'a self,
        renewals: &'a [Renewal],
    ) -> BoxFuture<'a, Vec<Result<RenewReply, StoreError>>> {
        let all_failed = |error: StoreError| vec![Err(error); renewals.len()];
        let replies = self.call(Operation::Renew(renewals.to_vec()));
        Box::pin(async move { replies.await.unwrap_or_else(all_failed) })
    }

    fn release<'a>(&'a self, release: &'a Release) -> Reply<'a, ReleaseReply> {
        Box::pin(self.call(Operation::Release(release.clone())))
    }

    fn release_owned(self: Arc<Self>, release: Release) -> Reply<'static, ReleaseReply> {
        Box::pin(async move { self.release(&release).await })
    }

    fn convert<'a>(&'a self, hold: &'a Hold) -> Reply<'a, ConvertReply> {
        Box::pin(self.call(Operation::Convert(hold.clone())))
    }

    fn abandon<'a>(&'a self, hold: &'a Hold) -> Reply<'a, ()> {
        Box::pin(self.call(Operation::Abandon(hold.clone())))
    }

    fn inspect<'a>(&'a self, key: &'a LockKey, kind: LockKind) -> Reply<'a, Inspection> {
        Box::pin(self.call(Operation::Inspect(key.clone(), kind)))
    }

    fn done<'a>(&'a self, key: &'a LockKey) -> Reply<'a, Option<Done>> {
        Box::pin(self.call(Operation::Done(key.clone())))
    }

    fn blockers<'a>(&'a self, key: &'a LockKey, kind: LockKind) -> Reply<'a, Vec<String>> {
        self.inner.blockers(key, kind)
    }

    fn holders<'a>(&'a self, key: &'a LockKey, kind: LockKind) -> Reply<'a, Vec<Holder>> {
        Box::pin(async move { Ok(self.inspect(key, kind).await?.holders) })
    }

    fn revoke<'a>(
        &'a self,
        key: &'a LockKey,
        kind: LockKind,
        scope: RevokeScope,
    ) -> Reply<'a, RevokeReply> {
        Box::pin(self.call(Operation::Revoke(key.clone(), kind, scope)))
    }

    fn introduce<'a>(
        &'a self,
        client: ClientId,
        name: &'a str,
        grants: &'a [(HolderId, Duration)],
        keep_for: Duration,
    ) -> Reply<'a, ()> {
        self.inner.introduce(client, name, grants, keep_for)
    }

    fn names_of<'a>(&'a self, clients: &'a [ClientId]) -> Reply<'a, Vec<Option<String>>> {
        self.inner.names_of(clients)
    }

    fn list<'a>(&'a self, prefix: &'a str, cursor: Option<Cursor>) -> Reply<'a, Page> {
        Box::pin(self.call(Operation::List(prefix.to_owned(), cursor)))
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
        self.limits
    }

    fn listen(&self, listener: Weak<dyn Listener>) {
        if !self.is_silent {
            self.inner.listen(listener);
        }
    }

    /// What decides about its calls belongs to the runtime of the test.
    fn sends_events(&self) -> bool {
        self.inner.sends_events()
    }

    fn serves_any_runtime(&self) -> bool {
        false
    }

    fn settled(&self) -> BoxFuture<'_, ()> {
        self.inner.settled()
    }

    fn health(&self) -> BoxFuture<'_, Health> {
        self.inner.health()
    }
}

impl QuorumMember for FaultyStore {
    fn raise<'a>(
        &'a self,
        key: &'a LockKey,
        kind: LockKind,
        fence: FencingToken,
    ) -> Reply<'a, RaiseReply> {
        Box::pin(self.call(Operation::Raise(key.clone(), kind, fence)))
    }
}
