//! An acquire attempt, and the clean-up of its token if no reply arrives.

use std::{sync::Arc, time::Duration};

use tokio::time::Instant;

use crate::{
    call::within,
    client::Core,
    driver::CleanUp,
    error::{LockError, LockErrorKind},
    fence::FencingToken,
    holding::Holding,
    spec::Terms,
    store::{AcquireReply, Hold, IfBusy, KeyRequest, StoreError, Token},
};

/// How long after its call time-out a delayed request may still be executed. The store rejects it
/// after that (PROTOCOL 7).
pub(crate) const STRAGGLE: Duration = Duration::from_secs(1);

/// One call of [`Store::acquire`](crate::store::Store::acquire) under a token. If it is dropped
/// or gets no reply, the token is abandoned: immediately, and again once a delayed request can no
/// longer be executed (PROTOCOL 8).
pub(super) struct Question<'a> {
    core: &'a Arc<Core>,
    pub(super) request: KeyRequest,
    terms: &'a Terms,
    patience: Duration,
    sent: Instant,
    /// The token may hold the lock without a guard.
    pub(super) in_flight: bool,
}

pub(super) enum Outcome {
    Granted(Arc<Holding>),
    /// The store has a queue entry for the token.
    Queued {
        sent: Instant,
        counter: Option<FencingToken>,
        holder_ttl: Option<Duration>,
    },
    Refused {
        holder_ttl: Option<Duration>,
    },
    /// No reply, or one that neither grants nor refuses the request.
    Unanswered(StoreError),
}

impl<'a> Question<'a> {
    /// An attempt that is made immediately, at `now`.
    pub(super) fn new(
        core: &'a Arc<Core>,
        hold: Hold,
        terms: &'a Terms,
        patience: Duration,
        now: Instant,
    ) -> Self {
        let request = KeyRequest::new(hold, terms.lease, now + patience + STRAGGLE);
        Self {
            core,
            request,
            terms,
            patience,
            sent: now,
            in_flight: false,
        }
    }

    /// Enters the store's wait queue if the lock is not free, reserves this number of fencing
    /// tokens, and may be admitted in the group of the reader `reader_group`.
    pub(super) fn queued(mut self, reserved: u32, reader_group: Option<Token>) -> Self {
        self.request.if_busy = IfBusy::Queue;
        self.request.reserved = reserved;
        self.request.reader_group = reader_group;
        self
    }

    pub(super) async fn ask(&mut self) -> Result<Outcome, LockError> {
        let sent = self.sent;
        self.in_flight = true;
        let reply = within(self.patience, self.core.store.acquire(&self.request)).await;
        let hold = &self.request.hold;
        let refused = |kind, message| Err(LockError::new(kind, message).with_key(&hold.key));
        let reply = match reply {
            Ok(reply) => reply,
            Err(error) if error.is_transient() => return Ok(Outcome::Unanswered(error)),
            // A script may fail after its first writes if the server forbids one of its commands,
            // so the token is abandoned as well.
            Err(error) => return Err(LockError::from_store(error).with_key(&hold.key)),
        };
        if let AcquireReply::Granted(grant) = reply {
            let holding = Holding::start(self.core, hold.clone(), grant, sent, *self.terms);
            // A grant without remaining validity has no holder and is abandoned.
            self.in_flight = holding.is_none();
            return Ok(match holding {
                Some(holding) => Outcome::Granted(holding),
                None => Outcome::Unanswered(StoreError::timed_out(sent.elapsed())),
            });
        }
        self.in_flight = false;
        match reply {
            AcquireReply::Granted(_) | AcquireReply::Late => {
                Ok(Outcome::Unanswered(StoreError::late()))
            }
            AcquireReply::Queued {
                counter,
                holder_ttl,
            } => Ok(Outcome::Queued {
                sent,
                counter,
                holder_ttl,
            }),
            AcquireReply::Busy { holder_ttl, .. } => Ok(Outcome::Refused { holder_ttl }),
            AcquireReply::ForeignKey(part) => {
                Err(self.core.foreign(&hold.key, hold.mode.kind(), part))
            }
            AcquireReply::ModeMismatch => refused(LockErrorKind::ModeMismatch, MISMATCH),
        }
    }
}

pub(super) const MISMATCH: &str = "it is held with another number of permits, or by something that is not a permit; use the same number everywhere";

impl Drop for Question<'_> {
    fn drop(&mut self) {
        if self.in_flight {
            let hold = self.request.hold.clone();
            let clean_up = CleanUp::abandon(hold, self.terms.lease, Some(self.request.deadline));
            self.core.driver.clean_up(self.core, clean_up);
        }
    }
}
