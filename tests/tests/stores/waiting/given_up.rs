//! A waiter that gives up, at any position and at any time, delays no other waiter and leaves
//! nothing behind.

use std::{
    future::{Future, poll_fn},
    task::Poll,
    time::Duration,
};

use futures_util::future::poll_immediate;
use lock_runtime::LockClient;
use lock_tests::{
    Proxy,
    place::{all_free, begun, on_every_store},
    proxy::Direction::{ToClient, ToServer},
};
use tokio::{
    sync::mpsc,
    task::JoinSet,
    time::{sleep, timeout},
};

use super::{LONG, Place, driven, in_line, may_hand_back, nothing_left, pass_through};

on_every_store! {
    a_waiter_that_gives_up_costs_no_turn,
    a_waiter_that_gives_up_alone_in_front_costs_no_turn,
    the_last_of_a_line_may_give_up,
    a_hand_back_that_is_given_up_serves_the_waiters,
}

/// Shorter than the lease of a grant that no waiter takes.
const AT_ONCE: Duration = Duration::from_millis(2500);

/// The time at which a waiter gives up.
#[derive(Clone, Copy, Debug)]
enum Moment {
    BeforeTheGrant,
    /// The release is under way.
    AtTheGrant,
    /// The push message about the grant has arrived, but the waiter has not been polled since.
    AfterThePush,
}

struct Line<'a> {
    locks: &'a LockClient,
    /// They enter the wait queue one after the other.
    clients: &'a [LockClient],
    /// The number of waiters of each client.
    sizes: &'a [usize],
    strict: bool,
}

impl Line<'_> {
    /// Drops the waiter with the number `victim`. The others are served, those of a process in the
    /// order of their requests.
    async fn without(&self, victim: usize, moment: Moment) {
        let key = format!("{:?} {} {victim} {moment:?}", self.sizes, self.strict);
        let guard = self.locks.exclusive(&key).acquire().await.unwrap();
        let mut fence = guard.fence().number();
        let (mut waiting, mut whose) = (Vec::new(), Vec::new());
        for (process, (client, size)) in self.clients.iter().zip(self.sizes).enumerate() {
            for _ in 0..*size {
                let request = client.exclusive(&key).wait(LONG);
                let request = if self.strict {
                    request.strict_order()
                } else {
                    request
                };
                waiting.push(begun(request.acquire()).await);
                whose.push((process, whose.len()));
            }
            driven(&mut waiting, in_line(self.locks, &key, process + 1)).await;
        }
        whose.remove(victim);
        match moment {
            Moment::BeforeTheGrant => {
                drop(waiting.remove(victim));
                guard.release().await.unwrap();
            }
            Moment::AtTheGrant => {
                let mut release = Box::pin(guard.release());
                let released = poll_immediate(&mut release).await;
                drop(waiting.remove(victim));
                match released {
                    Some(released) => released.unwrap(),
                    None => release.await.unwrap(),
                }
            }
            Moment::AfterThePush => {
                guard.release().await.unwrap();
                sleep(Duration::from_millis(3)).await;
                drop(waiting.remove(victim));
            }
        }
        let (served, mut order) = mpsc::unbounded_channel();
        let mut tasks = JoinSet::new();
        for (who, acquire) in whose.iter().copied().zip(waiting) {
            let served = served.clone();
            tasks.spawn(async move {
                let guard = acquire.await.unwrap();
                served.send((who, guard.fence().number())).unwrap();
                guard.release().await.unwrap();
            });
        }
        drop(served);
        let free = async {
            tasks.join_all().await;
            in_line(self.locks, &key, 0).await;
            all_free(self.locks, &[&key]).await;
        };
        timeout(AT_ONCE, free)
            .await
            .unwrap_or_else(|_| panic!("{key}: a waiter is not served, or the lock is not free"));
        let mut order_of: Vec<Vec<usize>> = vec![Vec::new(); self.sizes.len()];
        let mut first = None;
        while let Some(((process, number), later)) = order.recv().await {
            assert!(later > fence, "{key}: {later} after {fence}");
            fence = later;
            first.get_or_insert(number);
            order_of[process].push(number);
        }
        // The next waiter of the process inherits the queue entry of the one that gave up.
        assert_eq!(first, whose.first().map(|(_, number)| *number), "{key}");
        for (process, order) in order_of.iter().enumerate() {
            let expected = whose
                .iter()
                .filter(|(of, _)| *of == process)
                .map(|(_, number)| number);
            assert!(
                order.iter().eq(expected),
                "{key}: process {process} was served in the order {order:?}"
            );
        }
    }
}

async fn without_each(place: &Place, sizes: &[usize]) {
    let locks = place.client().await;
    let mut clients = Vec::new();
    for _ in sizes {
        clients.push(place.client().await);
    }
    for strict in [false, true] {
        let line = Line {
            locks: &locks,
            clients: &clients,
            sizes,
            strict,
        };
        for victim in 0..sizes.iter().sum() {
            for moment in [
                Moment::BeforeTheGrant,
                Moment::AtTheGrant,
                Moment::AfterThePush,
            ] {
                line.without(victim, moment).await;
            }
        }
    }
    nothing_left(place, &[]).await;
}

async fn a_waiter_that_gives_up_costs_no_turn(place: Place) {
    without_each(&place, &[2, 1, 3, 1]).await;
}

async fn a_waiter_that_gives_up_alone_in_front_costs_no_turn(place: Place) {
    without_each(&place, &[1, 2, 1]).await;
}

async fn the_last_of_a_line_may_give_up(place: Place) {
    without_each(&place, &[1]).await;
}

/// Polls `future` up to `polls` times and returns its output, or drops it: right after the last
/// poll, or, with `until_woken`, when it is woken after that poll.
async fn polled<F: Future>(future: F, mut polls: usize, until_woken: bool) -> Option<F::Output> {
    let mut future = Box::pin(future);
    poll_fn(|cx| {
        if polls == 0 {
            return Poll::Ready(None);
        }
        polls -= 1;
        match future.as_mut().poll(cx) {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            Poll::Pending if polls == 0 && !until_woken => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}

/// A lock that cannot be handed off locally is released and requested again in one step for the
/// waiters of the same process.
async fn a_hand_back_that_is_given_up_serves_the_waiters(place: Place) {
    let (here, proxy) = match &place {
        Place::Memory(_)
        | Place::Majority(_)
        | Place::Postgres { .. }
        | Place::Etcd { .. }
        | Place::ZooKeeper { .. } => (place.clone(), None),
        // A Cluster names the addresses of its nodes, so its clients would bypass the proxy.
        Place::Redis { url, .. } if url.contains("+cluster") => (place.clone(), None),
        Place::Redis { url, namespace } => {
            let proxy = Proxy::to_url(url).await;
            (
                Place::Redis {
                    url: proxy.url(),
                    namespace: namespace.clone(),
                },
                Some(proxy),
            )
        }
    };
    let (locks, others) = (here.client().await, place.client().await);
    locks
        .exclusive("a")
        .acquire()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
    if let Some(proxy) = &proxy {
        proxy.delay(ToServer, Duration::from_millis(2));
        proxy.delay(ToClient, Duration::from_millis(2));
    }
    for (others_wait, until_woken) in [(false, false), (false, true), (true, false), (true, true)] {
        for polls in 0.. {
            let key = format!("{others_wait} {until_woken} {polls}");
            let (guard, second) = may_hand_back(&locks, &key).await;
            let mut waiting = Vec::new();
            if others_wait {
                waiting.push(begun(others.exclusive(&key).wait(LONG).acquire()).await);
                driven(&mut waiting, in_line(&others, &key, 1)).await;
            }
            waiting.push(second);
            waiting.push(begun(locks.exclusive(&key).wait(LONG).acquire()).await);
            let done = polled(guard.release(), polls, until_woken).await.is_some();
            let served = futures_util::future::join_all(waiting.into_iter().map(pass_through));
            let fences = timeout(AT_ONCE, served)
                .await
                .unwrap_or_else(|_| panic!("{key}: a waiter is not served"));
            assert!(
                fences.iter().rev().take(2).rev().is_sorted(),
                "{key}: {fences:?}"
            );
            if done {
                break;
            }
            assert!(polls < 50, "the release is never ready");
        }
    }
    nothing_left(&place, &[]).await;
}
