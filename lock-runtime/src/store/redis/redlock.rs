//! Connects to several independent servers: from their URLs to the store over all of them.

use std::{collections::HashMap, sync::Arc, time::Duration};

use futures_util::{StreamExt as _, stream::FuturesUnordered};
use tokio::time::{Instant, sleep_until};

use super::{
    CONNECT, RedisStore, cannot_keep_locks, check_namespace, connection::Connection,
    servers::Servers, settings::RedisOptions, url::REDLOCK,
};
use crate::{
    error::{LockError, LockErrorKind},
    runtime,
    store::{QuorumMember, QuorumStore, StoreError, StoreErrorKind, check_count, majority},
};

/// The time that the other servers have to report an error once a majority is connected.
const STRAGGLERS: Duration = Duration::from_millis(300);

/// The URLs in `redlock:url,url,url`; `None` for any other URL.
///
/// # Errors
/// `InvalidUrl`, without the URL, which may contain a password.
pub(crate) fn urls_of(url: &str) -> Result<Option<Vec<&str>>, LockError> {
    let list = match url.split_once(':') {
        Some((scheme, list)) if scheme.eq_ignore_ascii_case("redlock") => list,
        _ => return Ok(None),
    };
    let urls: Vec<_> = list.split(',').map(str::trim).collect();
    if list.starts_with("//") {
        let complaint =
            "after \"redlock:\" the URLs of the servers follow, each with its own redis://";
        Err(REDLOCK.refuse(complaint))
    } else if urls.iter().any(|url| url.is_empty()) {
        Err(REDLOCK.refuse("the URL of one of the servers is empty"))
    } else {
        check_count(urls.len()).map_err(|refused| REDLOCK.refuse(refused))?;
        Ok(Some(urls))
    }
}

/// Connects to all servers at once. A majority has to answer.
///
/// # Errors
/// `InvalidUrl`, `InvalidSpec`; a permanent error of one of the servers; `Unavailable` if too few
/// servers answer.
pub(crate) async fn connect(
    urls: &[&str],
    namespace: &str,
    longest_lease: Duration,
    settings: &RedisOptions,
) -> Result<QuorumStore, LockError> {
    check_namespace(namespace)?;
    check_count(urls.len())?;
    // Each connection is established in a task of its own.
    runtime::check()?;
    let mut servers = Vec::with_capacity(urls.len());
    for server in urls {
        let client = REDLOCK.client(server, settings)?;
        let name = client.get_connection_info().addr().to_string();
        if servers.iter().any(|(other, _)| *other == name) {
            return Err(same_server(&name, &name));
        }
        let connection = Connection::member(client, namespace, longest_lease);
        servers.push((name, connection));
    }
    stand(&servers).await?;
    let mut runs = HashMap::new();
    for (name, server) in &servers {
        if let Some(run_id) = server
            .dial
            .tenure()
            .and_then(|tenure| tenure.run_id.clone())
            && let Some(other) = runs.insert(run_id, name)
        {
            return Err(same_server(other, name));
        }
    }
    let servers = servers.into_iter().map(|(name, connection)| {
        let servers = Servers::One(Box::new(connection));
        let server = RedisStore {
            servers,
            replicas: None,
            namespace: namespace.to_owned(),
        };
        (name, Arc::new(server) as Arc<dyn QuorumMember>)
    });
    QuorumStore::new(servers, longest_lease)
}

fn same_server(one: &str, other: &str) -> LockError {
    REDLOCK.refuse(format!(
        "{one} and {other} are the same server, which would have two votes"
    ))
}

/// Waits until a majority is connected.
async fn stand(servers: &[(String, Connection)]) -> Result<(), LockError> {
    let mut answers: FuturesUnordered<_> = servers
        .iter()
        .enumerate()
        .map(async |(index, (_, server))| (index, server.ready().await))
        .collect();
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
    for ((name, _), said) in servers.iter().zip(&said) {
        let Some(Err(error)) = said else { continue };
        // A permanent error is better reported at the start.
        if error.kind() != StoreErrorKind::Unavailable {
            return Err(cannot_keep_locks(name, error.clone()));
        }
        tracing::warn!(server = %name, %error, "the server does not answer");
    }
    if standing >= majority {
        return Ok(());
    }
    let each = servers
        .iter()
        .zip(said)
        .map(|((name, _), said)| match said {
            Some(Ok(())) => format!("{name}: answers"),
            Some(Err(error)) => format!("{name}: {error}"),
            None => format!("{name}: no answer within {CONNECT:?}"),
        });
    let message = format!(
        "{majority} of {} servers are needed: {}",
        servers.len(),
        each.collect::<Vec<_>>().join("; ")
    );
    Err(LockError::new(LockErrorKind::Unavailable, message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_url_of_several_servers_is_a_list_of_theirs() {
        assert_eq!(urls_of("redis://a").unwrap(), None);
        for scheme in ["redlock", "RedLock"] {
            let urls = format!("{scheme}:redis://a,rediss://:pw@b:7, unix:///c");
            let urls = urls_of(&urls).unwrap().unwrap();
            assert_eq!(urls, ["redis://a", "rediss://:pw@b:7", "unix:///c"]);
        }
    }

    #[test]
    fn what_it_cannot_mean_is_refused_with_a_right_one() {
        for (url, word) in [
            ("redlock:", "empty"),
            ("redlock://a,b,c", "its own redis://"),
            ("redlock:redis://:hunter2@a", "1 servers"),
            ("redlock:redis://a,redis://:hunter2@b", "2 servers"),
            (
                "redlock:redis://a,redis://b,redis://c,redis://:hunter2@d",
                "odd",
            ),
            ("redlock:redis://a,,redis://b", "empty"),
        ] {
            REDLOCK.assert_refused(url, &urls_of(url).unwrap_err(), word);
        }
    }
}
