//! The servers of a store: one server, or the nodes of a cluster. This module decides where a call
//! is sent, and not its content.

use std::{borrow::Cow, sync::Arc};

use redis::Value;

use super::{
    super::{
        connection::{Connection, Errand, Repeat, connector::Connector, pushes::Pushes},
        outage::InOutage,
        script::{Call, reply::Reply},
    },
    cluster::{Cluster, Node, Slot, slot_of},
};
use crate::store::{Hold, KeyRequest, StoreError};

pub(crate) enum Servers {
    One(Arc<Connection>),
    Cluster(Arc<Cluster>),
    /// A server in a simulator.
    #[cfg(all(test, feature = "records"))]
    Simulated(super::scripts::Scripts),
}

/// The result of a call.
pub(crate) struct ScriptReply {
    pub(crate) value: Value,
    /// The node that serves the lock, in a cluster.
    pub(crate) node: Option<Arc<Node>>,
}

/// The result of a call that releases a lock.
pub(crate) enum Freed {
    /// The script ran.
    Wholly(ScriptReply),
    /// Only the single-key script ran, because the slot is migrating. The wait queue
    /// was not advanced.
    LockAlone(ScriptReply),
    /// As `LockAlone`, but the script had started, and stopped after the release.
    HalfWay,
}

impl ScriptReply {
    /// The reply of a server that stores all locks.
    pub(crate) fn of_one(value: Value) -> Self {
        Self { value, node: None }
    }

    pub(crate) fn reply(&mut self) -> Result<Reply, StoreError> {
        Reply::new(std::mem::replace(&mut self.value, Value::Nil))
    }
}

impl Servers {
    /// The parameters that all connections share.
    fn connector(&self) -> &Connector {
        match self {
            Self::One(connection) => &connection.connector,
            Self::Cluster(cluster) => &cluster.connector,
            #[cfg(all(test, feature = "records"))]
            Self::Simulated(_) => unreachable!("it has no connection"),
        }
    }

    pub(crate) fn pushes(&self) -> &Pushes {
        #[cfg(all(test, feature = "records"))]
        if let Self::Simulated(scripts) = self {
            return scripts.pushes();
        }
        &self.connector().pushes
    }

    /// The addresses, without passwords.
    pub(crate) fn address(&self) -> String {
        match self {
            Self::One(connection) => connection.connector.target.to_string(),
            Self::Cluster(cluster) => cluster.address(),
            #[cfg(all(test, feature = "records"))]
            Self::Simulated(_) => "simulator".to_owned(),
        }
    }

    /// The slot of `hold` in a cluster, 0 on a single server.
    pub(crate) fn place(&self, hold: &Hold) -> Slot {
        match self {
            Self::One(_) => 0,
            Self::Cluster(cluster) => cluster.slot(hold),
            #[cfg(all(test, feature = "records"))]
            Self::Simulated(_) => 0,
        }
    }

    /// The channel on which a request in that slot is notified of its grant if it has to wait.
    pub(crate) fn channel(&self, place: Slot) -> Cow<'_, str> {
        match self {
            Self::One(_) => self.pushes().own.as_str().into(),
            Self::Cluster(cluster) => cluster.channel(place).into(),
            #[cfg(all(test, feature = "records"))]
            Self::Simulated(_) => self.pushes().own.as_str().into(),
        }
    }

    /// The handling of a request that waits or not. The other servers of a quorum make up for one
    /// that does not answer, so requests do not wait for it.
    pub(crate) fn in_outage(&self, waits: bool) -> InOutage {
        #[cfg(all(test, feature = "records"))]
        if let Self::Simulated(_) = self {
            return InOutage::Try;
        }
        match waits && !self.connector().is_member() {
            true => InOutage::Wait,
            false => InOutage::Refuse,
        }
    }

    /// The latest marker of the data, on a server of a quorum, as the connection of this thread has
    /// read it.
    pub(crate) fn marker(&self) -> Option<String> {
        let connector = match self {
            Self::One(connection) => &connection.here().connector,
            Self::Cluster(_) => self.connector(),
            #[cfg(all(test, feature = "records"))]
            Self::Simulated(scripts) => return scripts.marker(),
        };
        Some(connector.tenure()?.marker.clone())
    }

    /// Waits until the connection of this thread to a single server has been established once.
    pub(crate) async fn greeted(&self) -> Result<(), StoreError> {
        match self {
            Self::One(connection) => connection.here().clock().await.map(|_| ()),
            Self::Cluster(_) => Ok(()),
            #[cfg(all(test, feature = "records"))]
            Self::Simulated(_) => Ok(()),
        }
    }

    /// Ends the connection to a single server that has changed. The next call repeats
    /// the handshake.
    pub(crate) fn greet_again(&self) {
        if let Self::One(connection) = self {
            connection.here().greet_again();
        }
    }

    /// Registers `hold`, which is queued according to `answer`, for notifications.
    pub(crate) fn waits(&self, hold: &Hold, answer: &ScriptReply) {
        if let (Self::Cluster(cluster), Some(node)) = (self, &answer.node) {
            cluster.waits(hold, node);
        }
    }

    /// Unregisters `hold`, which is not queued any more.
    pub(crate) fn leaves(&self, hold: &Hold) {
        if let Self::Cluster(cluster) = self {
            cluster.leaves(hold);
        }
    }

    /// A number that the locks of one server share.
    pub(crate) fn server_of(&self, lock: &str) -> u64 {
        match self {
            Self::One(_) => 0,
            Self::Cluster(cluster) => cluster.node_number(slot_of(lock.as_bytes())),
            #[cfg(all(test, feature = "records"))]
            Self::Simulated(_) => 0,
        }
    }

    /// Whether the locks are spread over slots, one script for each.
    pub(crate) fn has_slots(&self) -> bool {
        matches!(self, Self::Cluster(_))
    }

    /// Groups the indices of the requests so that one script can access the keys of each group. The
    /// first request is in the first group.
    pub(crate) fn by_slot(&self, requests: &[KeyRequest]) -> Vec<Vec<usize>> {
        let mut slots: Vec<(Slot, Vec<usize>)> = Vec::new();
        for (index, request) in requests.iter().enumerate() {
            let slot = self.place(&request.hold);
            match slots.iter_mut().find(|(known, _)| *known == slot) {
                Some((_, indices)) => indices.push(index),
                None => slots.push((slot, vec![index])),
            }
        }
        slots.into_iter().map(|(_, indices)| indices).collect()
    }

    /// Runs a script.
    pub(crate) async fn run(&self, errand: Errand<'_>) -> Result<ScriptReply, StoreError> {
        match self {
            Self::One(connection) => {
                let value = connection.here().answer(None, errand).await?;
                connection.settle(value).map(ScriptReply::of_one)
            }
            // Boxed: it is larger than that of a single server, which would reserve the space.
            Self::Cluster(cluster) => Ok(Box::pin(cluster.run(errand)).await?),
            #[cfg(all(test, feature = "records"))]
            Self::Simulated(scripts) => Ok(scripts.run(errand)),
        }
    }

    /// Runs a script that releases a lock, or `alone` if that script cannot be run.
    pub(crate) async fn free(
        &self,
        call: &Call,
        alone: impl FnOnce() -> Call + Send,
        repeat: Repeat,
    ) -> Result<Freed, StoreError> {
        match self {
            Self::One(_) => {
                let answer = self.run(Errand::Call(call, repeat)).await;
                answer.map(Freed::Wholly)
            }
            Self::Cluster(cluster) => Box::pin(cluster.free(call, alone, repeat)).await,
            #[cfg(all(test, feature = "records"))]
            Self::Simulated(scripts) => Ok(Freed::Wholly(scripts.run(Errand::Call(call, repeat)))),
        }
    }

    /// Runs `count` scripts in few round trips, and returns a result for each.
    pub(crate) async fn call_each(
        &self,
        count: usize,
        write: &(dyn Fn(usize) -> Call + Sync),
        in_outage: InOutage,
    ) -> Vec<Result<ScriptReply, StoreError>> {
        match self {
            Self::One(connection) => {
                let connection = connection.here();
                if let Err(refused) = connection.admits(in_outage) {
                    return (0..count).map(|_| Err(refused.error.clone())).collect();
                }
                let values = connection.call_all(count, write).await;
                let answers = values
                    .into_iter()
                    .map(|value| value.map(ScriptReply::of_one));
                answers.collect()
            }
            Self::Cluster(cluster) => cluster.run_each(count, write, in_outage).await,
            #[cfg(all(test, feature = "records"))]
            Self::Simulated(scripts) => (0..count)
                .map(|index| Ok(scripts.call(&write(index))))
                .collect(),
        }
    }
}
