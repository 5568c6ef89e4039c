//! [`PolicyLayer`]: the layer for a policy file.

use lock_runtime::LockClient;
use tower_layer::Layer;

use super::LockPolicies;
use crate::{
    layer::LockLayer,
    protocol::Http,
    reject::{OnReject, StandardReject},
    service::Lock,
};

/// Layer that applies the [`Lock`] middleware with the policies of [`LockPolicies`].
///
/// It has no setters for locks: write settings for all routes in `[defaults]`.
#[derive(Clone, Debug)]
#[must_use = "a layer does nothing until it is put on a service"]
pub struct PolicyLayer<R = StandardReject> {
    layer: LockLayer<LockPolicies, Http<R>>,
}

impl PolicyLayer {
    /// Creates a new [`PolicyLayer`]. Each request is served under the policy of its route, which
    /// [`LockPolicies::reload`] can replace at any time.
    pub fn new(locks: LockClient, policies: LockPolicies) -> Self {
        Self {
            layer: LockLayer::with_key(locks, policies),
        }
    }
}

impl<R> PolicyLayer<R> {
    /// See [`LockLayer::on_reject`]. [`Refusal::policy`](crate::Refusal::policy) returns the
    /// policy under which a request was refused.
    pub fn on_reject<R2: OnReject>(self, on_reject: R2) -> PolicyLayer<R2> {
        PolicyLayer {
            layer: self.layer.on_reject(on_reject),
        }
    }
}

impl<S, R: Clone> Layer<S> for PolicyLayer<R> {
    type Service = Lock<S, LockPolicies, Http<R>>;

    fn layer(&self, inner: S) -> Self::Service {
        self.layer.layer(inner)
    }
}
