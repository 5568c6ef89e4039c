//! Guarantees of a majority, and the fate of votes that are not needed.

use std::time::Duration;

use futures_util::future::join_all;
use lock_runtime::{LockErrorKind, Loss, operator::Revocation};
use lock_tests::{
    Proxy, RedisServer, chain,
    place::{LONG, begun, eventually, in_time},
    proxy::DropReply,
    redis_server::ENDLESS_QUEUES,
    unique,
};
use tokio::time::{Instant, sleep, timeout};

use super::{LONGEST_LEASE, Servers};

const LEASE: Duration = LONGEST_LEASE;
/// Much shorter than the lease, with room for a busy machine.
const AT_ONCE: Duration = Duration::from_millis(400);

impl Servers {
    /// Waits until no running server has any part of a lock except its fence.
    async fn nothing_left(&self) {
        for server in self.all().iter().filter(|server| server.is_running()) {
            for pattern in [
                format!("{}:*", self.namespace),
                format!("{{{}:*}}:q", self.namespace),
            ] {
                let what = format!("no {pattern} is left on {}", server.port());
                eventually(&what, || async { server.keys(&pattern).await.is_empty() }).await;
            }
        }
    }
}

#[tokio::test]
async fn a_lock_outlives_two_servers_and_not_three() {
    let servers = Servers::start().await;
    let [a, b, c, ..] = servers.all();
    let locks = servers.client().await;
    let guard = locks.exclusive("a").lease(LEASE).acquire().await.unwrap();
    a.kill();
    b.stop();
    sleep(LEASE * 2).await;
    guard.verify().await.unwrap();
    let others = servers.client().await;
    assert!(
        others
            .exclusive("a")
            .lease(LEASE)
            .try_acquire()
            .await
            .unwrap()
            .is_none()
    );

    c.kill();
    let lost = timeout(LEASE + AT_ONCE, guard.lost())
        .await
        .expect("it notices by itself");
    assert_eq!(lost.kind(), LockErrorKind::Lost(Loss::Expired));
}

/// The servers lose the lock one after the other and take it up again: more of them than may be
/// down at a time.
#[tokio::test]
async fn a_lock_outlives_the_restart_of_every_server_in_turn() {
    let servers = Servers::start().await;
    let locks = servers.client().await;
    let guard = locks.exclusive("a").lease(LEASE).acquire().await.unwrap();
    let lock = format!("{}:a", servers.namespace);
    for server in &servers.all()[..3] {
        server.restart_empty().await;
        let votes = || async { server.keys(&lock).await.len() == 1 };
        eventually("it votes for the holder again", votes).await;
        guard.verify().await.unwrap();
    }
    guard.release().await.unwrap();
    servers.nothing_left().await;
}

/// Rule 30: three of five servers lose a lock, in one of three ways, and must not grant it to
/// another client before the holder's lease is over.
#[tokio::test]
async fn servers_that_forgot_a_lock_grant_it_to_no_other_client() {
    let servers = Servers::start().await;
    let (locks, others) = (servers.client().await, servers.client().await);
    let before = join_all(servers.all()[..3].iter().map(RedisServer::save_snapshot)).await;
    for way in ["empty", "with an old snapshot", "its data deleted"] {
        servers.vote().await;
        let guard = locks
            .exclusive("a")
            .lease(LEASE)
            .no_renew()
            .acquire()
            .await
            .unwrap();
        let forget = async |(server, before): (&RedisServer, _)| match way {
            "empty" => server.restart_empty().await,
            "its data deleted" => drop(server.command(&["FLUSHALL"]).await),
            _ => server.restart_from(before).await,
        };
        join_all(servers.all()[..3].iter().zip(&before).map(forget)).await;
        let mut asked = 0;
        while !guard.is_lost() {
            let request = others.exclusive("a").lease(LEASE).no_wait();
            let refused = request.acquire().await;
            assert!(refused.is_err() || guard.is_lost(), "{way}: two holders");
            asked += 1;
            sleep(Duration::from_millis(10)).await;
        }
        assert!(asked > 5, "{way}: asked {asked} times");
    }
}

#[tokio::test]
async fn the_error_of_too_few_servers_names_each() {
    let servers = Servers::start().await;
    let [a, b, c, d, ..] = servers.all();
    let locks = servers.client().await;
    a.kill();
    b.kill();
    c.stop();
    for wait in [Duration::ZERO, Duration::from_millis(300)] {
        let error = locks
            .exclusive("a")
            .lease(LEASE)
            .wait(wait)
            .acquire()
            .await
            .unwrap_err();
        assert_eq!(error.kind(), LockErrorKind::Unavailable, "{error}");
        let text = chain(&error);
        assert!(text.contains("3 of 5 servers are needed"), "{text}");
        for server in servers.all() {
            assert!(text.contains(&server.addr().to_string()), "{text}");
        }
        assert!(
            text.contains(&format!("{}: granted it", d.addr())),
            "{text}"
        );
    }
    c.resume();
    in_time(locks.exclusive("a").lease(LEASE).wait(LONG).acquire())
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
    servers.nothing_left().await;
}

/// The smallest majority is up, and another holder has one of the votes.
#[tokio::test]
async fn votes_that_others_have_are_contention() {
    let servers = Servers::start().await;
    let [a, b, c, ..] = servers.all();
    let locks = servers.client().await;
    a.kill();
    b.kill();
    let held = format!("{}:a", servers.namespace);
    c.command(&["SET", &held, "somebody", "PX", "600"]).await;
    let error = locks
        .exclusive("a")
        .lease(LEASE)
        .no_wait()
        .acquire()
        .await
        .unwrap_err();
    assert_eq!(error.kind(), LockErrorKind::Contended, "{error}");
    let error = locks
        .exclusive("a")
        .lease(LEASE)
        .wait(Duration::from_millis(200))
        .acquire()
        .await
        .unwrap_err();
    assert_eq!(error.kind(), LockErrorKind::WaitTimeout, "{error}");
    in_time(locks.exclusive("a").lease(LEASE).wait(LONG).acquire())
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
    servers.nothing_left().await;
}

/// The reply of each of the five servers is lost in turn, then those of all.
#[tokio::test]
async fn an_answer_that_is_lost_leaves_no_vote_behind() {
    // Rule 31.
    let servers = Servers::shared().await;
    let proxies = servers.proxies().await;
    let locks = servers.clients_through(&proxies, 1).await.remove(0);
    for silently in [false, true] {
        for index in 0..=proxies.len() {
            for proxy in proxies
                .iter()
                .enumerate()
                .filter(|(this, _)| index == 5 || index == *this)
                .map(|(_, one)| one)
            {
                let lost = DropReply::next().to("EVALSHA");
                proxy.drop_reply(if silently { lost.silently() } else { lost });
            }
            let request = || locks.exclusive("a").lease(LEASE);
            if let Ok(guard) = request().no_wait().acquire().await {
                guard.release().await.unwrap();
            }
            // Long before a vote that was left behind would expire.
            let since = Instant::now();
            join_all(proxies.iter().map(Proxy::let_through)).await;
            let guard = in_time(request().wait(LONG).acquire()).await.unwrap();
            assert!(since.elapsed() < LEASE, "{index}: {:?}", since.elapsed());
            guard.release().await.unwrap();
        }
    }
    servers.nothing_left().await;
}

#[tokio::test]
async fn a_request_that_is_dropped_leaves_no_vote_behind() {
    let servers = Servers::shared().await;
    let (locks, others) = (servers.client().await, servers.client().await);
    for round in 0..20 {
        let held = (round % 2 == 0).then(|| others.exclusive("a").lease(LEASE));
        let held = match held {
            Some(request) => Some(request.acquire().await.unwrap()),
            None => None,
        };
        let wait = Duration::from_micros(200 * round);
        let _ = timeout(wait, locks.exclusive("a").lease(LEASE).wait(LONG).acquire()).await;
        if let Some(guard) = held {
            guard.release().await.unwrap();
        }
        let next = others.exclusive("a").lease(LEASE).wait(LONG).acquire();
        in_time(next).await.unwrap().release().await.unwrap();
    }
    locks.shutdown().await;
    servers.nothing_left().await;
}

#[tokio::test]
async fn a_waiter_gets_messages() {
    let servers = Servers::shared().await;
    let (locks, others) = (servers.client().await, servers.client().await);
    for _ in 0..20 {
        let guard = locks.exclusive("a").lease(LEASE).acquire().await.unwrap();
        let mut waiting = begun(others.exclusive("a").lease(LEASE).wait(LONG).acquire()).await;
        let in_line = async {
            eventually("it is in line", || async {
                !locks.inspect("a").await.unwrap().waiters.is_empty()
            })
            .await;
        };
        tokio::select! {
            guard = &mut waiting => panic!("{guard:?}"),
            () = in_line => {}
        }
        let since = Instant::now();
        let (released, next) = tokio::join!(guard.release(), waiting);
        released.unwrap();
        assert!(since.elapsed() < AT_ONCE, "{:?}", since.elapsed());
        next.unwrap().release().await.unwrap();
    }
    servers.nothing_left().await;
}

#[tokio::test]
async fn a_dead_server_is_not_waited_for() {
    let servers = Servers::start().await;
    let locks = servers.client().await;
    for server in servers.all() {
        server.stop();
        let mut slow = 0;
        for number in 0..40 {
            let since = Instant::now();
            let guard = locks
                .exclusive(format!("{number}"))
                .lease(LEASE)
                .acquire()
                .await
                .unwrap();
            guard.release().await.unwrap();
            slow += usize::from(since.elapsed() > LEASE / 20);
        }
        // The first requests that find it silent.
        assert!(slow <= 4, "{slow} of 40");
        server.resume();
    }
}

#[tokio::test]
async fn what_a_majority_cannot_promise_is_refused() {
    let servers = Servers::shared().await;
    let locks = servers.client().await;
    let error = locks
        .permits("a", 2.try_into().unwrap())
        .lease(LEASE)
        .acquire()
        .await
        .unwrap_err();
    assert_eq!(error.kind(), LockErrorKind::InvalidSpec, "{error}");
    assert!(
        chain(&error).contains("use one server for permits"),
        "{error}"
    );
    let error = locks
        .exclusive("a")
        .lease(LEASE * 2)
        .acquire()
        .await
        .unwrap_err();
    assert_eq!(error.kind(), LockErrorKind::InvalidSpec, "{error}");
    assert!(chain(&error).contains("longest_lease"), "{error}");
    let guard = locks.exclusive("a").lease(LEASE).acquire().await.unwrap();
    assert_eq!(
        guard.extend(LEASE * 2).await.unwrap_err().kind(),
        LockErrorKind::InvalidSpec
    );
    guard.verify().await.unwrap();
    guard.release().await.unwrap();
}

#[tokio::test]
async fn a_lock_is_revoked_at_all_servers() {
    let servers = Servers::shared().await;
    let (locks, others) = (servers.client().await, servers.client().await);
    let guard = locks.exclusive("a").lease(LEASE).acquire().await.unwrap();
    let seen = others.inspect("a").await.unwrap();
    assert_eq!(seen.holders.len(), 1);
    assert!(seen.fence.unwrap() >= guard.fence());
    assert_eq!(others.revoke("a").await.unwrap(), Revocation::Revoked);
    let lost = timeout(AT_ONCE, guard.lost()).await.expect("it is lost");
    assert_eq!(lost.kind(), LockErrorKind::Lost(Loss::Revoked));
    assert_eq!(others.revoke("a").await.unwrap(), Revocation::NotHeld);
    others
        .exclusive("a")
        .lease(LEASE)
        .no_wait()
        .acquire()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
    servers.nothing_left().await;
}

#[tokio::test]
async fn a_client_that_is_shut_down_leaves_no_vote() {
    let servers = Servers::shared().await;
    for number in 0..10 {
        let locks = servers.client().await;
        drop(
            locks
                .exclusive(format!("{number}"))
                .lease(LEASE)
                .acquire()
                .await
                .unwrap(),
        );
        locks.shutdown().await;
        let locks = format!("{}:*", servers.namespace);
        let left = join_all(servers.all().iter().map(|server| server.keys(&locks)))
            .await
            .concat();
        assert_eq!(left, Vec::<String>::new());
    }
}

/// The scripts of a hand-off read the queues, too. See `protocol::queue::hostile`.
#[tokio::test]
async fn queues_without_an_end_stop_no_hand_off() {
    let servers = Servers::start().await;
    let [one, other] = [servers.client().await, servers.client().await];
    for ends in ENDLESS_QUEUES {
        let key = unique("k");
        let queue = format!("{{{}:{key}}}:q", servers.namespace);
        let held = one.exclusive(&key).acquire().await.unwrap();
        let waiting = begun(other.exclusive(&key).wait(LONG).acquire()).await;
        eventually("the request waits", async || {
            let queued =
                async |server: &RedisServer| server.query::<i64>(&["EXISTS", &queue]).await;
            join_all(servers.all().iter().map(queued))
                .await
                .contains(&1)
        })
        .await;
        for server in servers.all() {
            server.command(&["HSET", &queue, "ends", ends]).await;
        }
        held.release().await.unwrap();
        _ = one.exclusive(&key).try_acquire().await;
        drop(waiting);
        for server in servers.all() {
            assert_eq!(server.query::<String>(&["PING"]).await, "PONG", "{ends:?}");
        }
    }
}

/// The keeper connects while the runtime of a client is blocked, and finds a server without its
/// data. The connection of the client is older, and does not know of the quarantine.
#[tokio::test]
async fn a_server_whose_data_were_deleted_gives_no_vote_after_the_keeper_has_found_that() {
    in_time(async {
        // On a busy machine the keeper may be late.
        while !the_keeper_finds_a_server_without_data().await {}
    })
    .await;
}

/// Returns whether the keeper has connected in time.
async fn the_keeper_finds_a_server_without_data() -> bool {
    let servers = Servers::start().await;
    let a = &servers.all()[0];
    let connections = async || a.clients().await.len();
    let other = servers.clients_of_three(1).await.swap_remove(0);
    let proxies = servers.proxies().await;
    let holder = servers.client_of(proxies[..3].iter().map(Proxy::url)).await;
    let renewed = other.exclusive("b").lease(LEASE / 2).acquire();
    let renewed = renewed.await.unwrap();
    // The holder has the votes of two servers.
    proxies[2].black_hole();
    let guard = holder.exclusive("a").lease(LEASE).no_renew();
    let guard = guard.acquire().await.unwrap();

    let before = connections().await;
    a.command(&["FLUSHALL"]).await;
    std::thread::sleep(LEASE * 3 / 8);
    let is_early = connections().await > before;
    let is_early = is_early && !guard.is_lost();
    while !guard.is_lost() {
        let second = other.exclusive("a").lease(LEASE).no_wait().acquire().await;
        assert!(second.is_err() || guard.is_lost(), "two holders");
        sleep(Duration::from_millis(20)).await;
    }
    drop((guard, renewed));
    is_early
}
