//! A clock of the server that is set. The functions of the store are its only readers.

use std::time::Duration;

use lock_runtime::LockClient;
use tokio_postgres::Client;

use super::{client_of_new_database, held, once, waiters};
use lock_tests::place::{LONG, Stopwatch, begun, in_time};

/// Lets the functions of the store read a clock that differs by `by`, an interval.
async fn set_clock(admin: &Client, by: &str) {
    let functions = "select pg_get_functiondef(oid) from pg_proc \
        where pronamespace = 'lock_runtime'::regnamespace and prosrc like '%clock_timestamp()%'";
    let rows = admin.query(functions, &[]).await.unwrap();
    assert!(rows.len() >= 3);
    for row in rows {
        let text: &str = row.get(0);
        let text = text.replace(
            "clock_timestamp()",
            &format!("clock_timestamp() + interval '{by}'"),
        );
        admin.batch_execute(&text).await.unwrap();
    }
}

#[tokio::test]
async fn tokens_go_on_after_a_step_back() {
    in_time(async {
        for by in ["-1 second", "-1 hour", "-20 hours"] {
            let (url, one, admin) = client_of_new_database().await;
            let other = LockClient::connect(&url).await.unwrap();
            let mut last = held(&one, "a").await.fence();
            set_clock(&admin, by).await;
            for locks in [&one, &other, &one, &other] {
                let guard = locks.exclusive("a").wait(LONG).acquire().await.unwrap();
                assert!(guard.fence() > last, "{by}");
                last = guard.fence();
                guard.release().await.unwrap();
            }
            once(one.all(["a", "b"])).await.unwrap();
        }
    })
    .await;
}

/// A step back lengthens leases. Waiting requests are served when they are released.
#[tokio::test]
async fn holders_and_waiters_go_on_after_a_step() {
    in_time(async {
        for by in ["-1 hour", "1 hour"] {
            let (url, one, admin) = client_of_new_database().await;
            let other = LockClient::connect(&url).await.unwrap();
            let lease = Duration::from_secs(2);
            let guard = one.exclusive("a").lease(lease).acquire().await.unwrap();
            let waiting = tokio::spawn(begun(other.exclusive("a").wait(LONG).acquire()).await);
            waiters(&one, "a", 1).await;
            set_clock(&admin, by).await;
            if by.starts_with('-') {
                tokio::time::timeout(lease * 2, guard.lost())
                    .await
                    .expect_err("its renewals succeed");
                assert!(!waiting.is_finished());
                guard.release().await.unwrap();
            } else {
                // The lease has ended, by the only clock that counts.
                guard.lost().await;
            }
            let began = Stopwatch::start();
            waiting.await.unwrap().unwrap().release().await.unwrap();
            assert!(began.elapsed() < lease * 3, "{by}: {:?}", began.elapsed());
            once(one.exclusive("a").wait(LONG)).await.unwrap();
        }
    })
    .await;
}
