//! Grants that are of use only once so many replicas have them.
//!
//! `WAIT` blocks its whole connection, and waits for what was written on that connection. So there is a connection for it
//! alone, and on it something is written about each grant first, which also shows that this server has granted it
//! (PROTOCOL 32). Whatever comes while a round is under way goes into the next one together: one wait serves them all.
//!
//! A grant that too few replicas have is not told: the call is unanswered, and whoever asked follows it up as any other
//! unanswered call.

use std::{
    mem,
    sync::{Arc, Mutex},
    time::Duration,
};

use redis::{Cmd, Pipeline, Value};
use tokio::{sync::oneshot, time::timeout};

use super::{
    connection::{Connection, is_unknown_script},
    names::Names,
    reply::unexpected,
    scripts::{self, Call},
    settings::MinReplicas,
};
use crate::{
    store::{Hold, StoreError, StoreErrorKind},
    sync::lock,
};

/// What a round may take beyond the wait: the way there and back, and a connection that is made again.
const MARGIN: Duration = Duration::from_millis(500);

pub(super) struct Replicas {
    connection: Connection,
    required: MinReplicas,
    // Not tokio's: it is held for a push or a take only, never across an await.
    queue: Mutex<Queue>,
}

#[derive(Default)]
struct Queue {
    waiting: Vec<Asked>,
    /// A task serves it.
    served: bool,
}

/// The grants of one call.
struct Asked {
    grants: Vec<Cmd>,
    told: oneshot::Sender<Result<(), StoreError>>,
}

impl Replicas {
    /// On a connection beside that of the store.
    pub(super) async fn open(
        store: &Connection,
        required: MinReplicas,
    ) -> Result<Arc<Self>, StoreError> {
        let replicas = Self {
            connection: store.beside(),
            required,
            queue: Mutex::default(),
        };
        // Whether it is allowed is better known now.
        let found = replicas.wait(Pipeline::new()).await?.1;
        if found < u64::from(required.count.get()) {
            tracing::warn!(
                found,
                required = required.count,
                "too few replicas: no lock is granted until there are enough"
            );
        }
        Ok(Arc::new(replicas))
    }

    /// Waits until enough replicas have the grants.
    pub(super) async fn have<'a>(
        self: &Arc<Self>,
        namespace: &str,
        grants: impl IntoIterator<Item = &'a Hold>,
    ) -> Result<(), StoreError> {
        let about = |hold: &Hold| {
            let Names { lock, fence, .. } = Names::new(namespace, &hold.key, hold.mode.family());
            Call::new(&scripts::REPLICATE, 2)
                .arg(lock)
                .arg(fence)
                .hold(hold)
                .into_parts()
                .1
        };
        let grants = grants.into_iter().map(about).collect();
        self.ask(grants).await.unwrap_or_else(|_| {
            let message = "the runtime has ended on which the replicas were waited for";
            Err(StoreError::new(StoreErrorKind::Unavailable, message))
        })
    }

    fn ask(self: &Arc<Self>, grants: Vec<Cmd>) -> oneshot::Receiver<Result<(), StoreError>> {
        let (told, outcome) = oneshot::channel();
        let mut queue = lock(&self.queue);
        queue.waiting.push(Asked { grants, told });
        if !mem::replace(&mut queue.served, true) {
            drop(queue);
            // In a task of its own: whoever began it may stop waiting.
            tokio::spawn(
                Rounds {
                    replicas: self.clone(),
                    ended: false,
                }
                .run(),
            );
        }
        outcome
    }

    async fn round(&self, asked: Vec<Asked>) {
        let mut about = Pipeline::new();
        for grant in asked.iter().flat_map(|asked| &asked.grants) {
            about.add_command(grant.clone());
        }
        let limit = self.required.timeout + MARGIN;
        let outcome = timeout(limit, self.wait(about))
            .await
            .unwrap_or_else(|_| Err(StoreError::timed_out(limit)));
        let (mut written, found) = match outcome {
            Ok((written, found)) => (written.into_iter(), found),
            Err(error) => {
                asked
                    .into_iter()
                    .for_each(|asked| drop(asked.told.send(Err(error.clone()))));
                return;
            }
        };
        for Asked { grants, told } in asked {
            // All of them are taken, also behind one that failed.
            let written: Vec<_> = written.by_ref().take(grants.len()).collect();
            let outcome = written
                .into_iter()
                .try_for_each(|reply| self.is_written(reply));
            let _ = told.send(outcome.and_then(|()| self.is_enough(found)));
        }
    }

    /// Writes, and waits for the replicas: what came of each, and how many replicas have it all.
    async fn wait(&self, about: Pipeline) -> Result<(Vec<Value>, u64), StoreError> {
        let wait = wait_for(self.required);
        let mut all = about;
        all.add_command(wait.clone());
        let mut replies = self.connection.send_all_again(&all, true).await?;
        if replies.iter().any(is_unknown_script) {
            let mut by_text = Pipeline::with_capacity(all.len());
            for call in all.cmd_iter().take(all.len() - 1) {
                by_text.add_command(scripts::REPLICATE.by_text(call));
            }
            by_text.add_command(wait);
            replies = self.connection.send_all_again(&by_text, true).await?;
        }
        match self
            .connection
            .settle(replies.pop().ok_or_else(unexpected)?)?
        {
            Value::Int(found) => Ok((replies, u64::try_from(found).unwrap_or(0))),
            _ => Err(unexpected()),
        }
    }

    fn is_written(&self, reply: Value) -> Result<(), StoreError> {
        match self.connection.settle(reply)? {
            Value::Int(1) => Ok(()),
            Value::Int(0) => {
                // It is not there where we wait: there may be a new primary, for either of the two connections.
                self.connection.greet_again();
                Err(StoreError::new(
                    StoreErrorKind::Unavailable,
                    "the grant was lost before the replicas had it",
                ))
            }
            _ => Err(unexpected()),
        }
    }

    fn is_enough(&self, found: u64) -> Result<(), StoreError> {
        let MinReplicas { count, timeout } = self.required;
        if found >= u64::from(count.get()) {
            return Ok(());
        }
        let message = format!(
            "{found} of {count} replicas had the grant within {timeout:?}, so it does not count"
        );
        Err(StoreError::new(StoreErrorKind::Unavailable, message))
    }
}

fn wait_for(required: MinReplicas) -> Cmd {
    let mut wait = redis::cmd("WAIT");
    wait.arg(required.count.get())
        .arg(required.timeout.as_millis().to_string());
    wait
}

/// The task that serves the queue until it is empty. Dropped before, with its runtime, it leaves word that it is gone.
struct Rounds {
    replicas: Arc<Replicas>,
    ended: bool,
}

impl Rounds {
    async fn run(mut self) {
        while let Some(asked) = self.next() {
            self.replicas.round(asked).await;
        }
    }

    /// All who wait now; `None` if nobody does, and the next one who comes begins anew.
    fn next(&mut self) -> Option<Vec<Asked>> {
        let mut queue = lock(&self.replicas.queue);
        // Who has stopped waiting need not be waited for.
        let asked: Vec<_> = queue
            .waiting
            .drain(..)
            .filter(|asked| !asked.told.is_closed())
            .collect();
        if asked.is_empty() {
            queue.served = false;
            self.ended = true;
            return None;
        }
        Some(asked)
    }
}

impl Drop for Rounds {
    fn drop(&mut self) {
        if !self.ended {
            let mut queue = lock(&self.replicas.queue);
            queue.served = false;
            let left = mem::take(&mut queue.waiting);
            drop(queue);
            // Who waited there is told so.
            drop(left);
        }
    }
}
