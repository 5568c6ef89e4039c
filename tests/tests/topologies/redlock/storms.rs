//! Storms over five servers. Redlock promises more than one server does: no two holders at a time,
//! even if one or two servers fail.

use std::time::Duration;

use futures_util::future::join_all;
use lock_runtime::LockClient;
use lock_tests::{Proxy, RedisServer, proxy::Direction};
use tokio::time::sleep;

use super::{QUARANTINE, Servers};
use crate::topologies::storm::{Faults, Report, Storm};

const LEASE: Duration = Duration::from_secs(1);
/// Service is back when a lease has expired and the waiters have noticed it.
const BACK: Duration = Duration::from_secs(2);

/// Eight processes with four tasks each.
async fn storm(servers: &Servers, faults: impl AsyncFn(&Faults)) -> Report {
    let clients = servers.clients(8).await;
    let report = Storm::of(clients).lease(LEASE).run(faults).await;
    report.assert_fenced();
    report.assert_exclusive();
    report.assert_service_within(LEASE + BACK);
    report
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_servers_that_are_killed_are_not_missed() {
    let servers = Servers::start().await;
    let [a, b, ..] = servers.all();
    storm(&servers, async |faults| {
        sleep(LEASE).await;
        faults.begin("one is killed");
        a.kill();
        sleep(LEASE * 3 / 2).await;
        faults.begin("two are killed");
        b.kill();
        sleep(LEASE * 2).await;
        a.restart_empty().await;
        b.restart_empty().await;
        faults.begin("they are back");
        sleep(QUARANTINE).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_servers_that_stop_are_not_waited_for() {
    let servers = Servers::start().await;
    let [a, b, ..] = servers.all();
    storm(&servers, async |faults| {
        for pair in [[a, b], [b, a]] {
            sleep(LEASE).await;
            faults.begin("two stop");
            pair.iter().for_each(|server| server.stop());
            sleep(LEASE * 3 / 2).await;
            faults.begin("they go on");
            pair.iter().for_each(|server| server.resume());
        }
        sleep(LEASE).await;
    })
    .await;
}

/// Without the quarantine, a client that gets the votes of the two servers that have lost the lock
/// and of one more would be a second holder.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn servers_that_forget_everything_in_turn_give_no_lock_to_two() {
    let servers = Servers::start().await;
    storm(&servers, async |faults| {
        for pair in servers.all().chunks_exact(2) {
            sleep(LEASE / 2).await;
            faults.begin("two come back empty");
            join_all(pair.iter().map(RedisServer::restart_empty)).await;
            sleep(QUARANTINE).await;
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acquire_excludes_after_restarts_with_old_snapshots() {
    let servers = Servers::start().await;
    storm(&servers, async |faults| {
        for pair in servers.all().chunks_exact(2) {
            let snapshots = join_all(pair.iter().map(RedisServer::save_snapshot)).await;
            sleep(LEASE).await;
            faults.begin("two come back with what they had before");
            join_all(
                pair.iter()
                    .zip(&snapshots)
                    .map(|(server, snapshot)| server.restart_from(snapshot)),
            )
            .await;
            sleep(QUARANTINE).await;
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_whose_data_are_deleted_gives_no_lock_to_two() {
    let servers = Servers::start().await;
    storm(&servers, async |faults| {
        // More than may be down at a time.
        for server in &servers.all()[..3] {
            faults.begin("the data of one are deleted");
            server.command(&["FLUSHALL"]).await;
            sleep(QUARANTINE).await;
        }
    })
    .await;
}

/// Half of the clients lose two servers, and the other half two others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_see_different_servers_never_meet() {
    let servers = Servers::shared().await;
    let sides = [servers.proxies().await, servers.proxies().await];
    let mut clients = Vec::new();
    for proxies in &sides {
        clients.extend(servers.clients_through(proxies, 4).await);
    }
    let report = Storm::of(clients).lease(LEASE).run(async |faults| {
        let cut_off = [&sides[0][..2], &sides[1][3..]];
        sleep(LEASE).await;
        faults.begin("each half loses two servers");
        for proxy in cut_off.into_iter().flatten() {
            proxy.black_hole();
        }
        sleep(LEASE * 2).await;
        faults.begin("they see all again");
        join_all(cut_off.into_iter().flatten().map(Proxy::let_through)).await;
        sleep(LEASE).await;
    });
    let report = report.await;
    report.assert_fenced();
    report.assert_exclusive();
    report.assert_service_within(LEASE + BACK);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_servers_do_not_slow_the_others_down() {
    let servers = Servers::shared().await;
    let proxies = servers.proxies().await;
    let clients = servers.clients_through(&proxies, 8).await;
    let report = Storm::of(clients).lease(LEASE).run(async |faults| {
        sleep(LEASE).await;
        for pair in [[0, 1], [3, 4]] {
            faults.begin("two are slow");
            for index in pair {
                proxies[index].delay(Direction::ToClient, Duration::from_millis(300));
            }
            sleep(LEASE * 3 / 2).await;
            for index in pair {
                proxies[index].delay(Direction::ToClient, Duration::ZERO);
            }
        }
    });
    let report = report.await;
    report.assert_fenced();
    report.assert_exclusive();
    report.assert_service_within(LEASE + BACK);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_that_break_give_no_lock_to_two() {
    let servers = Servers::shared().await;
    let proxies = servers.proxies().await;
    let clients: Vec<LockClient> = servers.clients_through(&proxies, 8).await;
    let report = Storm::of(clients)
        .with_readers()
        .lease(LEASE)
        .run(async |faults| {
            // On a busy machine the next connections break before the last ones are replaced, and
            // then there is no majority.
            faults.outage("connections break, and replies are lost");
            for round in 0..40 {
                let proxy = &proxies[round % proxies.len()];
                if round % 3 == 0 {
                    proxy.cut();
                } else {
                    proxy.drop_next_reply();
                }
                sleep(Duration::from_millis(rand::random_range(0..200))).await;
            }
            faults.begin("they hold again");
            sleep(LEASE).await;
        });
    let report = report.await;
    report.assert_fenced();
    report.assert_exclusive();
    report.assert_service_within(LEASE + BACK);
}
