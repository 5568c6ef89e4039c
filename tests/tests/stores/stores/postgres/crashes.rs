//! Crashes of the server at the worst moment: after a commit and before its log is written.
//!
//! The process that writes the log of asynchronous commits is stopped, so a crash undoes all those
//! that nothing else has written. The commits of a case come last.

use std::{num::NonZeroU32, slice, sync::Arc, time::Duration};

use lock_runtime::store::Instant;
use lock_runtime::{
    LockClient, LockKey, LockKind, Mode, PostgresOptions,
    operator::{ClientId, Identity, Inspection},
    store::{
        AcquireReply, Grant, Hold, KeyRequest, PollReply, Release, ReleaseReply, RenewReply,
        Renewal, RevokeScope, Store, Token, postgres::PostgresRecords,
    },
};
use lock_tests::{
    PostgresServer,
    place::{LONG, in_time},
};
use tokio::time::sleep;

const LEASE: Duration = Duration::from_secs(30);

/// A server whose asynchronous commits are not written, and a connection to its locks.
struct Case {
    server: PostgresServer,
    store: Arc<dyn Store>,
}

impl Case {
    async fn of(builder: lock_tests::postgres::Builder) -> Self {
        let server = builder
            .in_memory()
            .setting("wal_writer_delay", "10s")
            .setting("wal_writer_flush_after", "2GB")
            .setting("autovacuum", "off")
            .setting("checkpoint_timeout", "1d")
            .start()
            .await;
        server.stop_wal_writer().await;
        let store = store(&server).await;
        Self { server, store }
    }

    /// SIGKILL to the server, which then recovers.
    async fn crash(&mut self) {
        self.server.restart().await;
        self.store = store(&self.server).await;
    }

    async fn acquire(&self, hold: &Hold, lease: Duration) -> AcquireReply {
        let request = KeyRequest::new(hold.clone(), lease, Instant::now() + LONG);
        self.store.acquire(&request.queued()).await.unwrap()
    }

    async fn granted(&self, hold: &Hold) -> Grant {
        self.granted_for(hold, LEASE).await
    }

    async fn granted_for(&self, hold: &Hold, lease: Duration) -> Grant {
        match self.acquire(hold, lease).await {
            AcquireReply::Granted(grant) => grant,
            reply => panic!("{reply:?}"),
        }
    }

    /// The holder of a lock, and a client that waits for it.
    async fn held_and_awaited(&self) -> (Hold, Hold) {
        let (holder, waiter) = (hold(), hold());
        self.granted(&holder).await;
        self.queued(&waiter).await;
        (holder, waiter)
    }

    async fn queued(&self, hold: &Hold) {
        let reply = self.acquire(hold, LEASE).await;
        assert!(matches!(reply, AcquireReply::Queued { .. }), "{reply:?}");
    }

    /// A commit that waits for the log, and for that of all earlier commits.
    async fn write_log(&self) {
        let name = LockKey::new(lock_tests::unique("other")).unwrap();
        self.granted(&hold_of(&name)).await;
    }

    async fn poll(&self, hold: &Hold) -> PollReply {
        let mut replies = self.store.poll(slice::from_ref(hold)).await;
        replies.pop().unwrap().unwrap()
    }

    /// Polls until the lock is granted.
    async fn next_grant(&self, hold: &Hold) -> Grant {
        loop {
            if let PollReply::Granted(grant) = self.poll(hold).await {
                return grant;
            }
            sleep(Duration::from_millis(50)).await;
        }
    }

    async fn release(&self, hold: &Hold) -> ReleaseReply {
        let release = Release::new(hold.clone());
        self.store.release(&release).await.unwrap()
    }

    async fn inspect(&self, hold: &Hold) -> Inspection {
        let kind = match hold.mode {
            Mode::Permits(_) => LockKind::Permits,
            _ => LockKind::Lock,
        };
        self.store.inspect(&hold.key, kind).await.unwrap()
    }

    async fn holders(&self, hold: &Hold) -> usize {
        self.inspect(hold).await.holders.len()
    }

    async fn waiters(&self, hold: &Hold) -> usize {
        self.inspect(hold).await.waiters.len()
    }

    async fn version(&self, hold: &Hold) -> i64 {
        let query = format!(
            "select version from lock_runtime.record where name = 'crash:{}'",
            hold.key
        );
        super::number(&self.server.connect().await, &query).await
    }
}

async fn store(server: &PostgresServer) -> Arc<dyn Store> {
    let options = PostgresOptions::default();
    let records = PostgresRecords::connect(&server.url(), "crash", options).await;
    Arc::new(records.unwrap().into_store())
}

fn hold() -> Hold {
    hold_of(&LockKey::new("order:42").unwrap())
}

fn hold_of(key: &LockKey) -> Hold {
    Hold::new(key.clone(), Mode::Exclusive, Token::random())
}

fn reader() -> Hold {
    Hold::new(hold().key, Mode::Shared, Token::random())
}

/// Runs a test on a server of its own.
async fn on_a_server(test: impl AsyncFnOnce(Case)) {
    in_time(async { test(Case::of(PostgresServer::builder()).await).await }).await;
}

/// The promise of the lost commits: after the crash the lock is held by none or by its previous
/// holder, whose lease ends, and the next client gets it then.
async fn ends(case: &Case, hold: &Hold) {
    case.store.abandon(hold).await.unwrap();
    let next = hold_of(&hold.key);
    case.granted(&next).await;
}

mod lost {
    use super::*;

    #[tokio::test]
    async fn a_queue_entry() {
        on_a_server(async |mut case| {
            let (holder, waiter) = case.held_and_awaited().await;
            assert_eq!(case.waiters(&holder).await, 1);
            case.crash().await;
            assert_eq!(case.waiters(&holder).await, 0, "the commit was not lost");
            assert_eq!(case.holders(&holder).await, 1);
            // The client enqueues again.
            assert!(matches!(case.poll(&waiter).await, PollReply::Gone));
            case.queued(&waiter).await;
            case.store.abandon(&waiter).await.unwrap();
            ends(&case, &holder).await;
        })
        .await;
    }

    #[tokio::test]
    async fn the_call_of_a_waiter() {
        on_a_server(async |mut case| {
            let (holder, waiter) = case.held_and_awaited().await;
            case.write_log().await;
            let before = case.version(&holder).await;
            // Too early calls are not written.
            sleep(Duration::from_millis(1100)).await;
            assert!(matches!(case.poll(&waiter).await, PollReply::Queued { .. }));
            assert_ne!(case.version(&holder).await, before);
            case.crash().await;
            assert_eq!(case.version(&holder).await, before, "it was not lost");
            assert!(matches!(case.poll(&waiter).await, PollReply::Queued { .. }));
            // It is still the next one.
            assert_eq!(case.release(&holder).await, ReleaseReply::Released);
            assert!(matches!(case.poll(&waiter).await, PollReply::Granted(_)));
            ends(&case, &waiter).await;
        })
        .await;
    }

    /// The queue entry is back, and gets the lock for a moment.
    #[tokio::test]
    async fn the_abandonment_of_a_queue_entry() {
        on_a_server(async |mut case| {
            let (holder, waiter) = case.held_and_awaited().await;
            case.write_log().await;
            case.store.abandon(&waiter).await.unwrap();
            assert_eq!(case.waiters(&holder).await, 0);
            case.crash().await;
            assert_eq!(case.waiters(&holder).await, 1, "the commit was not lost");
            case.release(&holder).await;
            let next = hold();
            let queued = Instant::now();
            case.queued(&next).await;
            case.next_grant(&next).await;
            assert!(queued.elapsed() < Duration::from_secs(10));
        })
        .await;
    }

    /// The previous holder is there again until the end of its lease. No client believes to be it.
    #[tokio::test]
    async fn a_release_without_waiters() {
        on_a_server(async |mut case| {
            let (holder, next) = (hold(), hold());
            let lease = Duration::from_secs(4);
            let grant = case.granted_for(&holder, lease).await;
            assert_eq!(case.release(&holder).await, ReleaseReply::Released);
            assert_eq!(case.holders(&holder).await, 0);
            case.crash().await;
            assert_eq!(case.holders(&holder).await, 1, "the commit was not lost");
            case.queued(&next).await;
            assert!(case.next_grant(&next).await.fence > grant.fence);
            ends(&case, &next).await;
        })
        .await;
    }

    #[tokio::test]
    async fn the_release_of_one_reader_and_of_one_permit() {
        on_a_server(async |mut case| {
            let permit = || {
                let of = NonZeroU32::new(2).unwrap();
                Hold::new(hold().key, Mode::Permits(of), Token::random())
            };
            let (readers, permits) = ([reader(), reader()], [permit(), permit()]);
            for hold in readers.iter().chain(&permits) {
                case.granted(hold).await;
            }
            case.release(&readers[0]).await;
            case.release(&permits[0]).await;
            for hold in [&readers[0], &permits[0]] {
                assert_eq!(case.holders(hold).await, 1);
            }
            case.crash().await;
            for hold in [&readers[0], &permits[0]] {
                assert_eq!(case.holders(hold).await, 2, "the commit was not lost");
            }
            // The release is repeated, as it would be if its reply had been lost.
            for hold in readers.iter().chain(&permits) {
                case.release(hold).await;
                case.release(hold).await;
            }
            assert_eq!(case.holders(&readers[0]).await, 0);
            ends(&case, &readers[1]).await;
        })
        .await;
    }

    #[tokio::test]
    async fn the_abandonment_of_a_lock() {
        on_a_server(async |mut case| {
            let holder = hold();
            case.granted(&holder).await;
            case.store.abandon(&holder).await.unwrap();
            case.crash().await;
            assert_eq!(case.holders(&holder).await, 1, "the commit was not lost");
            ends(&case, &holder).await;
        })
        .await;
    }

    #[tokio::test]
    async fn the_name_of_a_client() {
        on_a_server(async |mut case| {
            let client = ClientId::random();
            let store = &case.store;
            let introduced = store.introduce(client, "somewhere", &[], Identity::TTL);
            introduced.await.unwrap();
            let named = async |case: &Case| {
                let names = case.store.names_of(&[client]).await.unwrap();
                names.into_iter().next().flatten()
            };
            assert_eq!(named(&case).await.as_deref(), Some("somewhere"));
            case.crash().await;
            assert_eq!(named(&case).await, None, "the commit was not lost");
        })
        .await;
    }
}

mod kept {
    use super::*;

    /// Runs a test also where commits are asynchronous by default.
    async fn everywhere(test: impl AsyncFn(Case)) {
        for commits in ["on", "off"] {
            println!("synchronous_commit = {commits}");
            let builder = PostgresServer::builder().setting("synchronous_commit", commits);
            in_time(async { test(Case::of(builder).await).await }).await;
        }
    }

    /// The locks of several keys.
    fn several() -> [Hold; 3] {
        ["a", "b", "c"].map(|key| hold_of(&LockKey::new(key).unwrap()))
    }

    #[tokio::test]
    async fn a_grant() {
        everywhere(async |mut case| {
            let (holder, next) = (hold(), hold());
            let grant = case.granted(&holder).await;
            case.crash().await;
            case.queued(&next).await;
            assert_eq!(case.inspect(&holder).await.fence, Some(grant.fence));
            case.store.abandon(&next).await.unwrap();
            ends(&case, &holder).await;
        })
        .await;
    }

    #[tokio::test]
    async fn a_grant_of_several_locks() {
        everywhere(async |mut case| {
            let holds = several();
            let until = Instant::now() + LONG;
            let request = |hold| KeyRequest::new(hold, LEASE, until);
            let requests = holds.clone().map(request);
            case.store.acquire_all(&requests).await.unwrap();
            case.crash().await;
            for hold in &holds {
                assert_eq!(case.holders(hold).await, 1);
            }
        })
        .await;
    }

    /// The previous holder may repeat its release after the crash, and must not free the lock of
    /// the next one.
    #[tokio::test]
    async fn a_hand_off() {
        everywhere(async |mut case| {
            let (holder, waiter) = case.held_and_awaited().await;
            assert_eq!(case.release(&holder).await, ReleaseReply::Released);
            case.crash().await;
            case.release(&holder).await;
            assert!(matches!(case.poll(&waiter).await, PollReply::Granted(_)));
            ends(&case, &waiter).await;
        })
        .await;
    }

    /// As after an expiry: the caller relies on its grant, not on an earlier one.
    #[tokio::test]
    async fn a_grant_by_a_poll() {
        everywhere(async |mut case| {
            let (holder, waiter) = (hold(), hold());
            let lease = Duration::from_secs(1);
            case.granted_for(&holder, lease).await;
            case.queued(&waiter).await;
            sleep(lease).await;
            let PollReply::Granted(grant) = case.poll(&waiter).await else {
                panic!("the lease has ended")
            };
            case.crash().await;
            assert_eq!(case.inspect(&waiter).await.fence, Some(grant.fence));
            assert_eq!(case.holders(&waiter).await, 1);
        })
        .await;
    }

    #[tokio::test]
    async fn renewals() {
        everywhere(async |mut case| {
            let holds = several();
            for hold in &holds {
                case.granted_for(hold, Duration::from_secs(10)).await;
            }
            let renewals = holds.clone().map(|hold| Renewal::new(hold, LEASE * 2));
            for reply in case.store.renew(&renewals).await {
                assert!(matches!(reply, Ok(RenewReply::Renewed { .. })));
            }
            case.crash().await;
            for hold in &holds {
                let found = case.inspect(hold).await;
                assert!(found.holders[0].ttl > Some(LEASE), "{found:?}");
            }
        })
        .await;
    }

    #[tokio::test]
    async fn a_revocation() {
        everywhere(async |mut case| {
            let holder = hold();
            case.granted(&holder).await;
            let kind = LockKind::Lock;
            let revoked = case.store.revoke(&holder.key, kind, RevokeScope::Leased);
            revoked.await.unwrap();
            case.crash().await;
            assert_eq!(case.holders(&holder).await, 0);
        })
        .await;
    }

    #[tokio::test]
    async fn a_downgrade() {
        everywhere(async |mut case| {
            let holder = hold();
            case.granted(&holder).await;
            case.store.convert(&holder).await.unwrap();
            case.crash().await;
            // Readers are admitted, so the writer must not be one again.
            case.granted(&reader()).await;
            assert_eq!(case.holders(&holder).await, 2);
        })
        .await;
    }

    /// A reader that asks again, as its first reply was lost, gets a new token.
    #[tokio::test]
    async fn the_token_of_a_repeated_request() {
        everywhere(async |mut case| {
            let holder = reader();
            let first = case.granted(&holder).await;
            let again = case.granted(&holder).await;
            assert!(again.fence >= first.fence);
            case.crash().await;
            assert_eq!(case.inspect(&holder).await.fence, Some(again.fence));
        })
        .await;
    }
}

/// Clients go on after a crash that undoes as much as possible.
#[tokio::test]
async fn clients_go_on_after_a_crash() {
    on_a_server(async |case| {
        let connect = async || {
            let builder = LockClient::builder().namespace("crash");
            builder.connect(&case.server.url()).await.unwrap()
        };
        let (one, other) = (connect().await, connect().await);
        super::outlive(&one, &other, async || case.server.restart().await).await;
    })
    .await;
}

/// The client notices the crash when it makes its next call.
#[tokio::test]
async fn a_release_that_a_crash_has_undone_is_repeated() {
    on_a_server(async |mut case| {
        let client = || LockClient::builder().namespace("crash");
        let locks = client().connect(&case.server.url()).await.unwrap();
        let request = locks.exclusive("a").lease(LEASE * 2);
        super::once(request).await.unwrap();
        case.crash().await;
        let other = locks.exclusive("b").wait(LONG).acquire().await.unwrap();
        let others = client().connect(&case.server.url()).await.unwrap();
        let asked = Instant::now();
        let guard = others.exclusive("a").wait(LONG).acquire().await.unwrap();
        assert!(asked.elapsed() < LONG / 2, "{:?}", asked.elapsed());
        guard.release().await.unwrap();
        other.release().await.unwrap();
    })
    .await;
}
