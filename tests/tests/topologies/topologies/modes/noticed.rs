//! Each check detects its kind of failure, and reports nothing otherwise.

use std::{collections::HashMap, ops::Range, sync::Arc, time::Duration};

use lock_runtime::{
    FencingToken, LockClient, LockKey, LockKind,
    store::{MemoryStore, QuorumMember as _},
};
use lock_tests::storm::{
    Ask, Chronicle, Event, Fault, Gap, HANDOVER, Kind, RECOVERY, Record, TokenViolations, in_nanos,
};

use super::{LEASE, left_over, storm_of};

const MILLI: u64 = 1_000_000;

/// Hand-written records of requests for one key. All times are in milliseconds.
#[derive(Default)]
struct Written {
    records: Vec<(usize, Record)>,
    killed: HashMap<usize, u64>,
    faults: Vec<Fault>,
    process: usize,
    requests: u64,
}

impl Written {
    fn say(&mut self, at: u64, event: Event) {
        self.records.push((
            self.process,
            Record {
                at: at * MILLI,
                request: self.requests,
                event,
            },
        ));
    }

    fn ask_as(&mut self, kind: Kind, keys: &[&str], wait: Option<u64>, at: u64) {
        self.requests += 1;
        let keys = keys.iter().map(|&key| key.to_owned()).collect();
        let (wait, lease) = (wait.map(|wait| wait * MILLI), in_nanos(LEASE));
        self.say(
            at,
            Event::Asked(Ask {
                kind,
                keys,
                wait,
                lease,
                min_hold: 0,
            }),
        );
    }

    /// A request that waits for a second at most, and is granted after a millisecond.
    fn grant(&mut self, kind: Kind, at: u64, fence: u64, validity: u64) {
        self.ask_as(kind, &["a"], Some(1000), at - 1);
        self.say(
            at,
            Event::Granted {
                fences: vec![fence],
                validity: validity * MILLI,
            },
        );
    }

    /// The same, with a release.
    fn hold(&mut self, kind: Kind, time: Range<u64>, fence: u64) {
        self.grant(kind, time.start, fence, time.end);
        self.say(time.end, Event::Leaving);
    }

    fn wait(&mut self, time: Range<u64>) {
        self.ask_as(Kind::Exclusive, &["a"], Some(10_000), time.start);
        self.say(
            time.end,
            Event::Refused {
                code: "wait_timeout".to_owned(),
            },
        );
    }

    fn fault(&mut self, time: Range<u64>, loses: bool) {
        self.faults.push(Fault {
            name: "a fault".to_owned(),
            time: time.start * MILLI..time.end * MILLI,
            loses,
        });
    }

    fn chronicle(self) -> Chronicle {
        Chronicle::new(self.records, self.killed, self.faults, LEASE)
    }
}

fn written(write: impl FnOnce(&mut Written)) -> Chronicle {
    let mut written = Written::default();
    write(&mut written);
    written.chronicle()
}

#[test]
fn holders_in_turn_and_readers_together_are_right() {
    let chronicle = written(|written| {
        written.hold(Kind::Exclusive, 10..20, 1);
        written.hold(Kind::Shared, 20..40, 2);
        written.hold(Kind::Shared, 30..50, 3);
        written.hold(Kind::Permit, 10..100, 1);
        written.hold(Kind::Permit, 20..100, 2);
        written.hold(Kind::Exclusive, 60..70, 9);
    });
    assert_eq!(
        (
            chronicle.token_violations(),
            chronicle.overlaps(),
            chronicle.late_answers()
        ),
        Default::default()
    );
    assert!(chronicle.gaps().iter().all(|gap| gap.length <= HANDOVER));
}

#[test]
fn a_token_that_two_readers_share_or_that_goes_back_is_noticed() {
    for (kind, first, second) in [
        (Kind::Shared, 5, 5),
        (Kind::Shared, 6, 5),
        (Kind::Exclusive, 6, 5),
        (Kind::Permit, 5, 5),
        (Kind::Downgraded, 6, 5),
    ] {
        let chronicle = written(|written| {
            written.hold(Kind::Shared, 10..20, first);
            written.hold(Kind::Permit, 10..20, first);
            written.hold(kind, 30..40, second);
        });
        let TokenViolations {
            shared_by_readers,
            others,
        } = chronicle.token_violations();
        let shared = kind == Kind::Shared && first == second;
        let counts = (usize::from(shared), usize::from(!shared));
        assert_eq!(
            (shared_by_readers.len(), others.len()),
            counts,
            "{kind:?} {second} after {first}"
        );
    }
}

#[test]
fn a_guard_that_enters_with_another_token_is_noticed() {
    let entered = |fence| {
        let chronicle = written(|written| {
            written.grant(Kind::Exclusive, 10, 5, 1000);
            written.say(11, Event::Entered { fence });
        });
        chronicle.token_violations().others.len()
    };
    assert_eq!((entered(5), entered(6)), (0, 1));
}

#[test]
fn claims_that_overlap_are_noticed() {
    let overlaps = |write: &dyn Fn(&mut Written)| written(write).overlaps().len();
    for (one, other) in [
        (Kind::Exclusive, Kind::Exclusive),
        (Kind::Exclusive, Kind::Shared),
        (Kind::Downgraded, Kind::Exclusive),
    ] {
        let meet = |written: &mut Written| {
            written.hold(one, 10..30, 1);
            written.hold(other, 29..40, 2);
        };
        assert_eq!(overlaps(&meet), 1, "{one:?} {other:?}");
    }
    let three_permits = |written: &mut Written| {
        (1..=3).for_each(|permit| written.hold(Kind::Permit, 10 + permit..30, permit))
    };
    assert_eq!(overlaps(&three_permits), 1);
    // An overlap on one of several keys.
    let several = |written: &mut Written| {
        written.ask_as(Kind::Exclusive, &["0", "a"], None, 1);
        written.say(
            2,
            Event::Granted {
                fences: vec![1, 2],
                validity: 1000 * MILLI,
            },
        );
        written.hold(Kind::Shared, 10..20, 3);
    };
    assert_eq!(overlaps(&several), 1);
    // A process that was killed cannot release the lock.
    let killed = |written: &mut Written| {
        written.grant(Kind::Exclusive, 10, 1, 500);
        written.killed.insert(0, 11 * MILLI);
        written.hold(Kind::Exclusive, 400..410, 2);
    };
    assert_eq!(overlaps(&killed), 1);
    // A process that was stopped relied on the lock until the end of its validity.
    let stopped = |written: &mut Written| {
        written.grant(Kind::Exclusive, 10, 1, 500);
        written.say(
            900,
            Event::Lost {
                code: "lost_expired".to_owned(),
                valid_at: 11 * MILLI,
            },
        );
        written.process = 1;
        written.hold(Kind::Exclusive, 400..410, 2);
    };
    assert_eq!(overlaps(&stopped), 1);
}

#[test]
fn overlaps_end_a_claim_with_its_validity_release_or_loss() {
    let next_at = |next: u64, write: &dyn Fn(&mut Written)| {
        let chronicle = written(|written| {
            written.grant(Kind::Exclusive, 10, 1, 500);
            write(written);
            written.process = 1;
            written.hold(Kind::Exclusive, next..2000, 2);
        });
        chronicle.overlaps().len()
    };
    assert_eq!((next_at(509, &|_| {}), next_at(510, &|_| {})), (1, 0));
    let renewed = |written: &mut Written| {
        written.say(
            300,
            Event::Held {
                validity: 500 * MILLI,
            },
        )
    };
    assert_eq!((next_at(799, &renewed), next_at(800, &renewed)), (1, 0));
    let released = |written: &mut Written| written.say(100, Event::Leaving);
    assert_eq!((next_at(99, &released), next_at(100, &released)), (1, 0));
    let taken = |written: &mut Written| {
        written.say(
            60,
            Event::Lost {
                code: "lost_taken".to_owned(),
                valid_at: 50 * MILLI,
            },
        )
    };
    assert_eq!((next_at(49, &taken), next_at(50, &taken)), (1, 0));
}

#[test]
fn an_extension_that_is_none_is_noticed() {
    for (validity, is_short) in [(700, false), (600, true)] {
        let chronicle = written(|written| {
            written.grant(Kind::Exclusive, 10, 1, 500);
            let extended = Event::Extended {
                asked: in_nanos(Duration::from_millis(1000)),
                took: in_nanos(Duration::from_millis(150)),
                validity: in_nanos(Duration::from_millis(validity)),
            };
            written.say(200, extended);
        });
        assert_eq!(!chronicle.short_extensions().is_empty(), is_short);
    }
}

#[test]
fn a_revocation_ends_the_claims_of_its_lock() {
    // The time of the request and of the grant, and the end of the revocation if it was answered.
    for (asked, granted, key, replied, overlaps) in [
        (9, 10, "a", Some(35), 0),
        (9, 10, "b", Some(35), 1),
        (9, 10, "a", None, 0),
        // The grant may have been revoked on its way, unless it was asked for afterwards.
        (20, 40, "a", Some(35), 0),
        (36, 40, "a", Some(35), 1),
    ] {
        let chronicle = written(|written| {
            written.requests += 1;
            let (key, permits) = (key.to_owned(), false);
            written.say(30, Event::Revoking { key, permits });
            if let Some(at) = replied {
                written.say(at, Event::Revoked);
            }
            written.ask_as(Kind::Exclusive, &["a"], Some(1000), asked);
            let (fences, validity) = (vec![1], 100 * MILLI);
            written.say(granted, Event::Granted { fences, validity });
            written.say(100, Event::Leaving);
            written.hold(Kind::Exclusive, 50..60, 2);
        });
        assert_eq!(chronicle.overlaps().len(), overlaps, "{asked}, {replied:?}");
    }
}

#[test]
fn a_loss_of_data_excuses_overlaps_for_a_lease() {
    let lease = in_nanos(LEASE) / MILLI;
    let overlaps = |next: u64, loses: bool| {
        let chronicle = written(|written| {
            written.grant(Kind::Exclusive, 10, 1, 10 * lease);
            written.hold(Kind::Exclusive, next..next + 10, 2);
            written.fault(100..200, loses);
        });
        chronicle.overlaps().len()
    };
    assert_eq!((overlaps(150, true), overlaps(150, false)), (0, 1));
    assert_eq!(
        (overlaps(199 + lease, true), overlaps(200 + lease, true)),
        (0, 1)
    );
}

/// The length of the longest gap, and whether it is longer than allowed.
fn idle(chronicle: &Chronicle) -> (u64, bool) {
    let gap = chronicle.gaps().into_iter().max_by_key(|gap| gap.length);
    gap.map_or(
        (0, false),
        |Gap {
             length, allowed, ..
         }| (in_nanos(length) / MILLI, length > allowed),
    )
}

#[test]
fn a_lock_that_is_free_and_waited_for_is_noticed() {
    let scene = |write: &dyn Fn(&mut Written)| {
        let chronicle = written(|written| {
            written.hold(Kind::Exclusive, 10..100, 1);
            write(written);
            written.process = 3;
            written.hold(Kind::Exclusive, 5000..5010, 9);
        });
        idle(&chronicle)
    };
    assert_eq!(scene(&|_| {}), (1, false), "only the request itself waited");
    assert_eq!(scene(&|written| written.wait(50..300)), (200, false));
    assert_eq!(scene(&|written| written.wait(50..400)), (300, true));
    assert_eq!(
        scene(&|written| written.wait(200..400)),
        (200, false),
        "it counts from the request"
    );
    let relay = |written: &mut Written| {
        (0..4).for_each(|part| written.wait(100 + 100 * part..200 + 100 * part))
    };
    assert_eq!(scene(&relay), (100, false), "of one request");
    let process_stalled = |written: &mut Written| {
        written.wait(50..400);
        written.say(250, Event::Stalled { since: 150 * MILLI });
    };
    assert_eq!(scene(&process_stalled), (200, false));
    let process_was_slow = |written: &mut Written| {
        written.wait(50..400);
        written.say(150, Event::Stalled { since: 130 * MILLI });
        written.say(180, Event::Stalled { since: 161 * MILLI });
        // One look was in time before it.
        written.say(220, Event::Stalled { since: 200 * MILLI });
    };
    assert_eq!(scene(&process_was_slow), (230, false));
    let waiter_killed = |written: &mut Written| {
        written.process = 1;
        written.ask_as(Kind::Shared, &["a"], Some(10_000), 50);
        written.killed.insert(1, 200 * MILLI);
    };
    assert_eq!(scene(&waiter_killed), (100, false));
    let dead_holder = |written: &mut Written| {
        written.process = 1;
        written.grant(Kind::Exclusive, 150, 2, 1000);
        written.process = 0;
        written.wait(50..1500);
    };
    assert_eq!(scene(&dead_holder), (350, true));
}

#[test]
fn a_lock_that_is_never_granted_is_noticed() {
    assert_eq!(idle(&written(|written| written.wait(50..400))), (350, true));
}

#[test]
fn one_free_permit_is_noticed_and_a_reserved_lock_is_not_free() {
    let permits = |held: u64| {
        let chronicle = written(|written| {
            (0..held).for_each(|permit| written.hold(Kind::Permit, 10..2000, 1 + permit));
            written.ask_as(Kind::Permit, &["a"], Some(1000), 100);
            written.say(
                1100,
                Event::Refused {
                    code: "wait_timeout".to_owned(),
                },
            );
        });
        idle(&chronicle)
    };
    assert_eq!((permits(1), permits(2)), ((1000, true), (1, false)));
    let reserved = written(|written| {
        written.hold(Kind::Exclusive, 10..100, 1);
        written.wait(50..400);
        for (_, record) in &mut written.records {
            if let Event::Asked(ask) = &mut record.event {
                ask.min_hold = 300 * MILLI;
            }
        }
    });
    assert_eq!(idle(&reserved), (90, false));
}

#[test]
fn a_fault_explains_a_lease_its_duration_and_the_recovery() {
    let settled = in_nanos(LEASE + RECOVERY) / MILLI;
    let after = |fault: Range<u64>, idle_for: u64| {
        let chronicle = written(|written| {
            written.hold(Kind::Exclusive, 10..10_000, 1);
            written.fault(fault.clone(), false);
            written.wait(50..10_000 + idle_for);
        });
        idle(&chronicle)
    };
    assert_eq!(after(9900..9950, settled), (settled, false));
    assert_eq!(after(9900..9950, settled + 1), (settled + 1, true));
    assert_eq!(
        after(9900..10_050, settled + 50),
        (settled + 50, false),
        "it lasts"
    );
    assert_eq!(after(9900..10_050, settled + 51), (settled + 51, true));
    assert_eq!(after(100..10_000 - settled + 1, 300), (300, false));
    assert_eq!(
        after(100..10_000 - settled, 300),
        (300, true),
        "it is long over"
    );
}

#[test]
fn a_late_answer_is_noticed() {
    let answer = |wait: Option<u64>, took: u64, stalled: u64| {
        let chronicle = written(|written| {
            written.ask_as(Kind::Exclusive, &["a"], wait, 1000);
            written.say(
                1000 + took,
                Event::Refused {
                    code: "unavailable".to_owned(),
                },
            );
            written.say(
                1000 + stalled,
                Event::Stalled {
                    since: 1000 * MILLI,
                },
            );
        });
        chronicle.late_answers().len()
    };
    assert_eq!(
        (answer(Some(200), 700, 0), answer(Some(200), 701, 0)),
        (0, 1)
    );
    // Two calls, each with a time-out of a sixth of the lease.
    assert_eq!((answer(None, 833, 0), answer(None, 834, 0)), (0, 1));
    assert_eq!(
        (answer(Some(200), 800, 100), answer(Some(200), 800, 99)),
        (0, 1),
        "the process was stopped"
    );
}

#[test]
fn a_key_that_is_left_is_noticed() {
    let keys = |keys: &[&str]| keys.iter().map(|&key| key.to_owned()).collect::<Vec<_>>();
    let left = keys(&[
        "ns:a",
        "ns:permits:a",
        "{ns:a}:q",
        "q:ns:{a}",
        "{ns:a}:f",
        "f:ns:{a}",
        "{ns:permits:a}:f",
    ]);
    assert_eq!(left_over(&left), left[..4].iter().collect::<Vec<_>>());
}

/// Two independent stores for the same locks. One has larger fencing tokens.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_stores_for_one_lock_are_noticed() {
    let ahead = Arc::new(MemoryStore::new());
    for kind in [LockKind::Lock, LockKind::Permits] {
        for key in lock_tests::storm::KEYS {
            ahead
                .raise(
                    &LockKey::new(key).unwrap(),
                    kind,
                    FencingToken::new(1 << 62).unwrap(),
                )
                .await
                .unwrap();
        }
    }
    let clients = [LockClient::in_memory(), LockClient::with_store(ahead)];
    let report = storm_of(&clients, Duration::from_millis(500)).await;
    assert!(
        !report.tokens.others.is_empty() && !report.overlaps.is_empty(),
        "{report}"
    );
}

#[test]
fn a_grant_before_the_end_of_min_hold_is_noticed() {
    // The first request is made at 9 ms, leaves at 20 ms, and keeps its lock until 309 ms.
    let early = |first: Kind, second: (Kind, u64), edit: &dyn Fn(&mut Written)| {
        let chronicle = written(|written| {
            written.grant(first, 10, 1, 1000);
            let (_, asked) = &mut written.records[0];
            if let Event::Asked(ask) = &mut asked.event {
                ask.min_hold = 300 * MILLI;
            }
            written.say(20, Event::Leaving);
            edit(written);
            written.hold(second.0, second.1..second.1 + 10, 9);
        });
        chronicle.early().len()
    };
    let (writer, reader, permit) = (Kind::Exclusive, Kind::Shared, Kind::Permit);
    let nothing: &dyn Fn(&mut Written) = &|_| {};
    for (first, second, count) in [
        (writer, (writer, 25), 1),
        (writer, (writer, 308), 1),
        (writer, (writer, 309), 0),
        (writer, (reader, 100), 1),
        (reader, (writer, 100), 1),
        (reader, (reader, 100), 0),
        (permit, (permit, 100), 0),
    ] {
        assert_eq!(
            early(first, second, nothing),
            count,
            "{first:?}, {second:?}"
        );
    }
    // Two permits are used up.
    let another: &dyn Fn(&mut Written) = &|written| written.grant(Kind::Permit, 30, 2, 1000);
    assert_eq!(early(permit, (permit, 100), another), 1);
    // The lock was lost, or the data of the store was.
    let lost: &dyn Fn(&mut Written) = &|written| {
        let code = "lost_revoked".to_owned();
        let valid_at = 15 * MILLI;
        written.say(18, Event::Lost { code, valid_at });
    };
    assert_eq!(early(writer, (writer, 100), lost), 0);
    let loss: &dyn Fn(&mut Written) = &|written| written.fault(30..40, true);
    assert_eq!(early(writer, (writer, 100), loss), 0);
    // A downgraded writer admits readers, and no writer.
    let downgraded: &dyn Fn(&mut Written) = &|written| {
        written.grant(Kind::Downgraded, 21, 2, 1000);
        written.say(30, Event::Leaving);
    };
    assert_eq!(early(writer, (reader, 100), downgraded), 0);
    assert_eq!(early(writer, (writer, 100), downgraded), 1);
    // A waiter is granted the lock when the holder before it leaves.
    let chronicle = written(|written| {
        written.hold(writer, 10..200, 1);
        written.ask_as(writer, &["a"], Some(1000), 20);
        if let Some((_, record)) = written.records.last_mut()
            && let Event::Asked(ask) = &mut record.event
        {
            ask.min_hold = 300 * MILLI;
        }
        let (fences, validity) = (vec![2], 1000 * MILLI);
        written.say(201, Event::Granted { fences, validity });
        written.say(202, Event::Leaving);
        written.hold(writer, 499..510, 3);
    });
    assert_eq!(chronicle.early().len(), 1);
    // A grant that was asked for before a revocation may have been revoked on its way.
    for (asked, count) in [(5, 0), (13, 1)] {
        let chronicle = written(|written| {
            written.requests += 1;
            let (key, permits) = ("a".to_owned(), false);
            written.say(10, Event::Revoking { key, permits });
            written.say(12, Event::Revoked);
            written.hold(writer, 14..20, 1);
            written.ask_as(writer, &["a"], Some(1000), asked);
            if let Some((_, record)) = written.records.last_mut()
                && let Event::Asked(ask) = &mut record.event
            {
                ask.min_hold = 300 * MILLI;
            }
            let (fences, validity) = (vec![2], 1000 * MILLI);
            written.say(21, Event::Granted { fences, validity });
            written.say(22, Event::Leaving);
            written.hold(writer, 30..40, 3);
        });
        assert_eq!(chronicle.early().len(), count, "{asked}");
    }
}
