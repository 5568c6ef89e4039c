//! The conversion of a writer to a reader, at all servers that may know it.

use tokio::time::Instant;

use super::{
    Cx, PerServer, Purpose, Reply, Request, RequestId, ServerRequest, Session, acquire::Acquiring,
    broadcast::Count, over, time_out::majority_timeout,
};
use crate::store::{ConvertReply, Grant, Hold, StoreError, Token};

/// The replies to a conversion.
#[derive(Debug)]
pub(super) struct Conversion {
    token: Token,
    /// The aliases that are converted, each with its server.
    aliases: Vec<(usize, Token)>,
    pub(super) grants: Vec<(usize, Grant)>,
    sent: Instant,
}

impl Session {
    pub(crate) fn convert(&mut self, hold: &Hold, cx: &mut Cx<'_>) -> RequestId {
        let Some(round) = self.rounds.get_mut(&hold.token.stem()) else {
            return self.reply(Reply::Convert(ConvertReply::NotHeld));
        };
        round.converts();
        let known: Vec<_> = round.known().collect();
        let timeout = majority_timeout(round.lease);
        let count = Count::Conversion(Conversion {
            token: hold.token,
            aliases: known.clone(),
            grants: Vec::new(),
            sent: cx.now,
        });
        let calls = known.into_iter().map(|(server, token)| {
            let hold = hold.alias(token);
            (server, ServerRequest::Convert(hold), Purpose::Broadcast)
        });
        self.broadcast(count, timeout, None, calls, cx)
    }

    /// Determines the fencing token of the reader once a majority has converted it.
    pub(super) fn is_converted(
        &mut self,
        id: RequestId,
        conversion: Conversion,
        decision: Result<bool, StoreError>,
        cx: &mut Cx<'_>,
    ) -> (Request, Option<Instant>) {
        let Conversion {
            token,
            mut aliases,
            mut grants,
            sent,
        } = conversion;
        let reply = match (decision, self.rounds.get_mut(&token.stem())) {
            (Ok(true), Some(round)) => {
                // An alias that was abandoned in the meantime does not count (rule 1).
                let known: PerServer<_> = round.known().collect();
                aliases.retain(|alias| known.contains(alias));
                grants.retain(|(server, _)| aliases.iter().any(|(at, _)| at == server));
                round.converted(&grants, sent, cx.now);
                let acquiring = Acquiring::of_conversion(round, cx.now);
                return self.step_acquire(id, acquiring, cx);
            }
            (decision, _) => decision.map(|_| Reply::Convert(ConvertReply::NotHeld)),
        };
        over(reply)
    }
}
