//! Renewals and abandonments that share calls, and users without the commands that groups need.

use futures_util::future::join_all;
use lock_runtime::{
    LockKind, Mode,
    store::{
        AcquireReply, Hold, Instant, KeyPart, KeyRequest, Release, ReleaseReply, RenewReply,
        Renewal, Store as _, Token, redis::RedisStore,
    },
};

use super::{
    ALONE, Duration, GROUP, HOUR, acquire, fence_of, one_server, release, requests, scripts_run,
};

const LEASE: Duration = Duration::from_secs(7_200);

/// The number of renewals that share a round trip.
const BATCH: usize = 96;

async fn renew(store: &RedisStore, requests: &[KeyRequest], lease: Duration) -> Vec<RenewReply> {
    let renewal = |request: &KeyRequest| Renewal::new(request.hold.clone(), lease);
    let renewals: Vec<_> = requests.iter().map(renewal).collect();
    let replies = store.renew(&renewals).await;
    replies.into_iter().map(Result::unwrap).collect()
}

#[tokio::test]
async fn renewals_share_calls() {
    let (server, store) = one_server().await;
    let all: Vec<_> = ["a", "b", "c"].into_iter().flat_map(requests).collect();
    for granted in acquire(&store, &all).await {
        fence_of(&granted);
    }
    // The server knows the scripts from now on.
    renew(&store, &all, HOUR).await;
    scripts_run(&server).await;
    for reply in renew(&store, &all, LEASE).await {
        assert_eq!(reply, RenewReply::Renewed { ttl: LEASE });
    }
    let groups = BATCH.div_ceil(GROUP) + (all.len() - BATCH).div_ceil(GROUP);
    assert_eq!(scripts_run(&server).await, groups as u64);
    for request in &all {
        let name = store.name_of(&request.hold.key, LockKind::Lock, KeyPart::Lock);
        let ttl: i64 = server.query(&["PTTL", &name.unwrap()]).await;
        assert!(ttl > 7_100_000, "{ttl}");
    }
    // Shares have a script of their own.
    let share = Hold::new(all[0].hold.key.clone(), Mode::Shared, Token::random());
    let mut renewals: Vec<_> = all[..20]
        .iter()
        .enumerate()
        .map(|(number, request)| {
            let lease = if number % 2 == 0 { 2 * LEASE } else { HOUR };
            Renewal::new(request.hold.clone(), lease)
        })
        .collect();
    renewals.insert(7, Renewal::new(share, LEASE));
    store.renew(&renewals[7..8]).await[0].clone().unwrap();
    scripts_run(&server).await;
    let replies = store.renew(&renewals).await;
    assert_eq!(scripts_run(&server).await, 2);
    for (renewal, reply) in renewals.iter().zip(replies) {
        match (reply.unwrap(), renewal.lease) {
            (RenewReply::Gone, LEASE) => assert_eq!(renewal.hold.mode, Mode::Shared),
            // A renewal never shortens a lease.
            (RenewReply::Renewed { ttl }, HOUR) => assert!(ttl > LEASE / 2 && ttl <= LEASE),
            (RenewReply::Renewed { ttl }, lease) => assert_eq!(ttl, lease),
            other => panic!("{other:?}"),
        }
    }
}

/// A command that changes a held lock, with an empty argument for its key, and the reply to the
/// renewal.
type Spoilt = (&'static [&'static str], fn(RenewReply) -> bool);

const SPOILT: [Spoilt; 5] = [
    (&["DEL", ""], |reply| reply == RenewReply::Gone),
    (&["SET", "", "x", "PX", "600000"], |reply| {
        reply == RenewReply::Gone
    }),
    (&["PERSIST", ""], |reply| reply == RenewReply::Gone),
    (
        &["PEXPIRE", "", "36000000"],
        |reply| matches!(reply, RenewReply::Renewed { ttl } if ttl > 4 * LEASE),
    ),
    (&["LPUSH", "", "x"], |reply| reply == RenewReply::Gone),
];

#[tokio::test]
async fn a_lock_that_cannot_be_renewed_does_not_affect_its_group() {
    let (server, store) = one_server().await;
    for (kind, (command, expects)) in SPOILT.into_iter().enumerate() {
        for position in 0..GROUP {
            let mut requests = requests(&format!("{kind}:{position}"));
            requests.truncate(GROUP);
            acquire(&store, &requests).await;
            let key = &requests[position].hold.key;
            let name = store.name_of(key, LockKind::Lock, KeyPart::Lock).unwrap();
            if command[0] == "LPUSH" {
                server.command(&["DEL", &name]).await;
            }
            let words = command.iter();
            let words: Vec<_> = words
                .map(|word| if word.is_empty() { &name } else { *word })
                .collect();
            server.command(&words).await;
            let data: Option<Vec<u8>> = server.query(&["DUMP", &name]).await;
            let replies = renew(&store, &requests, LEASE).await;
            for (number, reply) in replies.into_iter().enumerate() {
                if number == position {
                    assert!(expects(reply), "{command:?} at {position}: {reply:?}");
                } else {
                    assert_eq!(reply, RenewReply::Renewed { ttl: LEASE });
                }
            }
            let now: Option<Vec<u8>> = server.query(&["DUMP", &name]).await;
            assert_eq!(now, data);
            server.command(&["FLUSHALL"]).await;
        }
    }
}

#[tokio::test]
async fn abandonments_share_a_call() {
    let (server, store) = one_server().await;
    // The server knows the script from now on.
    store.abandon(&requests("warm")[0].hold).await.unwrap();
    let requests = requests("k");
    acquire(&store, &requests[..ALONE + GROUP / 2]).await;
    let waited = &requests[ALONE + 3].hold;
    let waiter = Hold::new(waited.key.clone(), Mode::Exclusive, Token::random());
    let waits = KeyRequest::new(waiter.clone(), HOUR, Instant::now() + HOUR).queued();
    let queued = store.acquire(&waits).await;
    assert!(matches!(queued, Ok(AcquireReply::Queued { .. })));
    scripts_run(&server).await;
    // The other half holds nothing.
    let abandoned = requests.iter().map(|request| store.abandon(&request.hold));
    for abandoned in join_all(abandoned).await {
        abandoned.unwrap();
    }
    // The lock with a waiter takes a call of its own.
    assert_eq!(scripts_run(&server).await, ALONE as u64 + 2);
    assert_eq!(server.keys("lock:*").await.len(), 1);
    let released = store.release(&Release::new(waiter)).await;
    assert_eq!(released.unwrap(), ReleaseReply::Released);
    assert_eq!(server.keys("lock:*").await, [""; 0]);
}

/// Two requests of one group for the same lock: one is granted, and the other enters the queue that
/// its release then finds.
#[tokio::test]
async fn a_queue_appears_between_two_requests_of_a_group() {
    let (server, store) = one_server().await;
    for position in ALONE..ALONE + GROUP - 1 {
        let mut requests: Vec<_> = requests(&format!("k{position}"))
            .into_iter()
            .map(KeyRequest::queued)
            .collect();
        requests[position + 1].hold.key = requests[position].hold.key.clone();
        scripts_run(&server).await;
        let replies = acquire(&store, &requests).await;
        assert_eq!(scripts_run(&server).await, ALONE as u64 + 2);
        for (number, reply) in replies.iter().enumerate() {
            if number == position + 1 {
                assert!(
                    matches!(reply, Ok(AcquireReply::Queued { .. })),
                    "{reply:?}"
                );
            } else {
                fence_of(reply);
            }
        }
        // The release of the first grants the lock to the second, whose own release, in the same
        // group, came too early or finds it held.
        requests.remove(position + 1);
        for reply in release(&store, &requests).await {
            assert_eq!(reply.unwrap(), ReleaseReply::Released);
        }
        assert_eq!(server.keys(&format!("lock:k{position}:*")).await.len(), 1);
        server.command(&["FLUSHALL"]).await;
    }
}

/// The rights that versions before 0.2 documented lack the commands of groups.
#[tokio::test]
async fn a_user_without_the_commands_of_groups_is_served_alone() {
    let (server, _) = one_server().await;
    let rules = "ACL SETUSER app on >p ~* &* +@all -mget -exists";
    let rules: Vec<_> = rules.split(' ').collect();
    server.command(&rules).await;
    let store = RedisStore::connect(&server.url_as("app", "p"), "lock").await;
    let store = store.unwrap();
    let requests = requests("k");
    for _ in 0..3 {
        for granted in acquire(&store, &requests).await {
            fence_of(&granted);
        }
        for reply in renew(&store, &requests, LEASE).await {
            assert_eq!(reply, RenewReply::Renewed { ttl: LEASE });
        }
        for reply in release(&store, &requests).await {
            assert_eq!(reply.unwrap(), ReleaseReply::Released);
        }
    }
    for mode in [Mode::Shared, Mode::Permits(2.try_into().unwrap())] {
        let hold = Hold::new(requests[0].hold.key.clone(), mode, Token::random());
        let request = KeyRequest::new(hold.clone(), HOUR, Instant::now() + HOUR);
        fence_of(&store.acquire(&request).await);
        let released = store.release(&Release::new(hold)).await;
        assert_eq!(released.unwrap(), ReleaseReply::Released);
    }
    assert_eq!(server.keys("lock:*").await, [""; 0]);
}
