//! Passwords and certificates that change while a client lives: its locks outlive that, and its
//! requests wait for it.

mod again;
mod files;
mod topologies;

use std::{
    error::Error,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use lock_runtime::{Credentials, LockClient, LockErrorKind, RedisOptions};
use lock_tests::{
    RedisServer,
    place::{LONG, begun, eventually, in_time},
};
use tokio::task::JoinSet;

const ALL: &str = "~* &* +@all";

/// The credentials that an application provides for its clients.
#[derive(Clone)]
pub(crate) struct Secret(Arc<Inner>);

struct Inner {
    credentials: Mutex<Result<Credentials, &'static str>>,
    asked: AtomicUsize,
}

impl Secret {
    pub(crate) fn new(credentials: Credentials) -> Self {
        Self(Arc::new(Inner {
            credentials: Mutex::new(Ok(credentials)),
            asked: AtomicUsize::new(0),
        }))
    }

    pub(crate) fn set(&self, credentials: Result<Credentials, &'static str>) {
        *self.0.credentials.lock().unwrap() = credentials;
    }

    fn asked(&self) -> usize {
        self.0.asked.load(Ordering::Relaxed)
    }

    pub(crate) fn provide(
        &self,
    ) -> impl Fn() -> std::future::Ready<Result<Credentials, Box<dyn Error + Send + Sync>>>
    + Send
    + Sync
    + 'static
    + use<> {
        let secret = self.clone();
        move || {
            secret.0.asked.fetch_add(1, Ordering::Relaxed);
            let credentials = secret.0.credentials.lock().unwrap().clone();
            std::future::ready(credentials.map_err(Into::into))
        }
    }
}

/// The user of all clients of these tests, with this password.
pub(crate) fn app(password: &str) -> Credentials {
    Credentials::new("app", password)
}

/// Replaces the password of the user on these servers, and ends its connections.
pub(crate) async fn rotate(servers: impl IntoIterator<Item = &RedisServer>, password: &str) {
    for server in servers {
        let password = format!(">{password}");
        server
            .command(&["ACL", "SETUSER", "app", "resetpass", &password])
            .await;
        server.command(&["CLIENT", "KILL", "USER", "app"]).await;
    }
}

/// Uses locks without a pause, and waits for them. No request is refused.
struct Load {
    tasks: JoinSet<u32>,
    ends: Arc<AtomicBool>,
}

impl Load {
    fn begin(locks: &LockClient) -> Self {
        let ends = Arc::new(AtomicBool::new(false));
        let tasks = (0..3).map(|task| {
            let (locks, ends) = (locks.clone(), ends.clone());
            async move {
                let mut served = 0;
                while !ends.load(Ordering::Relaxed) {
                    let key = format!("load-{}", task % 2);
                    let guard = locks.exclusive(key).wait(LONG).acquire().await.unwrap();
                    match guard.release().await {
                        Ok(()) => served += 1,
                        // The reply was lost with its connection.
                        Err(error) => assert_eq!(error.kind(), LockErrorKind::ReleaseUnknown),
                    }
                }
                served
            }
        });
        Self {
            tasks: tasks.collect(),
            ends,
        }
    }

    async fn end(self) {
        self.ends.store(true, Ordering::Relaxed);
        let served = self.tasks.join_all().await;
        assert!(served.iter().all(|served| *served > 0), "{served:?}");
    }
}

/// Asserts that a client under load, with a lock, outlives that the servers refuse its password
/// until they accept it again.
pub(crate) async fn outlive(
    locks: &LockClient,
    refuse: impl AsyncFnOnce(),
    accept: impl AsyncFnOnce(),
) {
    let lease = Duration::from_secs(4);
    let held = locks
        .exclusive("held")
        .lease(lease)
        .acquire()
        .await
        .unwrap();
    let load = Load::begin(locks);
    refuse().await;
    let at_once = || locks.exclusive("free").no_wait().acquire();
    eventually("they are refused, with the cause", async || {
        match at_once().await {
            Ok(guard) => drop(guard),
            Err(error) => return error.kind() == LockErrorKind::Unauthenticated,
        }
        false
    })
    .await;
    let request = locks.exclusive("free").wait(LONG).acquire();
    let waiting = tokio::spawn(begun(request).await);
    for _ in 0..3 {
        // On a busy machine the refusal may come later than the request waits for it.
        let error = loop {
            let error = at_once().await.unwrap_err();
            if error.kind() != LockErrorKind::Unavailable {
                break error;
            }
        };
        assert_eq!(error.kind(), LockErrorKind::Unauthenticated, "{error:?}");
    }
    assert!(!waiting.is_finished());
    accept().await;
    waiting.await.unwrap().unwrap().release().await.unwrap();
    held.verify().await.unwrap();
    load.end().await;
    held.release().await.unwrap();
}

async fn server() -> RedisServer {
    RedisServer::builder().user("app", "one", ALL).start().await
}

/// A client of a server without credentials in its URL.
async fn client_of(server: &RedisServer, secret: &Secret) -> LockClient {
    let options = RedisOptions::new().credentials(secret.provide());
    let builder = LockClient::builder().redis(options);
    builder.connect(&server.url()).await.unwrap()
}

#[tokio::test]
async fn a_password_of_the_url_that_is_refused_is_waited_for() {
    in_time(async {
        let server = server().await;
        let locks = LockClient::connect(&server.url_as("app", "one")).await;
        let locks = locks.unwrap();
        let refuse = async || rotate([&server], "two").await;
        outlive(&locks, refuse, async || rotate([&server], "one").await).await;
        let error = LockClient::connect(&server.url_as("app", "two")).await;
        let kind = error.unwrap_err().kind();
        assert_eq!(kind, LockErrorKind::Unauthenticated, "by a new client");
    })
    .await;
}

#[tokio::test]
async fn a_rotation_that_arrives_late_is_waited_for() {
    in_time(async {
        let (server, secret) = (server().await, Secret::new(app("one")));
        let locks = client_of(&server, &secret).await;
        let refuse = async || rotate([&server], "two").await;
        outlive(&locks, refuse, async || secret.set(Ok(app("two")))).await;
    })
    .await;
}

#[tokio::test]
async fn a_rotation_refuses_no_request() {
    in_time(async {
        let (server, secret) = (server().await, Secret::new(app("0")));
        rotate([&server], "0").await;
        let locks = client_of(&server, &secret).await;
        let held = locks.exclusive("held").acquire().await.unwrap();
        let load = Load::begin(&locks);
        for password in 1..=5 {
            let password = password.to_string();
            secret.set(Ok(app(&password)));
            rotate([&server], &password).await;
            // A request without waiting makes a second attempt on the next connection.
            let guard = locks.exclusive("k").no_wait().acquire().await.unwrap();
            drop(guard);
            eventually("the key is free again", async || {
                locks.inspect("k").await.unwrap().holders.is_empty()
            })
            .await;
        }
        load.end().await;
        held.release().await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn an_application_without_credentials_is_asked_again() {
    in_time(async {
        let (server, secret) = (server().await, Secret::new(app("one")));
        secret.set(Err("the vault is sealed"));
        let options = RedisOptions::new().credentials(secret.provide());
        let builder = LockClient::builder().redis(options);
        let error = builder.clone().connect(&server.url()).await.unwrap_err();
        assert_eq!(error.kind(), LockErrorKind::Unavailable);
        let text = lock_tests::chain(&error);
        assert!(
            text.contains("no credentials") && text.contains("the vault is sealed"),
            "{text}"
        );
        assert_eq!(secret.asked(), 2, "once for each attempt to connect");
        let locks = builder.connect_lazy(&server.url()).unwrap();
        let request = locks.exclusive("k").wait(LONG).acquire();
        let waiting = tokio::spawn(begun(request).await);
        let asked = secret.asked();
        eventually("it is asked again", async || secret.asked() > asked + 1).await;
        secret.set(Ok(app("one")));
        waiting.await.unwrap().unwrap().release().await.unwrap();
        secret.set(Ok(app("hunter2")));
        let error = LockClient::builder().redis(RedisOptions::new().credentials(secret.provide()));
        let error = error.connect(&server.url()).await.unwrap_err();
        assert_eq!(error.kind(), LockErrorKind::Unauthenticated);
        assert!(
            !format!("{error:?} {locks:?} {secret:?}", secret = app("hunter2")).contains("hunter2")
        );
    })
    .await;
}
