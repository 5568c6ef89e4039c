//! The connection that receives messages. It exists only while requests wait.

use std::{
    collections::HashMap,
    future::{pending, poll_fn},
    mem::replace,
    sync::{Arc, Mutex, Weak},
    time::Duration,
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use tokio::{
    sync::watch,
    time::{error::Elapsed, sleep, timeout},
};
use tokio_postgres::{AsyncMessage, Client, Error};

use super::{
    super::{
        failure::CALL,
        settings::{Settings, Target},
    },
    tls::Driver,
};
use crate::{
    shell::{
        sync::lock,
        time::{Instant, sleep_until},
    },
    store::{ClientId, records::Inbox},
};

/// The time for which messages are received after a request has last waited.
const EXPECTED_FOR: Duration = Duration::from_secs(15);
/// The pause before another attempt to connect, at first and at most. Half of it is random.
const PAUSE: Duration = Duration::from_millis(500);
const LONG_PAUSE: Duration = Duration::from_secs(2);

/// Returns the channel of a client.
pub(crate) fn channel(client: ClientId) -> String {
    format!("lock_runtime_{client}")
}

/// The clients that expect messages.
pub(crate) struct Listening(Arc<Shared>);

struct Shared {
    target: Target,
    state: Mutex<ListeningState>,
    /// Notified of each change of the clients, and of the channels that the connection listens to.
    changed: watch::Sender<()>,
}

#[derive(Default)]
struct ListeningState {
    /// Until when each client expects messages, and whether the connection listens to its channel.
    clients: HashMap<ClientId, (Instant, bool)>,
    inboxes: Vec<Weak<dyn Inbox>>,
    is_running: bool,
}

impl Listening {
    pub(crate) fn new(target: Target) -> Self {
        Self(Arc::new(Shared {
            target,
            state: Mutex::default(),
            changed: watch::Sender::new(()),
        }))
    }

    pub(crate) fn inform(&self, inbox: Weak<dyn Inbox>) {
        let inboxes = &mut lock(&self.0.state).inboxes;
        inboxes.retain(|inbox| inbox.strong_count() > 0);
        inboxes.push(inbox);
    }

    /// Waits until messages to `client` are received, for a bounded time.
    pub(crate) async fn expect(&self, client: ClientId) {
        let mut changed = self.0.changed.subscribe();
        let until = Instant::now() + EXPECTED_FOR;
        let is_listening =
            |state: &ListeningState| state.clients.get(&client).is_some_and(|(_, it)| *it);
        let was_running = {
            let mut state = lock(&self.0.state);
            state.clients.entry(client).or_insert((until, false)).0 = until;
            if is_listening(&state) {
                return;
            }
            replace(&mut state.is_running, true)
        };
        if !was_running {
            // Spawn without the lock: a runtime that is shutting down drops a new task on the spot.
            tokio::spawn(receive(Running(Arc::downgrade(&self.0))));
        }
        self.0.changed.send_replace(());
        let state = &self.0.state;
        let listens = changed.wait_for(|()| is_listening(&lock(state)));
        // Polls find the grant if there is no connection for messages.
        let _ = timeout(CALL, listens).await;
    }
}

impl Shared {
    fn inboxes(&self) -> Vec<Arc<dyn Inbox>> {
        let state = lock(&self.state);
        state.inboxes.iter().filter_map(Weak::upgrade).collect()
    }

    /// Lets the waiters poll, as messages may have been lost, with data of the server.
    fn doubt(&self) {
        self.inboxes()
            .iter()
            .for_each(|inbox| inbox.connected(false));
    }

    /// Removes the clients that expect no messages any more. Returns the next changes of channels,
    /// or `None` if no client is left: the task ends.
    fn plan(&self) -> Option<Plan> {
        let mut state = lock(&self.state);
        let now = Instant::now();
        let mut plan = Plan::default();
        let ListeningState {
            clients,
            is_running,
            ..
        } = &mut *state;
        clients.retain(|client, (until, is_heard)| {
            if *until <= now {
                plan.unneeded.extend(is_heard.then_some(*client));
                return false;
            }
            plan.unheard.extend((!*is_heard).then_some(*client));
            plan.until = Some(plan.until.map_or(*until, |first| first.min(*until)));
            true
        });
        if plan.until.is_none() {
            *is_running = false;
            return None;
        }
        Some(plan)
    }

    fn set_heard(&self, clients: &[ClientId], is_heard: bool) {
        let mut state = lock(&self.state);
        for client in clients {
            if let Some(entry) = state.clients.get_mut(client) {
                entry.1 = is_heard;
            }
        }
    }
}

/// The next changes of the channels.
#[derive(Debug, Default, PartialEq, Eq)]
struct Plan {
    /// The clients to whose channels the connection does not listen yet.
    unheard: Vec<ClientId>,
    /// The clients to whose channels it listens in vain.
    unneeded: Vec<ClientId>,
    /// When the next client may no longer expect messages.
    until: Option<Instant>,
}

impl Plan {
    /// Returns the statements that change the channels, if any.
    fn statements(&self) -> Option<String> {
        // The names consist of letters, digits and underscores.
        let statement = |verb| move |client: &ClientId| format!("{verb} {};", channel(*client));
        let unlisten = self.unneeded.iter().map(statement("unlisten"));
        let statements: String = unlisten
            .chain(self.unheard.iter().map(statement("listen")))
            .collect();
        (!statements.is_empty()).then_some(statements)
    }
}

/// The reason for which a connection is no longer used.
enum Ended {
    Unneeded,
    Lost(String),
}

/// Lets another task receive messages once this one has ended, with its runtime or by a panic.
struct Running(Weak<Shared>);

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(shared) = self.0.upgrade() {
            let mut state = lock(&shared.state);
            state.clients.clear();
            state.is_running = false;
        }
    }
}

impl Running {
    /// The state shows already that the task has ended, and another one may have begun.
    fn ended(&mut self) {
        self.0 = Weak::new();
    }
}

/// Receives messages while they are expected.
async fn receive(mut running: Running) {
    let shared = running.0.clone();
    let (mut was_lost, mut pause) = (false, PAUSE);
    loop {
        let Some(target) = shared.upgrade().and_then(|shared| {
            shared.plan()?;
            Some(shared.target.clone())
        }) else {
            return running.ended();
        };
        let ended = match target.settings().await {
            Ok(settings) => connect(&shared, settings, &mut was_lost).await,
            Err(error) => Ended::Lost(error.to_string()),
        };
        let (Some(shared), Ended::Lost(cause)) = (shared.upgrade(), ended) else {
            return running.ended();
        };
        let clients: Vec<_> = lock(&shared.state).clients.keys().copied().collect();
        shared.set_heard(&clients, false);
        tracing::debug!(%cause, "the connection for messages of locks was lost; waiters poll");
        if !was_lost {
            shared.doubt();
            pause = PAUSE;
        }
        was_lost = true;
        drop(shared);
        sleep(pause.mul_f64(0.5 + 0.5 * rand::random::<f64>())).await;
        pause = (pause * 2).min(LONG_PAUSE);
    }
}

/// Receives messages on a new connection.
async fn connect(shared: &Weak<Shared>, settings: Settings, was_lost: &mut bool) -> Ended {
    let Settings { config, tls, until } = settings;
    let replaced = async {
        match until {
            Some(until) => sleep_until(until).await,
            None => pending().await,
        }
    };
    let served = async {
        match timeout(CALL, tls.connect(&config)).await {
            Ok(Ok(connected)) => serve(shared, connected, was_lost).await,
            failed => unconnected(failed.map(|it| it.err())),
        }
    };
    tokio::select! {
        ended = served => ended,
        () = replaced => Ended::Lost("its credentials end".to_owned()),
    }
}

fn unconnected(error: Result<Option<Error>, Elapsed>) -> Ended {
    Ended::Lost(match error {
        Ok(Some(error)) => error.to_string(),
        _ => format!("no answer within {CALL:?}"),
    })
}

/// Receives messages on one connection until it breaks or none are expected. `was_lost`: the
/// previous connection was lost, so the waiters poll once this one listens.
async fn serve(
    shared: &Weak<Shared>,
    (client, mut connection): (Client, Driver),
    was_lost: &mut bool,
) -> Ended {
    let Some(mut changed) = shared.upgrade().map(|shared| shared.changed.subscribe()) else {
        return Ended::Unneeded;
    };
    loop {
        let Some(plan) = shared.upgrade().and_then(|shared| shared.plan()) else {
            return Ended::Unneeded;
        };
        if let Some(statements) = plan.statements() {
            let listening = timeout(CALL, client.batch_execute(&statements));
            tokio::select! {
                listening = listening => match listening {
                    Ok(Ok(())) => {}
                    failed => return unconnected(failed.map(Result::err)),
                },
                ended = messages(shared, &mut connection) => return ended,
            }
            if let Some(shared) = shared.upgrade() {
                shared.set_heard(&plan.unheard, true);
                shared.changed.send_replace(());
                if *was_lost {
                    shared.doubt();
                }
            }
            *was_lost = false;
            changed.mark_unchanged();
            continue;
        }
        let until = plan.until.unwrap_or_else(Instant::now);
        tokio::select! {
            ended = messages(shared, &mut connection) => return ended,
            _ = changed.changed() => {}
            () = sleep_until(until) => {}
        }
    }
}

/// Passes messages on until the connection breaks. Safe to drop and to call again.
async fn messages(shared: &Weak<Shared>, connection: &mut Driver) -> Ended {
    while let Some(message) = poll_fn(&mut *connection).await {
        let message = match message {
            Ok(AsyncMessage::Notification(message)) => message,
            Ok(_) => continue,
            Err(error) => return Ended::Lost(error.to_string()),
        };
        let (Some(shared), Ok(body)) = (shared.upgrade(), STANDARD.decode(message.payload()))
        else {
            continue;
        };
        shared
            .inboxes()
            .iter()
            .for_each(|inbox| inbox.deliver(&body));
    }
    Ended::Lost("it was closed".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::postgres::PostgresOptions;

    /// One of two clients waits all the time.
    #[tokio::test(start_paused = true)]
    async fn the_channel_of_a_client_that_no_longer_waits_is_left() {
        let options = PostgresOptions::default();
        let target = Target::new("postgres://localhost/test", &options).unwrap();
        let Listening(shared) = Listening::new(target);
        let [waits, waited] = [ClientId::random(), ClientId::random()];
        let expects = |client| {
            let until = Instant::now() + EXPECTED_FOR;
            lock(&shared.state)
                .clients
                .entry(client)
                .or_insert((until, false))
                .0 = until;
        };
        expects(waited);
        expects(waits);
        let plan = shared.plan().unwrap();
        assert_eq!(plan.unheard.len(), 2);
        shared.set_heard(&plan.unheard, true);
        tokio::time::advance(EXPECTED_FOR / 2).await;
        expects(waits);
        assert_eq!(shared.plan().unwrap().statements(), None);
        tokio::time::advance(EXPECTED_FOR / 2).await;
        let statements = shared.plan().unwrap().statements();
        assert_eq!(statements, Some(format!("unlisten {};", channel(waited))));
        assert_eq!(lock(&shared.state).clients.len(), 1);
        tokio::time::advance(EXPECTED_FOR).await;
        assert_eq!(shared.plan(), None);
    }
}
