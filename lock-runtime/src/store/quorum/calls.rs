//! What is said to the servers for a campaign, and how it hears of their answers.

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
    fence::FencingToken,
    store::{Hold, KeyRequest, Renewal, StoreError, Token},
    sync::lock,
};

/// What all acquires of a round have in common.
pub(super) struct Terms {
    pub(super) lease: Duration,
    pub(super) sent: Instant,
    /// Whoever asks is to have an answer by then: a little before they stop waiting, so that they learn who was silent.
    pub(super) answer_by: Instant,
    /// After that no acquire is to be executed.
    pub(super) deadline: Instant,
    /// How long a server may take to answer; by default as long as for an acquire.
    pub(super) patience: Option<Duration>,
    /// Chosen anew for each of those that are sent together.
    pub(super) proposal: Option<FencingToken>,
    /// The names of a reader beside whom this one may come in, at each server.
    beside: Option<PerNode<Option<Token>>>,
}

impl Terms {
    pub(super) fn new(
        request: &KeyRequest,
        beside: Option<PerNode<Option<Token>>>,
        now: Instant,
    ) -> Self {
        // The deadline tells how long the caller waits.
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
            proposal: None,
            beside,
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
            proposal: None,
            beside: None,
        }
    }

    pub(super) fn deadline_from(&self, now: Instant, patience: Duration) -> Instant {
        self.deadline.max(now + patience + STRAGGLE)
    }
}

/// Says one thing to one server, and tells the campaign what came of it. A server that is not `admitted` is not asked.
pub(super) fn call(
    node: Arc<Node>,
    index: usize,
    campaign: Arc<Mutex<Campaign>>,
    state: &Campaign,
    terms: &Terms,
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
            let beside = terms.beside.as_ref().and_then(|beside| beside[index]);
            let request =
                KeyRequest::new(hold(token), terms.lease, terms.deadline).spare(state.spare());
            let request = KeyRequest {
                if_busy,
                ..request.beside(beside).proposal(terms.proposal)
            };
            Box::pin(async move {
                let result = node.store.acquire(&request).await;
                node.note(&result, Instant::now());
                tell(&campaign, token, result.map(Heard::Acquire));
            })
        }
        Say::Poll(token) => {
            let hold = hold(token);
            Box::pin(async move {
                let result = node.store.poll(&hold).await;
                node.note(&result, Instant::now());
                tell(&campaign, token, result.map(Heard::Poll));
            })
        }
        Say::Renew(token) => {
            let renewal = Renewal::new(hold(token), terms.lease);
            Box::pin(async move {
                let mut replies = node.store.renew(std::slice::from_ref(&renewal)).await;
                let result = replies.pop().unwrap_or_else(|| Err(StoreError::late()));
                node.note(&result, Instant::now());
                tell(&campaign, token, result.map(Heard::Renew));
            })
        }
        Say::Raise(fence) => {
            let (key, token) = (key.clone(), state.held_at(index).unwrap_or(token));
            Box::pin(async move {
                let result = node.store.raise(&key, mode.family(), fence).await;
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
