//! Credentials that may change in the life of a client: the application, or a file, provides them
//! for each attempt to connect.

use std::{
    error::Error,
    fmt, fs,
    panic::AssertUnwindSafe,
    path::Path,
    sync::{Arc, Mutex},
    time::Duration,
};

use futures_util::{
    FutureExt as _,
    future::{BoxFuture, Shared},
};
use tokio::{task::spawn_blocking, time::timeout};

use crate::{
    shell::sync::lock,
    shell::time::Instant,
    store::{StoreError, StoreErrorKind},
};

/// The longest time for which an attempt to connect waits for credentials.
const PATIENCE: Duration = Duration::from_secs(1);
/// The time after which a call for credentials is given up: it may have waited on a runtime that
/// has ended.
const LONGEST: Duration = Duration::from_secs(30);
/// The shortest time after which a connection authenticates again.
const SHORTEST: Duration = Duration::from_millis(100);

/// The user and the password of a connection, for [`RedisOptions::credentials`],
/// [`PostgresOptions::credentials`] and [`EtcdOptions::credentials`].
///
/// `Debug` omits the password.
///
/// [`RedisOptions::credentials`]: crate::RedisOptions::credentials
/// [`EtcdOptions::credentials`]: crate::EtcdOptions::credentials
/// [`PostgresOptions::credentials`]: crate::PostgresOptions::credentials
#[derive(Clone)]
pub struct Credentials {
    pub(crate) user: Option<String>,
    pub(crate) password: String,
    valid_for: Option<Duration>,
}

impl Credentials {
    /// Creates the credentials of a user.
    pub fn new(user: impl Into<String>, password: impl Into<String>) -> Self {
        Self {
            user: Some(user.into()),
            ..Self::password(password)
        }
    }

    /// Creates the credentials of the user that the URL names, or of the default user.
    pub fn password(password: impl Into<String>) -> Self {
        Self {
            user: None,
            password: password.into(),
            valid_for: None,
        }
    }

    /// Sets the time from now for which a connection with these credentials may be used.
    ///
    /// After about three quarters of it, the application is asked for the next credentials. A
    /// connection to Redis then authenticates with them, without an interruption, and goes on
    /// with its earlier ones if they are refused. A connection to PostgreSQL is replaced, and etcd
    /// is asked for a new token.
    ///
    /// Leave it out where a server accepts its connections for as long as they last.
    #[must_use]
    pub fn valid_for(self, time: Duration) -> Self {
        Self {
            valid_for: Some(time),
            ..self
        }
    }

    /// Returns when a connection with these credentials has to authenticate again.
    pub(crate) fn again_at(&self) -> Option<Instant> {
        let valid_for = self.valid_for?;
        // All connections of all clients do not come at once.
        let share = 0.7 + 0.1 * rand::random::<f64>();
        Instant::now().checked_add(valid_for.mul_f64(share).max(SHORTEST))
    }
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials")
            .field("user", &self.user)
            .field("valid_for", &self.valid_for)
            .finish_non_exhaustive()
    }
}

/// The result of a function of the application that provides credentials.
pub(crate) type Provided = Result<Credentials, Box<dyn Error + Send + Sync>>;

/// The application's function that provides credentials.
#[derive(Clone)]
pub(crate) struct Provider(Arc<Inner>);

struct Inner {
    provide: Arc<dyn Fn() -> BoxFuture<'static, Provided> + Send + Sync>,
    /// The latest call, and when it was made.
    call: Mutex<Option<(Call, Instant)>>,
}

type Call = Shared<BoxFuture<'static, Result<Credentials, StoreError>>>;

impl Provider {
    pub(crate) fn new<P, F>(provide: P) -> Self
    where
        P: Fn() -> F + Send + Sync + 'static,
        F: Future<Output = Provided> + Send + 'static,
    {
        Self(Arc::new(Inner {
            provide: Arc::new(move || provide().boxed()),
            call: Mutex::default(),
        }))
    }

    /// Asks for the present credentials. A call that takes longer than one attempt to connect goes
    /// on in the next one, and serves all connections that ask meanwhile.
    ///
    /// # Errors
    /// `Unavailable`, with the error of the application.
    pub(crate) async fn credentials(&self) -> Result<Credentials, StoreError> {
        // The earlier call, a future of the application, is dropped without the mutex.
        let (call, _earlier) = {
            let mut latest = lock(&self.0.call);
            match &*latest {
                Some((call, since)) if call.peek().is_none() && since.elapsed() < LONGEST => {
                    (call.clone(), None)
                }
                _ => {
                    let call = self.call();
                    let earlier = latest.replace((call.clone(), Instant::now()));
                    (call, earlier)
                }
            }
        };
        let late = |_| Err(none(format!("none within {PATIENCE:?}")));
        timeout(PATIENCE, call).await.unwrap_or_else(late)
    }

    fn call(&self) -> Call {
        let provide = self.0.provide.clone();
        // The function itself runs with the future as well, without the mutex.
        let call = AssertUnwindSafe(async move { provide().await }).catch_unwind();
        let call = call.map(|provided| match provided {
            Ok(Ok(credentials)) => Ok(credentials),
            Ok(Err(error)) => Err(none(chain(&*error))),
            Err(_) => Err(none("the function of the application has panicked")),
        });
        call.boxed().shared()
    }
}

impl fmt::Debug for Provider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Provider")
    }
}

/// Provides the password in a file, which is read each time.
pub(crate) fn in_file(path: &str) -> impl Fn() -> BoxFuture<'static, Provided> + use<> {
    let path: Arc<Path> = Path::new(path).into();
    move || {
        let path = path.clone();
        let reading = spawn_blocking(move || password_in(&path).map(Credentials::password));
        async { Ok(reading.await??) }.boxed()
    }
}

/// Reads the password in a file. Returns a complaint if there is none.
pub(crate) fn password_in(path: &Path) -> Result<String, String> {
    let text = fs::read_to_string(path);
    let text = text.map_err(|error| format!("the file {path:?} cannot be read: {error}"))?;
    match text.trim_end() {
        "" => Err(format!("the file {path:?} is empty")),
        password => Ok(password.to_owned()),
    }
}

fn none(cause: impl fmt::Display) -> StoreError {
    let message = format!("no credentials for a connection: {cause}");
    StoreError::new(StoreErrorKind::Unavailable, message)
}

/// The error with its causes.
fn chain(error: &dyn Error) -> String {
    let (mut text, mut source) = (error.to_string(), error.source());
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures_util::future::join;
    use tokio::time::sleep;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_slow_call_serves_all_that_ask_until_its_end() {
        let count = Arc::new(AtomicUsize::new(0));
        let counted = count.clone();
        let provider = Provider::new(move || {
            let number = counted.fetch_add(1, Ordering::Relaxed);
            async move {
                sleep(3 * PATIENCE / 2).await;
                Ok(Credentials::password(number.to_string()))
            }
        });
        let (one, other) = join(provider.credentials(), provider.credentials()).await;
        for late in [one, other] {
            let error = late.unwrap_err();
            assert_eq!(error.kind(), StoreErrorKind::Unavailable);
            assert!(error.to_string().contains("none within 1s"), "{error}");
        }
        assert_eq!(provider.credentials().await.unwrap().password, "0");
        assert_eq!(count.load(Ordering::Relaxed), 1);
        provider.credentials().await.unwrap_err();
        assert_eq!(provider.credentials().await.unwrap().password, "1");
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_that_never_ends_is_given_up() {
        let is_first = Mutex::new(true);
        let provider = Provider::new(move || {
            let is_first = std::mem::take(&mut *lock(&is_first));
            async move {
                if is_first {
                    std::future::pending::<()>().await;
                }
                Ok(Credentials::new("app", "hunter2"))
            }
        });
        let since = Instant::now();
        while provider.credentials().await.is_err() {}
        assert_eq!(since.elapsed(), LONGEST);
    }

    #[tokio::test]
    async fn a_panic_of_the_application_is_an_error() {
        let provider = Provider::new(|| async { panic!("hunter2") });
        let error = provider.credentials().await.unwrap_err().to_string();
        assert!(
            error.contains("panicked") && !error.contains("hunter2"),
            "{error}"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn credentials_are_replaced_before_they_end() {
        assert_eq!(Credentials::password("a").again_at(), None);
        let valid_for = |time| {
            let credentials = Credentials::password("a").valid_for(time);
            credentials.again_at().map(|at| at - Instant::now())
        };
        let hour = Duration::from_secs(3600);
        let after = valid_for(hour).unwrap();
        assert!(
            hour * 7 / 10 <= after && after <= hour * 8 / 10,
            "{after:?}"
        );
        assert_eq!(valid_for(Duration::ZERO), Some(SHORTEST));
        assert_eq!(valid_for(Duration::MAX), None);
    }
}
