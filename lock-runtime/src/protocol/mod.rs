//! The protocol of a client, without I/O: the requests to send, the meaning of replies, and the
//! acquisition, hand-off, loss and release of locks. The rules are in docs/PROTOCOL.md.
//!
//! [`Session`] is the state of one client. Each of its methods is one input: a request, a reply of
//! the store, a push message, the passage of time. It receives the current time and fresh random
//! numbers in a [`Cx`], and returns the next step of the calling task. The effects on other tasks
//! are collected in the `Cx`, and are performed after the session is unlocked. The driver pulls the
//! calls that no task awaits ([`Session::due_renewals`], [`Session::due_job`]).

mod abandon;
mod acquire;
mod held;
pub(crate) mod majority;
mod message;
mod queue;
mod release;
mod retained;
mod schedule;
mod several;

use std::{collections::HashMap, time::Duration};

use foldhash::fast::RandomState;
use slotmap::{SlotMap, new_key_type};
use smallvec::SmallVec;

pub(crate) use self::{
    abandon::{Afterwards, Ending, Latest, PendingEnd},
    acquire::{Refused, SHORTEST_CALL, STRAGGLE, Step},
    held::convert::ConvertError,
    held::keeping::Look,
    held::reenter::may_enter,
    held::{DueRenewal, ExtendError, Granted, Source},
    message::{Answer, Call, Reply, Request},
    queue::Refusal,
    release::{ReleaseError, ReleaseStep, Released},
    several::AllStep,
};
use self::{
    acquire::Acquisition, held::Held, held::convert::Conversion, held::ended::Ended,
    queue::WaitQueue, queue::handoff::Handoff, release::Releasing, retained::Retention,
    schedule::Schedule,
};
#[cfg(all(test, feature = "redis", feature = "records"))]
pub(crate) use self::{held::lease::NO_DRIFT, several::Together};
use crate::{
    error::Loss,
    guard::fence::FencingToken,
    request::key::LockKey,
    shell::time::Instant,
    store::{Grant, Hold, StoreError, StoreEvent, Token},
};

new_key_type! {
    pub(crate) struct AcquireId;
    pub(crate) struct HeldId;
    pub(crate) struct ReleaseId;
    pub(crate) struct ConversionId;
    pub(crate) struct EndId;
    struct QueueId;
}

/// The time within which every head calls the store after a broken connection.
const ASK_WITHIN: Duration = Duration::from_millis(50);

/// A source of random numbers.
pub(crate) trait Entropy {
    fn token(&mut self) -> Token;
    /// Returns a number in 0..1.
    fn fraction(&mut self) -> f64;
}

/// The context of one input.
pub(crate) struct Cx<'a> {
    /// The time, read before the session was locked. It may be earlier than that of the previous
    /// input.
    pub(crate) now: Instant,
    pub(crate) entropy: &'a mut dyn Entropy,
    /// The effects on other tasks, to be performed after the session is unlocked.
    pub(crate) out: &'a mut Effects,
    /// Whether the store sends no events at present, so that waiters have to poll.
    pub(crate) polls: bool,
    /// Whether the log has lines for debugging.
    pub(crate) is_debugged: bool,
    /// The rule that a simulator has switched off.
    #[cfg(test)]
    pub(crate) mutation: Option<Mutation>,
}

pub(crate) type Effects = SmallVec<[Effect; 2]>;

/// An effect on a task other than the calling one.
#[derive(Debug)]
pub(crate) enum Effect {
    /// Wake the task that waits for this acquisition.
    Wake(AcquireId),
    /// Notify the driver: work is due before it checks again.
    Rouse,
    /// Let the keeper look at this client.
    Watch,
    /// The lease of a held lock was extended.
    Extended {
        held: HeldId,
        valid_until: Instant,
        is_renewal: bool,
    },
    /// The last guard of a held lock was removed.
    Released(HeldId),
    /// A held lock was lost.
    Lost(HeldId, Loss),
    /// An event for the log.
    Note(Box<Note>),
}

/// An event for the log.
#[derive(Debug)]
pub(crate) enum Note {
    /// The request waits behind others of this process.
    Behind(LockKey),
    /// The request waits for the holder of the lock, whose TTL may be known, in the store's wait
    /// queue.
    Queued(LockKey, Option<Duration>),
    /// The same without a wait queue at the store.
    Waiting(LockKey, Option<Duration>),
    /// The request waits because the store did not reply.
    Unavailable(LockKey, StoreError),
    HandedOff(LockKey, FencingToken),
    Renewed(LockKey, FencingToken, Duration),
    Lost(LockKey, FencingToken, Loss),
    HeldLong(LockKey, Duration),
    /// A release in the background was confirmed.
    Released(LockKey),
    /// A release or an abandonment is no longer repeated.
    GaveUp(Hold, StoreError),
}

impl Note {
    /// Returns whether this is the loss of that hold.
    pub(crate) fn is_loss_of(&self, key: &LockKey, fence: FencingToken) -> bool {
        matches!(self, Self::Lost(lost, of, _) if *of == fence && lost == key)
    }
}

/// A rule of docs/PROTOCOL.md that a simulator switches off.
#[cfg_attr(
    not(test),
    expect(dead_code, reason = "only simulators switch rules off")
)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mutation {
    /// Rule 1: the reply to an abandoned acquire is applied.
    AcceptsAbandoned,
    /// Rule 2: a grant is valid for a whole lease from the arrival of its reply.
    CountsFromReply,
    /// Rule 3: an outdated push message is not recognized.
    IgnoresCounter,
    /// Rule 4: a pushed grant is valid from the arrival of the push message.
    CountsFromPush,
    /// Rule 4: a grant whose validity is almost over is used without a confirmation.
    ConfirmsNothing,
    /// Rule 8: an acquire without a reply is abandoned at once but not after its deadline.
    AbandonsOnce,
    /// Rule 11: a renewal sets the expiry even if this makes it earlier.
    RenewalShortens,
    /// Rule 11: a lost lock that was extended is given up after the lease of its request.
    LosesForOneLease,
    /// Rule 11: the reader made of an extended writer is given up after the lease of its request.
    ConvertsForOneLease,
    /// Rule 15: only a release advances the wait queue.
    OnlyReleaseAdvances,
    /// Rule 17: the next waiter of a process goes to the end of the store's wait queue.
    InheritsNoEntry,
    /// Rule 17: a reader takes a grant that is older than its request.
    ReaderTakesOldGrant,
    /// Rule 19: the number of local hand-offs is not limited.
    HandsOffWithoutBudget,
    /// Rule 19: a lock is handed off under tokens that the store may have forgotten.
    HandsOffAfterDataLoss,
    /// Rule 17: the head waits for the report of a release whose task is gone.
    AwaitsReport,
    /// Rule 17: the token that a forgotten release named is not abandoned.
    LeavesNamedToken,
    /// The head of a wait queue is not woken.
    WakesNoHead,
    /// The head is not woken when the lock comes back for a waiter that has left.
    WakesNoOtherHead,
    /// A request is refused as if the lock were held, because the store did not reply to another.
    TakesSilenceForHolder,
    /// The store does not announce the end of a reservation.
    AnnouncesNoEnd,
    /// Rule 41: the reply to an extension is not applied if that to a later renewal came before.
    DropsOvertaken,
    /// A lock is handed off in the process before its `min_hold` has passed.
    HandsOffReserved,
    /// Rule 43: a lock that was lost is released with its result.
    CompletesLost,
    /// Rule 43: a guard that is dropped leaves a result.
    CompletesDropped,
    /// Rule 43: a release without a reply is repeated without its result.
    ForgetsResult,
    /// Rule 43: the store takes the result of a token that does not hold the lock.
    RecordsUnheld,
    /// Rule 44: a retained lock is used under tokens that the store may have forgotten.
    RetainsAfterDataLoss,
    /// Rule 44: a retained lock is used again under its latest fencing token.
    RetainsOldTokens,
    /// Rule 45: a retained lock is not released for another client.
    IgnoresWanted,
    /// Rule 45: a lock that was granted after a wait at the store is retained.
    RetainsContended,
    /// Rule 46: a client that is shut down keeps what it retains.
    RetainsAfterShutdown,
    /// Rule 47: a request that does not wait is refused because of an idle lock.
    RefusesForRetained,
}

impl Cx<'_> {
    /// Returns a fresh token, of a lock that may be `retained`.
    fn token(&mut self, is_retained: bool) -> Token {
        self.entropy.token().marked(is_retained)
    }

    fn fraction(&mut self) -> f64 {
        self.entropy.fraction()
    }

    fn rouse(&mut self) {
        self.out.push(Effect::Rouse);
    }

    /// Adds a line to the log if it has lines for debugging.
    fn debug(&mut self, note: impl FnOnce() -> Note) {
        if self.is_debugged {
            self.note(note);
        }
    }

    fn note(&mut self, note: impl FnOnce() -> Note) {
        self.out.push(Effect::Note(Box::new(note())));
    }

    /// Returns whether a simulator has switched this rule off.
    #[cfg(test)]
    fn breaks(&self, mutation: Mutation) -> bool {
        self.mutation == Some(mutation)
    }

    #[cfg(not(test))]
    const fn breaks(&self, _: Mutation) -> bool {
        false
    }
}

/// The limits on the requests that wait in this process.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct WaiterLimits {
    /// The limit for each lock, not counting the head of its queue.
    pub(crate) per_key: usize,
    pub(crate) in_all: usize,
}

/// A background call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Job {
    Release(ReleaseId),
    End(EndId),
}

/// The background calls that are planned.
#[cfg_attr(test, derive(Clone))]
#[derive(Default)]
struct Jobs {
    /// The ends of holds, which go first.
    holds: Schedule<Job>,
    /// The ends of requests that may not have got a hold, and those that are repeated.
    rest: Schedule<Job>,
}

impl Jobs {
    fn each(&mut self) -> [&mut Schedule<Job>; 2] {
        [&mut self.holds, &mut self.rest]
    }

    fn is_empty(&self) -> bool {
        self.holds.is_empty() && self.rest.is_empty()
    }

    /// Returns when the first is due.
    fn first(&self) -> Option<Instant> {
        let first = [&self.holds, &self.rest]
            .into_iter()
            .filter_map(Schedule::first);
        first.min()
    }

    fn pop(&mut self, until: Instant) -> Option<(Instant, Job)> {
        self.holds.pop(until).or_else(|| self.rest.pop(until))
    }
}

/// The state of one client: its requests, its held locks and its background calls.
#[cfg_attr(test, derive(Clone))]
#[derive(Default)]
pub(crate) struct Session {
    limits: WaiterLimits,
    /// The wait queues, by kind and key.
    by_key: [HashMap<LockKey, QueueId, RandomState>; 2],
    queues: SlotMap<QueueId, WaitQueue>,
    acquisitions: SlotMap<AcquireId, Acquisition>,
    /// The number of requests in wait queues.
    waiting: usize,
    held: SlotMap<HeldId, Held>,
    conversions: SlotMap<ConversionId, Conversion>,
    releases: SlotMap<ReleaseId, Releasing>,
    pending_ends: SlotMap<EndId, PendingEnd>,
    ended: Ended,
    retention: Retention,
    leases: Schedule<HeldId>,
    jobs: Jobs,
    /// The latest time at which the store may have lost data.
    data_lost_at: Option<Instant>,
    /// Whether the driver had room for more background calls when it checked last.
    has_room: bool,
    /// When the keeper looks at this client. `None` if it does not.
    look_at: Option<Instant>,
    closed: bool,
}

impl Session {
    pub(crate) fn new(limits: WaiterLimits) -> Self {
        Self {
            limits,
            has_room: true,
            ..Self::default()
        }
    }

    /// Handles an event that the store has sent without a request.
    pub(crate) fn event(&mut self, event: &StoreEvent, cx: &mut Cx<'_>) {
        match event {
            StoreEvent::Granted { hold, grant } => {
                if let Some(queue) = self.queue_of(hold.mode.kind(), &hold.key)
                    && let Some(entry) = queue.entry_of(hold.token)
                {
                    entry.pushed(*grant, cx);
                    queue.wake_head(cx);
                } else {
                    self.granted_late(hold, *grant, cx);
                }
            }
            StoreEvent::FreeIn { key, kind, ttl } => self.free_in(*kind, key, *ttl, cx),
            StoreEvent::Revoked { token } => self.revoke(*token, cx),
            StoreEvent::Wanted { key, token } => self.wanted(key, *token, cx),
            StoreEvent::Disconnected => self.disconnected(cx),
            StoreEvent::Reconnected => self.reconnected(cx),
        }
    }

    /// Handles a grant of a hold that no request waits for. If its release or abandonment is
    /// pending, the store may have executed that before it granted the lock (rule 6), so the hold
    /// is abandoned once more: one call at a time, as other programs may send any number of them.
    /// A release that is to reserve the lock does not count: an abandonment would overtake it and
    /// free the lock, nor does that of a retained lock, which is not sent yet. Without either, a
    /// reply has already delivered the grant.
    fn granted_late(&mut self, hold: &Hold, grant: Grant, cx: &mut Cx<'_>) {
        let now = cx.now;
        if self.retention.holds().any(|it| it.hold == *hold) {
            return;
        }
        let mut pending = self.pending_ends.iter_mut();
        let pending = pending.find(|(_, it)| it.hold() == hold && !it.is_release());
        if let Some((id, pending)) = pending {
            if pending.hurry(now) {
                self.plan_job(now, Job::End(id), cx);
            }
            return;
        }
        let mut pending = self.pending_ends.values();
        let is_ending = pending.any(|it| it.hold() == hold && it.keep_until(now).is_none());
        if is_ending || self.background_releases().any(|it| it == hold) {
            self.abandon(hold.clone(), grant.ttl.min(Grant::HANDOFF_LEASE), None, cx);
        }
    }

    /// Handles a store that may have lost data and push messages. Locks are no longer handed off
    /// under fencing tokens that were reserved before; hand-offs that were not taken yet are
    /// released. Every head calls the store after a random delay, which keeps clients from
    /// calling in step, and from calling as fast as a server may accept and cut connections.
    fn disconnected(&mut self, cx: &mut Cx<'_>) {
        self.data_lost_at = self.data_lost_at.max(Some(cx.now));
        let at = cx.now + ASK_WITHIN.mul_f64(cx.fraction());
        let mut handoffs = Vec::new();
        for queue in self.queues.values_mut() {
            if !cx.breaks(Mutation::HandsOffAfterDataLoss) {
                handoffs.extend(queue.handoff.take());
            }
            queue.doubt(at, cx);
        }
        for Handoff { hold, lease, .. } in handoffs {
            self.give_back(hold, lease.length(), cx);
        }
        if !cx.breaks(Mutation::RetainsAfterDataLoss) {
            self.release_all_retained(cx);
        }
        self.renew_all_soon(cx);
        self.end_again(cx);
    }

    /// Handles a store that answers again. Heads that got no reply call it soon, after a random
    /// delay as for a broken connection, and holds that it was to end are ended then.
    fn reconnected(&mut self, cx: &mut Cx<'_>) {
        let at = cx.now + ASK_WITHIN.mul_f64(cx.fraction());
        let unanswered = |queue: &&mut WaitQueue| matches!(queue.last, Refusal::Unavailable(_));
        for queue in self.queues.values_mut().filter(unanswered) {
            queue.doubt(at, cx);
        }
        let endings = self.pending_ends.iter_mut();
        let endings = endings.filter_map(|(id, it)| it.retry_at(at).then_some(id));
        for id in endings.collect::<Vec<_>>() {
            self.plan_job(at, Job::End(id), cx);
        }
    }

    /// Returns the time of the driver's next check, or `None` if nothing is planned. Without room
    /// for more jobs, the driver checks them when one ends.
    pub(crate) fn check_at(&mut self, has_room: bool) -> Option<Instant> {
        self.has_room = has_room;
        let jobs = self.jobs.each().map(Schedule::check_at);
        let jobs = jobs.into_iter().flatten().filter(|_| has_room);
        self.leases.check_at().into_iter().chain(jobs).min()
    }

    /// Returns whether the driver has work, now or later.
    pub(crate) fn needs_driver(&self) -> bool {
        let is_idle = self.held.is_empty() && self.pending_ends.is_empty();
        !(is_idle && self.jobs.is_empty() && self.background_releases().next().is_none())
    }

    /// Records that the driver has ended, and with it the calls in flight.
    pub(crate) fn driver_died(&mut self, cx: &mut Cx<'_>) {
        self.has_room = true;
        self.renewals_interrupted(cx);
        self.jobs_interrupted(cx);
    }

    /// Refuses new requests and ends all that wait.
    pub(crate) fn close(&mut self, cx: &mut Cx<'_>) {
        self.closed = true;
        if !cx.breaks(Mutation::RetainsAfterShutdown) {
            self.release_all_retained(cx);
        }
        let waiters = self.acquisitions.keys().map(Effect::Wake);
        cx.out.extend(waiters);
    }

    /// Returns whether the client holds a lock.
    pub(crate) fn holds_any(&self) -> bool {
        !self.held.is_empty()
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed
    }

    /// Returns whether no request is left.
    pub(crate) fn is_empty(&self) -> bool {
        self.acquisitions.is_empty()
    }

    /// Returns whether no background call is left that the store has never confirmed.
    pub(crate) fn is_drained(&self) -> bool {
        let mut endings = self.pending_ends.values();
        endings.all(PendingEnd::is_repeated) && self.background_releases().next().is_none()
    }
}

#[cfg(test)]
impl Session {
    /// Returns whether a part of the session knows the token at `now`, so that it will be given
    /// back.
    pub(crate) fn knows(&self, token: Token, now: Instant) -> bool {
        let is_of = |hold: &Hold| hold.token == token;
        let in_queue = |queue: &WaitQueue| {
            queue.entry.is_some_and(|entry| entry.token == token)
                || queue.handoff.as_ref().is_some_and(|it| is_of(&it.hold))
        };
        let in_pending = |it: &PendingEnd| is_of(it.hold()) || it.afterwards().any(is_of);
        self.queues.values().any(in_queue)
            || self.acquisitions.values().any(|it| it.knows(token))
            || self.held.values().any(|held| is_of(&held.hold))
            || self.releases.values().any(|it| it.knows(token, now))
            || self.pending_ends.values().any(in_pending)
            || self.conversions.values().any(|it| is_of(&it.writer.hold))
    }

    /// Returns the locks that are certain to be held at `now`, each with the end of its validity.
    pub(crate) fn valid(&self, now: Instant) -> impl Iterator<Item = (HeldId, &Hold, Instant)> {
        self.held.iter().filter_map(move |(id, held)| {
            let validity = held.validity(now);
            (!validity.is_zero()).then(|| (id, &held.hold, now + validity))
        })
    }

    /// Returns whether a hold is valid for `lease` from `sent` on, but for its `max_hold`.
    pub(crate) fn is_extended(&self, id: HeldId, sent: Instant, lease: Duration) -> bool {
        let until = sent + lease - held::lease::drift(lease);
        let held = self.held.get(id);
        held.is_some_and(|held| held.lease.valid_until() >= until)
    }

    /// Extends the waits of all requests.
    pub(crate) fn wait_longer(&mut self, longer: Duration) {
        for acquisition in self.acquisitions.values_mut() {
            acquisition.wait_longer(longer);
        }
    }

    /// Describes the remaining state of the session, if there is any.
    pub(crate) fn rest(&self) -> Option<String> {
        let rest = [
            ("queues", self.queues.len()),
            ("acquisitions", self.acquisitions.len()),
            ("held locks", self.held.len()),
            ("conversions", self.conversions.len()),
            ("releases", self.releases.len()),
            ("pending ends", self.pending_ends.len()),
        ];
        let rest: Vec<_> = rest.into_iter().filter(|(_, number)| *number > 0).collect();
        (!rest.is_empty()).then(|| format!("{rest:?}"))
    }
}

#[cfg(test)]
mod tests;
