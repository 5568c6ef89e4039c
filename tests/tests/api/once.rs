//! Work that is done once for a key: its result is kept, and returned to later calls.

mod crowds;
mod faults;
mod killed;
mod schedule;

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use lock_runtime::{
    LockClient, LockError, LockErrorKind, LockSpec, Loss, Once, OnceEntry, distributed_lock,
    store::{
        Hold, Instant, KeyRequest, MemoryStore, Release, Store as _, StoreError, StoreErrorKind,
        Token,
    },
};
use lock_tests::{
    FaultyStore, RedisServer,
    faulty_store::{Call, Operation},
};
use tokio::{
    sync::Notify,
    task::JoinSet,
    time::{sleep, timeout},
};

const LONG: Duration = Duration::from_secs(30);

/// A body that counts its runs.
#[derive(Clone, Default)]
struct Work(Arc<AtomicUsize>);

impl Work {
    fn runs(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }

    async fn charge(&self, locks: &LockClient, key: &str) -> Result<Once<String>, LockError> {
        let once = locks.once(key).run(async |held| {
            let run = self.0.fetch_add(1, Ordering::Relaxed);
            sleep(Duration::from_millis(20)).await;
            assert!(!held.is_lost());
            Ok::<_, LockError>(format!("receipt {run}"))
        });
        once.await?
    }
}

async fn clients() -> (RedisServer, [LockClient; 2]) {
    let server = RedisServer::start().await;
    let clients = [
        LockClient::connect(&server.url()).await.unwrap(),
        LockClient::connect(&server.url()).await.unwrap(),
    ];
    (server, clients)
}

// Rule 43 of docs/PROTOCOL.md.
#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_requests_at_once_run_the_work_once() {
    let (_server, clients) = clients().await;
    let work = Work::default();
    let mut requests = JoinSet::new();
    for number in 0..100 {
        let (work, locks) = (work.clone(), clients[number % 2].clone());
        requests.spawn(async move { work.charge(&locks, "invoice:42").await.unwrap() });
    }
    let answers = timeout(LONG, requests.join_all()).await.unwrap();
    assert_eq!(work.runs(), 1);
    assert!(answers.iter().all(|answer| answer.value == "receipt 0"));
    assert_eq!(answers.iter().filter(|it| !it.is_replay).count(), 1);
    let fence = answers[0].fence;
    assert!(answers.iter().all(|answer| answer.fence == fence));
    // Nothing waits any more, and the key is done.
    let seen = clients[0].inspect("invoice:42").await.unwrap();
    assert!(seen.waiters.is_empty(), "{seen:?}");
    assert!(seen.holders[0].is_reservation, "{seen:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn work_that_fails_panics_or_is_cancelled_records_nothing() {
    let (_server, [locks, other]) = clients().await;
    let once = || locks.once("job").wait(LONG);
    let failed = once()
        .run(async |_| Err::<u32, _>(io::Error::other("no")))
        .await;
    assert_eq!(failed.unwrap().unwrap_err().to_string(), "no");
    let panics = once().run(async |_| -> Result<u32, io::Error> { panic!("on purpose") });
    tokio::spawn(panics).await.unwrap_err();
    let begun = Arc::new(Notify::new());
    let seen = begun.clone();
    let pending = once().run(async move |_| -> Result<u32, io::Error> {
        seen.notify_one();
        std::future::pending().await
    });
    tokio::select! {
        _ = pending => unreachable!("it does not end"),
        () = begun.notified() => {}
    }
    let OnceEntry::Vacant(guard) = once().begin().await.unwrap() else {
        panic!("nothing was recorded");
    };
    drop(guard);
    assert!(other.once("job").stored().await.unwrap().is_none());
    let ran = other
        .once("job")
        .wait(LONG)
        .run(async |_| Ok::<_, io::Error>(7));
    let ran = ran.await.unwrap().unwrap();
    assert!(ran.value == 7 && !ran.is_replay);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_does_not_wait_is_refused_while_the_work_runs() {
    let (_server, [locks, other]) = clients().await;
    let OnceEntry::Vacant(guard) = locks.once("job").begin().await.unwrap() else {
        panic!("it is free");
    };
    for locks in [&locks, &other] {
        let refused = locks.once("job").no_wait().begin().await.unwrap_err();
        assert_eq!(refused.kind(), LockErrorKind::Running, "{refused}");
        assert_eq!(refused.key().unwrap().as_str(), "job");
    }
    guard.complete(b"done").await.unwrap();
    for locks in [&locks, &other] {
        let done = locks.once("job").no_wait().begin().await.unwrap();
        assert!(matches!(done, OnceEntry::Done(done) if done.value == b"done"));
        // A plain lock of this name is no way around it.
        for request in [locks.exclusive("job"), locks.shared("job").no_wait()] {
            let refused = request.acquire().await.unwrap_err();
            assert_eq!(refused.kind(), LockErrorKind::Done, "{refused}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_result_of_work_that_has_lost_its_lock_is_refused() {
    let (_server, [locks, other]) = clients().await;
    let OnceEntry::Vacant(guard) = locks.once("job").begin().await.unwrap() else {
        panic!("it is free");
    };
    other.revoke("job").await.unwrap();
    let ran = other.once("job").run(async |_| Ok::<_, io::Error>(2)).await;
    assert!(!ran.unwrap().unwrap().is_replay);
    let refused = guard.complete(b"1").await.unwrap_err();
    let is_lost = matches!(
        refused.kind(),
        LockErrorKind::Lost(Loss::Revoked | Loss::Taken)
    );
    assert!(is_lost, "{refused}");
    let done = other.once("job").stored().await.unwrap().unwrap();
    assert_eq!(done.value, b"2");
    // While it runs: the body is dropped.
    let lost = locks.once("again").run(async |_| {
        other.revoke("again").await.unwrap();
        std::future::pending::<Result<u32, io::Error>>().await
    });
    let lost = timeout(LONG, lost).await.unwrap().unwrap_err();
    assert!(matches!(lost.kind(), LockErrorKind::Lost(_)), "{lost}");
    assert!(other.once("again").stored().await.unwrap().is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_result_can_be_forgotten_and_work_that_runs_cannot() {
    let (_server, [locks, other]) = clients().await;
    let work = Work::default();
    assert!(!other.once("job").forget().await.unwrap());
    work.charge(&locks, "job").await.unwrap();
    assert!(work.charge(&locks, "job").await.unwrap().is_replay);
    assert!(other.once("job").forget().await.unwrap());
    let again = work.charge(&other, "job").await.unwrap();
    assert!(!again.is_replay && again.value == "receipt 1");
    assert!(locks.once("job").forget().await.unwrap());
    let OnceEntry::Vacant(guard) = locks.once("job").begin().await.unwrap() else {
        panic!("it is free");
    };
    assert!(!other.once("job").forget().await.unwrap());
    guard.held().verify().await.unwrap();
    guard.release().await.unwrap();
}

/// Between the look at a result and its removal, another process removes it and begins the work
/// again.
#[tokio::test]
async fn to_forget_a_result_never_frees_work_that_runs() {
    let inner = Arc::new(MemoryStore::new());
    let other = LockClient::with_store(inner.clone());
    let (begun, running) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (looked, go_on) = (begun.clone(), running.clone());
    let store = FaultyStore::new(inner, move |call: Call| {
        let (looked, go_on) = (looked.clone(), go_on.clone());
        async move {
            if matches!(call.operation, Operation::Revoke(..)) {
                looked.notify_one();
                go_on.notified().await;
            }
            call.execute().await
        }
    });
    let locks = LockClient::with_store(store);
    let ran = locks.once("job").run(async |_| Ok::<_, io::Error>(1)).await;
    ran.unwrap().unwrap();
    let forgetting = tokio::spawn(locks.once("job").forget());
    begun.notified().await;
    assert!(other.once("job").forget().await.unwrap());
    let OnceEntry::Vacant(guard) = other.once("job").begin().await.unwrap() else {
        panic!("it was forgotten");
    };
    running.notify_one();
    assert!(!forgetting.await.unwrap().unwrap());
    guard.held().verify().await.unwrap();
    guard.complete(b"2").await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn results_that_are_too_long_or_cannot_be_read_are_errors() {
    let (_server, [locks, other]) = clients().await;
    let long = locks
        .once("job")
        .max_bytes(3)
        .run_bytes(async |_| Ok::<_, io::Error>(vec![0; 4]));
    let refused = long.await.unwrap_err();
    assert_eq!(refused.kind(), LockErrorKind::InvalidResult, "{refused}");
    let fits = other
        .once("job")
        .max_bytes(3)
        .run_bytes(async |_| Ok::<_, io::Error>(vec![0; 3]));
    assert!(!fits.await.unwrap().unwrap().is_replay);
    // Another version has recorded something else: the work must not run.
    let unreadable = locks
        .once("job")
        .run(async |_| -> Result<u32, io::Error> { unreachable!("it is done") });
    let refused = unreadable.await.unwrap_err();
    assert_eq!(refused.kind(), LockErrorKind::InvalidResult, "{refused}");
    assert!(refused.to_string().contains("lock job: "), "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_without_meaning_are_refused_before_the_store_is_asked() {
    let locks = LockClient::in_memory();
    let second = Duration::from_secs(1);
    let with = |spec| locks.once("k").spec(spec);
    for (request, part) in [
        (with(LockSpec::shared()), "one holder"),
        (with(LockSpec::exclusive().reentrant()), "reentrant"),
        (with(LockSpec::exclusive().min_hold(second)), "min_hold"),
        (locks.once("k").keep(second / 2), "500ms"),
        (locks.once("k").keep(second * 86_400 * 367), "366 days"),
    ] {
        let refused = request.begin().await.unwrap_err();
        assert_eq!(refused.kind(), LockErrorKind::InvalidSpec, "{refused}");
        assert!(refused.to_string().contains(part), "{refused}");
    }
    let defaults = LockSpec::exclusive().reentrant();
    let reentrant = LockClient::builder().defaults(defaults).build_in_memory();
    let once = reentrant.unwrap().once("k").no_reentrant();
    assert!(matches!(once.begin().await, Ok(OnceEntry::Vacant(_))));
    let servers = [
        RedisServer::start().await,
        RedisServer::start().await,
        RedisServer::start().await,
    ];
    let url = format!(
        "redlock:{}",
        servers.each_ref().map(RedisServer::url).join(",")
    );
    let locks = LockClient::connect(&url).await.unwrap();
    let refused = locks.once("k").begin().await.unwrap_err();
    assert!(refused.to_string().contains("a majority"), "{refused}");
}

/// The release is executed, or not, and its reply is lost.
#[tokio::test(flavor = "multi_thread")]
async fn a_record_whose_reply_is_lost_is_known_in_the_end() {
    for is_executed in [true, false] {
        let inner = Arc::new(MemoryStore::new());
        let store = FaultyStore::new(inner, move |call: Call| async move {
            let is_first = matches!(call.operation, Operation::Release(_)) && call.nth == 0;
            if !is_first {
                return call.execute().await;
            }
            if is_executed {
                call.execute().await?;
            }
            std::future::pending().await
        });
        let defaults = LockSpec::exclusive().lease(LONG);
        let builder = LockClient::builder().defaults(defaults);
        let locks = builder.build_with_store(store).unwrap();
        let ran = locks.once("job").run(async |_| Ok::<_, io::Error>(7)).await;
        assert_eq!(ran.unwrap().unwrap().value, 7, "{is_executed}");
        let done = locks.once("job").stored().await.unwrap().unwrap();
        assert_eq!(done.value, b"7");
    }
}

/// A waiter that a forged message has deceived may have the fencing token of the holder.
#[tokio::test(flavor = "multi_thread")]
async fn a_result_of_another_holder_with_the_same_fencing_token_is_not_its_own() {
    let inner = Arc::new(MemoryStore::new());
    let others = inner.clone();
    let store = FaultyStore::new(inner, move |call: Call| {
        let others = others.clone();
        async move {
            let Operation::Release(release) = &call.operation else {
                return call.execute().await;
            };
            if call.nth == 0 {
                let Hold { key, mode, .. } = &release.hold;
                others.abandon(&release.hold).await?;
                let other = Hold::new(key.clone(), *mode, Token::random());
                let deadline = Instant::now() + LONG;
                others
                    .acquire(&KeyRequest::new(other.clone(), LONG, deadline))
                    .await?;
                let fence = release.result.as_ref().unwrap().0;
                let done = Release::new(other).keep_for(Some(LONG));
                others
                    .release(&done.result(Some((fence, b"8"[..].into()))))
                    .await?;
            }
            std::future::pending().await
        }
    });
    let locks = LockClient::with_store(store);
    let once = locks.once("job").lease(Duration::from_secs(1));
    let ran = once.run(async |_| Ok::<_, io::Error>(7)).await;
    let error = ran.unwrap_err();
    let is_told = matches!(
        error.kind(),
        LockErrorKind::ReleaseUnknown | LockErrorKind::Lost(_)
    );
    assert!(is_told, "{error}");
    let done = locks.once("job").stored().await.unwrap().unwrap();
    assert_eq!(done.value, b"8");
}

/// The store refuses the result itself, as one that is too long for it.
#[tokio::test(flavor = "multi_thread")]
async fn a_result_that_the_store_refuses_leaves_the_key_free() {
    let store = FaultyStore::new(Arc::new(MemoryStore::new()), move |call: Call| async move {
        match &call.operation {
            Operation::Release(release) if release.result.is_some() => {
                Err(StoreError::new(StoreErrorKind::Unsupported, "too long"))
            }
            _ => call.execute().await,
        }
    });
    let locks = LockClient::with_store(store);
    let refused = locks.once("job").run(async |_| Ok::<_, io::Error>(7));
    let refused = timeout(Duration::from_secs(2), refused).await.unwrap();
    let refused = refused.unwrap_err();
    assert_eq!(refused.kind(), LockErrorKind::ReleaseUnknown, "{refused}");
    assert!(
        refused.to_string().contains("was not recorded"),
        "{refused}"
    );
    let OnceEntry::Vacant(guard) = locks.once("job").begin().await.unwrap() else {
        panic!("nothing was recorded");
    };
    guard.release().await.unwrap();
}

#[derive(Debug, PartialEq, serde::Serialize, serde::Deserialize)]
struct Report {
    lines: u32,
}

static RUNS: AtomicUsize = AtomicUsize::new(0);

#[distributed_lock(key = "report:{day}", once = "48h", wait = "30s", held = lock, client = locks)]
async fn report(locks: &LockClient, day: u32, fails: bool) -> Result<Report, LockError> {
    assert!(!lock.is_lost());
    let lines = RUNS.fetch_add(1, Ordering::Relaxed) as u32;
    if fails {
        return Err(locks
            .once("k")
            .keep(Duration::ZERO)
            .begin()
            .await
            .unwrap_err());
    }
    Ok(Report { lines })
}

#[distributed_lock(key = "report:{day}", once = "48h", no_wait, on_busy = skip)]
async fn unit(day: u32) -> Result<(), LockError> {
    RUNS.fetch_add(1, Ordering::Relaxed);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_function_runs_once_for_each_key() {
    let (_server, [locks, other]) = clients().await;
    report(&locks, 1, true).await.unwrap_err();
    let first = report(&locks, 1, false).await.unwrap();
    assert_eq!(first, Report { lines: 1 });
    assert_eq!(report(&other, 1, true).await.unwrap(), first);
    assert_eq!(report(&other, 2, false).await.unwrap(), Report { lines: 2 });
    // Another value under the same key.
    let refused = locks.as_default(unit(1)).await.unwrap_err();
    assert_eq!(refused.kind(), LockErrorKind::InvalidResult, "{refused}");
    assert_eq!(refused.key().unwrap().as_str(), "report:1");
    locks.as_default(unit(3)).await.unwrap();
    other.as_default(unit(3)).await.unwrap();
    assert_eq!(RUNS.load(Ordering::Relaxed), 4);
    let OnceEntry::Vacant(_guard) = other.once("report:4").begin().await.unwrap() else {
        panic!("it is free");
    };
    locks.as_default(unit(4)).await.unwrap();
    assert_eq!(RUNS.load(Ordering::Relaxed), 4);
}
