//! [`Lock`]: the middleware that [`LockLayer`](crate::LockLayer) applies.

use std::{
    fmt,
    task::{Context, Poll},
};

use lock_runtime::{LockClient, LockSpec};
use tower_service::Service;

use crate::{
    future::{ResponseFuture, State},
    key::{KeyTemplate, Target},
    protocol::{Http, Protocol},
    selector::{Keyed, Selector},
    watch::Watch,
};

/// Middleware that holds a lock around each request.
///
/// It is always ready. A call acquires the lock, waits until a clone of the inner service is
/// ready, and then calls that clone: a request that waits for its lock uses none of the inner
/// capacity.
#[derive(Clone)]
pub struct Lock<S, L = Keyed<KeyTemplate>, P = Http> {
    inner: S,
    locks: LockClient,
    selector: L,
    protocol: P,
}

impl<S, L, P> Lock<S, L, P> {
    pub(crate) fn new(inner: S, locks: LockClient, selector: L, protocol: P) -> Self {
        Self {
            inner,
            locks,
            selector,
            protocol,
        }
    }

    inner_service!();
}

impl<S, L, P, Req> Service<Req> for Lock<S, L, P>
where
    S: Service<Req> + Clone,
    L: Selector<Req>,
    P: Protocol<Req, S::Response, S::Error> + Clone,
{
    type Response = P::Response;
    type Error = P::Error;
    type Future = ResponseFuture<S, Req, P>;

    fn poll_ready(&mut self, _cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, mut req: Req) -> Self::Future {
        let Self {
            inner,
            locks,
            selector,
            protocol,
        } = self;
        let mut caller = protocol.caller(&req);
        let (policy, target) = selector.select(&mut req, P::route);
        let mut watch = Watch::new(policy.clone());
        // The options of a request that takes no lock do not matter.
        let spec = match target {
            Ok(Target::Lock(_)) => policy.spec_for(locks),
            _ => Ok(LockSpec::default()),
        };
        let state = match target.and_then(|target| Ok((target, spec?))) {
            Ok((Target::Lock(key), mut spec)) => {
                if let Some(patience) = protocol.patience(&req, caller) {
                    let hurried = spec.clone().wait_at_most(patience);
                    caller.hurried = hurried != spec;
                    spec = hurried;
                }
                watch.asks(&key);
                let acquire = locks
                    .request(key, spec)
                    .name(policy.shared_name())
                    .acquire();
                State::acquiring(acquire, inner.clone(), req)
            }
            Ok((Target::Skip, _)) => State::skipped(inner.clone(), req, true),
            Ok((Target::Unrouted, _)) => State::skipped(inner.clone(), req, false),
            Err(error) => State::refused(error),
        };
        ResponseFuture::new(state, protocol.clone(), watch, caller)
    }
}

impl<S: fmt::Debug, L: fmt::Debug, P: fmt::Debug> fmt::Debug for Lock<S, L, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lock")
            .field("inner", &self.inner)
            .field("locks", &self.locks)
            .field("selector", &self.selector)
            .field("protocol", &self.protocol)
            .finish()
    }
}
