//! Several keys that are acquired in one call, all or none.

use std::time::Duration;

use smallvec::SmallVec;

use super::{
    AcquireId, Cx, Session,
    acquire::{Refused, Step},
    held::Granted,
    message::{Call, Reply, Request},
};
use crate::{
    request::key::LockKey,
    request::spec::Terms,
    shell::time::Instant,
    store::{AcquireAllReply, AcquireReply, KeyRequest, StoreError},
};

/// The requests of one call, in the order of the keys.
pub(crate) type Together = SmallVec<[AcquireId; 4]>;

/// The next move of a task that acquires several keys at once.
#[derive(Debug)]
pub(crate) enum AllStep {
    /// Make this call, and pass its answer to [`Session::all_replied`].
    Call(Vec<KeyRequest>),
    /// No key is held. Acquire them one by one: the holder that is in the way may be idle.
    OneByOne,
    /// All keys are held, or the key with this index was refused.
    Done(Result<Vec<Granted>, (usize, Refused)>),
}

impl Session {
    /// Begins a request for several keys that does not wait. Returns the requests of its first
    /// call, which may take as long as `patience`, and whose answer goes to
    /// [`all_replied`](Self::all_replied).
    pub(crate) fn begin_all(
        &mut self,
        keys: &[LockKey],
        terms: &Terms,
        (since, patience): (Instant, Duration),
        cx: &mut Cx<'_>,
    ) -> Result<(Together, Vec<KeyRequest>), (usize, Refused)> {
        let mut together = Together::new();
        let mut requests = Vec::with_capacity(keys.len());
        for (index, key) in keys.iter().enumerate() {
            match self.begin_with(key, terms, (since, patience), cx) {
                Ok((id, step)) => {
                    together.push(id);
                    requests.extend(request_of(step));
                }
                Err(refused) => {
                    self.drop_unsent(&together, cx);
                    return Err((index, refused));
                }
            }
        }
        Ok((together, requests))
    }

    /// Removes requests that were not sent, or of which the store knows nothing.
    fn drop_unsent(&mut self, together: &[AcquireId], cx: &mut Cx<'_>) {
        for id in together {
            self.leave(*id, cx);
        }
    }

    /// Returns the next step after the answer to a call: each key gets its part of the answer. If
    /// the store did not reply, every token is abandoned, and a second call is made if it is early.
    pub(crate) fn all_replied(
        &mut self,
        together: &Together,
        answer: Result<AcquireAllReply, StoreError>,
        cx: &mut Cx<'_>,
    ) -> AllStep {
        let last = together.len() - 1;
        let refused_index = match &answer {
            Ok(AcquireAllReply::Refused { index, .. }) => Some(*index.min(&last)),
            Err(error) => error.key(),
            Ok(AcquireAllReply::Granted(_)) => None,
        };
        let is_idle = matches!(
            &answer,
            Ok(AcquireAllReply::Refused {
                reply: AcquireReply::Retained { .. },
                ..
            })
        );
        let part = |index: usize| match &answer {
            Ok(AcquireAllReply::Granted(grants)) if grants.len() == together.len() => {
                Ok(Reply::Acquire(AcquireReply::Granted(grants[index])))
            }
            // The number of grants does not match: every token is abandoned.
            Ok(AcquireAllReply::Granted(_)) => Err(StoreError::no_reply()),
            Ok(AcquireAllReply::Refused { reply, .. }) => Ok(Reply::Acquire(match reply {
                reply if refused_index == Some(index) && !is_idle => reply.clone(),
                // Nothing was done, so all requests are repeated.
                AcquireReply::Late => AcquireReply::Late,
                _ => AcquireReply::Busy {
                    holder_ttl: None,
                    has_waiters: false,
                },
            })),
            Err(error) => Err(error.clone()),
        };
        let (mut granted, mut requests, mut refusals) = (Vec::new(), Vec::new(), Vec::new());
        for (index, id) in together.iter().enumerate() {
            match self.replied(*id, part(index), cx) {
                Step::Done(Ok(grant)) => granted.push(grant),
                Step::Done(Err(refused)) => refusals.push((index, refused)),
                step => requests.extend(request_of(step)),
            }
        }
        if refusals.is_empty() && requests.is_empty() {
            return AllStep::Done(Ok(granted));
        }
        if requests.len() == together.len() {
            return AllStep::Call(requests);
        }
        // Not all of them: the others end as well, and nothing stays reserved.
        for Granted { held, .. } in granted {
            self.held[held].keep_until = None;
            self.guard_dropped(held, cx);
        }
        self.drop_unsent(together, cx);
        if is_idle {
            return AllStep::OneByOne;
        }
        let is_other = |(index, _): &(usize, Refused)| refused_index != Some(*index);
        let refusal = refusals.into_iter().min_by_key(is_other);
        let (index, refused) = refusal.unwrap_or((0, Refused::Store(StoreError::no_reply())));
        // The error may be that of the first attempt, which has reached another key.
        let reached = match &refused {
            Refused::Store(error) => error.key(),
            _ => None,
        };
        AllStep::Done(Err((reached.unwrap_or(index).min(last), refused)))
    }

    /// Ends a request whose task has dropped it.
    pub(crate) fn cancel_all(&mut self, together: &Together, cx: &mut Cx<'_>) {
        for id in together {
            self.cancel(*id, cx);
        }
    }
}

/// The acquire request of a step of a request that does not wait.
fn request_of(step: Step) -> Option<KeyRequest> {
    match step {
        Step::Call(Call {
            request: Request::Acquire(request),
            ..
        }) => Some(request),
        _ => None,
    }
}
