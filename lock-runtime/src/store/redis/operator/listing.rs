//! The list of a store's locks, and what its clients have recorded about themselves: their names,
//! and since when their readers and permits hold locks.

use std::time::Duration;

use futures_util::future::{OptionFuture, join, join_all};
use redis::{Cmd, Value};

use super::{
    super::{
        RedisStore,
        script::{
            self, Call, Script,
            names::{client_name, grants_name, key_of},
            reply::{text, unexpected},
        },
        topology::servers::Servers,
    },
    acl::literally,
};
use crate::{
    request::{
        key::LockKey,
        spec::{LockKind, Mode},
    },
    shell::call::within,
    store::{ClientId, Cursor, Holder, HolderId, Identity, Page, StoreError, StoreErrorKind},
};

/// The number of keys that a server visits for one page. It takes less than a millisecond, in
/// which the server does nothing else.
const VISITED: u32 = 1000;
/// The time for which the texts of a node are awaited.
const TEXTS: Duration = Duration::from_millis(200);
/// The number of texts that one script reads.
const TEXTS_AT_ONCE: usize = 256;

/// The keys of one step of `SCAN`, and the place of the next one; 0 after the last one.
pub(crate) struct Scanned {
    pub(crate) next: u64,
    keys: Vec<Value>,
}

impl Scanned {
    /// Returns the command that visits some keys from `place` on.
    pub(crate) fn question(place: u64, pattern: &str) -> Cmd {
        let mut scan = redis::cmd("SCAN");
        scan.arg(place).arg("MATCH").arg(pattern);
        scan.arg("COUNT").arg(VISITED);
        scan
    }

    pub(crate) fn parse(reply: Value) -> Result<Self, StoreError> {
        let Value::Array(parts) = reply else {
            return Err(unexpected());
        };
        let Ok([next, Value::Array(keys)]) = <[Value; 2]>::try_from(parts) else {
            return Err(unexpected());
        };
        let next = text(&next).and_then(|next| next.parse().ok());
        let next = next.ok_or_else(unexpected)?;
        Ok(Self { next, keys })
    }
}

impl RedisStore {
    pub(crate) async fn introduce_client(
        &self,
        client: ClientId,
        name: &str,
        grants: &[(HolderId, Duration)],
        keep_for: Duration,
    ) -> Result<(), StoreError> {
        // The server takes no time of zero.
        let kept_for = keep_for.max(Duration::from_millis(1));
        let call = Call::new(&script::INTRODUCE, 1).arg(client_name(&self.namespace, client));
        let named = self.run(call.arg(name).millis(kept_for));
        // In a cluster, the two keys are on different nodes.
        let call = Call::new(&script::SINCE, 1).arg(grants_name(&self.namespace, client));
        let since = grants
            .iter()
            .fold(call.millis(kept_for), |call, (id, age)| {
                call.arg(id.to_string()).millis(*age)
            });
        let has_grants = !grants.is_empty() || keep_for.is_zero();
        let since = has_grants.then(|| self.run(since));
        let (named, since) = join(named, OptionFuture::from(since)).await;
        for reply in [Some(named), since].into_iter().flatten() {
            if reply?.word() != "ok" {
                return Err(unexpected());
            }
        }
        Ok(())
    }

    pub(crate) async fn client_names(
        &self,
        clients: &[ClientId],
    ) -> Result<Vec<Option<String>>, StoreError> {
        let name = |id: &ClientId| client_name(&self.namespace, *id);
        self.texts(&script::NAMES, clients, name, |_| None).await
    }

    /// Adds the times since the grants of readers and permits, as far as their clients have
    /// recorded them.
    pub(crate) async fn add_ages(&self, holders: &mut [Holder]) {
        let client = |holder: &Holder| match holder.client {
            Identity::Client { id, .. } if holder.mode != Mode::Exclusive => Some(id),
            _ => None,
        };
        let (asked, shares): (Vec<_>, Vec<_>) = holders
            .iter_mut()
            .filter_map(|holder| Some(((client(holder)?, holder.id), holder)))
            .unzip();
        let name = |asked: &(ClientId, HolderId)| grants_name(&self.namespace, asked.0);
        let id = |asked: &(ClientId, HolderId)| Some(asked.1.to_string());
        let ages = self.texts(&script::AGES, &asked, name, id).await;
        for (holder, age) in shares.into_iter().zip(ages.unwrap_or_default()) {
            let age = age.and_then(|age| age.parse().ok());
            holder.held_for = age.map(Duration::from_millis);
        }
    }

    /// Runs a script that returns a text for each of its keys, of which each may have an argument.
    async fn texts<T>(
        &self,
        script: &'static Script,
        asked: &[T],
        key: impl Fn(&T) -> String,
        arg: impl Fn(&T) -> Option<String>,
    ) -> Result<Vec<Option<String>>, StoreError> {
        // In a cluster, each key is in a slot of its own.
        let at_once = match self.servers {
            Servers::One(_) => TEXTS_AT_ONCE,
            Servers::Cluster(_) => 1,
            #[cfg(all(test, feature = "records"))]
            Servers::Simulated(_) => unreachable!("no simulator asks for it"),
        };
        let groups = asked.chunks(at_once);
        let replies = groups.clone().map(|group| {
            let call = Call::new(script, group.len());
            let args = group.iter().map(&key);
            let call = args
                .chain(group.iter().filter_map(&arg))
                .fold(call, Call::arg);
            within(TEXTS, Box::pin(self.run(call)))
        });
        let mut texts = Vec::with_capacity(asked.len());
        let mut failed = None;
        for (group, reply) in groups.zip(join_all(replies).await) {
            match reply {
                Ok(mut reply) => texts.extend(reply.texts()),
                // Other nodes of the cluster have the texts of others.
                Err(error) => {
                    texts.extend(group.iter().map(|_| None));
                    failed = Some(error);
                }
            }
        }
        match failed {
            Some(error) if texts.iter().all(Option::is_none) => Err(error),
            _ => Ok(texts),
        }
    }

    pub(crate) async fn page(
        &self,
        prefix: &str,
        cursor: Option<Cursor>,
    ) -> Result<Page, StoreError> {
        // Between the namespace and the prefix there may be the word for permits.
        let (namespace, name) = (literally(&self.namespace), literally(prefix));
        let pattern = match prefix {
            "" => format!("{namespace}:*"),
            _ => format!("{namespace}:*{name}*"),
        };
        let cursor = cursor.as_ref().map(Cursor::as_str);
        let (scanned, next, missing) = match &self.servers {
            Servers::One(connection) => {
                let begun = cursor.map(place_and_attempts);
                let begun = begun.transpose()?;
                let place = begun.map_or(0, |(place, _)| place);
                let question = Scanned::question(place, &pattern);
                let scanned =
                    Scanned::parse(connection.ask(&question).await.map_err(scan_refused)?)?;
                let attempts = connection.attempts();
                // Another server, or the same one after a restart, has the keys in another order.
                let is_another = begun.is_some_and(|(_, before)| before != attempts);
                let next = match is_another {
                    true => Some(0),
                    false => Some(scanned.next).filter(|next| *next > 0),
                };
                (
                    Some(scanned),
                    next.map(|next| format!("{next} {attempts}")),
                    None,
                )
            }
            Servers::Cluster(cluster) => {
                let page = Box::pin(cluster.page(&pattern, cursor)).await?;
                (page.0, page.1, page.2.map(scan_refused))
            }
            #[cfg(all(test, feature = "records"))]
            Servers::Simulated(_) => unreachable!("no simulator asks for it"),
        };
        let keys = scanned.map(|scanned| scanned.keys).unwrap_or_default();
        let locks = keys
            .iter()
            .filter_map(|key| self.lock_of(text(key)?, prefix));
        Ok(Page::new(locks.collect(), next.map(Cursor::new)).missing(missing))
    }

    /// The lock that is kept under `key`, if its name begins with `prefix`.
    fn lock_of(&self, key: &str, prefix: &str) -> Option<(LockKey, LockKind)> {
        let of_kind = |kind| Some((key_of(&self.namespace, key, kind)?, kind));
        let (name, kind) = of_kind(LockKind::Permits).or_else(|| of_kind(LockKind::Lock))?;
        let is_listed = name.starts_with(prefix);
        is_listed
            .then(|| LockKey::new(name).ok())
            .flatten()
            .zip(Some(kind))
    }
}

/// The error with the right that only a list needs.
fn scan_refused(error: StoreError) -> StoreError {
    if error.kind() != StoreErrorKind::Forbidden {
        return error;
    }
    let message = "the server's access rules deny the command SCAN, which only a list needs; allow it with: ACL SETUSER <user> +scan";
    StoreError::new(StoreErrorKind::Forbidden, message)
}

/// The place in the list of one server, and the connection that it belongs to.
fn place_and_attempts(cursor: &str) -> Result<(u64, u64), StoreError> {
    let numbers = cursor
        .split_once(' ')
        .map(|(place, attempts)| (place.parse(), attempts.parse()));
    match numbers {
        Some((Ok(place), Ok(attempts))) => Ok((place, attempts)),
        _ => Err(unexpected()),
    }
}
