//! The conversion of a writer to a reader, at all servers that may know it.

use super::{
    CallPurpose, InProgress, MajorityCx, MajoritySession, Reply, RequestId, ServerRequest,
    acquire::RoundRequest, exchange::broadcast::Count, exchange::time_out::majority_timeout, over,
};
use crate::{
    shell::time::Instant,
    store::{ConvertReply, Grant, Hold, StoreError, Token},
};

/// The replies to a conversion.
#[derive(Debug)]
pub(super) struct Conversion {
    token: Token,
    /// The aliases that are converted, each with its server.
    aliases: Vec<(usize, Token)>,
    pub(super) grants: Vec<(usize, Grant)>,
}

impl MajoritySession {
    pub(crate) fn convert(&mut self, hold: &Hold, cx: &mut MajorityCx<'_>) -> RequestId {
        let Some(round) = self.rounds.get_mut(&hold.token.stem()) else {
            return self.answered(Reply::Convert(ConvertReply::NotHeld));
        };
        round.converts();
        let known: Vec<_> = round.known().collect();
        let timeout = majority_timeout(round.lease);
        let count = Count::Conversion(Conversion {
            token: hold.token,
            aliases: known.clone(),
            grants: Vec::new(),
        });
        let calls = known.into_iter().map(|(server, token)| {
            let hold = hold.alias(token);
            (server, ServerRequest::Convert(hold), CallPurpose::Broadcast)
        });
        self.broadcast(count, timeout, None, calls, cx)
    }

    /// Determines the fencing token of the reader once a majority has converted it, on requests
    /// sent at `sent`.
    pub(super) fn finish_conversion(
        &mut self,
        id: RequestId,
        conversion: Conversion,
        sent: Instant,
        decision: Result<bool, StoreError>,
        cx: &mut MajorityCx<'_>,
    ) -> (InProgress, Option<Instant>) {
        let (aliases, mut grants) = (conversion.aliases, conversion.grants);
        match (decision, self.rounds.get_mut(&conversion.token.stem())) {
            (Ok(true), Some(round)) => {
                // An alias that was abandoned in the meantime does not count (rule 1).
                let is_used = |server| {
                    let mut known = round.known().filter(|(at, _)| *at == server);
                    known.any(|known| aliases.contains(&known))
                };
                grants.retain(|(server, _)| is_used(*server));
                round.converted(&grants, sent, cx.now);
                let acquiring = RoundRequest::of_conversion(round, cx.now);
                self.step_acquire(id, acquiring, cx)
            }
            (decision, _) => over(decision.map(|_| Reply::Convert(ConvertReply::NotHeld))),
        }
    }
}
