//! Rules 7 and 8: a request that is executed late does nothing, and one whose reply is lost leaves
//! nothing behind.

use std::{
    future::pending,
    sync::{Arc, Mutex},
    time::Duration,
};

use lock_runtime::{
    LockClient, LockErrorKind, Mode,
    store::{
        AcquireAllReply, AcquireReply, Instant, KeyRequest, MemoryStore, Store as _, StoreError,
        StoreErrorKind,
    },
};
use lock_tests::{
    FaultyStore, Proxy, RedisServer,
    faulty_store::Operation,
    proxy::{Direction, DropReply},
    shared_server, unique,
};
use tokio::time::{sleep_until, timeout};

use super::{
    HOUR, LONG, eventually, fresh_hold, is_free, key,
    monitor::{Monitor, words},
    redis_on, warm_client,
};

// Rule 7.
#[tokio::test]
async fn a_late_acquire_does_nothing() {
    let server = RedisServer::start().await;
    let store = redis_on(&server).await;
    server.stop();
    let deadline = Instant::now() + Duration::from_millis(200);
    let one = KeyRequest::new(fresh_hold(Mode::Exclusive), HOUR, deadline);
    let shared = KeyRequest::new(fresh_hold(Mode::Shared), HOUR, deadline);
    let all = [KeyRequest::new(fresh_hold(Mode::Exclusive), HOUR, deadline)];
    let resume = async {
        sleep_until((deadline + Duration::from_millis(50)).for_timer()).await;
        server.resume();
    };
    let (one, shared, all, ()) = tokio::join!(
        store.acquire(&one),
        store.acquire(&shared),
        store.acquire_all(&all),
        resume
    );
    assert_eq!(
        (one.unwrap(), shared.unwrap()),
        (AcquireReply::Late, AcquireReply::Late)
    );
    assert_eq!(
        all.unwrap(),
        AcquireAllReply::Refused {
            index: 0,
            reply: AcquireReply::Late
        }
    );
    assert_eq!(server.keys("*").await, [""; 0]);
}

// Rule 7: the bound on which rule 8 relies.
#[tokio::test(start_paused = true)]
async fn no_acquire_may_be_executed_a_second_after_its_call_timeout() {
    let store = FaultyStore::new(Arc::new(MemoryStore::new()), |call| async move {
        call.execute().await
    });
    let locks = LockClient::with_store(store.clone());
    for (lease, call_timeout) in [(HOUR, 500), (Duration::from_millis(600), 100)] {
        let (before, since) = (store.requests().len(), Instant::now());
        locks
            .exclusive("k")
            .lease(lease)
            .acquire()
            .await
            .unwrap()
            .release()
            .await
            .unwrap();
        locks
            .all(["k", "l"])
            .lease(lease)
            .no_wait()
            .acquire()
            .await
            .unwrap()
            .release()
            .await
            .unwrap();
        let requests = &store.requests()[before..];
        let ahead: Vec<_> = requests.iter().map(|one| one.deadline - since).collect();
        assert_eq!(ahead.len(), 3);
        assert!(
            ahead
                .iter()
                .all(|ahead| *ahead <= Duration::from_millis(call_timeout + 1000)),
            "{ahead:?}"
        );
    }
}

// Rule 8.
#[tokio::test(start_paused = true)]
async fn abandon_is_repeated_after_the_deadline_of_its_request() {
    for several in [false, true] {
        // The first request is executed after the abandon of its token.
        let overtaken = Arc::new(Mutex::<Option<KeyRequest>>::default());
        let store = FaultyStore::new(Arc::new(MemoryStore::new()), move |call| {
            let overtaken = overtaken.clone();
            async move {
                if let Operation::Acquire(request) = &call.operation
                    && call.nth == 0
                {
                    *overtaken.lock().unwrap() = Some(request.clone());
                    return pending().await;
                }
                let outcome = call.execute().await;
                if let Operation::Abandon(hold) = &call.operation {
                    let request = overtaken.lock().unwrap().take_if(|one| one.hold == *hold);
                    if let Some(request) = request {
                        let reply = call.inner.acquire(&request).await?;
                        assert!(matches!(reply, AcquireReply::Granted(_)), "{reply:?}");
                    }
                }
                outcome
            }
        });
        let locks = LockClient::with_store(store.clone());
        let request = locks.exclusive("k").lease(HOUR);
        if several {
            let guard = request
                .acquire()
                .await
                .expect("a waiter gets it long before the lease is over");
            guard.verify().await.unwrap();
        } else {
            let error = request.no_wait().acquire().await.unwrap_err();
            assert_eq!(error.kind(), LockErrorKind::Unavailable);
            locks.shutdown().await;
            assert!(is_free(&*store, &key("k")).await);
        }
        let overtaken = store.requests()[0].hold.token;
        let abandoned =
            store.count(|o| matches!(o, Operation::Abandon(hold) if hold.token == overtaken));
        assert!(abandoned >= 2, "{abandoned}");
    }
}

// Rule 8.
#[tokio::test(start_paused = true)]
async fn an_abandon_without_an_answer_is_repeated() {
    // The reply to the first acquire request is lost, and so are five abandons.
    let store = FaultyStore::new(Arc::new(MemoryStore::new()), |call| async move {
        match call.operation {
            Operation::Acquire(_) if call.nth == 0 => {
                call.execute().await?;
                pending().await
            }
            Operation::Abandon(_) if call.nth < 5 => {
                Err(StoreError::new(StoreErrorKind::Unavailable, "lost"))
            }
            _ => call.execute().await,
        }
    });
    let locks = LockClient::with_store(store.clone());
    locks
        .exclusive("k")
        .lease(HOUR)
        .no_wait()
        .acquire()
        .await
        .unwrap_err();
    let since = Instant::now();
    while !is_free(&*store, &key("k")).await {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(
        since.elapsed() < Duration::from_secs(60),
        "{:?}",
        since.elapsed()
    );
}

// Rule 8, and failure 3 seen in other libraries.
#[tokio::test]
async fn lost_answers_leave_no_key() {
    let server = shared_server().await;
    let proxy = Proxy::to(server).await;
    let locks = warm_client(&proxy.url()).await;
    let name = unique("lost");
    // The client makes a second attempt, and the abandon of the first token may come in between.
    proxy.drop_reply(DropReply::next().to("EVALSHA").times(3));
    let error = locks
        .exclusive(name.as_str())
        .lease(HOUR)
        .no_wait()
        .acquire()
        .await
        .unwrap_err();
    assert_eq!(error.kind(), LockErrorKind::Unavailable, "{error}");
    proxy.let_through().await;
    eventually("the lock is given up", async || {
        server
            .query::<i64>(&["EXISTS", &format!("lock:{name}")])
            .await
            == 0
    })
    .await;

    // The same for several keys, where a partial grant would do as much harm.
    let names = [unique("lost"), unique("lost")];
    proxy.drop_reply(DropReply::next().to("EVALSHA").times(5));
    locks
        .all(names.iter().map(String::as_str))
        .lease(HOUR)
        .no_wait()
        .acquire()
        .await
        .unwrap_err();
    proxy.let_through().await;
    for name in names.map(|name| format!("lock:{name}")) {
        eventually("all are given up", async || {
            server.query::<i64>(&["EXISTS", &name]).await == 0
        })
        .await;
    }
}

// Rule 8.
#[tokio::test]
async fn who_waits_gets_the_lock_in_spite_of_lost_answers() {
    let server = shared_server().await;
    let proxy = Proxy::to(server).await;
    let locks = warm_client(&proxy.url()).await;
    for mode in ["write", "read"] {
        proxy.drop_reply(DropReply::next().to("EVALSHA").times(3));
        let name = unique("lost");
        let request = if mode == "read" {
            locks.shared(name.as_str())
        } else {
            locks.exclusive(name.as_str())
        };
        let guard = timeout(LONG, request.lease(HOUR).wait(LONG).acquire())
            .await
            .unwrap()
            .unwrap();
        proxy.let_through().await;
        guard.verify().await.unwrap();
        eventually("one holder is left", async || {
            locks.inspect(name.as_str()).await.unwrap().holders.len() == 1
        })
        .await;
        guard.release().await.unwrap();
        // A leftover grant would delay this until it is abandoned.
        locks
            .exclusive(name.as_str())
            .wait(LONG)
            .acquire()
            .await
            .unwrap()
            .release()
            .await
            .unwrap();
    }
    assert!(proxy.dropped_replies() >= 2);
}

// Failure 3 seen in other libraries: a request that is repeated counts once, and its validity does
// not exceed the lease in the store.
#[tokio::test]
async fn a_question_that_is_repeated_after_a_lost_answer_is_one() {
    let server = shared_server().await;
    let proxy = Proxy::to(server).await;
    let locks = warm_client(&proxy.url()).await;
    for mode in ["write", "read"] {
        let name = unique("repeated");
        proxy.drop_reply(DropReply::next().to("EVALSHA"));
        let request = if mode == "read" {
            locks.shared(name.as_str())
        } else {
            locks.exclusive(name.as_str())
        };
        let guard = timeout(LONG, request.wait(LONG).acquire())
            .await
            .unwrap()
            .unwrap();
        let holders = async || locks.inspect(name.as_str()).await.unwrap().holders;
        eventually("one holder is left", async || holders().await.len() == 1).await;
        assert!(Some(guard.validity()) < holders().await[0].ttl, "{mode}");
        guard.release().await.unwrap();
        assert!(
            locks
                .inspect(name.as_str())
                .await
                .unwrap()
                .holders
                .is_empty(),
            "{mode}"
        );
    }
}

// Rule 1: the first request may be executed after the second, and after the release of the lock.
#[tokio::test]
async fn a_token_is_sent_in_one_request_only() {
    let server = shared_server().await;
    let proxy = Proxy::to(server).await;
    let locks = warm_client(&proxy.url()).await;
    let name = unique("once");
    let monitor = Monitor::of(server).await;
    proxy.drop_reply(DropReply::next().to("EVALSHA"));
    let _ = locks.exclusive(name.as_str()).no_wait().acquire().await;
    proxy.drop_reply(DropReply::next().to("EVALSHA"));
    locks
        .exclusive(name.as_str())
        .wait(LONG)
        .acquire()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
    let lines = monitor.lines_so_far(server).await;
    // Only the script of an acquire has a deadline, in microseconds, as its first argument.
    let requests = lines
        .iter()
        .map(|line| words(line))
        .filter(|words| words.contains(&&*format!("lock:{name}")));
    let requests = requests.filter(|words| {
        words
            .get(6)
            .is_some_and(|deadline| deadline.parse::<u64>().is_ok())
    });
    let mut tokens: Vec<_> = requests.map(|words| words[9].to_owned()).collect();
    assert!(tokens.len() >= 4, "{lines:?}");
    tokens.sort_unstable();
    let asked = tokens.len();
    tokens.dedup();
    assert_eq!(tokens.len(), asked, "{lines:?}");
}

// Rules 7 and 8: executed before its deadline, the grant is not reported and is abandoned; executed
// after it, the request does nothing.
#[tokio::test]
async fn a_delayed_acquire_leaves_no_key() {
    let server = shared_server().await;
    for delay in [700, 2_000] {
        let proxy = Proxy::to(server).await;
        let locks = warm_client(&proxy.url()).await;
        let name = unique("delayed");
        proxy.delay(Direction::ToServer, Duration::from_millis(delay));
        let error = locks
            .exclusive(name.as_str())
            .lease(HOUR)
            .no_wait()
            .acquire()
            .await
            .unwrap_err();
        assert_eq!(error.kind(), LockErrorKind::Unavailable, "{error}");
        proxy.let_through().await;
        // This follows all requests in flight.
        tokio::time::timeout(LONG, locks.shutdown()).await.unwrap();
        eventually("it is free", async || {
            server
                .query::<i64>(&["EXISTS", &format!("lock:{name}")])
                .await
                == 0
        })
        .await;
    }
}

// Rules 7 and 8.
#[tokio::test]
async fn an_acquire_that_a_stopped_server_finds_later_leaves_no_key() {
    let server = RedisServer::start().await;
    let locks = warm_client(&server.url()).await;
    server.stop();
    let wait = Duration::from_millis(700);
    let (one, permit, several) = tokio::join!(
        locks.exclusive("one").lease(HOUR).wait(wait).acquire(),
        locks
            .permits("permit", 2.try_into().unwrap())
            .lease(HOUR)
            .wait(wait)
            .acquire(),
        locks.all(["a", "b"]).lease(HOUR).wait(wait).acquire(),
    );
    for error in [one.unwrap_err(), permit.unwrap_err(), several.unwrap_err()] {
        assert_eq!(error.kind(), LockErrorKind::Unavailable, "{error}");
    }
    server.resume();
    // The server executes requests in the order of arrival, so this one comes last.
    let keys = async || server.keys("lock:*").await.is_empty();
    eventually("all are given up", keys).await;
    locks.shutdown().await;
    assert!(keys().await, "and nothing came back");
}
