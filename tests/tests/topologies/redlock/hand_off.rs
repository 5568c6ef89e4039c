//! Hand-offs to a named heir at a single server of a quorum: the same on a server as in memory.

use std::{
    collections::HashSet,
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use lock_runtime::{
    FencingToken, LockKey, LockKind, Mode,
    store::{
        AcquireReply, Grant, HandOff, Heir, Hold, Inspection, Instant, KeyRequest, Listener,
        MemoryStore, NextHolder, PollReply, QuorumMember, RaiseReply, Release, ReleaseReply,
        StoreErrorKind, StoreEvent, Token, redis::RedisStore,
    },
};
use lock_tests::{RedisServer, place::LONG, replies::poll, shared_five, unique};
use tokio::{
    sync::{Mutex, mpsc},
    time::{sleep, timeout},
};

const HOUR: Duration = Duration::from_secs(3600);
const HANDOFF_LEASE: Duration = Duration::from_secs(3);

struct Recorder(mpsc::UnboundedSender<StoreEvent>);

impl Listener for Recorder {
    fn on_event(&self, event: &StoreEvent) {
        let _ = self.0.send(event.clone());
    }
}

/// A store that can be one of a quorum, and its events.
struct Member {
    store: Arc<dyn QuorumMember>,
    events: Mutex<mpsc::UnboundedReceiver<StoreEvent>>,
    _recorder: Arc<Recorder>,
    /// The channel of the quorum, on a server.
    channel: Option<Arc<str>>,
}

/// A grant that was pushed.
#[derive(Debug, PartialEq)]
struct Pushed {
    token: Token,
    grant: Grant,
    is_named: bool,
    next: Option<Heir>,
}

impl Member {
    fn new(store: Arc<dyn QuorumMember>, channel: Option<Arc<str>>) -> Self {
        let (sender, events) = mpsc::unbounded_channel();
        let recorder = Arc::new(Recorder(sender));
        let weak: Weak<Recorder> = Arc::downgrade(&recorder);
        store.listen(weak);
        Self {
            store,
            events: Mutex::new(events),
            _recorder: recorder,
            channel,
        }
    }

    fn heir(&self, lease: Duration, reserved: u32) -> Heir {
        let request = NextHolder::new(Token::random(), lease, reserved);
        Heir::new(request, self.channel.clone())
    }

    fn heir_of(&self, waiter: &Hold) -> Heir {
        let request = NextHolder::new(waiter.token, HOUR, 2);
        Heir::new(request, self.channel.clone())
    }

    async fn held(&self, mode: Mode) -> Hold {
        let hold = fresh(mode);
        let reply = self.store.acquire(&request(&hold)).await.unwrap();
        assert!(matches!(reply, AcquireReply::Granted(_)), "{reply:?}");
        hold
    }

    async fn waiter(&self, holder: &Hold, mode: Mode) -> Hold {
        let hold = beside(holder, mode);
        let request = request(&hold).reserved(2).queued();
        let reply = self.store.acquire(&request).await.unwrap();
        assert!(matches!(reply, AcquireReply::Queued { .. }), "{reply:?}");
        hold
    }

    async fn hand_off(&self, hold: &Hold, to: &HandOff) -> ReleaseReply {
        let release = Release::new(hold.clone());
        self.store.hand_off(&release, to).await.unwrap()
    }

    async fn inspect(&self, hold: &Hold) -> Inspection {
        self.store
            .inspect(&hold.key, hold.mode.kind())
            .await
            .unwrap()
    }

    /// The grant in the next event.
    async fn pushed(&self) -> Pushed {
        let event = timeout(LONG, self.events.lock().await.recv()).await;
        match event.expect("an event").unwrap() {
            StoreEvent::Granted {
                hold,
                grant,
                is_named,
                next,
                ..
            } => Pushed {
                token: hold.token,
                grant,
                is_named,
                next,
            },
            event => panic!("{event:?}"),
        }
    }

    /// Checks that no event is left. The server replies in order, so earlier ones have arrived.
    async fn pushed_nothing(&self) {
        self.inspect(&fresh(Mode::Exclusive)).await;
        let event = self.events.lock().await.try_recv();
        assert!(event.is_err(), "{event:?}");
    }

    async fn is_free(&self, hold: &Hold) -> bool {
        self.inspect(hold).await.holders.is_empty()
    }
}

fn fresh(mode: Mode) -> Hold {
    Hold::new(LockKey::new(unique("k")).unwrap(), mode, Token::random())
}

fn beside(hold: &Hold, mode: Mode) -> Hold {
    Hold::new(hold.key.clone(), mode, Token::random())
}

fn in_a_minute() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn request(hold: &Hold) -> KeyRequest {
    KeyRequest::new(hold.clone(), HOUR, in_a_minute())
}

/// A proposal that is this far ahead of all clocks.
fn ahead(by: Duration) -> FencingToken {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap() + by;
    FencingToken::new(now.as_micros() as u64).unwrap()
}

/// Larger than all numbers that a test has used before, with their blocks.
fn soon() -> FencingToken {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let micros = COUNT.fetch_add(100, Ordering::Relaxed);
    ahead(Duration::from_secs(20) + Duration::from_micros(micros))
}

fn to(heir: &Heir) -> HandOff {
    HandOff::new(heir.clone(), soon(), in_a_minute())
}

/// Stores on servers of a quorum that vote.
async fn members(servers: &'static [RedisServer], namespace: &str) -> Vec<Member> {
    voting(servers, &|server| server.url(), namespace).await
}

async fn voting(
    servers: &[RedisServer],
    url: &dyn Fn(&RedisServer) -> String,
    namespace: &str,
) -> Vec<Member> {
    let members = connected(servers, url, namespace, Duration::from_millis(10)).await;
    for member in &members {
        let hold = fresh(Mode::Exclusive);
        // The uptime is in whole seconds.
        while let Err(error) = member.store.acquire(&request(&hold)).await {
            assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error}");
            sleep(Duration::from_millis(20)).await;
        }
    }
    members
}

async fn connected(
    servers: &[RedisServer],
    url: &dyn Fn(&RedisServer) -> String,
    namespace: &str,
    longest_lease: Duration,
) -> Vec<Member> {
    let urls: Vec<_> = servers.iter().map(url).collect();
    let urls: Vec<_> = urls.iter().map(String::as_str).collect();
    let pattern = format!("{namespace}:*:quorum");
    let channels = async |server: &RedisServer| -> HashSet<String> {
        server.query(&["PUBSUB", "CHANNELS", &pattern]).await
    };
    let before = channels(&servers[0]).await;
    let stores = RedisStore::members(&urls, namespace, longest_lease).await;
    let mut members = Vec::new();
    for ((_, store), server) in stores.unwrap().into_iter().zip(servers) {
        // The others may not be connected yet.
        let hold = fresh(Mode::Exclusive);
        store.inspect(&hold.key, LockKind::Lock).await.unwrap();
        let after = channels(server).await;
        let own: Vec<_> = after.difference(&before).collect();
        assert_eq!(own.len(), 1, "{own:?}");
        members.push(Member::new(store, Some(own[0].as_str().into())));
    }
    let shared = &members[0].channel;
    assert!(members.iter().all(|member| member.channel == *shared));
    members
}

/// A store in memory, and one on a server of a quorum.
async fn both() -> [Member; 2] {
    let mut members = members(&shared_five().await[..3], &unique("ns")).await;
    [
        Member::new(Arc::new(MemoryStore::new()), None),
        members.swap_remove(0),
    ]
}

/// A store on a server of a quorum, and the server.
async fn on_redis() -> (Member, &'static RedisServer, String) {
    let (servers, namespace) = (shared_five().await, unique("ns"));
    let mut members = members(&servers[..3], &namespace).await;
    (members.swap_remove(0), &servers[0], namespace)
}

#[tokio::test]
async fn heir_gets_a_lock_that_is_released_or_free() {
    for member in both().await {
        for (lease, ttl) in [
            (HOUR, HANDOFF_LEASE),
            (HANDOFF_LEASE / 6, HANDOFF_LEASE / 6),
        ] {
            for is_held in [true, false] {
                let (hold, reply) = match is_held {
                    true => (member.held(Mode::Exclusive).await, ReleaseReply::Released),
                    false => (fresh(Mode::Exclusive), ReleaseReply::NotHeld),
                };
                let heir = member.heir(lease, 4);
                let hand_off = to(&heir);
                assert_eq!(member.hand_off(&hold, &hand_off).await, reply);
                let grant = Grant::new(hand_off.proposal, ttl).reserved(4);
                let token = heir.request.token;
                let pushed = Pushed {
                    token,
                    grant,
                    is_named: true,
                    next: None,
                };
                assert_eq!(member.pushed().await, pushed);
                let found = member.inspect(&hold).await;
                assert!(found.holders[0].ttl.unwrap() <= ttl, "{found:?}");
                let last = hand_off.proposal.number() + 4;
                assert_eq!(found.fence.unwrap().number(), last, "the block is reserved");
                // Repeated, or by another one, it changes nothing.
                for hold in [&hold, &beside(&hold, Mode::Exclusive)] {
                    let again = to(&member.heir(HOUR, 0));
                    assert_eq!(member.hand_off(hold, &again).await, ReleaseReply::NotHeld);
                }
                assert_eq!(
                    member.hand_off(&hold, &hand_off).await,
                    ReleaseReply::NotHeld
                );
                member.pushed_nothing().await;
                let heir = Hold::new(hold.key.clone(), Mode::Exclusive, token);
                let reply = poll(&*member.store, &heir).await.unwrap();
                assert!(
                    matches!(reply, PollReply::Granted(grant) if grant.fence.number() == last),
                    "{reply:?}"
                );
                // The heir can name another one in turn, and the tokens grow.
                let next = member.heir(HOUR, 0);
                let lower = HandOff::new(next, hand_off.proposal, in_a_minute());
                assert_eq!(member.hand_off(&heir, &lower).await, ReleaseReply::Released);
                assert_eq!(member.pushed().await.grant.fence.number(), last + 1);
            }
        }
    }
}

#[tokio::test]
async fn heir_gets_the_proposal_if_it_is_possible() {
    for with_waiter in [false, true] {
        for member in both().await {
            let near = soon();
            for (proposal, is_raised) in [(near, true), (ahead(HOUR), false)] {
                let hold = member.held(Mode::Exclusive).await;
                let mut heir = member.heir(HOUR, 0);
                if with_waiter {
                    heir = member.heir_of(&member.waiter(&hold, Mode::Exclusive).await);
                }
                let higher = FencingToken::new(near.number() + 1_000_000).unwrap();
                if is_raised {
                    let raised = member.store.raise(&hold.key, LockKind::Lock, higher).await;
                    assert_eq!(raised.unwrap(), RaiseReply::Raised);
                }
                let hand_off = HandOff::new(heir, proposal, in_a_minute());
                member.hand_off(&hold, &hand_off).await;
                let fence = member.pushed().await.grant.fence;
                if is_raised {
                    assert_eq!(fence.number(), higher.number() + 1);
                } else {
                    let skew = Duration::from_secs(60);
                    assert!(fence <= ahead(skew) && fence > soon(), "{fence}");
                }
            }
        }
    }
}

#[tokio::test]
async fn heir_gets_no_lock_that_another_one_holds() {
    for member in both().await {
        for mode in [Mode::Exclusive, Mode::Shared] {
            for is_coordinator in [false, true] {
                let holder = member.held(mode).await;
                let before = member.inspect(&holder).await.fence;
                let hand_off = to(&member.heir(HOUR, 0)).at_coordinator(is_coordinator);
                let other = beside(&holder, Mode::Exclusive);
                assert_eq!(
                    member.hand_off(&other, &hand_off).await,
                    ReleaseReply::NotHeld
                );
                // Also with a waiter, which does not get the lock either.
                member.waiter(&holder, Mode::Exclusive).await;
                assert_eq!(
                    member.hand_off(&other, &hand_off).await,
                    ReleaseReply::NotHeld
                );
                member.pushed_nothing().await;
                let found = member.inspect(&holder).await;
                assert_eq!(found.holders[0].mode, mode);
                assert_eq!((found.holders.len(), found.fence), (1, before));
            }
        }
        // A reservation (`min_hold`).
        let holder = member.held(Mode::Exclusive).await;
        let kept = Release::new(holder.clone()).keep_for(Some(HOUR));
        let hand_off = to(&member.heir(HOUR, 0));
        let reply = member.store.hand_off(&kept, &hand_off).await.unwrap();
        assert_eq!(reply, ReleaseReply::Released);
        assert_eq!(
            member.hand_off(&holder, &hand_off).await,
            ReleaseReply::Released
        );
        let other = beside(&holder, Mode::Exclusive);
        assert_eq!(
            member.hand_off(&other, &hand_off).await,
            ReleaseReply::NotHeld
        );
        member.pushed_nothing().await;
        assert_eq!(member.inspect(&holder).await.holders.len(), 1);
    }
}

#[tokio::test]
async fn only_an_exclusive_lock_goes_to_an_heir() {
    for member in both().await {
        let reader = member.held(Mode::Shared).await;
        let hand_off = to(&member.heir(HOUR, 0));
        assert_eq!(
            member.hand_off(&reader, &hand_off).await,
            ReleaseReply::Released
        );
        member.pushed_nothing().await;
        assert!(member.is_free(&reader).await);
    }
}

#[tokio::test]
async fn own_waiters_go_before_the_heir() {
    for member in both().await {
        for is_held in [true, false] {
            let mut holder = member.held(Mode::Exclusive).await;
            let first = member.waiter(&holder, Mode::Exclusive).await;
            let second = member.waiter(&holder, Mode::Exclusive).await;
            if !is_held {
                // The lock has expired.
                let reply = member.hand_off(&holder, &late(&member.heir(HOUR, 0))).await;
                assert_eq!(reply, ReleaseReply::Released);
                assert_eq!(member.pushed().await.token, first.token);
                holder = first.clone();
            }
            let next_one = if is_held { &first } else { &second };
            let is_last = !is_held;
            let hand_off = to(&member.heir(HOUR, 0));
            assert_eq!(
                member.hand_off(&holder, &hand_off).await,
                ReleaseReply::Released
            );
            let pushed = Pushed {
                token: next_one.token,
                grant: Grant::new(hand_off.proposal, HANDOFF_LEASE).reserved(2),
                is_named: false,
                next: (!is_last).then(|| member.heir_of(&second)),
            };
            assert_eq!(member.pushed().await, pushed);
            member.pushed_nothing().await;
            assert_eq!(member.inspect(&holder).await.holders.len(), 1);
        }
        // The heir itself waits here, too.
        let holder = member.held(Mode::Exclusive).await;
        let waiter = member.waiter(&holder, Mode::Exclusive).await;
        member
            .hand_off(&holder, &to(&member.heir_of(&waiter)))
            .await;
        let pushed = member.pushed().await;
        assert_eq!((pushed.token, pushed.is_named), (waiter.token, true));
        member.pushed_nothing().await;
        assert!(member.inspect(&holder).await.waiters.is_empty());
    }
}

/// A hand-off that is executed after its deadline.
fn late(heir: &Heir) -> HandOff {
    let past = Instant::now() - Duration::from_millis(1);
    HandOff::new(heir.clone(), soon(), past)
}

#[tokio::test]
async fn late_hand_off_is_a_release() {
    for member in both().await {
        for is_coordinator in [false, true] {
            let holder = member.held(Mode::Exclusive).await;
            let hand_off = late(&member.heir(HOUR, 0)).at_coordinator(is_coordinator);
            assert_eq!(
                member.hand_off(&holder, &hand_off).await,
                ReleaseReply::Released
            );
            assert_eq!(
                member.hand_off(&holder, &hand_off).await,
                ReleaseReply::NotHeld
            );
            member.pushed_nothing().await;
            assert!(member.is_free(&holder).await);

            let holder = member.held(Mode::Exclusive).await;
            let waiter = member.waiter(&holder, Mode::Exclusive).await;
            let hand_off = late(&member.heir_of(&waiter)).at_coordinator(is_coordinator);
            assert_eq!(
                member.hand_off(&holder, &hand_off).await,
                ReleaseReply::Released
            );
            let pushed = member.pushed().await;
            assert_eq!((pushed.token, pushed.is_named), (waiter.token, false));
            assert!(pushed.grant.fence < hand_off.proposal, "{pushed:?}");
        }
    }
}

#[tokio::test]
async fn coordinator_grants_its_first_waiter_and_reports_the_next() {
    for member in both().await {
        let hand_off = to(&member.heir(HOUR, 0)).at_coordinator(true);
        for holder in [member.held(Mode::Exclusive).await, fresh(Mode::Exclusive)] {
            member.hand_off(&holder, &hand_off).await;
            member.pushed_nothing().await;
            assert!(
                member.is_free(&holder).await,
                "it grants nothing to the heir"
            );
        }
        let mut holder = member.held(Mode::Exclusive).await;
        let mut waiters = Vec::new();
        let modes = [
            Mode::Exclusive,
            Mode::Exclusive,
            Mode::Exclusive,
            Mode::Shared,
        ];
        for mode in modes {
            waiters.push(member.waiter(&holder, mode).await);
        }
        for (index, is_named) in [(0, true), (1, false), (2, true), (3, false)] {
            let waiter = &waiters[index];
            let heir = match is_named {
                true => member.heir_of(waiter),
                false => member.heir(HOUR, 0),
            };
            let hand_off = to(&heir).at_coordinator(true);
            let reply = member.hand_off(&holder, &hand_off).await;
            assert_eq!(reply, ReleaseReply::Released, "{index}");
            let reserved = if index < 3 { 2 } else { 0 };
            let next = waiters.get(index + 1);
            let pushed = Pushed {
                token: waiter.token,
                grant: Grant::new(hand_off.proposal, HANDOFF_LEASE).reserved(reserved),
                is_named,
                // A reader is not named.
                next: next
                    .filter(|next| next.mode == Mode::Exclusive)
                    .map(|next| member.heir_of(next)),
            };
            assert_eq!(member.pushed().await, pushed, "{index}");
            holder = waiter.clone();
        }
        member.pushed_nothing().await;
    }
}

#[tokio::test]
async fn grants_of_other_operations_report_the_next_waiter() {
    for member in both().await {
        let holder = member.held(Mode::Exclusive).await;
        let reader = member.waiter(&holder, Mode::Shared).await;
        let other_reader = member.waiter(&holder, Mode::Shared).await;
        let writer = member.waiter(&holder, Mode::Exclusive).await;
        let last = member.waiter(&holder, Mode::Exclusive).await;
        let release = |hold: &Hold| {
            let release = Release::new(hold.clone());
            let store = member.store.clone();
            async move { store.release(&release).await.unwrap() }
        };
        release(&holder).await;
        for (reader, next) in [(&reader, None), (&other_reader, Some(&writer))] {
            let pushed = member.pushed().await;
            let next = next.map(|next| member.heir_of(next));
            assert_eq!((pushed.token, pushed.next), (reader.token, next));
            assert!(!pushed.is_named);
        }
        release(&reader).await;
        member.store.abandon(&other_reader).await.unwrap();
        let pushed = member.pushed().await;
        assert_eq!(
            (pushed.token, pushed.next, pushed.is_named),
            (writer.token, Some(member.heir_of(&last)), false)
        );
    }
}

/// The heir's channel comes from one server, and it is notified of the grants of the others.
#[tokio::test]
async fn servers_of_a_quorum_notify_the_heir_on_one_channel() {
    let servers = &shared_five().await[..3];
    let namespace = unique("ns");
    let (holders, heirs) = (
        members(servers, &namespace).await,
        members(servers, &namespace).await,
    );
    let hold = fresh(Mode::Exclusive);
    for member in &holders {
        member.store.acquire(&request(&hold)).await.unwrap();
    }
    let heir = beside(&hold, Mode::Exclusive);
    let other = beside(&hold, Mode::Exclusive);
    for waiter in [&other, &heir] {
        let queued = request(waiter).reserved(2).queued();
        heirs[0].store.acquire(&queued).await.unwrap();
    }
    let release = Release::new(hold.clone());
    holders[0].store.release(&release).await.unwrap();
    let next = heirs[0].pushed().await.next.expect("the next waiter");
    assert_eq!(next, heirs[1].heir_of(&heir));
    for index in [1, 2] {
        holders[index].hand_off(&hold, &to(&next)).await;
        let pushed = heirs[index].pushed().await;
        assert_eq!((pushed.token, pushed.is_named), (heir.token, true));
        holders[index].pushed_nothing().await;
    }
}

fn names(namespace: &str, hold: &Hold) -> [String; 4] {
    let lock = format!("{namespace}:{}", hold.key);
    let (fence, queue) = (format!("{{{lock}}}:f"), format!("{{{lock}}}:q"));
    [lock, fence, queue, format!("f:{namespace}:")]
}

/// Backdates the last poll of `hold`.
async fn silent(server: &RedisServer, queue: &str, hold: &Hold, ago: Duration) {
    let member = String::from_utf8(hold.token.to_hex().to_vec()).unwrap();
    let place: String = server.query(&["HGET", queue, &member]).await;
    let entry: String = server.query(&["HGET", queue, &place]).await;
    let (seen, rest) = entry.split_once(' ').unwrap();
    let seen = seen.parse::<u128>().unwrap() - ago.as_millis();
    let entry = format!("{seen} {rest}");
    server.command(&["HSET", queue, &place, &entry]).await;
}

#[tokio::test]
async fn silent_waiters_are_neither_next_nor_before_the_heir() {
    let (member, server, namespace) = on_redis().await;
    let holder = member.held(Mode::Exclusive).await;
    let [_, _, queue, _] = names(&namespace, &holder);
    let mut waiters = Vec::new();
    for _ in 0..4 {
        waiters.push(member.waiter(&holder, Mode::Exclusive).await);
    }
    let stale = Duration::from_secs(4);
    silent(server, &queue, &waiters[1], stale).await;
    silent(server, &queue, &waiters[2], stale).await;
    member
        .hand_off(&holder, &to(&member.heir_of(&waiters[0])))
        .await;
    let pushed = member.pushed().await;
    assert_eq!(pushed.token, waiters[0].token);
    assert_eq!(pushed.next, Some(member.heir_of(&waiters[3])));

    // The silent heir loses its queue entry, so that it does not wait for its own lock.
    silent(server, &queue, &waiters[3], stale).await;
    let heir = member.heir_of(&waiters[2]);
    let hand_off = to(&heir);
    let reply = member.hand_off(&waiters[0], &hand_off).await;
    assert_eq!(reply, ReleaseReply::Released);
    let pushed = member.pushed().await;
    let grant = Grant::new(hand_off.proposal, HANDOFF_LEASE).reserved(2);
    assert_eq!((pushed.token, pushed.grant), (waiters[2].token, grant));
    assert!(pushed.is_named && pushed.next.is_none());
    assert_eq!(member.inspect(&holder).await.waiters.len(), 2);
    assert!(matches!(
        poll(&*member.store, &waiters[2]).await,
        Ok(PollReply::Granted(_))
    ));
    assert!(matches!(
        poll(&*member.store, &waiters[3]).await,
        Ok(PollReply::Queued { .. })
    ));
    member
        .hand_off(&waiters[2], &to(&member.heir(HOUR, 0)))
        .await;
    assert_eq!(member.pushed().await.token, waiters[3].token);
}

/// A client of an older version has a channel for each server.
#[tokio::test]
async fn waiters_of_older_versions_are_granted_but_not_named() {
    let (member, server, namespace) = on_redis().await;
    let old = RedisStore::connect(&server.url(), &namespace)
        .await
        .unwrap();
    let old = Member::new(Arc::new(old), None);
    let holder = member.held(Mode::Exclusive).await;
    let first = member.waiter(&holder, Mode::Exclusive).await;
    let second = old.waiter(&holder, Mode::Exclusive).await;
    let third = member.waiter(&holder, Mode::Exclusive).await;
    member.hand_off(&holder, &to(&member.heir(HOUR, 0))).await;
    let pushed = member.pushed().await;
    assert_eq!((pushed.token, pushed.next), (first.token, None));
    // It expects the old format.
    let channels: Vec<String> = server
        .query(&["PUBSUB", "CHANNELS", &format!("{namespace}:*")])
        .await;
    let is_old = |name: &&String| !name.ends_with(":quorum") && !name.ends_with(":revoked");
    let channel = channels.iter().find(is_old).expect("its channel");
    let client = redis::Client::open(server.url()).unwrap();
    let mut subscription = client.get_async_pubsub().await.unwrap();
    subscription.subscribe(channel).await.unwrap();
    member.hand_off(&first, &to(&member.heir_of(&second))).await;
    let pushed = old.pushed().await;
    assert_eq!(pushed.token, second.token);
    assert!(!pushed.is_named && pushed.next.is_none());
    let message = {
        use futures_util::StreamExt as _;
        let message = timeout(LONG, subscription.on_message().next()).await;
        message.unwrap().unwrap().get_payload::<String>().unwrap()
    };
    assert!(message.starts_with("exclusive "), "{message}");
    // It grants in the old format, too.
    let [lock, ..] = names(&namespace, &holder);
    let token = String::from_utf8(third.token.to_hex().to_vec()).unwrap();
    let message = format!("exclusive {token} 7 250 2 {lock}");
    let channel = member.channel.as_deref().unwrap();
    server.command(&["PUBLISH", channel, &message]).await;
    let fence = FencingToken::new(7).unwrap();
    let pushed = Pushed {
        token: third.token,
        grant: Grant::new(fence, Duration::from_millis(250)).reserved(2),
        is_named: false,
        next: None,
    };
    assert_eq!(member.pushed().await, pushed);
}

#[tokio::test]
async fn heir_gets_no_lock_with_foreign_data() {
    let (member, server, namespace) = on_redis().await;
    let dump = async |name: &str| server.query::<Option<Vec<u8>>>(&["DUMP", name]).await;
    for (index, data) in [
        (0, &["RPUSH", "", "ann"][..]),
        (0, &["SET", "", "ann"]),
        (0, &["ZADD", "", "1", "ann"]),
        (1, &["SET", "", "ann"]),
        (1, &["SET", "", "9007199254740991"]),
        (1, &["HSET", "", "ends", "1 1 1"]),
        (2, &["SET", "", "ann"]),
        (2, &["HSET", "", "ends", "ann"]),
    ] {
        for is_coordinator in [false, true] {
            let holder = member.held(Mode::Exclusive).await;
            let names = names(&namespace, &holder);
            let mut data = data.to_vec();
            data[1] = &names[index];
            server.command(&["DEL", &names[index]]).await;
            server.command(&data).await;
            let before = dump(&names[index]).await;
            let hand_off = to(&member.heir(HOUR, 0)).at_coordinator(is_coordinator);
            let reply = match index {
                0 => ReleaseReply::NotHeld,
                _ => ReleaseReply::Released,
            };
            assert_eq!(member.hand_off(&holder, &hand_off).await, reply, "{data:?}");
            let again = member.hand_off(&holder, &hand_off).await;
            assert_eq!(again, ReleaseReply::NotHeld, "{data:?}");
            member.pushed_nothing().await;
            assert_eq!(dump(&names[index]).await, before, "{data:?}");
            if index > 0 {
                assert_eq!(dump(&names[0]).await, None, "{data:?}");
            }
        }
    }
}

#[tokio::test]
async fn server_that_lost_its_data_grants_nothing_to_an_heir() {
    let (member, server, namespace) = on_redis().await;
    let holder = member.held(Mode::Exclusive).await;
    let queued_for = member.held(Mode::Exclusive).await;
    let waiter = member.waiter(&queued_for, Mode::Exclusive).await;
    let [.., marker] = names(&namespace, &holder);
    for data in [None, Some("another")] {
        match data {
            None => server.command(&["DEL", &marker]).await,
            Some(text) => server.command(&["SET", &marker, text]).await,
        };
        let hand_off = to(&member.heir(HOUR, 0));
        let reply = member.hand_off(&holder, &hand_off).await;
        assert_eq!(reply == ReleaseReply::Released, data.is_none());
        member.pushed_nothing().await;
        assert!(member.is_free(&holder).await);
    }
    // Today's release: its own waiter is granted the lock, with the server's number.
    let hand_off = to(&member.heir_of(&waiter));
    let reply = member.hand_off(&queued_for, &hand_off).await;
    assert_eq!(reply, ReleaseReply::Released);
    let pushed = member.pushed().await;
    assert!(!pushed.is_named && pushed.grant.fence < hand_off.proposal);
}

#[tokio::test]
async fn quarantined_server_releases_and_grants_nothing_to_an_heir() {
    let (servers, namespace) = (&shared_five().await[..3], unique("ns"));
    let members = connected(servers, &|server| server.url(), &namespace, HOUR).await;
    for (member, server) in members.iter().zip(servers) {
        let hold = fresh(Mode::Exclusive);
        let refused = member.store.acquire(&request(&hold)).await.unwrap_err();
        assert!(refused.to_string().contains("votes in"), "{refused}");
        let [lock, ..] = names(&namespace, &hold);
        let token = String::from_utf8(hold.token.to_hex().to_vec()).unwrap();
        server.command(&["SET", &lock, &token, "PX", "60000"]).await;
        for (is_coordinator, reply) in [
            (false, ReleaseReply::Released),
            (true, ReleaseReply::NotHeld),
            (false, ReleaseReply::NotHeld),
        ] {
            let hand_off = to(&member.heir(HOUR, 0)).at_coordinator(is_coordinator);
            assert_eq!(member.hand_off(&hold, &hand_off).await, reply);
            member.pushed_nothing().await;
            assert!(member.is_free(&hold).await);
        }
    }
}

/// A store on one server has no servers to hand the lock off at.
#[tokio::test]
async fn store_on_one_server_ignores_the_heir() {
    let (server, namespace) = (&shared_five().await[0], unique("ns"));
    let store = RedisStore::connect(&server.url(), &namespace)
        .await
        .unwrap();
    let member = Member::new(Arc::new(store), Some(format!("{namespace}:x").into()));
    let holder = member.held(Mode::Exclusive).await;
    let reply = member.hand_off(&holder, &to(&member.heir(HOUR, 0))).await;
    assert_eq!(reply, ReleaseReply::Released);
    assert!(member.is_free(&holder).await);
    // Neither does an heir without a channel get the lock.
    let (member, ..) = on_redis().await;
    let holder = member.held(Mode::Exclusive).await;
    let heir = Heir::new(NextHolder::new(Token::random(), HOUR, 0), None);
    assert_eq!(
        member.hand_off(&holder, &to(&heir)).await,
        ReleaseReply::Released
    );
    assert!(member.is_free(&holder).await);
}

#[tokio::test]
async fn hand_off_needs_no_rights_or_memory_that_a_release_does_not() {
    const PASSWORD: &str = "secret";
    let namespace = "my app";
    let line = RedisStore::acl_line(namespace);
    let rules = line
        .strip_prefix("ACL SETUSER <user> on ><password> ")
        .expect("the form of the line");
    let servers = RedisServer::builder()
        .user("ann", PASSWORD, rules)
        .start_all(3)
        .await;
    let url = |server: &RedisServer| server.url_as("ann", PASSWORD);
    let members = voting(&servers, &url, namespace).await;
    let (server, member) = (&servers[0], &members[0]);
    for is_coordinator in [false, true] {
        for with_waiter in [false, true] {
            let holder = member.held(Mode::Exclusive).await;
            let mut heir = member.heir(HOUR, 0);
            if with_waiter {
                heir = member.heir_of(&member.waiter(&holder, Mode::Exclusive).await);
            }
            let hand_off = to(&heir).at_coordinator(is_coordinator);
            member.hand_off(&holder, &hand_off).await;
            let is_granted = with_waiter || !is_coordinator;
            assert_eq!(member.is_free(&holder).await, !is_granted);
            if is_granted {
                assert_eq!(member.pushed().await.token, heir.request.token);
            }
        }
    }
    let log: Vec<redis::Value> = server.query(&["ACL", "LOG"]).await;
    assert!(log.is_empty(), "no command was denied: {log:?}");

    // Without memory: the release comes first, after which the server accepts the other writes.
    let [holder, other] = [member.held(Mode::Exclusive).await, fresh(Mode::Exclusive)];
    server.command(&["CONFIG", "SET", "maxmemory", "1"]).await;
    let (heir, hand_off) = (member.heir(HOUR, 0), to(&member.heir(HOUR, 0)));
    assert_eq!(
        member.hand_off(&other, &hand_off).await,
        ReleaseReply::NotHeld
    );
    member.pushed_nothing().await;
    assert_eq!(
        member.hand_off(&holder, &to(&heir)).await,
        ReleaseReply::Released
    );
    assert_eq!(member.pushed().await.token, heir.request.token);
    server.command(&["CONFIG", "SET", "maxmemory", "0"]).await;

    // Without a right to read, nothing is changed.
    let holder = member.held(Mode::Exclusive).await;
    for command in ["-get", "-hget"] {
        server.command(&["ACL", "SETUSER", "ann", command]).await;
        let release = Release::new(holder.clone());
        let error = member.store.hand_off(&release, &hand_off).await;
        let error = error.map(|reply| panic!("{reply:?}"));
        assert_eq!(error.unwrap_err().kind(), StoreErrorKind::Forbidden);
        let granted = command.replace('-', "+");
        server.command(&["ACL", "SETUSER", "ann", &granted]).await;
    }
    assert_eq!(member.inspect(&holder).await.holders.len(), 1);
    assert_eq!(
        member.hand_off(&holder, &hand_off).await,
        ReleaseReply::Released
    );
}
