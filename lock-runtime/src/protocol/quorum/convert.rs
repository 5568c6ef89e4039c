//! The conversion of a writer to a reader, at all servers that may know it.

use tokio::time::Instant;

use super::{
    Cx, PerServer, Purpose, Reply, Request, RequestId, ServerRequest, Session, acquire::Acquiring,
    broadcast::Count, tally::Ballot, time_out::majority_timeout,
};
use crate::store::{ConvertReply, Grant, Hold, StoreError, Token};

/// The replies to a conversion.
#[derive(Debug)]
pub(super) struct Conversion {
    token: Token,
    /// The aliases that are converted, each with its server.
    aliases: Vec<(usize, Token)>,
    ballot: Ballot,
    grants: Vec<(usize, Grant)>,
    sent: Instant,
}

impl Conversion {
    /// Counts a reply. Returns whether a majority has decided.
    pub(super) fn count(&mut self, server: usize, reply: ConvertReply) -> bool {
        if let ConvertReply::Converted(grant) = reply {
            self.grants.push((server, grant));
        }
        self.ballot.count(reply != ConvertReply::NotHeld);
        self.ballot.decided().is_some()
    }
}

impl Session {
    pub(crate) fn convert(&mut self, hold: &Hold, cx: &mut Cx<'_>) -> RequestId {
        let servers = self.servers.len();
        let Some(round) = self.rounds.get_mut(&hold.token.stem()) else {
            return self.reply(Reply::Convert(ConvertReply::NotHeld));
        };
        round.converts();
        let (known, timeout) = (
            round.known().collect::<PerServer<_>>(),
            majority_timeout(round.lease()),
        );
        let mut ballot = Ballot::new(servers);
        (known.len()..servers).for_each(|_| ballot.count(false));
        let count = Count::Conversion(Conversion {
            token: hold.token,
            aliases: known.to_vec(),
            ballot,
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
        failed: &[(usize, StoreError)],
        cx: &mut Cx<'_>,
    ) -> (Request, Option<Instant>) {
        let Conversion {
            token,
            aliases,
            ballot,
            mut grants,
            sent,
        } = conversion;
        let reply = match (ballot.decided(), self.rounds.get_mut(&token.stem())) {
            (Some(true), Some(round)) => {
                // An alias that was abandoned in the meantime does not count (rule 1).
                let known: PerServer<_> = round.known().collect();
                let is_used = |server| {
                    known
                        .iter()
                        .any(|alias| alias.0 == server && aliases.contains(alias))
                };
                grants.retain(|(server, _)| is_used(*server));
                round.converted(&grants, sent, cx.now);
                let acquiring = Acquiring::of_conversion(round, cx.now);
                return self.step_acquire(id, acquiring, cx);
            }
            (Some(_), _) => Ok(Reply::Convert(ConvertReply::NotHeld)),
            (None, _) => Err(self.unanswered(failed)),
        };
        (Request::Over(reply, None), None)
    }
}
