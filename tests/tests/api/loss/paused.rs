//! A process that was paused for longer than its lease notices the loss at once, and its late
//! writes are refused, also if its machine slept meanwhile.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use lock_runtime::{LockClient, LockErrorKind, Loss};
use lock_tests::{
    RedisFencedResource, Worker,
    place::{LONG, Place, in_time},
    shared_server, unique,
};
use tokio::sync::oneshot;

use super::LEASE;

const WORKER: &str = env!("CARGO_BIN_EXE_lock-worker");

type Start = fn(&str, &[&str]) -> Worker;

/// Starts a worker that holds "a", stops it until another holder has written, and then lets it
/// write too.
async fn stop_and_overtake(
    start: Start,
    place: &Place,
    resource: &str,
    how: &[&str],
) -> (Worker, RedisFencedResource) {
    let url = shared_server().await.url();
    let store = match place {
        Place::Redis { url, .. }
        | Place::Postgres { url, .. }
        | Place::Etcd { url, .. }
        | Place::ZooKeeper { url, .. } => url,
        Place::Memory(_) | Place::Majority(_) => unreachable!("no store of several processes"),
    };
    let locks = place.client().await;
    let lease = LEASE.as_millis().to_string();
    let arguments = [
        "hold",
        "--url",
        &url,
        "--store",
        store,
        "--namespace",
        place.namespace(),
        "--resource",
        resource,
        "--lease-ms",
        &lease,
    ];
    let mut worker = start(WORKER, &[&arguments, how].concat());
    let fence: u64 = worker.line().await.unwrap().parse().unwrap();
    // The worker prints the line just before it waits, and is to be stopped while it waits.
    tokio::time::sleep(LEASE / 10).await;
    worker.stop();

    let resource = RedisFencedResource::open(&url, resource).await;
    let guard = locks.exclusive("a").wait(LONG).acquire().await.unwrap();
    assert!(guard.fence().number() > fence);
    resource.write(guard.fence(), 1).await.unwrap();
    guard.release().await.unwrap();

    worker.say("go on").await;
    worker.resume();
    (worker, resource)
}

async fn knows_at_once_and_its_late_write_is_refused(start: Start, place: Place) {
    let resource = unique("resource");
    let (mut worker, resource) = stop_and_overtake(start, &place, &resource, &[]).await;
    assert_eq!(
        worker.line().await.as_deref(),
        Some("lost=true written=false")
    );
    assert_eq!(worker.line().await.as_deref(), Some("lost_expired"));
    assert!(worker.finish().await.success());
    let report = resource.report().await;
    assert_eq!(
        (report.value, report.violations, report.lost_updates),
        (1, 1, 0),
        "{report}"
    );
}

async fn body_does_not_go_on(start: Start, place: Place) {
    let resource = unique("resource");
    let (mut worker, resource) = stop_and_overtake(start, &place, &resource, &["--run"]).await;
    assert_eq!(
        worker.line().await.as_deref(),
        Some("lost_expired"),
        "the body wrote"
    );
    assert!(worker.finish().await.success());
    assert_eq!(resource.report().await.violations, 0);
}

#[tokio::test]
async fn a_paused_process_knows_at_once_and_its_late_write_is_refused() {
    let place = Place::redis().await;
    in_time(knows_at_once_and_its_late_write_is_refused(
        Worker::spawn,
        place,
    ))
    .await;
}

#[tokio::test]
async fn a_body_does_not_go_on_after_a_pause() {
    let place = Place::redis().await;
    in_time(body_does_not_go_on(Worker::spawn, place)).await;
}

#[tokio::test]
async fn a_process_of_a_machine_that_slept_knows_at_once() {
    let place = Place::redis().await;
    in_time(knows_at_once_and_its_late_write_is_refused(
        Worker::on_a_laptop,
        place,
    ))
    .await;
}

#[tokio::test]
async fn a_body_does_not_go_on_when_the_machine_has_slept() {
    let place = Place::redis().await;
    in_time(body_does_not_go_on(Worker::on_a_laptop, place)).await;
}

mod on_postgres {
    use super::*;

    #[tokio::test]
    async fn a_process_of_a_machine_that_slept_knows_at_once() {
        let place = Place::postgres().await;
        in_time(knows_at_once_and_its_late_write_is_refused(
            Worker::on_a_laptop,
            place,
        ))
        .await;
    }
}

/// The same without a process: the wake-up of the body comes together with the end of the lease.
#[tokio::test]
async fn a_body_does_not_go_on_when_it_is_woken_too_late() {
    in_time(async {
        let locks = LockClient::in_memory();
        let (wake, woken) = oneshot::channel();
        let went_on = AtomicBool::new(false);
        let body = async |_| {
            woken.await.unwrap();
            went_on.store(true, Ordering::SeqCst);
        };
        let pause = async {
            // As in a pause of the whole process, nothing else runs on this thread.
            std::thread::sleep(Duration::from_millis(150));
            wake.send(()).unwrap();
        };
        let request = locks
            .exclusive("a")
            .lease(Duration::from_millis(100))
            .no_renew();
        let (result, ()) = tokio::join!(request.run(body), pause);
        assert_eq!(
            result.unwrap_err().kind(),
            LockErrorKind::Lost(Loss::Expired)
        );
        assert!(!went_on.load(Ordering::SeqCst));
    })
    .await;
}

/// The clock shows the loss before the background task has run: even then every method returns the
/// same error, and the lock is free.
#[tokio::test]
async fn a_loss_has_one_reason_whatever_notices_it() {
    in_time(async {
        let locks = LockClient::in_memory();
        let end = Duration::from_millis(100);
        for (request, loss) in [
            (locks.exclusive("a").lease(end).no_renew(), Loss::Expired),
            (locks.exclusive("a").max_hold(end), Loss::MaxHold),
        ] {
            let guard = request.acquire().await.unwrap();
            std::thread::sleep(end * 3 / 2);
            assert!(guard.is_lost());
            assert_eq!(guard.lost().await.kind(), LockErrorKind::Lost(loss));
            assert_eq!(
                guard.release().await.unwrap_err().kind(),
                LockErrorKind::Lost(loss)
            );
            locks
                .exclusive("a")
                .acquire()
                .await
                .unwrap()
                .release()
                .await
                .unwrap();
        }
    })
    .await;
}
