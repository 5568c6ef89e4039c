//! Requests that wait: their queue, their entry in that of the store, and their polls.

use super::*;

#[test]
fn an_entry_goes_to_the_next_with_the_same_claim() {
    let mut bench = Bench::new();
    let (first, token) = bench.head();
    let (second, reader) = (bench.behind(&WRITER), bench.behind(&READER));
    waits(&bench.reply(first, queued(Some(7))));
    bench.cancel(first);
    assert_eq!(bench.endings(), [], "the second waiter continues with it");
    waits(&bench.resume(second));
    bench.push(Mode::Exclusive, token, 8);
    let mut served = bench.clone();
    let granted = holds(served.resume(second));
    assert_eq!(served.token_of(granted.held), token);

    bench.cancel(second);
    // No waiter continues with it, so it must be abandoned in the store.
    assert_eq!(bench.endings(), [Ended::Abandoned(token)]);
    assert_ne!(asks(&bench.resume(reader)), token);
}

/// Readers of other processes may have larger fencing tokens than a grant that is older than the
/// reader.
#[test]
fn a_reader_polls_for_the_grant_of_an_inherited_entry() {
    let mut bench = Bench::new();
    let (first, _) = bench.asks_for(&READER);
    let token = asks(&bench.reply(first, BUSY));
    waits(&bench.reply(first, queued(Some(7))));
    bench.now += MILLI * 2;
    let second = bench.behind(&READER);
    bench.cancel(first);
    bench.push(Mode::Shared, token, 8);
    assert_eq!(polls(&bench.resume(second)), token);

    // In the queue at a time after its arrival: a later grant is younger than the reader.
    waits(&bench.reply(second, polled_queued(8)));
    bench.push(Mode::Shared, token, 9);
    let granted = holds(bench.resume(second));
    assert_eq!(bench.token_of(granted.held), token);
    assert_eq!(granted.fence.number(), 9);
}

#[test]
fn the_last_to_leave_gives_up_an_entry_that_the_store_knows() {
    for is_known in [false, true] {
        let mut bench = Bench::new();
        let (id, token) = bench.head();
        waits(&bench.reply(id, if is_known { queued(None) } else { BUSY }));
        bench.cancel(id);
        let abandoned = is_known.then_some(Ended::Abandoned(token));
        assert_eq!(bench.endings(), Vec::from_iter(abandoned));
        assert!(bench.is_empty());
    }
}

#[test]
fn release_during_a_request_is_seen_without_a_store_queue() {
    let mut bench = Bench::new();
    let (id, token) = bench.head();
    bench.freed();
    waits(&bench.resume(id));
    let second = asks(&bench.reply(id, BUSY));
    bench.woken.clear();

    waits(&bench.reply(id, BUSY));
    waits(&bench.resume(id));
    assert_eq!(bench.woken, []);
    bench.freed();
    assert_eq!(bench.woken, [id]);
    // Rule 1: with several servers, some may have granted the first attempt and not have
    // received its abandon yet.
    assert!(token != second && second != asks(&bench.resume(id)));
}

#[test]
fn without_events_the_first_polls_follow_soon() {
    let mut bench = Bench::new();
    bench.polls = true;
    let (id, token) = bench.head();
    let mut pauses = Vec::new();
    let mut step = bench.reply(id, queued(Some(7)));
    for _ in 0..8 {
        let at = waits(&step);
        pauses.push(at - bench.now);
        bench.now = at;
        assert_eq!(polls(&bench.resume(id)), token);
        step = bench.reply(id, polled_queued(7));
    }
    // At half of the spread.
    let expected = [20, 40, 80, 160, 320, 640, 1000, 1000].map(|pause| MILLI * pause * 7 / 8);
    assert_eq!(pauses, expected);
}

#[test]
fn queued_waiter_is_notified_and_polls_once_a_second() {
    let mut bench = Bench::new();
    let (id, _) = bench.head();
    waits(&bench.reply(id, queued(Some(7))));
    bench.freed();
    let pause = waits(&bench.resume(id)) - bench.now;
    assert!(pause >= Duration::from_millis(750), "{pause:?}");
    assert!(pause <= Duration::from_secs(1), "{pause:?}");
    bench.event(&StoreEvent::Disconnected);
    assert_eq!(bench.endings(), []);
    bench.now += ASK_WITHIN;
    polls(&bench.resume(id));
}

#[test]
fn poll_goes_on_until_the_head_can_be_served_without_it() {
    let mut bench = Bench::new();
    let (id, token) = bench.head();
    let next = waits(&bench.reply(id, queued(Some(7))));
    bench.now = next;
    polls(&bench.resume(id));
    // The poll may be on the broken connection. It fails by itself, and is repeated after a pause.
    bench.event(&StoreEvent::Disconnected);
    bench.freed();
    assert!(bench.woken.contains(&id));
    waits(&bench.resume(id));
    let pause = waits(&bench.no_reply(id)) - bench.now;
    assert!(pause >= MILLI, "{pause:?}");
    bench.now += pause;
    polls(&bench.resume(id));
    // The reply may be older than the broken connection, which may have delivered a grant since.
    bench.event(&StoreEvent::Disconnected);
    let next = waits(&bench.reply(id, polled_queued(7)));
    assert!(next <= bench.now + ASK_WITHIN, "{:?}", next - bench.now);
    bench.now = next;
    polls(&bench.resume(id));
    bench.push(Mode::Exclusive, token, 8);
    holds(bench.resume(id));
}

/// A result answers those that had come before the call: a later one may come after it was
/// forgotten.
#[test]
fn a_result_answers_the_waiters_that_had_come_before_the_call() {
    let mut bench = Bench::new();
    bench.now += MILLI;
    let before = {
        let (first, _) = bench.head();
        let second = bench.behind(&WRITER);
        bench.cancel(first);
        bench.now += MILLI;
        // It calls as the head, after this one had come.
        let third = bench.behind(&WRITER);
        bench.now += MILLI;
        asks(&bench.resume(second));
        [second, third]
    };
    bench.now += MILLI;
    let after = bench.behind(&WRITER);
    bench.woken.clear();
    let id = HolderId::of(&key(), Token::random(), true);
    let done = Arc::new(Done::new(b"one".to_vec(), fence(7).unwrap(), 1, id));
    let reply = Reply::Acquire(AcquireReply::Done(done.clone()));
    let is_done = |step: &Step| matches!(step, Step::Done(Err(Refused::Done(it))) if *it == done);
    assert!(is_done(&bench.reply(before[0], reply)));
    assert!(bench.woken.contains(&before[1]));
    assert!(is_done(&bench.resume(before[1])));
    // One that came before the call, and whose thread was late.
    bench.now -= 3 * MILLI;
    let (_, step) = bench.begin(&WRITER).unwrap();
    assert!(is_done(&step), "{step:?}");
    bench.now += 3 * MILLI;
    // It asks for itself.
    asks(&bench.resume(after));
}

#[test]
fn pause_between_requests_grows_and_ends_with_the_lease() {
    let mut bench = Bench::new();
    bench.entropy.1 = 1.0;
    let now = bench.now;
    bench.input(|_, cx| {
        let mut entry = QueueEntry::new(Claim::of(&WRITER), cx);
        let mut last = Duration::ZERO;
        for _ in 0..30 {
            entry.refused(Some(LEASE), cx);
            let pause = entry.ask_at - now;
            assert!(pause >= last && pause <= LONGEST_PAUSE);
            last = pause;
        }
        assert_eq!(last, LONGEST_PAUSE);
        entry.refused(Some(MILLI * 7), cx);
        assert_eq!(entry.ask_at - now, MILLI * 8);
        entry.queued(now, None, Some(MILLI * 7), cx);
        assert_eq!(entry.ask_at - now, MILLI * 8);
    });
}

#[test]
fn a_request_that_had_to_wait_was_contended() {
    let was_contended = |act: &dyn Fn(&mut Bench, AcquireId) -> Option<Step>| {
        let mut bench = Bench::new();
        let (id, _) = bench.head();
        if let Some(step) = act(&mut bench, id) {
            asks(&step);
        }
        holds(bench.reply(id, granted(8))).contended
    };
    assert!(!was_contended(&|_, _| None), "free at the first attempt");
    let no_reply = |bench: &mut Bench, id| {
        bench.now = waits(&bench.no_reply(id));
        Some(bench.resume(id))
    };
    assert!(!was_contended(&no_reply), "no reply is no contention");
    assert!(was_contended(&|bench, id| {
        waits(&bench.reply(id, BUSY));
        bench.freed();
        Some(bench.resume(id))
    }));
    assert!(was_contended(&|bench, id| {
        bench.now = waits(&bench.reply(id, queued(None)));
        polls(&bench.resume(id));
        Some(bench.reply(id, Reply::Poll(PollReply::Gone)))
    }));
    // Handed off before the first reply.
    let mut bench = Bench::new();
    let (id, _) = bench.head();
    let held = bench.holds(4, LEASE);
    assert!(bench.hands_off(held));
    assert!(holds(bench.no_reply(id)).contended);
    // Behind a waiter that left before it was granted the lock.
    let mut bench = Bench::new();
    let (first, _) = bench.head();
    let second = bench.behind(&WRITER);
    bench.cancel(first);
    bench.now = waits(&bench.resume(second));
    asks(&bench.resume(second));
    assert!(holds(bench.reply(second, granted(8))).contended);
}

#[test]
fn closing_wakes_every_waiter() {
    let mut bench = Bench::new();
    let (head, _) = bench.head();
    let waiting = bench.behind(&WRITER);
    waits(&bench.reply(head, queued(Some(7))));
    assert_eq!(bench.woken, []);
    bench.input(|session, cx| session.close(cx));
    bench.woken.sort_unstable();
    assert_eq!(bench.woken, [head, waiting]);
    for id in [waiting, head] {
        let step = bench.resume(id);
        assert!(matches!(step, Step::Done(Err(Refused::ShuttingDown))));
    }
    let begun = bench.begin(&WRITER);
    assert!(matches!(begun, Err(Refused::ShuttingDown)));
    assert!(bench.is_empty());
}

#[test]
fn a_waiter_is_counted_once_in_whatever_way_it_leaves() {
    let mut bench = Bench::with_limits(10, 3);
    let impatient = writer(|it| it.max_waiters = 0);
    let (other, _) = bench.begin_for(&named("other"), &WRITER).unwrap();
    let (head, _) = bench.head();
    let waiting = bench.behind(&WRITER);
    assert!(matches!(bench.begin(&WRITER), Err(Refused::FullInAll)));
    let begun = bench.begin_for(&named("free"), &impatient);
    assert!(matches!(begun, Err(Refused::FullInAll)));
    // A refused request leaves no queue behind.
    assert_eq!(bench.session.queues.len(), 2);
    assert_eq!(bench.session.by_key[LockKind::Lock as usize].len(), 2);
    assert_eq!(bench.session.acquisitions.len(), 3);
    // From the middle, from an end, and after a grant.
    bench.cancel(waiting);
    assert!(matches!(bench.begin(&impatient), Err(Refused::Full)));
    assert_eq!(bench.session.waiting, 2);
    holds(bench.reply(head, granted(8)));
    assert_eq!(bench.session.waiting, 1);
    bench.input(|session, cx| session.close(cx));
    bench.cancel(other);
    assert_eq!(bench.session.waiting, 0);
    assert!(bench.is_empty());
}

/// A store that cannot be reached may confirm an abandonment at once, as nothing was sent to it.
#[test]
fn own_abandonments_do_not_shorten_the_pause_of_a_waiter() {
    let mut bench = Bench::new();
    let (id, _) = bench.head();
    let at = waits(&bench.no_reply(id));
    assert!(at > bench.now);
    let (job, _) = bench.due_job().unwrap();
    bench.job_reply(job, Ok(Reply::Abandoned));
    assert_eq!(waits(&bench.resume(id)), at);
    // A refusal shows that the store can be reached: a release makes the next request succeed.
    bench.now = at;
    asks(&bench.resume(id));
    waits(&bench.reply(id, BUSY));
    bench.freed();
    asks(&bench.resume(id));
}

/// A step in the past would let its task spin.
#[test]
fn a_waiter_sleeps_until_it_is_woken_or_its_time_is_over() {
    let mut bench = Bench::new();
    let until = bench.now + LEASE;
    let (head, _) = bench.head();
    let behind = bench.behind(&WRITER);
    assert_eq!(waits(&bench.resume(behind)), until);
    // Its call ends by itself.
    assert_eq!(waits(&bench.resume(head)), bench.now + STRAGGLE);
    bench.now = waits(&bench.reply(head, queued(Some(7))));
    polls(&bench.resume(head));
    assert_eq!(waits(&bench.resume(head)), bench.now + STRAGGLE);
    // The reply to a poll is not awaited by a client that is shut down.
    bench.input(|session, cx| session.close(cx));
    let step = bench.resume(head);
    assert!(matches!(step, Step::Done(Err(Refused::ShuttingDown))));
    assert!(!bench.is_empty(), "one is left");
    bench.resume(behind);
    assert!(bench.is_empty());
}

#[test]
fn the_log_shows_once_what_a_request_waits_for() {
    let mut bench = Bench::new();
    let (head, _) = bench.head();
    assert_eq!(bench.noted("Behind"), 0);
    bench.behind(&WRITER);
    assert_eq!(bench.noted("Behind"), 1);
    for _ in 0..3 {
        bench.now = waits(&bench.reply(head, BUSY));
        assert_eq!(bench.noted("Waiting"), 1);
        asks(&bench.resume(head));
    }
}

#[test]
fn a_lock_of_another_mode_refuses_every_request() {
    for terms in [WRITER, READER, writer(|it| it.wait = Wait::No)] {
        let mut bench = Bench::new();
        let (id, _) = bench.asks_for(&terms);
        let step = bench.reply(id, Reply::Acquire(AcquireReply::ModeMismatch));
        let is_refused = matches!(step, Step::Done(Err(Refused::ModeMismatch)));
        assert!(is_refused, "{step:?}");
        assert_eq!(bench.endings(), []);
        assert!(bench.is_empty());
    }
}

/// So that a grant that was pushed has validity left.
#[test]
fn a_waiter_with_a_short_lease_polls_at_least_every_half_of_it() {
    let mut bench = Bench::new();
    let (id, _) = bench.asks_for(&writer(|it| it.lease = Duration::from_secs(1)));
    let at = waits(&bench.reply(id, queued(Some(7))));
    // At half of the spread.
    assert_eq!(at - bench.now, MILLI * 500 * 7 / 8);
}

/// A waiting writer of another process is delayed by one group of readers at most (rule 16).
#[test]
fn readers_that_waited_together_are_admitted_together() {
    let mut bench = Bench::new();
    let (first, _) = bench.asks_for(&READER);
    let token = asks(&bench.reply(first, BUSY));
    let second = bench.behind(&READER);
    bench.is_granted(first, 7);
    // These two come after a reader of the first group was admitted.
    let [third, fourth] = [(); 2].map(|()| bench.behind(&READER));
    let mut groups = Vec::new();
    for (number, id) in [(8, second), (9, third), (10, fourth)] {
        let step = bench.resume(id);
        groups.push((request(&step).reader_group, asks(&step)));
        bench.is_granted(id, number);
    }
    let [(of_second, _), (of_third, third), (of_fourth, _)] = groups[..] else {
        panic!("{groups:?}")
    };
    assert_eq!(of_second, Some(token));
    assert_eq!(of_third, None);
    assert_eq!(of_fourth, Some(third));
}

/// The holder excludes it; another reader may not.
#[test]
fn a_request_that_does_not_wait_makes_no_call_beside_a_writer_of_its_process() {
    for (terms, is_refused) in [(WRITER, true), (READER, false)] {
        let mut bench = Bench::new();
        let (id, step) = bench.begin(&terms).unwrap();
        asks(&step);
        if terms.mode == Mode::Shared {
            asks(&bench.reply(id, BUSY));
        }
        bench.behind(&terms);
        bench.is_granted(id, 7);
        match bench.begin(&Terms {
            wait: Wait::No,
            ..terms
        }) {
            Err(Refused::Contended(None)) => assert!(is_refused),
            Ok((_, step)) => {
                assert!(!is_refused);
                asks(&step);
            }
            begun => panic!("{begun:?}"),
        }
    }
}

proptest! {
    /// Requests arrive and leave in any order: heads follow one another in the order of arrival,
    /// the next head is woken, no request beyond the limits is admitted, and nothing is left at
    /// the end.
    #[test]
    fn first_come_first_served(steps in proptest::collection::vec((any::<bool>(), any::<prop::sample::Index>(), any::<bool>()), 1..200)) {
        const LIMIT: usize = 8;
        let others = usize::from(steps.len() % 2 == 0) * 5;
        let mut bench = Bench::with_limits(LIMIT, LIMIT + 4);
        let others: Vec<_> = (0..others).map(|number| {
            bench.begin_for(&named(&number.to_string()), &WRITER).unwrap().0
        }).collect();
        let mut line: Vec<AcquireId> = Vec::new();
        for (comes, leaver, resumes) in steps {
            if comes {
                match bench.begin(&WRITER) {
                    Ok((id, step)) => {
                        // Only a request that arrives at an empty queue is its head.
                        prop_assert_eq!(matches!(step, Step::Call(_)), line.is_empty());
                        prop_assert_eq!(matches!(step, Step::Wait(_)), !line.is_empty());
                        line.push(id);
                    }
                    Err(Refused::Full) => prop_assert_eq!(line.len(), LIMIT + 1),
                    Err(refused) => {
                        prop_assert!(matches!(refused, Refused::FullInAll));
                        prop_assert_eq!(line.len(), LIMIT + 4 - others.len());
                    }
                }
            } else if !line.is_empty() {
                let index = leaver.index(line.len());
                bench.cancel(line.remove(index));
                let next: Vec<_> = line.first().filter(|_| index == 0).copied().into_iter().collect();
                prop_assert_eq!(&bench.woken, &next);
            }
            prop_assert!(bench.woken.iter().all(|id| Some(id) == line.first()));
            bench.woken.clear();
            let queue = bench.session.queue_of(LockKind::Lock, &key());
            prop_assert_eq!(queue.and_then(|queue| queue.head), line.first().copied());
            for id in line.iter().skip(1).filter(|_| resumes) {
                waits(&bench.resume(*id));
            }
            let contended = |id: &AcquireId| bench.session.acquisitions[*id].contended;
            prop_assert!(line.iter().skip(1).all(contended));
        }
        prop_assert_eq!(bench.session.waiting, line.len() + others.len());
        prop_assert_eq!(order(&mut bench), line.clone());
        for id in line.into_iter().chain(others) {
            bench.cancel(id);
        }
        prop_assert!(bench.is_empty());
    }
}

/// The requests in the queue of the lock, from its head to its end.
fn order(bench: &mut Bench) -> Vec<AcquireId> {
    let queue = bench.session.queue_of(LockKind::Lock, &key());
    let head = queue.and_then(|queue| queue.head);
    let next = |id: &AcquireId| bench.session.acquisitions[*id].next;
    std::iter::successors(head, next).collect()
}
