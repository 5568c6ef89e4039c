//! [`LockLayer`]: configures locks and refusals, and wraps services.

use std::{any::type_name, fmt, num::NonZeroU32, sync::Arc, time::Duration};

use http::StatusCode;
use lock_runtime::{LockClient, LockSpec, web::ErrorClass};
use tower_layer::Layer;

use crate::{
    key::{KeyTemplate, TemplateError},
    policy::Policy,
    protocol::{HoldUntil, Http, Plain},
    reject::OnReject,
    service::Lock,
};

/// Layer that applies the [`Lock`] middleware, which holds a lock around each request.
///
/// `K` extracts the key of the lock, see [`KeyExtractor`](crate::KeyExtractor). `P` determines
/// how requests are refused, [`Http`] or [`Plain`]. The setters are those of [`LockSpec`], which
/// documents them. They check nothing: with an invalid spec, such as a lease under 100 ms, each
/// request is refused with 500 (`invalid_spec`).
#[derive(Clone)]
#[must_use = "a layer does nothing until it is put on a service"]
pub struct LockLayer<K = KeyTemplate, P = Http> {
    pub(crate) locks: LockClient,
    pub(crate) key: K,
    pub(crate) policy: Arc<Policy>,
    pub(crate) protocol: P,
}

impl LockLayer {
    /// Creates a new [`LockLayer`] with the key that `template` gives for a request, such as
    /// `"order:{id}"`. See [`KeyTemplate`] for the syntax.
    ///
    /// # Errors
    /// If no request could fill the template. The message explains the correct form.
    pub fn new(locks: LockClient, template: &str) -> Result<Self, TemplateError> {
        let name: Arc<str> = template.into();
        Ok(Self::with_key(locks, KeyTemplate::new(template)?).name(name))
    }
}

impl<K> LockLayer<K> {
    /// Creates a new [`LockLayer`] with a [`KeyExtractor`](crate::KeyExtractor): a closure or a
    /// custom type.
    pub fn with_key(locks: LockClient, key: K) -> Self {
        Self::over(locks, key, Http::default())
    }
}

impl<K> LockLayer<K, Plain> {
    /// Creates a new [`LockLayer`] for services that do not speak HTTP. Refused requests fail
    /// with a [`ServiceError`](crate::ServiceError).
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

    /// Replaces the whole configuration of locks and refusals, except
    /// [`on_reject`](LockLayer::on_reject), with `policy`.
    pub fn policy(self, policy: Policy) -> Self {
        self.set(|_| policy)
    }

    /// Sets the name of this layer in metrics and refusals. It defaults to the text of the
    /// template, if there is one. It is not the key, and so is the same for all requests.
    pub fn name(self, name: impl Into<Arc<str>>) -> Self {
        self.set(|policy| policy.named(name))
    }

    /// Replaces the lock options with `spec`. Options that it leaves unset come from the client's
    /// defaults, except the wait, which is then 2 s.
    pub fn spec(self, spec: LockSpec) -> Self {
        self.set(|policy| policy.spec(spec))
    }

    /// Sets how long the store keeps the lock without a renewal. See [`LockSpec::lease`].
    pub fn lease(self, lease: Duration) -> Self {
        self.with(|spec| spec.lease(lease))
    }

    /// Sets how long a request waits for the lock, 2 s by default. See [`LockSpec::wait`].
    ///
    /// Keep it below the time-out of the callers: a request whose caller has given up need not be
    /// served.
    pub fn wait(self, wait: Duration) -> Self {
        self.with(|spec| spec.wait(wait))
    }

    /// Refuses a request at once if it would have to wait. See [`LockSpec::no_wait`].
    pub fn no_wait(self) -> Self {
        self.with(LockSpec::no_wait)
    }

    /// Disables renewal. See [`LockSpec::no_renew`].
    pub fn no_renew(self) -> Self {
        self.with(LockSpec::no_renew)
    }

    /// Re-enters the lock if an outer layer holds it. See [`LockSpec::reentrant`].
    pub fn reentrant(self) -> Self {
        self.with(LockSpec::reentrant)
    }

    /// Keeps the lock for at least this long after the grant. See [`LockSpec::min_hold`].
    pub fn min_hold(self, min_hold: Duration) -> Self {
        self.with(|spec| spec.min_hold(min_hold))
    }

    /// Disables local hand-offs: between two holders of this process, waiting processes get their
    /// turn. See [`LockSpec::strict_order`].
    pub fn strict_order(self) -> Self {
        self.with(LockSpec::strict_order)
    }

    /// Sets how many requests may wait for one key; more are refused as `Overloaded` at once. See
    /// [`LockSpec::max_waiters`].
    pub fn max_waiters(self, max_waiters: usize) -> Self {
        self.with(|spec| spec.max_waiters(max_waiters))
    }

    /// Ends renewal this long after the grant. A request that takes longer is refused as `Lost`.
    /// See [`LockSpec::max_hold`].
    pub fn max_hold(self, max_hold: Duration) -> Self {
        self.with(|spec| spec.max_hold(max_hold))
    }

    /// Serves a request *without its lock* if the store is unavailable or read-only. Each such
    /// request is traced as a warning, and has no `HeldLock`, not even that of an outer layer.
    ///
    /// A gRPC request is refused nevertheless if its `grpc-timeout` is shorter than the
    /// [`wait`](Self::wait): the store may only be slow, and the caller has given up. Set the
    /// wait below the deadlines of the callers, or use [`no_wait`](Self::no_wait).
    ///
    /// Use it only for requests that are better served twice than refused. Another client may
    /// hold the lock at the same time, and the protected resource must tolerate that.
    pub fn fail_open(self) -> Self {
        self.set(Policy::fail_open)
    }

    /// Acquires the lock as a reader: many readers, no writer.
    pub fn read(self) -> Self {
        self.with(|spec| LockSpec::shared().or(&spec))
    }

    /// Acquires one of `permits` permits.
    pub fn permits(self, permits: NonZeroU32) -> Self {
        self.with(|spec| LockSpec::permits(permits).or(&spec))
    }
}

impl<K, R> LockLayer<K, Http<R>> {
    /// Sets the longest `Retry-After`, 1 s by default. It is shorter if the lease of the holder
    /// ends earlier.
    pub fn retry_after(self, after: Duration) -> Self {
        self.set(|policy| policy.retry_after(after))
    }

    /// Sets how long the lock is held: until the inner service has responded, or until the
    /// response body has been sent.
    pub fn hold_until(self, hold_until: HoldUntil) -> Self {
        self.set(|policy| policy.hold_until(hold_until))
    }

    /// Sets the HTTP status, 400 or above, of one row of the table of refusals, for example 423
    /// for [`ErrorClass::Busy`]. gRPC statuses do not change.
    pub fn status(self, class: ErrorClass, status: StatusCode) -> Self {
        self.set(|policy| policy.status(class, status))
    }

    /// Sets the response to refused requests: a closure or a custom type instead of
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
