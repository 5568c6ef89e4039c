//! Stories that chance has told, and that are told here again, each in a few words.

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

/// A campaign at five servers, told of answers at once.
struct Told {
    campaign: Campaign,
    now: Instant,
}

impl Told {
    fn new() -> Self {
        let (Ok(key), now) = (LockKey::new("a"), Instant::now()) else {
            panic!("the key is right")
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

    /// Hears what each of those says who were asked.
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

/// The line node votes for it, and the others keep the lock for another one for a moment longer.
#[test]
fn the_head_of_the_line_asks_again_when_the_votes_of_others_end() {
    let soon = Duration::from_millis(2);
    let mut told = Told::new();
    let calls = told
        .campaign
        .acquire(IfBusy::Queue, Some(0), true, told.deadline(), told.now);
    told.hears(calls, |_| granted());
    let others = told.asks();
    let queued = |holder_ttl| {
        Heard::Acquire(AcquireReply::Queued {
            counter: None,
            holder_ttl: Some(holder_ttl),
        })
    };
    told.hears(others, |node| queued(if node < 3 { soon } else { LEASE }));
    let next = told.next();
    // Two of them are needed for a majority.
    assert!(
        matches!(next, Next::Done(Outcome::InLine { holder_ttl: Some(ttl) }) if ttl == soon),
        "{next:?}"
    );
}

/// The head of the line holds two of five servers and waits at the others. The line node loses its data, so it stands at the end of
/// the line there, and looks round after a while.
#[test]
fn whoever_looks_round_forgets_nothing_that_is_kept_for_it() {
    let mut told = Told::new();
    let calls = told
        .campaign
        .acquire(IfBusy::Queue, Some(0), true, told.deadline(), told.now);
    told.hears(calls, |_| granted());
    let others = told.asks();
    told.hears(others, |node| if node == 1 { granted() } else { queued() });
    told.waits();

    let calls = told.campaign.poll(told.deadline(), told.now);
    told.hears(calls, |node| match node {
        0 => Heard::Renew(RenewReply::Gone),
        1 => Heard::Renew(RenewReply::Renewed { ttl: LEASE }),
        _ => Heard::Poll(PollReply::Queued {
            counter: None,
            holder_ttl: Some(LEASE),
        }),
    });
    assert_eq!(
        told.campaign.take_left().len(),
        1,
        "a name that is gone is given up (PROTOCOL 9)"
    );
    told.waits();
    let calls = told.campaign.poll(told.deadline(), told.now);
    told.hears(calls, |node| {
        if node == 0 {
            queued()
        } else {
            Heard::Failed(StoreError::timed_out(LEASE))
        }
    });
    let next = told.next();
    assert!(matches!(next, Next::Done(Outcome::Unreachable)), "{next:?}");

    told.now += Duration::from_secs(1);
    let calls = told.campaign.poll(told.deadline(), told.now);
    assert!(matches!(calls[..], [(0, Say::Poll(_))]), "{calls:?}");
    told.hears(calls, |_| {
        Heard::Poll(PollReply::Queued {
            counter: None,
            holder_ttl: Some(LEASE),
        })
    });
    let known: Vec<_> = told.campaign.known().collect();
    let calls = told.asks();
    // Asked for anew, and refused or not reached, it would be believed to keep nothing.
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
    told.hears(calls, |_| {
        Heard::Failed(StoreError::timed_out(LEASE).with_unsent(true))
    });
    told.waits();
    let left: Vec<_> = told
        .campaign
        .take_left()
        .iter()
        .map(|left| (left.node, left.token))
        .collect();
    assert_eq!(
        left,
        known[1..],
        "all that is not in the line is given back"
    );
}
