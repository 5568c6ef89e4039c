//! Several keys: never half of them, and no two requests that wait for each other.

use lock_runtime::{LockClient, LockErrorKind};
use lock_tests::{place::in_vain, shared_server, unique};
use tokio::time::timeout;

use super::{HOUR, LONG, eventually};

async fn clients() -> [LockClient; 2] {
    [
        LockClient::in_memory(),
        LockClient::connect(&shared_server().await.url())
            .await
            .unwrap(),
    ]
}

#[tokio::test]
async fn opposite_orders_do_not_wait_for_each_other() {
    for locks in clients().await {
        let names = [unique("a"), unique("b"), unique("c")];
        let mut tasks = tokio::task::JoinSet::new();
        for number in 0..60 {
            let mut names = names.clone();
            names.rotate_left(number % 3);
            if number % 2 == 0 {
                names.reverse();
            }
            let (locks, wait) = (locks.clone(), number % 4 != 0);
            tasks.spawn(async move {
                let request = locks.all(names.iter().map(String::as_str));
                let request = if wait {
                    request.wait(LONG)
                } else {
                    request.no_wait()
                };
                match request.acquire().await {
                    Ok(guard) => {
                        let fences: Vec<_> = guard.fences().map(|(key, _)| key.clone()).collect();
                        assert!(fences.is_sorted() && fences.len() == 3);
                        guard.release().await.unwrap();
                        true
                    }
                    Err(error) => {
                        assert_eq!(error.kind(), LockErrorKind::Contended, "{error}");
                        false
                    }
                }
            });
        }
        let served = timeout(LONG, tasks.join_all()).await.unwrap();
        assert!(
            served.into_iter().filter(|served| *served).count() >= 45,
            "all who wait"
        );
    }
}

#[tokio::test]
async fn of_several_keys_all_are_held_or_none() {
    for locks in clients().await {
        let [a, b, c] = [unique("a"), unique("b"), unique("c")];
        let holder = locks.exclusive(b.as_str()).acquire().await.unwrap();
        let request = || locks.all([a.as_str(), b.as_str(), c.as_str()]).lease(HOUR);
        let is_free = async |name: &str| locks.inspect(name).await.unwrap().holders.is_empty();

        let error = request().no_wait().acquire().await.unwrap_err();
        assert_eq!(
            (error.kind(), error.key().unwrap().as_str()),
            (LockErrorKind::Contended, b.as_str())
        );
        assert!(is_free(&a).await && is_free(&c).await);

        let error = in_vain(request()).await;
        assert_eq!(
            (error.kind(), error.key().unwrap().as_str()),
            (LockErrorKind::WaitTimeout, b.as_str())
        );
        eventually("those before it are given back", async || {
            is_free(&a).await && is_free(&c).await
        })
        .await;

        holder.release().await.unwrap();
        let guard = request().no_wait().acquire().await.unwrap();
        assert!(!is_free(&a).await && !is_free(&b).await && !is_free(&c).await);
        guard.release().await.unwrap();
        assert!(is_free(&a).await && is_free(&b).await && is_free(&c).await);
    }
}

#[tokio::test]
async fn a_key_that_is_named_twice_is_one() {
    for locks in clients().await {
        let name = unique("twice");
        let twice = || locks.all([name.as_str(), name.as_str()]);
        for request in [twice().no_wait(), twice()] {
            let guard = request.acquire().await.unwrap();
            assert_eq!(guard.fences().count(), 1);
            guard.release().await.unwrap();
        }
    }
}
