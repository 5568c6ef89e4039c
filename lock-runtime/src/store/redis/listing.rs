//! The list of a store's locks, and the names of its clients.

use redis::{Cmd, Value};

use super::{
    RedisStore,
    names::{client_name, key_of},
    outage::InOutage,
    reply::{text, unexpected},
    scripts::{self, Call},
    servers::Servers,
};
use crate::{
    key::LockKey,
    spec::LockKind,
    store::{ClientId, Cursor, IDENTITY_TTL, Page, StoreError},
};

/// The number of keys that a server visits for one page. It takes less than a millisecond, in
/// which the server does nothing else.
const VISITED: u32 = 1000;
/// The number of names that one script reads.
const NAMES_AT_ONCE: usize = 256;

/// The keys of one step of `SCAN`, and the place of the next one; 0 after the last one.
pub(super) struct Scanned {
    pub(super) next: u64,
    keys: Vec<Value>,
}

impl Scanned {
    /// Returns the command that visits some keys from `place` on.
    pub(super) fn question(place: u64, pattern: &str) -> Cmd {
        let mut scan = redis::cmd("SCAN");
        scan.arg(place).arg("MATCH").arg(pattern);
        scan.arg("COUNT").arg(VISITED);
        scan
    }

    pub(super) fn parse(reply: Value) -> Result<Self, StoreError> {
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
    pub(super) async fn introduce_client(
        &self,
        client: ClientId,
        name: &str,
    ) -> Result<(), StoreError> {
        let call = Call::new(&scripts::INTRODUCE, 1).arg(client_name(&self.namespace, client));
        let reply = self.run(call.arg(name).millis(IDENTITY_TTL)).await?;
        match reply.word() {
            "ok" => Ok(()),
            _ => Err(unexpected()),
        }
    }

    pub(super) async fn client_names(
        &self,
        clients: &[ClientId],
    ) -> Result<Vec<Option<String>>, StoreError> {
        // In a cluster, each name is in a slot of its own.
        let at_once = match self.servers {
            Servers::One(_) => NAMES_AT_ONCE,
            Servers::Cluster(_) => 1,
        };
        let groups: Vec<_> = clients.chunks(at_once).collect();
        let call = |index: usize| {
            let group: &[ClientId] = groups[index];
            let names = group.iter().map(|id| client_name(&self.namespace, *id));
            names.fold(Call::new(&scripts::NAMES, group.len()), Call::arg)
        };
        let mut names = Vec::with_capacity(clients.len());
        let waits = InOutage::Wait;
        let answers = self.servers.call_each(groups.len(), &call, waits).await;
        let mut failed = None;
        for (group, answer) in groups.iter().zip(answers) {
            match answer.and_then(|mut answer| answer.reply()) {
                Ok(mut reply) => names.extend(reply.texts()),
                // Another node of the cluster may have the names of the others.
                Err(error) => {
                    names.extend(group.iter().map(|_| None));
                    failed = Some(error);
                }
            }
        }
        match failed {
            Some(error) if names.iter().all(Option::is_none) => Err(error),
            _ => Ok(names),
        }
    }

    pub(super) async fn page(
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
                let place = cursor.map_or(Ok(0), str::parse);
                let place = place.map_err(|_| unexpected())?;
                let question = Scanned::question(place, &pattern);
                let scanned = Scanned::parse(connection.ask(&question).await?)?;
                let next = (scanned.next > 0).then(|| scanned.next.to_string());
                (Some(scanned), next, None)
            }
            Servers::Cluster(cluster) => Box::pin(cluster.page(&pattern, cursor)).await?,
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

/// Escapes a text for a pattern.
pub(super) fn literally(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        if matches!(c, '*' | '?' | '[' | ']' | '\\' | '^') {
            escaped.push('\\');
        }
        escaped.push(c);
    }
    escaped
}
