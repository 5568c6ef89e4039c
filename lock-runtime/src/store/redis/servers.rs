//! The servers of a store: one server, or the nodes of a cluster. This module decides where a call
//! is sent, and not its content.

use std::{borrow::Cow, sync::Arc};

use redis::Value;
use tokio::time::Instant;

use super::{
    cluster::{Cluster, Errand, Failure, Node, Slot, slot_of},
    connection::{Connection, Repeat, Writer},
    pushes::Pushes,
    reply::Reply,
    scripts::Call,
};
use crate::store::{Hold, KeyRequest, StoreError};

pub(super) enum Servers {
    One(Box<Connection>),
    Cluster(Cluster),
}

/// The result of a call.
pub(super) struct Answer {
    value: Value,
    /// The node that serves the lock, in a cluster.
    node: Option<Arc<Node>>,
}

/// The result of a call that releases a lock.
pub(super) enum Freed {
    /// The script ran.
    Wholly(Answer),
    /// Only the single-key script ran, because the slot is migrating. The wait queue
    /// was not advanced.
    LockAlone(Answer),
    /// As `LockAlone`, but the script had started, and stopped after the release.
    HalfWay,
}

impl Answer {
    pub(super) fn into_value(self) -> Value {
        self.value
    }

    pub(super) fn reply(&mut self) -> Result<Reply, StoreError> {
        Reply::new(std::mem::replace(&mut self.value, Value::Nil))
    }
}

impl From<(Value, Arc<Node>)> for Answer {
    fn from((value, node): (Value, Arc<Node>)) -> Self {
        Self {
            value,
            node: Some(node),
        }
    }
}

impl From<Value> for Answer {
    fn from(value: Value) -> Self {
        Self { value, node: None }
    }
}

impl Servers {
    pub(super) fn pushes(&self) -> &Pushes {
        match self {
            Self::One(connection) => connection.pushes(),
            Self::Cluster(cluster) => cluster.pushes(),
        }
    }

    /// The addresses, without passwords.
    pub(super) fn address(&self) -> String {
        match self {
            Self::One(connection) => connection.address(),
            Self::Cluster(cluster) => cluster.address(),
        }
    }

    /// The slot of `hold` in a cluster, 0 on a single server.
    pub(super) fn place(&self, hold: &Hold) -> Slot {
        match self {
            Self::One(_) => 0,
            Self::Cluster(cluster) => cluster.slot(hold),
        }
    }

    /// The channel on which a request in that slot is notified of its grant if it has to wait.
    pub(super) fn channel(&self, place: Slot) -> Cow<'_, str> {
        match self {
            Self::One(connection) => connection.pushes().own().into(),
            Self::Cluster(cluster) => cluster.channel(place).into(),
        }
    }

    /// The latest marker of the data, on a server of a quorum.
    pub(super) fn marker(&self) -> Option<String> {
        match self {
            Self::One(connection) => connection.marker(),
            Self::Cluster(_) => None,
        }
    }

    /// Ends the connection to a single server that has changed. The next call repeats
    /// the handshake.
    pub(super) fn greet_again(&self) {
        if let Self::One(connection) = self {
            connection.greet_again();
        }
    }

    /// Registers `hold`, which is queued according to `answer`, for notifications.
    pub(super) fn waits(&self, hold: &Hold, answer: &Answer) {
        if let (Self::Cluster(cluster), Some(node)) = (self, &answer.node) {
            cluster.waits(hold, node);
        }
    }

    /// Unregisters `hold`, which is not queued any more.
    pub(super) fn leaves(&self, hold: &Hold) {
        if let Self::Cluster(cluster) = self {
            cluster.leaves(hold);
        }
    }

    /// A number that the locks of one server share.
    pub(super) fn server_of(&self, lock: &str) -> u64 {
        match self {
            Self::One(_) => 0,
            Self::Cluster(cluster) => cluster.node_number(slot_of(lock.as_bytes())),
        }
    }

    /// Groups the indices of the requests so that one script can access the keys of each group. The
    /// first request is in the first group.
    pub(super) fn by_slot(&self, requests: &[KeyRequest]) -> Vec<Vec<usize>> {
        let cluster = match self {
            Self::One(_) => return vec![(0..requests.len()).collect()],
            Self::Cluster(cluster) => cluster,
        };
        let mut slots: Vec<(Slot, Vec<usize>)> = Vec::new();
        for (index, request) in requests.iter().enumerate() {
            let slot = cluster.slot(&request.hold);
            match slots.iter_mut().find(|(known, _)| *known == slot) {
                Some((_, indices)) => indices.push(index),
                None => slots.push((slot, vec![index])),
            }
        }
        slots.into_iter().map(|(_, indices)| indices).collect()
    }

    /// Runs a script, and repeats it once if the connection breaks.
    pub(super) async fn call(&self, call: &Call) -> Result<Answer, StoreError> {
        match self {
            Self::One(connection) => connection.call(call).await.map(Answer::from),
            Self::Cluster(cluster) => Ok(cluster
                .run(slot_of(call.key()), Errand::Call(call, Repeat::Once))
                .await?
                .into()),
        }
    }

    /// Runs a script in that slot without repeating it. The script takes a deadline in the
    /// server's time, and returns that time as the second word of its reply.
    pub(super) async fn call_by(
        &self,
        place: Slot,
        deadline: Instant,
        write: Writer<'_>,
    ) -> Result<Answer, StoreError> {
        match self {
            Self::One(connection) => connection.call_by(deadline, write).await.map(Answer::from),
            Self::Cluster(cluster) => Ok(cluster
                .run(place, Errand::By(deadline, write))
                .await?
                .into()),
        }
    }

    /// Runs a script that releases a lock, or `alone` if that script cannot be run.
    pub(super) async fn free(
        &self,
        call: &Call,
        alone: impl FnOnce() -> Call + Send,
        repeat: Repeat,
    ) -> Result<Freed, StoreError> {
        let cluster = match self {
            Self::One(connection) => {
                return Ok(Freed::Wholly(
                    connection.call_as(call, repeat).await?.into(),
                ));
            }
            Self::Cluster(cluster) => cluster,
        };
        let slot = slot_of(call.key());
        match cluster.run(slot, Errand::Call(call, repeat)).await {
            Ok(answer) => Ok(Freed::Wholly(answer.into())),
            Err(Failure::Failed(error)) => Err(error),
            Err(Failure::Moving(_)) => Ok(Freed::LockAlone(
                cluster
                    .run(slot, Errand::Call(&alone(), repeat))
                    .await?
                    .into(),
            )),
            Err(Failure::HalfWay(_)) => {
                // Make sure that the lock is released.
                cluster.run(slot, Errand::Call(&alone(), repeat)).await?;
                Ok(Freed::HalfWay)
            }
        }
    }

    /// Runs `count` scripts in few round trips, and returns a result for each.
    pub(super) async fn call_each(
        &self,
        count: usize,
        write: &(dyn Fn(usize) -> Call + Sync),
    ) -> Vec<Result<Answer, StoreError>> {
        match self {
            Self::One(connection) => answers(connection.call_all(count, write).await),
            Self::Cluster(cluster) => answers(cluster.run_each(count, write).await),
        }
    }
}

fn answers<T: Into<Answer>>(
    results: Vec<Result<T, StoreError>>,
) -> Vec<Result<Answer, StoreError>> {
    results
        .into_iter()
        .map(|result| result.map(T::into))
        .collect()
}
