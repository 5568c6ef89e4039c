//! Several keys of several nodes, all or none.

use std::{sync::Arc, time::Duration};

use lock_runtime::LockErrorKind;
use lock_tests::{
    FencedResource, Lateness, RedisCluster,
    place::{all_free, eventually, in_time},
    shared_cluster,
};
use tokio::{task::JoinSet, time::Instant};

use super::{HOUR, Place, key_of_each, place_on, use_lock};

#[tokio::test]
async fn keys_of_several_nodes_are_taken_all_or_none() {
    in_time(async {
        let place = Place::cluster().await;
        let cluster = shared_cluster().await;
        let (locks, others) = (place.client().await, place.client().await);
        let keys = key_of_each(cluster, &place).await;
        let guard = locks
            .all(keys.clone())
            .lease(HOUR)
            .no_wait()
            .acquire()
            .await
            .unwrap();
        for key in &keys {
            assert_eq!(locks.inspect(key.as_str()).await.unwrap().holders.len(), 1);
        }
        guard.release().await.unwrap();
        all_free(&locks, &keys.each_ref().map(String::as_str)).await;
        for taken in &keys {
            let guard = others.exclusive(taken.as_str()).acquire().await.unwrap();
            let error = locks
                .all(keys.clone())
                .lease(HOUR)
                .no_wait()
                .acquire()
                .await
                .unwrap_err();
            assert_eq!(error.kind(), LockErrorKind::Contended);
            assert_eq!(error.key().unwrap().as_str(), taken.as_str());
            // At once, and not in the background.
            for key in keys.iter().filter(|key| *key != taken) {
                assert!(
                    locks
                        .inspect(key.as_str())
                        .await
                        .unwrap()
                        .holders
                        .is_empty(),
                    "{key}"
                );
            }
            guard.release().await.unwrap();
        }
    })
    .await;
}

#[tokio::test]
async fn requests_for_overlapping_keys_never_meet_and_leave_nothing() {
    in_time(async {
        let place = Place::cluster().await;
        let keys: Vec<_> = (0..5).map(|number| format!("k{number}")).collect();
        let resources: Arc<Vec<_>> = Arc::new(keys.iter().map(|_| FencedResource::new()).collect());
        let mut tasks = JoinSet::new();
        let clients = [place.client().await, place.client().await];
        for task in 0..12 {
            let (locks, keys, resources) =
                (clients[task % 2].clone(), keys.clone(), resources.clone());
            tasks.spawn(async move {
                let (mut granted, mut refused) = (0, 0);
                for round in 0..30 {
                    let chosen = [task, task + 1 + round, task + 3].map(|index| index % keys.len());
                    let request = locks.all(chosen.map(|index| keys[index].clone())).no_wait();
                    match request.acquire().await {
                        Ok(guard) => {
                            granted += 1;
                            let fences: Vec<_> = guard
                                .fences()
                                .map(|(key, fence)| (key.clone(), fence))
                                .collect();
                            for (key, fence) in fences {
                                let index =
                                    keys.iter().position(|name| name == key.as_str()).unwrap();
                                resources[index].increment(fence).await.unwrap();
                            }
                            guard.release().await.unwrap();
                        }
                        Err(error) if error.kind() == LockErrorKind::Contended => refused += 1,
                        Err(error) => panic!("{error}"),
                    }
                }
                (granted, refused)
            });
        }
        let outcomes = tasks.join_all().await;
        let granted: usize = outcomes.iter().map(|(granted, _)| granted).sum();
        let refused: usize = outcomes.iter().map(|(_, refused)| refused).sum();
        assert!(
            granted > 0 && refused > 0,
            "{granted} granted, {refused} refused"
        );
        for resource in resources.iter() {
            let report = resource.report();
            assert!(report.is_clean() && report.peak <= 1, "{report}");
        }
        let keys: Vec<_> = keys.iter().map(String::as_str).collect();
        all_free(&clients[0], &keys).await;
    })
    .await;
}

#[tokio::test]
async fn each_of_several_nodes_has_the_time_of_a_call_and_a_dead_one_leaves_the_others_free() {
    in_time(async {
        let cluster = RedisCluster::start().await;
        let place = place_on(&cluster);
        let locks = place.client().await;
        let mut keys = key_of_each(&cluster, &place).await;
        for key in &keys {
            use_lock(&locks, key).await;
        }
        keys.sort();
        // The second node answers later than a single call may take, and in time for its own. They
        // are found before, as a node that pauses does not reply with its slots.
        let mut owners = Vec::new();
        for key in &keys {
            owners.push(cluster.owner_of(&super::lock_name(&place, key)).await);
        }
        for (owner, pause) in owners.iter().zip(["300", "600"]) {
            owner.command(&["CLIENT", "PAUSE", pause, "ALL"]).await;
        }
        let request = locks.all(keys.clone()).lease(HOUR).no_wait();
        let guard = request.acquire().await.expect("all are free");
        guard.release().await.unwrap();
        // The last that is asked for.
        let owner = cluster.owner_of(&super::lock_name(&place, &keys[2])).await;
        owner.stop();
        let (begun, late) = (Instant::now(), Lateness::start());
        let error = locks
            .all(keys.clone())
            .lease(HOUR)
            .no_wait()
            .acquire()
            .await
            .unwrap_err();
        assert_eq!(error.kind(), LockErrorKind::Unavailable, "{error}");
        assert_eq!(error.key().unwrap().as_str(), keys[2]);
        assert!(
            begun.elapsed() < late.allows(Duration::from_millis(1500)),
            "{:?}",
            begun.elapsed()
        );
        let others = place.client().await;
        for key in &keys[..2] {
            eventually("it is free", async || {
                others
                    .exclusive(key.as_str())
                    .try_acquire()
                    .await
                    .unwrap()
                    .is_some()
            })
            .await;
        }
        assert!(
            begun.elapsed() < late.allows(Duration::from_secs(5)),
            "at once, and not with the lease: {:?}",
            begun.elapsed()
        );
        owner.resume();
    })
    .await;
}
