//! Requests of a campaign to the servers, and the delivery of their replies.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use futures_util::future::BoxFuture;
use tokio::time::Instant;

use super::{
    campaign::{Campaign, Heard, PerNode, Say},
    node::Node,
};
use crate::{
    acquire::STRAGGLE,
    call::only,
    fence::FencingToken,
    store::{Hold, KeyRequest, Renewal, StoreError, Token},
    sync::lock,
};

/// The parameters that all acquires of a round have in common.
pub(super) struct Terms {
    pub(super) lease: Duration,
    pub(super) sent: Instant,
    /// The time by which the caller must have a reply. It is a little before the caller's time-out,
    /// so that the caller gets an error that names the servers that did not reply.
    pub(super) answer_by: Instant,
    /// No acquire may be executed after this.
    pub(super) deadline: Instant,
    /// The time in which a server must reply; by default that of an acquire.
    pub(super) patience: Option<Duration>,
    /// For each server, the alias of a reader in whose group this one may be admitted.
    reader_group: Option<PerNode<Option<Token>>>,
}

impl Terms {
    pub(super) fn new(
        request: &KeyRequest,
        reader_group: Option<PerNode<Option<Token>>>,
        now: Instant,
    ) -> Self {
        // The deadline is the end of the caller's wait plus `STRAGGLE`.
        let waits = request.deadline.saturating_duration_since(now + STRAGGLE);
        let answer_by = now + waits * 9 / 10;
        let KeyRequest {
            lease, deadline, ..
        } = *request;
        Self {
            lease,
            sent: now,
            answer_by,
            deadline,
            patience: None,
            reader_group,
        }
    }

    pub(super) fn again(campaign: &Campaign, now: Instant) -> Self {
        let lease = campaign.lease();
        let answer_by = now + super::answer_timeout(lease);
        let deadline = answer_by + STRAGGLE;
        Self {
            lease,
            sent: now,
            answer_by,
            deadline,
            patience: None,
            reader_group: None,
        }
    }

    pub(super) fn deadline_from(&self, now: Instant, patience: Duration) -> Instant {
        self.deadline.max(now + patience + STRAGGLE)
    }
}

/// Sends one request to one server, and passes the reply to the campaign. If the server is not
/// `admitted`, the error is passed instead and nothing is sent. An acquire proposes `proposal`.
pub(super) fn call(
    (index, node): (usize, Arc<Node>),
    campaign: Arc<Mutex<Campaign>>,
    state: &Campaign,
    terms: &Terms,
    proposal: FencingToken,
    say: Say,
    admitted: Result<(), StoreError>,
) -> BoxFuture<'static, ()> {
    let Hold {
        ref key,
        mode,
        token,
    } = *state.hold();
    let (round, sent) = (state.round(), terms.sent);
    let hold = |token| Hold::new(key.clone(), mode, token);
    let tell = move |campaign: &Mutex<Campaign>, token, result: Result<Heard, StoreError>| {
        lock(campaign).heard(
            index,
            token,
            round,
            result.unwrap_or_else(Heard::Failed),
            sent,
        );
    };
    if let Err(error) = admitted {
        let token = match say {
            Say::Acquire(token, _) | Say::Poll(token) | Say::Renew(token) => token,
            Say::Raise(_) => state.held_at(index).unwrap_or(token),
        };
        return Box::pin(async move { tell(&campaign, token, Err(error)) });
    }
    match say {
        Say::Acquire(token, if_busy) => {
            let reader_group = terms
                .reader_group
                .as_ref()
                .and_then(|reader_group| reader_group[index]);
            let request = KeyRequest::new(hold(token), terms.lease, terms.deadline)
                .reserved(state.reserved());
            let request = KeyRequest {
                if_busy,
                ..request.reader_group(reader_group)
            };
            Box::pin(async move {
                let result = node.store.acquire_proposed(&request, proposal).await;
                node.note(&result, Instant::now());
                tell(&campaign, token, result.map(Heard::Acquire));
            })
        }
        Say::Poll(token) => {
            let hold = hold(token);
            Box::pin(async move {
                let result = only(node.store.poll(std::slice::from_ref(&hold))).await;
                node.note(&result, Instant::now());
                tell(&campaign, token, result.map(Heard::Poll));
            })
        }
        Say::Renew(token) => {
            let renewal = Renewal::new(hold(token), terms.lease);
            Box::pin(async move {
                let result = only(node.store.renew(std::slice::from_ref(&renewal))).await;
                node.note(&result, Instant::now());
                tell(&campaign, token, result.map(Heard::Renew));
            })
        }
        Say::Raise(fence) => {
            let (key, token) = (key.clone(), state.held_at(index).unwrap_or(token));
            Box::pin(async move {
                let result = node.store.raise(&key, mode.kind(), fence).await;
                node.note(&result, Instant::now());
                tell(
                    &campaign,
                    token,
                    result.map(|reply| Heard::Raise(fence, reply)),
                );
            })
        }
    }
}
