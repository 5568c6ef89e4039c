//! Names that would break statements that were built from them.

use futures_util::TryStreamExt as _;
use lock_runtime::{LockClient, fencing};
use lock_tests::{
    place::{LONG, begun, in_time},
    postgres,
};

use super::{client_of_new_database, held, number, waiters};

const NAMES: [&str; 12] = [
    "'; drop table lock_runtime.record; --",
    "\"lock_runtime\".\"record\"",
    "a'b\"c\\d",
    "\\x00",
    "$1 $$ $install$",
    "100%_off",
    "{a,b}",
    "NULL",
    "é e\u{301} ﬁ \u{200b}",
    "🔒:permits:a",
    "upkeep",
    "a b",
];

#[tokio::test]
async fn hostile_names_are_names() {
    in_time(async {
        let (url, locks, admin) = client_of_new_database().await;
        let other = LockClient::connect(&url).await.unwrap();
        let mut db = postgres::connect(&url).await;
        let longest = "ü'".repeat(170);
        let names = NAMES.into_iter().chain([longest.as_str()]);
        for (index, name) in names.enumerate() {
            let guard = held(&locks, name).await;
            let waiting = begun(other.exclusive(name).wait(LONG).acquire()).await;
            let waiting = tokio::spawn(waiting);
            waiters(&locks, name, 1).await;
            let listed: Vec<_> = locks.list(name).try_collect().await.unwrap();
            assert_eq!(listed.len(), 1, "{listed:?}");
            assert_eq!(listed[0].key.as_str(), name);
            let row = "select count(*) from lock_runtime.record where name = $1";
            let full = format!("lock:{name}");
            let row = admin.query_one(row, &[&full]).await.unwrap();
            assert_eq!(row.get::<_, i64>(0), 1, "{name}");
            let transaction = db.transaction().await.unwrap();
            let guarded = fencing::guard_named(&transaction, &full, guard.fence()).await;
            guarded.unwrap();
            transaction.commit().await.unwrap();
            guard.release().await.unwrap();
            waiting.await.unwrap().unwrap().release().await.unwrap();
            let all = number(&admin, "select count(*) from lock_runtime.record where name like 'lock:%' and name not like E'lock:client\\t%'").await;
            assert_eq!(all, index as i64 + 1, "{name}");
        }
        let listed: Vec<_> = locks.list("\0").try_collect().await.unwrap();
        assert_eq!(listed.len(), 0, "no key contains it, and no text of the server");
    })
    .await;
}

/// The client of a waiter is the channel of its messages, and its name is data.
#[tokio::test]
async fn hostile_names_of_clients_are_shown() {
    in_time(async {
        let (url, ..) = client_of_new_database().await;
        for name in ["'; drop schema lock_runtime; --", "a\"b\\c"] {
            let builder = LockClient::builder().identity(name);
            let locks = builder.connect(&url).await.unwrap();
            let guard = held(&locks, "a").await;
            lock_tests::place::eventually("its name is there", async || {
                let found = locks.inspect("a").await.unwrap();
                found.holders[0].client.to_string() == name
            })
            .await;
            guard.release().await.unwrap();
        }
    })
    .await;
}
