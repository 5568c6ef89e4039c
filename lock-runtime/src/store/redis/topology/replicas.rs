//! Grants that are of use only once enough replicas have them.
//!
//! `WAIT` blocks its whole connection, and waits for the writes of that connection. It therefore
//! has a connection of its own, on which a script first writes to a key of a grant. The script also
//! shows that the same server has made the grants (rule 32 of docs/PROTOCOL.md). Calls that arrive
//! during a round share the next one, so one `WAIT` serves them all.
//!
//! A grant that too few replicas have is not reported. The call counts as unanswered, and the
//! caller follows it up like any other unanswered call.

use std::{
    mem,
    sync::{Arc, Mutex},
    time::Duration,
};

use redis::{Cmd, Pipeline, Value};
use tokio::{sync::oneshot, time::timeout};

use super::super::{
    connection::{Connection, is_unknown_script},
    error::unavailable,
    script::{self, Call, names::Names, reply::unexpected},
    settings::MinReplicas,
    sync::OnDrop,
};
use crate::{
    observe::text::Short,
    shell::sync::lock,
    store::{Hold, KeyPart, StoreError},
};

/// The time that a round may take in addition to the wait: a round trip, and a new connection.
const MARGIN: Duration = Duration::from_millis(500);
/// The largest number of grants that one script confirms.
const GROUP: usize = 32;

pub(crate) struct Replicas {
    connection: Arc<Connection>,
    required: MinReplicas,
    // A std mutex: it is held for a push or a take only, never across an await.
    queue: Mutex<Queue>,
}

#[derive(Default)]
struct Queue {
    waiting: Vec<Asked>,
    /// A task is serving the queue.
    served: bool,
}

/// The grants of one call.
struct Asked {
    grants: Vec<Hold>,
    sender: oneshot::Sender<Result<(), StoreError>>,
}

impl Replicas {
    /// Opens a connection in addition to that of the store.
    pub(crate) fn new(store: &Connection, required: MinReplicas) -> Arc<Self> {
        Arc::new(Self {
            connection: Connection::begin(store.connector.clone().deaf()),
            required,
            queue: Mutex::default(),
        })
    }

    /// Finds out whether `WAIT` is allowed before the first grant needs it.
    pub(crate) async fn check(&self) -> Result<(), StoreError> {
        let (_, found) = self.wait(&[]).await?;
        if found < u64::from(self.required.count.get()) {
            tracing::warn!(
                found,
                required = self.required.count,
                "too few replicas: no lock is granted until there are enough"
            );
        }
        Ok(())
    }

    /// The number of replicas that must have a grant.
    pub(crate) fn required(&self) -> u64 {
        self.required.count.get().into()
    }

    /// Waits until enough replicas have the grants.
    pub(crate) async fn have<'a>(
        self: &Arc<Self>,
        grants: impl IntoIterator<Item = &'a Hold>,
    ) -> Result<(), StoreError> {
        let answer = self.ask(grants.into_iter().cloned().collect()).await;
        let answer = answer.unwrap_or_else(|_| Err(StoreError::interrupted()));
        // The grants were made, also if the question about them was not sent.
        answer.map_err(|error| error.with_unsent(false))
    }

    fn ask(self: &Arc<Self>, grants: Vec<Hold>) -> oneshot::Receiver<Result<(), StoreError>> {
        let (sender, outcome) = oneshot::channel();
        let mut queue = lock(&self.queue);
        queue.waiting.push(Asked { grants, sender });
        if !mem::replace(&mut queue.served, true) {
            drop(queue);
            let (this, cut_off) = (self.clone(), self.clone());
            // The runtime of the task may end. Dropping the senders notifies the waiting callers.
            let cut_off = OnDrop::new(move || {
                let _left = mem::take(&mut *lock(&cut_off.queue));
            });
            // A separate task, as the caller that starts it may stop waiting.
            tokio::spawn(async move {
                while let Some(asked) = this.next() {
                    this.round(asked).await;
                }
                cut_off.disarm();
            });
        }
        outcome
    }

    /// The calls that are waiting; `None` if there are none, and the next call starts a new task.
    fn next(&self) -> Option<Vec<Asked>> {
        let mut queue = lock(&self.queue);
        let mut asked = mem::take(&mut queue.waiting);
        // Skip calls whose callers have stopped waiting.
        asked.retain(|asked| !asked.sender.is_closed());
        queue.served = !asked.is_empty();
        queue.served.then_some(asked)
    }

    async fn round(&self, asked: Vec<Asked>) {
        let grants: Vec<_> = asked.iter().flat_map(|asked| &asked.grants).collect();
        let limit = self.required.timeout + MARGIN;
        let outcome = timeout(limit, self.wait(&grants)).await;
        let outcome = outcome.unwrap_or_else(|_| Err(StoreError::timed_out(limit)));
        let mut outcome = outcome.map(|(written, found)| (written.into_iter(), found));
        for Asked { grants, sender } in asked {
            let _ = sender.send(match &mut outcome {
                Ok((written, found)) => {
                    // Take the replies of all grants, even after one that failed.
                    let written: Vec<_> = written.take(grants.len()).collect();
                    let all: Result<(), _> = written.into_iter().collect();
                    all.and_then(|()| self.is_enough(*found))
                }
                Err(error) => Err(error.clone()),
            });
        }
    }

    /// Writes, then waits for the replicas. Returns the outcome for each grant, and the number of
    /// replicas that have them all.
    async fn wait(
        &self,
        grants: &[&Hold],
    ) -> Result<(Vec<Result<(), StoreError>>, u64), StoreError> {
        let mut group = GROUP;
        let mut replies = self.ask_all(grants, group).await?;
        let is_refused = |reply: &Value| matches!(reply, Value::ServerError(_));
        if grants.len() > 1 && replies.iter().any(is_refused) {
            // The reason may be in one of the grants, or in keys of several slots.
            group = 1;
            replies = self.ask_all(grants, group).await?;
        }
        let found = replies.pop().ok_or_else(unexpected)?;
        let written = grants.chunks(group).zip(replies);
        let written = written.flat_map(|(some, reply)| self.are_written(some.len(), reply));
        let written = written.collect();
        match self.connection.settle(found)? {
            Value::Int(found) => Ok((written, u64::try_from(found).unwrap_or(0))),
            _ => Err(unexpected()),
        }
    }

    /// Sends a script for each `group` of grants, and `WAIT`. Returns their replies.
    async fn ask_all(&self, grants: &[&Hold], group: usize) -> Result<Vec<Value>, StoreError> {
        let MinReplicas { count, timeout } = self.required;
        let mut wait = redis::cmd("WAIT");
        wait.arg(count.get()).arg(timeout.as_millis().to_string());
        let calls: Vec<_> = grants.chunks(group).map(|some| self.about(some)).collect();
        let fences = self.connection.connector.fences_kept_for;
        let all = |command: fn(&Call, Duration) -> Cmd| {
            let mut all = Pipeline::with_capacity(calls.len() + 1);
            for call in &calls {
                all.add_command(command(call, fences));
            }
            all.add_command(wait.clone());
            all
        };
        let by_digest = all(Call::command);
        let replies = self.connection.send_all_again(&by_digest, true).await?;
        if !replies.iter().any(is_unknown_script) {
            return Ok(replies);
        }
        let by_text = all(Call::by_text);
        self.connection.send_all_again(&by_text, true).await
    }

    fn about(&self, grants: &[&Hold]) -> Call {
        let namespace = &self.connection.connector.pushes.namespace;
        let mut call = Call::new(&script::REPLICATE, 2 * grants.len());
        let names = |hold: &&Hold| Names::new(namespace, &hold.key, hold.mode.kind());
        let names: Vec<_> = grants.iter().map(names).collect();
        for part in [KeyPart::Lock, KeyPart::Fence] {
            call = names
                .iter()
                .fold(call, |call, names| call.name(names, part));
        }
        grants.iter().fold(call, |call, hold| call.hold(hold))
    }

    /// The outcomes for `count` grants.
    fn are_written(&self, count: usize, reply: Value) -> Vec<Result<(), StoreError>> {
        let replies = match self.connection.settle(reply) {
            Ok(Value::Array(replies)) => replies,
            Ok(_) => return vec![Err(unexpected()); count],
            Err(error) => return vec![Err(error); count],
        };
        let written = |index| match replies.get(index) {
            Some(Value::Int(1)) => Ok(()),
            _ => {
                // The grant is not on the server of this connection. There may be a new primary,
                // for either of the two connections.
                self.connection.greet_again();
                Err(unavailable("the grant was lost before the replicas had it"))
            }
        };
        (0..count).map(written).collect()
    }

    fn is_enough(&self, found: u64) -> Result<(), StoreError> {
        let MinReplicas { count, timeout } = self.required;
        if found >= u64::from(count.get()) {
            return Ok(());
        }
        Err(unavailable(format!(
            "{found} of {count} replicas had the grant within {}, so it does not count",
            Short(timeout)
        )))
    }
}
