//! Many requests for one key, many keys, and keys made to do harm.

use std::time::Instant;

use lock_runtime::LockErrorKind;
use lock_tests::{
    RedisServer,
    place::{in_time, times_as_long},
};
use tokio::task::JoinSet;

use super::{Work, clients};

/// The number of requests at once.
const REQUESTS: usize = 10_000;
/// The number of keys whose memory is measured.
const KEYS: usize = 2_000;
/// A result as of a payment.
const RESULT: &[u8; 100] = &[b'x'; 100];
/// The memory of a key on the server, with its result and its fencing token.
const MOST_BYTES: usize = 800;

// Rule 43 of docs/PROTOCOL.md.
#[tokio::test(flavor = "multi_thread")]
async fn ten_thousand_requests_at_once_run_the_work_once() {
    let (_server, clients) = clients().await;
    let work = Work::default();
    let since = Instant::now();
    let mut requests = JoinSet::new();
    for number in 0..REQUESTS {
        let (work, locks) = (work.clone(), clients[number % 2].clone());
        requests.spawn(async move { work.charge(&locks, "invoice:42").await.unwrap() });
    }
    let answers = in_time(requests.join_all()).await;
    println!("{REQUESTS} requests took {:?}", since.elapsed());
    assert_eq!(work.runs(), 1);
    let fresh = answers.iter().filter(|it| !it.is_replay).count();
    assert_eq!((answers.len(), fresh), (REQUESTS, 1));
    assert!(answers.iter().all(|answer| answer.value == "receipt 0"));
    let seen = clients[0].inspect("invoice:42").await.unwrap();
    assert!(seen.waiters.is_empty(), "{seen:?}");
}

async fn used_memory(server: &RedisServer) -> usize {
    let info: String = server.query(&["INFO", "memory"]).await;
    let mut lines = info.lines();
    let used = lines.find_map(|line| line.strip_prefix("used_memory:"));
    used.unwrap().parse().unwrap()
}

/// `LOCK_TESTS_STORM=500` measures a million keys, as the guide states them.
#[tokio::test(flavor = "multi_thread")]
async fn a_key_that_is_done_takes_little_memory() {
    let (server, clients) = clients().await;
    // The scripts and the first connections are no part of it.
    clients[0]
        .once("first")
        .run_bytes(async |_| Ok::<_, LockErrorKind>(vec![]))
        .await
        .unwrap()
        .unwrap();
    let before = used_memory(&server).await;
    let keys = KEYS * times_as_long();
    let mut tasks = JoinSet::new();
    for task in 0..50 {
        let locks = clients[task % 2].clone();
        tasks.spawn(async move {
            for number in (task..keys).step_by(50) {
                let once = locks.once(format!(
                    "pay:{number:07}:8e03978e-40d5-43e8-bc93-6894a57f9324"
                ));
                let ran = once.run_bytes(async |_| Ok::<_, LockErrorKind>(RESULT.to_vec()));
                assert!(!ran.await.unwrap().unwrap().is_replay);
            }
        });
    }
    in_time(tasks.join_all()).await;
    let each = (used_memory(&server).await - before) / keys;
    println!("{keys} keys take {each} bytes each");
    assert!(each < MOST_BYTES, "{each} bytes");
}

/// No name of a key lets a request see the result of another one.
#[tokio::test]
async fn results_of_keys_made_to_do_harm_stay_apart() {
    let (_server, [locks, other]) = clients().await;
    let long = "k".repeat(512);
    let names = [
        "job",
        "job ",
        " job",
        "JOB",
        "{job}",
        "job.kept",
        "job.done",
        "f:lock:job",
        "lock:job",
        "q:lock:job",
        "job:q",
        "{lock:job}:q",
        "job*",
        "job?",
        "job[a]",
        "job\\",
        "job\"",
        "job'",
        "job$(id)",
        "%6aob",
        "jób",
        "jo\u{301}b",
        "job\u{200b}",
        "\u{202e}job",
        "1",
        "-1",
        "0x1",
        "nil",
        &long,
        &long[1..],
    ];
    for (number, name) in names.iter().enumerate() {
        let once = locks.once(*name).no_wait();
        let ran = once.run(async |_| Ok::<_, LockErrorKind>(number)).await;
        let ran = ran
            .unwrap_or_else(|error| panic!("{name:?}: {error}"))
            .unwrap();
        assert!(!ran.is_replay, "{name:?} has the result {ran:?}");
    }
    for (number, name) in names.iter().enumerate() {
        let done = other.once(*name).stored().await.unwrap().unwrap();
        assert_eq!(done.value, number.to_string().into_bytes(), "{name:?}");
    }
    for name in ["", "a\0b", "a\nb", "a\u{7f}b", "a}{b", &"k".repeat(513)] {
        let refused = locks.once(name).begin().await.unwrap_err();
        assert_eq!(refused.kind(), LockErrorKind::InvalidKey, "{name:?}");
        let refused = locks.once(name).stored().await.unwrap_err();
        assert_eq!(refused.kind(), LockErrorKind::InvalidKey, "{name:?}");
    }
}
