//! Locks on several independent servers that agree by majority: [Redlock] with fencing tokens.
//!
//! A client holds a lock while more than half of the servers hold it for that client. If one server
//! dies, or comes back without its data, no lock is lost and none is granted to a second holder.
//! Requests do not wait for a server that does not reply.
//!
//! # Fencing tokens
//!
//! With every acquire attempt, the client proposes a number. It is larger than every fencing token
//! that the client has seen, and not smaller than the client's clock in microseconds; or it is the
//! number that a server has just drawn for this acquisition. Each server
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
//! lock for the writer, so no further round trip is needed (see `Round::is_for` for the proof).
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
//! it has forgotten are smaller than any proposal, provided that the clocks differ by less than
//! nine tenths of `longest_lease`.
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

mod calls;
mod health;
mod listing;
#[cfg(test)]
mod tests;

use std::{
    collections::HashSet,
    fmt,
    sync::{Arc, Mutex, Weak},
    time::Duration,
};

use futures_util::{
    FutureExt as _, StreamExt as _,
    future::{BoxFuture, join_all},
    stream::FuturesUnordered,
};
use tokio::sync::watch;

use super::{
    AcquireAllReply, AcquireReply, ClientId, ConvertReply, Cursor, Hold, Holder, HolderId,
    Inspection, KeyPart, KeyRequest, Limits, Listener, Listeners, Page, PollReply, QuorumMember,
    Release, ReleaseReply, RenewReply, Renewal, Replied, Replies, RevokeReply, RevokeScope, Store,
    StoreError, StoreErrorKind, StoreEvent,
};
use crate::{
    error::{LockError, LockErrorKind},
    observe::health::Health,
    protocol::majority::{MajoritySession, Reply, inspected},
    request::key::LockKey,
    request::spec::LockKind,
    shell::call::within,
    shell::sync::lock,
};

#[cfg(feature = "redis")]
pub(crate) use crate::protocol::majority::majority;

/// The time for which a request that no lock depends on waits for a server.
const PATIENCE: Duration = Duration::from_millis(300);
/// The same for the names of clients, and for a holder that an error describes.
const NAMES: Duration = Duration::from_millis(250);
const HOLDERS: Duration = Duration::from_millis(50);

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
    names: Vec<String>,
    servers: Vec<Arc<dyn QuorumMember>>,
    longest_lease: Duration,
    /// All decisions. No call is made while it is locked: a server may push an event at once.
    session: Mutex<MajoritySession>,
    /// The number of tasks with calls in the background.
    busy: watch::Sender<usize>,
    listeners: Listeners,
}

/// The event listener of one server.
struct Ear {
    server: usize,
    inner: Weak<Inner>,
}

impl Listener for Ear {
    fn on_event(&self, event: &StoreEvent) {
        if let Some(inner) = self.inner.upgrade() {
            inner.on_event(self.server, event);
        }
    }
}

impl QuorumStore {
    /// Refuses a request beyond the [`limits`](Store::limits), which a majority cannot grant
    /// safely. A [`LockClient`](crate::LockClient) does not make such a request.
    ///
    /// # Errors
    /// `Unsupported`, with the remedy.
    fn check(&self, hold: &Hold, lease: Duration) -> Result<(), StoreError> {
        let limits = self.limits();
        limits
            .check_kind(hold.mode.kind())
            .and_then(|()| limits.check_longest(&["lease"], lease))
            .map_err(|error| StoreError::new(StoreErrorKind::Unsupported, error.to_string()))
    }

    /// Creates a store over independent `servers`, each with a name for messages. The number of
    /// servers must be odd and at least three. All clients must list the servers in the same order.
    /// A server that is listed twice would have two votes by one grant: it is refused here, and
    /// connections to Redis compare the servers that they find.
    ///
    /// No server may forget a lock before its lease has expired. `longest_lease` is the longest
    /// lease of a request ([`Limits`]), and therefore the time for which a server must not vote
    /// after a restart. Servers of Redis observe this by themselves.
    ///
    /// # Errors
    /// `InvalidSpec` if the number of servers is even or less than three, or one is listed twice.
    pub fn new(
        servers: impl IntoIterator<Item = (String, Arc<dyn QuorumMember>)>,
        longest_lease: Duration,
    ) -> Result<Self, LockError> {
        let (names, servers): (Vec<_>, Vec<_>) = servers.into_iter().unzip();
        check_count(servers.len())?;
        let places = servers
            .iter()
            .map(|server| Arc::as_ptr(server).cast::<()>());
        if places.collect::<HashSet<_>>().len() < servers.len() {
            let message = "one server is listed twice, which would give it two votes";
            return Err(LockError::new(LockErrorKind::InvalidSpec, message));
        }
        let inner = Arc::new(Inner {
            session: Mutex::new(MajoritySession::new(names.iter().cloned())),
            names,
            servers,
            longest_lease,
            busy: watch::Sender::default(),
            listeners: Listeners::default(),
        });
        let ear = |(index, server): (usize, &Arc<dyn QuorumMember>)| {
            let ear = Arc::new(Ear {
                server: index,
                inner: Arc::downgrade(&inner),
            });
            let listener: Weak<Ear> = Arc::downgrade(&ear);
            server.listen(listener);
            ear
        };
        let ears = inner.servers.iter().enumerate().map(ear).collect();
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
    /// Handles an event that a server has pushed.
    fn on_event(&self, server: usize, event: &StoreEvent) {
        match event {
            StoreEvent::Granted { hold, grant } => {
                let polls = lock(&self.session).pushed(server, hold, *grant);
                if polls {
                    self.poll(hold);
                }
            }
            StoreEvent::Revoked { token } => {
                let session = lock(&self.session);
                let acquisition = session.round(*token).map(|round| round.hold.token);
                drop(session);
                if let Some(token) = acquisition {
                    self.listeners.notify(&StoreEvent::Revoked { token });
                }
            }
            // The other servers make up for notifications and data that this server has lost. Only
            // the waiters in its queue have to poll.
            StoreEvent::Disconnected => {
                let waiting = lock(&self.session).waiting_at(server);
                waiting.iter().for_each(|hold| self.poll(hold));
            }
            StoreEvent::Reconnected => {
                lock(&self.session).reconnected(server);
                self.listeners.notify(event);
            }
            event => self.listeners.notify(event),
        }
    }

    /// Makes a waiter poll.
    fn poll(&self, hold: &Hold) {
        self.listeners.notify(&StoreEvent::FreeIn {
            key: hold.key.clone(),
            kind: hold.mode.kind(),
            ttl: Duration::ZERO,
        });
    }
}

/// Runs a request of the session, and returns the reply of its kind.
macro_rules! run {
    ($self:ident, $kind:ident, $begin:expr) => {
        run!($self, Ok::<_, StoreError>(()), $kind, $begin)
    };
    ($self:ident, $checked:expr, $kind:ident, $begin:expr) => {
        Box::pin(async move {
            $checked?;
            match $self.inner.run($begin).await? {
                Reply::$kind(reply) => Ok(reply),
                _ => Err(StoreError::no_reply()),
            }
        })
    };
}

impl Store for QuorumStore {
    fn acquire<'a>(&'a self, request: &'a KeyRequest) -> Replied<'a, AcquireReply> {
        let checked = self.check(&request.hold, request.lease);
        run!(self, checked, Acquire, |session, cx| session
            .acquire(request, cx))
    }

    fn acquire_all<'a>(&'a self, requests: &'a [KeyRequest]) -> Replied<'a, AcquireAllReply> {
        let mut requests_checked = requests.iter();
        let checked = requests_checked.try_for_each(|it| self.check(&it.hold, it.lease));
        run!(self, checked, AcquireAll, |session, cx| session
            .acquire_all(requests, cx))
    }

    fn poll<'a>(&'a self, holds: &'a [Hold]) -> Replies<'a, PollReply> {
        let poll = move |hold| -> Replied<'a, PollReply> {
            run!(self, Poll, |session, cx| session.poll(hold, cx))
        };
        Box::pin(join_all(holds.iter().map(poll)))
    }

    fn renew<'a>(&'a self, renewals: &'a [Renewal]) -> Replies<'a, RenewReply> {
        let mut renewals_checked = renewals.iter();
        let checked = renewals_checked.try_for_each(|it| self.check(&it.hold, it.lease));
        let all: Replied<'a, _> = run!(self, checked, Renew, |session, cx| session
            .renew(renewals, cx));
        let count = renewals.len();
        Box::pin(all.map(move |all| all.unwrap_or_else(|error| vec![Err(error); count])))
    }

    fn release<'a>(&'a self, release: &'a Release) -> Replied<'a, ReleaseReply> {
        run!(self, Release, |session, cx| session.release(release, cx))
    }

    fn release_owned(self: Arc<Self>, release: Release) -> Replied<'static, ReleaseReply> {
        run!(self, Release, |session, cx| session.release(&release, cx))
    }

    fn convert<'a>(&'a self, hold: &'a Hold) -> Replied<'a, ConvertReply> {
        run!(self, Convert, |session, cx| session.convert(hold, cx))
    }

    fn abandon<'a>(&'a self, hold: &'a Hold) -> Replied<'a, ()> {
        Box::pin(async {
            let reply = self.inner.run(|session, cx| session.abandon(hold, cx));
            reply.await.map(drop)
        })
    }

    fn inspect<'a>(&'a self, key: &'a LockKey, kind: LockKind) -> Replied<'a, Inspection> {
        run!(self, Inspect, |session, cx| session.inspect(key, kind, cx))
    }

    fn holders<'a>(&'a self, key: &'a LockKey, kind: LockKind) -> Replied<'a, Vec<Holder>> {
        let servers = self.inner.servers.iter();
        let calls: Vec<_> = servers.map(|server| server.holders(key, kind)).collect();
        Box::pin(async move {
            let seen = join_all(calls.into_iter().map(|it| within(HOLDERS, it))).await;
            let seen = seen.into_iter().flatten().map(|holders| Inspection {
                holders,
                ..Inspection::default()
            });
            Ok(inspected(self.inner.servers.len(), seen.collect()).holders)
        })
    }

    fn revoke<'a>(
        &'a self,
        key: &'a LockKey,
        kind: LockKind,
        scope: RevokeScope,
    ) -> Replied<'a, RevokeReply> {
        run!(self, Revoke, |session, cx| session
            .revoke(key, kind, scope, cx))
    }

    fn introduce<'a>(
        &'a self,
        client: ClientId,
        name: &'a str,
        grants: &'a [(HolderId, Duration)],
        keep_for: Duration,
    ) -> Replied<'a, ()> {
        let servers = self.inner.servers.iter();
        let calls: Vec<_> = servers
            .map(|server| server.introduce(client, name, grants, keep_for))
            .collect();
        Box::pin(async move {
            let introduced = join_all(calls.into_iter().map(|it| within(PATIENCE, it))).await;
            introduced.into_iter().collect()
        })
    }

    fn names_of<'a>(&'a self, clients: &'a [ClientId]) -> Replied<'a, Vec<Option<String>>> {
        let servers = self.inner.servers.iter();
        let calls: Vec<_> = servers.map(|server| server.names_of(clients)).collect();
        Box::pin(async move {
            let calls = calls.into_iter().map(|it| within(NAMES, it));
            let mut found: FuturesUnordered<_> = calls.collect();
            let mut names = vec![None; clients.len()];
            while names.contains(&None)
                && let Some(of_server) = found.next().await
            {
                let of_server = of_server.into_iter().flatten();
                let names = names.iter_mut().zip(of_server);
                names.for_each(|(name, found)| *name = name.take().or(found));
            }
            Ok(names)
        })
    }

    fn list<'a>(&'a self, prefix: &'a str, cursor: Option<Cursor>) -> Replied<'a, Page> {
        Box::pin(listing::page(&self.inner.servers, prefix, cursor))
    }

    fn name_of(&self, key: &LockKey, kind: LockKind, part: KeyPart) -> Option<String> {
        // All servers use the same names.
        self.inner.servers.first()?.name_of(key, kind, part)
    }

    fn server_of(&self, _key: &LockKey, _kind: LockKind) -> u64 {
        // A renewal is sent to all servers, and waits for a majority.
        0
    }

    fn limits(&self) -> Limits {
        let limits = Limits::new().in_turn(true).permits(false);
        let limits = limits.longest_lease(self.inner.longest_lease);
        // The locks of a request are acquired one by one, so the number of keys has no limit.
        self.inner.servers.iter().fold(limits, |limits, server| {
            let of_server = server.limits();
            limits
                .shortest_lease(limits.shortest_lease.max(of_server.shortest_lease))
                .longest_lease(limits.longest_lease.min(of_server.longest_lease))
                .push(limits.push && of_server.push)
        })
    }

    fn serves_any_runtime(&self) -> bool {
        let mut servers = self.inner.servers.iter();
        servers.all(|server| server.serves_any_runtime())
    }

    fn listen(&self, listener: Weak<dyn Listener>) {
        self.inner.listeners.add(listener);
    }

    fn settled(&self) -> BoxFuture<'_, ()> {
        Box::pin(self.inner.settled())
    }

    fn health(&self) -> BoxFuture<'_, Health> {
        Box::pin(health::of(&self.inner.names, &self.inner.servers))
    }
}

impl fmt::Debug for QuorumStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QuorumStore")
            .field("servers", &self.inner.servers)
            .finish_non_exhaustive()
    }
}
