//! Locks that stay with the client after their release.

use super::super::*;
use crate::store::RETAINED;

const RETAINED_REPLY: Reply = Reply::Acquire(AcquireReply::Retained { holder_ttl: None });

fn retaining() -> Terms {
    writer(|it| it.retain = Some(LEASE))
}

impl Bench {
    /// Holds a lock that is to be retained.
    fn holds_for_long(&mut self) -> HeldId {
        let (id, step) = self.begin(&retaining()).unwrap();
        assert!(asks(&step).retains());
        assert_eq!(request(&step).reserved, RETAINED);
        holds(self.reply(id, granted_with(100, RETAINED))).held
    }

    fn is_wanted(&mut self, token: Token) {
        self.event(&StoreEvent::Wanted { key: key(), token });
    }
}

#[test]
fn lock_is_used_again_under_the_next_token_until_its_numbers_are_used_up() {
    let mut bench = Bench::new();
    let mut held = bench.holds_for_long();
    for number in 101..=100 + u64::from(RETAINED) {
        assert!(bench.hands_off(held));
        let (_, step) = bench.begin(&retaining()).unwrap();
        let granted = holds(step);
        assert_eq!(
            (granted.fence.number(), granted.source),
            (number, Source::Retained)
        );
        held = granted.held;
    }
    assert!(!bench.hands_off(held), "no number is left");
}

/// The reply to a request may be on its way when the holder leaves. No message about the request
/// will come, as the store sends none to the client of the holder.
#[test]
fn request_in_flight_ends_the_retention_that_began_meanwhile() {
    let mut bench = Bench::new();
    let held = bench.holds_for_long();
    let token = bench.token_of(held);
    let (reader, step) = bench.begin(&READER).unwrap();
    asks(&step);
    assert!(bench.hands_off(held));
    asks(&bench.reply(reader, BUSY));
    assert_eq!(bench.endings(), [Ended::Released(token)]);

    let mut bench = Bench::new();
    let held = bench.holds_for_long();
    let (other, _) = bench.begin(&writer(|it| it.wait = Wait::No)).unwrap();
    assert!(bench.hands_off(held));
    let granted = holds(bench.reply(other, RETAINED_REPLY));
    assert_eq!(granted.source, Source::Retained);
}

#[test]
fn lock_that_is_wanted_while_it_is_used_is_released_at_its_end_however_late() {
    for (later, is_of_holder) in [(MILLI, true), (700 * MILLI, true), (MILLI, false)] {
        let mut bench = Bench::new();
        let held = bench.holds_for_long();
        let token = bench.token_of(held);
        let wanted = if is_of_holder { token } else { Token::random() };
        bench.is_wanted(wanted);
        bench.now += later;
        assert_eq!(bench.hands_off(held), !is_of_holder, "{later:?}");
        assert_eq!(bench.endings(), [], "no job");
        let (_, step) = bench.begin(&retaining()).unwrap();
        assert_eq!(matches!(step, Step::Done(_)), !is_of_holder);
    }
}

#[test]
fn idle_lock_is_released_for_another_client_once_and_is_not_retained_for_a_while() {
    let mut bench = Bench::new();
    let held = bench.holds_for_long();
    let token = bench.token_of(held);
    assert!(bench.hands_off(held));
    bench.is_wanted(Token::random());
    assert_eq!(bench.endings(), [], "of an earlier hold");
    bench.is_wanted(token);
    bench.is_wanted(token);
    assert_eq!(bench.endings(), [Ended::Released(token)]);
    let mut pause = 500 * MILLI;
    for _ in 0..3 {
        let (id, step) = bench.begin(&retaining()).unwrap();
        assert!(!asks(&step).retains());
        bench.cancel(id);
        bench.endings();
        bench.now += pause;
        let held = bench.holds_for_long();
        let token = bench.token_of(held);
        bench.is_wanted(token);
        assert!(!bench.hands_off(held));
        pause *= 2;
    }
}

#[test]
fn request_that_does_not_wait_is_refused_by_a_holder_of_its_own_client_at_once() {
    let mut bench = Bench::new();
    bench.holds_for_long();
    let (other, _) = bench.begin(&writer(|it| it.wait = Wait::No)).unwrap();
    let step = bench.reply(other, RETAINED_REPLY);
    assert!(
        matches!(step, Step::Done(Err(Refused::Contended(None)))),
        "{step:?}"
    );
}

#[test]
fn request_that_does_not_wait_is_contended_if_the_holder_does_not_give_way() {
    let mut bench = Bench::new();
    let (id, _) = bench.begin(&writer(|it| it.wait = Wait::No)).unwrap();
    asks(&bench.reply(id, RETAINED_REPLY));
    waits(&bench.reply(id, queued(Some(7))));
    bench.now += 51 * MILLI;
    let step = bench.resume(id);
    assert!(
        matches!(step, Step::Done(Err(Refused::Contended(_)))),
        "{step:?}"
    );
}

#[test]
fn client_that_is_gone_retains_nothing() {
    let mut bench = Bench::new();
    let held = bench.holds_for_long();
    bench.input(|session, cx| session.orphan(cx));
    assert!(!bench.hands_off(held));
}

/// Permits have names of their own.
#[test]
fn idle_lock_stays_when_a_permit_of_the_same_name_is_granted() {
    let mut bench = Bench::new();
    let held = bench.holds_for_long();
    assert!(bench.hands_off(held));
    let permits = writer(|it| it.mode = Mode::Permits(std::num::NonZeroU32::MIN));
    let (permit, _) = bench.begin(&permits).unwrap();
    holds(bench.reply(permit, granted(7)));
    assert_eq!(bench.endings(), []);
    let (_, step) = bench.begin(&retaining()).unwrap();
    assert_eq!(holds(step).source, Source::Retained);
}
