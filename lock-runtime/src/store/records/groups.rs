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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::{sleep, timeout};

    use super::{
        super::{Change, Message, Record, RecordName, Swapped, Timestamp, Version},
        *,
    };
    use crate::store::ClientId;

    const WAY: Duration = Duration::from_millis(10);

    /// A database whose calls take a while.
    struct Calls {
        group: Group,
        /// The number of swaps in each call.
        sizes: Mutex<Vec<usize>>,
    }

    impl Calls {
        fn new(room: usize) -> Arc<Self> {
            Arc::new(Self {
                group: Group::new(room),
                sizes: Mutex::default(),
            })
        }

        async fn call(&self, size: usize) -> Vec<Reply> {
            lock(&self.sizes).push(size);
            sleep(WAY).await;
            let reply = SwapReply::new(Timestamp::default(), Swapped::Done);
            (0..size).map(|_| Ok(reply.clone())).collect()
        }

        fn sizes(&self) -> Vec<usize> {
            take(&mut lock(&self.sizes))
        }

        fn room(&self) -> usize {
            lock(&self.group.0).room
        }
    }

    impl Grouping for Calls {
        fn group(&self) -> &Group {
            &self.group
        }

        async fn swap_alone(&self, _swap: &Swap) -> Reply {
            self.call(1).await.remove(0)
        }

        async fn swap_group(&self, swaps: &[Swap]) -> Vec<Reply> {
            self.call(swaps.len()).await
        }
    }

    /// A swap of as many records.
    fn of(records: usize) -> Swap {
        let change = |number: usize| {
            let record = Record::new(Version::random(), Vec::new());
            let name = RecordName::new(format!("k{number}"));
            Change::new(name, None, record, Timestamp::default())
        };
        let changes = (0..records).map(change).collect();
        Swap::new(changes, Timestamp::default())
    }

    /// Makes swaps at once. Returns their replies once all have ended.
    async fn swaps(calls: &Arc<Calls>, number: usize) -> Vec<Reply> {
        let swaps: Vec<_> = (0..number).map(|_| of(1)).collect();
        let all = join_all(swaps.iter().map(|it| swap(calls, it)));
        let replies = timeout(Duration::from_secs(60), all).await;
        replies.expect("no swap is forgotten")
    }

    #[tokio::test(start_paused = true)]
    async fn swaps_for_which_there_is_no_room_share_the_next_calls() {
        let calls = Calls::new(2);
        for _ in 0..2 {
            let replies = swaps(&calls, 2 + 40).await;
            assert!(replies.iter().all(Result::is_ok), "{replies:?}");
            assert_eq!(calls.sizes(), [1, 1, 32, 8]);
            // All calls have ended, and have given their room back.
            sleep(WAY * 2).await;
            assert_eq!(calls.room(), 2);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_swap_whose_caller_has_ended_is_not_made() {
        let calls = Calls::new(1);
        let one = of(1);
        let first = swap(&calls, &one);
        let given_up = timeout(WAY / 2, swap(&calls, &one));
        let waits = swap(&calls, &one);
        let (first, given_up, waits) = tokio::join!(first, given_up, waits);
        assert!(first.is_ok() && given_up.is_err() && waits.is_ok());
        assert_eq!(calls.sizes(), [1, 1]);
    }

    #[tokio::test(start_paused = true)]
    async fn only_swaps_of_one_record_without_messages_share_a_call() {
        let mut with_message = of(1);
        with_message.messages = vec![Message::new(ClientId::random(), Vec::new())];
        for (swap, fits_in) in [
            (of(1), true),
            (of(2), false),
            (with_message.clone(), false),
            (of(0), false),
        ] {
            assert_eq!(fits(&swap), fits_in, "{swap:?}");
        }
        let calls = Calls::new(1);
        let (one, two) = (of(1), of(2));
        let all = [&one, &two, &with_message, &two];
        join_all(all.map(|it| swap(&calls, it))).await;
        assert_eq!(calls.sizes(), [1, 1, 1, 1]);
    }

    /// Nothing else would answer them.
    #[test]
    fn the_swaps_that_wait_fail_with_the_runtime_of_their_call() {
        let calls = Calls::new(0);
        let (sender, mut reply) = oneshot::channel();
        lock(&calls.group.0).waiting.push_back((of(1), sender));
        // Outside of a runtime.
        drop(Room(&calls));
        assert!(matches!(
            reply.try_recv(),
            Err(oneshot::error::TryRecvError::Closed)
        ));
        assert_eq!(calls.room(), 1);
    }
}
