//! The current primary, for which its Sentinels are queried before each connection to it.
//!
//! [`Votes`] evaluates the answers without I/O, and [`watch`] listens for another primary while a
//! connection is up. A Sentinel that was cut off or has just started may name an old primary. Each
//! answer has the epoch of its configuration, and the largest epoch among the answers of a
//! majority is the latest that a majority has agreed on
//! (<https://redis.io/docs/latest/operate/oss_and_stack/management/sentinel/>). Whether the named
//! server is a primary is checked on the connection to it.

#[cfg(test)]
#[path = "../../../../../fuzz/sentinel.rs"]
mod fuzz;
mod health;
mod votes;
mod watch;

use std::{
    collections::HashMap,
    fmt,
    sync::{Mutex, Once},
    time::Duration,
};

use futures_util::{StreamExt as _, stream::FuturesUnordered};
use redis::{
    AsyncConnectionConfig, ConnectionInfo, RedisError, ServerError, Value, aio::ConnectionLike as _,
};
use tokio::time::timeout;

pub(crate) use self::votes::Named;
use self::votes::{SentinelAnswer, Votes};
use super::super::{
    connection::endpoint::{Endpoint, is_tls},
    error,
    operator::acl::AclLine,
    settings::RedisOptions,
};
use super::cluster::slots::is_host;
use crate::{
    error::LockError,
    shell::{sync::lock, time::Instant},
    store::{StoreError, StoreErrorKind},
};

/// The time limit for one Sentinel, its connection included. It matters only if no
/// majority has answered.
const PATIENCE: Duration = Duration::from_millis(500);
/// The time for which a notification of a single Sentinel is trusted. After that the others know
/// the new primary.
const HEARD: Duration = Duration::from_secs(10);

/// The Sentinels that monitor one primary, and the connection settings of that primary.
pub(crate) struct Sentinels {
    pub(crate) name: String,
    /// Credentials, database and TLS settings of the primary, whichever server it is. The address
    /// is a placeholder.
    pub(crate) primary: Endpoint,
    pub(crate) sentinels: Vec<Endpoint>,
    /// The latest primary that one of them has announced. A std mutex: it is held for a copy only.
    heard: Mutex<Option<(Named, Instant)>>,
    /// Limits the warning about missing notifications to one.
    warned: Once,
}

impl Sentinels {
    /// # Errors
    /// `InvalidSpec` for certificates that cannot be used.
    pub(crate) fn new(
        name: String,
        primary: ConnectionInfo,
        sentinels: Vec<ConnectionInfo>,
        settings: &RedisOptions,
    ) -> Result<Self, LockError> {
        let sentinels = sentinels.into_iter().map(|info| settings.sentinel(info));
        Ok(Self {
            name,
            primary: settings.endpoint(primary)?,
            sentinels: sentinels.collect::<Result<_, _>>()?,
            heard: Mutex::default(),
            warned: Once::new(),
        })
    }

    /// The current address of the primary, and how to connect to it.
    ///
    /// # Errors
    /// The kind of error on which all Sentinels agree, or `Unavailable`. The message contains the
    /// answer of each Sentinel.
    pub(crate) async fn primary(&self) -> Result<(Named, Endpoint), StoreError> {
        let mut votes = Votes::new(self.sentinels.len());
        let ask = async |(index, sentinel)| (index, ask(sentinel, &self.name).await);
        let mut asked: FuturesUnordered<_> = self.sentinels.iter().enumerate().map(ask).collect();
        while let Some((index, answer)) = asked.next().await {
            if votes.take(index, answer) {
                break;
            }
        }
        let heard = lock(&self.heard).clone();
        let heard = heard.filter(|(_, at)| at.elapsed() < HEARD);
        let Some(elected) = votes.elected(heard.as_ref().map(|(named, _)| named)) else {
            return Err(self.unknown(&votes));
        };
        tracing::debug!(primary = %elected, name = self.name, "the Sentinels name the primary");
        let primary = self.primary.at(elected.host.clone(), elected.port);
        Ok((elected.clone(), primary))
    }

    fn unknown(&self, votes: &Votes) -> StoreError {
        let said = |(address, answer): (String, &Option<SentinelAnswer>)| match answer {
            Some(SentinelAnswer::Failed(error)) => format!("{address}: {error}"),
            Some(SentinelAnswer::Unknown) => format!("{address}: no such primary"),
            Some(SentinelAnswer::Named(_)) | None => format!("{address}: no answer"),
        };
        let said: Vec<_> = self.addresses().zip(&votes.answers).map(said).collect();
        let (name, said) = (&self.name, said.join(" | "));
        let message = format!("no Sentinel knows where the primary {name:?} is: {said}");
        StoreError::new(votes.failure(), message)
    }

    pub(crate) fn addresses(&self) -> impl Iterator<Item = String> {
        self.sentinels.iter().map(Endpoint::to_string)
    }
}

impl fmt::Display for Sentinels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, sentinels) = (&self.name, self.addresses().collect::<Vec<_>>().join(","));
        write!(f, "the primary {name:?} of the Sentinels {sentinels}")
    }
}

async fn ask(sentinel: &Endpoint, name: &str) -> SentinelAnswer {
    let tls = is_tls(sentinel.info.addr());
    let failed = |cause: RedisError| match cause.is_timeout() {
        true => StoreError::timed_out(PATIENCE),
        false => in_words_of_a_sentinel(error::unconnected(&cause, tls, &AclLine::new("", 0))),
    };
    let questions = async {
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(None)
            .set_response_timeout(None);
        let (door, _) = sentinel.door().await?;
        let (mut connection, _driver) = door.open(&config).await.map_err(failed)?;
        let mut questions = redis::pipe();
        // The Sentinel that leads a failover names the old primary in its first reply, but with
        // the new epoch, until every replica follows the new primary. Its second reply names the
        // new primary. The order matters, as the Sentinel may change its view between the two: at
        // worst a new address has an old epoch, and is outvoted by the others.
        for query in ["MASTER", "GET-MASTER-ADDR-BY-NAME"] {
            questions.cmd("SENTINEL").arg(query).arg(name);
        }
        let answers = connection.req_packed_commands(&questions, 0, 2).await;
        answers.map_err(failed)
    };
    match timeout(PATIENCE, questions).await {
        Ok(Ok(answers)) => answer(answers),
        Ok(Err(error)) => SentinelAnswer::Failed(error),
        Err(_) => SentinelAnswer::Failed(StoreError::timed_out(PATIENCE)),
    }
}

fn answer(answers: Vec<Value>) -> SentinelAnswer {
    let (primary, address) = match <[Value; 2]>::try_from(answers) {
        Ok([Value::ServerError(refusal), _] | [_, Value::ServerError(refusal)]) => {
            return refused(&refusal);
        }
        Ok([primary, address]) => (primary, address),
        Err(_) => return SentinelAnswer::Failed(no_sentinel()),
    };
    let fields: HashMap<String, String> = redis::from_redis_value(primary).unwrap_or_default();
    let epoch = fields.get("config-epoch").map(|epoch| epoch.parse());
    let named: Option<(String, u16)> = redis::from_redis_value(address).ok();
    match (named.filter(|(host, _)| is_host(host)), epoch) {
        (Some((host, port)), Some(Ok(epoch))) => SentinelAnswer::Named(Named { host, port, epoch }),
        _ => SentinelAnswer::Failed(no_sentinel()),
    }
}

fn refused(refusal: &ServerError) -> SentinelAnswer {
    let details = refusal.details().unwrap_or_default();
    if details.starts_with("No such master") {
        return SentinelAnswer::Unknown;
    }
    let error = error::refused(refusal, &AclLine::new("", 0));
    SentinelAnswer::Failed(in_words_of_a_sentinel(error))
}

/// Replaces the remedy of an error with that for a Sentinel.
fn in_words_of_a_sentinel(error: StoreError) -> StoreError {
    let kind = error.kind();
    match kind {
        StoreErrorKind::Unauthenticated => StoreError::new(
            kind,
            "it refused the user name and password for Sentinels, or requires them (sentinel_user and sentinel_password in \
             the URL, or `RedisOptions::sentinel_credentials`)",
        ),
        StoreErrorKind::Forbidden => {
            let remedy =
                format!("its access rules forbid the query; allow it with: {SENTINEL_ACL}");
            StoreError::new(kind, remedy)
        }
        StoreErrorKind::WrongServer => no_sentinel(),
        _ => error,
    }
}

/// The access rules that a user needs on a Sentinel.
const SENTINEL_ACL: &str =
    "ACL SETUSER <user> on ><password> +sentinel|master +sentinel|get-master-addr-by-name";

fn no_sentinel() -> StoreError {
    error::wrong_server("it is not a Sentinel; Sentinels usually listen on port 26379")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_is_that_of_the_second_answer() {
        let texts = |texts: &[&str]| {
            let texts = texts.iter().map(|text| Value::BulkString((*text).into()));
            Value::Array(texts.collect())
        };
        let fields = |ip: &str| texts(&["ip", ip, "port", "1", "config-epoch", "5"]);
        let SentinelAnswer::Named(named) = answer(vec![fields("old"), texts(&["::1", "6380"])])
        else {
            panic!("it is named")
        };
        let (host, port, epoch) = ("::1".into(), 6380, 5);
        assert_eq!(named, Named { host, port, epoch });
        let no_address = vec![fields("a"), Value::Nil];
        let no_host = vec![fields("a"), texts(&["a\u{1b}[2J", "6380"])];
        for other in [vec![], vec![Value::Okay, Value::Nil], no_address, no_host] {
            let SentinelAnswer::Failed(error) = answer(other) else {
                panic!("it is not a Sentinel")
            };
            assert_eq!(error.kind(), StoreErrorKind::WrongServer);
        }
    }
}
