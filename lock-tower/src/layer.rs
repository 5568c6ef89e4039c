//! [`LockLayer`] and [`PolicyLayer`], which apply the [`Lock`] middleware to services.

use std::time::Duration;

use http::StatusCode;
use lock_runtime::{ErrorClass, LockClient, LockSpec, RequestName};
use tower_layer::Layer;

use crate::{
    key::{KeyTemplate, TemplateError},
    policy::{HoldUntil, Policy},
    protocol::{
        Http, Plain,
        reject::{OnReject, StandardReject},
    },
    selector::Keyed,
    service::Lock,
};

/// Layer that applies the [`Lock`] middleware, which holds a lock around each request.
///
/// `K` extracts the key of the lock, see [`KeyExtractor`](crate::KeyExtractor). `P` is the protocol
/// of refusals, [`Http`] or [`Plain`].
///
/// The setters of the lock are those of [`LockSpec`]. They check nothing: with an invalid spec,
/// such as a lease under 100 ms, each request is refused with 500 (`invalid_spec`), and an error
/// event is emitted when the layer is put on a service. A request waits 2 s by default. Keep the
/// wait below the time-out of the callers: a request whose caller has given up need not be served.
///
/// A lock is held for a minute at most ([`max_hold`](Self::max_hold)), or for the lease or the
/// `min_hold` if that is longer: the handler is then cancelled with `lost_max_hold`, and other
/// clients get the lock. A request is locked before its body has been read, so a caller that sends
/// it slowly, or not at all, could otherwise hold the lock without end. Set it to the longest time
/// that the handler needs, or remove it with [`no_max_hold`](Self::no_max_hold) where callers are
/// trusted. See "What a caller can do to a lock" in `recipes`.
#[derive(Clone, Debug)]
#[must_use = "a layer does nothing until it is put on a service"]
pub struct LockLayer<K = KeyTemplate, P = Http> {
    locks: LockClient,
    selector: Keyed<K>,
    protocol: P,
}

impl LockLayer {
    /// Creates a new [`LockLayer`] with the key that `template` gives for a request, such as
    /// `"order:{id}"`. See [`KeyTemplate`] for the syntax.
    ///
    /// # Errors
    /// If no request could fill the template, or if it has no placeholder: all requests would have
    /// the same key. The message explains the correct form.
    pub fn new(locks: LockClient, template: &str) -> Result<Self, TemplateError> {
        let key = KeyTemplate::not_constant(template)?;
        Ok(Self::with_key(locks, key).name(template.to_owned()))
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
            selector: Keyed::new(key),
            protocol,
        }
    }

    fn set(self, set: impl FnOnce(Policy) -> Policy) -> Self {
        Self {
            selector: self.selector.set(set),
            ..self
        }
    }

    fn with(self, set: impl FnOnce(LockSpec) -> LockSpec) -> Self {
        self.set(|policy| policy.set_spec(set))
    }

    /// Replaces the whole configuration of locks and refusals, except
    /// [`on_reject`](LockLayer::on_reject), with `policy`.
    pub fn policy(self, policy: Policy) -> Self {
        Self {
            selector: self.selector.set_named(|_| policy),
            ..self
        }
    }

    /// Sets the name of this layer in metrics, spans and refusals. It is not the key, and so is
    /// the same for all requests.
    ///
    /// It defaults to the text of the template. A layer without a template is named after the
    /// route of each request: axum's matched path, such as `/orders/{id}`, or else the gRPC
    /// method, such as `/shop.Orders/Pay`, or else `unrouted`. After 128 routes, further ones are
    /// `unrouted` as well: a caller that invents gRPC methods uses them up, so a layer around a
    /// whole server is best named.
    pub fn name(self, name: impl Into<RequestName>) -> Self {
        Self {
            selector: self.selector.set_named(|policy| policy.with_name(name)),
            ..self
        }
    }

    /// Replaces the lock options with `spec`. Options that it leaves unset come from the client's
    /// defaults, except the wait, which is then 2 s. If these set no `max_hold` either, it is a
    /// minute.
    pub fn spec(self, spec: LockSpec) -> Self {
        self.set(|policy| policy.with_spec(spec))
    }

    lock_runtime::__lock_options!(lock_runtime::__lock_setters);

    /// Serves a request *without its lock* if the store is unavailable or read-only. Each such
    /// request is traced as a warning, and has no `HeldLock`, not even that of an outer layer.
    ///
    /// A gRPC request is refused nevertheless if its `grpc-timeout` is shorter than the
    /// [`wait`](Self::wait): the store may only be slow, and the caller has given up. Set the
    /// wait below the deadlines of the callers, or use [`no_wait`](Self::no_wait).
    ///
    /// Requests that wait are served after their wait. With
    /// [`unavailable_after`](lock_runtime::LockClientBuilder::unavailable_after) they are served at
    /// once while the store does not answer.
    ///
    /// Use it only for requests that are better served twice than refused. Another client may
    /// hold the lock at the same time, and the protected resource must tolerate that.
    pub fn fail_open(self) -> Self {
        self.set(Policy::fail_open)
    }
}

impl<K, R> LockLayer<K, Http<R>> {
    /// Sets the longest `Retry-After`, 1 s by default. It is shorter if the lease of the holder
    /// ends earlier.
    pub fn retry_after(self, after: Duration) -> Self {
        self.set(|policy| policy.retry_after(after))
    }

    /// Sets the end of the hold: the response of the inner service, or the end of the response
    /// body.
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
        LockLayer {
            locks: self.locks,
            selector: self.selector,
            protocol: Http::new(on_reject),
        }
    }
}

impl<S, K: Clone, P: Clone> Layer<S> for LockLayer<K, P> {
    type Service = Lock<S, Keyed<K>, P>;

    fn layer(&self, inner: S) -> Self::Service {
        let policy = &self.selector.policy;
        let checked = policy.spec_for(&self.locks);
        if let Err(error) = checked.and_then(|spec| Ok(spec.check()?)) {
            let policy = policy.name();
            tracing::error!(policy, %error, "the options of the lock are invalid: every request will be refused with 500");
        }
        Lock::new(
            inner,
            self.locks.clone(),
            self.selector.clone(),
            self.protocol.clone(),
        )
    }
}

/// Layer that applies the [`Lock`] middleware under a policy that is chosen for each request, by
/// `LockPolicies` or another [`Selector`](crate::Selector).
///
/// It has no setters for locks, because each [`Policy`] has its own. In a policy file, settings for
/// all routes belong in `[defaults]`.
#[derive(Clone, Debug)]
#[must_use = "a layer does nothing until it is put on a service"]
pub struct PolicyLayer<L, R = StandardReject> {
    locks: LockClient,
    selector: L,
    protocol: Http<R>,
}

impl<L> PolicyLayer<L> {
    /// Creates a new [`PolicyLayer`] with a [`Selector`](crate::Selector): `LockPolicies` or a
    /// closure.
    pub fn new(locks: LockClient, selector: L) -> Self {
        Self {
            locks,
            selector,
            protocol: Http::default(),
        }
    }
}

impl<L, R> PolicyLayer<L, R> {
    /// See [`LockLayer::on_reject`]. [`Refusal::policy`](crate::Refusal::policy) returns the
    /// policy under which a request was refused.
    pub fn on_reject<R2: OnReject>(self, on_reject: R2) -> PolicyLayer<L, R2> {
        PolicyLayer {
            locks: self.locks,
            selector: self.selector,
            protocol: Http::new(on_reject),
        }
    }
}

impl<S, L: Clone, R: Clone> Layer<S> for PolicyLayer<L, R> {
    type Service = Lock<S, L, Http<R>>;

    fn layer(&self, inner: S) -> Self::Service {
        Lock::new(
            inner,
            self.locks.clone(),
            self.selector.clone(),
            self.protocol.clone(),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(set: impl Fn(LockLayer<()>) -> LockLayer<()>) -> LockSpec {
        set(LockLayer::with_key(LockClient::in_memory(), ()))
            .selector
            .policy
            .spec()
            .clone()
    }

    #[test]
    fn a_request_waits_two_seconds_where_nothing_else_is_said() {
        let seconds = Duration::from_secs;
        assert_eq!(spec(|layer| layer), LockSpec::exclusive().wait(seconds(2)));
        assert_eq!(spec(LockLayer::shared), LockSpec::shared().wait(seconds(2)));
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
            spec(|layer| layer
                .wait(seconds(5))
                .spec(lease.clone())
                .shared()
                .no_wait()),
            lease.clone().no_wait()
        );
    }
}
