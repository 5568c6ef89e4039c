//! [`PolicyLayer`]: the layer that goes by a policy file.

use lock_runtime::LockClient;
use tower_layer::Layer;

use super::LockPolicies;
use crate::{
    layer::LockLayer,
    protocol::Http,
    reject::{OnReject, StandardReject},
    service::Lock,
};

/// Holds a lock around each request as the [`LockPolicies`] say.
///
/// It has no setters for locks: whatever is to hold for all routes is said in `[defaults]`.
#[derive(Clone, Debug)]
#[must_use = "a layer does nothing until it is put on a service"]
pub struct PolicyLayer<R = StandardReject> {
    layer: LockLayer<LockPolicies, Http<R>>,
}

impl PolicyLayer {
    /// Locks each request as the policy of its route says, now or after a [reload](LockPolicies::reload).
    pub fn new(locks: LockClient, policies: LockPolicies) -> Self {
        Self {
            layer: LockLayer::with_key(locks, policies),
        }
    }
}

impl<R> PolicyLayer<R> {
    /// See [`LockLayer::on_reject`]. [`Refusal::policy`](crate::Refusal::policy) says under which policy a request was
    /// refused.
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
