//! Calls that end a token which is no longer used: a release or an abandonment that is repeated
//! until the store has confirmed it, or until the lease has expired in any case.

use std::{mem, sync::Arc, time::Duration};

use super::{
    ASK_WITHIN, Cx, EndId, Job, Mutation, Note, Session,
    held::keeping::LATE,
    message::{Answer, Call, Reply, Request},
};
use crate::{
    guard::fence::FencingToken,
    request::spec::{LockSpec, call_timeout},
    shell::time::Instant,
    store::{Hold, Release, ReleaseReply, StoreError},
};

/// The pause after the first failure. It doubles after each further failure, up to the longest one.
pub(crate) const FIRST_BACKOFF: Duration = Duration::from_millis(50);
pub(crate) const LONGEST_BACKOFF: Duration = Duration::from_secs(5);
/// The time beyond the lease for which a store without an answer is asked to end a hold. A clock
/// that its clients advance together has stood still, and with it the lease.
const OUTAGE: Duration = Duration::from_secs(60);

/// The call that ends a token.
#[derive(Clone, Debug)]
pub(crate) enum Ending {
    /// Until the given time the lock stays reserved (`min_hold`), or is done with this result.
    Release(Hold, Option<Instant>, Option<(FencingToken, Arc<[u8]>)>),
    Abandon(Hold),
}

impl Ending {
    /// The ending of a hold that is given up: an abandonment would end the time that is left of
    /// its `min_hold`.
    pub(super) fn of(hold: Hold, keep_until: Option<Instant>, now: Instant) -> Self {
        match keep_until.filter(|until| *until > now) {
            None => Self::Abandon(hold),
            keep_until => Self::Release(hold, keep_until, None),
        }
    }

    /// Returns the length of the result that it leaves, in bytes.
    pub(super) fn result_len(&self) -> usize {
        match self {
            Self::Release(_, _, Some((_, result))) => result.len(),
            Self::Release(..) | Self::Abandon(_) => 0,
        }
    }

    fn hold(&self) -> &Hold {
        match self {
            Self::Release(hold, ..) | Self::Abandon(hold) => hold,
        }
    }
}

/// The ending of another hold, which follows.
#[derive(Clone, Debug)]
pub(crate) struct Afterwards {
    pub(super) ending: Ending,
    /// Its lease.
    pub(super) lease: Duration,
    /// As for a [`PendingEnd`].
    pub(super) straggler_until: Option<Instant>,
    pub(super) is_repeated: bool,
}

impl Afterwards {
    pub(super) fn new(ending: Ending, lease: Duration) -> Self {
        Self {
            ending,
            lease,
            straggler_until: None,
            is_repeated: false,
        }
    }

    fn repeated(self) -> Self {
        Self {
            is_repeated: true,
            ..self
        }
    }
}

/// A token to be released or abandoned.
#[derive(Clone, Debug)]
pub(crate) struct PendingEnd {
    ending: Ending,
    /// The endings that follow, the last one first: of the token that the release had named as the
    /// next holder, of the reader that a delayed conversion may have made of the writer, or of the
    /// same token after its release.
    afterwards: Vec<Afterwards>,
    /// A delayed request may be executed until then. The call is repeated once after that (rule 8
    /// of docs/PROTOCOL.md).
    straggler_until: Option<Instant>,
    give_up_at: Instant,
    /// The hold may last for longer than its lease, if the store does not answer.
    outlasts: bool,
    pause: Duration,
    /// The store has confirmed the ending before, and may have lost data or granted the hold since.
    is_repeated: bool,
    /// When the next call is due. `None` while a call is in flight.
    due: Option<Instant>,
    /// The call in flight is to be made once more, after the other endings: other programs may ask
    /// for that any number of times.
    again: bool,
    sent: Instant,
}

/// The state of the hold that the latest call was to end.
#[derive(Debug)]
pub(crate) enum Latest {
    /// The store has executed the call.
    Confirmed,
    /// The call is repeated.
    Unconfirmed,
    /// The lease has expired, or the store refuses the call.
    GaveUp(StoreError),
}

impl PendingEnd {
    /// An ending of a token whose lease ends within `lease` in any case. `straggler_until` is the
    /// deadline of a request whose outcome is unknown.
    pub(crate) fn new(
        ending: Ending,
        lease: Duration,
        straggler_until: Option<Instant>,
        now: Instant,
    ) -> Self {
        Self {
            ending,
            afterwards: Vec::new(),
            straggler_until,
            give_up_at: straggler_until.unwrap_or(now) + lease,
            outlasts: false,
            pause: FIRST_BACKOFF,
            is_repeated: false,
            due: Some(now),
            again: false,
            sent: now,
        }
    }

    /// The time-out of each call, whatever the lease: no caller waits for it, and a repetition to a
    /// server that is late with its replies makes it later.
    fn timeout() -> Duration {
        call_timeout(LockSpec::DEFAULT_LEASE)
    }

    /// Ends the hold again at `at`, as the store may have forgotten that it has ended.
    pub(crate) fn again(self, at: Instant) -> Self {
        Self {
            is_repeated: true,
            due: Some(at),
            ..self
        }
    }

    /// Ends a hold that is known to the store, through an outage.
    pub(super) fn of_holder(self) -> Self {
        Self {
            outlasts: true,
            ..self
        }
    }

    /// Makes the next call at `at`, if the latest one has failed. Returns whether that is earlier
    /// than before.
    pub(super) fn retry_at(&mut self, at: Instant) -> bool {
        let has_failed = self.pause > FIRST_BACKOFF;
        has_failed && self.due.is_some() && self.hurry(at)
    }

    pub(crate) fn is_repeated(&self) -> bool {
        self.is_repeated
    }

    /// Returns whether the token may never have been that of a holder, or no longer is.
    pub(super) fn ends_request(&self) -> bool {
        self.straggler_until.is_some() || self.is_repeated
    }

    /// Ends other holds, one after the other, once this one has ended.
    pub(crate) fn then(mut self, afterwards: impl IntoIterator<Item = Afterwards>) -> Self {
        self.afterwards.extend(afterwards);
        self.afterwards.reverse();
        self
    }

    pub(crate) fn hold(&self) -> &Hold {
        self.ending.hold()
    }

    /// The time until which the lock is to stay reserved.
    pub(crate) fn keep_until(&self, now: Instant) -> Option<Instant> {
        match self.ending {
            Ending::Release(_, keep_until, _) => keep_until.filter(|until| *until > now),
            Ending::Abandon(_) => None,
        }
    }

    /// Makes the call at once, or once more if it is in flight. Returns whether it is due earlier
    /// than before.
    pub(super) fn hurry(&mut self, now: Instant) -> bool {
        match self.due {
            None => self.again = true,
            Some(at) if at > now => {
                self.due = Some(now);
                return true;
            }
            Some(_) => {}
        }
        false
    }

    pub(crate) fn is_release(&self) -> bool {
        matches!(self.ending, Ending::Release(..))
    }

    /// The holds that are ended afterwards.
    #[cfg(test)]
    pub(crate) fn afterwards(&self) -> impl Iterator<Item = &Hold> {
        self.afterwards.iter().map(|next| next.ending.hold())
    }

    pub(crate) fn due(&self) -> Option<Instant> {
        self.due
    }

    /// Returns whether a call in flight at `now` was to end long ago.
    pub(crate) fn is_stuck(&self, now: Instant) -> bool {
        self.due.is_none() && self.sent + Self::timeout() + LATE <= now
    }

    /// Sends the call again: its reply will not arrive.
    pub(crate) fn interrupted(&mut self, now: Instant) {
        self.due = Some(now);
    }

    /// Returns the call to send at `now`.
    pub(crate) fn call(&mut self, now: Instant) -> Call {
        self.due = None;
        self.sent = now;
        let request = match &self.ending {
            // The waiters that were to take up the lock again no longer rely on this release.
            Ending::Release(hold, keep_until, result) => {
                let release = Release::new(hold.clone()).keep_until(*keep_until, now);
                let result = result.clone().filter(|_| release.keep_for.is_some());
                Request::Release(Box::new(release.result(result)))
            }
            Ending::Abandon(hold) => Request::Abandon(hold.clone()),
        };
        Call::new(request, Self::timeout())
    }

    /// Records the reply to the latest call. `jitter` in 0..1 spreads the retries after an
    /// outage. No further call is needed if none is [`due`](Self::due) then.
    pub(crate) fn replied<T>(
        &mut self,
        reply: Result<T, StoreError>,
        jitter: f64,
        now: Instant,
    ) -> Latest {
        let until = match self.outlasts {
            true => self.give_up_at + OUTAGE,
            false => self.give_up_at,
        };
        let latest = match reply {
            Ok(_) => Latest::Confirmed,
            Err(error) if error.is_transient() && now < until => Latest::Unconfirmed,
            Err(error) => Latest::GaveUp(error),
        };
        let again = mem::take(&mut self.again) && matches!(latest, Latest::Confirmed);
        // A delayed request may still be executed until the deadline.
        let straggler_until = self.straggler_until.filter(|it| self.sent <= *it);
        let is_planned = self.afterwards.iter().any(|it| it.is_repeated);
        if again && straggler_until.is_none() && !is_planned {
            let lease = until.saturating_duration_since(now);
            let again = Afterwards::new(self.ending.clone(), lease);
            self.afterwards.insert(0, again.repeated());
        }
        self.due = match (&latest, straggler_until) {
            (Latest::Confirmed, Some(_)) if again => Some(now),
            (Latest::Confirmed, Some(deadline)) => Some(deadline + Duration::from_millis(1)),
            (Latest::Unconfirmed, _) => {
                let pause = self.pause.mul_f64(0.5 + 0.5 * jitter);
                self.pause = (self.pause * 2).min(LONGEST_BACKOFF);
                Some(now + pause)
            }
            // From now on the release that named the next holder has no effect if it is executed
            // late.
            _ => self.afterwards.pop().map(|next| {
                let Afterwards {
                    ending,
                    lease,
                    straggler_until,
                    is_repeated,
                } = next;
                let next = Self::new(ending, lease, straggler_until, now);
                *self = Self {
                    afterwards: mem::take(&mut self.afterwards),
                    is_repeated,
                    ..next
                };
                now
            }),
        };
        latest
    }
}

impl Session {
    /// Releases a lock that no waiter takes.
    pub(super) fn give_back(&mut self, hold: Hold, lease: Duration, cx: &mut Cx<'_>) {
        self.end(Ending::Release(hold, None, None), lease, None, None, cx);
    }

    /// Abandons a token that is no longer used. `straggler_until` is the deadline of a request
    /// whose outcome is unknown.
    pub(super) fn abandon(
        &mut self,
        hold: Hold,
        lease: Duration,
        straggler_until: Option<Instant>,
        cx: &mut Cx<'_>,
    ) {
        let straggler_until = straggler_until.filter(|_| !cx.breaks(Mutation::AbandonsOnce));
        self.end(Ending::Abandon(hold), lease, straggler_until, None, cx);
    }

    /// Abandons a token whose release found that it does not hold the lock. It may be in the wait
    /// queue, as another program may have announced its grant, and the lock would be granted to it.
    /// An abandonment does not end what is reserved for `min_hold`.
    pub(super) fn abandon_unheld(&mut self, hold: Hold, lease: Duration, cx: &mut Cx<'_>) {
        self.abandon(hold, lease, None, cx);
    }

    /// Ends a hold in the background, and another one afterwards.
    pub(super) fn end(
        &mut self,
        ending: Ending,
        lease: Duration,
        straggler_until: Option<Instant>,
        afterwards: Option<Afterwards>,
        cx: &mut Cx<'_>,
    ) {
        let mut pending = PendingEnd::new(ending, lease, straggler_until, cx.now);
        if straggler_until.is_none() && !cx.breaks(Mutation::LosesForOneLease) {
            pending = pending.of_holder();
        }
        self.add(pending.then(afterwards), cx.now, cx);
    }

    /// Ends a hold again within [`ASK_WITHIN`], so that not all clients do so at once.
    pub(super) fn end_once_more(&mut self, ending: Ending, lease: Duration, cx: &mut Cx<'_>) {
        let at = cx.now + ASK_WITHIN.mul_f64(cx.fraction());
        let pending = PendingEnd::new(ending, lease, None, cx.now);
        self.add(pending.again(at), at, cx);
    }

    fn add(&mut self, pending: PendingEnd, at: Instant, cx: &mut Cx<'_>) {
        let id = self.pending_ends.insert(pending);
        self.plan_job(at, Job::End(id), cx);
    }

    /// Gives an end whose call is sent again another number: a late answer to the earlier call must
    /// not count for the next ending.
    pub(super) fn sent_again(&mut self, id: EndId) -> Option<EndId> {
        let pending = self.pending_ends.remove(id)?;
        Some(self.pending_ends.insert(pending))
    }

    pub(super) fn end_replied(&mut self, id: EndId, answer: Answer, cx: &mut Cx<'_>) {
        let Some(pending) = self.pending_ends.get_mut(id) else {
            return;
        };
        let ending = pending.ending.clone();
        let (sent, until) = (pending.sent, pending.give_up_at);
        let (is_release, is_repeated) = (pending.is_release(), pending.is_repeated);
        // The same token may be ended in another mode next.
        let token = ending.hold().token;
        let mut follow = pending.afterwards.iter();
        let is_last = follow.all(|next| next.ending.hold().token != token);
        let is_unheld = matches!(answer, Ok(Reply::Release(ReleaseReply::NotHeld)));
        let latest = pending.replied(answer, cx.fraction(), cx.now);
        match pending.due() {
            Some(at) => self.plan_job(at, Job::End(id), cx),
            None => drop(self.pending_ends.remove(id)),
        }
        let hold = ending.hold().clone();
        if matches!(latest, Latest::Confirmed) {
            let lost = is_unheld.then(|| Ending::Abandon(hold.clone()));
            self.ended.push(lost.unwrap_or(ending), sent, until);
        }
        match latest {
            Latest::Unconfirmed => return,
            _ if is_repeated => {}
            Latest::Confirmed if is_release => cx.debug(|| Note::Released(hold.key.clone())),
            Latest::Confirmed => {}
            Latest::GaveUp(error) => cx.note(|| Note::GaveUp(hold.clone(), error)),
        }
        // A repeated one finds nothing any more.
        if is_unheld && is_last && !is_repeated {
            self.abandon_unheld(hold.clone(), until.saturating_duration_since(cx.now), cx);
        }
        self.freed(hold.mode.kind(), &hold.key, cx);
    }
}
