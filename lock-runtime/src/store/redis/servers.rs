//! The servers that keep a store's locks: one, or the nodes of a cluster. Where a call goes is decided here; what is said is not.

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

/// What came of a call.
pub(super) struct Answer {
    value: Value,
    /// Of a cluster, the node that keeps the lock.
    node: Option<Arc<Node>>,
}

/// What came of a call that frees something.
pub(super) enum Freed {
    /// The script has run.
    Wholly(Answer),
    /// The one has run that needs the lock alone, as the lock is on its way from node to node: the line was not looked at.
    LockAlone(Answer),
    /// The same after the script had begun, and stopped behind what it gives back.
    HalfWay,
}

impl Answer {
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

    /// Where they are; never with a password.
    pub(super) fn address(&self) -> String {
        match self {
            Self::One(connection) => connection.address(),
            Self::Cluster(cluster) => cluster.address(),
        }
    }

    /// Where among them `hold` is.
    pub(super) fn place(&self, hold: &Hold) -> Slot {
        match self {
            Self::One(_) => 0,
            Self::Cluster(cluster) => cluster.slot(hold),
        }
    }

    /// Where a request at that place is to be told of its grant, should it have to wait.
    pub(super) fn channel(&self, place: Slot) -> Cow<'_, str> {
        match self {
            Self::One(connection) => connection.pushes().own().into(),
            Self::Cluster(cluster) => cluster.channel(place).into(),
        }
    }

    /// What the marker of its data said last, of one server among several.
    pub(super) fn marker(&self) -> Option<String> {
        match self {
            Self::One(connection) => connection.marker(),
            Self::Cluster(_) => None,
        }
    }

    /// One server is not what it was: the next call greets it anew.
    pub(super) fn greet_again(&self) {
        if let Self::One(connection) = self {
            connection.greet_again();
        }
    }

    /// `hold` stands in line, as the answer says: it is to be told.
    pub(super) fn waits(&self, hold: &Hold, answer: &Answer) {
        if let (Self::Cluster(cluster), Some(node)) = (self, &answer.node) {
            cluster.waits(hold, node);
        }
    }

    /// `hold` stands in no line.
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

    /// The places of the requests whose keys one script can speak of, for each such script; the first request is in the first.
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

    /// Runs one script, and once more if the connection breaks.
    pub(super) async fn call(&self, call: &Call) -> Result<Answer, StoreError> {
        match self {
            Self::One(connection) => connection.call(call).await.map(Answer::from),
            Self::Cluster(cluster) => Ok(cluster
                .run(slot_of(call.key()), Errand::Call(call, Repeat::Once))
                .await?
                .into()),
        }
    }

    /// Runs, without repeating it, the script for a request at that place, which is told a deadline in the server's time and says that time behind its
    /// first word.
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

    /// Runs a script that frees something, or `alone` where that cannot be run.
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
                // To be sure.
                cluster.run(slot, Errand::Call(&alone(), repeat)).await?;
                Ok(Freed::HalfWay)
            }
        }
    }

    /// Runs a script for each of the locks, in few round trips, and tells of each how it went.
    pub(super) async fn call_each(
        &self,
        count: usize,
        write: &(dyn Fn(usize) -> Call + Sync),
    ) -> Vec<Result<Value, StoreError>> {
        match self {
            Self::One(connection) => connection.call_all(count, write).await,
            Self::Cluster(cluster) => cluster.run_each(count, write).await,
        }
    }
}
