//! [`Lock`]: the middleware that [`LockLayer`] applies.

use std::{
    fmt,
    task::{Context, Poll},
};

use tower_service::Service;

use crate::{
    future::{ResponseFuture, State},
    key::{KeyError, KeyExtractor, KeyTemplate, Target},
    layer::LockLayer,
    protocol::{Http, Protocol},
    watch::Watch,
};

/// Middleware that holds a lock around each request.
///
/// It is always ready. A call acquires the lock, waits until a clone of the inner service is
/// ready, and then calls that clone: a request that waits for its lock uses none of the inner
/// capacity.
#[derive(Clone)]
pub struct Lock<S, K = KeyTemplate, P = Http> {
    inner: S,
    layer: LockLayer<K, P>,
}

impl<S, K, P> Lock<S, K, P> {
    pub(crate) fn new(inner: S, layer: LockLayer<K, P>) -> Self {
        Self { inner, layer }
    }

    inner_service!();
}

impl<S, K, P, Req> Service<Req> for Lock<S, K, P>
where
    S: Service<Req> + Clone,
    K: KeyExtractor<Req>,
    P: Protocol<Req, S::Response, S::Error> + Clone,
{
    type Response = P::Response;
    type Error = P::Error;
    type Future = ResponseFuture<S, Req, P>;

    fn poll_ready(&mut self, _cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, mut req: Req) -> Self::Future {
        let LockLayer {
            locks,
            key,
            policy,
            protocol,
        } = &self.layer;
        let mut policy = policy.clone();
        let mut caller = protocol.caller(&req);
        let target = key.target(&mut req).map(|target| match target {
            Target::Lock(key) => Some(key),
            Target::LockAs(key, chosen) => {
                policy = chosen;
                Some(key)
            }
            Target::Skip => None,
        });
        let target = target.map_err(|error| match error {
            KeyError::Under(chosen, error) => {
                policy = chosen;
                *error
            }
            error => error,
        });
        let mut watch = Watch::new(policy.clone());
        let state = match target {
            Ok(Some(key)) => {
                let mut spec = policy.lock_spec().clone();
                if let Some(patience) = protocol.patience(&req) {
                    let hurried = spec.clone().wait_at_most(patience);
                    caller.hurried = hurried != spec;
                    spec = hurried;
                }
                watch.asks(&key);
                let acquire = locks.request(key, spec).acquire();
                State::acquiring(acquire, self.inner.clone(), req)
            }
            Ok(None) => State::skipped(self.inner.clone(), req),
            Err(error) => State::refused(error),
        };
        ResponseFuture::new(state, protocol.clone(), watch, caller)
    }
}

impl<S: fmt::Debug, K, P: fmt::Debug> fmt::Debug for Lock<S, K, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lock")
            .field("inner", &self.inner)
            .field("layer", &self.layer)
            .finish()
    }
}
