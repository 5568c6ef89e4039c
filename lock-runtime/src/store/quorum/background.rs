//! Requests that outlive their caller: calls that a majority did not wait for, and
//! abandoned aliases.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures_util::{FutureExt as _, StreamExt as _, future::BoxFuture, stream::FuturesUnordered};
use tokio::{
    runtime::Handle,
    sync::{Notify, oneshot},
    time::{Instant, sleep_until, timeout},
};

use super::{campaign::Left, node::Node};
use crate::{
    acquire::SHORTEST_CALL,
    protocol::{Abandonment, Ending, Progress},
    spec::call_timeout,
    store::{Hold, StoreError},
};

/// The time after which the reply to a background call is no longer awaited.
pub(super) const LONGEST_CALL: Duration = Duration::from_secs(2);
/// Calls in progress.
pub(super) type UnderWay = FuturesUnordered<BoxFuture<'static, ()>>;

#[derive(Debug, Default)]
pub(super) struct Background {
    busy: AtomicUsize,
    idle: Notify,
}

/// A guard that counts a request in progress.
struct Busy(Arc<Background>);

impl Drop for Busy {
    fn drop(&mut self) {
        let Self(background) = self;
        if background.busy.fetch_sub(1, Ordering::AcqRel) == 1 {
            background.idle.notify_waiters();
        }
    }
}

/// An alias that is no longer used, at a server that may know it.
pub(super) struct Unused {
    node: Arc<Node>,
    abandonment: Abandonment,
}

impl Unused {
    /// The alias under which `node` may know an acquisition like `hold` with this lease.
    pub(super) fn new(node: Arc<Node>, left: &Left, hold: &Hold, lease: Duration) -> Self {
        let hold = Hold::new(hold.key.clone(), hold.mode, left.token);
        let (ending, timeout) = (
            Ending::Abandon(hold),
            call_timeout(lease).max(SHORTEST_CALL),
        );
        let now = Instant::now();
        Self {
            node,
            abandonment: Abandonment::new(ending, lease, left.straggler_until, timeout, now),
        }
    }
}

impl Background {
    fn busy(self: &Arc<Self>) -> Busy {
        self.busy.fetch_add(1, Ordering::AcqRel);
        Busy(self.clone())
    }

    /// Waits until no request is in progress. Does not wait for retries to unresponsive servers.
    pub(super) async fn settled(&self) {
        loop {
            let idle = self.idle.notified();
            if self.busy.load(Ordering::Acquire) == 0 {
                return;
            }
            idle.await;
        }
    }

    /// Completes calls in the background.
    pub(super) fn finish(self: &Arc<Self>, mut under_way: UnderWay) {
        // A future that is dropped outside of a runtime cannot complete its calls.
        if let (false, Ok(runtime)) = (under_way.is_empty(), Handle::try_current()) {
            let busy = self.busy();
            runtime.spawn(async move {
                let _ = timeout(LONGEST_CALL, async {
                    while under_way.next().await.is_some() {}
                })
                .await;
                drop(busy);
            });
        }
    }

    /// Abandons an alias: retries until the server has received it or its lease has expired in any
    /// case, and repeats it after the deadline of a delayed acquire. The returned receiver is ready
    /// after the first attempt.
    pub(super) fn give_up(self: &Arc<Self>, unused: Unused) -> oneshot::Receiver<()> {
        let (said_once, said) = oneshot::channel();
        let mut saying = Box::pin(self.clone().say_until_heard(unused, said_once));
        // Starts sending now, ahead of everything that the caller sends next, so that no later
        // request of the caller meets the abandoned alias.
        if (&mut saying).now_or_never().is_none()
            && let Ok(runtime) = Handle::try_current()
        {
            runtime.spawn(saying);
        }
        said
    }

    async fn say_until_heard(self: Arc<Self>, unused: Unused, said_once: oneshot::Sender<()>) {
        let Unused {
            node,
            mut abandonment,
        } = unused;
        let mut said_once = Some(said_once);
        loop {
            let patience = abandonment.call(Instant::now()).timeout;
            let hold = abandonment.hold();
            let busy = self.busy();
            let said = timeout(patience, node.store.abandon(hold)).await;
            drop(busy);
            // The receiver may have been dropped.
            let _ = said_once.take().map(|said_once| said_once.send(()));
            let said = said.unwrap_or_else(|_| Err(StoreError::timed_out(patience)));
            match abandonment.replied(said, rand::random(), Instant::now()) {
                Progress::Next { at, .. } => sleep_until(at).await,
                Progress::Done => return,
                Progress::GaveUp(error) => {
                    let key = &abandonment.hold().key;
                    tracing::debug!(%key, server = %node, %error, "stopped retrying the release of a vote; it expires with its lease");
                    return;
                }
            }
        }
    }
}
