//! A task that uses a client at random.

use std::{
    future::{Future, poll_fn},
    num::NonZeroU32,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker},
    time::Duration,
};

use tokio::time::{sleep, timeout};

use super::{
    super::dice::Dice,
    world::{Asked, KEYS, LONGEST_LEASE, Recorded, World, Wrong, key},
};
use crate::{
    LockClient, LockError, LockErrorKind, LockGuard, LockRequest, LockSpec, request::spec::Mode,
    shell::time::Instant,
};

const PERMITS: NonZeroU32 = NonZeroU32::new(2).unwrap();
/// The wait of a request that is served before its wait ends, if it is not forgotten.
const LONG: Duration = Duration::from_secs(60);

pub(super) struct Task {
    pub(super) world: Arc<World>,
    pub(super) client: LockClient,
    /// The number of the client.
    pub(super) number: usize,
    pub(super) dice: Dice,
    /// The number of keys.
    pub(super) keys: usize,
    /// Whether the clients are shut down while they are in use.
    pub(super) shuts_down: bool,
}

/// How a future ends.
enum End {
    Awaited,
    /// Dropped after this number of polls.
    Polled(usize),
    /// Dropped when it is woken for this time.
    Woken(usize),
    /// Dropped after this time.
    Timed(Duration),
    /// Polled first by another task, which is gone then.
    Moved,
}

impl Task {
    pub(super) async fn run(mut self) {
        for _ in 0..1 + self.dice.below(5) {
            let pause = self.dice.up_to(Duration::from_millis(800));
            sleep(pause).await;
            if self.shuts_down && self.dice.chance(60) {
                self.shut_down().await;
            } else if self.dice.chance(30) {
                let key = self.dice.one_of(&KEYS[..self.keys]);
                let _ = self.client.revoke(key).await;
            } else {
                self.operate().await;
            }
        }
    }

    async fn shut_down(&mut self) {
        let began = self.world.closes(self.number);
        self.client.shutdown().await;
        self.world.closed(self.number, began);
    }

    fn end(&mut self) -> End {
        match self.dice.below(10) {
            0 => End::Polled(1 + self.dice.below(3)),
            1 => End::Woken(1 + self.dice.below(3)),
            2 => End::Timed(self.dice.up_to(Duration::from_millis(1_500))),
            3 | 4 => End::Moved,
            _ => End::Awaited,
        }
    }

    /// One request, and what is done under its lock.
    async fn operate(&mut self) {
        let Some((request, asked, wait, keys)) = self.request() else {
            return;
        };
        let waiting = self.world.waits(self.number, &keys, wait);
        let end = self.end();
        let acquired = ended(request.acquire(), end).await;
        let Some(acquired) = acquired else { return };
        let guard = match acquired {
            Ok(guard) => guard,
            Err(error) => return self.refused(&error, wait, &keys),
        };
        let (number, view) = (self.number, guard.held());
        self.world
            .note(|| format!("client {number} holds {keys:?}"));
        let held = self.world.holds(number, view, asked, false);
        drop(waiting);
        self.use_guard(guard, held, asked, wait, &keys).await;
    }

    /// A request at random, with its wait and its keys.
    fn request(&mut self) -> Option<(LockRequest, Asked, Duration, Vec<crate::LockKey>)> {
        let (dice, client) = (&mut self.dice, &self.client);
        let name = dice.one_of(&KEYS[..self.keys]);
        let several = self.keys > 1 && dice.chance(150);
        let keys = match several {
            true => KEYS[..self.keys].iter().map(|name| key(name)).collect(),
            false => vec![key(name)],
        };
        let mode = match (several, dice.below(10)) {
            (false, 0..2) => Mode::Shared,
            (false, 2..4) => Mode::Permits(PERMITS),
            _ => Mode::Exclusive,
        };
        let lease = dice.one_of(&[300, 300, 1_000, 3_000]);
        let lease = Duration::from_millis(lease);
        let wait = dice.one_of(&[Duration::ZERO, Duration::from_millis(700), LONG, LONG]);
        let mut spec = match mode {
            Mode::Shared => LockSpec::shared(),
            Mode::Permits(permits) => LockSpec::permits(permits),
            Mode::Exclusive => LockSpec::exclusive(),
        };
        spec = spec.lease(lease);
        spec = match wait.is_zero() {
            true => spec.no_wait(),
            false => spec.wait(wait),
        };
        let max_hold = dice.chance(100).then(|| lease * 2);
        if let Some(max_hold) = max_hold {
            spec = spec.max_hold(max_hold);
        }
        if dice.chance(100) {
            spec = spec.min_hold(Duration::from_millis(200));
        }
        let is_renewed = !dice.chance(80);
        if !is_renewed {
            spec = spec.no_renew();
        }
        if dice.chance(200) {
            spec = spec.strict_order();
        }
        let request = match several {
            true => client.request_all(keys.clone(), spec),
            false => client.request(name, spec),
        };
        let asked = Asked {
            mode,
            lease,
            max_hold,
            is_renewed,
            since: Instant::now(),
        };
        Some((request, asked, wait, keys))
    }

    /// Checks the error of a request.
    fn refused(&self, error: &LockError, wait: Duration, keys: &[crate::LockKey]) {
        let is_expected = match error.kind() {
            LockErrorKind::Contended => wait.is_zero(),
            LockErrorKind::WaitTimeout => true,
            LockErrorKind::ShuttingDown => self.world.is_closed(self.number),
            // One of several keys, while the request waits for the others.
            LockErrorKind::Lost(_) => keys.len() > 1,
            LockErrorKind::Unavailable => self.world.excused(self.number),
            _ => false,
        };
        if !is_expected {
            let what = || format!("client {}: {keys:?}: {error}", self.number);
            self.world.report(Wrong::Refusal, what);
        }
    }

    async fn use_guard(
        &mut self,
        mut guard: LockGuard,
        mut held: Recorded,
        mut asked: Asked,
        wait: Duration,
        keys: &[crate::LockKey],
    ) {
        for _ in 0..self.dice.below(3) {
            match self.dice.below(8) {
                0 => {
                    let lease = self.dice.up_to(LONGEST_LEASE).max(LockSpec::MIN_LEASE);
                    let end = self.end();
                    if let Some(Err(error)) = ended(Box::pin(guard.extend(lease)), end).await {
                        self.failed(&held, &error);
                    }
                }
                1 => {
                    if let Err(error) = guard.verify().await {
                        self.failed(&held, &error);
                    }
                }
                2 if asked.mode == Mode::Exclusive && keys.len() == 1 => {
                    drop(held);
                    let end = self.end();
                    let Some(Ok(reader)) = ended(Box::pin(guard.downgrade()), end).await else {
                        return;
                    };
                    guard = reader;
                    asked.mode = Mode::Shared;
                    held = self.world.holds(self.number, guard.held(), asked, false);
                }
                3 if asked.mode != Mode::Permits(PERMITS) && keys.len() == 1 => {
                    self.reenter(&guard, asked, wait, &keys[0]).await;
                }
                _ => {
                    let time = self.dice.up_to(Duration::from_millis(1_500));
                    self.world.listens(&held, true);
                    tokio::select! {
                        biased;
                        error = guard.lost() => self.world.lost(&held, &error),
                        () = sleep(time) => {}
                    }
                    self.world.listens(&held, false);
                }
            }
        }
        self.leave(guard, held).await;
    }

    /// Enters a lock again, and leaves it in one of the orders.
    async fn reenter(
        &mut self,
        guard: &LockGuard,
        asked: Asked,
        _wait: Duration,
        key: &crate::LockKey,
    ) {
        let spec = match asked.mode {
            Mode::Shared => LockSpec::shared(),
            _ => LockSpec::exclusive(),
        };
        let request = self
            .client
            .request(key.clone(), spec.reentrant().wait(LONG));
        let Ok(inner) = guard.scope(request.acquire()).await else {
            return;
        };
        let held = self.world.holds(self.number, inner.held(), asked, true);
        sleep(self.dice.up_to(Duration::from_millis(200))).await;
        drop(held);
        if self.dice.chance(500) {
            drop(inner);
        } else {
            let _ = inner.release().await;
        }
    }

    /// Gives a guard up, in any of the ways.
    async fn leave(&mut self, guard: LockGuard, held: Recorded) {
        match self.dice.below(4) {
            0 => {
                drop(held);
                drop(guard);
                if self.shuts_down && self.dice.chance(200) {
                    self.shut_down().await;
                }
            }
            1 => {
                let body = sleep(self.dice.up_to(Duration::from_millis(1_500)));
                let most = self.dice.up_to(Duration::from_millis(2_500));
                self.world.listens(&held, true);
                self.world.leaves(&held);
                let work = Box::pin(guard.while_held(body));
                let outcome = match timeout(most, work).await {
                    Ok(outcome) => outcome,
                    Err(_) => return,
                };
                match outcome {
                    Ok(((), guard)) => {
                        drop(held);
                        drop(guard);
                    }
                    Err(error) => self.world.lost(&held, &error),
                }
            }
            _ => {
                let end = self.end();
                self.world.leaves(&held);
                let release = guard.release();
                let view_is_checked = matches!(end, End::Awaited);
                let released = ended(Box::pin(release), end).await;
                if let (Some(Err(error)), true) = (released, view_is_checked) {
                    self.failed(&held, &error);
                }
            }
        }
    }

    /// Checks the error of a call for a guard.
    fn failed(&self, held: &Recorded, error: &LockError) {
        match error.kind() {
            LockErrorKind::Lost(_) => self.world.lost(held, error),
            LockErrorKind::Unavailable | LockErrorKind::ReleaseUnknown
                if self.world.excused(self.number) => {}
            _ => {
                let what = || format!("client {}: {error}", self.number);
                self.world.report(Wrong::Refusal, what);
            }
        }
    }
}

/// Returns the output of a future, unless it ends before.
async fn ended<T>(future: impl Future<Output = T>, end: End) -> Option<T> {
    let mut future = Box::pin(future);
    match end {
        End::Awaited => Some(future.await),
        End::Timed(time) => timeout(time, future).await.ok(),
        End::Moved => {
            let first = (future.as_mut()).poll(&mut Context::from_waker(Waker::noop()));
            if let Poll::Ready(output) = first {
                return Some(output);
            }
            Some(future.await)
        }
        End::Polled(most) => few_polls(future, most, false).await,
        End::Woken(most) => few_polls(future, most, true).await,
    }
}

async fn few_polls<T>(
    mut future: Pin<Box<impl Future<Output = T>>>,
    most: usize,
    woken: bool,
) -> Option<T> {
    let mut polls = 0;
    poll_fn(|cx| {
        if woken && polls == most {
            return Poll::Ready(None);
        }
        polls += 1;
        match future.as_mut().poll(cx) {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            Poll::Pending if !woken && polls == most => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}
