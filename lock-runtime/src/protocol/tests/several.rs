//! Requests for several keys.

use super::*;

/// A request for several keys that does not wait.
fn begun<const KEYS: usize>(
    bench: &mut Bench,
    keys: [&str; KEYS],
) -> (Terms, Together, Vec<KeyRequest>) {
    let terms = writer(|it| it.wait = Wait::No);
    let times = (bench.now, terms.patience(KEYS));
    let keys = keys.map(named);
    let begun = bench.input(|session, cx| session.begin_all(&keys, &terms, times, cx));
    let (together, requests) = begun.unwrap();
    (terms, together, requests)
}

/// Of several keys one was granted too late: no lock is held, renewed or reserved.
#[test]
fn keys_that_were_granted_beside_one_that_came_too_late_are_released() {
    let mut bench = Bench::new();
    let keys = ["a", "b"].map(named);
    let terms = writer(|it| (it.wait, it.min_hold) = (Wait::No, Some(LEASE)));
    let times = (bench.now, terms.call_timeout());
    let begun = bench.input(|session, cx| session.begin_all(&keys, &terms, times, cx));
    let (together, _) = begun.unwrap();
    let grants = [(7, LEASE), (8, Duration::ZERO)];
    let grants = grants.map(|(number, ttl)| Grant::new(fence(number).unwrap(), ttl));
    let reply = Ok(AcquireAllReply::Granted(grants.to_vec()));
    let step = bench.input(|session, cx| session.all_replied(&together, reply, cx));
    assert!(matches!(step, AllStep::Done(Err(_))), "{step:?}");
    assert!(bench.session.held.is_empty());
    let mut ended = Vec::new();
    while let Some((job, call)) = bench.due_job() {
        match call.request {
            Request::Release(release) => {
                assert_eq!(release.keep_for, None);
                ended.push(release.hold.key);
                bench.job_reply(job, Ok(Reply::Release(ReleaseReply::Released)));
            }
            Request::Abandon(hold) => {
                ended.push(hold.key);
                bench.job_reply(job, Ok(Reply::Abandoned));
            }
            request => panic!("{request:?}"),
        }
    }
    ended.sort();
    assert_eq!(ended, keys);
}

/// A store that grants fewer keys than were requested breaks its contract: no lock is held.
#[test]
fn several_keys_of_which_a_store_grants_fewer_are_abandoned() {
    let mut bench = Bench::new();
    let (terms, together, _) = begun(&mut bench, ["a", "b"]);
    bench.now += terms.patience(2);
    let reply = Ok(AcquireAllReply::Granted(vec![grant(7)]));
    let step = bench.input(|session, cx| session.all_replied(&together, reply, cx));
    assert!(matches!(step, AllStep::Done(Err(_))), "{step:?}");
    assert!(bench.session.held.is_empty());
    assert_eq!(bench.endings().len(), 2);
}

/// The refusal of several keys is that of the key which is held, whatever its place.
#[test]
fn several_keys_are_refused_by_the_one_that_is_held() {
    for held in 0..3 {
        let mut bench = Bench::new();
        let (_, together, _) = begun(&mut bench, ["a", "b", "c"]);
        let reply = AcquireReply::Busy {
            holder_ttl: Some(LEASE),
            has_waiters: false,
        };
        let reply = Ok(AcquireAllReply::Refused { index: held, reply });
        let step = bench.input(|session, cx| session.all_replied(&together, reply, cx));
        let AllStep::Done(Err((index, refused))) = step else {
            panic!("{step:?}")
        };
        assert_eq!(index, held);
        assert!(
            matches!(refused, Refused::Contended(Some(_))),
            "{held}: {refused:?}"
        );
    }
}

/// The error of a store that acquires one key after the other names the key that was reached.
#[test]
fn an_error_of_several_keys_names_the_key_that_was_reached() {
    let mut bench = Bench::new();
    let (terms, together, _) = begun(&mut bench, ["a", "b", "c"]);
    assert_eq!(terms.patience(3), terms.call_timeout() * 3);
    bench.now += terms.patience(3);
    let reply = Err(StoreError::out_of_turn(1, 3));
    let step = bench.input(|session, cx| session.all_replied(&together, reply, cx));
    let is_named = matches!(step, AllStep::Done(Err((1, Refused::Store(_)))));
    assert!(is_named, "{step:?}");
    assert_eq!(bench.endings().len(), 3, "every token is abandoned");
}

/// A request for several keys that came too late is repeated as a whole.
#[test]
fn several_keys_that_came_too_late_are_requested_again() {
    let mut bench = Bench::new();
    let (_, together, first) = begun(&mut bench, ["a", "b"]);
    let too_late = |bench: &mut Bench| {
        let (index, reply) = (1, AcquireReply::Late);
        let reply = Ok(AcquireAllReply::Refused { index, reply });
        bench.input(|session, cx| session.all_replied(&together, reply, cx))
    };
    let AllStep::Call(second) = too_late(&mut bench) else {
        panic!("it is early")
    };
    assert_eq!(second.len(), 2);
    assert_ne!(first[0].hold.token, second[0].hold.token);
    let step = too_late(&mut bench);
    let is_refused = matches!(step, AllStep::Done(Err((1, Refused::Store(_)))));
    assert!(is_refused, "{step:?}");
    assert!(bench.session.rest().is_none());
}

/// The first attempt had an error at another key than that which refuses the second one.
#[test]
fn the_error_of_the_first_attempt_names_the_key_that_it_had_reached() {
    let mut bench = Bench::new();
    let (_, together, _) = begun(&mut bench, ["a", "b", "c"]);
    let reply = Err(StoreError::out_of_turn(1, 3));
    let step = bench.input(|session, cx| session.all_replied(&together, reply, cx));
    assert!(matches!(step, AllStep::Call(_)), "{step:?}");
    let reply = AcquireReply::Busy {
        holder_ttl: None,
        has_waiters: false,
    };
    let reply = Ok(AcquireAllReply::Refused { index: 0, reply });
    let step = bench.input(|session, cx| session.all_replied(&together, reply, cx));
    let is_named = matches!(step, AllStep::Done(Err((1, Refused::Store(_)))));
    assert!(is_named, "{step:?}");
}

/// A store that breaks its contract: no lock is held.
#[test]
fn a_refusal_of_several_keys_holds_none_whatever_the_store_says() {
    let busy = AcquireReply::Busy {
        holder_ttl: Some(LEASE),
        has_waiters: false,
    };
    for (index, reply) in [(7, busy), (0, AcquireReply::Granted(grant(7)))] {
        let mut bench = Bench::new();
        let (_, together, _) = begun(&mut bench, ["a", "b"]);
        let reply = Ok(AcquireAllReply::Refused { index, reply });
        let step = bench.input(|session, cx| session.all_replied(&together, reply, cx));
        // There is no key beyond the last one.
        let is_last = matches!(step, AllStep::Done(Err((1, Refused::Contended(_)))));
        assert!(is_last, "{step:?}");
        assert!(bench.session.held.is_empty() && bench.session.acquisitions.is_empty());
    }
}

#[test]
fn several_keys_of_which_one_is_not_even_requested_leave_nothing_behind() {
    let mut bench = Bench::new();
    let (id, _) = bench.begin_for(&named("b"), &WRITER).unwrap();
    waits(&bench.reply(id, BUSY));
    let (keys, times) = (["a", "b"].map(named), (bench.now, LEASE));
    let terms = writer(|it| it.wait = Wait::No);
    let begun = bench.input(|session, cx| session.begin_all(&keys, &terms, times, cx));
    assert!(
        matches!(begun, Err((1, Refused::Contended(None)))),
        "{begun:?}"
    );
    assert_eq!(bench.session.acquisitions.len(), 1);
    assert_eq!(bench.endings(), []);
}

#[test]
fn several_keys_that_are_given_up_are_abandoned() {
    let mut bench = Bench::new();
    let (_, together, requests) = begun(&mut bench, ["a", "b"]);
    bench.input(|session, cx| session.cancel_all(&together, cx));
    assert!(bench.session.acquisitions.is_empty());
    let mut tokens: Vec<_> = requests.iter().map(|it| it.hold.token).collect();
    tokens.sort_unstable();
    let mut ended = bench.endings();
    ended.sort_unstable_by_key(|it| match it {
        Ended::Released(token) | Ended::Abandoned(token) => *token,
    });
    let tokens: Vec<_> = tokens.into_iter().map(Ended::Abandoned).collect();
    assert_eq!(ended, tokens);
}
