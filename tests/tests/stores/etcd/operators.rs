//! Health, lists and revocations, as operators see them.

use futures_util::TryStreamExt as _;
use lock_runtime::{
    LockErrorKind, Loss,
    health::{ServerRole, Verdict},
};
use lock_tests::EtcdCluster;

use super::{client, once};

#[tokio::test]
async fn each_member_has_a_role_and_one_that_is_down_is_named() {
    let cluster = EtcdCluster::builder().members(3).start().await;
    let locks = client(&cluster).await;
    once(&locks, "k").await.unwrap();
    let leader = cluster.leader().await;
    let health = locks.health().await;
    assert_eq!(health.verdict(), Verdict::Healthy, "{health}");
    for (index, server) in health.servers().iter().enumerate() {
        assert!(
            server.name.ends_with(&cluster.port(index).to_string()),
            "{health}"
        );
        let expected = if index == leader {
            ServerRole::Leader
        } else {
            ServerRole::Follower
        };
        assert_eq!(server.role, Some(expected), "{health}");
    }

    let down = (leader + 1) % 3;
    cluster.kill(down);
    let health = locks.health().await;
    assert_eq!(health.verdict(), Verdict::Degraded, "{health}");
    let name = &health.servers()[down].name;
    let named = health
        .findings()
        .iter()
        .any(|it| it.server.as_ref() == Some(name));
    assert!(named, "{health}");

    cluster.kill((leader + 2) % 3);
    let health = locks.health().await;
    assert_eq!(health.verdict(), Verdict::Unavailable, "{health}");
}

#[tokio::test]
async fn locks_are_listed_and_revoked() {
    let cluster = EtcdCluster::start().await;
    let locks = client(&cluster).await;
    let mut guards = Vec::new();
    for number in 0..20 {
        let key = format!("job:{number}");
        guards.push(locks.exclusive(&*key).acquire().await.unwrap());
    }
    let listed: Vec<_> = locks.list("job:").try_collect().await.unwrap();
    assert_eq!(listed.len(), 20);
    let revoked = guards.swap_remove(7);
    locks.revoke("job:7").await.unwrap();
    assert_eq!(
        revoked.lost().await.kind(),
        LockErrorKind::Lost(Loss::Revoked)
    );
    once(&locks, "job:7").await.unwrap();
}
