//! Waiters that leave the queue: abandoned, silent, dead.

use lock_runtime::{
    Mode,
    store::{KeyRequest, PollReply, ReleaseReply, Store as _},
};
use lock_tests::{RedisServer, shared_server};

use super::{
    Client, HOUR, SECOND, beside, eventually, granted, in_a_minute, only_the_counter_is_left,
    queue_len, queue_name, silent,
};

#[tokio::test]
async fn abandon_leaves_no_gap_in_the_queue() {
    let server = shared_server().await;
    let client = Client::of(server).await;
    for given_up in [
        vec![0],
        vec![2],
        vec![4],
        vec![1, 3],
        vec![0, 1],
        vec![3, 4],
        vec![0, 1, 2, 3, 4],
        vec![4, 2, 0],
    ] {
        let holder = client.held(Mode::Exclusive).await;
        let waiters: [_; 5] = client.waiters(&holder.key, Mode::Exclusive).await;
        for index in &given_up {
            client.abandon(&waiters[*index]).await;
            assert_eq!(client.poll(&waiters[*index]).await, PollReply::Gone);
            client.abandon(&waiters[*index]).await;
        }
        assert_eq!(client.waiting(&holder).await.len(), 5 - given_up.len());
        client.release(&holder).await;
        for (index, waiter) in waiters.iter().enumerate() {
            if !given_up.contains(&index) {
                client.pushed(waiter).await;
                client.release(waiter).await;
            }
        }
        only_the_counter_is_left(server, &holder).await;
    }
}

// A writer may hold for months, while others come and go.
#[tokio::test]
async fn abandon_leaves_no_entry_while_a_writer_holds() {
    let server = shared_server().await;
    let client = Client::of(server).await;
    let holder = client.held(Mode::Exclusive).await;
    let mut steady = vec![client.waiter(&holder.key, Mode::Exclusive).await];
    let mut before = None;
    for number in 0..2000 {
        let passing = client.waiter(&holder.key, Mode::Exclusive).await;
        // Every third waiter leaves from the end of the queue, the others from its middle.
        if number % 3 == 0 {
            client.abandon(&passing).await;
            continue;
        }
        if let Some(before) = before.replace(passing) {
            client.abandon(&before).await;
        }
        if number % 100 == 1 {
            for waiter in &steady {
                assert!(client.is_queued(waiter).await);
            }
        }
        if number % 700 == 1 {
            steady.push(client.waiter(&holder.key, Mode::Exclusive).await);
        }
    }
    steady.extend(before);
    let ends: String = server.query(&["HGET", &queue_name(&holder), "ends"]).await;
    let ends: Vec<u64> = ends.split(' ').map(|end| end.parse().unwrap()).collect();
    assert!(
        ends[1] - ends[0] < 200 && ends[2] == steady.len() as u64,
        "{ends:?}"
    );
    // `ends`, two fields for each, and the time of those that came since it was closed up.
    let len = queue_len(server, &holder).await;
    assert!(
        (2 * steady.len()..=1 + 3 * steady.len()).contains(&len),
        "{len}"
    );
    assert_eq!(client.waiting(&holder).await.len(), steady.len());
    let mut holder = holder;
    for waiter in steady {
        client.release(&holder).await;
        client.pushed(&waiter).await;
        holder = waiter;
    }
    client.release(&holder).await;
    only_the_counter_is_left(server, &holder).await;
}

#[tokio::test]
async fn abandon_closes_up_a_long_queue_in_order() {
    let server = RedisServer::start().await;
    let client = Client::of(&server).await;
    let holder = client.held(Mode::Exclusive).await;
    let mut waiters = Vec::new();
    for _ in 0..1300 {
        waiters.push(client.waiter(&holder.key, Mode::Exclusive).await);
    }
    let forgotten = [waiters.remove(600), waiters.remove(1100)];
    for gone in &forgotten {
        silent(&server, gone, 11 * SECOND).await;
    }
    let mut kept = Vec::new();
    for (number, waiter) in waiters.into_iter().enumerate() {
        if number % 3 == 1 {
            kept.push(waiter);
        } else {
            client.abandon(&waiter).await;
        }
    }
    for waiter in &kept {
        assert!(client.is_queued(waiter).await);
    }
    // A server out of memory admits no request, and leaves the queue unchanged.
    let dump = async || {
        let dump = ["DUMP", &queue_name(&holder)];
        server.query::<Vec<u8>>(&dump).await
    };
    let before = dump().await;
    server.command(&["CONFIG", "SET", "maxmemory", "1"]).await;
    let newcomer =
        KeyRequest::new(beside(&holder.key, Mode::Exclusive), HOUR, in_a_minute()).queued();
    client.store.acquire(&newcomer).await.expect_err("no room");
    server.command(&["CONFIG", "SET", "maxmemory", "0"]).await;
    assert!(before == dump().await);

    kept.push(client.waiter(&holder.key, Mode::Exclusive).await);
    assert_eq!(queue_len(&server, &holder).await, 2 + 2 * kept.len());
    for gone in &forgotten {
        assert_eq!(client.poll(gone).await, PollReply::Gone);
    }
    let mut holder = holder;
    for (number, waiter) in kept.into_iter().enumerate() {
        if number % 2 == 0 {
            client.release(&holder).await;
            client.pushed(&waiter).await;
            holder = waiter;
        } else {
            client.abandon(&waiter).await;
        }
    }
    client.release(&holder).await;
    only_the_counter_is_left(&server, &holder).await;
}

// Rule 16.
#[tokio::test]
async fn release_passes_over_a_silent_waiter_until_it_polls() {
    let server = shared_server().await;
    let client = Client::of(server).await;
    let holder = client.held(Mode::Exclusive).await;
    let [first, second, third] = client.waiters(&holder.key, Mode::Exclusive).await;
    silent(server, &first, 4 * SECOND).await;
    client.release(&holder).await;
    client.pushed(&second).await;
    assert_eq!(client.waiting(&holder).await.len(), 2);
    assert!(client.is_queued(&first).await, "and it polls again");
    client.release(&second).await;
    client.pushed(&first).await;
    client.release(&first).await;
    client.pushed(&third).await;
}

// Rule 16.
#[tokio::test]
async fn release_removes_waiters_that_were_silent_for_long() {
    let server = shared_server().await;
    let client = Client::of(server).await;
    let holder = client.held(Mode::Exclusive).await;
    let [first, second, third] = client.waiters(&holder.key, Mode::Exclusive).await;
    for gone in [&first, &second] {
        silent(server, gone, 11 * SECOND).await;
    }
    assert_eq!(client.waiting(&holder).await.len(), 1);
    assert_eq!(
        client.poll(&second).await,
        PollReply::Gone,
        "it comes too late"
    );
    client.release(&holder).await;
    client.pushed(&third).await;
    client.release(&third).await;
    only_the_counter_is_left(server, &holder).await;
    assert_eq!(client.poll(&first).await, PollReply::Gone);

    // With no other waiter left, a newcomer need not wait.
    let holder = client.held(Mode::Exclusive).await;
    let waiter = client.waiter(&holder.key, Mode::Exclusive).await;
    silent(server, &waiter, 4 * SECOND).await;
    client.release(&holder).await;
    granted(&*client.store, &beside(&holder.key, Mode::Exclusive), HOUR).await;
    assert!(client.is_queued(&waiter).await);
}

// 15 of the failures seen elsewhere: the queue of dead waiters expires.
#[tokio::test]
async fn poll_extends_the_life_of_the_queue() {
    let server = shared_server().await;
    let client = Client::of(server).await;
    let holder = client.held(Mode::Exclusive).await;
    let waiter = client.waiter(&holder.key, Mode::Exclusive).await;
    let left = async || server.query::<i64>(&["PTTL", &queue_name(&holder)]).await;
    let expire_in = async |millis| {
        let expire = ["PEXPIRE", &queue_name(&holder), millis];
        server.command(&expire).await;
    };
    assert!((1..=10_000).contains(&left().await));
    expire_in("5000").await;
    assert!(client.is_queued(&waiter).await);
    assert!(left().await > 5_000, "a poll restarts its time");
    expire_in("1").await;
    eventually("it expires", async || left().await == -2).await;
    assert_eq!(client.poll(&waiter).await, PollReply::Gone);
    assert_eq!(client.release(&holder).await, ReleaseReply::Released);
}
