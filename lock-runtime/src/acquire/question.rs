//! One question to the store, and what becomes of its token when the answer does not come.

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

/// A request sent within a call's timeout is executed at most so much later, or not at all (PROTOCOL 7).
pub(crate) const STRAGGLE: Duration = Duration::from_secs(1);

/// One call of [`Store::acquire`](crate::store::Store::acquire) under a token. If it is dropped, or its answer does not come,
/// the token is abandoned: now, and again when no straggler can be executed any more (PROTOCOL 8).
pub(super) struct Question<'a> {
    core: &'a Arc<Core>,
    pub(super) request: KeyRequest,
    terms: &'a Terms,
    patience: Duration,
    sent: Instant,
    /// The token may hold the lock, and nobody knows.
    pub(super) in_flight: bool,
}

pub(super) enum Outcome {
    Granted(Arc<Holding>),
    /// It stands in line at the store.
    Queued {
        sent: Instant,
        counter: Option<FencingToken>,
        holder_ttl: Option<Duration>,
    },
    Refused {
        holder_ttl: Option<Duration>,
    },
    /// No answer, or one that says "not now".
    Unanswered(StoreError),
}

impl<'a> Question<'a> {
    /// A question to be asked at once, at `now`.
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

    /// Stands in line if the lock is not free, has `spare` fencing tokens reserved, and may come in beside another reader.
    pub(super) fn queued(mut self, spare: u32, beside: Option<Token>) -> Self {
        self.request.if_busy = IfBusy::Queue;
        self.request.spare = spare;
        self.request.beside = beside;
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
            // A script may fail half-way, where the server forbids one of its commands: the token is given up all the same.
            Err(error) => return Err(LockError::from_store(error).with_key(&hold.key)),
        };
        if let AcquireReply::Granted(grant) = reply {
            let holding = Holding::start(self.core, hold.clone(), grant, sent, *self.terms);
            // Without validity it is nobody's, and is given up.
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
                Err(self.core.foreign(&hold.key, hold.mode.family(), part))
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
