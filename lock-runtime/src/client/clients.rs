//! The names of other clients, as the store knows them.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex},
    time::Duration,
};

use foldhash::fast::RandomState;
use futures_util::{
    FutureExt as _,
    future::{BoxFuture, Shared},
};

use crate::{
    observe::text::Short,
    request::key::LockKey,
    request::spec::LockKind,
    shell::call::within,
    shell::runtime,
    shell::sync::lock,
    shell::time::{Instant, timeout_at},
    store::{ClientId, Holder, Identity, Inspection, Store, presentable},
};

/// The largest number of names that are kept.
const KEPT: usize = 10_000;
/// The longest time by which the names delay an inspection.
const NAMING: Duration = Duration::from_millis(300);
/// The longest time by which the name of the holder delays an error.
const DESCRIBING: Duration = Duration::from_millis(100);
/// The time for which errors of the same lock share a description of its holder.
const FRESH: Duration = Duration::from_millis(100);

/// A description, and when it was asked for.
type Described = (Instant, Shared<BoxFuture<'static, Option<Arc<str>>>>);

/// The names that were looked up so far. The name of a client never changes.
pub(crate) struct ClientNames {
    store: Arc<dyn Store>,
    /// The client itself.
    own: Option<(ClientId, Arc<str>)>,
    names: Mutex<HashMap<ClientId, Arc<str>, RandomState>>,
    /// The holders that errors describe: many requests for a lock may time out at once.
    described: Mutex<HashMap<(LockKey, LockKind), Described, RandomState>>,
}

impl ClientNames {
    /// The names in a store, of which a client knows its own.
    pub(crate) fn new(store: Arc<dyn Store>, own: Option<(ClientId, Arc<str>)>) -> Self {
        Self {
            store,
            own,
            names: Mutex::default(),
            described: Mutex::default(),
        }
    }

    fn get(&self, client: ClientId) -> Option<Arc<str>> {
        match &self.own {
            Some((id, name)) if *id == client => Some(name.clone()),
            _ => lock(&self.names).get(&client).cloned(),
        }
    }

    fn learn(&self, client: ClientId, name: &str) -> Arc<str> {
        let mut names = lock(&self.names);
        if names.len() >= KEPT {
            names.clear();
        }
        let name: Arc<str> = presentable(name);
        names.insert(client, name.clone());
        name
    }

    /// Adds the names of the clients to what a store has returned, as far as the store replies with
    /// them: an inspection without names is better than none.
    pub(crate) async fn add_names(&self, seen: &mut [Inspection]) {
        let (mut unknown, mut new) = (HashSet::new(), HashMap::new());
        for client in clients(seen) {
            if let Identity::Client { id, name: None } = client
                && self.get(*id).is_none()
            {
                unknown.insert(*id);
            }
        }
        if !unknown.is_empty() {
            let unknown: Vec<_> = unknown.into_iter().collect();
            let names = within(NAMING, self.store.names_of(&unknown)).await;
            if let Err(error) = &names {
                tracing::debug!(%error, "the names of clients are not known");
            }
            for (id, name) in unknown.into_iter().zip(names.unwrap_or_default()) {
                if let Some(name) = name {
                    new.insert(id, self.learn(id, &name));
                }
            }
        }
        for client in clients(seen) {
            if let Identity::Client { id, name } = client {
                let found = || new.get(id).cloned().or_else(|| self.get(*id));
                *name = name.take().or_else(found);
            }
        }
    }

    /// Describes the holder of a lock for an error, such as `held by orders@web-3:4711 for 12s`.
    /// Returns `None` if the lock is free, or if the store does not reply soon.
    pub(crate) async fn describe_holder(
        self: &Arc<Self>,
        key: &LockKey,
        kind: LockKind,
    ) -> Option<Arc<str>> {
        let runtime = runtime::current().ok()?;
        let described = {
            let (mut all, now) = (lock(&self.described), Instant::now());
            all.retain(|_, (since, _)| now < *since + FRESH);
            let describe = || {
                let (names, key) = (self.clone(), key.clone());
                let describing = async move {
                    let until = Instant::now() + DESCRIBING;
                    let holders = within(DESCRIBING, names.store.holders(&key, kind))
                        .await
                        .ok()?;
                    let first = Inspection {
                        holders: holders.first().cloned().into_iter().collect(),
                        ..Inspection::default()
                    };
                    let mut seen = [first];
                    // Without its name if that takes too long.
                    let _ = timeout_at(until, names.add_names(&mut seen)).await;
                    Some(description(seen[0].holders.first()?, holders.len() - 1))
                };
                // A task of its own: the map belongs to these names, which the future keeps alive,
                // and the errors that wait for it may be dropped.
                let describing = runtime.spawn(describing);
                describing.map(|found| found.ok()?).boxed().shared()
            };
            let entry = all.entry((key.clone(), kind));
            entry.or_insert_with(|| (now, describe())).1.clone()
        };
        described.await
    }
}

fn description(first: &Holder, others: usize) -> Arc<str> {
    let state = match (first.is_done, first.is_reservation) {
        (true, _) => "done",
        (false, true) => "reserved",
        (false, false) => "held",
    };
    let mut text = format!("{state} by {}", first.client);
    if let Some(held_for) = first.held_for {
        let whole = match held_for.as_secs() {
            0 => Duration::from_millis(held_for.subsec_millis().into()),
            seconds => Duration::from_secs(seconds),
        };
        text += &format!(" for {}", Short(whole));
    }
    match others {
        0 => {}
        1 => text += " and one other",
        count => text += &format!(" and {count} others"),
    }
    text.into()
}

fn clients(seen: &mut [Inspection]) -> impl Iterator<Item = &mut Identity> {
    seen.iter_mut().flat_map(|one| {
        let holders = one.holders.iter_mut().map(|holder| &mut holder.client);
        holders.chain(one.waiters.iter_mut().map(|waiter| &mut waiter.client))
    })
}
