//! Sessions of the database that keep a lock from being granted: they are no outage, and an
//! operator learns which ones they are.

use std::time::Duration;

use lock_runtime::{LockClient, LockErrorKind, health::Health};
use lock_tests::{
    place::{LONG, begun, eventually, in_time},
    postgres,
};
use tokio::time::{Instant, sleep};
use tokio_postgres::Client;

use super::{client_of_new_database, held, number, once};

const SECOND: Duration = Duration::from_secs(1);

async fn execute(session: &Client, statements: &str) {
    session.batch_execute(statements).await.unwrap();
}

async fn process(session: &Client) -> String {
    let id = number(session, "select pg_backend_pid()::int8").await;
    format!("process {id} ")
}

/// The message of the finding `code`. The tests share a server, so that there may be others.
fn finding<'a>(health: &'a Health, code: &str) -> Option<&'a str> {
    let found = health.findings().iter().find(|it| it.code == code);
    found.map(|it| &it.message[..])
}

#[tokio::test]
async fn a_row_that_another_session_has_locked_has_a_kind_of_its_own() {
    in_time(async {
        let (_, locks, operator) = client_of_new_database().await;
        once(locks.exclusive("a")).await.unwrap();
        let lock = "begin; select from lock_runtime.record where name = 'lock:a' for update";
        execute(&operator, lock).await;
        for wait in [None, Some(SECOND)] {
            let begin = Instant::now();
            let request = locks.exclusive("a");
            let request = match wait {
                Some(wait) => request.wait(wait),
                None => request.no_wait(),
            };
            let error = once(request).await.unwrap_err();
            let wait = wait.unwrap_or_default();
            assert_eq!(error.kind(), LockErrorKind::Blocked, "{error:#}");
            assert_eq!(
                (error.code(), error.class().http_status()),
                ("blocked", 409)
            );
            assert!(format!("{error:#}").contains("inspect"), "{error:#}");
            assert!(begin.elapsed() < wait + 4 * SECOND, "{:?}", begin.elapsed());
        }
        // Others are served.
        once(locks.exclusive("b")).await.unwrap();
        let found = locks.inspect("a").await.unwrap();
        assert!(found.holders.is_empty());
        let [session] = &found.blocked_by[..] else {
            panic!("{found:?}");
        };
        assert!(session.starts_with(&process(&operator).await), "{session}");
        assert!(session.contains("idle in transaction"), "{session}");
        assert!(locks.inspect("b").await.unwrap().blocked_by.is_empty());
        sleep(2 * SECOND).await;
        let health = locks.health().await;
        let found = finding(&health, "blocked_records").unwrap_or_else(|| panic!("{health}"));
        assert!(found.contains(session.split(',').next().unwrap()));

        let waiting = tokio::spawn(begun(locks.exclusive("a").wait(LONG).acquire()).await);
        execute(&operator, "rollback").await;
        waiting.await.unwrap().unwrap().release().await.unwrap();
        let health = locks.health().await;
        assert_eq!(finding(&health, "blocked_records"), None, "{health}");
        assert!(locks.inspect("a").await.unwrap().blocked_by.is_empty());
    })
    .await;
}

/// The application may use the URL of its clients for sessions of its own.
#[tokio::test]
async fn a_session_of_the_application_is_named_and_that_of_a_client_is_not() {
    in_time(async {
        let (url, _, operator) = client_of_new_database().await;
        let join = if url.contains('?') { '&' } else { '?' };
        let url = format!("{url}{join}application_name=orders");
        let locks = LockClient::connect(&url).await.unwrap();
        once(locks.exclusive("a")).await.unwrap();
        for (name, is_named) in [
            ("orders", true),
            ("lock-runtime orders", false),
            ("lock-runtime", false),
            ("lock-runtime-worker", true),
        ] {
            let lock = format!(
                "begin; set local application_name = '{name}'; \
                select from lock_runtime.record where name = 'lock:a' for update"
            );
            execute(&operator, &lock).await;
            let found = locks.inspect("a").await.unwrap();
            assert_eq!(found.blocked_by.len(), usize::from(is_named), "{found:?}");
            execute(&operator, "rollback").await;
        }
        let own = "select count(*) from pg_stat_activity \
            where application_name = 'lock-runtime orders' and datname = current_database()";
        assert!(number(&operator, own).await > 0);
    })
    .await;
}

#[tokio::test]
async fn a_held_lock_whose_row_is_locked_is_renewed_later() {
    in_time(async {
        let (_, locks, operator) = client_of_new_database().await;
        let guard = locks
            .exclusive("a")
            .lease(6 * SECOND)
            .acquire()
            .await
            .unwrap();
        let lock = "begin; select from lock_runtime.record where name = 'lock:a' for update";
        execute(&operator, lock).await;
        sleep(3 * SECOND).await;
        execute(&operator, "rollback").await;
        sleep(6 * SECOND).await;
        assert!(!guard.is_lost());
        guard.release().await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn the_sessions_with_an_open_guard_are_named() {
    in_time(async {
        let (url, locks, first) = client_of_new_database().await;
        let second = postgres::connect(&url).await;
        let guard = held(&locks, "a").await;
        let call = format!(
            "begin; select lock_runtime.guard('lock:a', {})",
            guard.fence()
        );
        execute(&first, &call).await;
        let found = locks.inspect("a").await.unwrap();
        assert!(
            found.blocked_by[0].starts_with(&process(&first).await),
            "{found:?}"
        );
        execute(&second, &call).await;
        // A renewal keeps the locks of the row.
        guard.extend(2 * LONG).await.unwrap();
        guard.release().await.unwrap();
        let found = locks.inspect("a").await.unwrap();
        assert!(found.holders.is_empty());
        for session in [&first, &second] {
            let process = process(session).await;
            let is_named = found.blocked_by.iter().any(|it| it.starts_with(&process));
            assert!(is_named, "{process}: {found:?}");
        }
        assert!(locks.exclusive("a").try_acquire().await.unwrap().is_none());
        execute(&first, "commit").await;
        execute(&second, "commit").await;
        eventually("it is free", async || {
            locks.inspect("a").await.unwrap().blocked_by.is_empty()
        })
        .await;
        once(locks.exclusive("a")).await.unwrap();
    })
    .await;
}

/// Of a subtransaction that has ended, PostgreSQL does not say which session it was.
#[tokio::test]
async fn a_session_with_a_guard_in_a_released_savepoint_is_named() {
    in_time(async {
        let (_, locks, session) = client_of_new_database().await;
        let guard = held(&locks, "a").await;
        let call = format!(
            "begin; savepoint s; select lock_runtime.guard('lock:a', {}); release s",
            guard.fence()
        );
        execute(&session, &call).await;
        guard.release().await.unwrap();
        assert!(locks.exclusive("a").try_acquire().await.unwrap().is_none());
        let found = locks.inspect("a").await.unwrap();
        let process = process(&session).await;
        assert!(
            found.blocked_by.iter().any(|it| it.starts_with(&process)),
            "{found:?}"
        );
        assert!(locks.inspect("b").await.unwrap().blocked_by.is_empty());
        execute(&session, "commit").await;
        eventually("it is free", async || {
            locks.inspect("a").await.unwrap().blocked_by.is_empty()
        })
        .await;
    })
    .await;
}

/// As for an index, `alter table` or `vacuum full`.
#[tokio::test]
async fn a_session_that_has_locked_the_table_is_a_finding() {
    in_time(async {
        let (_, locks, session) = client_of_new_database().await;
        execute(
            &session,
            "begin; lock table lock_runtime.record in share mode",
        )
        .await;
        sleep(2 * SECOND).await;
        let process = process(&session).await;
        eventually("it is found", async || {
            let health = locks.health().await;
            finding(&health, "blocked_records").is_some_and(|it| it.contains(&process))
        })
        .await;
        execute(&session, "commit").await;
        once(locks.exclusive("a")).await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn an_old_snapshot_that_slows_down_busy_locks_is_a_finding() {
    in_time(async {
        let (_, locks, report) = client_of_new_database().await;
        let (url, other, writer) = client_of_new_database().await;
        drop((url, other));
        let begin = "begin isolation level repeatable read; select 1";
        execute(&report, begin).await;
        execute(&writer, "set synchronous_commit = off").await;
        let transactions = "do $$ begin for i in 1 .. 20100 loop \
             perform pg_current_xact_id(); commit; end loop; end $$";
        execute(&writer, transactions).await;
        sleep(2 * SECOND).await;
        let health = locks.health().await;
        let found = finding(&health, "old_horizon").unwrap_or_else(|| panic!("{health}"));
        assert!(found.contains(&process(&report).await), "{health}");
        execute(&report, "rollback").await;
        let health = locks.health().await;
        assert_eq!(finding(&health, "old_horizon"), None, "{health}");
    })
    .await;
}
