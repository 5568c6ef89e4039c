//! `lock_runtime.guard`: the lock lasts as long as the transaction of its holder.

use std::{fmt::Debug, num::NonZeroU32, pin::pin, time::Duration};

use lock_runtime::{
    FencingToken, LockClient, LockGuard, LockSpec,
    fencing::{self, FencingError},
    operator::Revocation,
};
use lock_tests::{
    place::{LONG, Stopwatch, begun, eventually, in_time},
    postgres,
};
use tokio::time::{sleep, timeout};
use tokio_postgres::{
    Client,
    IsolationLevel::{self, ReadCommitted, RepeatableRead, Serializable},
    Transaction,
};

use super::{client_of_new_database, held, one_waits, waiters};

const KEY: &str = "order:42";
const NAME: &str = "lock:order:42";

/// Longer than a lease of a test, and than a poll of a waiter.
const QUIET: Duration = Duration::from_millis(1500);

/// A lease with room for a few calls, on a busy machine as well.
const BRIEF: Duration = Duration::from_secs(2);

const ISOLATIONS: [IsolationLevel; 3] = [ReadCommitted, RepeatableRead, Serializable];

/// The SQLSTATE of a transaction whose snapshot is older than a change.
const OLD_SNAPSHOT: &str = "40001";

/// Two clients and the connection of the first one.
async fn two() -> (LockClient, LockClient, Client) {
    let (url, one, db) = client_of_new_database().await;
    let other = LockClient::connect(&url).await.unwrap();
    db.batch_execute("create table orders (state text); insert into orders values ('new')")
        .await
        .unwrap();
    (one, other, db)
}

/// Takes a lock whose lease ends soon.
async fn for_a_moment(locks: &LockClient) -> LockGuard {
    let request = locks.exclusive(KEY).lease(LockSpec::MIN_LEASE).no_renew();
    request.acquire().await.unwrap()
}

async fn guarded<'a>(db: &'a mut Client, name: &str, token: FencingToken) -> Transaction<'a> {
    let transaction = db.transaction().await.unwrap();
    guard(&transaction, name, token).await;
    transaction
}

async fn guard(transaction: &Transaction<'_>, name: &str, token: FencingToken) {
    let guarded = fencing::guard_named(transaction, name, token).await;
    guarded.unwrap();
}

async fn begin(db: &mut Client, isolation: IsolationLevel) -> Transaction<'_> {
    let transaction = db.build_transaction().isolation_level(isolation);
    transaction.start().await.unwrap()
}

/// The error of a transaction that asks for the lock with a token that is no longer valid.
async fn refused(transaction: &Transaction<'_>, token: FencingToken) -> FencingError {
    let refused = fencing::guard_named(transaction, NAME, token).await;
    refused.unwrap_err()
}

/// The SQLSTATE of the error, if it is one.
fn code(guarded: Result<(), FencingError>) -> Option<String> {
    let error = tokio_postgres::Error::from(guarded.err()?);
    Some(error.code().unwrap().code().to_owned())
}

/// Asserts that a request waits for the end of an open transaction.
async fn still_waits(waiting: &mut (impl Future<Output: Debug> + Unpin)) {
    let early = timeout(QUIET, waiting).await;
    early.expect_err("the transaction is open");
}

/// Asserts that a lock is renewed after the end of its first lease.
async fn assert_renewed(guard: &LockGuard, lease: Duration) {
    let lost = timeout(lease * 3 / 2, guard.lost()).await;
    lost.expect_err("it is renewed");
}

async fn is_free(locks: &LockClient, key: &str) -> bool {
    locks.exclusive(key).try_acquire().await.unwrap().is_some()
}

async fn set_state(db: &impl tokio_postgres::GenericClient, state: &str) {
    let update = "update orders set state = $1";
    db.execute(update, &[&state]).await.unwrap();
}

async fn state(db: &Client) -> String {
    let row = db.query_one("select state from orders", &[]).await;
    row.unwrap().get(0)
}

#[tokio::test]
async fn a_held_lock_is_guarded_under_its_own_names() {
    in_time(async {
        let (one, other, mut db) = two().await;
        let request = one.all(["a", "b"]).lease(BRIEF).no_renew();
        let guard = request.acquire().await.unwrap();
        let transaction = db.transaction().await.unwrap();
        fencing::guard(&transaction, &guard.held()).await.unwrap();
        guard.lost().await;
        sleep(LockSpec::MIN_LEASE).await;
        for key in ["a", "b"] {
            assert!(!is_free(&other, key).await, "{key}");
        }
        transaction.rollback().await.unwrap();
        for key in ["a", "b"] {
            let granted = other.exclusive(key).wait(LONG).acquire().await;
            granted.unwrap().release().await.unwrap();
        }

        let elsewhere = LockClient::in_memory().exclusive("a").acquire().await;
        let transaction = db.transaction().await.unwrap();
        let refused = fencing::guard(&transaction, &elsewhere.unwrap().held()).await;
        let refused = refused.unwrap_err();
        assert!(!refused.is_stale());
        assert!(format!("{refused:#}").contains("fenced"), "{refused:#}");
        let update = transaction.execute("update orders set state = 'late'", &[]);
        update.await.unwrap_err();
    })
    .await;
}

#[tokio::test]
async fn an_open_transaction_keeps_the_lock_after_its_lease() {
    in_time(async {
        let (one, other, mut db) = two().await;
        let late = for_a_moment(&one).await;
        let transaction = guarded(&mut db, NAME, late.fence()).await;
        late.lost().await;
        let mut waiting = pin!(other.exclusive(KEY).wait(LONG).acquire());
        still_waits(&mut waiting).await;
        assert!(!is_free(&other, KEY).await);
        let both = other.all([KEY, "order:43"]).try_acquire().await;
        assert!(both.unwrap().is_none());
        assert!(other.shared(KEY).try_acquire().await.unwrap().is_none());

        set_state(&transaction, "paid").await;
        transaction.commit().await.unwrap();
        let next = waiting.await.unwrap();
        assert!(next.fence() > late.fence());
        assert_eq!(state(&db).await, "paid");
        next.release().await.unwrap();
        assert_eq!(other.inspect("order:43").await.unwrap().holders, []);
    })
    .await;
}

/// It ends without its client: the server rolls it back, and the lock goes on.
#[tokio::test]
async fn a_lost_connection_ends_the_transaction() {
    in_time(async {
        let (one, other, mut db) = two().await;
        let late = for_a_moment(&one).await;
        let transaction = guarded(&mut db, NAME, late.fence()).await;
        late.lost().await;
        let waiting = begun(other.exclusive(KEY).wait(LONG).acquire()).await;
        waiters(&one, KEY, 1).await;
        drop(transaction);
        drop(db);
        waiting.await.unwrap().release().await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn a_paused_holder_cannot_commit_after_the_next_grant() {
    in_time(async {
        let (one, other, mut db) = two().await;
        for isolation in ISOLATIONS {
            let late = for_a_moment(&one).await;
            // Its transaction has begun before the lock is lost, and has read and written.
            let transaction = begin(&mut db, isolation).await;
            set_state(&transaction, "late").await;
            late.lost().await;
            let next = other.exclusive(KEY).wait(LONG).acquire().await.unwrap();
            let expected = match isolation {
                ReadCommitted => fencing::STALE,
                // The snapshot is older than the grant.
                _ => OLD_SNAPSHOT,
            };
            let found = code(Err(refused(&transaction, late.fence()).await));
            assert_eq!(found.as_deref(), Some(expected), "{isolation:?}");
            transaction.rollback().await.unwrap();

            let transaction = begin(&mut db, isolation).await;
            let refused = refused(&transaction, late.fence()).await;
            assert!(refused.is_stale(), "{isolation:?}: {refused:?}");
            let message = format!("{refused:#}");
            for part in [
                "was refused: the fencing token",
                &late.fence().to_string(),
                NAME,
                "was granted again",
            ] {
                assert!(message.contains(part), "{message}");
            }
            let after = transaction.batch_execute("update orders set state = 'late'");
            assert_eq!(after.await.unwrap_err().code().unwrap().code(), "25P02");
            drop(transaction);
            assert_eq!(state(&db).await, "new");
            next.release().await.unwrap();
        }
    })
    .await;
}

#[tokio::test]
async fn a_lock_is_renewed_during_the_transaction() {
    in_time(async {
        let (one, other, mut db) = two().await;
        let lease = BRIEF;
        let held = one.exclusive(KEY).lease(lease).acquire().await.unwrap();
        for isolation in ISOLATIONS {
            let transaction = begin(&mut db, isolation).await;
            guard(&transaction, NAME, held.fence()).await;
            assert_renewed(&held, lease).await;
            set_state(&transaction, "paid").await;
            transaction.commit().await.unwrap();
        }
        assert!(!is_free(&other, KEY).await);
        held.release().await.unwrap();
    })
    .await;
}

/// Otherwise the token of the last holder would keep a lock for ever that is free.
#[tokio::test]
async fn a_holder_that_has_released_the_lock_or_outlived_its_lease_is_refused() {
    in_time(async {
        let (one, other, mut db) = two().await;
        for isolation in ISOLATIONS {
            let released = one.exclusive(KEY).acquire().await.unwrap();
            let fence = released.fence();
            released.release().await.unwrap();
            refused_as_not_held(&mut db, isolation, fence).await;
            // The reservation is not a hold.
            let reserved = one.exclusive(KEY).min_hold(QUIET).acquire().await.unwrap();
            let fence = reserved.fence();
            reserved.release().await.unwrap();
            refused_as_not_held(&mut db, isolation, fence).await;

            let late = other.exclusive(KEY).lease(LockSpec::MIN_LEASE).no_renew();
            let late = late.wait(LONG).acquire().await.unwrap();
            eventually("the lease has ended", async || {
                one.inspect(KEY).await.unwrap().holders.is_empty()
            })
            .await;
            refused_as_not_held(&mut db, isolation, late.fence()).await;
            // Of readers, each is refused once all have left.
            let (first, second) = (
                one.shared(KEY).acquire().await.unwrap(),
                other.shared(KEY).acquire().await.unwrap(),
            );
            let fence = second.fence();
            second.release().await.unwrap();
            guarded(&mut db, NAME, first.fence()).await;
            first.release().await.unwrap();
            refused_as_not_held(&mut db, isolation, fence).await;
        }
    })
    .await;
}

async fn refused_as_not_held(db: &mut Client, isolation: IsolationLevel, fence: FencingToken) {
    let transaction = begin(db, isolation).await;
    let refused = refused(&transaction, fence).await;
    assert!(refused.is_stale(), "{isolation:?}: {refused:#}");
    let message = format!("{refused:#}");
    let said = "was released, or its lease has ended";
    assert!(message.contains(said), "{message}");
}

/// The lease in the snapshot has ended, but it was renewed.
#[tokio::test]
async fn a_renewal_after_the_snapshot_is_no_loss() {
    in_time(async {
        let (one, _other, mut db) = two().await;
        let lease = BRIEF;
        for isolation in ISOLATIONS {
            let guard = one.exclusive(KEY).lease(lease).acquire().await.unwrap();
            let transaction = begin(&mut db, isolation).await;
            transaction.query("select from orders", &[]).await.unwrap();
            assert_renewed(&guard, lease).await;
            let guarded = fencing::guard_named(&transaction, NAME, guard.fence()).await;
            let expected = match isolation {
                ReadCommitted => None,
                _ => Some(OLD_SNAPSHOT),
            };
            assert_eq!(code(guarded).as_deref(), expected, "{isolation:?}");
            drop(transaction);
            guard.release().await.unwrap();
        }
    })
    .await;
}

/// A record of many waiters, which the server stores out of line, and of many revoked holders.
#[tokio::test]
async fn the_holder_of_a_long_record_is_found() {
    in_time(async {
        let (url, one, mut db) = client_of_new_database().await;
        for _ in 0..10 {
            let _guard = held(&one, KEY).await;
            one.revoke(KEY).also_endless().await.unwrap();
        }
        let guard = held(&one, KEY).await;
        let mut waiting = Vec::new();
        for _ in 0..12 {
            let locks = LockClient::connect(&url).await.unwrap();
            let request = locks.exclusive(KEY).wait(LONG);
            waiting.push(begun(request.acquire()).await);
        }
        waiters(&one, KEY, waiting.len()).await;
        db.batch_execute(
            "alter table lock_runtime.record alter body set storage external; \
             update lock_runtime.record set body = body || decode(repeat('00', 4000), 'hex')",
        )
        .await
        .unwrap();
        guarded(&mut db, NAME, guard.fence()).await;
        // Permits have a number more.
        let permit = one.permits("mailer", NonZeroU32::new(300).unwrap());
        let permit = permit.acquire().await.unwrap();
        guarded(&mut db, "lock:permits:mailer", permit.fence()).await;
    })
    .await;
}

/// A body that no client has written does not make the function loop, and is no success.
#[tokio::test]
async fn a_damaged_record_is_an_error_of_guard() {
    in_time(async {
        let (one, _other, db) = two().await;
        let guard = held(&one, KEY).await;
        for body in [
            "",
            "01",
            "02ffffff",
            "01ffffffffffffffffffffffffffffff",
            "010101ffffffffffffffff7f00",
            "010101ffffffff0f00",
            "0101010000ffffffffffffffff7f",
            "01010100000100",
        ] {
            let damage = format!("update lock_runtime.record set body = '\\x{body}'");
            db.batch_execute(&damage).await.unwrap();
            let call = "select lock_runtime.guard($1, $2)";
            let fence = i64::from(guard.fence());
            let refused = db.execute(call, &[&NAME, &fence]).await.unwrap_err();
            let code = refused.code().unwrap().code();
            let is_told = ["XX001", "2202E", "22003"].contains(&code);
            assert!(is_told, "{body}: {refused:?}");
        }
    })
    .await;
}

/// The grant has the version and the tokens of the next holder, but is not committed yet.
#[tokio::test]
async fn a_grant_in_flight_is_awaited() {
    const GRANT: &str = "select from lock_runtime.record r, lock_runtime.swap(array[r.name], \
        array[r.version], array[r.version + 1], array[r.body], array[r.fence + 1], \
        array[r.fence + 1], array[r.needed_until], 0, true, false, '{}', '{}') s \
        where r.name = $1 and s.outcomes = 'd'";
    in_time(async {
        let (url, one, mut db) = client_of_new_database().await;
        for (isolation, end, refusal) in [
            (ReadCommitted, "commit", Some(fencing::STALE)),
            (RepeatableRead, "commit", Some(OLD_SNAPSHOT)),
            (Serializable, "commit", Some(OLD_SNAPSHOT)),
            (ReadCommitted, "rollback", None),
            (RepeatableRead, "rollback", None),
            (Serializable, "rollback", None),
        ] {
            let guard = held(&one, KEY).await;
            let granting = postgres::connect(&url).await;
            granting.batch_execute("begin").await.unwrap();
            assert_eq!(granting.query(GRANT, &[&NAME]).await.unwrap().len(), 1);

            let transaction = begin(&mut db, isolation).await;
            let guarding = fencing::guard_named(&transaction, NAME, guard.fence());
            let guarding = begun(guarding).await;
            let ended = async {
                one_waits(&granting).await;
                granting.batch_execute(end).await.unwrap();
            };
            let (guarded, ()) = tokio::join!(guarding, ended);
            assert_eq!(code(guarded).as_deref(), refusal, "{isolation:?} {end}");
            drop(transaction);
            // The grant has no holder in its record.
            drop(guard.release().await);
        }
    })
    .await;
}

/// A release during the transaction is a mistake of the caller, which delays the next holder.
#[tokio::test]
async fn a_release_or_revocation_waits_for_no_transaction_and_the_next_holder_does() {
    in_time(async {
        let (one, other, mut db) = two().await;
        for end in ["release", "revocation"] {
            println!("{end}");
            let guard = held(&one, KEY).await;
            let transaction = guarded(&mut db, NAME, guard.fence()).await;
            let mut waiting = begun(other.exclusive(KEY).wait(LONG).acquire()).await;
            waiters(&one, KEY, 1).await;
            let began = Stopwatch::start();
            if end == "release" {
                guard.release().await.expect(end);
                assert!(began.elapsed() < QUIET, "{end}: {:?}", began.elapsed());
            } else {
                other.revoke(KEY).also_endless().await.expect(end);
                guard.lost().await;
            }
            still_waits(&mut waiting).await;
            transaction.commit().await.expect(end);
            let ended = Stopwatch::start();
            waiting.await.expect(end).release().await.expect(end);
            assert!(ended.elapsed() < QUIET, "{end}: {:?}", ended.elapsed());
        }
    })
    .await;
}

/// There is no next holder with whose token it could be compared.
#[tokio::test]
async fn a_revoked_holder_is_refused_before_the_next_grant() {
    in_time(async {
        let (one, other, mut db) = two().await;
        let guard = held(&one, KEY).await;
        let revoked = other.revoke(KEY).also_endless().await;
        assert_eq!(revoked.unwrap(), Revocation::Revoked);
        for isolation in [ReadCommitted, RepeatableRead] {
            let transaction = begin(&mut db, isolation).await;
            let refused = refused(&transaction, guard.fence()).await;
            assert!(refused.is_stale(), "{isolation:?}: {refused:#}");
            let message = format!("{refused:#}");
            assert!(message.contains("was revoked"), "{isolation:?}: {message}");
        }
        let next = held(&other, KEY).await;
        guarded(&mut db, NAME, next.fence()).await;
        next.release().await.unwrap();

        // Readers that stay have valid tokens.
        let _first = one.shared(KEY).acquire().await.unwrap();
        let id = one.inspect(KEY).await.unwrap().holders[0].id;
        let second = other.shared(KEY).acquire().await.unwrap();
        let revoked = other.revoke(KEY).holder(id).await;
        assert_eq!(revoked.unwrap(), Revocation::Revoked);
        guarded(&mut db, NAME, second.fence()).await;
    })
    .await;
}

#[tokio::test]
async fn readers_guard_together_and_keep_a_writer_out() {
    in_time(async {
        let (one, other, mut db) = two().await;
        let brief = |locks: &LockClient| locks.shared(KEY).lease(BRIEF).no_renew().acquire();
        let (first, second) = (brief(&one).await.unwrap(), brief(&other).await.unwrap());
        let transaction = guarded(&mut db, NAME, first.fence()).await;
        guard(&transaction, NAME, second.fence()).await;
        first.lost().await;
        second.lost().await;
        let mut writer = pin!(other.exclusive(KEY).wait(LONG).acquire());
        still_waits(&mut writer).await;
        transaction.commit().await.unwrap();
        let writer = writer.await.unwrap();
        for reader in [&first, &second] {
            let transaction = db.transaction().await.unwrap();
            assert!(refused(&transaction, reader.fence()).await.is_stale());
        }

        // And the other way round.
        let reader = writer.downgrade().await.unwrap();
        let transaction = guarded(&mut db, NAME, reader.fence()).await;
        assert!(!is_free(&one, KEY).await);
        let another = one.shared(KEY).try_acquire().await.unwrap().unwrap();
        guard(&transaction, NAME, another.fence()).await;
        transaction.commit().await.unwrap();
    })
    .await;
}

/// Tasks of one process hand a lock off without the store.
#[tokio::test]
async fn each_holder_of_a_process_has_its_guard() {
    in_time(async {
        let (one, other, mut db) = two().await;
        let mut last = held(&one, KEY).await;
        for _ in 0..20 {
            let next = begun(one.exclusive(KEY).wait(LONG).acquire()).await;
            let transaction = guarded(&mut db, NAME, last.fence()).await;
            transaction.commit().await.unwrap();
            last.release().await.unwrap();
            last = next.await.unwrap();
        }
        let late = last.fence();
        last.release().await.unwrap();
        let next = held(&other, KEY).await;
        let transaction = db.transaction().await.unwrap();
        assert!(refused(&transaction, late).await.is_stale());
        next.release().await.unwrap();
    })
    .await;
}

/// A large table of orders, each with a lock, in a transaction of many locks.
#[tokio::test]
async fn a_transaction_may_guard_several_locks() {
    in_time(async {
        let (one, other, mut db) = two().await;
        let keys: Vec<_> = (0..50).map(|number| format!("order:{number}")).collect();
        let all = one.all(&keys).acquire().await.unwrap();
        let transaction = db.transaction().await.unwrap();
        for (key, fence) in all.fences() {
            guard(&transaction, &format!("lock:{key}"), fence).await;
        }
        all.release().await.unwrap();
        for key in [&keys[0], &keys[49]] {
            assert!(!is_free(&other, key).await);
        }
        transaction.commit().await.unwrap();
        drop(other.all(&keys).wait(LONG).acquire().await.unwrap());
    })
    .await;
}

#[tokio::test]
async fn a_name_or_a_token_that_is_missing_is_no_success() {
    let (one, _other, db) = two().await;
    let guard = held(&one, KEY).await;
    let permit = one.permits("mailer", NonZeroU32::MIN);
    let permit = permit.acquire().await.unwrap();
    let (fence, other) = (guard.fence().into(), permit.fence().into());
    for (name, token, code, word) in [
        (Some(NAME), None, "22004", "needs the name of a lock"),
        (None, Some(1), "22004", "needs the name of a lock"),
        (Some("order:42"), Some(fence), "LK001", "not known here"),
        (Some(NAME), Some(0), "22023", "not a fencing token"),
        (Some(NAME), Some(i64::MAX), "22023", "later than the clock"),
        (Some("lock:mailer"), Some(other), "LK001", "not known here"),
    ] {
        let call = "select lock_runtime.guard($1, $2)";
        let refused = db.execute(call, &[&name, &token]).await.unwrap_err();
        let refused = refused.as_db_error().unwrap();
        assert_eq!(refused.code().code(), code, "{refused:?}");
        assert!(refused.message().contains(word), "{refused:?}");
    }
    guard.verify().await.unwrap();
}

/// The lock and the data are one: transactions that lose the lock change nothing, and the others
/// never overlap.
#[tokio::test]
async fn a_counter_is_exact_while_leases_end_at_random() {
    in_time(async {
        let (url, _, db) = client_of_new_database().await;
        db.batch_execute("create table counter (value bigint); insert into counter values (0)")
            .await
            .unwrap();
        let tasks = (0..6).map(|_| {
            let url = url.clone();
            tokio::spawn(async move {
                let locks = LockClient::connect(&url).await.unwrap();
                let mut db = postgres::connect(&url).await;
                let mut counted = 0;
                for _ in 0..15 {
                    let request = locks.exclusive("counter").lease(LockSpec::MIN_LEASE);
                    let request = request.no_renew().wait(LONG);
                    let guard = request.acquire().await.unwrap();
                    // Some holders are paused until their leases have ended.
                    let pause =
                        rand::random_range(0..3) * LockSpec::MIN_LEASE.as_millis() as u64 / 2;
                    let transaction = db.transaction().await.unwrap();
                    let half = rand::random_range(0..=pause);
                    sleep(Duration::from_millis(half)).await;
                    let name = "lock:counter";
                    let guarded = fencing::guard_named(&transaction, name, guard.fence()).await;
                    if guarded.is_ok() {
                        let read = "select value from counter";
                        let value: i64 = transaction.query_one(read, &[]).await.unwrap().get(0);
                        sleep(Duration::from_millis(pause - half)).await;
                        let write = "update counter set value = $1";
                        transaction.execute(write, &[&(value + 1)]).await.unwrap();
                        transaction.commit().await.unwrap();
                        counted += 1;
                    }
                    drop(guard);
                }
                counted
            })
        });
        let mut counted = 0;
        for task in tasks.collect::<Vec<_>>() {
            counted += task.await.unwrap();
        }
        let value = super::number(&db, "select value from counter").await;
        assert_eq!(value, counted);
        assert!(counted >= 6, "{counted}");
    })
    .await;
}
