//! Events that are lost, doubled, late or of no use: an event is a hint.

use std::{sync::Arc, time::Duration};

use futures_util::future::join_all;
use lock_runtime::{
    LockClient, LockKey,
    operator::Waiter,
    store::{Grant, Listener, Store, StoreEvent, Token},
    time::Instant,
};
use tokio::{runtime::Handle, sync::Mutex, time::sleep};

use crate::{
    Lateness,
    intercepted::{Intercepted, Pass},
    subject::{LONG, Subject, beside, fresh_key, in_time, promise},
};

/// The number of clients, which wait for a lock in turn.
const CLIENTS: usize = 5;
/// The time for which a client holds the lock.
const STAY: Duration = Duration::from_millis(20);
/// The longest time from a release to the next grant: a waiter polls within it.
const HANDOVER: Duration = Waiter::POLL_INTERVAL.saturating_add(Duration::from_millis(700));

/// The fate of the events.
#[derive(Clone, Copy, Debug)]
enum Fate {
    Lost,
    Doubled,
    Late,
    /// Each comes with others, about acquisitions that do not wait.
    AmongOthers,
}

/// Checks that events may be lost, doubled and late, and that events for other tokens do no harm:
/// every waiter is served by its next poll at the latest, in order, one at a time, and with larger
/// fencing tokens.
///
/// # Panics
/// If the store breaks this promise.
pub async fn events_that_are_lost_doubled_or_late_do_no_harm(
    make: &impl AsyncFn() -> Arc<dyn Store>,
) {
    let mut relays = Vec::new();
    for fate in [Fate::Lost, Fate::Doubled, Fate::Late, Fate::AmongOthers] {
        let mut clients = Vec::new();
        for _ in 0..CLIENTS {
            let store = Intercepted::new(make().await, fate.pass());
            clients.push(Subject::over(store).client());
        }
        relays.push(relay(fate, clients));
    }
    in_time(join_all(relays)).await;
}

impl Fate {
    fn pass(self) -> Pass {
        match self {
            Self::Lost => Arc::new(|_, _| {}),
            Self::Doubled => Arc::new(|event, listener| {
                listener.on_event(event);
                listener.on_event(event);
            }),
            Self::Late => Arc::new(|event, listener| {
                let delay = Waiter::POLL_INTERVAL.mul_f64(rand::random_range(0.0..2.0));
                pass_later(event, listener, delay);
            }),
            Self::AmongOthers => Arc::new(|event, listener| {
                others(event)
                    .iter()
                    .for_each(|other| listener.on_event(other));
                listener.on_event(event);
                others(event)
                    .iter()
                    .for_each(|other| listener.on_event(other));
            }),
        }
    }
}

fn pass_later(event: &StoreEvent, listener: &Arc<dyn Listener>, delay: Duration) {
    let (event, listener) = (event.clone(), Arc::downgrade(listener));
    // Without a runtime the event is lost.
    if let Ok(runtime) = Handle::try_current() {
        runtime.spawn(async move {
            sleep(delay).await;
            if let Some(listener) = listener.upgrade() {
                listener.on_event(&event);
            }
        });
    }
}

/// Events that resemble `event`, about acquisitions that no client has made.
fn others(event: &StoreEvent) -> Vec<StoreEvent> {
    let mut others = vec![StoreEvent::Revoked {
        token: Token::random(),
    }];
    if let StoreEvent::Granted { hold, grant, .. } = event {
        let foreign =
            |hold| StoreEvent::granted(hold, Grant::new(grant.fence, Grant::HANDOFF_LEASE));
        others.push(foreign(beside(&hold.key, hold.mode)));
        others.push(foreign(beside(&fresh_key(), hold.mode)));
        others.push(StoreEvent::FreeIn {
            key: hold.key.clone(),
            kind: hold.mode.kind(),
            ttl: Duration::ZERO,
        });
    }
    others
}

/// The holds so far: the latest fencing token, and the time of the latest release.
struct Course {
    fence: u64,
    inside: usize,
    released: Instant,
    /// The delays since then.
    late: Lateness,
}

async fn relay(fate: Fate, clients: Vec<LockClient>) {
    let key = fresh_key();
    let now = Instant::now();
    let course = &Mutex::new(Course {
        fence: 0,
        inside: 0,
        released: now,
        late: Lateness::start(),
    });
    join_all(clients.iter().enumerate().map(async |(number, client)| {
        sleep(STAY / 4 * number as u32).await;
        turn(fate, client, &key, course).await;
    }))
    .await;
    for client in &clients {
        client.shutdown().await;
    }
    let left = clients[0].inspect(&key).await.expect("an inspection");
    promise!(
        "nothing is left after the last release",
        left.holders.is_empty() && left.waiters.is_empty(),
        "events {fate:?}: {left:?}"
    );
}

async fn turn(fate: Fate, client: &LockClient, key: &LockKey, course: &Mutex<Course>) {
    let asked = Instant::now();
    let guard = client.exclusive(key).wait(LONG).acquire().await;
    let guard = guard.unwrap_or_else(|error| panic!("events {fate:?}: {error}"));
    let fence = guard.fence().number();
    {
        let mut course = course.lock().await;
        promise!(
            "no holder relies on a lock that another one holds",
            course.inside == 0,
            "events {fate:?}"
        );
        promise!(
            "fencing tokens of a key are unique and increase",
            fence > course.fence,
            "events {fate:?}: {fence} was granted after {}",
            course.fence
        );
        let idle = course.released.max(asked).elapsed();
        promise!(
            "a waiter is served by its next poll at the latest",
            idle <= course.late.allows(HANDOVER),
            "events {fate:?}: the lock was free for {idle:?}"
        );
        (course.fence, course.inside) = (fence, 1);
    }
    sleep(STAY).await;
    {
        let mut course = course.lock().await;
        (course.inside, course.released) = (0, Instant::now());
        course.late = Lateness::start();
    }
    guard.release().await.expect("a release");
}
