//! Swaps that share a call: those that are made while as many calls are in flight as have room.

use std::{
    collections::VecDeque,
    mem::take,
    sync::{Arc, Mutex},
};

use futures_util::future::join_all;
use tokio::{runtime::Handle, sync::oneshot};

use super::{Swap, SwapReply};
use crate::{shell::sync::lock, store::StoreError};

/// The largest number of swaps in a call.
const LARGEST: usize = 32;

type Reply = Result<SwapReply, StoreError>;

/// The calls to a database, of which each can make several swaps.
pub(in crate::store) trait Grouping: Send + Sync + 'static {
    fn group(&self) -> &Group;

    fn swap_alone(&self, swap: &Swap) -> impl Future<Output = Reply> + Send;

    /// Makes the swaps of one group. Some of them may be of the same record.
    fn swap_group(&self, swaps: &[Swap]) -> impl Future<Output = Vec<Reply>> + Send;
}

/// Swaps that wait for a call.
pub(in crate::store) struct Group(Mutex<GroupState>);

struct GroupState {
    waiting: VecDeque<(Swap, oneshot::Sender<Reply>)>,
    /// The number of calls that may be in flight before swaps wait for each other.
    room: usize,
}

impl Group {
    pub(in crate::store) fn new(room: usize) -> Self {
        Self(Mutex::new(GroupState {
            waiting: VecDeque::new(),
            room,
        }))
    }

    /// Returns the swaps to make next. Those whose callers have ended are not among them. Gives the
    /// room of the call back if there are none.
    fn next(&self) -> (Vec<Swap>, Vec<oneshot::Sender<Reply>>) {
        let mut state = lock(&self.0);
        let mut next: Vec<_> = Vec::new();
        while next.len() < LARGEST
            && let Some(waiting) = state.waiting.pop_front()
        {
            if !waiting.1.is_closed() {
                next.push(waiting);
            }
        }
        if next.is_empty() {
            state.room += 1;
        }
        next.into_iter().unzip()
    }
}

/// The room of one call. When it is dropped, the swaps that wait by then use it.
struct Room<'a, C: Grouping>(&'a Arc<C>);

impl<C: Grouping> Drop for Room<'_, C> {
    fn drop(&mut self) {
        {
            let mut state = lock(&self.0.group().0);
            if state.waiting.is_empty() {
                state.room += 1;
                return;
            }
        }
        let serving = Serving(Some(self.0.clone()));
        if let Ok(runtime) = Handle::try_current() {
            runtime.spawn(serving.serve());
        }
    }
}

/// The room of a call that serves the swaps that wait. If its runtime ends, these swaps fail.
struct Serving<C: Grouping>(Option<Arc<C>>);

impl<C: Grouping> Drop for Serving<C> {
    fn drop(&mut self) {
        if let Some(calls) = self.0.take() {
            let waiting = {
                let mut state = lock(&calls.group().0);
                state.room += 1;
                take(&mut state.waiting)
            };
            // After the mutex, as it wakes the callers.
            drop(waiting);
        }
    }
}

impl<C: Grouping> Serving<C> {
    /// Makes the swaps that wait, until there are none.
    async fn serve(mut self) {
        while let Some(calls) = &self.0 {
            let (swaps, senders) = calls.group().next();
            if swaps.is_empty() {
                // The group has its room back.
                self.0 = None;
                return;
            }
            let mut senders = senders;
            let replies = {
                let ended = join_all(senders.iter_mut().map(oneshot::Sender::closed));
                tokio::select! {
                    replies = calls.swap_group(&swaps) => replies,
                    // The server may hang. Its connection is not used again then.
                    _ = ended => continue,
                }
            };
            for (sender, reply) in senders.into_iter().zip(replies) {
                // Its caller may have ended.
                let _ = sender.send(reply);
            }
        }
    }
}

/// Returns whether a swap can share a call with others.
pub(in crate::store) fn fits(swap: &Swap) -> bool {
    swap.changes.len() == 1 && swap.messages.is_empty()
}

/// Makes a swap, alone or together with others.
pub(in crate::store) async fn swap<C: Grouping>(calls: &Arc<C>, swap: &Swap) -> Reply {
    if !fits(swap) {
        return calls.swap_alone(swap).await;
    }
    let reply = {
        let mut state = lock(&calls.group().0);
        match state.room.checked_sub(1) {
            Some(room) => {
                state.room = room;
                None
            }
            None => {
                let (sender, reply) = oneshot::channel();
                state.waiting.push_back((swap.clone(), sender));
                Some(reply)
            }
        }
    };
    match reply {
        Some(reply) => reply
            .await
            .unwrap_or_else(|_| Err(StoreError::interrupted())),
        None => {
            let _room = Room(calls);
            calls.swap_alone(swap).await
        }
    }
}
