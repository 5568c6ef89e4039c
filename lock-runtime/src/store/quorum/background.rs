//! What is still said to the servers after the caller has its answer: the end of calls that a majority did not wait for, and
//! names that are given up.

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
    time::{Instant, sleep, sleep_until, timeout},
};

use super::{campaign::Left, node::Node};
use crate::{
    acquire::SHORTEST_CALL,
    spec::call_timeout,
    store::{Hold, StoreError},
};

/// Whoever has not answered a call by then is not listened to any more.
pub(super) const LONGEST_CALL: Duration = Duration::from_secs(2);
/// How long giving up a name waits after its first failure; twice as long after each further one, up to the longest.
pub(super) const FIRST_PAUSE: Duration = Duration::from_millis(50);
pub(super) const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Calls under way.
pub(super) type UnderWay = FuturesUnordered<BoxFuture<'static, ()>>;

#[derive(Debug, Default)]
pub(super) struct Background {
    busy: AtomicUsize,
    idle: Notify,
}

/// Something is being said.
struct Busy(Arc<Background>);

impl Drop for Busy {
    fn drop(&mut self) {
        let Self(background) = self;
        if background.busy.fetch_sub(1, Ordering::AcqRel) == 1 {
            background.idle.notify_waiters();
        }
    }
}

/// A name at a server that is not used any more.
pub(super) struct Unused {
    node: Arc<Node>,
    hold: Hold,
    /// The deadline of a request that may still be executed (PROTOCOL 8).
    straggler_until: Option<Instant>,
    /// Whatever it holds ends by then.
    ends: Instant,
    patience: Duration,
}

impl Unused {
    /// A name under which `node` may know an acquisition such as `hold`, with that lease.
    pub(super) fn new(node: Arc<Node>, left: &Left, hold: &Hold, lease: Duration) -> Self {
        Self {
            node,
            hold: Hold::new(hold.key.clone(), hold.mode, left.token),
            straggler_until: left.straggler_until,
            ends: left.straggler_until.unwrap_or_else(Instant::now) + lease,
            patience: call_timeout(lease).max(SHORTEST_CALL),
        }
    }
}

impl Background {
    fn busy(self: &Arc<Self>) -> Busy {
        self.busy.fetch_add(1, Ordering::AcqRel);
        Busy(self.clone())
    }

    /// Waits until nothing is being said; not for servers that did not answer and will be asked again.
    pub(super) async fn settled(&self) {
        loop {
            let idle = self.idle.notified();
            if self.busy.load(Ordering::Acquire) == 0 {
                return;
            }
            idle.await;
        }
    }

    /// Lets calls come to their end.
    pub(super) fn finish(self: &Arc<Self>, mut under_way: UnderWay) {
        // Where a future is dropped outside of a runtime nobody could.
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

    /// Gives a name up: once more after its straggler's deadline, and again and again until the server has heard it or its lease is
    /// over in any case. What is returned is ready when it was said once.
    pub(super) fn give_up(self: &Arc<Self>, unused: Unused) -> oneshot::Receiver<()> {
        let (said_once, said) = oneshot::channel();
        let mut saying = Box::pin(self.clone().say_until_heard(unused, said_once));
        // It is sent before anything that its caller sends next, so that no later request of theirs meets what is given up.
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
            hold,
            straggler_until,
            ends,
            patience,
        } = unused;
        let mut said_once = Some(said_once);
        let mut pause = FIRST_PAUSE;
        loop {
            let sent = Instant::now();
            let busy = self.busy();
            let said = timeout(patience, node.store.abandon(&hold)).await;
            drop(busy);
            // Nobody may wait for it.
            let _ = said_once.take().map(|said_once| said_once.send(()));
            match (
                said.unwrap_or_else(|_| Err(StoreError::timed_out(patience))),
                straggler_until,
            ) {
                (Ok(()), Some(deadline)) if sent <= deadline => {
                    sleep_until(deadline + Duration::from_millis(1)).await
                }
                (Ok(()), _) => return,
                (Err(error), _) if !error.is_transient() || Instant::now() >= ends => {
                    tracing::debug!(key = %hold.key, server = %node, %error, "gave up giving a vote back; its lease ends it");
                    return;
                }
                (Err(_), _) => {
                    sleep(pause.mul_f64(0.5 + 0.5 * rand::random::<f64>())).await;
                    pause = (pause * 2).min(LONGEST_PAUSE);
                }
            }
        }
    }
}
