//! The return value of a locked function, and the release of its lock before it returns.

use std::{
    convert::Infallible,
    error::Error,
    fmt, io,
    sync::{Mutex, OnceLock},
};

use lock_runtime::{
    HeldLock, LockClient, LockError, LockErrorKind, LockKey, Loss, distributed_lock,
};
use tokio::task::yield_now;

use super::{holders, with_client};

#[derive(Debug)]
enum PayError {
    Lock(LockError),
    Declined,
}

impl From<LockError> for PayError {
    fn from(error: LockError) -> Self {
        Self::Lock(error)
    }
}

#[distributed_lock(key = "a", global, no_wait)]
async fn own_error(decline: bool) -> Result<u8, PayError> {
    if decline {
        return Err(PayError::Declined);
    }
    yield_now().await;
    Ok(1)
}

#[distributed_lock(key = "a", global, no_wait)]
async fn io_error() -> io::Result<()> {
    Ok(())
}

#[distributed_lock(key = "a", global, wait = "10ms")]
async fn io_error_after_a_wait() -> io::Result<()> {
    Ok(())
}

#[distributed_lock(key = "a", global, no_wait)]
async fn boxed_error() -> Result<(), Box<dyn Error + Send + Sync>> {
    Err("as it likes".into())
}

#[distributed_lock(key = "a", global)]
async fn opaque() -> Result<impl fmt::Display, LockError> {
    Ok("hidden")
}

#[distributed_lock(key = "a", global)]
async fn never() -> Result<Infallible, LockError> {
    loop {
        yield_now().await;
    }
}

#[distributed_lock(key = "a", global, no_wait)]
async fn question_mark(text: &str) -> Result<u32, Box<dyn Error + Send + Sync>> {
    let number: u32 = text.parse()?;
    Ok(number + 1)
}

#[tokio::test(start_paused = true)]
async fn a_lock_error_becomes_the_functions_own() {
    with_client(async |locks| {
        assert_eq!(own_error(false).await.unwrap(), 1);
        assert!(matches!(own_error(true).await, Err(PayError::Declined)));
        assert_eq!(opaque().await.unwrap().to_string(), "hidden");
        assert_eq!(question_mark("1").await.unwrap(), 2);
        assert!(question_mark("x").await.is_err());
        assert_eq!(boxed_error().await.unwrap_err().to_string(), "as it likes");
        assert_eq!(holders(locks, "a").await, 0, "an early return releases too");

        let _guard = locks.exclusive("a").acquire().await.unwrap();
        let Err(PayError::Lock(error)) = own_error(false).await else {
            panic!("no lock error, but the lock is held")
        };
        assert_eq!(error.kind(), LockErrorKind::Contended);
        let error = io_error().await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        assert!(
            error
                .get_ref()
                .unwrap()
                .downcast_ref::<LockError>()
                .is_some(),
            "the cause is kept"
        );
        assert_eq!(
            io_error_after_a_wait().await.unwrap_err().kind(),
            io::ErrorKind::TimedOut
        );
        assert!(
            boxed_error()
                .await
                .unwrap_err()
                .downcast::<LockError>()
                .is_ok()
        );
    })
    .await;
}

#[distributed_lock(keys = names)]
async fn of_several(names: [&str; 2]) -> Result<(), LockError> {
    Ok(())
}

#[tokio::test]
async fn without_a_client_it_says_how_to_install_one() {
    // No test of this process installs a client.
    let Err(PayError::Lock(error)) = own_error(false).await else {
        panic!("a client was found, but none was installed")
    };
    assert_eq!(
        (error.kind(), error.code()),
        (LockErrorKind::NoClient, "no_client")
    );
    // The proposed code keeps the client that `connect` returns, as `shutdown` needs it.
    let words = [
        "returns::own_error`",
        "let locks = LockClient::connect(",
        "locks.install()?",
        "shutdown().await",
    ];
    for word in words.into_iter().chain(["client = "]) {
        assert!(error.to_string().contains(word), "{error}");
    }
    assert!(
        !error.to_string().contains("connect(url).await?.install()"),
        "{error}"
    );
    assert_eq!(error.key().map(LockKey::as_str), Some("a"));
    let error = of_several(["b", "a"]).await.unwrap_err();
    assert!(
        error.to_string().contains("returns::of_several`"),
        "{error}"
    );
    assert_eq!(error.key().map(LockKey::as_str), Some("a"));
}

#[tokio::test(start_paused = true)]
async fn a_spawned_task_does_not_inherit_the_scope() {
    with_client(async |_| {
        let spawned = tokio::spawn(own_error(false)).await.unwrap();
        assert!(
            matches!(spawned, Err(PayError::Lock(error)) if error.kind() == LockErrorKind::NoClient)
        );
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn the_innermost_scope_is_used() {
    with_client(async |outer: &LockClient| {
        let inner = LockClient::in_memory();
        let _guard = outer.exclusive("a").acquire().await.unwrap();
        inner
            .as_default(own_error(false))
            .await
            .expect("the lock of the inner client is free");
        assert!(own_error(false).await.is_err());
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn the_lock_is_given_back_before_the_function_returns() {
    with_client(async |locks| {
        for _ in 0..20 {
            own_error(false).await.unwrap();
            locks
                .exclusive("a")
                .try_acquire()
                .await
                .unwrap()
                .expect("the lock was released")
                .release()
                .await
                .unwrap();
        }
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_body_is_cancelled_when_its_lock_is_lost() {
    with_client(async |locks| {
        let revoke = async {
            yield_now().await;
            locks.revoke("a").await.unwrap();
        };
        let (lost, ()) = tokio::join!(never(), revoke);
        assert_eq!(lost.unwrap_err().kind(), LockErrorKind::Lost(Loss::Revoked));
        own_error(false).await.unwrap();
    })
    .await;
}

/// Records its drop.
struct Argument<'a>(&'a Mutex<Vec<&'static str>>, &'static str);

impl Drop for Argument<'_> {
    fn drop(&mut self) {
        self.0.lock().unwrap().push(self.1);
    }
}

#[distributed_lock(key = "a", global)]
async fn owning(used: Argument<'_>, _unused: Argument<'_>) -> Result<(), LockError> {
    let _used = &used;
    yield_now().await;
    Ok(())
}

/// Records its drop, and whether the lock was still held.
struct Watched<'a> {
    name: &'static str,
    lock: &'a OnceLock<HeldLock>,
    drops: &'a Mutex<Vec<(&'static str, bool)>>,
}

impl Drop for Watched<'_> {
    fn drop(&mut self) {
        let held = self
            .lock
            .get()
            .is_some_and(|lock| !lock.validity().is_zero());
        self.drops.lock().unwrap().push((self.name, held));
    }
}

struct Transaction<'a> {
    id: u64,
    connection: Watched<'a>,
    log: Watched<'a>,
}

#[distributed_lock(key = "a", global, held = lock)]
async fn using_parts(
    transaction: Transaction<'_>,
    (copied, _): (u64, Watched<'_>),
    late: Watched<'_>,
) -> Result<u64, LockError> {
    transaction.connection.lock.set(lock.clone()).unwrap();
    let _name = late.name;
    yield_now().await;
    Ok(transaction.id + copied)
}

#[tokio::test(start_paused = true)]
async fn what_the_body_uses_is_dropped_whole_before_the_lock_is_free() {
    with_client(async |_| {
        let (lock, drops) = (OnceLock::new(), Mutex::new(Vec::new()));
        let watched = |name| Watched {
            name,
            lock: &lock,
            drops: &drops,
        };
        let transaction = Transaction {
            id: 1,
            connection: watched("connection"),
            log: watched("log"),
        };
        let _unused = &transaction.log;
        assert_eq!(
            using_parts(transaction, (1, watched("unnamed")), watched("late"))
                .await
                .unwrap(),
            2
        );
        let mut drops = drops.into_inner().unwrap();
        drops.sort_unstable();
        assert_eq!(
            drops,
            [
                ("connection", true),
                ("late", true),
                ("log", true),
                ("unnamed", false)
            ]
        );
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_dropped_call_drops_the_body_and_frees_the_lock() {
    with_client(async |locks| {
        let drops = Mutex::new(Vec::new());
        {
            let call = owning(Argument(&drops, "used"), Argument(&drops, "unused"));
            let call = lock_tests::place::begun(call).await;
            assert_eq!(holders(locks, "a").await, 1);
            assert!(drops.lock().unwrap().is_empty());
            drop(call);
        }
        assert_eq!(drops.lock().unwrap().len(), 2);
        locks
            .exclusive("a")
            .acquire()
            .await
            .unwrap()
            .release()
            .await
            .unwrap();
    })
    .await;
}
