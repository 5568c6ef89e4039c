//! Rules 24 and 27: fencing tokens are written as whole numbers, and increase whatever happens to
//! their counter.

use std::time::Duration;

use lock_runtime::{
    Mode,
    store::{ConvertReply, Grant, NextHolder, PollReply, Release, ReleaseReply, Store, Token},
};
use lock_tests::{RedisServer, replies::poll, shared_server};

use super::{
    HOUR, Hold, MODES, beside, both, fence_name, fresh_hold, granted, lock_name, member, micros,
    redis_on,
};

async fn release(store: &dyn Store, hold: &Hold) {
    assert_eq!(
        store.release(&Release::new(hold.clone())).await.unwrap(),
        ReleaseReply::Released
    );
}

// Rule 24: `tostring` would write 1.795e+15.
#[tokio::test]
async fn a_fencing_token_is_written_to_the_last_digit() {
    let server = shared_server().await;
    let store = redis_on(server).await;
    for mode in MODES {
        let hold = fresh_hold(mode);
        let grant = granted(&*store, &hold, HOUR).await;
        assert_eq!(
            server.query::<String>(&["GET", &fence_name(&hold)]).await,
            grant.fence.to_string()
        );
        if mode != Mode::Exclusive {
            let expiry: String = server
                .query(&["ZSCORE", &lock_name(&hold), &member(&hold)])
                .await;
            let left = expiry.parse::<u64>().expect("all digits") - micros(server).await / 1000;
            assert!((3_540_000..=3_600_000).contains(&left), "{left}");
        }
    }
    // With a counter ahead of the clock, the next token is its exact successor, not a rounded
    // number.
    for latest in [5_000_000_000_000_000_u64, 9_007_199_254_740_000] {
        let hold = fresh_hold(Mode::Exclusive);
        server
            .command(&["SET", &fence_name(&hold), &latest.to_string()])
            .await;
        assert_eq!(
            granted(&*store, &hold, HOUR).await.fence.number(),
            latest + 1
        );
        assert_eq!(
            server.query::<String>(&["GET", &fence_name(&hold)]).await,
            (latest + 1).to_string()
        );
    }
}

// Rule 27: `INCR` would repeat numbers after a failover to a replica that lagged behind.
#[tokio::test]
async fn acquire_grants_growing_fences_when_the_counter_is_lost() {
    let server = shared_server().await;
    let store = redis_on(server).await;
    for mode in MODES {
        let mut latest = 0;
        let key = fresh_hold(mode).key;
        for counter in [None, Some(1), Some(1_000_000)] {
            for _ in 0..3 {
                let hold = beside(&key, mode);
                let before = micros(server).await;
                let fence = granted(&*store, &hold, HOUR).await.fence.number();
                assert!(
                    fence > latest,
                    "{mode:?} {counter:?}: {fence} after {latest}"
                );
                assert!(
                    fence >= before && fence <= micros(server).await,
                    "it is the server's time"
                );
                latest = fence;
                release(&*store, &hold).await;
            }
            let fence = fence_name(&beside(&key, mode));
            match counter {
                None => server.command(&["DEL", &fence]).await,
                Some(counter) => server.command(&["SET", &fence, &counter.to_string()]).await,
            };
        }
    }
}

// Rule 27: the clock of the server went back by an hour.
#[tokio::test]
async fn fencing_tokens_grow_when_the_clock_goes_back() {
    let server = shared_server().await;
    let store = redis_on(server).await;
    for mode in MODES {
        let key = fresh_hold(mode).key;
        let ahead = micros(server).await + 3_600_000_000;
        server
            .command(&["SET", &fence_name(&beside(&key, mode)), &ahead.to_string()])
            .await;
        for step in 1..4 {
            let hold = beside(&key, mode);
            assert_eq!(
                granted(&*store, &hold, HOUR).await.fence.number(),
                ahead + step,
                "{mode:?}"
            );
            release(&*store, &hold).await;
        }
    }
}

// Rule 27.
#[tokio::test]
async fn a_server_that_lost_everything_gives_larger_fencing_tokens() {
    let server = RedisServer::start().await;
    let hold = fresh_hold(Mode::Exclusive);
    let before = granted(&*redis_on(&server).await, &hold, HOUR).await;
    server.restart_empty().await;
    let after = granted(&*redis_on(&server).await, &hold, HOUR).await;
    assert!(before.fence < after.fence);
}

// Rule 27, and failure 15 seen in other libraries: a key that stays for ever.
#[tokio::test]
async fn a_counter_lives_for_a_day_after_each_grant() {
    const DAY: u64 = 86_400;
    let server = shared_server().await;
    let store = redis_on(server).await;
    let writer = fresh_hold(Mode::Exclusive);
    let reader = Hold::new(writer.key.clone(), Mode::Shared, writer.token);
    let next_holder = Hold::new(writer.key.clone(), Mode::Exclusive, Token::random());
    let fence = fence_name(&writer);
    let refreshed = async |what: &str| {
        let ttl: u64 = server.query(&["TTL", &fence]).await;
        assert!((DAY - 60..=DAY).contains(&ttl), "{what}: {ttl}");
        server.command(&["EXPIRE", &fence, "100"]).await;
    };
    granted(&*store, &writer, HOUR).await;
    refreshed("a grant").await;
    store.convert(&writer).await.unwrap();
    refreshed("a conversion").await;
    granted(&*store, &reader, HOUR).await;
    refreshed("a repeated grant to a reader").await;
    release(&*store, &reader).await;
    granted(&*store, &writer, HOUR).await;
    refreshed("the next grant").await;
    store
        .release(&Release::new(writer).next(NextHolder::new(next_holder.token, HOUR, 0)))
        .await
        .unwrap();
    refreshed("passing on").await;
    release(&*store, &next_holder).await;
    let left = server.keys(&format!("*{}*", next_holder.key)).await;
    assert_eq!(left, [fence], "only the counter is left, for a while");
}

// Rule 27: every kind of grant has a larger fencing token.
#[tokio::test]
async fn every_grant_carries_a_larger_fencing_token() {
    for store in both().await {
        let mut latest = None;
        let mut larger = |Grant { fence, .. }: Grant| {
            assert!(Some(fence) > latest, "{fence} after {latest:?}");
            latest = Some(fence);
        };
        let mut writer = fresh_hold(Mode::Exclusive);
        larger(granted(&*store, &writer, HOUR).await);
        for _ in 0..20 {
            let next = Token::random();
            let ReleaseReply::Passed(grant) = store
                .release(&Release::new(writer.clone()).next(NextHolder::new(
                    next,
                    Duration::from_secs(60),
                    0,
                )))
                .await
                .unwrap()
            else {
                panic!("{store:?}")
            };
            larger(grant);
            writer.token = next;
        }
        let ConvertReply::Converted(grant) = store.convert(&writer).await.unwrap() else {
            panic!("{store:?}")
        };
        larger(grant);
        let readers: Vec<_> = (0..5).map(|_| beside(&writer.key, Mode::Shared)).collect();
        for reader in &readers {
            larger(granted(&*store, reader, HOUR).await);
        }
        for reader in &readers {
            // The repeated grant of a reader has a larger token, as its own need not be the latest
            // of the key.
            let PollReply::Granted(grant) = poll(&*store, reader).await.unwrap() else {
                panic!("{store:?}")
            };
            larger(grant);
        }
    }
}
