//! Locks on several independent servers, of which a majority has to agree: [Redlock], with fencing tokens.
//!
//! A lock is held by whoever holds it at more than half of the servers. One server that dies, or that comes back without its
//! data, takes no lock away and gives none to a second holder; one that does not answer is not waited for.
//!
//! # Fencing tokens
//!
//! With every acquire the client proposes a number: larger than any that it has seen, and not smaller than its clock in
//! microseconds. Each server keeps max(its last + 1, the proposal) and answers it. The token of the grant is the largest
//! number that the majority has answered. If a majority has answered that very number, the grant
//! has it: the usual case, in one round trip. If not, it is written back to the others first
//! (`Store::raise`).
//!
//! A server gives each number to one acquisition at most: it draws it for one, or raises its
//! counter to it for one. A reader's token counts when a majority has given that number to this
//! acquisition. Where others have taken it meanwhile, a larger one is proposed to those that have
//! voted, until the time of the request is up; so no two grants have the same token. A writer's
//! counts as well where the counter had passed it already: nothing else is granted while a majority
//! keeps the lock for the writer, so that costs no further round trip (`Campaign::is_for` has the
//! argument).
//!
//! So when a guard is handed out, a majority of the servers will never again answer its token or a
//! smaller one. Any grant that is asked for later needs a majority, which has a server in common
//! with that one; so its token is larger. Readers that ask at the same time are in no order. Clocks
//! only make the
//! numbers meet; nothing depends on them. It breaks where servers forget: if so many of them lose their data that a
//! majority is left without the number. A server that was restarted, or whose data are gone, therefore does not vote until every
//! lease that it may have forgotten is over (`longest_lease` of [`QuorumStore::new`]); the numbers it has forgotten are by then smaller than
//! any clock, if the clocks agree better than that.
//!
//! # Contention
//!
//! Clients that ask all servers at once split the votes, and none may get a majority. So one server, another one for
//! each lock, keeps the order: who waits stands in that server's line, and who is handed the lock there asks the
//! others. As long as that server is well, votes are not split. Its word is not needed for a lock: where it does not
//! answer, votes alone decide, and the next server keeps the order.
//!
//! A client may die after that server has voted for it and before the others have. A request that
//! finds a majority free, and that server's vote taken, therefore yields once, as the client with
//! that vote may be about to ask the others. It looks again after ten round trips and 20 ms, half
//! as much or half as much again: if the vote is still that of the same grant, and a majority is
//! free, it is granted. A reader in the queue takes longer until it looks again, as the server may
//! hold it back for a writer in front, which polls in the meantime if it lives. A request that does
//! not wait is refused where another one waits in that server's queue. A waiter asks that server every 80 ms and four round trips or so whether
//! the lock is given on there, and looks at the others where it is not: after that time, then after
//! twice as long each time, up to 700 ms. So it is granted within 250 ms and a few tens of round
//! trips of the moment at which a majority is free, if the servers answer.
//!
//! Several locks at once are asked for one after the other, in the order of their keys: one round
//! trip each. Of requests that want some of the same locks one is granted, and they do not refuse
//! each other.
//!
//! [Redlock]: https://redis.io/docs/latest/develop/clients/patterns/distributed-locks/

mod asking;
mod background;
mod calls;
pub(crate) mod campaign;
mod contended;
#[cfg(all(test, feature = "redis"))]
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
use futures_util::future::BoxFuture;
use tokio::time::Instant;

use self::{
    background::Background, campaign::Campaign, contended::Contended, node::Node,
    proposals::Proposals,
};
use super::{
    AcquireAllReply, AcquireReply, ConvertReply, Hold, Inspection, KeyPart, KeyRequest, Listener,
    Listeners, PollReply, Release, ReleaseReply, RenewReply, Renewal, RevokeReply, RevokeScope,
    Store, StoreError, StoreErrorKind, StoreEvent, Token,
};
use crate::{
    error::{LockError, LockErrorKind},
    key::LockKey,
    spec::{Family, Mode, call_timeout},
    sync::lock,
};

pub(crate) use self::majority::majority;

type Shared = Arc<Mutex<Campaign>>;

/// Locks on several independent servers, of which a majority has to agree.
///
/// It offers exclusive and shared locks. Permits are `Unsupported`: of five servers with two permits each, three clients can have
/// three votes.
pub struct QuorumStore {
    inner: Arc<Inner>,
    /// Kept for the servers, which tell them of events.
    _ears: Vec<Arc<Ear>>,
}

struct Inner {
    nodes: Vec<Arc<Node>>,
    longest_lease: Duration,
    /// What is held or wanted, by what the names of an acquisition begin with.
    campaigns: Mutex<HashMap<u128, Shared, RandomState>>,
    proposals: Proposals,
    contended: Contended,
    /// How long a majority takes to answer, in the mean.
    round_trip: Mutex<Duration>,
    background: Arc<Background>,
    listeners: Listeners,
}

/// What is heard from one server.
struct Ear {
    node: usize,
    inner: Weak<Inner>,
}

impl Listener for Ear {
    fn tell(&self, event: &StoreEvent) {
        if let Some(inner) = self.inner.upgrade() {
            inner.told(self.node, event);
        }
    }
}

/// How long a majority may take to answer what has to be heard: a little less than the caller waits, who is to learn who was silent.
fn answer_timeout(lease: Duration) -> Duration {
    call_timeout(lease) * 9 / 10
}

/// How long one server may take to answer an acquire: min(lease/20, 200 ms).
fn node_timeout(lease: Duration) -> Duration {
    (lease / 20).min(Duration::from_millis(200))
}

impl QuorumStore {
    /// A store over independent `servers`, each with a name for messages: an odd number, at least three. All clients list
    /// them in the same order.
    ///
    /// No server may forget a lock before its lease is over; `longest_lease` is the longest that is let through, so it is how long a
    /// server must keep away after a restart. The servers of [`LockClientBuilder::redlock`](crate::LockClientBuilder::redlock) see
    /// to that themselves.
    ///
    /// # Errors
    /// `InvalidSpec` for a number of servers that gives nothing.
    pub fn new(
        servers: impl IntoIterator<Item = (String, Arc<dyn Store>)>,
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

/// Refuses a number of servers that gives nothing.
///
/// # Errors
/// `InvalidSpec`, with the reason.
pub(crate) fn check_count(servers: usize) -> Result<(), LockError> {
    let reason = match servers {
        0..3 => {
            "a majority of fewer than three is all of them, so none may fail; give three or five"
        }
        _ if servers.is_multiple_of(2) => {
            "one fewer can lose as many and still have a majority; give an odd number"
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

    /// # Errors
    /// `Unsupported`, for what a majority cannot promise.
    fn check(&self, mode: Mode, lease: Duration) -> Result<(), StoreError> {
        let message = if mode.family() == Family::Permits {
            "a majority of servers cannot count permits: of five with two permits each, three clients can have three; \
             use one server for permits"
                .into()
        } else if lease > self.longest_lease {
            format!(
                "a lease of {lease:?} is longer than {:?}, for which a server that was restarted keeps away; \
                 ask for a shorter one, or set `longest_lease` on all clients",
                self.longest_lease
            )
        } else {
            return Ok(());
        };
        Err(StoreError::new(StoreErrorKind::Unsupported, message))
    }

    fn campaign(&self, token: Token) -> Option<Shared> {
        lock(&self.campaigns).get(&token.stem()).cloned()
    }

    fn forget(&self, token: Token) {
        lock(&self.campaigns).remove(&token.stem());
    }

    /// The campaign of a request, and whether it is a new one.
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

    /// What a server tells unasked.
    fn told(&self, node: usize, event: &StoreEvent) {
        match event {
            StoreEvent::Granted { hold, grant } => {
                let Some(campaign) = self.campaign(hold.token) else {
                    return;
                };
                let mut state = lock(&campaign);
                if state.pushed(node, hold.token, *grant) {
                    drop(state);
                    // Whoever waits asks at once, and then the others are asked.
                    let (key, family) = (hold.key.clone(), hold.mode.family());
                    self.listeners.tell(&StoreEvent::Kept {
                        key,
                        family,
                        ttl: Duration::ZERO,
                    });
                }
            }
            StoreEvent::Revoked { token } => {
                if let Some(campaign) = self.campaign(*token) {
                    let token = lock(&campaign).hold().token;
                    self.listeners.tell(&StoreEvent::Revoked { token });
                }
            }
            // The others know what that one has told or forgotten; only whoever waits in its line has to look.
            StoreEvent::Disconnected => {
                let campaigns: Vec<_> = lock(&self.campaigns).values().cloned().collect();
                for campaign in campaigns {
                    let waiting = lock(&campaign).waits_at(node);
                    if let Some(Hold { key, mode, .. }) = waiting {
                        self.listeners.tell(&StoreEvent::Kept {
                            key,
                            family: mode.family(),
                            ttl: Duration::ZERO,
                        });
                    }
                }
            }
            event => self.listeners.tell(event),
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

    fn poll<'a>(&'a self, hold: &'a Hold) -> BoxFuture<'a, Result<PollReply, StoreError>> {
        Box::pin(self.inner.poll(hold))
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
        family: Family,
    ) -> BoxFuture<'a, Result<Inspection, StoreError>> {
        Box::pin(self.inner.inspect(key, family))
    }

    fn revoke<'a>(
        &'a self,
        key: &'a LockKey,
        family: Family,
        scope: RevokeScope,
    ) -> BoxFuture<'a, Result<RevokeReply, StoreError>> {
        Box::pin(self.inner.revoke(key, family, scope))
    }

    fn name_of(&self, key: &LockKey, family: Family, part: KeyPart) -> Option<String> {
        // The same on all of them.
        self.inner.nodes.first()?.store.name_of(key, family, part)
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
