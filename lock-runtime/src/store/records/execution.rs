//! The calls that operations on records make.

use std::{
    mem::take,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use futures_util::{FutureExt as _, StreamExt as _, stream::FuturesUnordered};
use tokio::{
    task::JoinSet,
    time::{sleep, timeout},
};

use super::{
    Caller, Change, Decide, Record, RecordName, Swap, SwapReply, Swapped,
    adapter::Shared,
    news,
    step::{
        attempt::{Attempt, Next, Pending},
        clock::Now,
        evaluation::Lock,
        outcome::Outcome,
    },
};
use crate::{
    shell::keeper,
    shell::sync::lock,
    shell::time::{Instant, timeout_at},
    store::{StoreError, StoreErrorKind, StoreEvent, Token},
};

/// Operations in progress, each with its place among the results.
type Open<T> = Vec<(usize, Attempt<T>)>;
type Results<T> = Vec<Option<Result<T, StoreError>>>;

/// The time for which an operation on a contended record waits for the earlier ones.
const TURN: Duration = Duration::from_millis(250);
/// The time after which a swap counts as one during an outage.
const OUTAGE: Duration = Duration::from_millis(100);
/// The time for which the replies of a batch wait for the last ones.
const STRAGGLERS: Duration = Duration::from_millis(200);

fn busy() -> StoreError {
    let message = "other clients are changing the lock";
    StoreError::new(StoreErrorKind::Unavailable, message)
}

/// The result of an operation on records that were locked for it.
enum Updated<T> {
    Ended(Result<T, StoreError>),
    /// The database cannot lock records.
    Unsupported(Box<Attempt<T>>),
}

/// The choice that was made while records were locked.
struct Decided<T> {
    next: Result<Next<T>, StoreError>,
    /// The events of its swap for clients of this store.
    events: Vec<StoreEvent>,
}

impl Shared {
    pub(super) fn now(&self) -> Option<Now> {
        let reading = self.clock.reading()?;
        Some(reading.at(Instant::now()))
    }

    pub(super) async fn read(
        self: &Arc<Self>,
        names: &[RecordName],
    ) -> Result<Vec<Option<Record>>, StoreError> {
        let asked = self.presence.asked();
        let reply = self.records.read(names).await;
        self.replied(&reply);
        let (reply, sent) = (reply?, asked.sent);
        self.clock.read(reply.now, reply.latest, sent);
        for (name, record) in names.iter().zip(&reply.records) {
            self.cache.put(name, record.clone());
        }
        Ok(reply.records)
    }

    pub(super) async fn swap(self: &Arc<Self>, swap: &Swap) -> Result<SwapReply, StoreError> {
        let asked = self.presence.asked();
        let reply = self.records.swap(swap).await;
        self.replied(&reply);
        let (reply, sent) = (reply?, asked.sent);
        self.measure(sent);
        self.swapped(swap, &reply, sent);
        Ok(reply)
    }

    async fn swap_each(self: &Arc<Self>, swaps: &[Swap]) -> Vec<Result<SwapReply, StoreError>> {
        if let [swap] = swaps {
            return vec![self.swap(swap).await];
        }
        let asked = self.presence.asked();
        let sent = asked.sent;
        let replies = self.records.swap_each(swaps).await;
        if replies.iter().any(Result::is_ok) {
            self.measure(sent);
        }
        for (swap, reply) in swaps.iter().zip(&replies) {
            self.replied(reply);
            if let Ok(reply) = reply {
                self.swapped(swap, reply, sent);
            }
        }
        replies
    }

    /// Returns the usual time of a swap.
    fn round_trip(&self) -> Duration {
        Duration::from_micros(self.round_trip.load(Ordering::Relaxed))
    }

    /// Measures a swap that was sent then, and whose reply has arrived now. One during an outage
    /// says nothing about the next ones.
    fn measure(&self, sent: Instant) {
        let micros = sent.elapsed().min(OUTAGE).as_micros() as u64;
        let usual = self.round_trip.load(Ordering::Relaxed);
        let usual = match usual {
            0 => micros,
            usual => (usual * 7 + micros) / 8,
        };
        self.round_trip.store(usual, Ordering::Relaxed);
    }

    fn swapped(&self, swap: &Swap, reply: &SwapReply, sent: Instant) {
        self.clock.read(reply.now, reply.latest, sent);
        match &reply.outcome {
            Swapped::Done => {
                for Change { name, record, .. } in &swap.changes {
                    self.cache.put_own(name, record.clone());
                }
            }
            Swapped::Conflict(present) => {
                for (change, record) in swap.changes.iter().zip(present) {
                    self.cache.set_contended(&change.name, true);
                    self.cache.put(&change.name, record.clone());
                }
            }
            Swapped::Early | Swapped::Guarded => {}
        }
    }

    /// Executes one operation.
    pub(super) async fn execute<T: Outcome>(
        self: Arc<Self>,
        attempt: Attempt<T>,
    ) -> Result<T, StoreError> {
        let mut replies = self.execute_each(vec![attempt]).await;
        replies.pop().unwrap_or_else(|| Err(StoreError::no_reply()))
    }

    /// Executes operations on different locks, in shared calls.
    ///
    /// In a task of its own, which ends with this future: an operation takes several calls, and
    /// its progress must not depend on how often the caller polls it.
    pub(super) async fn execute_each<T: Outcome>(
        self: &Arc<Self>,
        attempts: Vec<Attempt<T>>,
    ) -> Vec<Result<T, StoreError>> {
        let number = attempts.len();
        let _unanswered = self.unanswered();
        let mut task = JoinSet::new();
        task.spawn(self.clone().advance_all(attempts));
        match task.join_next().await {
            Some(Ok(results)) => results,
            _ => (0..number)
                .map(|_| Err(StoreError::interrupted()))
                .collect(),
        }
    }

    /// Executes an operation in a transaction of the application, with which it takes effect. The
    /// messages to other clients are sent with it, and clients of this store are not notified.
    #[cfg(feature = "postgres")]
    pub(super) async fn execute_in<T: Outcome>(
        self: &Arc<Self>,
        mut attempt: Attempt<T>,
        transaction: &tokio_postgres::Transaction<'_>,
    ) -> Result<T, StoreError> {
        /// A row that the transaction has not locked may change again.
        const ATTEMPTS: usize = 100;
        for _ in 0..ATTEMPTS {
            match attempt.next(self.now())? {
                Next::Done(outcome, _) => return Ok(outcome),
                Next::Read => {
                    let records = self.read(&attempt.names()).await?;
                    attempt.was_read(records);
                }
                Next::Swap(mut pending) => {
                    let _local = self.address(&mut pending);
                    let reply = self.records.swap_in(&pending.swap, transaction).await?;
                    if let Some(outcome) = attempt.was_swapped(*pending, reply) {
                        return Ok(outcome);
                    }
                }
            }
        }
        Err(busy())
    }

    async fn advance_all<T: Outcome>(
        self: Arc<Self>,
        attempts: Vec<Attempt<T>>,
    ) -> Vec<Result<T, StoreError>> {
        let mut results: Results<T> = attempts.iter().map(|_| None).collect();
        let mut open = Open::new();
        for (index, attempt) in attempts.into_iter().enumerate() {
            match self.admits(attempt.in_outage) {
                Ok(()) => open.push((index, attempt)),
                Err(refused) => results[index] = Some(Err(refused)),
            }
        }
        let (mut turn, mut begins) = (None, true);
        while !open.is_empty() {
            if let [(_, attempt)] = &mut open[..] {
                // The keeper acts while the runtimes of the others may be blocked.
                if turn.is_none()
                    && !keeper::is_here()
                    && let Some(kind) = attempt.in_turn()
                {
                    // The earlier ones may be on a runtime that stands still.
                    turn = Some(timeout(TURN, self.turns.wait(kind)).await.ok());
                    attempt.begin_again(&self.cache);
                    begins = true;
                }
                if take(&mut begins)
                    && !self.locks_records
                    && let Some(pause) =
                        attempt.makes_way(&self.cache, self.round_trip(), self.now())
                    && !pause.is_zero()
                {
                    sleep(pause).await;
                }
            }
            open = self.go_on(open, &mut results).await;
        }
        let results = results.into_iter();
        results
            .map(|result| result.unwrap_or_else(|| Err(busy())))
            .collect()
    }

    /// Makes the next call of all operations. Returns those that have not ended.
    async fn go_on<T: Outcome>(
        self: &Arc<Self>,
        open: Open<T>,
        results: &mut Results<T>,
    ) -> Open<T> {
        let (contended, others): (Open<T>, Open<T>) =
            open.into_iter().partition(|(_, it)| it.locks_records());
        // Ends with the operation.
        let caller = Arc::new(());
        let updates = contended.into_iter().map(|(index, attempt)| {
            // It is not dropped with the operation: while the records are locked, others wait.
            let caller = Caller(Arc::downgrade(&caller));
            let update = tokio::spawn(self.clone().update(attempt, caller));
            async move { (index, update.await) }
        });
        let mut updates: FuturesUnordered<_> = updates.collect();
        let now = self.now();
        let (mut reads, mut swaps) = (Vec::new(), Vec::new());
        for (index, mut attempt) in others {
            match attempt.next(now) {
                Ok(Next::Done(outcome, revoked)) => {
                    self.revoked(&revoked);
                    results[index] = Some(Ok(outcome));
                }
                Ok(Next::Read) => reads.push((index, attempt)),
                Ok(Next::Swap(pending)) => swaps.push((index, attempt, *pending)),
                Err(error) => results[index] = Some(Err(error)),
            }
        }
        let mut open = Vec::new();
        if !reads.is_empty() {
            self.read_for(reads, results, &mut open).await;
        }
        if !swaps.is_empty() {
            self.swap_for(swaps, results, &mut open).await;
        }
        // The replies of a batch do not wait long for locks that other clients are changing.
        let is_batch = results.len() > 1;
        let until = is_batch.then(|| Instant::now() + STRAGGLERS);
        loop {
            let next = match until {
                Some(until) => timeout_at(until, updates.next()).await.unwrap_or(None),
                None => updates.next().await,
            };
            let Some((index, updated)) = next else {
                break;
            };
            match updated {
                Ok(Updated::Ended(result)) => results[index] = Some(result),
                Ok(Updated::Unsupported(attempt)) => open.push((index, attempt.without_locks())),
                Err(_) => results[index] = Some(Err(StoreError::interrupted())),
            }
        }
        open
    }

    async fn read_for<T: Outcome>(
        self: &Arc<Self>,
        reads: Open<T>,
        results: &mut Results<T>,
        open: &mut Open<T>,
    ) {
        let names: Vec<_> = reads
            .iter()
            .flat_map(|(_, attempt)| attempt.names())
            .collect();
        match self.read(&names).await {
            Ok(records) => {
                let mut records = records.into_iter();
                for (index, mut attempt) in reads {
                    let own = records.by_ref().take(attempt.locks.len()).collect();
                    attempt.was_read(own);
                    open.push((index, attempt));
                }
            }
            Err(error) => {
                for (index, _) in reads {
                    results[index] = Some(Err(error.clone()));
                }
            }
        }
    }

    async fn swap_for<T: Outcome>(
        self: &Arc<Self>,
        mut attempts: Vec<(usize, Attempt<T>, Pending<T>)>,
        results: &mut Results<T>,
        open: &mut Open<T>,
    ) {
        for (_, attempt, pending) in &attempts {
            self.expect_messages(attempt, pending);
        }
        let address = |(_, _, pending): &mut (_, _, Pending<T>)| self.address(pending);
        let local: Vec<_> = attempts.iter_mut().map(address).collect();
        let swaps: Vec<_> = attempts
            .iter()
            .map(|(_, _, pending)| pending.swap.clone())
            .collect();
        let replies = self.swap_each(&swaps).await;
        for (((index, mut attempt, pending), reply), local) in
            attempts.into_iter().zip(replies).zip(local)
        {
            match reply {
                Ok(reply) => match self.took_effect(&mut attempt, pending, reply, local) {
                    Some(outcome) => results[index] = Some(Ok(outcome)),
                    None => open.push((index, attempt)),
                },
                Err(error) => results[index] = Some(Err(error)),
            }
        }
    }

    /// Prepares for messages to a client that is about to wait, or to hold a lock for which others
    /// may have to wait while it is idle. If that takes a while, its waiters
    /// poll afterwards, as a message may have been missed.
    fn expect_messages<T: Outcome>(self: &Arc<Self>, attempt: &Attempt<T>, pending: &Pending<T>) {
        let retains = || attempt.caller.is_some_and(Token::retains);
        let Some(client) = attempt.waiter().filter(|_| pending.is_queued || retains()) else {
            return;
        };
        if self
            .records
            .expect_messages(client)
            .now_or_never()
            .is_some()
        {
            return;
        }
        let (shared, locks) = (self.clone(), attempt.locks.clone());
        tokio::spawn(async move {
            shared.records.expect_messages(client).await;
            for Lock { key, kind, .. } in locks {
                let ttl = Duration::ZERO;
                shared
                    .listeners
                    .notify(&StoreEvent::FreeIn { key, kind, ttl });
            }
        });
    }

    /// Returns the outcome of an operation and sends its events, if its swap took effect.
    fn took_effect<T: Outcome>(
        &self,
        attempt: &mut Attempt<T>,
        pending: Pending<T>,
        reply: SwapReply,
        events: Vec<StoreEvent>,
    ) -> Option<T> {
        let passed = pending.passed(&reply);
        self.revoked(&pending.revoked);
        let outcome = attempt.was_swapped(pending, reply)?;
        for mut event in events {
            match &mut event {
                StoreEvent::Granted { grant, .. } => grant.shorten(passed),
                StoreEvent::FreeIn { ttl, .. } => ttl.shorten(passed.for_others()),
                _ => {}
            }
            self.listeners.notify(&event);
        }
        Some(outcome)
    }

    /// Notifies the clients of this store that were revoked, in case that no message has. Before
    /// the reply, which they would take for the end of a lease.
    fn revoked(&self, tokens: &[Token]) {
        for token in tokens {
            let is_own = lock(&self.clients).get(&token.client()).is_some();
            if is_own {
                let event = StoreEvent::Revoked { token: *token };
                self.listeners.notify(&event);
            }
        }
    }

    /// Completes a swap: turns the events for other clients into messages. Returns those for
    /// clients of this store.
    fn address<T>(&self, pending: &mut Pending<T>) -> Vec<StoreEvent> {
        let mut clients = lock(&self.clients);
        let mut local = Vec::new();
        let Swap {
            changes, messages, ..
        } = &mut pending.swap;
        let shorter = self.kept_shorter_by();
        for change in changes.iter_mut() {
            change.needed_until = change.needed_until.earlier(shorter);
        }
        for caused in pending.events.drain(..) {
            if clients.get(&caused.client).is_some() {
                local.push(caused.event);
            } else if let Some(change) = changes.iter().find(|it| it.name == caused.record) {
                let (client, event) = (caused.client, &caused.event);
                let shows_record = self.trusts_messages;
                let now = pending.now;
                messages.extend(news::message(client, event, change, now, shows_record));
            }
        }
        local
    }

    /// Executes an operation while the database locks its records.
    ///
    /// Changes nothing once its `caller` has ended, which may abandon the operation by then.
    async fn update<T: Outcome>(
        self: Arc<Self>,
        mut attempt: Attempt<T>,
        caller: Caller,
    ) -> Updated<T> {
        let names = attempt.names();
        loop {
            let mut decided = None;
            let asked = self.presence.asked();
            let sent = asked.sent;
            let decide = Decide::new(caller.clone(), |reply| {
                if !caller.is_waiting() {
                    return None;
                }
                self.clock.read(reply.now, reply.latest, sent);
                let is_contended = !attempt.has_found(&reply.records);
                for name in &names {
                    self.cache.set_contended(name, is_contended);
                }
                attempt.was_read(reply.records);
                let mut next = attempt.next(self.now());
                let (swap, events) = match &mut next {
                    Ok(Next::Swap(pending)) => {
                        self.expect_messages(&attempt, pending);
                        let events = self.address(pending);
                        (Some(pending.swap.clone()), events)
                    }
                    _ => (None, Vec::new()),
                };
                decided = Some(Decided { next, events });
                swap
            });
            let Some(call) = self.records.update(&names, decide) else {
                return Updated::Unsupported(Box::new(attempt));
            };
            let reply = call.await;
            // No call is made for a caller that has ended.
            if caller.is_waiting() {
                self.replied(&reply);
            }
            drop(asked);
            let reply = match reply {
                Ok(reply) => reply,
                Err(error) => return Updated::Ended(Err(error)),
            };
            let Some(Decided { next, events }) = decided else {
                return Updated::Ended(Err(StoreError::no_reply()));
            };
            let pending = match next {
                Ok(Next::Swap(pending)) => *pending,
                Ok(Next::Done(outcome, revoked)) => {
                    self.revoked(&revoked);
                    return Updated::Ended(Ok(outcome));
                }
                Ok(Next::Read) => return Updated::Ended(Err(StoreError::no_reply())),
                Err(error) => return Updated::Ended(Err(error)),
            };
            let Some(reply) = reply else {
                return Updated::Ended(Err(StoreError::no_reply()));
            };
            self.swapped(&pending.swap, &reply, sent);
            if let Some(outcome) = self.took_effect(&mut attempt, pending, reply, events) {
                return Updated::Ended(Ok(outcome));
            }
        }
    }
}
