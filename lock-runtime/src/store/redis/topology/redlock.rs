//! Connects to several independent servers: from their URLs to the store over all of them.

use std::{sync::Arc, time::Duration};

use futures_util::{StreamExt as _, future::BoxFuture, stream::FuturesUnordered};

use super::{
    super::{
        CONNECT, RedisStore,
        connection::{Connection, pushes::Pushes},
        settings::RedisOptions,
        url::REDLOCK,
    },
    runs::{Runs, same_server},
    servers::Servers,
};
use crate::{
    error::{LockError, LockErrorKind},
    shell::{
        runtime,
        time::{Instant, sleep_until},
    },
    store::{
        QuorumMember, QuorumStore, StoreError, StoreErrorKind, check_count, majority,
        namespace::check_namespace,
        remote::{Connecting, cannot_keep_locks},
    },
};

/// The time that the other servers have to report an error once a majority is connected.
const STRAGGLERS: Duration = Duration::from_millis(300);

/// Servers that a client connects to in the background.
pub(crate) struct Members {
    servers: Vec<(String, Arc<Connection>)>,
    runs: Runs,
    namespace: String,
}

/// The URLs in `redlock:url,url,url`.
///
/// # Errors
/// `InvalidUrl`, without the URL, which may contain a password.
pub(crate) fn urls_of(url: &str) -> Result<Vec<&str>, LockError> {
    let (_, list) = url.split_once(':').unwrap_or_default();
    let urls: Vec<_> = list.split(',').map(str::trim).collect();
    let complaint = if list.starts_with("//") {
        "after \"redlock:\" the URLs of the servers follow, each with its own redis://"
    } else if urls.contains(&"") {
        "the URL of one of the servers is empty"
    } else {
        check_count(urls.len()).map_err(|refused| REDLOCK.refuse(refused))?;
        return Ok(urls);
    };
    Err(REDLOCK.refuse(complaint))
}

/// Starts to connect to all servers in a URL `redlock:..`.
///
/// # Errors
/// `InvalidUrl`, `InvalidSpec`, `NoRuntime`.
pub(crate) fn open(
    url: &str,
    namespace: &str,
    settings: &RedisOptions,
) -> Result<Members, LockError> {
    check_namespace(namespace)?;
    let urls = urls_of(url)?;
    // Each connection is established in a task of its own.
    runtime::check()?;
    let mut endpoints = Vec::with_capacity(urls.len());
    for server in &urls {
        let server = REDLOCK.endpoint(server, settings)?;
        // A proxy would hide a restart of the server from the quarantine.
        server.check_messages().map_err(|it| REDLOCK.refuse(it))?;
        let name = server.to_string();
        if endpoints.iter().any(|(other, _)| *other == name) {
            return Err(REDLOCK.refuse(same_server(&name, &name)));
        }
        endpoints.push((name, server));
    }
    let runs = Runs::default();
    let connection = |server, place| {
        let pushes = Pushes::new(namespace).confirming(settings.confirms());
        Connection::member(server, pushes, place, &runs, settings)
    };
    let servers = (1..)
        .zip(endpoints)
        .map(|(number, (name, server))| (name, connection(server, (number, urls.len()))))
        .collect();
    Ok(Members {
        servers,
        runs,
        namespace: namespace.to_owned(),
    })
}

impl Members {
    /// The store of which a majority has to agree.
    pub(crate) fn store(&self, longest_lease: Duration) -> Result<QuorumStore, LockError> {
        QuorumStore::new(self.each(), longest_lease)
    }

    /// A store for each server, with its name.
    pub(crate) fn each(&self) -> Vec<(String, Arc<dyn QuorumMember>)> {
        let servers = self.servers.iter().map(|(name, connection)| {
            let server: Arc<dyn QuorumMember> = Arc::new(RedisStore {
                servers: Servers::One(connection.clone()),
                replicas: None,
                namespace: self.namespace.clone(),
            });
            (name.clone(), server)
        });
        servers.collect()
    }
}

impl Connecting for Members {
    fn ready(&self) -> BoxFuture<'_, Result<(), LockError>> {
        Box::pin(self.wait_for_majority())
    }
}

impl Members {
    /// Waits until a majority is connected.
    async fn wait_for_majority(&self) -> Result<(), LockError> {
        let Self { servers, runs, .. } = self;
        let ready = async |(index, (_, server)): (usize, &(String, Arc<Connection>))| {
            (index, server.ready().await)
        };
        let mut answers: FuturesUnordered<_> = servers.iter().enumerate().map(ready).collect();
        let mut said: Vec<Option<Result<(), StoreError>>> = vec![None; servers.len()];
        let (mut standing, majority) = (0, majority(servers.len()));
        let mut until = Instant::now() + CONNECT;
        while let Some((index, answer)) = tokio::select! {
            answer = answers.next() => answer,
            () = sleep_until(until) => None,
        } {
            standing += usize::from(answer.is_ok());
            said[index] = Some(answer);
            if standing >= majority {
                until = until.min(Instant::now() + STRAGGLERS);
            }
        }
        let mut each = Vec::with_capacity(servers.len());
        for ((name, _), said) in servers.iter().zip(said) {
            each.push(match said {
                Some(Ok(())) => format!("{name}: answers"),
                // A permanent error is better reported at the start.
                Some(Err(error)) if error.kind() != StoreErrorKind::Unavailable => {
                    // The second name of a server has other settings than the first one, whichever
                    // name registers first.
                    let error = runs.check(name).err().unwrap_or(error);
                    return Err(cannot_keep_locks(&format!("at {name}"), error));
                }
                Some(Err(error)) => {
                    tracing::warn!(server = %name, %error, "the server does not answer");
                    format!("{name}: {error}")
                }
                None => format!("{name}: no answer within {CONNECT:?}"),
            });
        }
        if standing >= majority {
            return Ok(());
        }
        let (count, each) = (servers.len(), each.join("; "));
        let message = format!("{majority} of {count} servers are needed: {each}");
        Err(LockError::new(LockErrorKind::Unavailable, message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_url_of_several_servers_is_a_list_of_theirs() {
        for scheme in ["redlock", "RedLock"] {
            let urls = format!("{scheme}:redis://a,rediss://:pw@b:7, unix:///c");
            let urls = urls_of(&urls).unwrap();
            assert_eq!(urls, ["redis://a", "rediss://:pw@b:7", "unix:///c"]);
        }
    }

    #[test]
    fn what_it_cannot_mean_is_refused_with_a_right_one() {
        for (urls, word) in [
            ("", "empty"),
            ("//a,b,c", "its own redis://"),
            ("redis://:hunter2@a", "1 servers"),
            ("redis://a,redis://:hunter2@b", "2 servers"),
            ("redis://a,redis://b,redis://c,redis://:hunter2@d", "odd"),
            ("redis://a,,redis://b", "empty"),
        ] {
            let url = format!("redlock:{urls}");
            REDLOCK.assert_refused(&url, &urls_of(&url).unwrap_err(), word);
        }
    }
}
