//! Acquires one key, or several at once.
//!
//! The keys of one slot are acquired by one script. The slots of a cluster are acquired one after
//! another, in an order that is the same for all clients, so that of two requests for the same keys
//! one gets them all.

use std::{slice, sync::Arc};

use futures_util::future::join_all;

use super::{
    super::{RedisStore, connection::Errand, script},
    Call, Field,
    names::{Names, marker_name},
    reply::{foreign_part, unexpected},
};
use crate::{
    guard::fence::FencingToken,
    protocol::STRAGGLE,
    request::spec::{Mode, call_timeout},
    shell::{call::within, time::Instant},
    store::{AcquireAllReply, AcquireReply, IfBusy, KeyRequest, StoreError},
};

impl RedisStore {
    pub(super) async fn acquire_one(
        &self,
        request: &KeyRequest,
    ) -> Result<AcquireReply, StoreError> {
        let (requests, if_busy) = (slice::from_ref(request), request.if_busy);
        match self.acquire_in_time(requests, if_busy).await? {
            AcquireAllReply::Granted(grants) => {
                let grant = grants.first().copied().ok_or_else(unexpected)?;
                Ok(AcquireReply::Granted(grant))
            }
            AcquireAllReply::Refused { reply, .. } => Ok(reply),
        }
    }

    /// Acquires all locks or none. After an error the state of each is unknown, and the caller
    /// abandons them all.
    pub(super) async fn acquire_several(
        &self,
        requests: &[KeyRequest],
    ) -> Result<AcquireAllReply, StoreError> {
        let slots = self.servers.by_slot(requests);
        let [
            KeyRequest {
                lease, deadline, ..
            },
            ..,
        ] = requests
        else {
            return Ok(AcquireAllReply::Granted(Vec::new()));
        };
        // Each slot has the time of a call.
        let patience = call_timeout(*lease);
        if slots.len() == 1 {
            let acquiring = self.acquire_in_time(requests, IfBusy::Refuse);
            return within(patience, acquiring).await;
        }
        let mut grants = vec![None; requests.len()];
        for (taken, indices) in slots.iter().enumerate() {
            let some = indices.iter().map(|index| requests[*index].clone());
            let some: Vec<_> = some.collect();
            if taken > 0 && Instant::now() + patience + STRAGGLE > *deadline {
                let (acquired, index) = (grants.iter().flatten().count(), indices[0]);
                return Err(StoreError::out_of_turn(acquired, requests.len()).of_key(index));
            }
            // The locks of the slots before may be held.
            let failed = |error: StoreError| {
                let unsent = error.is_unsent() && taken == 0;
                error.of_key(indices[0]).with_unsent(unsent)
            };
            let acquiring = self.acquire_in_time(&some, IfBusy::Refuse);
            match within(patience, acquiring).await.map_err(failed)? {
                AcquireAllReply::Granted(granted) => {
                    for (index, grant) in indices.iter().zip(granted) {
                        grants[*index] = Some(grant);
                    }
                }
                AcquireAllReply::Refused { index, reply } => {
                    // A refused caller expects to hold nothing, and does not abandon
                    // anything itself.
                    let held = slots[..taken].iter().flatten();
                    let abandoned = held.map(|index| self.abandon_one(&requests[*index].hold));
                    for abandoned in join_all(abandoned).await {
                        abandoned.map_err(failed)?;
                    }
                    let index = indices[index];
                    return Ok(AcquireAllReply::Refused { index, reply });
                }
            }
        }
        let grants: Option<Vec<_>> = grants.into_iter().collect();
        Ok(AcquireAllReply::Granted(grants.ok_or_else(unexpected)?))
    }

    /// Acquires with one script, and tries again if the server rejects the request as late although
    /// its deadline has not passed here: the server's clock has jumped, and the first reply has
    /// corrected our estimate of it.
    async fn acquire_in_time(
        &self,
        requests: &[KeyRequest],
        if_busy: IfBusy,
    ) -> Result<AcquireAllReply, StoreError> {
        let mut reply = self.try_acquire(requests, if_busy).await?;
        let now = Instant::now();
        if matches!(&reply, AcquireAllReply::Refused { reply, .. } if *reply == AcquireReply::Late)
            && requests.iter().all(|request| request.deadline > now)
        {
            reply = self.try_acquire(requests, if_busy).await?;
        }
        if let AcquireAllReply::Granted(_) = reply {
            let grants = requests.iter().map(|request| &request.hold);
            self.settle(grants).await?;
        }
        Ok(reply)
    }

    /// Acquires all locks or none. A single request may enter the wait queue, which counts as a
    /// refusal.
    async fn try_acquire(
        &self,
        requests: &[KeyRequest],
        if_busy: IfBusy,
    ) -> Result<AcquireAllReply, StoreError> {
        let Some(deadline) = requests.iter().map(|request| request.deadline).min() else {
            return Ok(AcquireAllReply::Granted(Vec::new()));
        };
        let KeyRequest { hold, proposal, .. } = &requests[0];
        let place = self.servers.place(hold);
        let channel = match if_busy {
            IfBusy::Queue => self.servers.channel(place),
            IfBusy::Refuse => "".into(),
        };
        let write = |deadline: u64| {
            // Known once the first connection is established.
            let marker = self.servers.marker();
            let keys = 3 * requests.len() + usize::from(marker.is_some());
            let mut call = Call::new(&script::ACQUIRE, keys);
            for KeyRequest { hold, .. } in requests {
                call = call.names(&Names::new(&self.namespace, &hold.key, hold.mode.kind()));
            }
            if marker.is_some() {
                call = call.arg(marker_name(&self.namespace));
            }
            call = call.mark(Field::Deadline).number(deadline);
            call = call.arg(channel.as_bytes());
            for request in requests {
                call = call.hold(&request.hold);
                call = call.mark(Field::Lease).millis(request.lease);
                call = call.mark(Field::Reserved);
                // Only writers reserve tokens: the reserved tokens of readers would not increase
                // in the order of their grants.
                call = match (request.hold.mode, request.reader_group) {
                    (Mode::Exclusive, _) => call.number(request.reserved.into()),
                    (Mode::Shared, Some(reader_group)) => call.token(reader_group),
                    (Mode::Shared, None) => call.arg(""),
                    (Mode::Permits(_), _) => call.number(0),
                };
            }
            let Some(marker) = marker else { return call };
            // Without a proposal the server's clock determines the token.
            call.mark(Field::Marker)
                .arg(marker)
                .mark(Field::Proposal)
                .number(proposal.map_or(0, FencingToken::number))
        };
        // Not repeated under the same token: the first request may be executed after the lock was
        // released again, and the lock would then have no owner (rule 1).
        let waits = requests
            .iter()
            .any(|it| it.then_queues || it.if_busy == IfBusy::Queue);
        let errand = Errand::By {
            deadline,
            write: &write,
            slot: place,
            in_outage: self.servers.in_outage(waits),
        };
        let mut answer = self.servers.run(errand).await?;
        let mut reply = answer.reply()?;
        let _server_time = reply.count()?;
        let refused = |index, reply| Ok(AcquireAllReply::Refused { index, reply });
        match reply.word() {
            "granted" => {
                let grants = requests.iter().map(|_| reply.grant());
                Ok(AcquireAllReply::Granted(grants.collect::<Result<_, _>>()?))
            }
            "queued" if requests.len() == 1 => {
                self.servers.waits(hold, &answer);
                let reply = AcquireReply::Queued {
                    counter: reply.counter()?,
                    holder_ttl: reply.known_ttl()?,
                };
                refused(0, reply)
            }
            "refused" => {
                let index = usize::try_from(reply.count()?).map_err(|_| unexpected())?;
                let index = index.checked_sub(1).filter(|index| *index < requests.len());
                let index = index.ok_or_else(unexpected)?;
                let reply = match reply.text()?.as_str() {
                    "busy" => AcquireReply::Busy {
                        holder_ttl: reply.known_ttl()?,
                        has_waiters: reply.number()? == 1,
                    },
                    "retained" => AcquireReply::Retained {
                        holder_ttl: reply.known_ttl()?,
                    },
                    "mismatch" => AcquireReply::ModeMismatch,
                    "done" => AcquireReply::Done(Arc::new(reply.done(&requests[index].hold.key)?)),
                    word => AcquireReply::ForeignKey(foreign_part(word).ok_or_else(unexpected)?),
                };
                refused(index, reply)
            }
            "strange" => Err(self.lost_its_data()),
            "late" => refused(0, AcquireReply::Late),
            _ => Err(unexpected()),
        }
    }
}
