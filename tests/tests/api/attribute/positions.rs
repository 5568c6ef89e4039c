//! `#[distributed_lock]` at every position of an async function: each one is compiled, run and
//! checked for mutual exclusion.

mod arguments;
mod attributes;
mod functions;
mod methods;
mod returns;
mod traits;

use std::{
    fmt::Debug,
    sync::atomic::{AtomicU32, Ordering::Relaxed},
};

use lock_runtime::{LockClient, LockKey, is_held};
use tokio::task::yield_now;

use super::with_client;

tokio::task_local! {
    static ROOM: Room;
}

/// A critical section, with counts of the bodies in it.
#[derive(Default)]
struct Room {
    inside: AtomicU32,
    most: AtomicU32,
    visits: AtomicU32,
}

/// The critical section of every body: checks that the body holds the lock `key`, and yields, so
/// that others could enter if the lock did not exclude them.
async fn visit(key: &str) {
    assert!(
        is_held(&LockKey::new(key).unwrap()),
        "the body runs without the lock {key}"
    );
    let inside = ROOM.with(|room| room.inside.fetch_add(1, Relaxed) + 1);
    ROOM.with(|room| room.most.fetch_max(inside, Relaxed));
    for _ in 0..3 {
        yield_now().await;
    }
    ROOM.with(|room| {
        room.inside.fetch_sub(1, Relaxed);
        room.visits.fetch_add(1, Relaxed);
    });
}

/// Checks that `call` runs under the lock `key`: concurrent calls run one after the other, and none
/// runs while another guard holds the lock.
async fn assert_excludes<T, E: Debug>(key: &str, call: impl AsyncFn() -> Result<T, E>) {
    assert_excludes_with(key, async |_| call().await).await;
}

/// The same for a call that names its client.
async fn assert_excludes_with<T, E: Debug>(
    key: &str,
    call: impl AsyncFn(&LockClient) -> Result<T, E>,
) {
    let room = |of: fn(&Room) -> &AtomicU32| ROOM.with(|room| of(room).load(Relaxed));
    let test = async |locks: &LockClient| {
        let together = tokio::join!(call(locks), call(locks), call(locks));
        assert!(
            together.0.is_ok() && together.1.is_ok() && together.2.is_ok(),
            "{key}"
        );
        assert_eq!(
            (room(|room| &room.most), room(|room| &room.visits)),
            (1, 3),
            "{key}"
        );

        let guard = locks.exclusive(key).acquire().await.unwrap();
        assert!(call(locks).await.is_err(), "{key} is held by another guard");
        guard.release().await.unwrap();
        call(locks).await.unwrap();
        assert_eq!(room(|room| &room.visits), 4, "{key}");
    };
    ROOM.scope(Room::default(), with_client(test)).await;
}

/// Whether a value is `Send`.
macro_rules! is_send {
    ($value:expr) => {{
        #[allow(dead_code)]
        struct Probe<'a, T>(&'a T);
        #[allow(dead_code)]
        trait Otherwise {
            fn is_send(&self) -> bool {
                false
            }
        }
        impl<T> Otherwise for Probe<'_, T> {}
        #[allow(dead_code)]
        impl<T: Send> Probe<'_, T> {
            fn is_send(&self) -> bool {
                true
            }
        }
        Probe(&$value).is_send()
    }};
}
use is_send;
