//! The calls that a [`MajoritySession`] returns, and the tasks that make them.

use std::{
    pin::pin,
    slice::from_ref,
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use futures_util::{
    FutureExt as _, StreamExt as _,
    future::{BoxFuture, join_all},
    stream::FuturesUnordered,
};
use tokio::{runtime::Handle, sync::oneshot, time::timeout};

use super::Inner;
use crate::{
    protocol::majority::{
        LONGEST_CALL, MajorityCx, MajoritySession, Output, Progress, Reply, RequestId, Send,
        ServerRequest,
    },
    shell::call::{only, within},
    shell::sync::OnDrop,
    shell::sync::lock,
    shell::time::{Instant, sleep_until, timeout_at},
    store::{QuorumMember, StoreError},
};

/// Calls in progress.
type InFlight = FuturesUnordered<BoxFuture<'static, ()>>;

/// A request in progress with its calls. If it is dropped, the calls complete in the background,
/// because their replies show the state of the servers.
struct Running {
    inner: Arc<Inner>,
    id: RequestId,
    calls: InFlight,
    is_over: bool,
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.is_over {
            lock(&self.inner.session).cancel(self.id, Instant::now());
        }
        self.inner.finish(std::mem::take(&mut self.calls));
    }
}

impl Inner {
    /// Counts a task with calls in the background, until the guard is dropped.
    fn count_task(self: &Arc<Self>) -> OnDrop<impl FnOnce() + use<>> {
        self.busy.send_modify(|busy| *busy += 1);
        let inner = self.clone();
        OnDrop::new(move || inner.busy.send_modify(|busy| *busy -= 1))
    }

    /// Waits until no background call is in progress. Does not wait for retries to unresponsive
    /// servers.
    pub(super) async fn settled(&self) {
        let mut busy = self.busy.subscribe();
        // The sender is not dropped meanwhile.
        let _ = busy.wait_for(|busy| *busy == 0).await;
    }

    /// Visits the session. No call is made while it is locked.
    fn visit<T>(
        &self,
        visit: impl FnOnce(&mut MajoritySession, &mut MajorityCx<'_>) -> T,
    ) -> (T, Output) {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let micros = since.map_or(0, |since| since.as_micros() as u64);
        let mut fraction = rand::random::<f64>;
        let mut cx = MajorityCx::new(Instant::now(), micros, &mut fraction);
        let result = visit(&mut lock(&self.session), &mut cx);
        (result, cx.out)
    }

    /// Runs a request in the task of its caller.
    pub(super) async fn run(
        self: &Arc<Self>,
        begin: impl FnOnce(&mut MajoritySession, &mut MajorityCx<'_>) -> RequestId,
    ) -> Result<Reply, StoreError> {
        let begin_and_step = |session: &mut MajoritySession, cx: &mut MajorityCx<'_>| {
            let id = begin(session, cx);
            (id, session.step(id, cx))
        };
        let ((id, step), out) = self.visit(begin_and_step);
        self.advance(id, step, out, None).await
    }

    /// Makes the calls of a request until it is over. If it runs in the background, `first` is
    /// notified after its first call.
    async fn advance(
        self: &Arc<Self>,
        id: RequestId,
        mut step: Progress,
        mut out: Output,
        mut first: Option<oneshot::Sender<()>>,
    ) -> Result<Reply, StoreError> {
        let mut running = Running {
            inner: self.clone(),
            id,
            calls: InFlight::new(),
            is_over: false,
        };
        let is_background = first.is_some();
        // One timer for all replies: a timer for each would be registered and removed again.
        let mut alarm = pin!(sleep_until(Instant::now()));
        loop {
            let (sends, ended) = self.begin_background(out);
            let calls = sends.into_iter().map(|send| self.call(send));
            running.calls.extend(calls);
            let until = match step {
                Progress::Wait(until) => until,
                Progress::Done(reply, until) => {
                    running.is_over = true;
                    if let Some(until) = until {
                        let _ = timeout_at(until, join_all(ended)).await;
                    }
                    return reply;
                }
            };
            let until = until.map(Instant::for_timer);
            if let Some(until) = until.filter(|until| *until != alarm.deadline()) {
                alarm.as_mut().reset(until);
            }
            let busy = (is_background && !running.calls.is_empty()).then(|| self.count_task());
            tokio::select! {
                biased;
                Some(()) = replied(&mut running.calls) => {
                    // The receiver may have been dropped.
                    let _ = first.take().map(|first| first.send(()));
                }
                () = &mut alarm, if until.is_some() => {}
                else => return Err(StoreError::no_reply()),
            }
            drop(busy);
            (step, out) = self.visit(|session, cx| session.step(id, cx));
        }
    }

    /// Begins the background part of the output of a visit. Returns the calls to make in this task,
    /// and for each end of an alias the end of its first call.
    fn begin_background(self: &Arc<Self>, out: Output) -> (Vec<Send>, Vec<oneshot::Receiver<()>>) {
        let ended = out.ends.into_iter().map(|id| self.end(id)).collect();
        let background = out.background.into_iter();
        self.finish(background.map(|send| self.call(send)).collect());
        (out.sends, ended)
    }

    /// Ends an alias in the background. Its first call is sent now, ahead of everything that
    /// the caller sends next, so that no later request of the caller meets the alias.
    fn end(self: &Arc<Self>, id: RequestId) -> oneshot::Receiver<()> {
        let (first, over) = oneshot::channel();
        let inner = self.clone();
        let mut ending = Box::pin(async move {
            let (step, out) = inner.visit(|session, cx| session.step(id, cx));
            let reply = inner.advance(id, step, out, Some(first)).await;
            if let Ok(Reply::NotAbandoned(server, hold, error)) = reply {
                let (key, server) = (hold.key, &inner.names[server]);
                tracing::debug!(key = %key.shown(), %server, %error, "stopped retrying the release of a vote; it expires with its lease");
            }
        });
        if (&mut ending).now_or_never().is_none()
            && let Ok(runtime) = Handle::try_current()
        {
            runtime.spawn(ending);
        }
        over
    }

    /// Completes calls in the background. They begin now: the calls that end the acquisition are
    /// sent after them.
    fn finish(self: &Arc<Self>, mut calls: InFlight) {
        // A future that is dropped outside of a runtime cannot complete its calls.
        let Ok(runtime) = Handle::try_current() else {
            return;
        };
        let _ = replied(&mut calls).now_or_never();
        if !calls.is_empty() {
            let busy = self.count_task();
            runtime.spawn(async move {
                let over = async { while calls.next().await.is_some() {} };
                let _ = timeout(LONGEST_CALL, over).await;
                drop(busy);
            });
        }
    }

    /// Makes one call, and passes the reply to the session.
    fn call(self: &Arc<Self>, send: Send) -> BoxFuture<'static, ()> {
        let inner = self.clone();
        Box::pin(async move {
            let call = perform(&*inner.servers[send.ticket.server], &send.request);
            let reply = match send.timeout {
                Some(limit) => within(limit, call).await,
                None => call.await,
            };
            let ((), out) = inner.visit(|session, cx| session.replied(send.ticket, reply, cx));
            inner.begin_background(out);
        })
    }
}

/// Waits for the next reply. All calls have begun by then, and all replies that are there are
/// taken, before anything is decided: an abandonment that follows from a decision must not overtake
/// a call. `None` without a call.
async fn replied(calls: &mut InFlight) -> Option<()> {
    calls.next().await?;
    while let Some(Some(())) = calls.next().now_or_never() {}
    Some(())
}

/// Sends a request to a server.
pub(super) async fn perform(
    server: &dyn QuorumMember,
    request: &ServerRequest,
) -> Result<Reply, StoreError> {
    Ok(match request {
        ServerRequest::Acquire(request) => Reply::Acquire(server.acquire(request).await?),
        ServerRequest::Poll(hold) => Reply::Poll(only(server.poll(from_ref(hold))).await?),
        ServerRequest::Renew(renewals) => {
            let mut replies = server.renew(renewals).await;
            // A call that failed as a whole says something about the server.
            if replies.iter().all(Result::is_err) {
                replies.pop().transpose()?;
            }
            Reply::Renew(replies)
        }
        ServerRequest::Raise(key, kind, fence) => {
            Reply::Raise(*fence, server.raise(key, *kind, *fence).await?)
        }
        ServerRequest::Release(release) => Reply::Release(server.release(release).await?),
        ServerRequest::Convert(hold) => Reply::Convert(server.convert(hold).await?),
        ServerRequest::Abandon(hold) => server.abandon(hold).await.map(|()| Reply::Abandoned)?,
        ServerRequest::Inspect(key, kind) => Reply::Inspect(server.inspect(key, *kind).await?),
        ServerRequest::Revoke(key, kind, scope) => {
            Reply::Revoke(server.revoke(key, *kind, *scope).await?)
        }
    })
}
