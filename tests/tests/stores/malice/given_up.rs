//! Callers that give up many requests at once, such as those that reset their streams.

use std::{pin::pin, time::Duration};

use futures_util::poll;
use lock_tests::place::{LONG, Place, Stopwatch, on_every_store};

/// PostgreSQL takes more than two seconds to end them.
const GIVEN_UP: usize = 10_000;
const BRIEF: Duration = Duration::from_secs(1);

on_every_store! { a_guard_that_is_dropped_frees_its_lock_beside_many_requests_that_were_given_up }

async fn a_guard_that_is_dropped_frees_its_lock_beside_many_requests_that_were_given_up(
    place: Place,
) {
    let (one, two) = (place.client().await, place.client().await);
    let guard = one.exclusive("held").acquire().await.unwrap();
    for number in 0..GIVEN_UP {
        let acquiring = one.exclusive(format!("given up {number}")).lease(BRIEF);
        let mut acquiring = pin!(acquiring.no_wait().acquire());
        let _ = poll!(&mut acquiring);
    }
    let begun = Stopwatch::start();
    drop(guard);
    let _guard = two.exclusive("held").wait(LONG).acquire().await.unwrap();
    let waited = begun.elapsed();
    assert!(waited < Duration::from_millis(1500), "{waited:?}");
    one.shutdown().await;
}
