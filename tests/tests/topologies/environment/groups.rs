//! Group commit: requests that share a call of a script, each with an outcome of its own.

mod faults;
mod renewals;
mod results;

use futures_util::future::join_all;
use lock_runtime::{
    FencingToken, LockClient, LockErrorKind, LockKey, LockKind, Mode, RedisOptions,
    store::{
        AcquireReply, Hold, Instant, KeyPart, KeyRequest, Release, ReleaseReply, Store as _,
        StoreError, StoreErrorKind, Token, redis::RedisStore,
    },
};
use lock_tests::{RedisServer, place::redlock_url};

use super::{Duration, HOUR};

/// The number of calls in flight before others are sent in groups.
const ALONE: usize = 4;
/// The size of a group.
const GROUP: usize = 32;

type Granted = Result<AcquireReply, StoreError>;

/// The requests of the first calls and of one group.
fn requests(round: &str) -> Vec<KeyRequest> {
    let request = |number| {
        let key = LockKey::new(format!("{round}:{number}")).unwrap();
        let hold = Hold::new(key, Mode::Exclusive, Token::random());
        KeyRequest::new(hold, HOUR, Instant::now() + HOUR)
    };
    (0..ALONE + GROUP).map(request).collect()
}

async fn acquire(store: &RedisStore, requests: &[KeyRequest]) -> Vec<Granted> {
    join_all(requests.iter().map(|request| store.acquire(request))).await
}

async fn release(
    store: &RedisStore,
    requests: &[KeyRequest],
) -> Vec<Result<ReleaseReply, StoreError>> {
    let release = |request: &KeyRequest| Release::new(request.hold.clone());
    let releases: Vec<_> = requests.iter().map(release).collect();
    join_all(releases.iter().map(|release| store.release(release))).await
}

fn fence_of(granted: &Granted) -> FencingToken {
    match granted {
        Ok(AcquireReply::Granted(grant)) => grant.fence,
        refused => panic!("{refused:?}"),
    }
}

/// Returns the number of scripts that the server has run since the last call.
async fn scripts_run(server: &RedisServer) -> u64 {
    let stats: String = server.query(&["INFO", "commandstats"]).await;
    server.command(&["CONFIG", "RESETSTAT"]).await;
    let of = |line: &str| {
        let counts = line
            .strip_prefix("cmdstat_evalsha:calls=")
            .or_else(|| line.strip_prefix("cmdstat_eval:calls="))?;
        counts.split(',').next()?.parse::<u64>().ok()
    };
    stats.lines().filter_map(of).sum()
}

async fn one_server() -> (RedisServer, RedisStore) {
    let server = RedisServer::start().await;
    let store = RedisStore::connect(&server.url(), "lock").await.unwrap();
    // The server knows the scripts from now on.
    let warm = requests("warm");
    acquire(&store, &warm).await.iter().for_each(|it| {
        fence_of(it);
    });
    for reply in release(&store, &warm).await {
        assert_eq!(reply.unwrap(), ReleaseReply::Released);
    }
    scripts_run(&server).await;
    (server, store)
}

#[tokio::test]
async fn requests_that_come_together_share_a_call() {
    let (server, store) = one_server().await;
    let requests = requests("k");
    for granted in acquire(&store, &requests).await {
        fence_of(&granted);
    }
    assert_eq!(scripts_run(&server).await, ALONE as u64 + 1);
    for granted in acquire(&store, &requests).await {
        fence_of(&granted);
    }
    // Each lock is held already, by its own request, which the full script confirms.
    assert_eq!(scripts_run(&server).await, (ALONE + 1 + GROUP) as u64);
    for reply in release(&store, &requests).await {
        assert_eq!(reply.unwrap(), ReleaseReply::Released);
    }
    assert_eq!(scripts_run(&server).await, ALONE as u64 + 1);
}

/// A command that keeps a lock from being granted, with an empty argument for the name of the key,
/// and the reply to its request.
type Spoilt = (KeyPart, &'static [&'static str], fn(&Granted) -> bool);

const SPOILT: [Spoilt; 6] = [
    (KeyPart::Lock, &["SET", "", "x", "PX", "600000"], |reply| {
        matches!(reply, Ok(AcquireReply::Busy { .. }))
    }),
    (KeyPart::Lock, &["SADD", "", "x"], |reply| {
        matches!(reply, Ok(AcquireReply::ForeignKey(KeyPart::Lock)))
    }),
    (KeyPart::Fence, &["SET", "", "x"], |reply| {
        matches!(reply, Ok(AcquireReply::ForeignKey(KeyPart::Fence)))
    }),
    (KeyPart::Fence, &["RPUSH", "", "x"], |reply| {
        matches!(reply, Ok(AcquireReply::ForeignKey(KeyPart::Fence)))
    }),
    (KeyPart::Fence, &["SET", "", "9007199254740992"], |reply| {
        matches!(reply, Ok(AcquireReply::ForeignKey(KeyPart::Fence)))
    }),
    (KeyPart::Queue, &["SET", "", "x"], |reply| {
        matches!(reply, Ok(AcquireReply::ForeignKey(KeyPart::Queue)))
    }),
];

#[tokio::test]
async fn a_lock_that_cannot_be_granted_does_not_affect_its_group() {
    let (server, store) = one_server().await;
    for (kind, (part, command, expects)) in SPOILT.into_iter().enumerate() {
        for position in ALONE..ALONE + GROUP {
            let requests = requests(&format!("{kind}:{position}"));
            let key = &requests[position].hold.key;
            let name = store.name_of(key, LockKind::Lock, part).unwrap();
            let command: Vec<_> = command
                .iter()
                .map(|word| if word.is_empty() { &name } else { *word })
                .collect();
            server.command(&command).await;
            let data: Vec<u8> = server.query(&["DUMP", &name]).await;
            scripts_run(&server).await;
            let replies = acquire(&store, &requests).await;
            assert_eq!(scripts_run(&server).await, ALONE as u64 + 2);
            for (number, reply) in replies.iter().enumerate() {
                if number == position {
                    assert!(expects(reply), "{command:?} at {position}: {reply:?}");
                } else {
                    fence_of(reply);
                }
            }
            assert_eq!(server.query::<Vec<u8>>(&["DUMP", &name]).await, data);
            for (number, reply) in release(&store, &requests).await.into_iter().enumerate() {
                let is_held = number != position;
                assert_eq!(
                    reply.unwrap() == ReleaseReply::Released,
                    is_held,
                    "{number}"
                );
            }
        }
    }
}

#[tokio::test]
async fn a_lock_with_waiters_is_released_by_its_own_call() {
    let (server, store) = one_server().await;
    for position in ALONE..ALONE + GROUP {
        let requests = requests(&format!("k{position}"));
        acquire(&store, &requests).await;
        let hold = &requests[position].hold;
        let waiter = Hold::new(hold.key.clone(), Mode::Exclusive, Token::random());
        let waits = KeyRequest::new(waiter.clone(), HOUR, Instant::now() + HOUR).queued();
        let queued = store.acquire(&waits).await;
        assert!(matches!(queued, Ok(AcquireReply::Queued { .. })));
        scripts_run(&server).await;
        for reply in release(&store, &requests).await {
            assert_eq!(reply.unwrap(), ReleaseReply::Released);
        }
        assert_eq!(scripts_run(&server).await, ALONE as u64 + 2);
        let seen = store.inspect(&hold.key, LockKind::Lock).await.unwrap();
        assert_eq!((seen.holders.len(), seen.waiters.len()), (1, 0));
        let released = store.release(&Release::new(waiter)).await;
        assert_eq!(released.unwrap(), ReleaseReply::Released);
    }
}

#[tokio::test]
async fn a_request_after_its_deadline_is_late_in_a_group_too() {
    let (server, store) = one_server().await;
    let mut requests = requests("k");
    let late = ALONE + 7;
    requests[late].deadline = Instant::now() - Duration::from_secs(5);
    for (number, reply) in acquire(&store, &requests).await.iter().enumerate() {
        if number == late {
            assert!(matches!(reply, Ok(AcquireReply::Late)), "{reply:?}");
        } else {
            fence_of(reply);
        }
    }
    // The late request is sent again, alone, and once more as the server's clock might have jumped.
    assert!(scripts_run(&server).await <= ALONE as u64 + 3);
}

#[tokio::test]
async fn a_server_that_forgot_the_scripts_executes_a_group() {
    let (server, store) = one_server().await;
    for _ in 0..3 {
        server.command(&["SCRIPT", "FLUSH"]).await;
        let requests = requests("k");
        for granted in acquire(&store, &requests).await {
            fence_of(&granted);
        }
        server.command(&["SCRIPT", "FLUSH"]).await;
        for reply in release(&store, &requests).await {
            assert_eq!(reply.unwrap(), ReleaseReply::Released);
        }
    }
}

#[tokio::test]
async fn a_group_without_memory_is_refused_and_can_be_released() {
    let (server, store) = one_server().await;
    let held = requests("held");
    acquire(&store, &held).await;
    server.command(&["CONFIG", "SET", "maxmemory", "1"]).await;
    let requests = requests("k");
    for reply in acquire(&store, &requests).await {
        let error = reply.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error}");
    }
    for reply in release(&store, &held).await {
        assert_eq!(reply.unwrap(), ReleaseReply::Released);
    }
    server.command(&["CONFIG", "SET", "maxmemory", "0"]).await;
    assert_eq!(server.keys("lock:k*").await, [""; 0]);
    for reply in acquire(&store, &requests).await {
        fence_of(&reply);
    }
}

#[tokio::test]
async fn a_key_that_the_user_may_not_access_does_not_affect_its_group() {
    let (server, _) = one_server().await;
    let rules = [
        "ACL",
        "SETUSER",
        "app",
        "on",
        ">p",
        "+@all",
        "&*",
        "~lock:k:*",
        "~{lock:k:*",
    ];
    server.command(&rules).await;
    let url = server.url_as("app", "p");
    let store = RedisStore::connect(&url, "lock").await.unwrap();
    let mut requests = requests("k");
    let forbidden = ALONE + 3;
    requests[forbidden].hold.key = LockKey::new("other").unwrap();
    for (number, reply) in acquire(&store, &requests).await.into_iter().enumerate() {
        if number == forbidden {
            let error = reply.unwrap_err();
            assert_eq!(error.kind(), StoreErrorKind::Forbidden, "{error}");
        } else {
            fence_of(&reply);
        }
    }
}

/// A server that votes executes groups with the marker of its data and with proposed tokens.
#[tokio::test]
async fn servers_of_a_majority_execute_groups() {
    let longest_lease = Duration::from_secs(1);
    let servers = RedisServer::builder().start_all(3).await;
    let options = RedisOptions::new().longest_lease(longest_lease);
    let urls: Vec<_> = servers.iter().map(RedisServer::url).collect();
    let builder = LockClient::builder().redis(options);
    let locks = builder.connect(&redlock_url(&urls)).await.unwrap();
    let acquire = async |key: String| {
        let request = locks.exclusive(key).lease(longest_lease);
        let guard = request.wait(Duration::from_secs(30)).acquire().await;
        let guard = guard.unwrap();
        (guard.fence(), guard)
    };
    // Until the new servers vote.
    acquire("first".into()).await.1.release().await.unwrap();
    for server in &servers {
        scripts_run(server).await;
    }
    let mut latest = vec![None; ALONE + GROUP];
    for round in 0..5 {
        let held = join_all((0..latest.len()).map(|number| acquire(format!("k{number}")))).await;
        for ((fence, _), latest) in held.iter().zip(&mut latest) {
            assert!(latest.replace(*fence) < Some(*fence), "{round}");
        }
        for released in join_all(held.into_iter().map(|(_, guard)| guard.release())).await {
            released.unwrap();
        }
    }
    for server in &servers {
        let calls = scripts_run(server).await;
        // 360 in calls of their own.
        assert!(calls < 250, "{calls}");
    }
    // A server without its data is noticed in a group too.
    servers[0].command(&["FLUSHALL"]).await;
    servers[1].command(&["FLUSHALL"]).await;
    let request = |number| locks.exclusive(format!("k{number}")).lease(longest_lease);
    let refused = (0..GROUP).map(|number| request(number).no_wait().acquire());
    for refused in join_all(refused).await {
        assert_eq!(refused.unwrap_err().kind(), LockErrorKind::Unavailable);
    }
    locks.shutdown().await;
}
