//! Group commit: calls that are made while others are in flight share the next call of a script.
//!
//! Only acquires of free locks, releases (with a result or without) and abandonments of locks
//! without waiters, and renewals of writers are executed by such a script, each on its own. It does
//! nothing for the others, which are then sent alone. In a cluster, where the keys of a script must
//! be in one slot, the calls of a group share only the write and the read.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use futures_util::{StreamExt as _, future::join_all, stream::FuturesUnordered};
use redis::Value;
use tokio::{
    sync::{Notify, oneshot},
    time::sleep,
};

use super::{
    super::{
        connection::{Connection, Failed, Repeat, metered},
        script,
        sync::OnDrop,
    },
    Call, Field, Script,
};
use crate::{shell::sync::lock, store::StoreError};

/// The largest number of calls in a group. The server executes them in about 150 µs.
const MOST: usize = 32;
/// The number of calls in flight with which a call is sent alone and at once.
const FEW: usize = 4;
/// The longest time for which a call waits for the reply of the group before it, unless its own
/// group is full. The reply comes sooner from a server nearby, and to send later saves both sides
/// more work than the wait costs; over a slow network the wait is short against a round trip.
const LONGEST: Duration = Duration::from_millis(1);
/// The number of calls that are sent alone after a group whose locks were mostly not free: they are
/// contended, and each call that a group cannot execute takes a second round trip.
const CONTENDED: usize = 2 * MOST;
/// The number of renewals that are sent alone after a group that the server has refused: its user
/// may lack a right, and a refused group costs a round trip.
const UNGROUPED: usize = 2_000;
/// The usual number of bytes of a call.
const SIZE: usize = 160;
/// The longest result, in bytes, that is recorded by a group.
const LONGEST_RESULT: usize = 1024;
/// The time after which the task that sends the groups is taken to have stopped with its runtime.
const STOPPED: Duration = Duration::from_secs(1);

/// The groups of a connection.
pub(crate) struct Groups {
    group: Arc<Group>,
    /// The number of the next renewals that are sent alone.
    ungrouped_renewals: AtomicUsize,
}

/// The calls that wait for the next groups, of each purpose. All are in one queue, so that no
/// release overtakes the acquire before it, which it would have to follow up.
struct Group {
    connection: Weak<Connection>,
    state: Mutex<GroupsState>,
    /// Notifies the task that sends the groups.
    work: Notify,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Purpose {
    Acquire,
    Release,
    /// A release with a result.
    Record,
}

impl Purpose {
    /// The acquires are sent first, as a release may be that of one of them.
    const ALL: [Self; 3] = [Self::Acquire, Self::Release, Self::Record];
}

#[derive(Default)]
struct GroupsState {
    /// The number of calls in flight that were sent by their callers.
    alone: usize,
    /// The latest turn of the task that sends the groups, if there is one.
    active: Option<Instant>,
    /// The number of the next calls of each purpose that are sent alone.
    contended: [usize; Purpose::ALL.len()],
    queue: VecDeque<Queued>,
}

struct Queued {
    purpose: Purpose,
    call: Call,
    outcome: oneshot::Sender<Turn>,
}

/// The outcome of a call that may be sent with others.
pub(crate) enum Turn {
    /// Its caller sends it, and keeps this value meanwhile.
    Alone(Option<Alone>),
    /// It was sent with others.
    Over(Result<Value, Failed>),
}

/// A call that its caller sends.
pub(crate) struct Alone(Arc<Group>);

impl Drop for Alone {
    fn drop(&mut self) {
        lock(&self.0.state).alone -= 1;
    }
}

impl Groups {
    pub(crate) fn new(connection: &Weak<Connection>) -> Self {
        let group = Arc::new(Group {
            connection: connection.clone(),
            state: Mutex::default(),
            work: Notify::new(),
        });
        Self {
            group,
            ungrouped_renewals: AtomicUsize::new(0),
        }
    }

    /// Sends a call with others, unless its caller is to send it.
    pub(crate) async fn enter(&self, call: &Call) -> Turn {
        let purpose = if call.is_of(&script::ACQUIRE) {
            Purpose::Acquire
        } else if call.is_of(&script::RELEASE) && !call.field(Field::Fence).is_empty() {
            Purpose::Record
        } else if call.is_of(&script::RELEASE) || call.is_of(&script::ABANDON) {
            Purpose::Release
        } else {
            return Turn::Alone(None);
        };
        let group = &self.group;
        let (outcome, starts) = {
            let mut state = lock(&group.state);
            if state.active.is_none() && state.alone < FEW {
                state.alone += 1;
                return Turn::Alone(Some(Alone(group.clone())));
            }
            let contended = &mut state.contended[purpose as usize];
            if *contended > 0 {
                *contended -= 1;
                return Turn::Alone(None);
            }
            let has_stopped = state.active.is_some_and(|turn| turn.elapsed() > STOPPED);
            if has_stopped || !purpose.suits(call) {
                return Turn::Alone(None);
            }
            let (sender, outcome) = oneshot::channel();
            state.queue.push_back(Queued {
                purpose,
                call: call.clone(),
                outcome: sender,
            });
            let starts = state.active.is_none();
            state.active.get_or_insert_with(Instant::now);
            if !starts && state.queue.len() >= MOST {
                group.work.notify_one();
            }
            (outcome, starts)
        };
        // Outside of the mutex, as a runtime that is shutting down drops the task at once.
        if starts {
            group.start();
        }
        outcome
            .await
            .unwrap_or_else(|_| Turn::Over(Err(StoreError::interrupted().into())))
    }
}

impl Purpose {
    /// Returns whether a group can execute the call.
    fn suits(self, call: &Call) -> bool {
        match self {
            // One lock, and on a server of a quorum the marker of its data.
            Self::Acquire => call.keys() < 6 && call.field(Field::Mode) == b"exclusive",
            Self::Release if call.is_of(&script::ABANDON) => {
                call.field(Field::Mode) == b"exclusive"
            }
            // A release that reserves the lock is not suited.
            Self::Release => call.field(Field::Keep) == b"0",
            Self::Record => call.field(Field::Result).len() <= LONGEST_RESULT,
        }
    }

    /// Returns the call of a group.
    fn call(self, group: &[Queued]) -> Call {
        let all = || group.iter().map(|queued| &queued.call);
        let begin = |script, keys| Call::with_capacity(script, keys, SIZE * group.len());
        let keys = |call: Call, index| call.args(all().map(|it| it.key(index)));
        if self != Self::Acquire {
            let (script, fields): (&'static Script, &[Field]) = match self {
                Self::Record => (
                    &script::RECORD_GROUP,
                    &[Field::Member, Field::Keep, Field::Fence, Field::Result],
                ),
                _ => (&script::RELEASE_GROUP, &[Field::Member]),
            };
            let call = keys(keys(begin(script, 2 * group.len()), 0), 2);
            return call.args(all().flat_map(|it| fields.iter().map(|field| it.field(*field))));
        }
        // A server of a quorum has the same marker for all.
        let marker = all().next().filter(|it| it.keys() > 3);
        let count = 3 * group.len() + usize::from(marker.is_some());
        let call = begin(&script::ACQUIRE_GROUP, count);
        let mut call = keys(keys(keys(call, 0), 1), 2);
        if let Some(first) = marker {
            call = call.arg(first.key(3));
        }
        for it in all() {
            let proposal = match marker {
                Some(_) => it.field(Field::Proposal),
                None => b"0",
            };
            let fields = [Field::Member, Field::Lease, Field::Reserved];
            call = call.arg(it.field(Field::Deadline));
            call = call.args(fields.map(|field| it.field(field))).arg(proposal);
        }
        match marker {
            Some(first) => call.arg(first.field(Field::Marker)),
            None => call,
        }
    }

    /// Returns the reply of the call's own script, or `None` if the group has done nothing for it.
    fn reply(self, call: &Call, micros: Option<i64>, reply: Value) -> Option<Value> {
        let word = |word: &str| Value::SimpleString(word.to_owned());
        let number = |field| str::from_utf8(call.field(field)).ok()?.parse().ok();
        Some(Value::Array(match (self, reply) {
            (Self::Acquire, Value::Int(fence)) => vec![
                word("granted"),
                Value::Int(micros?),
                Value::Int(fence),
                Value::Int(number(Field::Lease)?),
                Value::Int(number(Field::Reserved)?),
            ],
            (Self::Acquire, done @ Value::BulkString(_)) => vec![
                word("refused"),
                Value::Int(micros?),
                Value::Int(1),
                word("done"),
                done,
            ],
            (Self::Release | Self::Record, Value::Int(0)) => vec![word("not_held")],
            (Self::Release | Self::Record, Value::Int(1)) => vec![word("released")],
            _ => return None,
        }))
    }
}

impl Group {
    /// Sends groups in the background until no call waits.
    fn start(self: &Arc<Self>) {
        let group = self.clone();
        // If the runtime ends, the callers that still wait send their calls themselves.
        let ended = OnDrop::new(move || {
            let mut state = lock(&group.state);
            state.active = None;
            let queue = std::mem::take(&mut state.queue);
            drop(state);
            hand_back(queue);
        });
        let group = self.clone();
        tokio::spawn(async move {
            group.run().await;
            ended.disarm();
        });
    }

    async fn run(&self) {
        let mut in_flight = FuturesUnordered::new();
        let mut is_due = false;
        loop {
            {
                let mut state = lock(&self.state);
                while !state.queue.is_empty()
                    && (is_due || in_flight.is_empty() || state.queue.len() >= MOST)
                {
                    let count = state.queue.len().min(MOST);
                    let mut groups = Purpose::ALL.map(|purpose| (purpose, Vec::new()));
                    for queued in state.queue.drain(..count) {
                        groups[queued.purpose as usize].1.push(queued);
                    }
                    let groups = groups.into_iter().filter(|(_, group)| !group.is_empty());
                    let sent = groups.map(|(purpose, group)| self.send(purpose, group));
                    in_flight.push(join_all(sent));
                }
                state.active = (!in_flight.is_empty()).then(Instant::now);
                if in_flight.is_empty() {
                    return;
                }
            }
            is_due = tokio::select! {
                _ = in_flight.next() => true,
                () = self.work.notified() => false,
                () = sleep(LONGEST) => true,
            };
        }
    }

    /// Sends a group, and passes each caller its outcome.
    async fn send(&self, purpose: Purpose, mut group: Vec<Queued>) {
        group.retain(|queued| !queued.outcome.is_closed());
        let connection = self.connection.upgrade();
        // Without a connection each caller learns by its own call why there is none.
        let Some(connection) = connection.filter(|it| !group.is_empty() && it.stands()) else {
            return hand_back(group);
        };
        if !connection.has_groups() {
            return together(&connection, group).await;
        }
        let call = purpose.call(&group);
        metered::grouped(&connection, &call, group.len());
        let reply = tokio::select! {
            biased;
            reply = connection.send_script(None, &call, Repeat::Never) => reply,
            // No caller waits any more.
            _ = join_all(group.iter_mut().map(|queued| queued.outcome.closed())) => return,
        };
        let mut replies = match reply {
            Err(failed) => {
                for queued in group {
                    let _ = queued.outcome.send(Turn::Over(Err(failed.clone())));
                }
                return;
            }
            Ok(Value::Array(replies)) => replies.into_iter(),
            // The server has refused the group before it executed anything.
            Ok(_) => Vec::new().into_iter(),
        };
        let micros = match purpose {
            Purpose::Acquire => replies.next(),
            Purpose::Release | Purpose::Record => None,
        };
        let micros = micros.and_then(|micros| redis::from_redis_value(micros).ok());
        let (count, mut executed) = (group.len(), 0);
        for queued in group {
            let reply = replies.next().unwrap_or(Value::Nil);
            let reply = purpose.reply(&queued.call, micros, reply);
            executed += usize::from(reply.is_some());
            let turn = reply.map_or(Turn::Alone(None), |value| Turn::Over(Ok(value)));
            let _ = queued.outcome.send(turn);
        }
        if 2 * executed < count {
            lock(&self.state).contended[purpose as usize] = CONTENDED;
        }
    }
}

/// Sends calls in one write, for each of which its own script is executed.
async fn together(connection: &Connection, mut group: Vec<Queued>) {
    let calls: Vec<_> = group.iter().map(|queued| queued.call.clone()).collect();
    metered::grouped(connection, &calls[0], calls.len());
    let replies = tokio::select! {
        biased;
        replies = connection.answer_once(&calls) => replies,
        // No caller waits any more.
        _ = join_all(group.iter_mut().map(|queued| queued.outcome.closed())) => return,
    };
    let turns = match replies {
        Ok(replies) => replies.into_iter().map(Ok).collect(),
        Err(failed) => vec![Err(failed); group.len()],
    };
    for (queued, turn) in group.into_iter().zip(turns) {
        let _ = queued.outcome.send(Turn::Over(turn));
    }
}

/// Runs scripts, the renewals of writers in groups, in at most two round trips. An error reply of
/// the server is returned as a value.
pub(crate) async fn answer_all(
    connection: &Connection,
    calls: Vec<Call>,
) -> Result<Vec<Result<Value, StoreError>>, StoreError> {
    // A renewal that corrects a lease is sent alone.
    let is_renewal = |index: &usize| {
        calls[*index].is_of(&script::RENEW) && calls[*index].field(Field::AtMost).is_empty()
    };
    let (renewals, others): (Vec<_>, Vec<_>) = (0..calls.len()).partition(is_renewal);
    let ungrouped = &connection.groups.ungrouped_renewals;
    let refused = ungrouped.load(Ordering::Relaxed);
    if renewals.len() < 2 || refused > 0 {
        ungrouped.store(refused.saturating_sub(renewals.len()), Ordering::Relaxed);
        let values = connection.answer_each(calls).await?;
        return Ok(values.into_iter().map(Ok).collect());
    }
    let of = |indices: &[usize]| indices.iter().map(|index| calls[*index].clone()).collect();
    let together = |group: &[usize]| {
        let size = SIZE * group.len();
        let call = Call::with_capacity(&script::RENEW_GROUP, group.len(), size);
        let all = || group.iter().map(|index| &calls[*index]);
        let call = call.args(all().map(|it| it.key(0)));
        let call =
            call.args(all().flat_map(|it| [it.field(Field::Member), it.field(Field::Lease)]));
        metered::grouped(connection, &call, group.len());
        call
    };
    let mut sent: Vec<_> = renewals.chunks(MOST).map(together).collect();
    sent.extend::<Vec<_>>(of(&others));
    let mut replies = connection.answer_each(sent).await?.into_iter();
    let mut values = vec![Ok(Value::Nil); calls.len()];
    for group in renewals.chunks(MOST) {
        match replies.next() {
            Some(Value::Array(replies)) if replies.len() == group.len() => {
                for (index, reply) in group.iter().zip(replies) {
                    values[*index] = Ok(reply);
                }
            }
            // The server has refused the group before it executed anything.
            _ => ungrouped.store(UNGROUPED, Ordering::Relaxed),
        }
    }
    for (index, reply) in others.into_iter().zip(replies) {
        values[index] = Ok(reply);
    }
    let mut left = renewals;
    left.retain(|index| matches!(values[*index], Ok(Value::Nil)));
    if !left.is_empty() {
        let replies = match connection.answer_each(of(&left)).await {
            Ok(replies) => replies.into_iter().map(Ok).collect(),
            Err(error) => vec![Err(error); left.len()],
        };
        for (index, reply) in left.into_iter().zip(replies) {
            values[index] = reply;
        }
    }
    Ok(values)
}

/// Lets the callers send their calls alone.
fn hand_back(calls: impl IntoIterator<Item = Queued>) {
    for queued in calls {
        let _ = queued.outcome.send(Turn::Alone(None));
    }
}
