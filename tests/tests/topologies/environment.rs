//! Invalid input and unusable environments: each is reported by a typed error with the key and the
//! remedy, nothing is lost or overwritten, and no call takes longer than its wait.

use std::{num::NonZeroU32, time::Duration};

use lock_runtime::{LockError, LockErrorKind};
use lock_tests::chain;
use tokio::time::{Instant, timeout};

pub(crate) mod access;
mod connection;
mod foreign;
mod format;
mod groups;
mod input;
mod scripts;
mod servers;
mod shares;
pub(crate) mod tls;

const HOUR: Duration = Duration::from_secs(3600);
/// The extra time for a slow machine.
const SLACK: Duration = Duration::from_secs(5);
/// The time limit for connecting.
const CONNECT: Duration = Duration::from_secs(3);

fn permits(count: u32) -> NonZeroU32 {
    NonZeroU32::new(count).unwrap()
}

/// Returns the output of a future that does not take longer than promised.
async fn within<T>(promised: Duration, future: impl Future<Output = T>) -> T {
    let since = Instant::now();
    let outcome = timeout(promised + SLACK, future).await;
    outcome.unwrap_or_else(|_| {
        panic!(
            "no outcome after {:?}, where {promised:?} is promised",
            since.elapsed()
        )
    })
}

/// Asserts the kind of the error, and that its text contains all these words in one line.
#[track_caller]
fn assert_says(error: &LockError, kind: LockErrorKind, words: &[&str]) {
    assert_eq!(error.kind(), kind, "{error}");
    let text = chain(&error);
    for word in words {
        assert!(text.contains(word), "{word:?} is missing: {text}");
    }
    assert!(!text.contains('\n'), "one line: {text}");
}
