//! Operations for an operator: inspection and revocation of a lock.

mod listing;
mod named;
mod seen;

use std::time::Duration;

use lock_runtime::{LockErrorKind, Loss, Mode, operator::Revocation};
use lock_tests::{
    place::{LONG, Place, begun, in_time, on_every_store},
    shared_server,
};

on_every_store! {
    inspect_shows_the_holder_and_the_time_since_its_grant,
    a_revoked_holder_in_this_process_learns_it_at_once,
    a_revoked_holder_elsewhere_finds_out_by_its_next_renewal,
    a_revoked_lock_goes_to_its_waiter,
    ; with permits:
    revoked_permits_are_taken_from_all,
}

async fn inspect_shows_the_holder_and_the_time_since_its_grant(place: Place) {
    let (locks, others) = (place.client().await, place.client().await);
    assert!(locks.inspect("a").await.unwrap().holders.is_empty());
    let guard = locks
        .exclusive("a")
        .lease(Duration::from_secs(20))
        .acquire()
        .await
        .unwrap();
    let seen = others.inspect("a").await.unwrap();
    assert_eq!(seen.fence, Some(guard.fence()));
    assert_eq!(seen.holders.len(), 1);
    assert_eq!(seen.holders[0].mode, Mode::Exclusive);
    let ttl = seen.holders[0].ttl.unwrap();
    assert!(
        ttl > Duration::from_secs(5) && ttl <= Duration::from_secs(20) + place.unsure(),
        "{ttl:?}"
    );
    guard.release().await.unwrap();
    assert!(others.inspect("a").await.unwrap().holders.is_empty());

    let short = locks
        .shared("a")
        .lease(Duration::from_secs(10))
        .acquire()
        .await
        .unwrap();
    let long = others
        .shared("a")
        .lease(Duration::from_secs(20))
        .acquire()
        .await
        .unwrap();
    let ttls: Vec<_> = locks
        .inspect("a")
        .await
        .unwrap()
        .holders
        .iter()
        .map(|holder| holder.ttl.unwrap())
        .collect();
    assert!(ttls.len() == 2 && ttls[0] < ttls[1], "{ttls:?}");
    short.release().await.unwrap();
    long.release().await.unwrap();
}

async fn a_revoked_holder_in_this_process_learns_it_at_once(place: Place) {
    let locks = place.client().await;
    let guard = locks.exclusive("a").acquire().await.unwrap();
    assert_eq!(locks.revoke("a").await.unwrap(), Revocation::Revoked);
    assert_eq!(
        guard.lost().await.kind(),
        LockErrorKind::Lost(Loss::Revoked)
    );
    assert_eq!(locks.revoke("a").await.unwrap(), Revocation::NotHeld);
    assert_eq!(
        guard.release().await.unwrap_err().kind(),
        LockErrorKind::Lost(Loss::Revoked)
    );
}

async fn a_revoked_holder_elsewhere_finds_out_by_its_next_renewal(place: Place) {
    let (locks, others) = (place.client().await, place.client().await);
    let guard = locks
        .exclusive("a")
        .lease(Duration::from_secs(2))
        .acquire()
        .await
        .unwrap();
    assert_eq!(others.revoke("a").await.unwrap(), Revocation::Revoked);
    let next = others
        .exclusive("a")
        .try_acquire()
        .await
        .unwrap()
        .expect("it is free at once");
    assert!(matches!(guard.lost().await.kind(), LockErrorKind::Lost(_)));
    guard.release().await.unwrap_err();
    next.verify().await.unwrap();
    next.release().await.unwrap();
}

async fn a_revoked_lock_goes_to_its_waiter(place: Place) {
    let locks = place.client().await;
    let guard = locks.exclusive("a").acquire().await.unwrap();
    let waiting = begun(locks.exclusive("a").wait(LONG).acquire()).await;
    locks.revoke("a").await.unwrap();
    let next = waiting.await.unwrap();
    assert!(next.fence() > guard.fence());
    next.release().await.unwrap();
}

async fn revoked_permits_are_taken_from_all(place: Place) {
    let (locks, others) = (place.client().await, place.client().await);
    let most = 12.try_into().unwrap();
    let lock = locks.exclusive("a").acquire().await.unwrap();
    let mut permits = Vec::new();
    for _ in 0..12 {
        let request = locks.permits("a", most).lease(Duration::from_secs(1));
        permits.push(request.acquire().await.unwrap());
    }
    assert_eq!(
        others.revoke("a").permits().await.unwrap(),
        Revocation::Revoked
    );
    for permit in permits {
        assert_eq!(
            permit.lost().await.kind(),
            LockErrorKind::Lost(Loss::Revoked)
        );
    }
    lock.verify().await.unwrap();
    lock.release().await.unwrap();
}

/// A lock that was set by hand, without an expiry, may be permanent on purpose.
#[tokio::test]
async fn a_lock_without_an_end_is_revoked_only_if_that_is_said() {
    in_time(async {
        let (server, place) = (shared_server().await, Place::redis().await);
        let locks = place.client().await;
        let name = format!("{}:a", place.namespace());
        server.command(&["SET", &name, "by hand"]).await;
        assert_eq!(locks.inspect("a").await.unwrap().holders[0].ttl, None);
        assert_eq!(
            locks
                .exclusive("a")
                .no_wait()
                .acquire()
                .await
                .unwrap_err()
                .free_in(),
            None
        );
        assert_eq!(locks.revoke("a").await.unwrap(), Revocation::Endless);
        assert_eq!(server.query::<String>(&["GET", &name]).await, "by hand");
        assert_eq!(
            locks.revoke("a").also_endless().await.unwrap(),
            Revocation::Revoked
        );
        locks
            .exclusive("a")
            .try_acquire()
            .await
            .unwrap()
            .unwrap()
            .release()
            .await
            .unwrap();

        server.command(&["RPUSH", &name, "a list"]).await;
        let error = locks.revoke("a").also_endless().await.unwrap_err();
        assert_eq!(error.kind(), LockErrorKind::ForeignKey, "{error}");
        assert_eq!(server.query::<u64>(&["LLEN", &name]).await, 1);
    })
    .await;
}
