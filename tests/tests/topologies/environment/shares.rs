//! The set of the holders of read shares and permits, when one of them is released.

use lock_runtime::{
    LockKey, Mode,
    store::{
        AcquireReply, Hold, Instant, KeyPart, KeyRequest, Release, ReleaseReply, Store as _, Token,
        redis::RedisStore,
    },
};
use lock_tests::{shared_server, unique};

use super::{HOUR, permits};

/// A set that has become foreign while a share was held, as it no longer ends with its last member.
#[tokio::test]
async fn release_leaves_a_set_that_has_become_foreign() {
    let server = shared_server().await;
    let store = RedisStore::connect(&server.url(), "lock").await.unwrap();
    for mode in [Mode::Shared, Mode::Permits(permits(3))] {
        let key = LockKey::new(unique("set")).unwrap();
        let hold = Hold::new(key.clone(), mode, Token::random());
        let request = KeyRequest::new(hold.clone(), HOUR, Instant::now() + HOUR);
        let granted = store.acquire(&request).await;
        assert!(matches!(granted, Ok(AcquireReply::Granted(_))));
        let name = store.name_of(&key, mode.kind(), KeyPart::Lock).unwrap();
        server.command(&["PERSIST", &name]).await;
        let add = ["ZADD", &name, "100", "ann", "9999999999999", "bob"];
        server.command(&add).await;
        let before = server.query::<Vec<u8>>(&["DUMP", &name]).await;
        let released = store.release(&Release::new(hold)).await;
        assert_eq!(released.unwrap(), ReleaseReply::NotHeld);
        assert_eq!(server.query::<Vec<u8>>(&["DUMP", &name]).await, before);
        assert_eq!(server.query::<i64>(&["PTTL", &name]).await, -1);
    }
}

/// The set ends with the longest of the holders that remain, whichever share is released.
#[tokio::test]
async fn release_of_a_share_keeps_the_expiry_of_the_others() {
    let server = shared_server().await;
    let store = RedisStore::connect(&server.url(), "lock").await.unwrap();
    for mode in [Mode::Shared, Mode::Permits(permits(3))] {
        for first in 0..3 {
            let key = LockKey::new(unique("share")).unwrap();
            let name = store.name_of(&key, mode.kind(), KeyPart::Lock).unwrap();
            let mut shares = Vec::new();
            for hours in [1, 3, 2] {
                let hold = Hold::new(key.clone(), mode, Token::random());
                let request = KeyRequest::new(hold.clone(), hours * HOUR, Instant::now() + HOUR);
                let granted = store.acquire(&request).await;
                assert!(matches!(granted, Ok(AcquireReply::Granted(_))));
                shares.push((hold, hours));
            }
            shares.rotate_left(first);
            while let Some((hold, _)) = shares.pop() {
                let released = store.release(&Release::new(hold)).await;
                assert_eq!(released.unwrap(), ReleaseReply::Released);
                let ttl: i64 = server.query(&["PTTL", &name]).await;
                let longest = shares.iter().map(|(_, hours)| *hours).max();
                match longest {
                    Some(hours) => assert!((ttl - i64::from(hours) * 3_600_000).abs() < 60_000),
                    None => assert_eq!(ttl, -2),
                }
            }
        }
    }
}
