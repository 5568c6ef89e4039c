//! The schema: created by several processes, and used by clients of several versions.

use futures_util::future::join_all;
use lock_runtime::{LockClient, LockErrorKind, fencing, store::postgres::MIGRATION};
use lock_tests::{
    chain,
    place::{eventually, in_time},
    postgres, shared_postgres,
};
use tokio_postgres::Client;

use super::{client_of_new_database, held, number, once};

pub(super) const FORMAT: &str = "select version::bigint from lock_runtime.format";

/// The version of the schema that this version of the library creates.
pub(super) const CURRENT: i32 = 7;

async fn set_format(admin: &Client, version: i32, since: i32) {
    let update = "update lock_runtime.format set version = $1, since = $2";
    admin.execute(update, &[&version, &since]).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn four_processes_create_it_at_once() {
    in_time(async {
        for _ in 0..10 {
            let url = shared_postgres().await.new_database().await;
            let install = async {
                let client = postgres::connect(&url).await;
                fencing::install(&client).await.unwrap();
            };
            let clients = join_all((0..4).map(|_| LockClient::connect(&url)));
            let (clients, ()) = tokio::join!(clients, install);
            for locks in &clients {
                once(locks.as_ref().unwrap().exclusive("a")).await.unwrap();
            }
            let admin = postgres::connect(&url).await;
            assert_eq!(number(&admin, FORMAT).await, i64::from(CURRENT));
            assert_eq!(
                number(&admin, "select count(*) from lock_runtime.format").await,
                1
            );
            fencing::install(&admin).await.unwrap();
        }
    })
    .await;
}

/// A newer version of the library has brought the schema up to date, in a way that this one works
/// with.
#[tokio::test]
async fn clients_of_two_versions_use_one_schema() {
    in_time(async {
        let (url, old, admin) = client_of_new_database().await;
        let guard = held(&old, "a").await;
        let newer = "alter table lock_runtime.record add column extra text not null default 'new'";
        admin.batch_execute(newer).await.unwrap();
        set_format(&admin, CURRENT + 1, 1).await;
        let other = LockClient::connect(&url).await.unwrap();
        assert!(other.exclusive("a").try_acquire().await.unwrap().is_none());
        let fence = guard.fence();
        guard.release().await.unwrap();
        let guard = held(&other, "a").await;
        assert!(guard.fence() > fence);
        once(old.all(["b", "c"])).await.unwrap();
        guard.release().await.unwrap();
        // An older migration changes nothing.
        admin.batch_execute(MIGRATION).await.unwrap();
        assert_eq!(number(&admin, FORMAT).await, i64::from(CURRENT) + 1);
    })
    .await;
}

#[tokio::test]
async fn a_client_that_is_too_old_is_refused() {
    in_time(async {
        let (url, old, admin) = client_of_new_database().await;
        once(old.exclusive("a")).await.unwrap();
        set_format(&admin, CURRENT + 2, CURRENT + 1).await;
        let error = LockClient::connect(&url).await.unwrap_err();
        assert_eq!(error.kind(), LockErrorKind::IncompatibleFormat);
        let message = chain(&error);
        let newer = format!("version {}", CURRENT + 2);
        let known = format!("knows {CURRENT}");
        for word in [&newer, &known, "use versions of one format"] {
            assert!(message.contains(word), "{message}");
        }
        let lazy = LockClient::connect_lazy(&url).unwrap();
        let error = once(lazy.exclusive("a")).await.unwrap_err();
        assert_eq!(error.kind(), LockErrorKind::IncompatibleFormat);

        // A client that was connected before finds records or functions that it does not know.
        admin
            .batch_execute("update lock_runtime.record set version = version + 1, body = '\\x02'")
            .await
            .unwrap();
        let error = once(old.exclusive("a")).await.unwrap_err();
        assert_eq!(error.kind(), LockErrorKind::IncompatibleFormat, "{error:#}");
        admin
            .batch_execute("alter function lock_runtime.swap rename to swap_2")
            .await
            .unwrap();
        let error = once(old.exclusive("b")).await.unwrap_err();
        assert_eq!(error.kind(), LockErrorKind::IncompatibleFormat, "{error:#}");
    })
    .await;
}

/// The client cannot create it, as the other process has not finished, and finds it then.
#[tokio::test]
async fn a_schema_that_another_process_creates_meanwhile_is_used() {
    in_time(async {
        let (url, locks, admin) = client_of_new_database().await;
        locks.shutdown().await;
        let other = postgres::connect(&url).await;
        let missing = "delete from lock_runtime.format";
        other.batch_execute(missing).await.unwrap();
        let creating = "begin; lock table lock_runtime.format in share update exclusive mode";
        other.batch_execute(creating).await.unwrap();
        let connecting = tokio::spawn(async move { LockClient::connect(&url).await });
        eventually("the client waits for the other process", async || {
            let waits = "select count(*) from pg_locks where not granted and database = \
                (select oid from pg_database where datname = current_database())";
            number(&admin, waits).await > 0
        })
        .await;
        let insert = format!("insert into lock_runtime.format values ({CURRENT}, 1)");
        admin.batch_execute(&insert).await.unwrap();
        let locks = connecting.await.unwrap().unwrap();
        once(locks.exclusive("a")).await.unwrap();
        drop(other);
    })
    .await;
}

/// From a version before the first one, which has a table and lacks the functions.
#[tokio::test]
async fn an_older_schema_is_brought_up_to_date_and_keeps_its_locks() {
    in_time(async {
        let (url, before, admin) = client_of_new_database().await;
        let guard = held(&before, "a").await;
        set_format(&admin, 0, 0).await;
        admin
            .batch_execute("drop function lock_runtime.guard, lock_runtime.lock")
            .await
            .unwrap();
        let locks = LockClient::connect(&url).await.unwrap();
        assert_eq!(number(&admin, FORMAT).await, i64::from(CURRENT));
        assert!(locks.exclusive("a").try_acquire().await.unwrap().is_none());
        let mut db = postgres::connect(&url).await;
        let transaction = db.transaction().await.unwrap();
        let guarded = fencing::guard_named(&transaction, "lock:a", guard.fence()).await;
        guarded.unwrap();
        drop(transaction);
        guard.release().await.unwrap();
    })
    .await;
}

/// The server could otherwise be asked for a function or an operator of the same name.
#[tokio::test]
async fn no_function_depends_on_the_search_path() {
    let (_, _, admin) = client_of_new_database().await;
    fencing::install(&admin).await.unwrap();
    let loose = "select proname from pg_proc where pronamespace = 'lock_runtime'::regnamespace \
        and not coalesce(proconfig::text like '%search_path=pg_catalog, pg_temp%', false)";
    let rows = admin.query(loose, &[]).await.unwrap();
    let names: Vec<&str> = rows.iter().map(|row| row.get(0)).collect();
    assert_eq!(names, [""; 0]);
}

/// Updates of a record that has its usual size write no index.
#[tokio::test]
async fn updates_are_heap_only() {
    in_time(async {
        let (_, locks, admin) = client_of_new_database().await;
        for _ in 0..300 {
            once(locks.exclusive("a")).await.unwrap();
        }
        admin
            .batch_execute("select pg_stat_force_next_flush()")
            .await
            .unwrap();
        let share = "select (100 * n_tup_hot_upd / greatest(n_tup_upd, 1))::bigint \
            from pg_stat_user_tables where relname = 'record' and n_tup_upd > 400";
        lock_tests::place::eventually("the statistics are there", async || {
            let rows = admin.query(share, &[]).await.unwrap();
            rows.first().is_some_and(|row| row.get::<_, i64>(0) >= 95)
        })
        .await;
    })
    .await;
}

#[tokio::test]
async fn old_records_are_removed_and_others_stay() {
    in_time(async {
        let (url, locks, admin) = client_of_new_database().await;
        let guard = held(&locks, "held").await;
        once(locks.exclusive("free")).await.unwrap();
        let many = "insert into lock_runtime.record \
            select 'lock:old:' || i, 1, 0, 0, 1, '' from generate_series(1, 2500) i";
        admin.batch_execute(many).await.unwrap();
        let mut locking = postgres::connect(&url).await;
        let locking = locking.transaction().await.unwrap();
        let lock = "select from lock_runtime.record where name = 'lock:old:7' for update";
        locking.execute(lock, &[]).await.unwrap();
        let options = lock_runtime::PostgresOptions::default();
        let connect =
            lock_runtime::store::postgres::PostgresRecords::connect(&url, "lock", options);
        let records = connect.await.unwrap();
        assert_eq!(records.remove_old().await.unwrap(), 2499);
        locking.rollback().await.unwrap();
        let left = "select count(*) from lock_runtime.record \
            where name in ('lock:held', 'lock:free', 'lock:old:7')";
        assert_eq!(number(&admin, left).await, 3);
        guard.verify().await.unwrap();
        assert_eq!(records.remove_old().await.unwrap(), 1);
    })
    .await;
}
