//! Hand-offs: operations that free a lock grant it to the waiters.

use lock_runtime::{
    Mode,
    store::{
        AcquireReply, Grant, Hold, KeyRequest, PollReply, Release, ReleaseReply, Store as _,
        StoreEvent, Token,
    },
};
use lock_tests::{RedisServer, shared_server};

use super::{
    Client, HOUR, LONG, MODES, SECOND, TWO_PERMITS, beside, conflicting, eventually, fresh_hold,
    in_a_minute, lock_name, only_the_counter_is_left, silent,
};

// Rules 3 and 4.
#[tokio::test]
async fn release_grants_the_waiter_a_short_lease_and_a_newer_fence() {
    let server = shared_server().await;
    let client = Client::of(server).await;
    for (lease, longest) in [(HOUR, 3 * SECOND), (SECOND / 2, SECOND / 2)] {
        for mode in MODES {
            let holder = client.held(mode).await;
            client.fill(&holder).await;
            let waiter = beside(&holder.key, conflicting(mode));
            let reply = client.queue_for(&waiter, lease).await;
            let AcquireReply::Queued {
                counter: Some(counter),
                holder_ttl: Some(left),
            } = reply
            else {
                panic!("{reply:?}")
            };
            assert!(left > HOUR - LONG && left <= HOUR, "{left:?}");
            client.release(&holder).await;
            let grant = client.pushed(&waiter).await;
            assert!(grant.fence > counter, "{mode:?}");
            assert_eq!((grant.ttl, grant.reserved), (longest, 0), "{mode:?}");
            let ttl: u64 = server.query(&["PTTL", &lock_name(&waiter)]).await;
            if mode != TWO_PERMITS {
                assert!(u128::from(ttl) <= longest.as_millis(), "{mode:?}: {ttl}");
            }
        }
    }
}

// Rule 19.
#[tokio::test]
async fn acquire_reserves_a_fence_block_for_one_writer() {
    let server = shared_server().await;
    let client = Client::of(server).await;
    let first = fresh_hold(Mode::Exclusive);
    let request = |hold: &Hold| {
        KeyRequest::new(hold.clone(), HOUR, in_a_minute())
            .queued()
            .reserved(32)
    };
    let reply = client.store.acquire(&request(&first)).await.unwrap();
    let AcquireReply::Granted(block) = reply else {
        panic!("{reply:?}")
    };
    assert_eq!(block.reserved, 32);
    let PollReply::Granted(again) = client.poll(&first).await else {
        panic!("it holds")
    };
    assert_eq!(
        (again.fence.number(), again.reserved),
        (block.fence.number() + 32, 0),
        "a repeated reply has the last token of the block"
    );
    let second = beside(&first.key, Mode::Exclusive);
    let reply = client.store.acquire(&request(&second)).await.unwrap();
    assert!(
        matches!(reply, AcquireReply::Queued { counter: Some(counter), .. } if counter == again.fence),
        "{reply:?}"
    );
    client.release(&first).await;
    let grant = client.pushed(&second).await;
    assert!(
        grant.fence > again.fence && grant.reserved == 32,
        "{grant:?}"
    );
    let next = Token::random();
    let ReleaseReply::Passed(passed) = client.release_to(&second, next).await else {
        panic!("the queue is empty")
    };
    assert!(
        passed.fence.number() > grant.fence.number() + 32 && passed.reserved == 3,
        "{passed:?}"
    );
    client
        .release(&Hold::new(first.key.clone(), Mode::Exclusive, next))
        .await;
    let reader = fresh_hold(Mode::Shared);
    let reply = client.store.acquire(&request(&reader)).await.unwrap();
    assert!(
        matches!(reply, AcquireReply::Granted(Grant { reserved: 0, .. })),
        "{reply:?}"
    );
}

#[tokio::test]
async fn release_hands_off_permits_one_by_one() {
    let server = shared_server().await;
    let client = Client::of(server).await;
    let first = client.held(TWO_PERMITS).await;
    let second = client.fill(&first).await;
    let [third, fourth] = client.waiters(&first.key, TWO_PERMITS).await;
    client.release(&second).await;
    client.pushed(&third).await;
    assert!(client.is_queued(&fourth).await);
    client.release(&first).await;
    client.pushed(&fourth).await;
    for hold in [third, fourth] {
        client.release(&hold).await;
    }
    only_the_counter_is_left(server, &first).await;
}

// Rule 15.
#[tokio::test]
async fn abandon_and_revoke_hand_off_the_lock() {
    let server = RedisServer::start().await;
    let client = Client::recording(&server.url(), true).await;
    for mode in MODES {
        let holder = client.held(mode).await;
        let also = client.fill(&holder).await;
        let [first, second] = client.waiters(&holder.key, conflicting(mode)).await;
        client.abandon(&holder).await;
        client.pushed(&first).await;
        client.revoke(&holder).await;
        let mut events = vec![client.event().await, client.event().await];
        if mode == TWO_PERMITS {
            events.push(client.event().await);
        }
        let lost = |token| {
            events
                .iter()
                .any(|event| matches!(event, StoreEvent::Revoked { token: lost } if *lost == token))
        };
        assert!(
            lost(first.token) && lost(also.token) == (mode == TWO_PERMITS),
            "{events:?}"
        );
        let next = |event: &StoreEvent| matches!(event, StoreEvent::Granted { hold, .. } if *hold == second);
        assert!(events.iter().any(next), "{events:?}");
    }
}

#[tokio::test]
async fn release_to_a_next_holder_serves_the_queue_first() {
    let server = shared_server().await;
    let client = Client::of(server).await;
    let holder = client.held(Mode::Exclusive).await;
    let waiter = client.waiter(&holder.key, Mode::Exclusive).await;
    let next = beside(&holder.key, Mode::Exclusive);
    for _ in 0..2 {
        let reply = client.release_to(&holder, next.token).await;
        let ReleaseReply::Queued {
            counter: Some(counter),
            holder_ttl: Some(left),
        } = reply
        else {
            panic!("{reply:?}")
        };
        assert!(left <= 3 * SECOND);
        let PollReply::Granted(grant) = client.poll(&waiter).await else {
            panic!("it is its turn")
        };
        assert_eq!(grant.fence, counter);
        assert_eq!(client.waiting(&holder).await.len(), 1);
    }
    client.pushed(&waiter).await;
    client.release(&waiter).await;
    let grant = client.pushed(&next).await;
    assert_eq!(grant.reserved, 3);
    // The reply to a repeated release has the grant, whatever led to it.
    let reply = client.release_to(&holder, next.token).await;
    assert!(
        matches!(reply, ReleaseReply::Passed(again) if again.fence.number() == grant.fence.number() + 3),
        "{reply:?}"
    );

    // No waiter is left, or only a silent one.
    let silent_one = client.waiter(&holder.key, Mode::Exclusive).await;
    silent(server, &silent_one, 4 * SECOND).await;
    let last = beside(&holder.key, Mode::Exclusive);
    for _ in 0..2 {
        let reply = client.release_to(&next, last.token).await;
        assert!(
            matches!(reply, ReleaseReply::Passed(grant) if grant.ttl > HOUR - LONG),
            "{reply:?}"
        );
    }
    assert!(client.is_queued(&silent_one).await);
    assert_eq!(
        client.release_to(&holder, Token::random()).await,
        ReleaseReply::NotHeld
    );
}

#[tokio::test]
async fn release_with_a_reservation_hands_off_when_it_ends() {
    let server = shared_server().await;
    let client = Client::of(server).await;
    let one_permit = Mode::Permits(1.try_into().unwrap());
    for mode in [Mode::Exclusive, Mode::Shared, one_permit] {
        let holder = client.held(mode).await;
        let wanted = conflicting(mode);
        // A silent waiter gets no notification.
        let gone = Client::of(server).await;
        let silent_one = gone.waiter(&holder.key, wanted).await;
        silent(server, &silent_one, 4 * SECOND).await;
        let waiter = client.waiter(&holder.key, wanted).await;
        let reserved = Release::new(holder.clone()).keep_for(Some(SECOND / 5));
        assert_eq!(
            client.store.release(&reserved).await.unwrap(),
            ReleaseReply::Released
        );
        // The first waiter is notified: it would not notice the reservation before its next poll.
        let events = client.events_so_far().await;
        let [StoreEvent::FreeIn { key, kind, ttl }] = &events[..] else {
            panic!("{events:?}")
        };
        assert_eq!((key, *kind), (&holder.key, mode.kind()));
        // The server counts whole milliseconds, of which one is added, and reads its clock twice.
        assert!(ttl.abs_diff(SECOND / 5) <= SECOND / 100, "{ttl:?}");
        assert!(gone.events_so_far().await.is_empty());
        eventually("it is free", async || client.is_held(&waiter).await).await;
    }
}
