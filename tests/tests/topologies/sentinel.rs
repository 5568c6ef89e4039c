//! Locks on the primary that Sentinels name: the client finds it, a failover keeps the locks or
//! reports their loss, and a grant that the replicas do not have does not count.

use std::time::Duration;

use lock_runtime::{LockClient, LockClientBuilder, LockError, LockErrorKind};
use lock_tests::{RedisServer, SentinelSet, chain, unique};

mod access;
mod failover;
mod fake;
mod finding;
mod replicas;
mod storms;

const HOUR: Duration = Duration::from_secs(3600);

/// The URL of a set, without credentials.
fn url_of(sentinels: &[RedisServer]) -> String {
    url_with(sentinels, "", "")
}

/// The same with `before` in front of the hosts, and `behind` after the name of the primary.
fn url_with(sentinels: &[RedisServer], before: &str, behind: &str) -> String {
    let hosts: Vec<_> = sentinels
        .iter()
        .map(|sentinel| sentinel.addr().to_string())
        .collect();
    format!(
        "redis+sentinel://{before}{}/{}{behind}",
        hosts.join(","),
        SentinelSet::SERVICE
    )
}

/// A client of its own, in a namespace that may be shared.
async fn client(set: &SentinelSet, namespace: &str) -> LockClient {
    builder(namespace)
        .connect(&url_of(set.sentinels()))
        .await
        .unwrap()
}

fn builder(namespace: &str) -> LockClientBuilder {
    LockClient::builder().namespace(namespace)
}

fn namespace() -> String {
    unique("ns")
}

/// Waits until both replicas have all data. A replica that has just started receives nothing for a
/// second, and could be promoted without the data.
async fn copied(set: &SentinelSet) {
    let mut primary = set.master().await.connection().await.unwrap();
    let mut copy = redis::pipe();
    copy.cmd("SET")
        .arg("copied")
        .arg(1)
        .cmd("WAIT")
        .arg(2)
        .arg(10_000);
    let (_, copies): ((), i64) = copy.query_async(&mut primary).await.unwrap();
    assert_eq!(copies, 2);
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
