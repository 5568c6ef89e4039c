//! The checks of a storm detect a broken lock, and report nothing otherwise.

use std::{
    iter,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use lock_runtime::{
    FencingToken, LockClient, LockKey, LockKind,
    store::{MemoryStore, QuorumMember as _},
};
use lock_tests::{
    Delays,
    place::LONG,
    storm::{Grant, History, Violation},
};
use tokio::time::sleep;

use super::{
    Storm,
    fault::{Fault, Out},
    report::Report,
    worker::Key,
};

const BRIEF: Duration = Duration::from_millis(500);

/// A history of grants as (asked, granted, token), in milliseconds.
fn history(zero: Instant, grants: &[(u64, u64, u64)]) -> History {
    let mut history = History::default();
    for (asked, granted, token) in grants {
        let at = |millis: &u64| zero + Duration::from_millis(*millis);
        history.add(Grant {
            asked_at: at(asked),
            granted_at: at(granted),
            token: *token,
        });
    }
    history
}

#[test]
fn violations_allow_growing_fences_in_any_request_order() {
    for grants in [
        &[(0, 1, 1), (2, 3, 2), (3, 5, 7)][..],
        // Both requests were made before either grant, and the replies crossed.
        &[(0, 10, 2), (5, 11, 1)],
        // The second request was made at the time of the first grant.
        &[(0, 10, 2), (10, 11, 1)],
        // A request that has waited for long may get a smaller token than a later one.
        &[(0, 20, 1), (5, 10, 2)],
    ] {
        assert_eq!(history(Instant::now(), grants).violations(), []);
    }
}

#[test]
fn a_token_that_goes_back_or_is_given_twice_is_noticed() {
    let back = |grants: &[_]| history(Instant::now(), grants).violations();
    assert_eq!(
        back(&[(0, 1, 2), (2, 3, 1)]),
        [Violation::Back {
            earlier: 2,
            later: 1
        }]
    );
    // Regardless of the time in between, and of the order in which the grants were recorded.
    let grants = [(8, 9, 4), (0, 1, 5), (2, 3, 6), (4, 5, 7)];
    assert_eq!(
        back(&grants),
        [Violation::Back {
            earlier: 7,
            later: 4
        }]
    );
    assert_eq!(back(&[(0, 10, 3), (5, 11, 3)]), [Violation::Twice(3)]);
    assert_eq!(back(&[(0, 1, 3), (5, 11, 3)]), [Violation::Twice(3)]);
}

#[test]
fn longest_gap_counts_from_the_fault_in_which_it_begins() {
    let zero = Instant::now();
    let at = |millis| zero + Duration::from_millis(millis);
    let history = history(zero, &[(0, 90, 1), (0, 110, 2), (0, 400, 3), (0, 450, 4)]);
    let gap = |fault, next: Option<u64>, end| {
        history
            .longest_gap(at(fault), next.map(at), at(end), |gap| gap.end - gap.start)
            .as_millis()
    };
    assert_eq!(gap(100, None, 500), 290);
    assert_eq!(gap(100, Some(300), 500), 290, "it is seen to its end");
    assert_eq!(
        gap(300, None, 500),
        100,
        "and counts from the next fault for that one"
    );
    assert_eq!(
        gap(420, None, 1000),
        550,
        "a gap without an end counts to the end"
    );
    assert_eq!(gap(500, None, 700), 200);
}

/// Returns whether an assertion of a report fails.
fn fails(report: &Report, assertion: impl Fn(&Report)) -> bool {
    catch_unwind(AssertUnwindSafe(|| assertion(report))).is_err()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_that_works_passes_with_readers_too() {
    let clients = vec![LockClient::in_memory()];
    let exclusive = Storm::of(clients.clone())
        .tasks(32)
        .round(BRIEF)
        .run(async |_| {})
        .await;
    let shared = Storm::of(clients)
        .tasks(32)
        .keys(1)
        .round(BRIEF)
        .with_readers()
        .run(async |_| {})
        .await;
    for report in [exclusive, shared] {
        report.assert_fenced();
        report.assert_exclusive();
    }
}

/// Two independent stores for the same keys.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_locks_for_one_thing_are_noticed() {
    // With one clock, their tokens would be in order unless two were granted at the same instant.
    let ahead = Arc::new(MemoryStore::new());
    let in_an_hour =
        SystemTime::now().duration_since(UNIX_EPOCH).unwrap() + Duration::from_secs(3600);
    let in_an_hour = FencingToken::new(u64::try_from(in_an_hour.as_micros()).unwrap()).unwrap();
    ahead
        .raise(&LockKey::new("key-0").unwrap(), LockKind::Lock, in_an_hour)
        .await
        .unwrap();
    let clients = vec![LockClient::in_memory(), LockClient::with_store(ahead)];
    let report = Storm::of(clients)
        .tasks(8)
        .round(BRIEF)
        .run(async |_| {})
        .await;
    assert!(fails(&report, Report::assert_fenced), "{report}");
    assert!(fails(&report, Report::assert_exclusive), "{report}");
    assert!(report.overlaps() > 0 && report.refused() > 0, "{report}");
    assert!(
        report.to_string().contains("had been given already"),
        "{report}"
    );
}

#[tokio::test]
async fn an_outage_is_noticed() {
    let locks = LockClient::in_memory();
    let outage = BRIEF / 2;
    let report = Storm::of(vec![locks.clone()])
        .keys(1)
        .round(BRIEF)
        .run(async |faults| {
            faults.begin("a client keeps the lock");
            let guard = locks
                .exclusive("key-0")
                .wait(BRIEF)
                .acquire()
                .await
                .unwrap();
            // A loaded machine adds its own delays, which do not count.
            let (delays, begun) = (Delays::of_tasks(), Instant::now());
            while delays.net(begun..Instant::now()) < outage {
                sleep(outage / 10).await;
            }
            guard.release().await.unwrap();
        });
    let report = report.await;
    report.assert_fenced();
    assert!(
        fails(&report, |report| report.assert_service_within(outage / 2)),
        "{report}"
    );
    report.assert_service_within(LONG);
}

/// The first key has no grant from 100 to 300, and the other none from 300 to 600. Otherwise there
/// is one at least every 100 ms.
#[test]
fn a_gap_counts_where_service_is_promised_alone() {
    let zero = Instant::now();
    let at = |millis| zero + Duration::from_millis(millis);
    let keys = ["one", "other"].map(|name| Key::new(name.to_owned()));
    let grants = [
        &[50, 100, 300, 400, 500, 600, 650][..],
        &[50, 150, 250, 300, 600, 650],
    ];
    for (key, grants) in keys.iter().zip(grants) {
        for &millis in grants {
            key.granted(Grant {
                asked_at: zero,
                granted_at: at(millis),
                token: millis,
            });
        }
    }
    let longest = |faults: &[(u64, Out)]| {
        let fault = |(millis, out): &(u64, Out)| Fault {
            name: String::new(),
            at: at(*millis),
            out: out.clone(),
        };
        let faults = faults.iter().map(fault).collect();
        Report::new(
            zero..at(700),
            faults,
            &keys,
            iter::empty(),
            &Delays::default(),
        )
        .longest_promised_gap()
        .as_millis()
    };
    let out = |key: &str| Out::Some(vec![key.to_owned()]);
    assert_eq!(longest(&[(0, Out::None)]), 300);
    assert_eq!(longest(&[(0, Out::All)]), 0);
    assert_eq!(longest(&[(0, out("other"))]), 200);
    assert_eq!(longest(&[(0, out("one"))]), 300);
    assert_eq!(
        longest(&[(0, Out::None), (290, Out::All)]),
        190,
        "up to the beginning of an outage"
    );
    assert_eq!(
        longest(&[(0, Out::All), (450, Out::None)]),
        150,
        "from the end of an outage"
    );
    assert_eq!(longest(&[(0, out("one")), (320, out("other"))]), 100);
    assert_eq!(
        longest(&[
            (0, Out::None),
            (110, out("one")),
            (280, Out::None),
            (310, out("other"))
        ]),
        100
    );
}

#[tokio::test]
#[should_panic(expected = "no failing server explains this")]
async fn an_error_that_no_failing_server_explains_fails_the_test() {
    let locks = LockClient::in_memory();
    Storm::of(vec![locks.clone()])
        .round(BRIEF)
        .run(async |_| locks.shutdown().await)
        .await;
}
