//! Group commit: calls that are made while others are in flight share the next call of a script.
//!
//! Only acquires of free locks, and releases of locks without waiters, are executed by such a
//! script, each on its own. It does nothing for the others, which their callers then send alone.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, Weak},
};

use futures_util::{StreamExt as _, stream::FuturesUnordered};
use redis::{Arg, Cmd, Value};
use smallvec::SmallVec;
use tokio::{
    sync::{Notify, oneshot},
    time::timeout,
};

use super::{
    connection::{Connection, Failed, Repeat},
    error::unavailable,
    link::SILENCE,
    on_drop::OnDrop,
    scripts::{self, Call},
};
use crate::{store::StoreError, sync::lock};

/// The largest number of calls in a group. The server executes so many in about 150 µs.
const MOST: usize = 32;
/// The number of calls of one kind that may be in flight. With fewer, a call is sent at once.
const IN_FLIGHT: usize = 4;
/// The largest number of calls that wait for the next group.
const QUEUED: usize = 4096;

/// The groups of a connection.
pub(super) struct Groups {
    acquires: Arc<Group>,
    releases: Arc<Group>,
}

/// The calls of one kind.
struct Group {
    connection: Weak<Connection>,
    kind: Kind,
    state: Mutex<State>,
    /// Notifies the task that sends the groups.
    work: Notify,
}

#[derive(Clone, Copy)]
enum Kind {
    Acquire,
    Release,
}

#[derive(Default)]
struct State {
    /// The number of calls in flight that were sent by their callers.
    alone: usize,
    /// Whether a task sends the groups.
    is_active: bool,
    queue: VecDeque<Queued>,
}

struct Queued {
    command: Cmd,
    outcome: oneshot::Sender<Turn>,
}

/// The outcome of a call that may share others' call.
pub(super) enum Turn {
    /// Its caller sends it, and keeps this value meanwhile.
    Alone(Option<Alone>),
    /// It was sent with others.
    Over(Result<Value, Failed>),
}

/// A call that its caller sends.
pub(super) struct Alone(Arc<Group>);

impl Drop for Alone {
    fn drop(&mut self) {
        lock(&self.0.state).alone -= 1;
    }
}

impl Groups {
    pub(super) fn new(connection: &Weak<Connection>) -> Self {
        let group = |kind| {
            Arc::new(Group {
                connection: connection.clone(),
                kind,
                state: Mutex::default(),
                work: Notify::new(),
            })
        };
        Self {
            acquires: group(Kind::Acquire),
            releases: group(Kind::Release),
        }
    }

    /// Sends a call with others, unless its caller is to send it.
    pub(super) async fn enter(&self, call: &Call) -> Turn {
        let group = if std::ptr::eq(call.script, &*scripts::ACQUIRE) {
            &self.acquires
        } else if std::ptr::eq(call.script, &*scripts::RELEASE) {
            &self.releases
        } else {
            return Turn::Alone(None);
        };
        let outcome = {
            let mut state = lock(&group.state);
            if !state.is_active && state.alone < IN_FLIGHT {
                state.alone += 1;
                return Turn::Alone(Some(Alone(group.clone())));
            }
            if !group.kind.suits(&call.command) || state.queue.len() >= QUEUED {
                return Turn::Alone(None);
            }
            let (sender, outcome) = oneshot::channel();
            state.queue.push_back(Queued {
                command: call.command.clone(),
                outcome: sender,
            });
            if !std::mem::replace(&mut state.is_active, true) {
                group.start();
            }
            outcome
        };
        group.work.notify_one();
        outcome.await.unwrap_or_else(|_| {
            let error = unavailable("the runtime that sent the call has ended");
            Turn::Over(Err(error.into()))
        })
    }
}

/// The keys and the other arguments of a script's call.
type Args<'a> = SmallVec<[&'a [u8]; 12]>;

fn args_of(command: &Cmd) -> (Args<'_>, Args<'_>) {
    let mut args = command.args_iter().skip(2).map(|arg| match arg {
        Arg::Simple(bytes) => bytes,
        _ => &[],
    });
    let keys = number(args.next().unwrap_or_default()).unwrap_or_default();
    (args.by_ref().take(keys).collect(), args.collect())
}

fn number<T: std::str::FromStr>(text: &[u8]) -> Option<T> {
    str::from_utf8(text).ok()?.parse().ok()
}

impl Kind {
    /// Returns whether a group can execute the call.
    fn suits(self, command: &Cmd) -> bool {
        let (keys, args) = args_of(command);
        match self {
            Self::Acquire => keys.len() < 6 && args[2] == b"exclusive",
            Self::Release => args[1] == b"0",
        }
    }

    /// Returns the call of a group.
    fn call(self, group: &[Queued]) -> Call {
        let all: Vec<_> = group.iter().map(|it| args_of(&it.command)).collect();
        match self {
            Self::Acquire => {
                let marker = all
                    .first()
                    .and_then(|(keys, args)| Some((*keys.get(3)?, *args.get(6)?)));
                let keys = 3 * all.len() + usize::from(marker.is_some());
                let mut call = Call::new(&scripts::ACQUIRE_GROUP, keys);
                for (keys, _) in &all {
                    call = call.arg(keys[0]).arg(keys[1]).arg(keys[2]);
                }
                call = marker.iter().fold(call, |call, (key, _)| call.arg(key));
                for (_, args) in &all {
                    call = call.arg(args[0]).arg(args[3]).arg(args[4]).arg(args[5]);
                    call = call.arg(args.get(7).unwrap_or(&&b"0"[..]));
                }
                marker
                    .iter()
                    .fold(call, |call, (_, marker)| call.arg(marker))
            }
            Self::Release => {
                let mut call = Call::new(&scripts::RELEASE_GROUP, 2 * all.len());
                for (keys, _) in &all {
                    call = call.arg(keys[0]).arg(keys[2]);
                }
                all.iter().fold(call, |call, (_, args)| call.arg(args[0]))
            }
        }
    }

    /// Returns the reply of the call's own script, or `None` if the group has done nothing for it.
    fn reply(self, command: &Cmd, micros: Option<i64>, reply: &Value) -> Option<Value> {
        let (_, args) = args_of(command);
        let word = |word: &str| Value::SimpleString(word.to_owned());
        Some(Value::Array(match (self, reply) {
            (Self::Acquire, Value::Int(fence)) => vec![
                word("granted"),
                Value::Int(micros?),
                Value::Int(*fence),
                Value::Int(number(args[4])?),
                Value::Int(number(args[5])?),
            ],
            (Self::Release, Value::Int(1)) => vec![word("released")],
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
            state.is_active = false;
            let queue = std::mem::take(&mut state.queue);
            drop(state);
            for queued in queue {
                let _ = queued.outcome.send(Turn::Alone(None));
            }
        });
        let group = self.clone();
        tokio::spawn(async move {
            group.run().await;
            ended.disarm();
        });
    }

    async fn run(&self) {
        let mut in_flight = FuturesUnordered::new();
        loop {
            {
                let mut state = lock(&self.state);
                while in_flight.len() < IN_FLIGHT && !state.queue.is_empty() {
                    let count = state.queue.len().min(MOST);
                    in_flight.push(self.send(state.queue.drain(..count).collect()));
                }
                if in_flight.is_empty() {
                    state.is_active = false;
                    return;
                }
            }
            tokio::select! {
                _ = in_flight.next() => {}
                () = self.work.notified(), if in_flight.len() < IN_FLIGHT => {}
            }
        }
    }

    /// Sends a group, and passes each caller its outcome.
    async fn send(&self, mut group: Vec<Queued>) {
        // Their callers have stopped waiting before anything was sent.
        group.retain(|queued| !queued.outcome.is_closed());
        let (Some(connection), false) = (self.connection.upgrade(), group.is_empty()) else {
            return;
        };
        let call = self.kind.call(&group);
        // After this time no caller waits any more. The connection is given up, as it is for a
        // caller that stops waiting for its own call.
        let reply = timeout(SILENCE, connection.send_script(None, &call, Repeat::Never)).await;
        let reply = reply.unwrap_or_else(|_| Err(StoreError::timed_out(SILENCE).into()));
        let mut replies = match reply {
            Err(failed) => {
                for queued in group {
                    let _ = queued.outcome.send(Turn::Over(Err(failed.clone())));
                }
                return;
            }
            // The server has refused the group before it executed anything.
            Ok(Value::Array(replies)) => replies.into_iter(),
            Ok(_) => Vec::new().into_iter(),
        };
        let micros = match self.kind {
            Kind::Acquire => replies.next(),
            Kind::Release => None,
        };
        let micros = micros.and_then(|micros| match micros {
            Value::Int(micros) => Some(micros),
            _ => None,
        });
        for queued in group {
            let reply = replies.next().unwrap_or(Value::Nil);
            let reply = self.kind.reply(&queued.command, micros, &reply);
            let turn = reply.map_or(Turn::Alone(None), |value| Turn::Over(Ok(value)));
            let _ = queued.outcome.send(turn);
        }
    }
}
