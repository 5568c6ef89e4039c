//! The time between a decision and its execution, in each reply.

use super::{
    super::outcome::{Outcome, Passed},
    *,
};
use crate::{
    request::key::LockKey,
    store::{
        AcquireAllReply, AcquireReply, ConvertReply, Grant, Holder, HolderId, Identity, Inspection,
        PollReply, ReleaseReply, RenewReply,
    },
};

fn shortened<T: Outcome>(mut outcome: T) -> T {
    outcome.shorten(Passed {
        at_least: SECOND,
        at_most: SECOND * 2,
    });
    outcome
}

#[test]
fn a_lease_in_a_reply_is_shorter_by_the_longest_time_that_may_have_passed() {
    let left = LEASE - SECOND * 2;
    let grant = |ttl| Grant::new(FencingToken::LAST, ttl);
    assert_eq!(shortened(Some(LEASE)), Some(left));
    assert_eq!(shortened(vec![LEASE, SECOND]), [left, Duration::ZERO]);
    assert_eq!(shortened(grant(LEASE)), grant(left));
    let granted = |ttl| AcquireReply::Granted(grant(ttl));
    assert_eq!(shortened(granted(LEASE)), granted(left));
    let granted = |ttl| AcquireAllReply::Granted(vec![grant(ttl)]);
    assert_eq!(shortened(granted(LEASE)), granted(left));
    let granted = |ttl| PollReply::Granted(grant(ttl));
    assert_eq!(shortened(granted(LEASE)), granted(left));
    let passed = |ttl| ReleaseReply::Passed(grant(ttl));
    assert_eq!(shortened(passed(LEASE)), passed(left));
    let converted = |ttl| ConvertReply::Converted(grant(ttl));
    assert_eq!(shortened(converted(LEASE)), converted(left));
    let renewed = |ttl| RenewReply::Renewed { ttl };
    assert_eq!(shortened(renewed(LEASE)), renewed(left));
    let inspected = |ttl| {
        let (key, token) = (LockKey::new("a").unwrap(), Token::from_bytes([1; 16]));
        let client = Identity::unnamed(token.client());
        let id = HolderId::of(&key, token, false);
        Inspection {
            holders: vec![Holder::new(id, Mode::Exclusive, Some(ttl), client)],
            ..Inspection::default()
        }
    };
    assert_eq!(shortened(inspected(LEASE)), inspected(left));
}

/// It would ask again while the lock is still held.
#[test]
fn the_lease_that_a_client_waits_for_is_shorter_by_the_time_that_has_certainly_passed() {
    let left = LEASE - SECOND;
    let busy = |ttl| AcquireReply::Busy {
        holder_ttl: Some(ttl),
        has_waiters: false,
    };
    assert_eq!(shortened(busy(LEASE)), busy(left));
    let refused = |ttl| AcquireAllReply::Refused {
        index: 0,
        reply: busy(ttl),
    };
    assert_eq!(shortened(refused(LEASE)), refused(left));
    let queued = |ttl| AcquireReply::Queued {
        counter: None,
        holder_ttl: Some(ttl),
    };
    assert_eq!(shortened(queued(LEASE)), queued(left));
    let queued = |ttl| PollReply::Queued {
        counter: None,
        holder_ttl: Some(ttl),
    };
    assert_eq!(shortened(queued(LEASE)), queued(left));
    let queued = |ttl| ReleaseReply::Queued {
        counter: None,
        holder_ttl: Some(ttl),
    };
    assert_eq!(shortened(queued(LEASE)), queued(left));
}
