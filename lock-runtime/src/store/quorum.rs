//! Locks on several independent servers that agree by majority: [Redlock] with fencing tokens.
//!
//! A client holds a lock while more than half of the servers hold it for that client. If one server
//! dies, or comes back without its data, no lock is lost and none is granted to a second holder.
//! Requests do not wait for a server that does not reply.
//!
//! # Fencing tokens
//!
//! With every acquire attempt, the client proposes a number. It is larger than every fencing token
//! that the client has seen, and not smaller than the client's clock in microseconds. Each server
//! computes max(its last number + 1, the proposal), stores the result and replies with it; a
//! proposal counts as at most 60 s ahead of the server's clock. The fencing token of the grant is
//! the largest number among the votes of the majority. If a majority replied with exactly this
//! number, the grant is complete. This is the usual case and takes one round trip. Otherwise the
//! number is first written back to the servers that voted with another one
//! (`QuorumMember::raise`).
//!
//! A server gives each number to at most one acquisition: it either draws the number for the
//! acquisition, or raises its counter to the number for it. The token of a reader counts when a
//! majority has given this number to its acquisition. If others have taken the number in the
//! meantime, the client proposes a larger one to the servers that have voted, until the time of the
//! request is up. So no two grants have the same token. The token of a writer also counts at a
//! server whose counter has already passed it: nothing else is granted while a majority holds the
//! lock for the writer, so no further round trip is needed (see `Campaign::is_for` for the proof).
//!
//! So when a guard is handed out, a majority of the servers will never again reply with its token
//! or with a smaller number. Every acquire attempt that begins later needs a majority too. The two
//! majorities have a server in common, so the later token is larger. The tokens of readers that
//! acquire at the same time are in no particular order. Clocks only make the servers agree on a
//! number; the guarantee does not depend on them.
//!
//! The guarantee breaks if servers lose data and a majority is left without the number. Therefore a
//! server that was restarted, or whose data are gone, does not vote until every lease that it may
//! have forgotten has expired (`longest_lease` of [`QuorumStore::new`]). By then the numbers that
//! it has forgotten are smaller than any clock, provided that the clocks differ by less than
//! `longest_lease`.
//!
//! # Contention
//!
//! Clients that ask all servers at once split the votes, and it is possible that none of them gets
//! a majority. So for each lock one of the servers, the *coordinator*, keeps the wait queue.
//! Waiters queue at the coordinator, and a waiter to which the coordinator hands off the lock asks
//! the other servers. Votes are not split as long as the coordinator is healthy. Its vote is not
//! required for a lock: if the coordinator does not reply, votes alone decide, and the next server
//! becomes the coordinator.
//!
//! A client may die after the coordinator has voted for it and before the other servers have. So a
//! request that finds a majority free, but the coordinator's vote taken, yields once: the client
//! with that vote may be about to ask the other servers. After a pause the request checks again. If
//! the coordinator's vote still belongs to the same grant and a majority is still free, the request
//! is granted the lock. The pause is ten round trips plus 20 ms, times a random factor between 0.5
//! and 1.5, with two exceptions:
//!
//! - A queued reader pauses longer, because the coordinator may hold it back for a writer in front
//!   of it. That writer polls in the meantime if it is alive.
//! - A request that does not wait pauses for at most a third of its remaining time. It is refused
//!   without a second check if another request waits in the coordinator's queue.
//!
//! A waiter polls the coordinator about every 80 ms plus four round trips. If the coordinator
//! has not handed off the lock since the last poll, the waiter also checks the other servers:
//! first after this interval, then after intervals that double up to 700 ms. So a waiter is
//! granted the lock within 250 ms and a few tens of round trips after a majority has become
//! free, if the servers reply.
//!
//! Several locks of one request are acquired one after the other, in the order of their keys, with
//! one round trip for each. Of several requests with locks in common, one is granted: they do not
//! refuse each other.
//!
//! [Redlock]: https://redis.io/docs/latest/develop/clients/patterns/distributed-locks/

mod asking;
mod background;
mod calls;
pub(crate) mod campaign;
mod contended;
#[cfg(any())]
mod explorer;
mod holding;
mod majority;
mod node;
mod proposals;
mod survey;
mod tally;
#[cfg(test)]
mod tests;

use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex, Weak},
    time::Duration,
};

use foldhash::fast::RandomState;
use futures_util::future::{BoxFuture, join_all};
use tokio::time::Instant;

use self::{
    background::Background, campaign::Campaign, contended::Contended, node::Node,
    proposals::Proposals,
};
use super::{
    AcquireAllReply, AcquireReply, ConvertReply, Hold, Inspection, KeyPart, KeyRequest, Limits,
    Listener, Listeners, PollReply, QuorumMember, Release, ReleaseReply, RenewReply, Renewal,
    RevokeReply, RevokeScope, Store, StoreError, StoreEvent, Token,
};
use crate::{
    error::{LockError, LockErrorKind},
    key::LockKey,
    spec::{LockKind, call_timeout},
    sync::lock,
};

pub(crate) use self::majority::majority;

type Shared = Arc<Mutex<Campaign>>;

/// Locks on several independent servers that agree by majority.
///
/// Supports exclusive and shared locks, and no permits ([`Limits`]): with two permits on each of
/// five servers, three clients could have three votes each.
pub struct QuorumStore {
    inner: Arc<Inner>,
    /// Keeps the event listeners alive: the servers hold weak references to them.
    _ears: Vec<Arc<Ear>>,
}

struct Inner {
    nodes: Vec<Arc<Node>>,
    longest_lease: Duration,
    /// The acquisitions that are held or wanted, by the stem of their tokens.
    campaigns: Mutex<HashMap<u128, Shared, RandomState>>,
    proposals: Proposals,
    contended: Contended,
    /// The moving average of the time in which a majority replies.
    round_trip: Mutex<Duration>,
    background: Arc<Background>,
    listeners: Listeners,
}

/// The event listener of one server.
struct Ear {
    node: usize,
    inner: Weak<Inner>,
}

impl Listener for Ear {
    fn on_event(&self, event: &StoreEvent) {
        if let Some(inner) = self.inner.upgrade() {
            inner.on_event(self.node, event);
        }
    }
}

/// The time in which a majority must reply: 90 % of the caller's time-out, so that the caller gets
/// an error that names the servers that did not reply.
fn answer_timeout(lease: Duration) -> Duration {
    call_timeout(lease) * 9 / 10
}

/// The time in which one server must reply to an acquire: min(lease/20, 200 ms).
fn node_timeout(lease: Duration) -> Duration {
    (lease / 20).min(Duration::from_millis(200))
}

impl QuorumStore {
    /// Creates a store over independent `servers`, each with a name for messages. The number of
    /// servers must be odd and at least three. All clients must list the servers in the same order.
    ///
    /// No server may forget a lock before its lease has expired. `longest_lease` is the longest
    /// lease of a request ([`Limits`]), and therefore the time for which a server must not vote
    /// after a restart. The servers of
    /// [`LockClientBuilder::connect_redlock`](crate::LockClientBuilder::connect_redlock) observe
    /// this by themselves.
    ///
    /// # Errors
    /// `InvalidSpec` if the number of servers is even or less than three.
    pub fn new(
        servers: impl IntoIterator<Item = (String, Arc<dyn QuorumMember>)>,
        longest_lease: Duration,
    ) -> Result<Self, LockError> {
        let nodes: Vec<_> = servers
            .into_iter()
            .map(|(name, store)| Arc::new(Node::new(name, store)))
            .collect();
        check_count(nodes.len())?;
        let inner = Arc::new(Inner {
            nodes,
            longest_lease,
            campaigns: Mutex::default(),
            proposals: Proposals::default(),
            contended: Contended::default(),
            round_trip: Mutex::new(Duration::from_millis(1)),
            background: Arc::default(),
            listeners: Listeners::default(),
        });
        let ear = |(node, server): (usize, &Arc<Node>)| {
            let ear = Arc::new(Ear {
                node,
                inner: Arc::downgrade(&inner),
            });
            let listener: Weak<Ear> = Arc::downgrade(&ear);
            server.store.listen(listener);
            ear
        };
        let ears = inner.nodes.iter().enumerate().map(ear).collect();
        Ok(Self { _ears: ears, inner })
    }
}

/// Checks that the number of servers is odd and at least three.
///
/// # Errors
/// `InvalidSpec`, with the reason.
pub(crate) fn check_count(servers: usize) -> Result<(), LockError> {
    let reason = match servers {
        0..3 => {
            "a majority of fewer than three is all of them, so none may fail; use three or five"
        }
        _ if servers.is_multiple_of(2) => {
            "one server fewer tolerates as many failures; use an odd number"
        }
        _ => return Ok(()),
    };
    Err(LockError::new(
        LockErrorKind::InvalidSpec,
        format!("{servers} servers for one lock: {reason}"),
    ))
}

impl Inner {
    fn majority(&self) -> usize {
        majority(self.nodes.len())
    }

    fn campaign(&self, token: Token) -> Option<Shared> {
        lock(&self.campaigns).get(&token.stem()).cloned()
    }

    fn forget(&self, token: Token) {
        lock(&self.campaigns).remove(&token.stem());
    }

    /// The campaign of a request, and whether it is new.
    fn begin(&self, request: &KeyRequest, now: Instant) -> (Shared, bool) {
        let mut campaigns = lock(&self.campaigns);
        let known = campaigns.get(&request.hold.token.stem()).cloned();
        if let Some(known) = known {
            return (known, false);
        }
        let patience = self.patience();
        let campaign = Campaign::new(request, self.nodes.len(), patience, now);
        let campaign = Arc::new(Mutex::new(campaign));
        campaigns.insert(request.hold.token.stem(), campaign.clone());
        (campaign, true)
    }

    /// Handles an event that a server has pushed.
    fn on_event(&self, node: usize, event: &StoreEvent) {
        match event {
            StoreEvent::Granted { hold, grant } => {
                let Some(campaign) = self.campaign(hold.token) else {
                    return;
                };
                let mut state = lock(&campaign);
                if state.pushed(node, hold.token, *grant) {
                    drop(state);
                    // Makes the waiter poll at once. That poll also asks the other servers.
                    let (key, kind) = (hold.key.clone(), hold.mode.kind());
                    self.listeners.notify(&StoreEvent::FreeIn {
                        key,
                        kind,
                        ttl: Duration::ZERO,
                    });
                }
            }
            StoreEvent::Revoked { token } => {
                if let Some(campaign) = self.campaign(*token) {
                    let token = lock(&campaign).hold().token;
                    self.listeners.notify(&StoreEvent::Revoked { token });
                }
            }
            // The other servers make up for notifications and data that this server has lost. Only
            // the waiters in its queue have to poll.
            StoreEvent::Disconnected => {
                let campaigns: Vec<_> = lock(&self.campaigns).values().cloned().collect();
                for campaign in campaigns {
                    let waiting = lock(&campaign).waits_at(node);
                    if let Some(Hold { key, mode, .. }) = waiting {
                        self.listeners.notify(&StoreEvent::FreeIn {
                            key,
                            kind: mode.kind(),
                            ttl: Duration::ZERO,
                        });
                    }
                }
            }
            event => self.listeners.notify(event),
        }
    }
}

impl Store for QuorumStore {
    fn acquire<'a>(
        &'a self,
        request: &'a KeyRequest,
    ) -> BoxFuture<'a, Result<AcquireReply, StoreError>> {
        Box::pin(self.inner.acquire(request))
    }

    fn acquire_all<'a>(
        &'a self,
        requests: &'a [KeyRequest],
    ) -> BoxFuture<'a, Result<AcquireAllReply, StoreError>> {
        Box::pin(self.inner.acquire_all(requests))
    }

    fn poll<'a>(&'a self, holds: &'a [Hold]) -> BoxFuture<'a, Vec<Result<PollReply, StoreError>>> {
        Box::pin(join_all(holds.iter().map(|hold| self.inner.poll(hold))))
    }

    fn renew<'a>(
        &'a self,
        renewals: &'a [Renewal],
    ) -> BoxFuture<'a, Vec<Result<RenewReply, StoreError>>> {
        Box::pin(self.inner.renew(renewals))
    }

    fn release<'a>(
        &'a self,
        release: &'a Release,
    ) -> BoxFuture<'a, Result<ReleaseReply, StoreError>> {
        Box::pin(self.inner.release(release))
    }

    fn convert<'a>(&'a self, hold: &'a Hold) -> BoxFuture<'a, Result<ConvertReply, StoreError>> {
        Box::pin(self.inner.convert(hold))
    }

    fn abandon<'a>(&'a self, hold: &'a Hold) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(async {
            self.inner.abandon(hold).await;
            Ok(())
        })
    }

    fn inspect<'a>(
        &'a self,
        key: &'a LockKey,
        kind: LockKind,
    ) -> BoxFuture<'a, Result<Inspection, StoreError>> {
        Box::pin(self.inner.inspect(key, kind))
    }

    fn revoke<'a>(
        &'a self,
        key: &'a LockKey,
        kind: LockKind,
        scope: RevokeScope,
    ) -> BoxFuture<'a, Result<RevokeReply, StoreError>> {
        Box::pin(self.inner.revoke(key, kind, scope))
    }

    fn name_of(&self, key: &LockKey, kind: LockKind, part: KeyPart) -> Option<String> {
        // All servers use the same names.
        self.inner.nodes.first()?.store.name_of(key, kind, part)
    }

    fn server_of(&self, _key: &LockKey, _kind: LockKind) -> u64 {
        // A renewal is sent to all servers, and waits for a majority.
        0
    }

    fn limits(&self) -> Limits {
        let Inner {
            nodes,
            longest_lease,
            ..
        } = &*self.inner;
        let limits = Limits::new().permits(false).longest_lease(*longest_lease);
        // The locks of a request are acquired one by one, so the number of keys has no limit.
        nodes.iter().fold(limits, |limits, node| {
            let of_node = node.store.limits();
            limits
                .shortest_lease(limits.shortest_lease.max(of_node.shortest_lease))
                .longest_lease(limits.longest_lease.min(of_node.longest_lease))
                .push(limits.push && of_node.push)
        })
    }

    fn listen(&self, listener: Weak<dyn Listener>) {
        self.inner.listeners.add(listener);
    }

    fn settled(&self) -> BoxFuture<'_, ()> {
        Box::pin(self.inner.background.settled())
    }
}

impl fmt::Debug for QuorumStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QuorumStore")
            .field("servers", &self.inner.nodes)
            .finish_non_exhaustive()
    }
}
