//! The local wait queue of one lock: the requests of this process, in order of arrival. Only its
//! head makes calls to the store.

pub(super) mod entry;
pub(super) mod handoff;

use std::{sync::Arc, time::Duration};

use slotmap::SlotMap;

use self::{
    entry::{Claim, QueueEntry},
    handoff::Handoff,
};
use super::{
    AcquireId, Cx, Effect, Mutation, Session,
    acquire::{Acquisition, Refused},
};
use crate::{
    guard::fence::FencingToken,
    request::key::LockKey,
    request::spec::{LockKind, Mode},
    shell::time::Instant,
    store::{Done, Hold, StoreError, Token},
};

/// The position of a request in the order of arrival at its queue.
pub(super) type Ticket = u64;

/// The reason why the latest acquire attempt was not granted.
#[derive(Clone, Debug, Default)]
pub(crate) enum Refusal {
    /// There was no refusal.
    #[default]
    None,
    /// The lock is held, for the given time if that is known.
    Busy(Option<Duration>),
    /// The store did not reply.
    Unavailable(StoreError),
}

type Waiters = SlotMap<AcquireId, Acquisition>;

/// The waiters for one lock: a list through their acquisitions, so that a waiter leaves without a
/// search and needs no memory of its own.
#[cfg_attr(test, derive(Clone))]
#[derive(Default)]
pub(crate) struct WaitQueue {
    pub(super) head: Option<AcquireId>,
    tail: Option<AcquireId>,
    /// The number of waiters behind the head.
    pub(super) behind: usize,
    next: Ticket,
    /// The result of a lock that was done after this time.
    done: Option<(Instant, Arc<Done>)>,
    /// The entry in the store's wait queue.
    pub(super) entry: Option<QueueEntry>,
    /// A hand-off that the head has not taken yet.
    pub(super) handoff: Option<Handoff>,
    /// Until when the holder in this process may hand off the lock, so that the head need
    /// not call the store.
    pub(super) handoff_until: Option<Instant>,
    /// The last admitted reader, and the first ticket of the next reader group.
    group: Option<(Token, Ticket)>,
    /// When to call the store at the latest, because of an announcement or a broken connection
    /// since the latest request was sent.
    ask_by: Option<Instant>,
    /// Whether there was a release in this process since the latest request was sent.
    released: bool,
    /// The store refused the head or did not reply, or the head holds the lock exclusively: a
    /// request that does not wait needs no call of its own.
    pub(super) stuck: bool,
    /// The lock was not free at some time since the queue was created.
    pub(super) contended: bool,
    /// The store's latest reply, for the waiters behind the head, which make no calls.
    pub(super) last: Refusal,
}

impl WaitQueue {
    fn push(&mut self, id: AcquireId, all: &mut Waiters) {
        all[id].ticket = self.next;
        self.next += 1;
        match self.tail {
            None => self.head = Some(id),
            Some(tail) => {
                self.behind += 1;
                all[tail].next = Some(id);
                all[id].previous = Some(tail);
            }
        }
        self.tail = Some(id);
    }

    fn unlink(&mut self, previous: Option<AcquireId>, next: Option<AcquireId>, all: &mut Waiters) {
        match previous {
            Some(previous) => all[previous].next = next,
            None => self.head = next,
        }
        match next {
            Some(next) => all[next].previous = previous,
            None => self.tail = previous,
        }
        self.behind = self.behind.saturating_sub(1);
    }

    pub(super) fn entry_of(&mut self, token: Token) -> Option<&mut QueueEntry> {
        self.entry.as_mut().filter(|entry| entry.token == token)
    }

    /// Removes the queue entry if `token` is its token.
    pub(super) fn drop_entry(&mut self, token: Token) -> Option<QueueEntry> {
        self.entry.take_if(|entry| entry.token == token)
    }

    pub(super) fn wake_head(&mut self, cx: &mut Cx<'_>) {
        if !cx.breaks(Mutation::WakesNoHead) {
            cx.out.extend(self.head.map(Effect::Wake));
        }
    }

    /// Returns the result if the lock was done after a waiter had come at this time.
    pub(super) fn done_for(&self, entered: Instant) -> Option<Arc<Done>> {
        let (sent, done) = self.done.as_ref()?;
        (entered < *sent).then(|| done.clone())
    }

    /// Records that the lock was done after the head had called. The waiters that had come before
    /// the call are refused.
    pub(super) fn done(&mut self, sent: Instant, done: &Arc<Done>, all: &Waiters, cx: &mut Cx<'_>) {
        self.done = Some((sent, done.clone()));
        let mut next = self.head;
        while let Some(id) = next {
            cx.out.push(Effect::Wake(id));
            next = all[id].next;
        }
    }

    /// Records that a request is about to be sent. Its reply announces when the lock may be free.
    pub(super) fn asks(&mut self) {
        self.released = false;
        self.ask_by = None;
    }

    /// Returns the reader together with which the head, a reader, may be admitted.
    pub(super) fn reader_group(&self, ticket: Ticket) -> Option<Token> {
        let (token, end) = self.group?;
        (ticket < end).then_some(token)
    }

    /// Records that the store has queued `token`, in reply to a request sent at `sent`. Returns
    /// `false` if no waiter uses that token.
    pub(super) fn queued(
        &mut self,
        token: Token,
        sent: Instant,
        counter: Option<FencingToken>,
        holder_ttl: Option<Duration>,
        cx: &mut Cx<'_>,
    ) -> bool {
        self.busy(holder_ttl);
        let ask_by = self.ask_by;
        let Some(entry) = self.entry_of(token) else {
            return false;
        };
        entry.queued(sent, counter, holder_ttl, cx);
        // The reply may be older than the announcement.
        if let Some(by) = ask_by.filter(|by| sent < *by) {
            entry.ask_at = entry.ask_at.min(by);
        }
        self.ask_by = None;
        true
    }

    fn busy(&mut self, holder_ttl: Option<Duration>) {
        (self.stuck, self.contended) = (true, true);
        self.last = Refusal::Busy(holder_ttl);
    }

    /// Records that the store has refused `token` and has no queue entry for it.
    pub(super) fn refused(&mut self, token: Token, holder_ttl: Option<Duration>, cx: &mut Cx<'_>) {
        self.busy(holder_ttl);
        let released = self.released;
        if let Some(entry) = self.entry_of(token) {
            entry.refused(holder_ttl, cx);
            if released {
                entry.ask_at = cx.now;
            }
        }
    }

    /// Records a request without a reply, or with one that ends its token. The token must not be
    /// used again (rule 1), and the next attempt is delayed.
    pub(super) fn failed(&mut self, token: Token, error: Option<&StoreError>, cx: &mut Cx<'_>) {
        if let Some(error) = error {
            self.stuck = true;
            self.last = Refusal::Unavailable(error.clone());
        }
        if let Some(entry) = self.entry_of(token) {
            entry.rename(cx);
            entry.try_later(None, cx);
        }
    }

    /// Records that a poll, or the confirmation of a grant, got no reply. The queue entry is
    /// unchanged, and the next poll returns its state.
    pub(super) fn unanswered(&mut self, token: Token, error: &StoreError, cx: &mut Cx<'_>) {
        self.last = Refusal::Unavailable(error.clone());
        if let Some(entry) = self.entry_of(token) {
            entry.try_later(None, cx);
        }
    }

    /// Makes the next head call the store without a pause.
    pub(super) fn asks_at_once(&mut self, now: Instant) {
        if let Some(entry) = &mut self.entry {
            entry.ask_at = now;
        }
    }

    /// Records that the store no longer knows `token`. The next attempt is made at once,
    /// under a fresh token.
    pub(super) fn gone(&mut self, token: Token, cx: &mut Cx<'_>) {
        if let Some(entry) = self.entry_of(token) {
            entry.rename(cx);
            entry.ask_at = cx.now;
        }
    }

    /// Records that the head, with this ticket, holds the lock in `mode`: under the token of its
    /// queue entry, or by a local hand-off if `token` is `None`. It may hand off the lock locally
    /// until `handoff_until`.
    pub(super) fn served(
        &mut self,
        (mode, ticket): (Mode, Ticket),
        token: Option<Token>,
        handoff_until: Option<Instant>,
    ) {
        if let Some(token) = token {
            self.group = (mode == Mode::Shared).then(|| {
                // Waiters that arrive from now on belong to the next group.
                let end = self.group.map(|(_, end)| end).filter(|end| ticket < *end);
                (token, end.unwrap_or(self.next))
            });
            self.drop_entry(token);
            // The store would not have granted the lock while the hold of a pending
            // hand-off lasted.
            self.handoff = None;
        }
        self.handoff_until = handoff_until;
        self.stuck = mode == Mode::Exclusive;
        self.last = Refusal::None;
    }

    /// Records that the lock may be free from `at` on. A head with a queue entry polls by then.
    fn free_at(&mut self, at: Instant, cx: &mut Cx<'_>) {
        self.ask_by = Some(self.ask_by.map_or(at, |by| by.min(at)));
        let entry = self.entry.as_mut();
        if let Some(entry) = entry.filter(|entry| entry.is_queued() && at < entry.ask_at) {
            entry.ask_at = at;
            self.wake_head(cx);
        }
    }

    /// Records that the store may have lost the queue entry, a push message or all its data. The
    /// head calls the store by `at`.
    pub(super) fn doubt(&mut self, at: Instant, cx: &mut Cx<'_>) {
        self.handoff_until = None;
        self.ask_by = Some(self.ask_by.map_or(at, |by| by.min(at)));
        if let Some(entry) = &mut self.entry {
            entry.doubt(at);
        }
        self.wake_head(cx);
    }

    /// Records that the lock was released or lost in this process.
    pub(super) fn freed(&mut self, cx: &mut Cx<'_>) {
        self.handoff_until = None;
        self.released = true;
        // A waiter with a queue entry is notified by the store.
        if let Some(entry) = &mut self.entry {
            entry.hurry(cx.now);
        }
        self.wake_head(cx);
    }

    /// Hands the lock off to the head.
    pub(super) fn hand_off(&mut self, handoff: Handoff, cx: &mut Cx<'_>) {
        self.handoff_until = Some(handoff.budget.until);
        self.contended = true;
        self.handoff = Some(handoff);
        self.wake_head(cx);
    }

    /// Opens a queue entry for the head, whose token the release of the lock names.
    pub(super) fn open_entry(&mut self, claim: Claim, cx: &mut Cx<'_>) -> Token {
        self.ask_by = None;
        let mut entry = QueueEntry::new(claim, cx);
        entry.asked(cx.now);
        self.entry = Some(entry);
        entry.token
    }
}

impl Session {
    pub(super) fn queue_of(&mut self, kind: LockKind, key: &LockKey) -> Option<&mut WaitQueue> {
        let by_key = &self.by_key[kind as usize];
        if by_key.is_empty() {
            return None;
        }
        Some(&mut self.queues[*by_key.get(key)?])
    }

    /// Returns the claim of the head that may take a lock with this lease, and its queue.
    pub(super) fn successor(
        &mut self,
        key: &LockKey,
        lease: Duration,
    ) -> Option<(&mut WaitQueue, Claim)> {
        let id = *self.by_key[LockKind::Lock as usize].get(key)?;
        let queue = &mut self.queues[id];
        let claim = self.acquisitions[queue.head?].claim();
        (claim.takes(lease) && queue.handoff.is_none()).then_some((queue, claim))
    }

    /// Adds a request to the end of its queue, unless too many wait or the client is shut down.
    /// Returns whether it is the head.
    pub(super) fn enter(&mut self, id: AcquireId) -> Result<bool, Refused> {
        if self.closed {
            return Err(Refused::ShuttingDown);
        }
        let Acquisition { key, terms, .. } = &self.acquisitions[id];
        let kind = terms.mode.kind();
        if self.waiting >= self.limits.in_all {
            return Err(Refused::FullInAll);
        }
        let queues = &mut self.queues;
        let queue_id = *self.by_key[kind as usize]
            .entry(key.clone())
            .or_insert_with(|| queues.insert(WaitQueue::default()));
        let queue = &mut self.queues[queue_id];
        let is_first = queue.head.is_none();
        if !is_first && queue.behind >= terms.max_waiters.min(self.limits.per_key) {
            return Err(Refused::Full);
        }
        self.waiting += 1;
        queue.push(id, &mut self.acquisitions);
        let acquisition = &mut self.acquisitions[id];
        acquisition.queue = Some(queue_id);
        acquisition.contended |= !is_first;
        Ok(is_first)
    }

    /// Removes a request, served or not. The next waiter becomes the head of its queue, and
    /// continues with its queue entry and its hand-off if they fit.
    pub(super) fn leave(&mut self, id: AcquireId, cx: &mut Cx<'_>) {
        let Some(left) = self.acquisitions.remove(id) else {
            return;
        };
        let Some(queue_id) = left.queue else {
            return;
        };
        let (key, kind) = (left.key, left.terms.mode.kind());
        self.waiting -= 1;
        let queue = &mut self.queues[queue_id];
        let was_head = queue.head == Some(id);
        queue.unlink(left.previous, left.next, &mut self.acquisitions);
        if !was_head {
            return;
        }
        let claim = queue.head.map(|head| self.acquisitions[head].claim());
        let breaks = cx.breaks(Mutation::InheritsNoEntry);
        let orphan = queue
            .entry
            .take_if(|entry| breaks || claim.is_none_or(|claim| !entry.fits(claim)))
            .filter(QueueEntry::is_known)
            .map(|entry| (Hold::new(key.clone(), entry.mode, entry.token), entry.lease));
        let handoff = queue
            .handoff
            .take_if(|handoff| claim.is_none_or(|claim| !claim.takes(handoff.lease.length())));
        if claim.is_some() {
            queue.wake_head(cx);
        } else {
            self.by_key[kind as usize].remove(&key);
            self.queues.remove(queue_id);
        }
        if let Some((hold, lease)) = orphan {
            let token = hold.token;
            self.abandon(hold, lease, None, cx);
            self.named_in_vain(token, cx);
        }
        if let Some(Handoff { hold, lease, .. }) = handoff {
            self.give_back(hold, lease.length(), cx);
        }
    }

    /// Records that the lock was released or lost in this process. Its queue may make
    /// an attempt at once.
    pub(super) fn freed(&mut self, kind: LockKind, key: &LockKey, cx: &mut Cx<'_>) {
        if let Some(queue) = self.queue_of(kind, key) {
            queue.freed(cx);
        }
    }

    /// Records that the lock may be free after `ttl`.
    pub(super) fn free_in(
        &mut self,
        kind: LockKind,
        key: &LockKey,
        ttl: Duration,
        cx: &mut Cx<'_>,
    ) {
        // One millisecond past the expiry, so that the request does not arrive just before it.
        // Without a remaining time it is sent at once.
        let past = Duration::from_millis(u64::from(!ttl.is_zero()));
        if let Some(ttl) = ttl.checked_add(past)
            && let Some(at) = cx.now.checked_add(ttl)
            && let Some(queue) = self.queue_of(kind, key)
        {
            queue.free_at(at, cx);
        }
    }
}
