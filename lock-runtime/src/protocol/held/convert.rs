//! The conversion of a writer to a reader.

use super::super::{
    ConversionId, Cx, HeldId, Mutation, Session,
    abandon::{Afterwards, Ending},
    held::lease::Lease,
    held::{Granted, Held},
    message::{Answer, Call, Reply, Request},
};
use crate::{
    error::Loss,
    request::spec::{LockKind, Mode},
    shell::time::Instant,
    store::{ConvertReply, Hold, StoreError},
};

/// An unconfirmed conversion of a writer to a reader.
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Conversion {
    pub(in crate::protocol) writer: Held,
    sent: Instant,
}

/// The reason why a writer was not converted.
#[derive(Clone, Debug)]
pub(crate) enum ConvertError {
    /// Another guard uses the lease.
    Reentered,
    Lost(Loss),
    Store(StoreError),
}

impl Session {
    /// Begins to convert a writer, whose guard leaves, to a reader. The answer goes to
    /// [`convert_replied`](Self::convert_replied). If the future is dropped,
    /// [`convert_dropped`](Self::convert_dropped) takes its place.
    pub(crate) fn convert(
        &mut self,
        id: HeldId,
        cx: &mut Cx<'_>,
    ) -> Result<(ConversionId, Call), ConvertError> {
        self.notice_loss(id, cx);
        if self.held.get(id).is_some_and(|held| held.guards > 1) {
            return Err(ConvertError::Reentered);
        }
        let Some(writer) = self.remove_held(id, cx) else {
            return Err(ConvertError::Lost(Loss::Taken));
        };
        if let Some(loss) = writer.loss {
            return Err(ConvertError::Lost(loss));
        }
        let request = Request::Convert(writer.hold.clone());
        let call = Call::new(request, writer.terms.call_timeout());
        let sent = cx.now;
        Ok((self.conversions.insert(Conversion { writer, sent }), call))
    }

    /// Records the answer to a conversion. The reader keeps the token, the lease and the limits of
    /// the writer.
    pub(crate) fn convert_replied(
        &mut self,
        id: ConversionId,
        answer: Answer,
        cx: &mut Cx<'_>,
    ) -> Result<Granted, ConvertError> {
        let Some(Conversion { writer, sent }) = self.conversions.get(id) else {
            return Err(ConvertError::Lost(Loss::Taken));
        };
        if let Some(loss) = writer.loss {
            self.convert_dropped(id, cx);
            return Err(ConvertError::Lost(loss));
        }
        let mut terms = writer.terms;
        // The limits of the writer continue for the reader; they do not start again.
        let held_for = sent.saturating_duration_since(writer.lease.since());
        terms.mode = Mode::Shared;
        terms.max_hold = (terms.max_hold).map(|limit| limit.saturating_sub(held_for));
        let error = match answer {
            Ok(Reply::Convert(ConvertReply::Converted(grant))) => {
                let ttl = grant.ttl.min(writer.longest_lease);
                let lease = Lease::granted(terms.lease, terms.renew, *sent, ttl, cx.fraction());
                let lease = lease.held_since(*sent, terms.max_hold);
                if !lease.validity(cx.now).is_zero() {
                    let hold = Hold::new(writer.hold.key.clone(), Mode::Shared, writer.hold.token);
                    let mut reader = Held::new(hold, grant.fence, terms, lease, None);
                    if !cx.breaks(Mutation::ConvertsForOneLease) {
                        reader.longest_lease = writer.longest_lease;
                    }
                    reader.keep_until = writer.keep_until;
                    self.conversions.remove(id);
                    self.freed(LockKind::Lock, &reader.hold.key, cx);
                    return Ok(self.hold(reader, cx));
                }
                ConvertError::Lost(lease.loss(cx.now).unwrap_or(Loss::Expired))
            }
            Ok(_) => ConvertError::Lost(Loss::Taken),
            Err(error) => ConvertError::Store(error),
        };
        self.convert_dropped(id, cx);
        Err(error)
    }

    /// Ends a conversion whose outcome is unknown: the token is given up in both modes, first as a
    /// writer and then as a reader. Once the writer is gone, the conversion has no effect. The lock
    /// stays reserved for the rest of `min_hold`.
    pub(crate) fn convert_dropped(&mut self, id: ConversionId, cx: &mut Cx<'_>) {
        let Some(Conversion { writer, .. }) = self.conversions.remove(id) else {
            return;
        };
        let (keep_until, lease) = (writer.keep_until, writer.longest_lease);
        let ending = |hold| Ending::of(hold, keep_until, cx.now);
        let writer = writer.hold;
        let reader = Hold::new(writer.key.clone(), Mode::Shared, writer.token);
        let afterwards = Some(Afterwards::new(ending(reader), lease));
        self.end(ending(writer), lease, None, afterwards, cx);
    }
}
