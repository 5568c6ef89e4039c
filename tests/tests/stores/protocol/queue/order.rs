//! The order in which waiters are granted a lock.

use lock_runtime::{
    Mode,
    store::{
        AcquireAllReply, AcquireReply, ConvertReply, KeyRequest, PollReply, ReleaseReply,
        RenewReply, Renewal, Store as _,
    },
};
use lock_tests::shared_server;

use super::{
    Client, HOUR, LONG, MODES, SECOND, TWO_PERMITS, acquire, beside, conflicting, fresh_hold,
    granted, in_a_minute, inspect, only_the_counter_is_left, silent,
};

#[tokio::test]
async fn acquire_is_granted_in_order_of_arrival() {
    let server = shared_server().await;
    let clients = [Client::of(server).await, Client::of(server).await];
    let mut holder = clients[0].held(Mode::Exclusive).await;
    let mut waiters = Vec::new();
    for number in 0..6 {
        waiters.push(
            clients[number % 2]
                .waiter(&holder.key, Mode::Exclusive)
                .await,
        );
    }
    assert_eq!(clients[0].waiting(&holder).await.len(), 6);
    let mut fence = None;
    for (number, waiter) in waiters.into_iter().enumerate() {
        assert_eq!(clients[0].release(&holder).await, ReleaseReply::Released);
        let grant = clients[number % 2].pushed(&waiter).await;
        assert!(Some(grant.fence) > fence);
        fence = Some(grant.fence);
        assert!(matches!(
            clients[0]
                .store
                .renew(&[Renewal::new(waiter.clone(), HOUR)])
                .await[0],
            Ok(RenewReply::Renewed { .. })
        ));
        holder = waiter;
    }
    clients[0].release(&holder).await;
    only_the_counter_is_left(server, &holder).await;
}

#[tokio::test]
async fn acquire_admits_readers_together_after_a_writer() {
    let server = shared_server().await;
    let client = Client::of(server).await;
    let writer = client.held(Mode::Exclusive).await;
    let [first, second] = client.waiters(&writer.key, Mode::Shared).await;
    let next_writer = client.waiter(&writer.key, Mode::Exclusive).await;
    let third = client.waiter(&writer.key, Mode::Shared).await;
    client.release(&writer).await;
    let fences = [
        client.pushed(&first).await.fence,
        client.pushed(&second).await.fence,
    ];
    assert!(fences[0] < fences[1]);
    assert_eq!(
        client.waiting(&writer).await,
        [Mode::Exclusive, Mode::Shared]
    );
    client.release(&first).await;
    assert!(client.is_queued(&next_writer).await && client.is_queued(&third).await);
    client.release(&second).await;
    client.pushed(&next_writer).await;
    assert!(client.is_queued(&third).await);
    client.release(&next_writer).await;
    client.pushed(&third).await;
    client.release(&third).await;
    only_the_counter_is_left(server, &third).await;
}

#[tokio::test]
async fn acquire_queues_a_reader_behind_a_waiting_writer() {
    let client = Client::of(shared_server().await).await;
    let reader = client.held(Mode::Shared).await;
    let writer = client.waiter(&reader.key, Mode::Exclusive).await;
    let late = client.waiter(&reader.key, Mode::Shared).await;
    let busy = acquire(&*client.store, &beside(&reader.key, Mode::Shared), HOUR).await;
    assert!(
        matches!(
            busy,
            AcquireReply::Busy {
                holder_ttl: Some(_),
                has_waiters: true
            }
        ),
        "{busy:?}"
    );
    client.release(&reader).await;
    client.pushed(&writer).await;
    client.release(&writer).await;
    client.pushed(&late).await;
}

#[tokio::test]
async fn downgrade_admits_the_readers_at_the_head_of_the_queue() {
    let client = Client::of(shared_server().await).await;
    let writer = client.held(Mode::Exclusive).await;
    let reader = client.waiter(&writer.key, Mode::Shared).await;
    let next_writer = client.waiter(&writer.key, Mode::Exclusive).await;
    let ConvertReply::Converted(converted) = client.store.convert(&writer).await.unwrap() else {
        panic!("it holds")
    };
    assert!(client.pushed(&reader).await.fence > converted.fence);
    assert!(client.is_queued(&next_writer).await);
}

// Rule 5.
#[tokio::test]
async fn acquire_repeated_keeps_its_queue_entry() {
    let client = Client::of(shared_server().await).await;
    for mode in [Mode::Exclusive, TWO_PERMITS] {
        let holder = client.held(mode).await;
        client.fill(&holder).await;
        let [first, second] = client.waiters(&holder.key, mode).await;
        let reply = client.queue(&first).await;
        assert!(matches!(reply, AcquireReply::Queued { .. }), "{reply:?}");
        assert_eq!(client.waiting(&holder).await.len(), 2);
        client.release(&holder).await;
        client.pushed(&first).await;
        let reply = client.queue(&first).await;
        assert!(
            matches!(reply, AcquireReply::Granted(grant) if grant.ttl <= 3 * SECOND),
            "{reply:?}"
        );
        assert!(client.is_queued(&second).await);
        client.release(&first).await;
        client.pushed(&second).await;
    }
}

// Rule 5.
#[tokio::test]
async fn poll_never_enqueues() {
    let server = shared_server().await;
    let client = Client::of(server).await;
    for mode in MODES {
        let hold = fresh_hold(mode);
        assert_eq!(client.poll(&hold).await, PollReply::Gone);
        assert_eq!(server.keys(&format!("*{}*", hold.key)).await, [""; 0]);
    }
    let holder = client.held(Mode::Exclusive).await;
    let waiter = client.waiter(&holder.key, Mode::Exclusive).await;
    assert_eq!(
        client.poll(&beside(&holder.key, Mode::Exclusive)).await,
        PollReply::Gone
    );
    assert_eq!(client.waiting(&holder).await.len(), 1);
    let PollReply::Queued {
        counter: Some(_),
        holder_ttl: Some(left),
    } = client.poll(&waiter).await
    else {
        panic!("it waits")
    };
    assert!(left > HOUR - LONG);
}

// Rules 15 and 16: a lease expiry admits the first waiter, and no newcomer.
#[tokio::test]
async fn acquire_after_a_lease_expiry_does_not_overtake_waiters() {
    let server = shared_server().await;
    let client = Client::of(server).await;
    for mode in MODES {
        let holder = fresh_hold(mode);
        granted(&*client.store, &holder, SECOND / 5).await;
        client.fill(&holder).await;
        let wanted = conflicting(mode);
        let [first, second] = client.waiters(&holder.key, wanted).await;
        client
            .expired(&holder, usize::from(mode == TWO_PERMITS))
            .await;
        // A request that is refused advances the queue, too.
        let busy = acquire(&*client.store, &beside(&holder.key, wanted), HOUR).await;
        assert!(matches!(busy, AcquireReply::Busy { .. }), "{busy:?}");
        client.pushed(&first).await;
        let all = [KeyRequest::new(
            beside(&holder.key, Mode::Exclusive),
            HOUR,
            in_a_minute(),
        )];
        if mode != TWO_PERMITS {
            let reply = client.store.acquire_all(&all).await.unwrap();
            let busy = matches!(
                reply,
                AcquireAllReply::Refused {
                    index: 0,
                    reply: AcquireReply::Busy { .. }
                }
            );
            assert!(busy, "{reply:?}");
        }
        assert!(client.is_queued(&second).await);
    }
}

// Rule 15: the poll of the first waiter finds its grant, and no notification follows. The poll of a
// later waiter advances the queue for the first.
#[tokio::test]
async fn poll_after_a_lease_expiry_advances_the_queue() {
    let client = Client::of(shared_server().await).await;
    let expired = async || {
        let holder = fresh_hold(Mode::Exclusive);
        granted(&*client.store, &holder, SECOND / 5).await;
        let waiters = client.waiters(&holder.key, Mode::Exclusive).await;
        client.expired(&holder, 0).await;
        waiters
    };
    let [first, second] = expired().await;
    let PollReply::Granted(grant) = client.poll(&first).await else {
        panic!("it is its turn")
    };
    assert!(grant.ttl <= 3 * SECOND);
    assert!(client.events_so_far().await.is_empty());
    client.abandon(&first).await;
    client.pushed(&second).await;

    let [first, second] = expired().await;
    assert!(client.is_queued(&second).await);
    client.pushed(&first).await;
}

#[tokio::test]
async fn inspect_lists_the_waiters_in_order() {
    let server = shared_server().await;
    let client = Client::of(server).await;
    let holder = client.held(Mode::Exclusive).await;
    let waiters = [
        client.waiter(&holder.key, Mode::Shared).await,
        client.waiter(&holder.key, Mode::Exclusive).await,
        client.waiter(&holder.key, Mode::Shared).await,
    ];
    silent(server, &waiters[1], 2 * SECOND).await;
    let seen = inspect(&*client.store, &holder).await;
    assert_eq!(seen.holders.len(), 1);
    let modes: Vec<_> = seen.waiters.iter().map(|waiter| waiter.mode).collect();
    assert_eq!(modes, [Mode::Shared, Mode::Exclusive, Mode::Shared]);
    assert!(seen.waiters.iter().all(|waiter| waiter.lease == HOUR));
    assert!(
        seen.waiters[1].silent >= 2 * SECOND && seen.waiters[2].silent < 2 * SECOND,
        "{seen:?}"
    );
}
