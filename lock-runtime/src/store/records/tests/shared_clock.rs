//! The clock that the clients of a database advance together, by the instants of one client.

use std::{
    cell::Cell,
    sync::{Arc, Weak},
    time::Duration,
};

use tokio::time::advance;

use super::{
    super::{
        Inbox, Run, Tick, Ticked, Timestamp,
        shared_clock::{Learned, SharedClock, Turn},
    },
    site::Received,
};
use crate::{
    shell::{sync::lock, time::Instant},
    store::StoreErrorKind,
};

/// The first value.
const VALUE: u64 = 1_800_000_000_000_000;

/// Returns the time of the clock this many microseconds after the first value.
fn time(micros: u64) -> Timestamp {
    Timestamp::from_micros(VALUE + micros)
}

/// Returns the times after a call, in microseconds since the first value.
fn learned(now: u64, latest: u64) -> Learned {
    Learned::Time {
        now: time(now),
        latest: time(latest),
    }
}

/// A client, and the instant from which the milliseconds of a test count.
struct Client {
    clock: SharedClock,
    start: Instant,
}

impl Client {
    fn new() -> Self {
        Self {
            clock: SharedClock::new(),
            start: Instant::now(),
        }
    }

    /// Creates a client that has written the first value at the start, with the reply 10 ms later.
    fn first() -> Self {
        let client = Self::new();
        client.starts(10);
        client
    }

    fn at(&self, millis: u64) -> Instant {
        self.start + Duration::from_millis(millis)
    }

    fn turn(&self, millis: u64) -> Turn {
        self.clock.turn(self.at(millis))
    }

    /// Writes the first value at the start.
    fn starts(&self, replied: u64) -> Learned {
        let turn = self.turn(0);
        assert!(matches!(turn.tick, Tick::Start(_)), "{turn:?}");
        self.ended(turn, Some(0), true, replied)
    }

    /// Receives the reply to a call, with the value in microseconds since the first one.
    fn ended(&self, turn: Turn, value: Option<i64>, is_taken: bool, millis: u64) -> Learned {
        let value = value.map(|value| VALUE.saturating_add_signed(value));
        self.clock.ended(turn, value, is_taken, self.at(millis))
    }

    fn heard(&self, value: u64, millis: u64) {
        self.clock.heard_at(VALUE + value, self.at(millis));
    }

    /// Returns the tick, with values in microseconds since the first one.
    fn tick(&self, millis: u64) -> Tick {
        match self.turn(millis).tick {
            Tick::Start(to) => Tick::Start(to - VALUE),
            Tick::Replace { known, to } => Tick::Replace {
                known: known - VALUE,
                to: to - VALUE,
            },
            Tick::Raise(to) => Tick::Raise(to - VALUE),
            Tick::Keep => Tick::Keep,
        }
    }

    /// Returns the time that the clock has reached, in microseconds since the first value.
    fn reached(&self, millis: u64) -> u64 {
        self.turn(millis).reached - VALUE
    }
}

#[test]
fn a_client_counts_from_the_sending_of_its_own_value_if_the_reply_is_prompt() {
    for (replied, now) in [(0, 0), (10, 10), (45, 45), (46, 0), (500, 0)] {
        let client = Client::new();
        // The clocks of others may be 1 % faster, and 250 ms ahead.
        let latest = replied * 1010 + 250_000;
        assert_eq!(client.starts(replied), learned(now * 1000, latest));
        assert_eq!(client.reached(replied + 20), (now + 20) * 1000);
    }
}

#[test]
fn a_client_raises_its_own_value_after_50_ms_and_replaces_it_after_200_ms() {
    let client = Client::first();
    let replaced = Tick::Replace {
        known: 0,
        to: 201_000,
    };
    for (at, tick) in [
        (49, Tick::Keep),
        (50, Tick::Raise(50_000)),
        (200, Tick::Raise(200_000)),
        (201, replaced),
    ] {
        assert_eq!(client.tick(at), tick, "{at}");
    }
    // A reply without a call.
    assert_eq!(client.turn(49).latest, Some(VALUE + 49 * 1010 + 250_000));
}

#[test]
fn a_value_is_kept_for_200_ms_after_it_was_written_at_the_earliest() {
    let client = Client::first();
    client.heard(200_000, 200);
    assert_eq!(client.tick(200), Tick::Keep);
    assert_eq!(client.tick(201), Tick::Raise(201_000));
}

/// The instant at which the value was written is not known.
#[test]
fn a_value_that_others_have_written_is_counted_from_its_arrival() {
    let client = Client::new();
    let turn = client.turn(0);
    assert_eq!(client.ended(turn, Some(0), false, 10), Learned::Again);
    assert_eq!((client.reached(10), client.turn(10).latest), (0, None));
    let replaced = Tick::Replace {
        known: 0,
        to: 201_000,
    };
    for (at, tick) in [
        (10, Tick::Raise(1)),
        (210, Tick::Raise(200_000)),
        (211, replaced),
    ] {
        assert_eq!(client.tick(at), tick, "{at}");
    }
}

/// If others have raised it, their value may be as old as the latest answer.
#[test]
fn a_client_without_an_answer_for_a_second_replaces_a_value_that_it_has_heard_of() {
    let replaced = |known, to| Tick::Replace { known, to };
    let client = Client::new();
    let turn = client.turn(0);
    client.ended(turn, Some(0), false, 10);
    client.heard(900_000, 900);
    assert_eq!(client.tick(1000), Tick::Raise(1_000_000));
    assert_eq!(client.tick(1001), replaced(900_000, 1_001_000));

    // Each answer counts, also one with the value that is known.
    let client = Client::first();
    let turn = client.turn(40);
    assert_eq!(turn.tick, Tick::Keep);
    let kept = client.ended(turn, Some(0), false, 41);
    assert_eq!(kept, learned(41_000, 41 * 1010 + 250_000));
    assert_eq!(client.reached(300), 300_000);
    client.heard(1_030_000, 1030);
    assert_eq!(client.tick(1035), Tick::Raise(1_035_000));
    assert_eq!(client.tick(1041), replaced(1_030_000, 1_041_000));
}

#[test]
fn a_message_with_a_value_that_is_known_changes_nothing() {
    let client = Client::first();
    client.heard(0, 10);
    client.clock.heard_at(VALUE - 1, client.at(20));
    assert_eq!(client.reached(300), 300_000);
}

/// Each value of another client is late by its way.
#[test]
fn the_base_that_is_further_on_counts_for_200_ms() {
    let client = Client::first();
    client.heard(50_000, 100);
    assert_eq!([200, 201].map(|at| client.reached(at)), [200_000, 151_000]);

    let client = Client::first();
    client.heard(150_000, 100);
    assert_eq!(client.reached(110), 160_000);

    // Of two that are equally far on, the later one counts for longer.
    let client = Client::first();
    client.heard(100_000, 100);
    client.heard(120_000, 150);
    assert_eq!(client.reached(250), 250_000);
}

#[test]
fn a_late_reply_takes_no_later_value_back() {
    let client = Client::first();
    let (late, turn) = (client.turn(49), client.turn(60));
    let raised = client.ended(turn, Some(60_000), true, 70);
    assert_eq!(raised, learned(70_000, 60_000 + 10_100 + 250_000));
    let learned = client.ended(late, Some(0), false, 80);
    assert!(matches!(learned, Learned::Time { .. }), "{learned:?}");
    assert_eq!(client.tick(80), Tick::Keep);
    assert_eq!(client.reached(80), 80_000);
    #[cfg(feature = "zookeeper")]
    assert_eq!(client.clock.value(), Some(VALUE + 60_000));
}

#[test]
fn a_call_that_was_not_sent_after_the_value_was_known_shows_no_loss() {
    let client = Client::new();
    let (first, other) = (client.turn(0), client.turn(10));
    client.ended(first, Some(0), true, 10);
    let learned = client.ended(other, Some(-5), false, 11);
    assert_eq!(learned, Learned::Again);
}

#[test]
fn a_clock_whose_value_is_lost_goes_on_from_the_time_that_it_had_reached() {
    let client = Client::first();
    let turn = client.turn(20);
    let smaller = client.ended(turn, Some(-1), false, 30);
    assert_eq!(smaller, Learned::LostData);
    assert_eq!(client.tick(30), Tick::Raise(30_000));
    assert_eq!(client.turn(30).latest, None);
    let turn = client.turn(40);
    assert_eq!(client.ended(turn, None, false, 50), Learned::LostData);
    assert_eq!(client.tick(50), Tick::Start(50_000));
}

#[tokio::test(start_paused = true)]
async fn a_call_is_made_as_soon_as_the_clock_has_reached_its_time() {
    let (clock, value, calls) = (SharedClock::new(), Cell::new(0), Cell::new(0));
    let call = async |not_before| {
        let run = clock.run(not_before, |tick| {
            calls.set(calls.get() + 1);
            let to = match tick {
                Tick::Start(to) | Tick::Raise(to) | Tick::Replace { to, .. } => Some(to),
                Tick::Keep => None,
            };
            value.set(to.unwrap_or(value.get()));
            std::future::ready(Ok(Ticked::new(Some(value.get()), to.is_some(), ())))
        });
        match run.await.unwrap() {
            Run::Done { now, .. } => (now, true),
            Run::Early { now, .. } => (now, false),
        }
    };
    let (now, is_done) = call(Timestamp::default()).await;
    assert!(is_done && now.micros() == value.get());
    assert_eq!(call(now).await, (now, true));
    let later = now.later(Duration::from_millis(1));
    assert_eq!(call(later).await, (now, false));
    assert_eq!(calls.get(), 2);
    advance(Duration::from_millis(1)).await;
    assert_eq!(call(later).await, (later, true));
    // Another client is ahead.
    let ahead = later.later(Duration::from_secs(1));
    value.set(ahead.micros());
    clock.heard(value.get());
    assert_eq!(call(ahead).await, (ahead, true));
}

#[tokio::test(start_paused = true)]
async fn a_store_of_locks_learns_of_the_loss_of_the_clock() {
    let clock = SharedClock::new();
    let received = Arc::new(Received::default());
    let inbox: Arc<dyn Inbox> = received.clone();
    clock.listen(Arc::downgrade(&inbox) as Weak<dyn Inbox>);
    let run = async |value, is_taken| {
        let reply = Ok(Ticked::new(Some(value), is_taken, ()));
        let run = clock.run(Timestamp::default(), |_| std::future::ready(reply.clone()));
        run.await.map(drop)
    };
    run(VALUE, true).await.unwrap();
    assert!(lock(&received.connections).is_empty());
    advance(Duration::from_millis(1)).await;
    let error = run(VALUE - 1, false).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable);
    assert_eq!(*lock(&received.connections), [false, true]);
}
