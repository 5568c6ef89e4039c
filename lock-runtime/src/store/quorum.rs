//! Locks on several independent servers, of which a majority has to agree: [Redlock], with fencing tokens.
//!
//! A lock is held by whoever holds it at more than half of the servers. One server that dies, or that comes back without its
//! data, takes no lock away and gives none to a second holder; one that does not answer is not waited for.
//!
//! # Fencing tokens
//!
//! With every acquire the client proposes a number: larger than any that it has seen, and not smaller than its clock in
//! microseconds. Each server keeps max(its last + 1, the proposal) and answers it. The token of the grant is the largest
//! number that the majority has answered. If a majority has answered that very number, it is held by a majority already: the usual
//! case, in one round trip. If not, it is written back to a majority before anybody is told.
//!
//! So when a guard is handed out, a majority of the servers will never again answer its token or a smaller one. Any later grant
//! needs a majority, which has a server in common with that one; so its largest number is larger. Clocks only make the
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
//! [Redlock]: https://redis.io/docs/latest/develop/clients/patterns/distributed-locks/

mod background;
mod calls;
pub(crate) mod campaign;
mod contended;
#[cfg(all(test, feature = "redis"))]
mod explorer;
mod majority;
mod node;
mod proposals;
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
use futures_util::{
    StreamExt as _,
    future::{BoxFuture, join_all},
};
use tokio::{
    sync::{mpsc, oneshot},
    time::{Instant, sleep_until, timeout, timeout_at},
};

use self::{
    background::{Background, UnderWay, Unused},
    calls::Terms,
    campaign::{Calls, Campaign, Heard, Left, Next, Outcome, Patience, PerNode, grace},
    contended::Contended,
    majority::{majority, nth_largest},
    node::{Node, line_node},
    proposals::Proposals,
    tally::{Held, Renewed, Vote},
};
use super::{
    AcquireAllReply, AcquireReply, ConvertReply, Grant, Hold, IfBusy, Inspection, KeyRequest, Listener, Listeners,
    PollReply, Release, ReleaseReply, RenewReply, Renewal, RevokeReply, RevokeScope, Store, StoreError, StoreErrorKind,
    StoreEvent, Token,
};
use crate::{
    acquire::SHORTEST_CALL,
    error::{LockError, LockErrorKind},
    fence::FencingToken,
    key::LockKey,
    spec::{Family, MAX_LEASE, Mode, call_timeout},
    sync::lock,
};

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
        let nodes: Vec<_> = servers.into_iter().map(|(name, store)| Arc::new(Node::new(name, store))).collect();
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
            let ear = Arc::new(Ear { node, inner: Arc::downgrade(&inner) });
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
        0..3 => "a majority of fewer than three is all of them, so none may fail; give three or five",
        _ if servers.is_multiple_of(2) => "one fewer can lose as many and still have a majority; give an odd number",
        _ => return Ok(()),
    };
    Err(LockError::new(LockErrorKind::InvalidSpec, format!("{servers} servers for one lock: {reason}")))
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

    fn patience(&self) -> Patience {
        Patience::new(*lock(&self.round_trip), rand::random())
    }

    fn measured(&self, took: Duration) {
        let mut round_trip = lock(&self.round_trip);
        *round_trip = (*round_trip * 7 + took) / 8;
    }

    /// How long one server may take to answer an acquire. Where all are slow it is longer, or nobody would ever get an answer.
    fn node_patience(&self, lease: Duration) -> Duration {
        let slow = *lock(&self.round_trip) * 10;
        slow.clamp(node_timeout(lease), call_timeout(lease) * 2 / 3)
    }

    /// Leads a campaign until something came of it.
    async fn lead(
        &self,
        campaign: &Shared,
        mut terms: Terms,
        begin: impl FnOnce(&mut Campaign, &Terms, Instant) -> Calls,
    ) -> Outcome {
        let patience = self.node_patience(terms.lease);
        let mut under_way = Calling { background: &self.background, calls: UnderWay::new() };
        let mut silent_at = terms.answer_by.min(terms.sent + patience);
        {
            let mut state = lock(campaign);
            let calls = begin(&mut state, &terms, terms.sent);
            let left = state.take_left();
            self.leave(&left, &state);
            self.send(campaign, &state, &terms, calls, &mut under_way.calls);
        }
        loop {
            let now = Instant::now();
            let next = {
                let mut state = lock(campaign);
                let next = state.next(terms.deadline_from(now, patience), now);
                let left = state.take_left();
                self.leave(&left, &state);
                if let Next::Send(calls) = next {
                    terms.sent = now;
                    terms.deadline = terms.deadline_from(now, patience);
                    silent_at = terms.answer_by.min(now + patience);
                    self.send(campaign, &state, &terms, calls, &mut under_way.calls);
                    continue;
                }
                next
            };
            let grace = match next {
                Next::Done(outcome) => return outcome,
                Next::Wait(grace) => grace,
                Next::Send(_) => continue,
            };
            let until = grace.map_or(silent_at, |grace| grace.min(silent_at));
            tokio::select! {
                biased;
                Some(()) = under_way.calls.next() => {}
                () = sleep_until(until) => {
                    if until == silent_at {
                        let error = StoreError::timed_out(silent_at - terms.sent);
                        let silent = lock(campaign).time_is_up(&error);
                        if silent.len() >= self.majority() {
                            self.measured(patience);
                        }
                        silent.iter().for_each(|node| self.nodes[*node].rest(error.clone(), Instant::now()));
                    }
                }
            }
        }
    }

    /// Says what is to be said, each to its server.
    fn send(&self, campaign: &Shared, state: &Campaign, terms: &Terms, calls: Calls, under_way: &mut UnderWay) {
        let now = terms.sent;
        // With too few that are well everybody is asked.
        let well = self.nodes.iter().filter(|node| node.is_well(now)).count();
        let spares = well >= self.majority();
        for (index, say) in calls {
            let node = self.nodes[index].clone();
            let admitted = if spares { node.admits(now) } else { Ok(()) };
            under_way.push(calls::call(node, index, campaign.clone(), state, terms, say, admitted));
        }
    }

    /// Gives up names that are not used any more.
    fn leave(&self, left: &[Left], state: &Campaign) {
        for left in left {
            drop(self.give_up(left, state.hold(), state.lease()));
        }
    }

    fn give_up(&self, left: &Left, hold: &Hold, lease: Duration) -> oneshot::Receiver<()> {
        self.background.give_up(Unused::new(self.nodes[left.node].clone(), left, hold, lease))
    }

    /// Gives up what a reader that was a writer may hold as a writer still.
    fn give_up_writer(&self, left: &[Left], hold: &Hold, lease: Duration) {
        let writer = Hold { mode: Mode::Exclusive, ..hold.clone() };
        left.iter().for_each(|left| drop(self.give_up(left, &writer, lease)));
    }

    /// Too few servers have answered.
    fn unreachable(&self, campaign: &Shared) -> StoreError {
        let campaign = lock(campaign);
        let said = campaign.complaints().map(|(node, said)| format!("{}: {said}", self.nodes[node]));
        let kinds: Vec<_> = campaign.errors().map(StoreError::kind).collect();
        self.too_few(said.collect(), &kinds)
    }

    fn too_few(&self, said: Vec<String>, kinds: &[StoreErrorKind]) -> StoreError {
        // What will not pass by itself is worth its own kind, if it is the only obstacle.
        let kind = match kinds {
            [first, rest @ ..] if rest.iter().all(|kind| kind == first) => *first,
            _ => StoreErrorKind::Unavailable,
        };
        let message = format!("{} of {} servers are needed: {}", self.majority(), self.nodes.len(), said.join("; "));
        StoreError::new(kind, message)
    }

    async fn acquire(&self, request: &KeyRequest) -> Result<AcquireReply, StoreError> {
        let Hold { ref key, mode, token } = request.hold;
        self.check(mode, request.lease)?;
        let now = Instant::now();
        let (campaign, is_new) = self.begin(request, now);
        let beside = request.beside.and_then(|beside| self.campaign(beside));
        let beside = beside.map(|beside| {
            let beside = lock(&beside);
            (0..self.nodes.len()).map(|node| beside.held_at(node)).collect()
        });
        let terms = Terms::new(request, self.proposals.next(), beside, now);
        let outcome = if is_new {
            let line = line_node(&self.nodes, key, now);
            let contended = self.contended.is(key, now);
            let begin = |campaign: &mut Campaign, terms: &Terms, now| {
                campaign.acquire(request.if_busy, line, contended, terms.deadline, now)
            };
            self.lead(&campaign, terms, begin).await
        } else {
            self.lead(&campaign, terms, |campaign, terms, now| campaign.poll(terms.deadline, now)).await
        };
        Ok(match outcome {
            Outcome::Granted { fence, until, spare } => {
                AcquireReply::Granted(self.granted(fence, until, now).spare(spare))
            }
            Outcome::InLine { holder_ttl } => {
                self.contended.note(key, Instant::now());
                AcquireReply::Queued { counter: None, holder_ttl }
            }
            Outcome::Refused(reply) => {
                self.forget(token);
                reply
            }
            Outcome::Gone => {
                self.forget(token);
                AcquireReply::Busy { holder_ttl: None }
            }
            // Whoever asked gives the token up.
            Outcome::Unreachable => return Err(self.unreachable(&campaign)),
        })
    }

    fn granted(&self, fence: FencingToken, until: Instant, sent: Instant) -> Grant {
        self.proposals.seen(fence);
        self.measured(sent.elapsed());
        Grant::new(fence, until.saturating_duration_since(sent))
    }

    /// All or none: one after the other was granted counts only if all were.
    async fn acquire_all(&self, requests: &[KeyRequest]) -> Result<AcquireAllReply, StoreError> {
        let now = Instant::now();
        let once: Vec<_> =
            requests.iter().map(|request| KeyRequest { if_busy: IfBusy::Refuse, ..request.clone() }).collect();
        let replies = join_all(once.iter().map(|request| self.acquire(request))).await;
        let mut grants = Vec::with_capacity(replies.len());
        let mut refused = None;
        for (index, reply) in replies.into_iter().enumerate() {
            match reply? {
                AcquireReply::Granted(grant) => grants.push(grant),
                reply => {
                    refused = Some(AcquireAllReply::Refused { index, reply });
                    break;
                }
            }
        }
        if let Some(refused) = refused {
            join_all(requests.iter().map(|request| self.abandon(&request.hold))).await;
            return Ok(refused);
        }
        let late = now.elapsed();
        let left = |grant: Grant| Grant { ttl: grant.ttl.saturating_sub(late), ..grant };
        Ok(AcquireAllReply::Granted(grants.into_iter().map(left).collect()))
    }

    async fn poll(&self, hold: &Hold) -> Result<PollReply, StoreError> {
        let now = Instant::now();
        let Some(campaign) = self.campaign(hold.token) else { return Ok(PollReply::Gone) };
        let terms = Terms::again(&lock(&campaign), self.proposals.next(), now);
        let outcome = self.lead(&campaign, terms, |campaign, terms, now| campaign.poll(terms.deadline, now)).await;
        Ok(match outcome {
            Outcome::Granted { fence, until, spare } => {
                self.contended.note(&hold.key, Instant::now());
                PollReply::Granted(self.granted(fence, until, now).spare(spare))
            }
            Outcome::InLine { holder_ttl } => PollReply::Queued { counter: None, holder_ttl },
            Outcome::Refused(_) | Outcome::Gone => {
                self.forget(hold.token);
                PollReply::Gone
            }
            Outcome::Unreachable => return Err(self.unreachable(&campaign)),
        })
    }

    /// Gives up all names of an acquisition, and waits until that was said once to everybody.
    async fn abandon(&self, hold: &Hold) {
        let Some(campaign) = self.campaign(hold.token) else { return };
        self.forget(hold.token);
        let (left, lease, held, was_writer) = {
            let mut state = lock(&campaign);
            state.leave_all();
            (state.take_left(), state.lease(), state.hold().clone(), state.was_writer())
        };
        if was_writer {
            self.give_up_writer(&left, &held, lease);
        }
        let said: Vec<_> = left.iter().map(|left| self.give_up(left, &held, lease)).collect();
        let _ = timeout(self.node_patience(lease), join_all(said)).await;
    }

    /// Asks servers, until it is decided or nobody is left to answer in time; what is not waited for comes to its end by itself.
    /// The errors of those who have not answered are returned, each with who it was. `line` is waited for a little longer.
    async fn ask<T: Send + 'static>(
        &self,
        patience: Duration,
        line: Option<usize>,
        questions: impl IntoIterator<Item = (usize, BoxFuture<'static, Result<T, StoreError>>)>,
        mut decided: impl FnMut(usize, T) -> bool,
    ) -> Vec<(usize, StoreError)> {
        let (answer, mut answers) = mpsc::unbounded_channel();
        let mut calling = Calling { background: &self.background, calls: UnderWay::new() };
        let mut awaited = Vec::with_capacity(self.nodes.len());
        for (index, question) in questions {
            awaited.push(index);
            let (node, answer) = (self.nodes[index].clone(), answer.clone());
            calling.calls.push(Box::pin(async move {
                let result = question.await;
                node.note(&result, Instant::now());
                drop(answer.send((index, result)));
            }));
        }
        let mut failed = Vec::new();
        let begun = Instant::now();
        let mut until = begun + patience;
        let mut is_decided = false;
        while !(awaited.is_empty() || is_decided && line.is_none_or(|line| !awaited.contains(&line))) {
            let answered = timeout_at(until, calling.calls.next()).await;
            if answered.is_err() {
                break;
            }
            while let Ok((index, result)) = answers.try_recv() {
                awaited.retain(|awaited| *awaited != index);
                match result {
                    Ok(value) if !is_decided => {
                        if decided(index, value) {
                            is_decided = true;
                            until = until.min(Instant::now() + grace(begun.elapsed()));
                        }
                    }
                    Ok(_) => {}
                    Err(error) => failed.push((index, error)),
                }
            }
        }
        if !is_decided {
            let error = StoreError::timed_out(patience);
            awaited.iter().for_each(|index| self.nodes[*index].rest(error.clone(), Instant::now()));
            failed.extend(awaited.into_iter().map(|index| (index, error.clone())));
        }
        failed
    }

    /// As `unreachable`, for those who have not answered a question.
    fn unanswered(&self, failed: &[(usize, StoreError)]) -> StoreError {
        let kinds: Vec<_> = failed.iter().map(|(_, error)| error.kind()).collect();
        let said = (0..self.nodes.len()).map(|index| {
            let said = failed.iter().find(|(failed, _)| *failed == index);
            let said = said.map_or_else(|| "has answered".to_owned(), |(_, error)| error.to_string());
            format!("{}: {said}", self.nodes[index])
        });
        self.too_few(said.collect(), &kinds)
    }

    /// All locks of a batch in one call to each server.
    async fn renew(&self, renewals: &[Renewal]) -> Vec<Result<RenewReply, StoreError>> {
        let now = Instant::now();
        let nodes = self.nodes.len();
        let mut tallies: Vec<_> = renewals.iter().map(|_| Renewed::new(nodes)).collect();
        let mut batches: Vec<(Vec<usize>, Vec<Renewal>)> = vec![Default::default(); nodes];
        let mut healing = UnderWay::new();
        for (number, renewal) in renewals.iter().enumerate() {
            let names =
                self.campaign(renewal.hold.token).map(|campaign| lock(&campaign).known().collect::<PerNode<_>>());
            let mut knows = PerNode::from_elem(false, nodes);
            for (node, token) in names.into_iter().flatten() {
                knows[node] = true;
                let hold = Hold::new(renewal.hold.key.clone(), renewal.hold.mode, token);
                batches[node].0.push(number);
                batches[node].1.push(Renewal::new(hold, renewal.lease));
            }
            knows.iter().filter(|knows| !**knows).for_each(|_| tallies[number].gone());
            if !renewal.lease.is_zero() {
                self.heal(&renewal.hold, now, &mut healing);
            }
        }
        // A renewal that would last for longer than a server keeps away is not even sent.
        let too_long = |renewal: &Renewal| self.check(renewal.hold.mode, renewal.lease).err();
        if let Some(error) = renewals.iter().find_map(too_long) {
            return renewals.iter().map(|_| Err(error.clone())).collect();
        }
        let shortest = renewals.iter().filter_map(|renewal| self.lease_of(renewal)).min();
        let patience = answer_timeout(shortest.unwrap_or(MAX_LEASE));
        let mut numbers = Vec::with_capacity(nodes);
        let mut questions: Vec<(usize, BoxFuture<'static, _>)> = Vec::with_capacity(nodes);
        for (index, (of, batch)) in batches.into_iter().enumerate() {
            numbers.push(of);
            if !batch.is_empty() {
                let (node, background) = (self.nodes[index].clone(), self.background.clone());
                let campaigns = self.campaigns_of(&batch);
                questions.push((
                    index,
                    Box::pin(async move {
                        let replies = node.store.renew(&batch).await;
                        for ((campaign, renewal), reply) in campaigns.into_iter().zip(&batch).zip(&replies) {
                            if let (Some(campaign), Ok(reply)) = (campaign, reply) {
                                let mut campaign = lock(&campaign);
                                let round = campaign.round();
                                campaign.heard(index, renewal.hold.token, round, Heard::Renew(*reply), now);
                                for left in campaign.take_left() {
                                    drop(background.give_up(Unused::new(
                                        node.clone(),
                                        &left,
                                        campaign.hold(),
                                        campaign.lease(),
                                    )));
                                }
                            }
                        }
                        Ok(replies)
                    }),
                ));
            }
        }
        self.background.finish(healing);
        let mut errors: Vec<Vec<(usize, StoreError)>> = vec![Vec::new(); renewals.len()];
        let failed = self
            .ask(patience, None, questions, |index, replies: Vec<Result<RenewReply, StoreError>>| {
                for (number, reply) in numbers[index].iter().zip(replies) {
                    match reply {
                        Ok(RenewReply::Renewed { ttl }) => tallies[*number].renewed(now, ttl),
                        Ok(RenewReply::Gone) => tallies[*number].gone(),
                        Err(error) => errors[*number].push((index, error)),
                    }
                }
                tallies.iter().all(|tally| tally.held() != Held::Open)
            })
            .await;
        let reply = |(tally, mut errors): (Renewed, Vec<_>)| match tally.held() {
            Held::Until(until) => Ok(RenewReply::Renewed { ttl: until.saturating_duration_since(now) }),
            Held::Gone => Ok(RenewReply::Gone),
            Held::Open => {
                errors.extend(failed.iter().cloned());
                Err(self.unanswered(&errors))
            }
        };
        tallies.into_iter().zip(errors).map(reply).collect()
    }

    /// Asks for the votes that are missing. They count from the next renewal on.
    fn heal(&self, hold: &Hold, now: Instant, under_way: &mut UnderWay) {
        let Some(campaign) = self.campaign(hold.token) else { return };
        let mut state = lock(&campaign);
        let terms = Terms::again(&state, self.proposals.next(), now);
        let calls = state.heal(terms.deadline);
        let left = state.take_left();
        self.leave(&left, &state);
        self.send(&campaign, &state, &terms, calls, under_way);
    }

    fn campaigns_of(&self, renewals: &[Renewal]) -> Vec<Option<Shared>> {
        let campaigns = lock(&self.campaigns);
        renewals.iter().map(|renewal| campaigns.get(&renewal.hold.token.stem()).cloned()).collect()
    }

    fn lease_of(&self, renewal: &Renewal) -> Option<Duration> {
        self.campaign(renewal.hold.token).map(|campaign| lock(&campaign).lease())
    }

    async fn release(&self, release: &Release) -> Result<ReleaseReply, StoreError> {
        let hold = &release.hold;
        let Some(campaign) = self.campaign(hold.token) else { return Ok(ReleaseReply::NotHeld) };
        let (left, lease, line, was_writer) = {
            let state = lock(&campaign);
            (state.all_known(), state.lease(), state.line(), state.was_writer())
        };
        if was_writer {
            self.give_up_writer(&left, hold, lease);
        }
        let mut vote = Vote::new(self.nodes.len());
        (left.len()..self.nodes.len()).for_each(|_| vote.count(false));
        let questions = left.iter().map(|left| (left.node, self.release_at(release, *left, lease)));
        let questions: Vec<_> = questions.collect();
        let mut decided = vote.decided();
        let failed = self
            .ask(answer_timeout(lease), line, questions, |_, released| {
                vote.count(released);
                decided = vote.decided();
                decided.is_some()
            })
            .await;
        // Whoever has not heard it is told until it does: nobody needs the names again.
        self.forget(hold.token);
        match decided {
            Some(true) => Ok(ReleaseReply::Released),
            Some(false) => Ok(ReleaseReply::NotHeld),
            None => Err(self.unanswered(&failed)),
        }
    }

    /// Gives one vote back. Where that is not heard, the name is given up until it is.
    fn release_at(
        &self,
        release: &Release,
        left: Left,
        lease: Duration,
    ) -> BoxFuture<'static, Result<bool, StoreError>> {
        let node = self.nodes[left.node].clone();
        let background = self.background.clone();
        let hold = Hold::new(release.hold.key.clone(), release.hold.mode, left.token);
        let release = Release::new(hold.clone()).keep_for(release.keep_for);
        let patience = call_timeout(lease).max(SHORTEST_CALL);
        Box::pin(async move {
            let said = timeout(patience, node.store.release(&release)).await;
            let said = said.unwrap_or_else(|_| Err(StoreError::timed_out(patience)));
            // It waits there, or a request that would hold it may still be executed.
            let lingers = !matches!(said, Ok(ReleaseReply::Released)) && (left.lingers || said.is_err());
            if lingers {
                drop(background.give_up(Unused::new(node, &left, &hold, lease)));
            }
            said.map(|reply| reply == ReleaseReply::Released)
        })
    }

    async fn convert(&self, hold: &Hold) -> Result<ConvertReply, StoreError> {
        let now = Instant::now();
        let Some(campaign) = self.campaign(hold.token) else { return Ok(ConvertReply::NotHeld) };
        let (names, lease) = {
            let mut state = lock(&campaign);
            state.converts();
            (state.known().collect::<PerNode<_>>(), state.lease())
        };
        let nodes = self.nodes.len();
        let mut vote = Vote::new(nodes);
        (names.len()..nodes).for_each(|_| vote.count(false));
        let questions = names.iter().map(|(index, token)| {
            let node = self.nodes[*index].clone();
            let hold = Hold::new(hold.key.clone(), hold.mode, *token);
            let question = async move { node.store.convert(&hold).await };
            (*index, Box::pin(question) as BoxFuture<'static, _>)
        });
        let questions: Vec<_> = questions.collect();
        let mut grants: PerNode<(usize, Grant)> = PerNode::new();
        let failed = self
            .ask(answer_timeout(lease), None, questions, |index, reply| {
                vote.count(match reply {
                    ConvertReply::Converted(grant) => {
                        grants.push((index, grant));
                        true
                    }
                    ConvertReply::NotHeld => false,
                });
                vote.decided().is_some()
            })
            .await;
        match vote.decided() {
            Some(true) => {}
            Some(false) => return Ok(ConvertReply::NotHeld),
            None => return Err(self.unanswered(&failed)),
        }
        let until = nth_largest(grants.iter().map(|(_, grant)| now + grant.ttl), self.majority());
        let largest = grants.iter().map(|(_, grant)| grant.fence).max();
        let (Some(until), Some(fence)) = (until, largest) else { return Ok(ConvertReply::NotHeld) };
        let behind = grants.iter().filter(|(_, grant)| grant.fence < fence).map(|(index, _)| *index);
        let behind: PerNode<_> = behind.collect();
        let mut written = Vote::new(nodes);
        (behind.len()..grants.len()).for_each(|_| written.count(true));
        let questions = behind.into_iter().map(|index| {
            let (node, key) = (self.nodes[index].clone(), hold.key.clone());
            let question = async move { node.store.raise(&key, Family::Lock, fence).await };
            (index, Box::pin(question) as BoxFuture<'static, _>)
        });
        let questions: Vec<_> = questions.collect();
        let is_written = written.decided() == Some(true);
        if !is_written {
            let failed = self
                .ask(answer_timeout(lease), None, questions, |_, ()| {
                    written.count(true);
                    written.decided().is_some()
                })
                .await;
            if written.decided() != Some(true) {
                return Err(self.unanswered(&failed));
            }
        }
        self.proposals.seen(fence);
        Ok(ConvertReply::Converted(Grant::new(fence, until.saturating_duration_since(Instant::now()))))
    }

    /// Asks every server the same.
    async fn survey<T: Send + 'static>(
        &self,
        question: impl Fn(Arc<Node>) -> BoxFuture<'static, Result<T, StoreError>>,
    ) -> (Vec<T>, Vec<(usize, StoreError)>) {
        let mut answers = Vec::with_capacity(self.nodes.len());
        let questions: Vec<_> = self.nodes.iter().cloned().map(question).enumerate().collect();
        let failed = self
            .ask(answer_timeout(MAX_LEASE), None, questions, |_, answer| {
                answers.push(answer);
                false
            })
            .await;
        (answers, failed)
    }

    async fn inspect(&self, key: &LockKey, family: Family) -> Result<Inspection, StoreError> {
        let question = |node: Arc<Node>| -> BoxFuture<'static, _> {
            let key = key.clone();
            Box::pin(async move { node.store.inspect(&key, family).await })
        };
        let (seen, failed) = self.survey(question).await;
        if seen.len() < self.majority() {
            return Err(self.unanswered(&failed));
        }
        Ok(tally::inspected(self.nodes.len(), seen))
    }

    async fn revoke(&self, key: &LockKey, family: Family, scope: RevokeScope) -> Result<RevokeReply, StoreError> {
        let question = |node: Arc<Node>| -> BoxFuture<'static, _> {
            let key = key.clone();
            Box::pin(async move { node.store.revoke(&key, family, scope).await })
        };
        let (replies, failed) = self.survey(question).await;
        tally::revoked(self.nodes.len(), &replies).ok_or_else(|| self.unanswered(&failed))
    }

    /// What a server tells unasked.
    fn told(&self, node: usize, event: &StoreEvent) {
        match event {
            StoreEvent::Granted { hold, grant } => {
                let Some(campaign) = self.campaign(hold.token) else { return };
                let mut state = lock(&campaign);
                if state.pushed(node, hold.token, *grant) {
                    drop(state);
                    // Whoever waits asks at once, and then the others are asked.
                    let (key, family) = (hold.key.clone(), hold.mode.family());
                    self.listeners.tell(&StoreEvent::Kept { key, family, ttl: Duration::ZERO });
                }
            }
            StoreEvent::Revoked { token } => {
                if let Some(campaign) = self.campaign(*token) {
                    let token = lock(&campaign).hold().token;
                    self.listeners.tell(&StoreEvent::Revoked { token });
                }
            }
            event => self.listeners.tell(event),
        }
    }
}

/// Calls under way. Dropped, they come to their end in the background: what they answer tells where a server stands.
struct Calling<'a> {
    background: &'a Arc<Background>,
    calls: UnderWay,
}

impl Drop for Calling<'_> {
    fn drop(&mut self) {
        self.background.finish(std::mem::take(&mut self.calls));
    }
}

impl Store for QuorumStore {
    fn acquire<'a>(&'a self, request: &'a KeyRequest) -> BoxFuture<'a, Result<AcquireReply, StoreError>> {
        Box::pin(self.inner.acquire(request))
    }

    fn acquire_all<'a>(&'a self, requests: &'a [KeyRequest]) -> BoxFuture<'a, Result<AcquireAllReply, StoreError>> {
        Box::pin(self.inner.acquire_all(requests))
    }

    fn poll<'a>(&'a self, hold: &'a Hold) -> BoxFuture<'a, Result<PollReply, StoreError>> {
        Box::pin(self.inner.poll(hold))
    }

    fn renew<'a>(&'a self, renewals: &'a [Renewal]) -> BoxFuture<'a, Vec<Result<RenewReply, StoreError>>> {
        Box::pin(self.inner.renew(renewals))
    }

    fn release<'a>(&'a self, release: &'a Release) -> BoxFuture<'a, Result<ReleaseReply, StoreError>> {
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

    fn inspect<'a>(&'a self, key: &'a LockKey, family: Family) -> BoxFuture<'a, Result<Inspection, StoreError>> {
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

    fn listen(&self, listener: Weak<dyn Listener>) {
        self.inner.listeners.add(listener);
    }

    fn settled(&self) -> BoxFuture<'_, ()> {
        Box::pin(self.inner.background.settled())
    }
}

impl fmt::Debug for QuorumStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QuorumStore").field("servers", &self.inner.nodes).finish_non_exhaustive()
    }
}
