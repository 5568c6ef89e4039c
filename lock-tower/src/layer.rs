//! [`LockLayer`]: what to lock, how, and how to refuse, before there is a service.

use std::{any::type_name, fmt, num::NonZeroU32, sync::Arc, time::Duration};

use http::StatusCode;
use lock_runtime::{LockClient, LockSpec, web::Answer};
use tower_layer::Layer;

use crate::{
    key::{KeyTemplate, TemplateError},
    policy::Policy,
    protocol::{Hold, Http, Plain},
    reject::OnReject,
    service::Lock,
};

/// Holds a lock around each request of the services it is put on.
///
/// `K` names the lock, see [`KeyExtractor`](crate::KeyExtractor); `P` says how to refuse, [`Http`] or [`Plain`]. The
/// setters are those of [`LockSpec`], which says what each is for. What cannot be meant, such as a lease under 100 ms, is
/// refused with 500 (`invalid_spec`) when a request comes.
#[derive(Clone)]
#[must_use = "a layer does nothing until it is put on a service"]
pub struct LockLayer<K = KeyTemplate, P = Http> {
    pub(crate) locks: LockClient,
    pub(crate) key: K,
    pub(crate) policy: Arc<Policy>,
    pub(crate) protocol: P,
}

impl LockLayer {
    /// Locks the key that `template` gives for a request, such as `"order:{id}"`; [`KeyTemplate`] says how to write one.
    ///
    /// # Errors
    /// For a template that no request could fill, with what to write instead.
    pub fn new(locks: LockClient, template: &str) -> Result<Self, TemplateError> {
        let name: Arc<str> = template.into();
        Ok(Self::with_key(locks, KeyTemplate::new(template)?).name(name))
    }
}

impl<K> LockLayer<K> {
    /// Locks the key that `key` names: a closure, or a [`KeyExtractor`](crate::KeyExtractor) of your own.
    pub fn with_key(locks: LockClient, key: K) -> Self {
        Self::over(locks, key, Http::default())
    }
}

impl<K> LockLayer<K, Plain> {
    /// The same for services that do not speak HTTP: refusals are errors, [`ServiceError`](crate::ServiceError).
    pub fn plain(locks: LockClient, key: K) -> Self {
        Self::over(locks, key, Plain::default())
    }
}

impl<K, P> LockLayer<K, P> {
    fn over(locks: LockClient, key: K, protocol: P) -> Self {
        Self {
            locks,
            key,
            policy: Arc::new(Policy::new("unnamed")),
            protocol,
        }
    }

    fn set(self, set: impl FnOnce(Policy) -> Policy) -> Self {
        Self {
            policy: Arc::new(set(Arc::unwrap_or_clone(self.policy))),
            ..self
        }
    }

    fn with(self, set: impl FnOnce(LockSpec) -> LockSpec) -> Self {
        self.set(|policy| policy.with_spec(set))
    }

    /// Locks as `policy` says, in place of all that was said before.
    pub fn policy(self, policy: Policy) -> Self {
        self.set(|_| policy)
    }

    /// What metrics and refusals call this layer; the text of the template where there is one. Not the key, and so the
    /// same for all requests.
    pub fn name(self, name: impl Into<Arc<str>>) -> Self {
        self.set(|policy| policy.named(name))
    }

    /// Locks as `spec` says, in place of all that was said before. What it leaves open comes from the client's defaults, but
    /// for the wait, which is then 2 s.
    pub fn spec(self, spec: LockSpec) -> Self {
        self.set(|policy| policy.spec(spec))
    }

    /// How long the store keeps the lock without a renewal. See [`LockSpec::lease`].
    pub fn lease(self, lease: Duration) -> Self {
        self.with(|spec| spec.lease(lease))
    }

    /// How long a request waits for the lock; 2 s by default. See [`LockSpec::wait`].
    ///
    /// Keep it under the time-out of the callers: whoever has given up need not be served.
    pub fn wait(self, wait: Duration) -> Self {
        self.with(|spec| spec.wait(wait))
    }

    /// Refuses at once what would have to wait. See [`LockSpec::no_wait`].
    pub fn no_wait(self) -> Self {
        self.with(LockSpec::no_wait)
    }

    /// Does not renew. See [`LockSpec::no_renew`].
    pub fn no_renew(self) -> Self {
        self.with(LockSpec::no_renew)
    }

    /// Enters again where a layer further out holds the lock. See [`LockSpec::reentrant`].
    pub fn reentrant(self) -> Self {
        self.with(LockSpec::reentrant)
    }

    /// Keeps the lock at least so long after the grant. See [`LockSpec::min_hold`].
    pub fn min_hold(self, min_hold: Duration) -> Self {
        self.with(|spec| spec.min_hold(min_hold))
    }

    /// Lets other processes in between any two holders of this one. See [`LockSpec::strict_order`].
    pub fn strict_order(self) -> Self {
        self.with(LockSpec::strict_order)
    }

    /// Refuses more requests for one key than so many at once, as `Overloaded`. See [`LockSpec::max_waiters`].
    pub fn max_waiters(self, max_waiters: usize) -> Self {
        self.with(|spec| spec.max_waiters(max_waiters))
    }

    /// Ends renewal so long after the grant; a request that takes longer is refused as `Lost`. See [`LockSpec::max_hold`].
    pub fn max_hold(self, max_hold: Duration) -> Self {
        self.with(|spec| spec.max_hold(max_hold))
    }

    /// Serves a request *without its lock* when the store is out of reach, or read-only. Each such request is traced as a
    /// warning, and finds no `HeldLock`, not that of a layer further out either.
    ///
    /// A gRPC request is refused all the same if its `grpc-timeout` is shorter than the [`wait`](Self::wait): the store
    /// may be no more than slow, and the caller has gone. Set the wait below the deadlines of the callers, or
    /// [`no_wait`](Self::no_wait).
    ///
    /// For what is worse refused than done twice. Somebody else may be at it: whatever the lock protects has to bear that.
    pub fn fail_open(self) -> Self {
        self.set(Policy::fail_open)
    }

    /// Takes a share: many readers, no writer.
    pub fn read(self) -> Self {
        self.with(|spec| LockSpec::shared().or(&spec))
    }

    /// Takes one of `permits`.
    pub fn permits(self, permits: NonZeroU32) -> Self {
        self.with(|spec| LockSpec::permits(permits).or(&spec))
    }
}

impl<K, R> LockLayer<K, Http<R>> {
    /// The longest `Retry-After`, 1 s by default; it is shorter where the holder's lease ends before.
    pub fn retry_after(self, after: Duration) -> Self {
        self.set(|policy| policy.retry_after(after))
    }

    /// How long the lock is held: until the response is there, or until its body is sent.
    pub fn hold(self, hold: Hold) -> Self {
        self.set(|policy| policy.hold(hold))
    }

    /// Answers a row of the table of refusals with another HTTP status from 400 on, such as 423 for [`Answer::Busy`].
    /// Callers over gRPC are told the same as before.
    pub fn status(self, answer: Answer, status: StatusCode) -> Self {
        self.set(|policy| policy.status(answer, status))
    }

    /// Answers refusals with `on_reject`, a closure or a type of your own, instead of
    /// [`StandardReject`](crate::StandardReject).
    pub fn on_reject<R2: OnReject>(self, on_reject: R2) -> LockLayer<K, Http<R2>> {
        let Self {
            locks,
            key,
            policy,
            protocol: _,
        } = self;
        LockLayer {
            locks,
            key,
            policy,
            protocol: Http::new(on_reject),
        }
    }
}

impl<S, K: Clone, P: Clone> Layer<S> for LockLayer<K, P> {
    type Service = Lock<S, K, P>;

    fn layer(&self, inner: S) -> Self::Service {
        Lock::new(inner, self.clone())
    }
}

impl<K, P: fmt::Debug> fmt::Debug for LockLayer<K, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            locks,
            key: _,
            policy,
            protocol,
        } = self;
        f.debug_struct("LockLayer")
            .field("locks", locks)
            .field("key", &format_args!("{}", type_name::<K>()))
            .field("policy", policy)
            .field("protocol", protocol)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(set: impl Fn(LockLayer<()>) -> LockLayer<()>) -> LockSpec {
        set(LockLayer::with_key(LockClient::in_memory(), ()))
            .policy
            .lock_spec()
            .clone()
    }

    #[test]
    fn a_request_waits_two_seconds_where_nothing_else_is_said() {
        let seconds = Duration::from_secs;
        assert_eq!(spec(|layer| layer), LockSpec::exclusive().wait(seconds(2)));
        assert_eq!(spec(LockLayer::read), LockSpec::shared().wait(seconds(2)));
        let lease = LockSpec::shared().lease(seconds(9));
        assert_eq!(
            spec(|layer| layer.spec(lease.clone())),
            LockSpec::shared().lease(seconds(9)).wait(seconds(2))
        );
        assert_eq!(
            spec(|layer| layer.spec(lease.clone().no_wait())),
            LockSpec::shared().lease(seconds(9)).no_wait()
        );
        assert_eq!(
            spec(|layer| layer.wait(seconds(5)).spec(lease.clone()).read().no_wait()),
            lease.clone().no_wait()
        );
    }
}
