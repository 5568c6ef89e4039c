//! Several keys at once, without waiting, and the order of calls at each server.

use std::{collections::HashSet, time::Duration};

use lock_runtime::{LockErrorKind, store::Token};
use lock_tests::faulty_store::{Call, Operation};
use tokio::time::{Instant, sleep};

use super::reserved::{Three, cut};

/// Three servers that take this long for each call.
fn slow(takes: Duration) -> Three {
    Three::new(move |_, call| {
        Box::pin(async move {
            sleep(takes).await;
            call.execute().await
        })
    })
}

fn keys(count: usize) -> Vec<String> {
    (0..count).map(|number| format!("k{number:03}")).collect()
}

const MILLI: Duration = Duration::from_millis(1);

/// Each key has the time of a call.
#[tokio::test(start_paused = true)]
async fn many_free_keys_are_granted_however_slow_the_servers_are() {
    for (count, takes) in [(40, 5), (120, 5), (8, 50), (12, 50), (40, 150)] {
        let three = slow(MILLI * takes);
        let request = three.client().all(keys(count));
        let guard = request.try_acquire().await.unwrap();
        let guard = guard.unwrap_or_else(|| panic!("{count} keys at {takes} ms are free"));
        let validity = guard.validity();
        assert!(validity > Duration::from_secs(14), "{validity:?}");
        guard.release().await.unwrap();
    }
}

/// The first lease has to be renewed after the last grant: half of it is the limit.
#[tokio::test(start_paused = true)]
async fn keys_that_take_longer_than_half_a_lease_are_refused_with_the_reason() {
    let three = slow(MILLI * 40);
    let locks = three.client();
    let begin = Instant::now();
    let request = locks.all(keys(12)).lease(MILLI * 1000);
    let error = request.try_acquire().await.unwrap_err();
    assert!(begin.elapsed() < MILLI * 600, "{:?}", begin.elapsed());
    assert_eq!(error.kind(), LockErrorKind::Unavailable);
    assert_eq!(error.key().unwrap().as_str(), "k009", "{error:#}");
    let text = format!("{error:#}");
    assert!(text.contains("9 of 12 keys"), "{text}");
    assert!(!text.contains("the store is unavailable"), "{text}");
    // Nothing is left of those that were granted.
    let others = three.client();
    let guard = others.all(keys(12)).wait(MILLI * 5000).acquire().await;
    guard.unwrap().release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn an_error_names_the_key_whose_servers_are_silent() {
    let three = Three::new(|server, call: Call| {
        Box::pin(async move {
            if let Operation::Acquire(request) = &call.operation
                && request.hold.key.as_str() == "k003"
                && server > 0
            {
                sleep(Duration::from_secs(3)).await;
            }
            call.execute().await
        })
    });
    let begin = Instant::now();
    let error = three.client().all(keys(5)).try_acquire().await.unwrap_err();
    assert!(begin.elapsed() < MILLI * 1100, "{:?}", begin.elapsed());
    assert_eq!(error.key().unwrap().as_str(), "k003", "{error:#}");
    assert_eq!(error.kind(), LockErrorKind::Unavailable);
}

/// Two of three servers fail once, at once. The request is granted by its second attempt, although
/// a majority of the circuit breakers is open, and leaves no vote behind.
#[tokio::test(start_paused = true)]
async fn a_request_that_fails_at_two_servers_succeeds_and_leaves_nothing() {
    for healthy in 0..3 {
        let three = Three::new(move |server, call| {
            Box::pin(async move {
                let is_acquire = matches!(call.operation, Operation::Acquire(_));
                if is_acquire && server != healthy && call.nth == 0 {
                    return Err(cut());
                }
                call.execute().await
            })
        });
        let locks = three.client();
        for _ in 0..3 {
            let guard = locks.exclusive("a").no_wait().acquire().await;
            guard.expect("it is free").release().await.unwrap();
        }
        for (number, store) in three.0.iter().enumerate() {
            let mut ended: HashSet<Token> = HashSet::new();
            for operation in store.operations() {
                match operation {
                    Operation::Release(release) => drop(ended.insert(release.hold.token)),
                    Operation::Abandon(hold) => drop(ended.insert(hold.token)),
                    Operation::Acquire(request) => {
                        let is_late = ended.contains(&request.hold.token);
                        assert!(!is_late, "{healthy}: an acquire at {number} after its end");
                    }
                    _ => {}
                }
            }
        }
    }
}
