//! Scenarios that random schedules have found, each reduced to a few steps.

use std::time::Duration;

use tokio::time::Instant;

use crate::{
    fence::FencingToken,
    key::LockKey,
    spec::Mode,
    store::{
        AcquireReply, Grant, Hold, IfBusy, KeyRequest, PollReply, RenewReply, StoreError, Token,
        quorum::campaign::{Calls, Campaign, Heard, Next, Outcome, Patience, Say},
    },
};

const LEASE: Duration = Duration::from_secs(30);

/// A campaign at five servers that gets its replies at once.
struct Case {
    campaign: Campaign,
    now: Instant,
}

impl Case {
    fn new() -> Self {
        let (Ok(key), now) = (LockKey::new("a"), Instant::now()) else {
            panic!("the key is valid")
        };
        let hold = Hold::new(key, Mode::Exclusive, Token::random());
        Self {
            campaign: Campaign::new(
                &KeyRequest::new(hold, LEASE, now),
                5,
                Patience::new(LEASE, 0.5),
                now,
            ),
            now,
        }
    }

    fn deadline(&self) -> Instant {
        self.now + Duration::from_secs(1)
    }

    /// Passes the reply of each server to the campaign.
    fn hears(&mut self, calls: Calls, says: impl Fn(usize) -> Heard) {
        for (node, say) in calls {
            let (Say::Acquire(name, _) | Say::Poll(name) | Say::Renew(name)) = say else {
                panic!("{say:?}")
            };
            self.campaign
                .heard(node, name, self.campaign.round(), says(node), self.now);
        }
    }

    fn next(&mut self) -> Next {
        self.campaign
            .next(self.deadline(), self.now, &|fence| fence.later(1))
    }

    fn asks(&mut self) -> Calls {
        match self.next() {
            Next::Send(calls) => calls,
            other => panic!("{other:?}"),
        }
    }

    fn waits(&mut self) {
        let next = self.next();
        assert!(
            matches!(next, Next::Done(Outcome::InLine { .. })),
            "{next:?}"
        );
    }
}

fn granted() -> Heard {
    let Some(fence) = FencingToken::new(7) else {
        panic!("it is not zero")
    };
    Heard::Acquire(AcquireReply::Granted(Grant::new(fence, LEASE)))
}

fn queued() -> Heard {
    Heard::Acquire(AcquireReply::Queued {
        counter: None,
        holder_ttl: Some(LEASE),
    })
}

/// The coordinator votes for the acquisition, and the other servers hold the lock for another one
/// a moment longer.
#[test]
fn the_head_of_the_line_asks_again_when_the_votes_of_others_end() {
    let soon = Duration::from_millis(2);
    let mut case = Case::new();
    let calls = case
        .campaign
        .acquire(IfBusy::Queue, Some(0), true, case.deadline(), case.now);
    case.hears(calls, |_| granted());
    let others = case.asks();
    let queued = |holder_ttl| {
        Heard::Acquire(AcquireReply::Queued {
            counter: None,
            holder_ttl: Some(holder_ttl),
        })
    };
    case.hears(others, |node| queued(if node < 3 { soon } else { LEASE }));
    let next = case.next();
    // Two of them are needed for a majority.
    assert!(
        matches!(next, Next::Done(Outcome::InLine { holder_ttl: Some(ttl) }) if ttl == soon),
        "{next:?}"
    );
}

/// The head of the queue holds two of five servers and waits at the others. The coordinator
/// loses its data, so the acquisition is at the end of the queue there, and checks the other
/// servers after a while.
#[test]
fn a_check_of_the_other_servers_forgets_nothing_that_they_keep() {
    let mut case = Case::new();
    let calls = case
        .campaign
        .acquire(IfBusy::Queue, Some(0), true, case.deadline(), case.now);
    case.hears(calls, |_| granted());
    let others = case.asks();
    case.hears(others, |node| if node == 1 { granted() } else { queued() });
    case.waits();

    let calls = case.campaign.poll(case.deadline(), case.now);
    case.hears(calls, |node| match node {
        0 => Heard::Renew(RenewReply::Gone),
        1 => Heard::Renew(RenewReply::Renewed { ttl: LEASE }),
        _ => Heard::Poll(PollReply::Queued {
            counter: None,
            holder_ttl: Some(LEASE),
        }),
    });
    assert_eq!(
        case.campaign.take_left().len(),
        1,
        "an alias that is gone is abandoned (PROTOCOL 9)"
    );
    case.waits();
    let calls = case.campaign.poll(case.deadline(), case.now);
    case.hears(calls, |node| {
        if node == 0 {
            queued()
        } else {
            Heard::Failed(StoreError::timed_out(LEASE))
        }
    });
    let next = case.next();
    assert!(matches!(next, Next::Done(Outcome::Unreachable)), "{next:?}");

    case.now += Duration::from_secs(1);
    let calls = case.campaign.poll(case.deadline(), case.now);
    assert!(matches!(calls[..], [(0, Say::Poll(_))]), "{calls:?}");
    case.hears(calls, |_| {
        Heard::Poll(PollReply::Queued {
            counter: None,
            holder_ttl: Some(LEASE),
        })
    });
    let known: Vec<_> = case.campaign.known().collect();
    let calls = case.asks();
    // If they were sent an acquire that was refused or lost, they would be assumed to hold nothing.
    assert!(
        matches!(
            calls[..],
            [
                (1, Say::Renew(_)),
                (2, Say::Poll(_)),
                (3, Say::Poll(_)),
                (4, Say::Poll(_))
            ]
        ),
        "{calls:?}"
    );
    case.hears(calls, |_| {
        Heard::Failed(StoreError::timed_out(LEASE).with_unsent(true))
    });
    case.waits();
    let left: Vec<_> = case
        .campaign
        .take_left()
        .iter()
        .map(|left| (left.node, left.token))
        .collect();
    assert_eq!(
        left,
        known[1..],
        "all that is not in the queue is abandoned"
    );
}
